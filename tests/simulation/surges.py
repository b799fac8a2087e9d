"""Surges beyond a cluster's capacity, in virtual time over fold and plan, with all kinds of Provider failures.

A run is drawn from a seed: a few owned devices, a fabric and a cloud, Models that each need devices of their own, and
varying demand. Checked against the true state of the Providers: one Lease is in flight per unplaced replica, no
capacity in use is released, and no unneeded capacity is left. Replay one: `python -m tests.simulation.surges SEED`.
"""

from __future__ import annotations

import heapq
import random
import sys
from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any, NamedTuple

from autoscaler.capacity.lead_times import NO_LEARNT, estimate_lead_time
from autoscaler.demand import desired_replicas
from autoscaler.placement.capacity_simulation import list_missing_devices
from autoscaler.providers.provider import RefusedError
from autoscaler.provisioning.provisioner import UNLISTED_S
from autoscaler.provisioning.release import keep_s
from autoscaler.spec.model import Model
from autoscaler.state.actions import AcquireLease, Action, ReleaseLease, StartReplica
from autoscaler.state.capacity import (
    AcquireOrder,
    LearntSeen,
    LeaseId,
    LeaseRefused,
    LeasesSeen,
    Offer,
    OffersSeen,
    ProvidersSeen,
)
from autoscaler.state.events import LeadingSeen, Seen, SlicesSeen, Synced
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Slice
from tests.support.builders.worlds import GI, T0, Scene, device, model, world
from tests.support.fakes.provider import FakeProvider, Fate, Held

LIST_S, OFFERS_S = 5.0, 60.0
ORPHAN_S = 120.0
"""Capacity alive for this long after its need ended is an orphan, whether or not the `World` knows it.
The need of delivered capacity ends after its idle keep time (`autoscaler.provisioning.release.keep_s`).
"""
BLIND_S = 2 * UNLISTED_S
"""For how long a new leader may not know its predecessor's in-flight orders."""
DOUBLE, ORPHAN = "double supply", "orphan"
STORM_S = 900.0
LONG_S = 400.0
"""Longer than any delivery without faults."""
KINDS = ("refused", "never", "half", "elsewhere", "deaf", "lost_reply", "late", "late", "fails", "slow")


class Need(NamedTuple):
    """Demand for one Model during an interval, in Replicas."""

    model: str
    from_s: float
    to_s: float
    replicas: int


class Result(NamedTuple):
    """Results of a seed."""

    broken: list[str]
    orders: int
    released: int
    served: bool
    """Whether every Model that waited for LONG_S had a replica at some time in that interval."""
    hedges: int = 0
    """Number of orders that hedged another one for the same unplaced Replica."""

    def many(self, what: str) -> int:
        """Number of violations of this kind: DOUBLE or ORPHAN."""
        return sum(line.startswith(what) for line in self.broken)


