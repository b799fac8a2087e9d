"""The control loop: observe, decide, act. It executes the decisions of pure code and makes none itself.

The loop holds the only mutable reference to the `World`. `observe` puts events into its inbox and never blocks. One
task folds the inbox as one batch, calls the planner and `divide_slots` on the result, folds every Action before the
driver executes it, and then calls the listeners. Before a start or an eviction for a Model, the loop checks with the
driver whether that Model could start at all; an obstacle is folded like any other observation. The loop sleeps until
the next observation, or until the plan changes only because time passes. Under a flood of events it sleeps as long as
it worked, so it uses at most half a core.

An exception that one Model causes quarantines that Model (`autoscaler.controller.fault_attribution`). For any other
exception `World.degraded` is set, no decision is made until a retry succeeds, and the last plan stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.controller.fault_attribution import (
    CULPRITS_MAX,
    find_culprits,
    fold_separately,
    model_of,
    observation_key,
    rank_suspects,
)
from autoscaler.controller.inbox import Inbox
from autoscaler.drivers.driver import Cutter, Driver
from autoscaler.exception_handling import Failure, attempt, can_complete, describe_error
from autoscaler.fold.fold import Observation
from autoscaler.fold.model_quarantine import list_quarantined_models
from autoscaler.fold.quarantine_mask import assume_quarantined, mask_quarantined
from autoscaler.planner.plan import Planner, wind_down
from autoscaler.providers.provider import Supplier
from autoscaler.provisioning.provisioner import ORDERS_MAX
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.routing import slots
from autoscaler.state.actions import (
    AcquireLease,
    Acted,
    Action,
    CutNode,
    FailReplica,
    Plan,
    ReleaseLease,
    StartReplica,
    StopReplica,
)
from autoscaler.state.capacity import LeaseRefused
from autoscaler.state.events import (
    FaultSeen,
    FollowingSeen,
    HoldsGranted,
    LeadingSeen,
    ReplicaSeen,
    StartSeen,
    Tick,
    Transition,
)
from autoscaler.state.mig import CutRefused
from autoscaler.state.world import World

TICK_S_MAX = 1.0
"""Maximum interval between two Ticks, even if other observations arrive: the passing of time changes some state."""
ROUNDS_MAX = 4
"""Maximum plans per step: one Action may enable another (a drop frees a slice); the rest waits for the next step."""
RETRY_S_MAX = 60.0
"""Maximum back-off. A failed decision that no Model explains is retried after 1, 2, 4 ... seconds."""

_log = logging.getLogger("pilotlight.autoscaler.controller")
T = TypeVar("T")


def report_fault(model: ModelName | None, what: str, reason: str) -> None:
    """Log a contained exception. Tests replace this function, so that a fault they did not inject fails the test."""
    if model is None:
        _log.error("event=degraded operation=%r error=%s", what, reason)
    else:
        _log.error("event=model_faulty model=%s operation=%r error=%s", model, what, reason)


class LoopStep(NamedTuple):
    """One step, for listeners. Times are of the loop's clock; `received_s`: when the oldest observation arrived."""

    before: World
    after: World
    plan: Plan
    actions: tuple[Action, ...]
    transitions: tuple[Transition, ...]
    received_s: float
    started_s: float
    acted_s: float
    reports_merged: int = 0
    """Reports that were merged into later ones, because the inbox was too long."""


Decide = Callable[[World, float], Plan]
"""(world, now_s) -> Plan."""

Listener = Callable[[LoopStep], None]
"""Called after every step, in order. Must not block."""


Retry = Callable[[frozenset[ModelName]], None]
"""Called within a step, before the plan, with the Models whose quarantine has ended. It repeats the work outside of the
`World` that failed because of these Models, and calls `Loop.fault` for the Models that fail again. Must not block. If
it raises, it is called again with the same Models; until it succeeds, these Models are planned as if quarantined.
"""


class _Unretried(NamedTuple):
    """The Models for which a retry raised."""

    names: frozenset[ModelName]
    failures: int
    again_s: float


