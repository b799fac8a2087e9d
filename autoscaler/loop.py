"""The loop: observe, decide, act. It performs what pure code decided and decides nothing itself.

Owns the one mutable reference to the World. Whatever happens is put into its inbox with `observe`, which never blocks;
one task folds all that is there as one batch, lets `plan` and `shares` look at the result, folds every Action before
the driver performs it, and then tells its listeners. Before anything is started or displaced for a Model, the driver is
asked whether that Model could start at all; what is in its way is folded like any other observation. It sleeps until
the next observation or until time alone would change the Plan. Under a flood it rests as long as it worked, so deciding
takes half of a core at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from autoscaler import shares
from autoscaler.actions import AcquireLease, Acted, Action, CutNode, Plan, ReleaseLease, StartReplica, StopReplica
from autoscaler.capacity.base import Supplier
from autoscaler.contract import ModelName
from autoscaler.cuttable import CutRefused
from autoscaler.deficits import ORDERS_MAX
from autoscaler.drivers.base import Cutter, Driver
from autoscaler.fold import Observation, fold
from autoscaler.inbox import Inbox
from autoscaler.leases import LeaseRefused
from autoscaler.observations import StartSeen, Tick, Transition
from autoscaler.plan import Planner
from autoscaler.winddown import wind_down
from autoscaler.world import World

TICK_S_MAX = 1.0
"""At least one Tick in this time, whatever else is observed: back-offs end, and gauges age."""
ROUNDS_MAX = 4
"""Plans in one step: an Action may allow another (a drop frees a Slice); what is left waits for the next step."""


class Step(NamedTuple):
    """One decision, for listeners. Times are of the loop's clock; `received_s` is the oldest observation's arrival."""

    before: World
    after: World
    plan: Plan
    actions: tuple[Action, ...]
    transitions: tuple[Transition, ...]
    received_s: float
    started_s: float
    acted_s: float
    reports_merged: int = 0
    """Reports that were merged into later ones, because too many waited."""


Decide = Callable[[World, float], Plan]
"""(world, now_s) -> Plan."""

Listener = Callable[[Step], None]
"""Told after every step, in order. Must not block."""


class Loop:
    """Runs one driver towards what the plan says. `clock` gives monotonic seconds.

    `writes_s` says for how many more seconds this process may act: one that was paused while it led finds 0. `in_touch`
    says whether an order could be carried out now. While it could not, nothing is decided: a Replica that was told to
    drain, by one who can neither stop it nor start another, would be lost to the Calls that it could still serve.
    `cutter` has nodes cut anew; where there is none no node may be. `supplier` orders capacity and gives it back.
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
        self._driver = driver
        self._cutter = cutter
        self._supplier = supplier
        self._clock = clock
        self._writes_s = writes_s
        self._in_touch = in_touch
        self._inbox = Inbox()
        self._wake = asyncio.Event()
        self._received_s: float | None = None
        """When the first of what woke us came."""
        self._rest_until_s = 0.0
        self._ticked_s = clock()
        self._decide_now: Decide = Planner().plan
        self._empty = asyncio.Event()

    def now_s(self) -> float:
        """By its clock."""
        return self._clock()

    def observe(self, batch: Sequence[Observation]) -> None:
        """Takes what happened, in order; it is folded in this turn of the event loop or the next."""
        if self._received_s is None:
            self._received_s = self._clock()
        self._inbox.put(batch)
        self._wake.set()

    def note(self, batch: Sequence[Observation]) -> None:
        """Takes what can wait: it is folded with the next step, TICK_S_MAX from now at the latest."""
        self._inbox.put(batch)

    def tried(self, names: Iterable[ModelName]) -> tuple[World, float]:
        """The World as it is, with what is in the way of a start of these, and the time; nothing comes of the look."""
        now_s = self._clock()
        world, _ = fold(self.world, self._obstacles(names), now_s)
        return world, now_s

    async def run(self) -> None:
        """Observes the driver and decides, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._driver.run(self.observe))
            tasks.create_task(self._decide())

    async def wind_down(self, grace_s: float) -> None:
        """Stops every Replica and returns when nothing is left; `run` goes on meanwhile and decides nothing else."""

        def decide(world: World, now_s: float) -> Plan:
            del now_s
            return wind_down(world, grace_s)

        self._decide_now = decide
        self._wake.set()
        while self.world.replicas or not self.world.synced:  # before it is synced it knows of none
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
        """One decision over everything in the inbox; synchronous, so that nothing changes while it is taken."""
        started_s = self._clock()
        before, received_s = self.world, started_s if self._received_s is None else self._received_s
        self._received_s = None
        batch, merged = self._inbox.take()
        transitions = self._fold(batch, started_s)
        actions: list[Action] = []
        asked: set[ModelName] = set()
        leads = self._writes_s() > 0.0
        self.plan = Plan()
        for _ in range(ROUNDS_MAX if leads and self._in_touch() else 0):
            transitions += self._plan(started_s, asked)
            if not self.plan.actions:
                break
            for action in self.plan.actions:
                transitions += self._fold((Acted(action=action),), started_s)
                self._perform(action)
            actions += self.plan.actions
            if _only_ordered(self.plan):
                break  # nothing else comes of that before it is observed, and each waits to be sent
        acted_s = self._clock()
        granted = shares.divide(self.world, started_s) if leads else None
        if granted is not None:
            transitions += self._fold((granted,), started_s)
        done = Step(before, self.world, self.plan, tuple(actions), transitions, received_s, started_s, acted_s, merged)
        for listener in self.listeners:
            listener(done)
        if self.world.synced and not self.world.replicas:
            self._empty.set()
        now_s = self._clock()
        self._rest_until_s = now_s + (now_s - started_s)

    def _plan(self, now_s: float, asked: set[ModelName]) -> tuple[Transition, ...]:
        """A Plan that tries nothing which surely fails. Each Model is asked about once in a step, so this ends.

        That an obstacle is gone is for a later look to say: more may have to be learnt of what has come.
        """
        transitions: tuple[Transition, ...] = ()
        while True:
            self.plan = self._decide_now(self.world, now_s)
            looks = [name for name in self.plan.tries if name not in asked]
            asked.update(looks)
            found = self._obstacles(looks)
            if not found:
                return transitions
            transitions += self._fold(found, now_s)

    def _obstacles(self, names: Iterable[ModelName]) -> list[StartSeen]:
        seen = (StartSeen(model=name, obstacle=self._driver.obstacle(self.world.models[name])) for name in names)
        return [one for one in seen if one.obstacle]

    def _fold(self, batch: Sequence[Observation], now_s: float) -> tuple[Transition, ...]:
        self.world, transitions = fold(self.world, batch, now_s)
        return transitions

    def _perform(self, action: Action) -> None:
        """The driver returns at once; what came of it is observed."""
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
            self.observe((CutRefused(node=action.order.node, reason="nobody here can have it cut anew"),))
        else:
            self._cutter.cut(action.order)

    def _acquire(self, action: AcquireLease) -> None:
        if self._supplier is None:
            self.observe((LeaseRefused(id=action.order.id, reason="nobody here can order it"),))
        else:
            self._supplier.acquire(action.order)


def _only_ordered(plan: Plan) -> bool:
    """Capacity is ordered, all that is lacking, and nothing else is done."""
    return len(plan.actions) < ORDERS_MAX and all(isinstance(one, AcquireLease) for one in plan.actions)
