"""Serves what exists: Deployments and StatefulSets that are annotated, through their scale subresource. I/O.

Watches them, who else scales them, and their pods; gives the Models that they serve, and is the driver of those Models'
Replicas. Promises: nothing of a pod template is ever written, nor anything at all before a Replica is ordered; a scale
is applied server-side (a merge patch to 0 would leave it nobody's); a person's scale holds for `hold_s`; annotations
that are wrong harm nobody else, and the last good ones of that object stay in force while this process runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.drivers import probes
from autoscaler.drivers.base import Observe
from autoscaler.drivers.kubernetes import adopting
from autoscaler.drivers.kubernetes.adoptable import (
    CONTROLLERS,
    Kind,
    ScalerSeen,
    TargetKey,
    TargetSeen,
    read_scaler,
    read_target,
)
from autoscaler.drivers.kubernetes.adoptedpod import EXITED, unbound
from autoscaler.drivers.kubernetes.adoptee import PLURALS, Adoptee, Means
from autoscaler.drivers.kubernetes.adopting import AnnotationError, Hand, Others
from autoscaler.drivers.kubernetes.api import Api, ApiError, UnreachableError
from autoscaler.drivers.kubernetes.scaling import Mode, Workload
from autoscaler.drivers.kubernetes.watching import Change, Watched
from autoscaler.model import Model
from autoscaler.names import Origin
from autoscaler.world import Replica, Seen, Synced

TARGETS_MAX = 1000
"""Each has a watch of its own pods; more are not served, and that is said."""
ADOPT_SECONDS_MAX = 10.0
"""Synced waits so long for the pods of all of them, and for what tells of other autoscalers."""
SCALERS = (
    ("HorizontalPodAutoscaler", "/apis/autoscaling/v2", "horizontalpodautoscalers"),
    ("ScaledObject", "/apis/keda.sh/v1alpha1", "scaledobjects"),
)

_log = logging.getLogger(__name__)


class Note(NamedTuple):
    """What is to be said on a workload, as an Event."""

    target: TargetKey
    uid: str
    warning: bool
    reason: str
    message: str


class _Target:
    """One workload that is served, or would be if its annotations were right."""

    def __init__(self, seen: TargetSeen) -> None:
        self.seen = seen
        self.hand: Hand | None = None
        self.hand_s = 0.0
        """When that was, by our own clock, which nobody sets."""
        self.model: Model | None = None
        self.good: TargetSeen | None = None
        """As it is, under the last annotations that were right."""
        self.called: ModelName | None = None
        """In the whole installation, where an older Model has its name."""
        self.problem = ""
        self.told = ""
        self.adoptee: Adoptee | None = None
        self.running: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None


class AdoptedDriver:
    """The driver of adopted Models. `namespaces`: only there; None: everywhere. `models` is given all of them, as they
    are now, under names that may be taken: `called` hears which they got. `note` is given what people are to be told.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str] | None,
        models: Callable[[Mapping[Origin, Model]], None],
        *,
        hold_s: Callable[[], float],
        note: Callable[[Note], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        pace: probes.Pace | None = None,
    ) -> None:
        self._api = api
        self._models = models
        self._hold_s = hold_s
        self._note = note
        self._clock = clock
        self._unix_s = api.unix_s
        self._pace = pace or probes.Pace(clock)
        self._tasks = asyncio.TaskGroup()
        self._targets: dict[TargetKey, _Target] = {}
        self._scalers: dict[TargetKey, str] = {}
        self._last: Mapping[Origin, Model] | None = None
        self._listens = False
        self._synced = False
        places = [""] if namespaces is None else [f"/namespaces/{name}" for name in namespaces]
        self._scaler_watches = [
            (
                group,
                Watched(
                    api, f"{group}{place}/{plural}", partial(read_scaler, kind), self._scalers_changed, optional=True
                ),
            )
            for kind, group, plural in SCALERS
            for place in places
        ]
        self._target_watches = [
            Watched(
                api,
                f"/apis/apps/v1{place}/{PLURALS[kind]}",
                partial(read_target, kind),
                self._targets_changed,
                optional=True,
            )
            for kind in CONTROLLERS
            for place in places
        ]

    # --- Driver -------------------------------------------------------------------------------------------------------

    async def run(self, observe: Observe) -> None:
        """Adopts, then observes until cancelled. One run per driver."""
        self._means = Means(self._api, observe, self._clock, self._pace)
        async with self._tasks as tasks:
            for _, scalers in self._scaler_watches:
                tasks.create_task(scalers.run())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_SECONDS_MAX):
                    await asyncio.gather(*(self._heard(*watch) for watch in self._scaler_watches))
            for targets in self._target_watches:
                tasks.create_task(targets.run())
            for targets in self._target_watches:
                await targets.synced.wait()
            self._listens = True
            for key in tuple(self._targets):
                self._judge(key)
            self._publish()
            adoptees = self._adoptees()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_SECONDS_MAX):
                    for adoptee in adoptees:
                        await adoptee.begun.wait()
            self._synced = True
            observe((Synced(),))

    def lead(self) -> None:
        """See SharedDriver; before the first Synced that is to come."""
        for adoptee in self._adoptees():
            adoptee.lead()
        if self._synced:
            self._means.observe((Synced(),))

    async def follow(self) -> None:
        """See SharedDriver."""
        await asyncio.gather(*(adoptee.follow() for adoptee in self._adoptees()))

    def called(self, names: Mapping[Origin, ModelName]) -> None:
        """What each Model is called in the whole installation."""
        for key, target in tuple(self._targets.items()):
            called = names.get(_origin(key))
            if called != target.called:
                target.called = called
                self._judge(key)

    def obstacle(self, model: Model) -> str:
        """What makes a start impossible: there is nothing to scale."""
        key = _key(model)
        target = self._targets.get(key)
        return "" if target is not None and target.adoptee is not None else f"there is no {key}"

    def start(self, replica: Replica, model: Model) -> None:
        """One more of its workload's pods."""
        target = self._targets.get(_key(model))
        if target is None or target.adoptee is None:
            reason = f"there is no {_key(model)}"
            self._means.observe(
                (unbound(replica, Seen.EXITED, reason=reason), unbound(replica, Seen.CLEAN, proof=EXITED))
            )
            return
        target.adoptee.start(replica)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """One less; its time to end is its template's."""
        del grace_s
        for target in tuple(self._targets.values()):
            if target.adoptee is not None and target.adoptee.core.knows(replica.id):
                target.adoptee.stop(replica)
                self._drop_if_over(target)
                return
        self._means.observe((unbound(replica, Seen.CLEAN, proof=EXITED),))

    def _adoptees(self) -> list[Adoptee]:
        return [target.adoptee for target in self._targets.values() if target.adoptee is not None]

    # --- workloads ----------------------------------------------------------------------------------------------------

    def _targets_changed(self, changes: list[Change[TargetSeen]]) -> None:
        for _, old, new in changes:
            if new is not None:
                self._see(new)
            elif old is not None and old.key in self._targets:
                self._release(self._targets[old.key])
        if self._listens:
            self._publish()

    def _see(self, new: TargetSeen) -> None:
        """A workload came or changed."""
        target = self._targets.get(new.key)
        if target is not None and target.seen.uid != new.uid:  # a namesake
            self._release(target, at_once=True)
            target = None
        before = None if target is None else target.seen
        if target is None:
            if len(self._targets) >= TARGETS_MAX:
                self._note(Note(new.key, new.uid, True, "NotServed", f"{TARGETS_MAX} workloads are served already"))
                return
            target = self._targets[new.key] = _Target(new)
        now_unix_s = self._unix_s()
        new = adopting.aged(before, new, now_unix_s)
        hand, target.seen = adopting.hand_of(before, new, target.hand, now_unix_s), new
        if hand is not None and hand is not target.hand:
            target.hand_s = self._clock() - (now_unix_s - hand.at_unix_s)
        target.hand = hand
        if self._listens:
            self._judge(new.key)

    def _scalers_changed(self, changes: list[Change[ScalerSeen]]) -> None:
        for _, old, new in changes:
            if old is not None:
                self._scalers.pop(old.target, None)
            if new is not None:
                self._scalers[new.target] = new.title
            for one in filter(None, (old, new)):
                if self._listens and one.target in self._targets:
                    self._judge(one.target)
        if self._listens:
            self._publish()

    def _judge(self, key: TargetKey) -> None:
        """What is made of a workload as it is now."""
        target = self._targets[key]
        others = self._others(target)
        good: TargetSeen | None = target.seen
        try:
            target.model, target.problem = adopting.model_of(target.seen, others), ""
        except AnnotationError as error:
            target.problem = str(error)
            good = None if target.good is None else target.seen._replace(notes=target.good.notes)
            target.model = None if good is None else adopting.model_of(good, others)
        target.good = good
        self._say(target)
        if target.model is None or good is None:
            return
        model = target.model if target.called is None else replace(target.model, name=target.called)
        mode = Mode.TOGGLE if others.scaler else Mode.HELD if others.hand is not None else Mode.LEVEL
        if target.adoptee is None:
            core = Workload(good, model, mode, self._unix_s() - self._clock())
            target.adoptee = Adoptee(core, self._means)
            target.running = self._tasks.create_task(target.adoptee.run())
        else:
            target.adoptee.core.see_target(good, model, mode, self._clock())
            target.adoptee.settle()

    def _others(self, target: _Target) -> Others:
        """Who else has a say; it is looked at again when a person's scale does not hold any more."""
        if target.timer is not None:
            target.timer.cancel()
            target.timer = None
        scaler, hand = self._scalers.get(target.seen.key, ""), target.hand
        if scaler or hand is None:
            return Others(scaler)
        hold_s = self._hold_s()
        left_s = target.hand_s + hold_s - self._clock()
        if left_s <= 0:
            return Others()
        target.timer = asyncio.get_running_loop().call_later(left_s, self._hold_over, target.seen.key)
        return Others("", hand, hand.at_unix_s + hold_s)

    def _hold_over(self, key: TargetKey) -> None:
        target = self._targets.get(key)
        if target is not None:
            target.hand = None
            self._judge(key)
            self._publish()

    def _release(self, target: _Target, *, at_once: bool = False) -> None:
        """It is gone, or its annotation is: its Replicas are stopped without a write, as the plan says or at once."""
        target.model, target.problem = None, ""
        if target.timer is not None:
            target.timer.cancel()
        if target.adoptee is not None:
            core = target.adoptee.core
            core.see_target(core.target, core.model, Mode.RELEASED, self._clock())
            if at_once:
                core.end_all("its workload is gone")
            target.adoptee.settle()
        self._drop_if_over(target)

    def _drop_if_over(self, target: _Target) -> None:
        if target.model is None and (target.adoptee is None or target.adoptee.core.empty):
            self._targets.pop(target.seen.key, None)
            if target.running is not None:
                target.running.cancel()

    async def _heard(self, group: str, watched: Watched[ScalerSeen]) -> None:
        """All of a kind of autoscalers is known, where the server knows the kind."""
        with contextlib.suppress(ApiError, UnreachableError):
            await self._api.get(group)
            await watched.synced.wait()

    def _publish(self) -> None:
        """All Models."""
        models = {_origin(key): target.model for key, target in self._targets.items() if target.model is not None}
        if models != self._last:
            self._last = models
            self._models(models)

    def _say(self, target: _Target) -> None:
        """An Event for each news about whose the scale is, and for wrong annotations, which are logged, too."""
        adopted = None if target.model is None else target.model.adopted
        said = target.problem or ("" if adopted is None else adopted.message)
        reason = "WrongAnnotation" if target.problem or adopted is None else adopted.reason
        usual = not target.told and reason == adopting.USUAL
        if said not in ("", target.told) and not usual:
            self._note(Note(target.seen.key, target.seen.uid, bool(target.problem), reason, said))
        if target.problem not in ("", target.told):
            _log.warning("not in force %s", target.problem)
        target.told = said


def _origin(key: TargetKey) -> Origin:
    return Origin(*key)


def _key(model: Model) -> TargetKey:
    of = model.adopted
    if of is None:
        raise ValueError(f"Model {model.name} is not adopted")
    kind: Kind = of.kind
    return TargetKey(kind, of.namespace, of.name)