class Surge(Scene):
    """One run."""

    def __init__(self, seed: int, *, faulty: bool = True) -> None:
        self.rng, self.faulty = random.Random(seed), faulty
        rng = self.rng
        models = [model(f"m{n}", 16, slots=1, high=4, idle_seconds=20.0, gpu=None) for n in range(rng.randint(1, 3))]
        self.own = tuple(device(f"own{n}", 16, "w1", product="A100") for n in range(rng.randint(1, 2)))
        begin = world(models, self.own, leading_since_s=T0 - 100)
        super().__init__(begin, _calls, start_s=rng.choice([2.0, 10.0]))
        self.needs = [self._need(rng.choice(models)) for _ in range(rng.randint(1, 4))]
        self.providers = {one.name: one for one in (self._rack(), self._cloud())}
        self.timers: list[tuple[float, int, Callable[[], None]]] = []
        self.broken: list[str] = []
        self.had: dict[Need, int] = {}
        self._plan_before, self._lack = self.plan, 0
        self._listed_s = dict.fromkeys(self.providers, -inf)
        self._offered_s = dict(self._listed_s)
        self._lost_s: dict[tuple[str, int], float] = {}
        self._unneeded_s: dict[tuple[str, int], float] = {}
        self._idle_s: dict[tuple[str, int], float] = {}
        self._are = ProvidersSeen(providers=tuple(self.providers), hedges=frozenset({"cloud"} if seed % 4 == 0 else ()))
        self._fold(self._are)
        self._show()
        if faulty:
            self._trouble()

    # --- inventory ----------------------------------------------------------------------------------------------------

    def _need(self, of: Model) -> Need:
        from_s = T0 + self.rng.uniform(5.0, 300.0)
        return Need(of.name, from_s, from_s + self.rng.choice([20.0, 120.0, 400.0]), self.rng.randint(1, 4))

    def _rack(self) -> FakeProvider:
        could = tuple(
            Offer(
                provider="rack",
                name=node,
                node=node,
                devices_max=3,
                expected_s=30.0,
                product="A100",
                memory_bytes=16 * GI,
                bought="fabric",
                price_per_hour=1.0,
                shared=True,
            )
            for node in ("w1", "w2")
        )
        return self._provider("rack", could, self.rng.randint(1, 4), 30.0)

    def _cloud(self) -> FakeProvider:
        could = Offer(
            provider="cloud", name="g4", product="A100", memory_bytes=16 * GI, devices_min=2, devices_max=2, many=4,
            bought="spot", price_per_hour=2.0, expected_s=120.0, shared=True,
        )  # fmt: skip
        return self._provider("cloud", (could,), 8, 120.0)

    def _provider(self, name: str, could: tuple[Offer, ...], pool: int, usual_s: float) -> FakeProvider:
        return FakeProvider(
            name, lambda: self.now_s, self._at, could, pool, lambda order: self._fate(order, usual_s), self._in_use,
            self._show,
        )  # fmt: skip

    def _fate(self, order: AcquireOrder, usual_s: float) -> Fate:
        del order
        took_s = usual_s * self.rng.uniform(0.5, 1.5)
        usual = Fate(after_s=took_s, commits_s=took_s * self.rng.choice([0.1, 0.9]))
        if not self.faulty or self.now_s > T0 + STORM_S or self.rng.random() < 0.5:
            return usual
        match self.rng.choice(KINDS):
            case "refused":
                return usual._replace(refused="no quota")
            case "elsewhere":
                return usual._replace(elsewhere="w9")
            case "fails":
                return usual._replace(fails_s=took_s * 0.8)
            case "slow":
                return usual._replace(after_s=usual_s * 40, commits_s=self.rng.choice([1.0, usual_s * 39]))
            case kind:
                options: dict[str, Any] = {kind: True}
                return usual._replace(**options)

    def _trouble(self) -> None:
        rng = self.rng
        for provider in self.providers.values():
            if rng.random() < 0.5:  # around the times of orders and of releases
                need = rng.choice(self.needs)
                begin_s = max(0.0, rng.choice([need.from_s, need.to_s, need.to_s + 100.0]) + rng.uniform(-5, 60) - T0)
                self._at(begin_s, partial(setattr, provider, "away", True))
                self._at(begin_s + rng.choice([20.0, 3600.0]), partial(setattr, provider, "away", False))
            if rng.random() < 0.2:
                self._at(rng.uniform(0.0, 300.0), partial(setattr, provider, "garbage", True))
                self._at(400.0, partial(setattr, provider, "garbage", False))
            if rng.random() < 0.2:
                self._at(rng.uniform(60.0, 500.0), partial(self._by_hand, provider))
        for _ in range(rng.choice([0, 0, 1, 2])):
            self._at(rng.uniform(5.0, 500.0), self.hand_over)

    def _by_hand(self, provider: FakeProvider) -> None:
        idle = [name for name, one in sorted(provider.held.items()) if one.slices and not self._in_use(one.slices)]
        if idle:
            provider.detach(self.rng.choice(idle))

    def hand_over(self) -> None:
        """Another process leads, a standby or a new one.
        It knows the reports of the driver and the Providers, and the learned values.
        """
        replicas, epoch, learnt = dict(self.world.replicas), self.world.epoch + 1, dict(self.world.capacity.learnt)
        if self.rng.random() < 0.5:
            self.world = world(self._models(), gateways=[], synced=False)
            self._fold(self._are)
            self._show()
        self._fold(LeadingSeen(epoch=epoch), LearntSeen(learnt=learnt))
        for one in replicas.values():
            self._see(one, Seen.READY if one.state in {S.READY, S.DRAINING} else Seen.STARTING)
        self._fold(Synced())
        self._listed_s = dict.fromkeys(self.providers, -inf)
        self._offered_s = dict(self._listed_s)

    # --- time ---------------------------------------------------------------------------------------------------------

    def _at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.timers, (self.now_s + delay_s, len(self.timers) + self.rng.randrange(1 << 30), what))

    def go(self, until_s: float) -> None:
        """Advance in steps of at most 5 s, less if an event is due."""
        while self.now_s < until_s:
            alive = any(one.alive for one in self.providers.values())
            if not alive and not self.world.capacity.leases and self.now_s > T0 + STORM_S:
                if not self.timers:
                    return  # no event is left
                self.now_s = min(max(self.now_s, self.timers[0][0] - 5.0), until_s - 5.0)
            step_s = 1.0 if (self._left() or alive) and self.now_s < T0 + STORM_S else 5.0
            self.run(step_s, step_s)
            self._check()

    def _left(self) -> bool:
        return any(need.from_s <= self.now_s <= need.to_s + 30.0 for need in self.needs)

    def _report(self) -> None:
        while self.timers and self.timers[0][0] <= self.now_s:
            heapq.heappop(self.timers)[2]()
        for name, one in self.providers.items():
            active = any(id.provider == name for id in self.world.capacity.leases)
            if self.now_s >= self._listed_s[name] + (LIST_S if active else OFFERS_S):
                self._ask(one)
        super()._report()

    def _ask(self, one: FakeProvider) -> None:
        self._listed_s[one.name] = self.now_s
        try:
            self._fold(LeasesSeen(provider=one.name, leases=one.list_now(), began_s=self.now_s))
            if self.now_s >= self._offered_s[one.name] + OFFERS_S:
                self._fold(OffersSeen(provider=one.name, offers=one.offers_now()))
                self._offered_s[one.name] = self.now_s
        except (ConnectionError, ValueError):
            return

    def _act(self, action: Action) -> None:
        if self._plan_before is not self.plan:
            self._plan_before, self._lack = self.plan, self._lacking()
        super()._act(action)
        if isinstance(action, AcquireLease):
            self._never_twice(action)
            self._order(action.order.id, lambda one: one.acquire_now(action.order))
        elif isinstance(action, ReleaseLease):
            self._order(action.order.id, lambda one: one.release_now(action.order))

    def _order(self, id: LeaseId, what: Callable[[FakeProvider], None]) -> None:
        self._listed_s[id.provider] = min(self._listed_s[id.provider], self.now_s - LIST_S + 0.5)
        try:
            what(self.providers[id.provider])
        except RefusedError as error:
            self._fold(LeaseRefused(id=id, reason=str(error)))
        except (ConnectionError, TimeoutError):
            return

    def _show(self) -> None:
        there = (*self.own, *(one for provider in self.providers.values() for one in provider.slices))
        self._fold(SlicesSeen(slices=there))

    def _in_use(self, slices: tuple[Slice, ...]) -> bool:
        return any(self.world.by_slice.get(one.id) for one in slices)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def _never_twice(self, action: AcquireLease) -> None:
        """The capacity that is truly in flight and counted on was less than the lack."""
        if action.order.hedge or action.reason.startswith("its provider does not list it"):
            return
        lack, known = self._lack, self.world.capacity.leases
        coming = [one for one in known.values() if one.coming(self.now_s) and not one.hedge]
        blind = self.now_s < self.world.leadership.leading_since_s + BLIND_S
        unknown = [] if blind else [one for one in self._truly_coming() if one.order.id not in known]
        before = [one for one in coming if one.id != action.order.id]
        devices = sum(len(list_missing_devices(self.world, one)) for one in before) + sum(
            one.order.devices for one in unknown
        )
        if devices >= lack:
            ids = sorted(one.id for one in before)
            self.broken.append(f"{DOUBLE}: {devices} Devices were on their way for {lack}: {ids}, {action.order.id}")

    def _needed(self, one: Held, key: tuple[str, int], lack: int) -> bool:
        """Whether capacity is in use, lacking, within its keep time, or paid for, undelivered and not cancellable.
        A new leader knows nothing of earlier times. Capacity that its provider reports and no inventory shows is waited
        for like an in-flight order.
        """
        if self._in_use(one.slices) or lack > 0 or one.phase != "here":
            self._idle_s.pop(key, None)
            return lack > 0 or one.phase == "here" or (one.phase == "coming" and one.committed)
        known = self.world.capacity.leases.get(one.order.id)
        if known is None or known.here_s is None:
            return known is not None and self.now_s < known.due_s
        idle_s = self.now_s - max(self._idle_s.setdefault(key, self.now_s), self.world.leadership.leading_since_s)
        offer = one.order.offer
        learnt = self.world.capacity.learnt.get(offer.kind, NO_LEARNT)
        return idle_s < keep_s(learnt, estimate_lead_time(offer, learnt).p50_s, idle_s)

    def _truly_coming(self) -> list[Held]:
        """In-flight orders that were not cancelled, of Providers whose answers are readable."""
        heard = [one for one in self.providers.values() if not (one.away or one.garbage)]
        there = (one for provider in heard for one in provider.alive)
        return [one for one in there if one.phase == "coming" and not one.cancelled]

    def _models(self) -> list[Model]:
        return list(self.world.models.values())

    def _lacking(self) -> int:
        """Number of wanted replicas that neither exist nor are started by this Plan."""
        starts = sum(isinstance(one, StartReplica) for one in self.plan.actions)
        live = {one.name: len(desired_replicas.list_live_replicas(self.world, one.name)) for one in self._models()}
        return (
            sum(
                max(0, desired_replicas.compute_desired_replicas(self.world, one, self.now_s).count - live[one.name])
                for one in self._models()
            )
            - starts
        )

    def _check(self) -> None:
        known, lack = self.world.capacity.leases, self._lacking()
        for provider in self.providers.values():
            for number, one in enumerate(provider.ever):
                key = provider.name, number
                hidden = provider.away or provider.garbage or one.cancelled or one.ended_s is not None
                if hidden or one.order.id in known:
                    self._lost_s.pop(key, None)
                elif self.now_s > self._lost_s.setdefault(key, self.now_s) + ORPHAN_S:
                    self.broken.append(f"{ORPHAN}: {one.order.id} is unknown to the leader")
                    self._lost_s[key] = inf  # reported only once
                if hidden:  # a leader that begins meanwhile learns of it when that ends
                    self._idle_s.pop(key, None)
                if hidden or self._needed(one, key, lack):
                    self._unneeded_s.pop(key, None)
                elif self.now_s > self._unneeded_s.setdefault(key, self.now_s) + ORPHAN_S:
                    self.broken.append(f"{ORPHAN}: no request needs {one.order.id}, which is {one.phase}")
                    self._unneeded_s[key] = inf
            if provider.disturbed:
                self.broken.append(f"{provider.name} was to take back what is used: {provider.disturbed}")
            if provider.forced:
                self.broken.append(f"{provider.name} was called to detach by force without an order: {provider.forced}")
        for need in self.needs:
            if need.from_s <= self.now_s <= need.to_s:
                self.had[need] = max(self.had.get(need, 0), len(self.ready(need.model)))


