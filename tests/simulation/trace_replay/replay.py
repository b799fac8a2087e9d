"""Replays recorded requests in virtual time over fold and plan, on a cluster that is too small for their peak.

A run has owned devices for a part of the peak, a Market for the rest, and a gateway that assigns each request to a
Replica. It reports waiting times, cost and energy. Time jumps from one event to the next, and a plan is made at each,
as in the loop of an autoscaler. One run: `python -m tests.simulation.trace_replay.replay MARKET POLICY [DAYS]`.
"""

from __future__ import annotations

import heapq
import os
import random
import sys
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from math import ceil, inf
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName, Total
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import Planner
from autoscaler.providers.provider import RefusedError
from autoscaler.spec.capacity import ProviderSettings
from autoscaler.spec.model import Auto, Queue
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import (
    AcquireLease,
    Acted,
    Action,
    FailReplica,
    Plan,
    ReleaseLease,
    StartReplica,
    StopReplica,
)
from autoscaler.state.capacity import LeaseId, LeaseRefused, LeasesSeen, OffersSeen, ProvidersSeen
from autoscaler.state.events import Reported, Seen, SlicesSeen, Tick
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, Slice
from tests.simulation.trace_replay import capacity_market as market
from tests.simulation.trace_replay import request_arrivals
from tests.simulation.trace_replay.capacity_market import MARKETS, Bill, Market, Source
from tests.simulation.trace_replay.capacity_policies import Policy, acting, points
from tests.simulation.trace_replay.request_arrivals import Arrival
from tests.support.builders.worlds import T0, device, model, world
from tests.support.fakes.provider import FakeProvider, Fate, Held
from tests.support.harness.driver_events import seen_of

SHARE = 0.6
"""Number of owned devices, as a fraction of the peak."""
PER_NODE = 4
LIST_S, ALL_S = 5.0, 60.0
"""Interval between lists while an order is in flight, and otherwise; Offers are read every ALL_S."""
REPORT_S = 5.0
START_S, START_SPREAD = 23.0, 0.48
"""Start time: median, and spread of its logarithm, of GenTD26's `basemodel_update_latency` (90th percentile 42 s)."""
GATEWAY, TENANT = GatewayId("g1"), TenantName("acme")
PLANS_MAX = 16
"""Maximum number of plans at one point in time."""
TAIL_S = 7200.0
"""Time after the last request during which added capacity is still watched and billed."""


class Outcome(NamedTuple):
    """Results of a run."""

    market: str
    policy: str
    calls: int
    waits_s: tuple[float, ...]
    """Time until each request had a slot, sorted; for a request that gave up, the time that it waited."""
    gave_up: int
    bill: Bill
    orders: int
    broken: tuple[str, ...] = ()

    def p(self, share: float) -> float:
        """A quantile of the waiting times."""
        return self.waits_s[min(len(self.waits_s) - 1, int(share * len(self.waits_s)))] if self.waits_s else 0.0


class Waiting(NamedTuple):
    """A request without a Slot."""

    since_s: float
    takes_s: float