class Loop:
    """Drives one driver towards the plan. `clock` returns monotonic seconds.

    `writes_s` returns for how many more seconds this process may act; a leader that was suspended gets 0. `in_touch`
    returns whether the driver can execute an order now. While it cannot, nothing is decided: draining a replica that
    can be neither stopped nor replaced would only take it away from its requests. `cutter` repartitions MIG nodes;
    without it none is. `supplier` orders and releases capacity.
    """

    def __init__(
        self,
        world: World,
        driver: Driver,
        clock: Callable[[], float],
        writes_s: Callable[[], float] = lambda: math.inf,
        in_touch: Callable[[], bool] = lambda: True,
        *,
        cutter: Cutter | None = None,
        supplier: Supplier | None = None,
    ) -> None:
        self.world = world
        self.plan = Plan()
        self.listeners: list[Listener] = []
        self.retries: list[Retry] = []
        self._driver = driver
        self._cutter = cutter
        self._supplier = supplier
        self._clock = clock
        self._writes_s = writes_s
        self._in_touch = in_touch
        self._inbox = Inbox()
        self._wake = asyncio.Event()
        self._received_s: float | None = None
        """When the oldest observation since the last step arrived."""
        self._rest_until_s = 0.0
        self._ticked_s = clock()
        self._decide_now: Decide = Planner().plan
        self._empty = asyncio.Event()
        self._aside: dict[Hashable, Observation] = {}
        """`observation_key` -> observation that could not be folded; retried after RETRY_S_MAX or a quarantine."""
        self._unstopped: dict[ReplicaId, StopReplica] = {}
        """Stops that the driver failed to begin; retried as well."""
        self._quarantined: frozenset[ModelName] = frozenset()
        """The Models that were quarantined when the retries were last called."""
        self._unretried: dict[Retry, _Unretried] = {}
        self._again_s = 0.0
        """When `_aside` and `_unstopped` are retried."""
        self._unfolded_s = -math.inf
        """When folding last failed for a reason that no Model explains."""
        self._retry_s = 0.0
        """No decision is made before this time, because the last one failed."""
        self._failures = 0
        self._troubles: dict[str, str] = {}
        """Failed part -> an exception that no Model explains, in one line."""

    def now_s(self) -> float:
        """The current time of the loop's clock."""
        return self._clock()

    def observe(self, batch: Sequence[Observation]) -> None:
        """Queue observations in order and wake the loop; they are folded in this turn of the event loop or the next."""
        if self._received_s is None:
            self._received_s = self._clock()
        self._inbox.put(batch)
        self._wake.set()

    def note(self, batch: Sequence[Observation]) -> None:
        """Queue observations that can wait: the next step folds them, at most TICK_S_MAX from now."""
        self._inbox.put(batch)

    def tried(self, names: Iterable[ModelName]) -> tuple[World, float]:
        """The current `World` with the start obstacles of these Models, and the time. The loop's state is unchanged."""
        now_s = self._clock()
        world, _ = advance(self.world, self._obstacles(names), now_s)
        return world, now_s

    async def run(self) -> None:
        """Run the driver and the decision loop until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._driver.run(self.observe))
            tasks.create_task(self._decide())

    async def wind_down(self, grace_s: float) -> None:
        """Stop every replica and return when none is left. `run` must be running; it makes no other decisions."""

        def decide(world: World, now_s: float) -> Plan:
            del now_s
            return wind_down(world, grace_s)

        self._decide_now = decide
        self._wake.set()
        while self.world.replicas or not self.world.leadership.synced:  # no replica is known before the first sync
            self._empty.clear()
            await self._empty.wait()

    async def _decide(self) -> None:
        while True:
            due_s = self._ticked_s + TICK_S_MAX
            if self.plan.next_s is not None:
                due_s = min(due_s, self.plan.next_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, due_s - self._clock())):
                    await self._wake.wait()
            if self._clock() >= due_s:
                self._ticked_s = self._clock()
                self.observe((Tick(),))
            rest_s = self._rest_until_s - self._clock()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            self._wake.clear()
            self.step()

    def step(self) -> None:
        """Make one decision over the whole inbox; synchronous, so that nothing changes meanwhile."""
        started_s = self._clock()
        before, received_s = self.world, started_s if self._received_s is None else self._received_s
        self._received_s = None
        batch, merged = self._inbox.take()
        for one in batch:
            if isinstance(one, FaultSeen) and not one.model:
                self.trouble(one.part, one.reason)
            elif isinstance(one, FaultSeen) and self._is_new(one):
                report_fault(one.model, one.part, one.reason)
            elif isinstance(one, ReplicaSeen) and self.world.replicas.get(one.id, one).model != one.model:
                _log.error(
                    "event=replica_ignored replica=%s reason='it was reported for model %s and is of another model'",
                    one.id,
                    one.model,
                )
            elif isinstance(one, LeadingSeen | FollowingSeen):
                # The failed observations and stops belong to the leadership term that has ended.
                self._aside.clear()
                self._unstopped.clear()
        transitions = self._fold([*self._again(started_s), *batch], started_s)
        transitions += self._retry(self._list_ended(before, batch), started_s)
        actions: list[Action] = []
        asked: set[ModelName] = set()
        leads = self._writes_s() > 0.0
        decides = leads and self._in_touch() and started_s >= self._retry_s
        self.plan = replace(self.plan, actions=(), tries=()) if leads and started_s < self._retry_s else Plan()
        for _ in range(ROUNDS_MAX if decides else 0):
            transitions += self._plan(started_s, asked)
            for action in self.plan.actions:
                acted = self._act(action, started_s)
                if acted is not None:
                    actions.append(action)
                    transitions += acted
            ordered = all(isinstance(one, AcquireLease) for one in self.plan.actions)  # also if there is no action
            if ordered and len(self.plan.actions) < ORDERS_MAX:
                # Capacity orders enable no other Action before they are observed. With ORDERS_MAX orders, more may be
                # due, so planning continues.
                break
        acted_s = self._clock()
        granted = self._divided(started_s) if leads else None
        if granted is not None:
            transitions += self._fold((granted,), started_s)
        done = LoopStep(
            before, self.world, self.plan, tuple(actions), transitions, received_s, started_s, acted_s, merged
        )
        for listener in self.listeners:
            self._call(listener, partial(listener, done))
        if self.world.leadership.synced and not self.world.replicas:
            self._empty.set()
        now_s = self._clock()
        self._rest_until_s = now_s + (now_s - started_s)

    def _list_ended(self, before: World, batch: Sequence[Observation]) -> frozenset[ModelName]:
        """The Models whose quarantine ended since the retries were last called, in this step or between steps."""
        noted = {one.model for one in batch if isinstance(one, FaultSeen)} & self.world.models.keys()
        return (self._quarantined | list_quarantined_models(before) | noted) - list_quarantined_models(self.world)

    def _retry(self, ended: frozenset[ModelName], now_s: float) -> tuple[Transition, ...]:
        """Repeat the work that failed because of Models whose quarantine has ended.
        A retry that raises is repeated with back-off.
        """
        transitions: tuple[Transition, ...] = ()
        if ended and self._aside:
            self._again_s = now_s
            transitions = self._fold(self._again(now_s), now_s)
        for retry in self.retries if ended or self._unretried else ():
            left = self._unretried.get(retry, _Unretried(frozenset(), 0, now_s))
            names = ended | left.names
            if not names or (not ended and now_s < left.again_s):
                continue
            if self._call(retry, partial(retry, names)):
                self._unretried.pop(retry, None)
            else:
                again_s = now_s + min(2.0**left.failures, RETRY_S_MAX)
                self._unretried[retry] = _Unretried(names, min(left.failures + 1, 16), again_s)
        self._quarantined = list_quarantined_models(self.world)
        return transitions

    def _mask(self, world: World) -> World:
        """The `World` for the planner. A quarantine that ends within a step is masked until the retries are called."""
        held = self._quarantined.union(*(left.names for left in self._unretried.values()))
        return mask_quarantined(world, list_quarantined_models(world) | (held & world.models.keys()))

    def _plan(self, now_s: float, asked: set[ModelName]) -> tuple[Transition, ...]:
        """Compute a plan without starts that are certain to fail. Terminates: a step checks each Model once.
        An obstacle that no longer exists is not detected here but by a later check, because facts may still be missing.
        """
        transitions: tuple[Transition, ...] = ()
        faults = len(self.world.learned.faults)
        while True:
            done = attempt(lambda: self.contained("plan", lambda world: self._decide_now(self._mask(world), now_s)))
            if isinstance(done, Failure):
                if len(self.world.learned.faults) > faults:
                    self._failures = 0  # a Model was quarantined: retry soon
                self._degrade("plan", done.error, now_s)
                self.plan = replace(self.plan, actions=(), tries=(), next_s=self._retry_s)
                return transitions
            self.plan = done
            looks = [name for name in self.plan.tries if name not in asked]
            asked.update(looks)
            found = self._obstacles(looks)
            if not found:
                self._failures = 0
                for what in ("plan", "order") if self._troubles else ():
                    self.trouble(what, "")
                return transitions
            transitions += self._fold(found, now_s)

    def _obstacles(self, names: Iterable[ModelName]) -> list[StartSeen]:
        found: list[StartSeen] = []
        for name in names:
            obstacle = attempt(partial(self._driver.obstacle, self.world.models[name]))
            if isinstance(obstacle, Failure):
                self.fault(name, "driver", obstacle.error)
                obstacle = f"the driver failed: {describe_error(obstacle.error)}"
            if obstacle:
                found.append(StartSeen(model=name, obstacle=obstacle))
        return found

    def _fold(self, batch: Sequence[Observation], now_s: float) -> tuple[Transition, ...]:
        done = attempt(lambda: advance(self.world, batch, now_s))
        if not isinstance(done, Failure):
            self.world, transitions = done
            for one in batch if self._aside else ():
                self._aside.pop(observation_key(one), None)
            if self._troubles and now_s >= self._unfolded_s + RETRY_S_MAX:
                self.trouble("fold", "")
            return transitions
        apart = fold_separately(self.world, batch, now_s)
        self.world = apart.world
        for name, error in apart.faults:
            report_fault(name, "fold", describe_error(error))
        if apart.error is not None:
            self.trouble("fold", describe_error(apart.error))
            self._unfolded_s = now_s
        for one in apart.folded:
            self._aside.pop(observation_key(one), None)
        self._aside |= {observation_key(one): one for one in apart.aside}
        self._again_s = now_s + RETRY_S_MAX
        return apart.transitions

    def _divided(self, now_s: float) -> HoldsGranted | None:
        """Call `divide_slots`; a Model that makes it raise keeps its current slot allocations."""
        done = attempt(lambda: slots.divide_slots(self.world, now_s))
        if not isinstance(done, Failure):
            if self._troubles:
                self.trouble("shares", "")
            return done

        def some(out: Iterable[ModelName]) -> HoldsGranted | None:
            return slots.divide_slots(replace(self.world, undivided=self.world.undivided.difference(out)), now_s)

        found = find_culprits(
            rank_suspects(self.world.undivided, done.error), lambda out: can_complete(lambda: some(out))
        )
        for name in found:
            self.fault(name, "shares", done.error)
        if not found:
            self.trouble("shares", describe_error(done.error))
        again = attempt(lambda: some(found)) if found else None
        return None if isinstance(again, Failure) else again

    # --- faults -------------------------------------------------------------------------------------------------------

    def contained(self, what: str, compute: Callable[[World], T]) -> T:
        """Return `compute(world)`. If it raises, quarantine the Models that cause it and compute again. `compute` must
        be pure and must accept a `World` with quarantined Models. Re-raises its exception if no Model explains it.
        """
        while True:
            done = attempt(lambda: compute(self.world))
            if not isinstance(done, Failure):
                return done
            names = {*self.world.models, *self.world.by_model} - list_quarantined_models(self.world)
            found = find_culprits(
                rank_suspects(names, done.error),
                lambda out: can_complete(lambda: compute(assume_quarantined(self.world, out))),
            )
            for name in found:
                self.fault(name, what, done.error)
            if len(found) in {0, CULPRITS_MAX}:  # after CULPRITS_MAX there may be more: search again next time
                raise done.error

    def fault(self, name: ModelName, what: str, error: Exception | str) -> None:
        """Immediately quarantine the Model that caused an exception. `error`: the exception, or its description."""
        if name not in list_quarantined_models(self.world):
            reason = error if isinstance(error, str) else describe_error(error)
            report_fault(name, what, reason)
            seen = (FaultSeen(model=name, reason=reason, part=what),)
            done = attempt(lambda: advance(self.world, seen, self._clock()))
            if isinstance(done, Failure):
                # Folding the passage of time raised, because of another Model. The next step folds separately.
                self.observe(seen)
            else:
                self.world, _ = done
            self._wake.set()

    def trouble(self, what: str, reason: str) -> None:
        """Record an exception that no Model explains, in one line; an empty `reason` clears it."""
        if reason == self._troubles.get(what, ""):
            return
        if reason:
            report_fault(None, what, reason)
            self._troubles[what] = reason
        else:
            del self._troubles[what]
        problems = "; ".join(f"{one}: {self._troubles[one]}" for one in sorted(self._troubles))
        self.world = replace(self.world, degraded=problems)

    def _degrade(self, what: str, error: Exception, now_s: float) -> None:
        """Record the error and pause decisions with exponential back-off."""
        self.trouble(what, describe_error(error))
        self._retry_s = now_s + min(2.0**self._failures, RETRY_S_MAX)
        self._failures = min(self._failures + 1, 16)

    def _again(self, now_s: float) -> list[Observation]:
        """If a retry is due, retry failed stops and return the observations to fold again."""
        if now_s < self._again_s or not (self._aside or self._unstopped):
            return []
        again, self._aside = list(self._aside.values()), {}
        stops, self._unstopped = self._unstopped, {}
        for action in stops.values():
            if action.replica in self.world.replicas:
                self._try(action, now_s)
        return again

    def _call(self, of: Listener | Retry, call: Callable[[], None]) -> bool:
        """Call a listener or a retry. If it raises, record the error and return False; a later step calls it again."""
        done = attempt(call)
        if isinstance(done, Failure) or self._troubles:
            name = getattr(of, "__qualname__", type(of).__name__)
            self.trouble(name, describe_error(done.error) if isinstance(done, Failure) else "")
        return not isinstance(done, Failure)

    def _is_new(self, fault: FaultSeen) -> bool:
        return not fault.is_over and fault.model not in list_quarantined_models(self.world)

    # --- Actions ------------------------------------------------------------------------------------------------------

    def _act(self, action: Action, now_s: float) -> tuple[Transition, ...] | None:
        """Fold an Action, then execute it. None: not executed, since its Model is quarantined or the fold raised."""
        if isinstance(action, StartReplica) and action.replica.model in list_quarantined_models(self.world):
            return None
        done = attempt(lambda: advance(self.world, (Acted(action=action),), now_s))
        if isinstance(done, Failure):
            self._blame(action, done.error, now_s)
            return None
        self.world, transitions = done
        return transitions + self._try(action, now_s)

    def _try(self, action: Action, now_s: float) -> tuple[Transition, ...]:
        """Execute an Action. A start that raises has failed; a stop that raises is retried."""
        done = attempt(lambda: self._perform(action))
        if not isinstance(done, Failure):
            return ()
        why = describe_error(done.error)
        match action:
            case StartReplica():
                self._blame(action, done.error, now_s)
                return self._fold((Acted(action=FailReplica(replica=action.replica.id, reason=why)),), now_s)
            case StopReplica():
                self._blame(action, done.error, now_s)
                self._unstopped[action.replica], self._again_s = action, now_s + RETRY_S_MAX
            case AcquireLease():
                report_fault(None, "capacity", why)
                self.observe((LeaseRefused(id=action.order.id, reason=why),))
            case CutNode():
                report_fault(None, "cut", why)
                self.observe((CutRefused(node=action.order.node, reason=why),))
            case _:
                self._degrade("order", done.error, now_s)
        return ()

    def _blame(self, action: Action, error: Exception, now_s: float) -> None:
        name = model_of(self.world, action)
        if name is None:
            self._degrade("order", error, now_s)
        else:
            self.fault(name, "order", error)

    def _perform(self, action: Action) -> None:
        """Pass the Action to the driver, which returns at once; its outcome is observed later."""
        if isinstance(action, StartReplica):
            self._driver.start(action.replica, self.world.models[action.replica.model])
        elif isinstance(action, StopReplica):
            self._driver.stop(self.world.replicas[action.replica], action.grace_s)
        elif isinstance(action, CutNode):
            self._cut(action)
        elif isinstance(action, AcquireLease):
            self._acquire(action)
        elif isinstance(action, ReleaseLease) and self._supplier is not None:
            self._supplier.release(action.order)

    def _cut(self, action: CutNode) -> None:
        if self._cutter is None:
            self.observe((CutRefused(node=action.order.node, reason="this process cannot repartition GPUs"),))
        else:
            self._cutter.cut(action.order)

    def _acquire(self, action: AcquireLease) -> None:
        if self._supplier is None:
            self.observe((LeaseRefused(id=action.order.id, reason="this process cannot order capacity"),))
        else:
            self._supplier.acquire(action.order)