def _calls(now_s: float, scene: Scene) -> list[tuple[str, int, int]]:
    """Each replica serves one request; the others wait."""
    assert isinstance(scene, Surge)
    found = []
    for name in sorted({need.model for need in scene.needs}):
        many = sum(one.replicas for one in scene.needs if one.model == name and one.from_s <= now_s < one.to_s)
        running = min(many, len(scene.ready(name)))
        found.append((name, many - running, running))
    return found


def play(seed: int, *, faulty: bool = True, planned_twice: bool = True) -> Result:
    """Run one seed."""
    surge = Surge(seed, faulty=faulty)
    surge.planned_twice = planned_twice
    surge.go(T0 + STORM_S)
    surge.go(T0 + (8000.0 if faulty else 4000.0))
    left = [one.order.id for provider in surge.providers.values() for one in provider.alive]
    if left:
        surge.broken.append(f"{ORPHAN}: {left} are left")
    if surge.world.capacity.leases:
        surge.broken.append(f"the World still has {sorted(surge.world.capacity.leases)}")
    orders = sum(provider.orders for provider in surge.providers.values())
    released = len(surge.verbs("releaselease"))
    served = all(surge.had.get(need, 0) for need in surge.needs if need.to_s - need.from_s >= LONG_S)
    hedges = sum(isinstance(one, AcquireLease) and one.order.hedge for _, one in surge.actions)
    return Result(surge.broken, orders, released, served, hedges)


if __name__ == "__main__":
    first, _, last = sys.argv[1].partition("-")
    totals = [0, 0, 0]
    for seed in range(int(first), int(last or first) + 1):
        result = play(seed)
        totals = [totals[0] + 1, totals[1] + result.orders, totals[2] + len(result.broken)]
        for line in result.broken:
            print(f"seed {seed}: {line}")
    print(f"{totals[0]} surges, {totals[1]} orders, {totals[2]} broken")
