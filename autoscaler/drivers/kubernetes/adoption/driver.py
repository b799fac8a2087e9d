"""Serves annotated Deployments and StatefulSets, and scales them by their scale subresource. I/O.

Watches the workloads, their pods and other autoscalers, publishes the models, and is the driver of their replicas. The
status of each workload reports the result.

Invariants: a pod template is never written. A scale is written only after a replica was ordered, by server-side apply
(a merge patch to 0 would leave it without a manager). A manual scale holds for `hold_s`. Invalid annotations affect
only their object, whose last valid annotations stay in force while this process runs. The same applies to an exception
while a workload is evaluated: its Model is quarantined, and the workload is evaluated again later (`retry`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.drivers import probes
from autoscaler.drivers.driver import Observe
from autoscaler.drivers.kubernetes.adoption.annotations import (
    USUAL,
    WRONG,
    AnnotationError,
    Others,
    build_stand_in,
    find_manual_scaling,
    read_model,
    set_naming_time,
)
from autoscaler.drivers.kubernetes.adoption.objects import (
    CONTROLLERS,
    Kind,
    ReleasedWorkload,
    ScalerSeen,
    WorkloadKey,
    WorkloadSeen,
    read_scaler,
    read_workload,
)
from autoscaler.drivers.kubernetes.adoption.status import build_condition
from autoscaler.drivers.kubernetes.adoption.status_writer import Showing
from autoscaler.drivers.kubernetes.adoption.tracked_pod import EXITED
from autoscaler.drivers.kubernetes.adoption.workload import Mode, Workload
from autoscaler.drivers.kubernetes.adoption.workload_runner import PLURALS, AdoptionCandidate, Means, Runner
from autoscaler.drivers.kubernetes.objects.replica_observations import build_podless_observation
from autoscaler.drivers.resilient_tasks import NO_MODEL, fault_reporter, retry_until_success
from autoscaler.exception_handling import Failure, attempt, describe_error
from autoscaler.kubernetes.api import Api, ApiError, UnreachableError
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.spec.document_names import Origin
from autoscaler.spec.model import Model
from autoscaler.state.events import Seen, Synced
from autoscaler.state.world import Replica

WORKLOADS_MAX = 1000
"""Limit of workloads: each has a watch of its own pods. Further ones are not served, which an Event reports."""
ADOPT_SECONDS_MAX = 10.0
"""How long `Synced` waits for all their pods, and for the watches of other autoscalers."""
SCALERS = (
    ("HorizontalPodAutoscaler", "/apis/autoscaling/v2", "horizontalpodautoscalers"),
    ("ScaledObject", "/apis/keda.sh/v1alpha1", "scaledobjects"),
)

NOT_SERVED = "NotServed"
"""The reason of Events about workloads that this installation does not serve."""

_log = logging.getLogger("pilotlight.autoscaler.adoption")


class WorkloadEvent(NamedTuple):
    """An Event to write about a workload."""

    workload: WorkloadKey
    uid: str
    warning: bool
    reason: str
    message: str


def _ours(namespace: str, named: str | None) -> str | None:
    del namespace, named
    return ""


class AdoptedDriver:
    """The driver of adopted models. `namespaces`: those to watch; None: all. `models` is called with all models after
    each change, and with the exception of each workload that raised one. The installation then calls `called` with the
    names that the models got, because a name may be in use. `whose` returns why another installation serves a model
    (`Installation.whose`). `note` is called with each Event to write.
    """

    def __init__(
        self,
        api: Api,
        namespaces: Sequence[str] | None,
        models: Callable[[Mapping[Origin, Model], Mapping[Origin, str]], None],
        *,
        hold_s: Callable[[], float],
        whose: Callable[[str, str | None], str | None] = _ours,
        note: Callable[[WorkloadEvent], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        pace: probes.Pace | None = None,
    ) -> None:
        self._api = api
        self._models = models
        self._hold_s = hold_s
        self._whose = whose
        self._known = asyncio.Event()
        """Set once the installation has reported which candidates are ours."""
        self._note = note
        self._clock = clock
        self._unix_s = api.unix_s
        self._pace = pace or probes.Pace(clock)
        self._showing = Showing(api, clock)
        self._tasks = asyncio.TaskGroup()
        self._candidates: dict[WorkloadKey, AdoptionCandidate] = {}
        self._scalers: dict[WorkloadKey, str] = {}
        self._last: tuple[Mapping[Origin, Model], Mapping[Origin, str]] | None = None
        self._listens = False
        self._synced = self._leads = False
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
        self._workload_watches = [
            Watched(
                api,
                f"/apis/apps/v1{place}/{PLURALS[kind]}",
                partial(read_workload, kind),
                self._workloads_changed,
                optional=True,
            )
            for kind in CONTROLLERS
            for place in places
        ]

    # --- Driver -------------------------------------------------------------------------------------------------------

    async def run(self, observe: Observe) -> None:
        """Adopt, then observe until cancelled. One run per driver."""
        self._means = Means(self._api, observe, self._clock, self._pace)
        async with self._tasks as tasks:
            tasks.create_task(self._showing.run())
            for _, scalers in self._scaler_watches:
                tasks.create_task(scalers.run())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_SECONDS_MAX):
                    await asyncio.gather(*(self._wait_for_scalers(*watch) for watch in self._scaler_watches))
            for workloads in self._workload_watches:
                tasks.create_task(workloads.run())
            for workloads in self._workload_watches:
                await workloads.synced.wait()
            self._listens = True
            for key in tuple(self._candidates):
                self._contain(key, partial(self._judge, key))
            self._publish()
            if any(candidate.elsewhere is None for candidate in self._candidates.values()):
                await self._known.wait()
            runners = self._runners()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ADOPT_SECONDS_MAX):
                    for runner in runners:
                        await runner.begun.wait()
            self._synced = True
            observe((Synced(),))

    def lead(self) -> None:
        """Become the leader, as in `SharedDriver`. If the first `Synced` is still pending, the report ends with it."""
        self._leads = True
        self._showing.lead()
        for key, candidate in self._candidates.items():
            fault = candidate.fault
            self._contain(key, partial(self._lead, candidate))
            if candidate.fault != fault:
                self._publish_later()
        if self._synced:
            self._means.observe((Synced(),))

    def _lead(self, candidate: AdoptionCandidate) -> None:
        self._report_adoption(candidate)
        if candidate.runner is not None:
            candidate.runner.lead()

    async def follow(self) -> None:
        """Stop leading, as in `SharedDriver`."""
        self._leads = False
        await asyncio.gather(self._showing.follow(), *(runner.follow() for runner in self._runners()))

    def called(self, names: Mapping[Origin, ModelName], taken: Mapping[Origin, str]) -> None:
        """Set each model's name in the installation and its conflicting names, and update which models are ours."""
        for key, candidate in tuple(self._candidates.items()):
            now = names.get(_origin(key)), taken.get(_origin(key), ""), self._elsewhere(candidate)
            if now != (candidate.called, candidate.taken, candidate.elsewhere):
                candidate.called, candidate.taken, _ = now
                fault = candidate.fault
                self._contain(key, partial(self._judge, key))
                if candidate.fault != fault:
                    self._publish_later()
        self._known.set()

    def retry(self, origins: Container[Origin]) -> None:
        """Evaluate again those of these workloads that raised an exception, and publish the results."""
        for key, candidate in tuple(self._candidates.items()):
            if candidate.fault and _origin(key) in origins:
                unread = candidate.unread
                again = partial(self._judge, key) if unread is None else partial(self._see, unread)
                self._contain(key, again)
        self._publish()

    def _elsewhere(self, candidate: AdoptionCandidate) -> str | None:
        """Return `whose` for the candidate's model."""
        named = None if candidate.model is None else candidate.model.spec.installation
        return self._whose(candidate.seen.key.namespace, named)

    def obstacle(self, model: Model) -> str:
        """Return why a start would fail: the workload does not exist, or its last start failed on its pod template."""
        key = _key(model)
        candidate = self._candidates.get(key)
        if candidate is None or candidate.runner is None:
            return f"there is no {key}"
        return candidate.runner.core.obstacle(self._clock())

    def start(self, replica: Replica, model: Model) -> None:
        """Request one more of its workload's pods."""
        candidate = self._candidates.get(_key(model))
        if candidate is None or candidate.runner is None:
            reason = f"there is no {_key(model)}"
            self._means.observe(
                (
                    build_podless_observation(replica, Seen.EXITED, reason=reason),
                    build_podless_observation(replica, Seen.CLEAN, proof=EXITED),
                )
            )
            return
        candidate.runner.start(replica)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Request one pod less. The pod template sets the grace period."""
        del grace_s
        for candidate in tuple(self._candidates.values()):
            if candidate.runner is not None and candidate.runner.core.knows(replica.id):
                candidate.runner.stop(replica)
                self._drop_if_over(candidate)
                return
        self._means.observe((build_podless_observation(replica, Seen.CLEAN, proof=EXITED),))

    def _runners(self) -> list[Runner]:
        return [candidate.runner for candidate in self._candidates.values() if candidate.runner is not None]

    # --- faults -------------------------------------------------------------------------------------------------------

    def _contain(self, key: WorkloadKey, work: Callable[[], None]) -> None:
        """Run `work`. An exception is a fault of the workload's model, or of the workload if it is not served."""
        done, candidate = attempt(work), self._candidates.get(key)
        if not isinstance(done, Failure):
            return
        reason = describe_error(done.error)
        if candidate is None:
            self._report_workload(key, reason)
            return
        if candidate.released:
            self._report(key, candidate, reason)
            return
        candidate.fault = reason
        if candidate.model is None:
            candidate.model = build_stand_in(candidate.seen)

    def _report(self, key: WorkloadKey, candidate: AdoptionCandidate, reason: str) -> None:
        """Report an exception of the workload's task, which is restarted."""
        if candidate.model is not None:
            fault_reporter(candidate.called or candidate.model.name, self._means.observe)(reason)
        else:
            self._report_workload(key, reason)
            candidate.faulty = bool(reason)

    def _report_workload(self, key: WorkloadKey, reason: str) -> None:
        fault_reporter(NO_MODEL, self._means.observe, str(key))(reason)

    # --- workloads ----------------------------------------------------------------------------------------------------

    def _workloads_changed(self, changes: list[Change[WorkloadSeen | ReleasedWorkload]]) -> None:
        for _, old, new in changes:
            if isinstance(new, WorkloadSeen):
                self._contain(new.key, partial(self._see, new))
                continue
            if new is not None:
                self._showing.see(new, None)
            elif old is not None:
                self._showing.forget(old.key)
            if old is not None and old.key in self._candidates:
                self._release(self._candidates[old.key])
        if self._listens:
            self._publish()

    def _see(self, new: WorkloadSeen) -> None:
        """Process a new or changed workload."""
        candidate = self._candidates.get(new.key)
        if candidate is not None and candidate.seen.uid != new.uid:  # another object of the same name
            self._release(candidate, at_once=True)
            candidate = None
        before = None if candidate is None else candidate.seen
        if candidate is None:
            if len(self._candidates) >= WORKLOADS_MAX:
                self._showing.see(new, None)
                if self._leads:
                    self._note(
                        WorkloadEvent(
                            new.key, new.uid, True, NOT_SERVED, f"{WORKLOADS_MAX} workloads are served, the limit"
                        )
                    )
                return
            candidate = self._candidates[new.key] = AdoptionCandidate(new)
        candidate.unread = new
        now_unix_s = self._unix_s()
        new = set_naming_time(before, new, now_unix_s)
        hand, candidate.seen = find_manual_scaling(before, new, candidate.hand, now_unix_s), new
        if hand is not None and hand is not candidate.hand:
            candidate.hand_s = self._clock() - (now_unix_s - hand.at_unix_s)
        candidate.hand, candidate.released, candidate.unread = hand, False, None
        if self._listens:
            self._judge(new.key)

    def _scalers_changed(self, changes: list[Change[ScalerSeen]]) -> None:
        for _, old, new in changes:
            if old is not None:
                self._scalers.pop(old.target, None)
            if new is not None:
                self._scalers[new.target] = new.title
            for one in filter(None, (old, new)):
                if self._listens and one.target in self._candidates:
                    self._contain(one.target, partial(self._judge, one.target))
        if self._listens:
            self._publish()

    def _judge(self, key: WorkloadKey) -> None:
        """Evaluate a workload in its current state."""
        candidate = self._candidates[key]
        if candidate.released:
            return
        self._evaluate(key, candidate)
        if candidate.unread is None:
            candidate.fault = ""

    def _evaluate(self, key: WorkloadKey, candidate: AdoptionCandidate) -> None:
        others = self._others(candidate)
        good: WorkloadSeen | None = candidate.seen
        try:
            candidate.model, candidate.problem = read_model(candidate.seen, others), ""
        except AnnotationError as error:
            candidate.problem = str(error)
            good = (
                None
                if candidate.good is None
                else candidate.seen._replace(notes=candidate.good.notes, template_marks=())
            )
            candidate.model = None if good is None else read_model(good, others)
        candidate.good = good
        candidate.elsewhere = self._elsewhere(candidate)
        self._log_problem(candidate)
        self._report_adoption(candidate)
        if candidate.elsewhere != "":
            self._hand_over(candidate)
            return
        if candidate.model is None or good is None:
            return
        model = candidate.model if candidate.called is None else replace(candidate.model, name=candidate.called)
        mode = Mode.TOGGLE if others.scaler else Mode.HELD if others.hand is not None else Mode.LEVEL
        if candidate.runner is None:
            core = Workload(good, model, mode, self._unix_s() - self._clock())
            candidate.runner = Runner(core, self._means)
            report = partial(self._report, key, candidate)
            candidate.running = self._tasks.create_task(retry_until_success(candidate.runner.run, report))
        else:
            candidate.runner.core.see(good, model, mode, self._clock())
            candidate.runner.settle()

    def _others(self, candidate: AdoptionCandidate) -> Others:
        """Return the other controllers of the scale, and schedule an evaluation for when a manual scale expires."""
        if candidate.timer is not None:
            candidate.timer.cancel()
            candidate.timer = None
        scaler, hand = self._scalers.get(candidate.seen.key, ""), candidate.hand
        if scaler or hand is None:
            return Others(scaler)
        hold_s = self._hold_s()
        left_s = candidate.hand_s + hold_s - self._clock()
        if left_s <= 0:
            return Others()
        candidate.timer = asyncio.get_running_loop().call_later(left_s, self._hold_over, candidate.seen.key)
        return Others("", hand, hand.at_unix_s + hold_s)

    def look_again(self) -> None:
        """Re-evaluate manual scales after a change of Settings, which set how long they hold."""
        if self._listens:
            for key in [key for key, one in self._candidates.items() if one.hand is not None]:
                self._contain(key, partial(self._judge, key))
            self._publish()

    def _hold_over(self, key: WorkloadKey) -> None:
        candidate = self._candidates.get(key)
        if candidate is not None:
            candidate.hand = None
            self._contain(key, partial(self._judge, key))
            self._publish_later()

    def _publish_later(self) -> None:
        """Publish in a task that is retried after an exception."""
        report = fault_reporter(NO_MODEL, self._means.observe, "adopted Models")
        self._tasks.create_task(retry_until_success(self._publish_once, report))

    async def _publish_once(self) -> None:
        self._publish()

    def _release(self, candidate: AdoptionCandidate, *, at_once: bool = False) -> None:
        """Release a deleted or unannotated workload: its scale is no longer written, and its replicas end.
        The plan ends them, unless `at_once`.
        """
        candidate.model, candidate.problem, candidate.released = None, "", True
        candidate.fault, candidate.unread = "", None
        if candidate.timer is not None:
            candidate.timer.cancel()
        if candidate.runner is not None and at_once:
            candidate.runner.core.end_all("its workload was deleted and recreated")
        self._hand_over(candidate)

    def _hand_over(self, candidate: AdoptionCandidate) -> None:
        """Stop writing the scale: its owner or another installation controls it."""
        if candidate.runner is not None:
            core = candidate.runner.core
            core.see(core.seen, core.model, Mode.RELEASED, self._clock())
            candidate.runner.settle()
        self._drop_if_over(candidate)

    def _drop_if_over(self, candidate: AdoptionCandidate) -> None:
        """Drop the candidate's runner once no replica is left, and the candidate once it serves no model."""
        serves = candidate.model is not None and candidate.elsewhere == ""
        if serves or (candidate.runner is not None and not candidate.runner.core.empty):
            return
        if candidate.running is not None:
            candidate.running.cancel()
        candidate.runner = candidate.running = None
        if candidate.model is None and (candidate.released or candidate.elsewhere == ""):
            self._candidates.pop(candidate.seen.key, None)
            if candidate.faulty:
                self._report_workload(candidate.seen.key, "")

    async def _wait_for_scalers(self, group: str, watched: Watched[ScalerSeen]) -> None:
        """Wait until all autoscalers of a kind are known, if the server knows the kind."""
        with contextlib.suppress(ApiError, UnreachableError):
            await self._api.get(group)
            await watched.synced.wait()

    def _publish(self) -> None:
        """Publish all models and their faults if these have changed."""
        served = {_origin(key): one for key, one in self._candidates.items() if one.model is not None}
        models = {origin: one.model for origin, one in served.items() if one.model is not None}
        now = models, {origin: one.fault for origin, one in served.items() if one.fault}
        if now != self._last:
            self._models(*now)
            self._last = now  # after an exception the next call retries

    def _log_problem(self, candidate: AdoptionCandidate) -> None:
        """Log a new problem, on leaders and followers."""
        if candidate.problem not in ("", candidate.logged):
            _log.warning("event=annotations_rejected workload=%r error=%s", str(candidate.seen.key), candidate.problem)
        candidate.logged = candidate.problem

    def _report_adoption(self, candidate: AdoptionCandidate) -> None:
        """Update the condition. As the leader, also write an Event for invalid annotations and for each change of the
        scale's controller.
        """
        if candidate.elsewhere:
            self._showing.forget(candidate.seen.key)  # keep the condition that the other installation wrote
        elif candidate.problem or candidate.called or candidate.taken:  # wait until its names are resolved
            condition = build_condition(candidate.problem, candidate.model, candidate.called, candidate.taken)
            self._showing.see(candidate.seen, condition)
        if not self._leads:
            return
        adopted = None if candidate.model is None else candidate.model.adopted
        message = candidate.problem or ("" if adopted is None else adopted.message)
        reason = WRONG if candidate.problem or adopted is None else adopted.reason
        if candidate.elsewhere:
            message, reason = candidate.elsewhere, NOT_SERVED
        elif candidate.elsewhere is None and not candidate.problem:
            message = ""  # which installation serves it is not known yet
        usual = not candidate.last_event and reason == USUAL
        if message not in ("", candidate.last_event) and not usual:
            warning = bool(candidate.problem) and reason == WRONG
            self._note(WorkloadEvent(candidate.seen.key, candidate.seen.uid, warning, reason, message))
        candidate.last_event = message


def _origin(key: WorkloadKey) -> Origin:
    return Origin(*key)


def _key(model: Model) -> WorkloadKey:
    of = model.adopted
    if of is None:
        raise ValueError(f"Model {model.name} is not adopted")
    kind: Kind = of.kind
    return WorkloadKey(kind, of.namespace, of.name)