class Replay:
    """One run; `go` executes it."""

    def __init__(
        self,
        calls: Sequence[Arrival],
        of: Market,
        seed: int = 1,
        faults: float = market.FAULTS,
        keep: float | Auto = "auto",
    ) -> None:
        self.calls, self.market, self.seed, self.faults = calls, of, seed, faults
        own = max(1, round(SHARE * request_arrivals.peak(calls)))
        nodes = [f"w{n}" for n in range(1, ceil(own / PER_NODE) + 1)]
        self.own = tuple(
            device(f"own{n:02}", market.MEMORY_GI, nodes[n // PER_NODE], product="A10") for n in range(own)
        )
        models = [
            model(name, market.MEMORY_GI, slots=1, high=64, gpu=None, queue=Queue())
            for name in request_arrivals.names(calls)
        ]
        sources = (of.fabric, of.cloud)
        entries = tuple(ProviderSettings(name=one.name, keep_seconds=keep) for one in sources)
        self.world = world(models, self.own, leading_since_s=T0 - 500, settings=Settings(capacity=entries))
        self.patience_s = models[0].spec.queue.wait_seconds_max
        self.now_s, self.plan, self._planner = T0, Plan(), Planner()
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.waiting: dict[str, deque[Waiting]] = defaultdict(deque)
        self.running: dict[ReplicaId, str] = {}
        self.totals: dict[str, Total] = {}
        self.busy: set[str] = set()
        self.waits_s: list[float] = []
        self.gave_up, self._sequence = 0, 1
        self.broken: list[str] = []
        self.end_s = inf
        self._starts: dict[str, int] = defaultdict(int)
        self._ready_s: dict[ReplicaId, float] = {}
        self._orders: dict[str, int] = defaultdict(int)
        self.providers = {
            source.name: self._provider(source, there) for source, there in ((of.fabric, nodes), (of.cloud, []))
        }
        self._committed: dict[str, dict[int, float]] = {name: {} for name in self.providers}
        self._listed_s, self._offered_s = dict.fromkeys(self.providers, -inf), dict.fromkeys(self.providers, -inf)
        self._fold(ProvidersSeen(providers=tuple(self.providers)))
        self._show()
        self._schedule()

    def _provider(self, source: Source, nodes: Sequence[str]) -> FakeProvider:
        return FakeProvider(
            source.name, lambda: self.now_s, self._at, market.offers(source, nodes), source.pool,
            lambda order: self._fate(source), self._in_use, self._show,
        )  # fmt: skip

    def _fate(self, source: Source) -> Fate:
        self._orders[source.name] += 1
        return market.fate(source, self.seed, self._orders[source.name], self.faults)

    def _schedule(self) -> None:
        for one in self.calls:
            self._at(one.at_s, partial(self._arrive, one))
        for number, provider in enumerate(self.providers.values()):
            for begin_s, long_s in market.AWAY_S if self.faults else ():
                from_s = begin_s + number * 7200.0
                self._at(from_s, partial(setattr, provider, "away", True))
                self._at(from_s + long_s, partial(setattr, provider, "away", False))

    # --- time ---------------------------------------------------------------------------------------------------------

    def _at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._numbers), what))

    def go(self) -> None:
        """Run until TAIL_S after the last request, whatever the policy: all are billed for the same time."""
        self.end_s = T0 + max(one.at_s for one in self.calls) + TAIL_S
        while self.now_s < self.end_s:
            self._step()

    def left(self) -> int:
        """Number of Leases that are alive."""
        return sum(len(one.alive) for one in self.providers.values())

    def _step(self) -> None:
        due_s = min(self._timers[0][0] if self._timers else inf, self.end_s)
        if self.plan.next_s is not None:
            due_s = min(due_s, max(self.plan.next_s, self.now_s + 0.05))
        self.now_s = max(self.now_s, min(due_s, self.now_s + REPORT_S))
        while self._timers and self._timers[0][0] <= self.now_s:
            heapq.heappop(self._timers)[2]()
        self._engines()
        self._serve()
        self._providers()
        self._report()
        for _ in range(PLANS_MAX):
            self.plan = self._planner.plan(self.world, self.now_s)
            if not self.plan.actions:
                return
            for action in self.plan.actions:
                self._act(action)
        self.broken.append(f"the plan does not come to rest: {self.plan.actions[0]}")

    # --- requests -----------------------------------------------------------------------------------------------------

    def _arrive(self, one: Arrival) -> None:
        self.waiting[one.model].append(Waiting(self.now_s, one.takes_s))
        known = self.totals.get(one.model) or Total(model=ModelName(one.model), tenant=TENANT)
        self._total(replace(known, admitted=known.admitted + 1))
        self._at(self.patience_s, partial(self._give_up, one.model, self.now_s))

    def _give_up(self, name: str, since_s: float) -> None:
        line = self.waiting[name]
        while line and line[0].since_s <= since_s:
            self.waits_s.append(self.now_s - line.popleft().since_s)
            self.gave_up += 1

    def _serve(self) -> None:
        for name, line in self.waiting.items():
            if not line:
                continue
            free = [id for id in self._ready(name) if id not in self.running]
            for id in free[: len(line)]:
                one = line.popleft()
                self.waits_s.append(self.now_s - one.since_s)
                self.running[id] = name
                self._at(one.takes_s, partial(self._finish, id, one.takes_s))

    def _finish(self, id: ReplicaId, took_s: float) -> None:
        name = self.running.pop(id, None)
        if name is None:
            return  # its replica has already ended
        known = self.totals[name]
        busy_us = known.busy_slot_us + int(took_s * 1e6)
        self._total(replace(known, finished=known.finished + 1, busy_slot_us=busy_us))

    def _total(self, total: Total) -> None:
        self.totals[total.model] = total
        self.busy.add(total.model)

    def _ready(self, name: str) -> list[ReplicaId]:
        ids = self.world.by_model.get(ModelName(name), ())
        return [id for id in ids if self.world.replicas[id].state is S.READY]

    def _report(self) -> None:
        levels = []
        running: dict[str, int] = defaultdict(int)
        for name in self.running.values():
            running[name] += 1
        for name in {*running, *(name for name, line in self.waiting.items() if line)}:
            line = self.waiting[name]
            waits_s = self.now_s - line[0].since_s if line else 0.0
            left_s = self.patience_s - waits_s if line else None
            levels.append(Level(
                model=ModelName(name), tenant=TENANT, waiting=len(line), running=running[name], oldest_wait_s=waits_s,
                soonest_deadline_s=left_s,
            ))  # fmt: skip
        uses = [ReplicaUse(replica=id, hold=1, in_use=int(id in self.running)) for id in self.world.replicas]
        self._sequence += 1
        report = Report(
            gateway=GATEWAY, boot="b", sequence=self._sequence, epoch=self.world.epoch, version=self.world.version,
            levels=tuple(levels), replicas=tuple(uses), totals=tuple(self.totals[name] for name in sorted(self.busy)),
        )  # fmt: skip
        self.busy.clear()
        self._fold(Tick(), Reported(report=report))

    # --- replicas -----------------------------------------------------------------------------------------------------

    def _fold(self, *batch: object) -> None:
        self.world, _ = fold(self.world, batch, self.now_s)  # type: ignore[arg-type]

    def _act(self, action: Action) -> None:
        self._fold(Acted(action=action))
        if isinstance(action, StartReplica):
            self._begin(action.replica)
        elif isinstance(action, StopReplica):
            if self.running.pop(action.replica, None) is not None:
                self.broken.append(f"{action.replica} was stopped with a Call on it: {action.reason}")
            self._see(self.world.replicas[action.replica], Seen.CLEAN)
        elif isinstance(action, AcquireLease):
            self._order(action.order.id, lambda one: one.acquire_now(action.order))
        elif isinstance(action, ReleaseLease):
            self._order(action.order.id, lambda one: one.release_now(action.order))
        elif isinstance(action, FailReplica):
            self.broken.append(f"{action.replica} failed: {action.reason}")

    def _begin(self, of: Replica) -> None:
        self._starts[of.model] += 1
        rng = random.Random(f"{self.seed}/{of.model}/{self._starts[of.model]}")
        takes_s = START_S * rng.lognormvariate(0.0, START_SPREAD)
        self._ready_s[of.id] = self.now_s + takes_s
        self._at(0.0, lambda: None)
        self._at(takes_s, lambda: None)

    def _engines(self) -> None:
        for id, ready_s in [*self._ready_s.items()]:
            known = self.world.replicas.get(id)
            if known is None or known.state is not S.STARTING:
                if known is None:
                    del self._ready_s[id]
            elif self.now_s >= ready_s:
                del self._ready_s[id]
                self._see(known, Seen.READY)
            else:
                self._see(known, Seen.STARTING)

    def _see(self, of: Replica, seen: Seen) -> None:
        self._fold(seen_of(of, seen, started_s=of.times.created_s, proof="exited"))

    # --- Providers ----------------------------------------------------------------------------------------------------

    def _providers(self) -> None:
        for name, one in self.providers.items():
            for number, held in enumerate(one.ever):
                if held.committed:
                    self._committed[name].setdefault(number, self.now_s)
            moving = any(id.provider == name and not lease.in_use for id, lease in self.world.capacity.leases.items())
            if self.now_s >= self._listed_s[name] + (LIST_S if moving else ALL_S):
                self._ask(one)

    def _ask(self, one: FakeProvider) -> None:
        self._listed_s[one.name] = self.now_s
        try:
            self._fold(LeasesSeen(provider=one.name, leases=one.list_now(), began_s=self.now_s))
            if self.now_s >= self._offered_s[one.name] + ALL_S:
                self._fold(OffersSeen(provider=one.name, offers=one.offers_now()))
                self._offered_s[one.name] = self.now_s
        except (ConnectionError, ValueError):
            return

    def _order(self, id: LeaseId, what: Callable[[FakeProvider], None]) -> None:
        self._listed_s[id.provider] = min(self._listed_s[id.provider], self.now_s - LIST_S + 0.5)
        try:
            what(self.providers[id.provider])
        except RefusedError as error:
            self._fold(LeaseRefused(id=id, reason=str(error)))
        except (ConnectionError, TimeoutError):
            return

    def _show(self) -> None:
        there: tuple[Slice, ...] = tuple(one for provider in self.providers.values() for one in provider.slices)
        self._fold(SlicesSeen(slices=(*self.own, *there)))

    def _in_use(self, slices: tuple[Slice, ...]) -> bool:
        return any(self.world.by_slice.get(one.id) for one in slices)

    # --- results ------------------------------------------------------------------------------------------------------

    def paid(self) -> list[tuple[Held, float]]:
        """Added capacity that is billed, each item with the time from which it is billed."""
        return [
            (self.providers[name].ever[number], since_s)
            for name, known in self._committed.items()
            for number, since_s in known.items()
        ]


def play(
    calls: Sequence[Arrival], of: Market, policy: Policy, *, seed: int = 1, faults: float = market.FAULTS
) -> Outcome:
    """Run one policy."""
    with acting(policy):
        run = Replay(calls, of, seed, faults, policy.keep)
        run.go()
    if run.left() and (policy.keep == "auto" or policy.keep < TAIL_S / 2):
        run.broken.append(f"{run.left()} Leases are left")
    return Outcome(
        of.name, policy.name, len(calls), tuple(sorted(run.waits_s)), run.gave_up,
        market.bill(run.paid(), run.end_s),
        sum(one.orders for one in run.providers.values()), tuple(run.broken),
    )  # fmt: skip


if __name__ == "__main__":
    where, by, *days = sys.argv[1:]
    calls = request_arrivals.gentd26(Path(os.environ["GENTD26"]), int(days[0]) if days else None)
    done = play(calls, MARKETS[where], next(one for one in points() if one.name == by))
    print(done._replace(waits_s=()), [done.p(share) for share in (0.5, 0.9, 0.95, 0.99)])
