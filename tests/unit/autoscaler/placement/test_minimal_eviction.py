"""Minimal eviction: no victim of a batch can be spared, compared with an exhaustive search.

Cost of the minimal-eviction search: infeasible and already tried placements are not tried again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, product
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ReplicaId, TenantName
from autoscaler.placement import minimal_eviction, packer
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.predicates import can_evict, find_required_amount
from autoscaler.placement.model.tenant_isolation import domain_of, has_tenant_conflict
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.slicing.nvidia_device_plugin import TIMESLICE
from autoscaler.state.resources import HostResources, ResourceAmount
from autoscaler.state.world import DeviceId, NodeId, Slice
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import GI, T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import on, placed, run, shelf, victims, want
from tests.unit.autoscaler.placement.test_packer_hosts import CORES, cores, host_of

# --- exhaustive search ------------------------------------------------------------------------------------------------


class Every:
    """Decides whether a set of victims suffices, by trying every placement. Uses nothing of the packer but its
    eviction and isolation rules.
    """

    def __init__(self, shelves: Sequence[Bin], hosts: dict[NodeId, HostResources]) -> None:
        self.shelves, self.hosts = shelves, hosts
        self.there: dict[ReplicaId, Occupant] = {i.replica: i for one in shelves for i in one.incumbents}

    def can_be(
        self, now: Sequence[PlacementRequest], later: Sequence[PlacementRequest], victims: Iterable[ReplicaId]
    ) -> bool:
        """`now`: placed at once; `later`: placed in this order after evictions."""
        ways = [[*self._ways(one)] for one in (*now, *later)]
        return any(self._holds(now, later, places, {*victims}) for places in product(*ways))

    def _ways(self, one: PlacementRequest) -> Iterator[tuple[Bin, ...]]:
        could = [at for at in self.shelves if at.slice.healthy and find_required_amount(one, at) is not None]
        for some in combinations(could, one.kind.devices):
            if len({at.slice.node for at in some}) == 1:
                yield some

    def _holds(
        self,
        now: Sequence[PlacementRequest],
        later: Sequence[PlacementRequest],
        places: Sequence[tuple[Bin, ...]],
        may_go: set[ReplicaId],
    ) -> bool:
        self.left = {one.slice.id: one.free for one in self.shelves}
        self.hosts_left = {node: host.left for node, host in self.hosts.items()}
        self.came: list[tuple[PlacementRequest, tuple[Bin, ...]]] = []
        starts = [at for some in places[: len(now)] for at in some]
        if len({at.slice.device for at in starts}) < len(starts) or any(at.locked for at in starts):
            return False
        for one, some in zip(now, places, strict=False):
            if any(self._strangers(one, at) for at in some) or not self._take(one, some):
                return False
        for shelf_ in self.shelves:
            self.left[shelf_.slice.id] = self.left[shelf_.slice.id].plus(shelf_.coming)
        for node, host in self.hosts.items():
            self.hosts_left[node] = self.hosts_left[node].plus(host.coming)
        stay = set(may_go)
        for one, some in zip(later, places[len(now) :], strict=True):
            strangers = [i for at in some for i in self._strangers(one, at) if i.replica not in may_go - stay]
            stays = [i for i in strangers if not i.leaving]
            if any(i.stuck for i in strangers) or not all(i in self._willing(one, stay, stays) for i in stays):
                return False
            self._leave(stays, stay)
            for at in some:
                if not self.left[at.slice.id].holds(find_required_amount(one, at) or ResourceAmount(0, 0)):
                    self._leave(self._willing(one, stay, at.incumbents), stay)
            node = some[0].slice.node
            if node in self.hosts and not self.hosts_left[node].holds(one.kind.host_request):
                around = [i for at in self.shelves if at.slice.node == node for i in at.incumbents if any(i.host_usage)]
                self._leave(self._willing(one, stay, around), stay)
            if not self._take(one, some):
                return False
        return True

    def _willing(self, one: PlacementRequest, stay: set[ReplicaId], there: Iterable[Occupant]) -> list[Occupant]:
        return [i for i in there if i.replica in stay and can_evict(one, i, T0)]

    def _strangers(self, one: PlacementRequest, at: Bin) -> list[Occupant]:
        domain = domain_of(at.slice)
        beside = [other for other in self.shelves if domain is not None and domain_of(other.slice) == domain]
        return [i for other in beside for i in other.incumbents if has_tenant_conflict(one.trust, i.trust)]

    def _leave(self, those: Iterable[Occupant], stay: set[ReplicaId]) -> None:
        for one in {i.replica: i for i in those}.values():
            stay.discard(one.replica)
            for at in self.shelves:
                for i in at.incumbents:
                    if i.replica == one.replica:
                        self.left[at.slice.id] = self.left[at.slice.id].plus(i.room)
                        node = at.slice.node
            if node in self.hosts_left:
                self.hosts_left[node] = self.hosts_left[node].plus(one.host_usage)

    def _take(self, one: PlacementRequest, some: tuple[Bin, ...]) -> bool:
        for other, there in self.came:
            domains = {domain_of(at.slice) for at in there} & {domain_of(at.slice) for at in some}
            if has_tenant_conflict(one.trust, other.trust) and domains - {None}:
                return False
        self.came.append((one, some))
        for at in some:
            room = find_required_amount(one, at) or ResourceAmount(0, 0)
            if not self.left[at.slice.id].holds(room):
                return False
            self.left[at.slice.id] = self.left[at.slice.id].less(room)
        node = some[0].slice.node
        if node in self.hosts:
            if not self.hosts_left[node].holds(one.kind.host_request):
                return False
            self.hosts_left[node] = self.hosts_left[node].less(one.kind.host_request)
        return True


def spareable(answer: PackResult, every: Every) -> list[ReplicaId]:
    """Victims that need not be evicted."""
    now = [one.want for one in answer.placements]
    later = [one.want for one in answer.unmet if one.promised]
    going = [one.replica for one in answer.victims]
    return [one for one in going if every.can_be(now, later, [other for other in going if other != one])]


# --- small batches ----------------------------------------------------------------------------------------------------


class Batch(NamedTuple):
    """Placement requests, the Slices of one or two nodes, and the nodes' host resources."""

    wants: list[PlacementRequest]
    shelves: list[Bin]
    hosts: dict[NodeId, HostResources]

    def packed(self) -> PackResult:
        return pack(tuple(self.wants), SliceIndex(self.shelves, self.hosts), frozenset(), RestartCosts(), T0)

    def before(self) -> PackResult:
        """The result without the search for a smaller victim set."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(packer, "find_fewer_victims", lambda *_: None)
            return self.packed()


def pair(rng: Random, number: int) -> list[Bin]:
    """Two devices of one node, with one replica that uses both."""
    both = on(f"y{number}", 24, 100, others=1, priority=rng.choice((0, 0, 1)), busy=rng.random() < 0.3)
    node = f"n{rng.randint(0, 1)}"
    return [shelf(device(f"g{number}{half}", 24, node), both) for half in "ab"]


def halves(number: int) -> list[Bin]:
    """A device divided into two Slices."""
    both = [replace(device(f"g{number}{half}", 12), device=DeviceId(f"g{number}")) for half in "ab"]
    made = [shelf(one, on(f"z{one.id}", 3 + 4 * at)) for at, one in enumerate(both)]
    return [dataclasses.replace(one, whole=False) for one in made]


def filled(rng: Random, slice_: Slice, most: int, *, trusty: bool, hosted: bool) -> Bin:
    there: list[Occupant] = []
    for at in range(rng.randint(0, most)):
        room = rng.randint(1, 9)
        if sum(i.room.memory_bytes for i in there) + room * GI > slice_.memory_bytes:
            break
        leaving = rng.random() < 0.15
        there.append(
            on(
                f"x{slice_.id}{at}", room, rng.choice((0, 0, 30)), priority=rng.choice((0, 0, 1, 2)),
                busy=rng.random() < 0.3, kept=rng.random() < 0.1, evictable_s=rng.choice((0.0, 0.0, T0, T0 + 1)),
                leaving=leaving, stuck=leaving and rng.random() < 0.3,
                trust=rng.choice(TRUSTS) if trusty else (), host_usage=cores(rng.randint(0, 2) if hosted else 0),
            )
        )  # fmt: skip
    made = shelf(slice_, *there, locked=rng.random() < 0.1)
    made.trusts = frozenset(i.trust for i in there if i.trust)
    return made


TRUSTS = ((), (TenantName("acme"),), (TenantName("zeta"),))
SIZES = (0, 2, 3, 4, 5, 6, 8, 9, 12, 16, 20)
FORCES = (
    EvictionLevel.NONE,
    EvictionLevel.LOWER,
    EvictionLevel.IDLE,
    EvictionLevel.BUSY,
    EvictionLevel.BUSY,
    EvictionLevel.BUSY,
)


def batch(seed: int, *, elastic: bool = False) -> Batch:
    """A random batch: 2 to 4 devices, up to 8 replicas on them, and 2 to 5 placement requests."""
    rng = Random(seed)
    shelves: list[Bin] = []
    several, trusty, hosted = rng.random() < 0.3, rng.random() < 0.3, rng.random() < 0.4
    for number in range(rng.randint(2, 4)):
        if several and rng.random() < 0.2:
            shelves += pair(rng, number) if rng.random() < 0.6 else halves(number)
            continue
        kind = rng.choice((TIMESLICE, "mps", "")) if trusty else ""
        slice_ = device(f"g{number}", rng.choice((12, 24, 24)), f"n{rng.randint(0, 1)}", kind=kind)
        left = 8 - sum(len(one.incumbents) for one in shelves)
        shelves.append(filled(rng, slice_, max(0, min(left, 4)), trusty=trusty, hosted=hosted))
    requests = [
        want(
            f"w{number}", rng.choice(SIZES), ordinal=number, compute_percent=rng.choice((0, 0, 40)),
            devices=2 if several and rng.random() < 0.4 else 1, priority=rng.randint(0, 2), force=rng.choice(FORCES),
            unserved_since_s=rng.randint(0, 3), trust=rng.choice(TRUSTS) if trusty else (),
            cpu_milli=rng.randint(0, 3) * CORES if hosted else 0,
        )
        for number in range(rng.randint(2, 5))
    ]  # fmt: skip
    if elastic:
        requests = [
            change_request(one, spare_bytes=one.kind.memory_bytes // 10)
            if one.kind.devices == 1 and rng.random() < 0.7
            else one
            for one in requests
        ]
    nodes = sorted({one.slice.node for one in shelves} if hosted else ())
    hosts = {node: host_of([one for one in shelves if one.slice.node == node], 8) for node in nodes}
    return Batch(requests, shelves, {node: hosts[node] for node in nodes if rng.random() < 0.8})


LONG = settings(derandomize=True, deadline=None, max_examples=examples(1500))
QUICK = settings(derandomize=True, deadline=None, max_examples=examples(400))
SEEDS = st.integers(0, 1 << 40)


def holds(found: Batch, answer: PackResult, before: PackResult) -> None:
    """Check what holds for every result, minimal or not: no placement request loses its room, and there are no
    additional victims.
    """
    now, later = ([one.want for one in answer.placements], [one.want for one in answer.unmet if one.promised])
    assert {one.want for one in before.placements} <= {*now}, "who is placed now stays placed now"
    assert {one.want for one in before.unmet if one.promised} <= {*now, *later}, "who has room promised has room"
    assert len(answer.placements) + len(answer.unmet) == len(found.wants)
    assert {one.replica for one in answer.victims} <= {one.replica for one in before.victims}
    there = {i.replica: i for one in found.shelves for i in one.incumbents}
    assert all(can_evict(victim.want, there[victim.replica], T0) for victim in answer.victims)
    left = {one.slice.id: (one, one.free) for one in found.shelves}
    for placement in answer.placements:
        for id in placement.slices:
            at, free = left[id]
            room = find_required_amount(placement.want, at)
            assert room is not None
            room = room._replace(memory_bytes=placement.memory_bytes)
            assert free.holds(room)
            assert not at.locked
            left[id] = at, free.less(room)
    starts = [left[id][0].slice.device for placement in answer.placements for id in placement.slices]
    assert len({*starts}) == len(starts), "one starts at a time"


@LONG
@given(SEEDS)
def test_each_victim_of_a_random_batch_is_needed_for_a_placement(seed: int) -> None:
    found = batch(seed)
    answer = found.packed()
    assert spareable(answer, Every(found.shelves, found.hosts)) == []


@LONG
@given(SEEDS)
def test_sparing_a_victim_keeps_all_placements_and_adds_no_victims(seed: int) -> None:
    found = batch(seed)
    answer, before = found.packed(), found.before()
    holds(found, answer, before)
    if answer != before:
        now, later = ([one.want for one in answer.placements], [one.want for one in answer.unmet if one.promised])
        removed = [one.replica for one in answer.victims]
        kept = [one for one in now if one in {placed.want for placed in before.placements}]
        others = [
            one for one in (*now, *later) if one not in kept and one in {m.want for m in before.unmet if m.promised}
        ]
        every = Every(found.shelves, found.hosts)
        assert every.can_be(kept, sorted(others, key=in_turn), removed)


def in_turn(one: PlacementRequest) -> tuple[float, float, str, int]:
    return -one.urgency.priority, one.urgency.unserved_since_s, one.model, one.ordinal


@QUICK
@given(SEEDS)
def test_elastic_replica_keeps_its_allocated_memory_when_moved(seed: int) -> None:
    found = batch(seed, elastic=True)
    answer, before = found.packed(), found.before()
    granted = {one.want: one.memory_bytes for one in before.placements}
    got = {one.want: one for one in answer.placements if one.want in granted}
    assert got.keys() == granted.keys()
    shared = [one for one in got.values() if one.want.kind.devices == 1 and one.want.kind.memory_bytes]
    assert all(one.memory_bytes == granted[one.want] for one in shared)
    assert {one.replica for one in answer.victims} <= {one.replica for one in before.victims}


@QUICK
@given(SEEDS, st.randoms(use_true_random=False))
def test_shuffled_input_gives_the_same_minimal_eviction(seed: int, rng: Random) -> None:
    found, other = batch(seed), batch(seed)
    answer = found.packed()
    rng.shuffle(other.wants)
    rng.shuffle(other.shelves)
    assert other.packed() == answer
    assert found == batch(seed)


# --- search limits ----------------------------------------------------------------------------------------------------


@QUICK
@given(SEEDS, st.sampled_from(["STEPS_MAX", "MOVERS_MAX", "PLACES_MAX"]), st.integers(0, 5))
def test_victims_are_valid_even_if_the_victim_search_reaches_its_limits(seed: int, bound: str, most: int) -> None:
    found = batch(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(minimal_eviction, bound, most)
        holds(found, found.packed(), found.before())


def test_victim_search_without_an_early_solution_stops_at_its_step_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many placement requests of many sizes, for which no solution that spares a victim is found early."""
    rng, steps = Random(1), list[tuple[int, int]]()
    run_ = minimal_eviction._Search.run

    def counted(search: minimal_eviction._Search) -> tuple[minimal_eviction.Assignment, ...] | None:
        found = run_(search)
        steps.append((search.steps, search._steps_max))
        return found

    monkeypatch.setattr(minimal_eviction._Search, "run", counted)
    monkeypatch.setattr(minimal_eviction, "STEPS_MAX", 300)
    shelves = [
        shelf(device(f"g{at}", 80), *(on(f"x{at}-{one}", rng.randint(9, 19)) for one in range(4))) for at in range(24)
    ]
    requests = [want(f"w{at}", rng.randint(5, 47), ordinal=at, force=EvictionLevel.BUSY) for at in range(20)]
    found = Batch(requests, shelves, {})
    answer = found.packed()
    assert sum(taken for taken, _ in steps) <= 300
    assert all(taken <= most for taken, most in steps)
    assert any(taken == most for taken, most in steps)
    holds(found, answer, found.before())


# --- single cases -----------------------------------------------------------------------------------------------------


def test_replica_is_placed_elsewhere_to_spare_a_victim() -> None:
    """Each is placed correctly on its own: a where the least is wasted, then b where only evicting x makes room."""
    shelves = [shelf(device("g0", 12)), shelf(device("g1", 24), on("x", 14, busy=True))]
    first = want("a", 10, priority=1)
    assert placed(run([first], shelves)) == [("a", "g0")]
    answer = run([first, want("b", 12)], shelves)
    assert (placed(answer), victims(answer)) == ([("a", "g1"), ("b", "g0")], [])


def test_victim_search_runs_only_with_victims_and_several_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> None:
        raise AssertionError("there is nothing to find")

    monkeypatch.setattr(packer, "find_fewer_victims", never)
    kept = on("kept", 20, kept=True)
    answer = run(
        [want("a", 20), want("b", 24, force=EvictionLevel.NONE)],
        [shelf(device("g0"), on("x", 20)), shelf(device("g1"), kept)],
    )
    assert victims(answer) == ["x"]
    assert placed(run([want("a"), want("b")], [shelf(device("g0")), shelf(device("g1"))])) == [("a", "g0"), ("b", "g1")]
    with pytest.raises(AssertionError, match="nothing to find"):
        run(
            [want("a", 20), want("b", 4)],
            [shelf(device("g0"), on("x", 20)), shelf(device("g1", 8), on("y", 2, kept=True))],
        )


def test_immediate_placement_is_not_delayed_to_spare_a_victim() -> None:
    """If a waited for the replica leaving g1, b could start on g0 at once, and x could stay."""
    going = on("going", 10, leaving=True)
    shelves = [shelf(device("g0")), shelf(device("g1", 12), going), shelf(device("g2"), on("x", 20))]
    answer = run([want("a", 10, priority=1), want("b", 22)], shelves)
    assert (placed(answer), victims(answer)) == ([("a", "g0")], ["x"])
    free = run([want("a", 10, priority=1), want("b", 22)], [shelves[0], shelf(device("g1", 12)), shelves[2]])
    assert (placed(free), victims(free)) == ([("a", "g1"), ("b", "g0")], [])


def test_victim_is_attributed_to_the_replica_that_needs_its_device() -> None:
    """Initially d is on g2, so x is evicted for a and y for b. With d on g1, a starts on g2, and b waits for x."""
    shelves = [shelf(device("g0"), on("x", 20)), shelf(device("g1"), on("y", 20, priority=1)), shelf(device("g2", 10))]
    requests = [want("d", 4, priority=3), want("a", 10, priority=2, unserved_since_s=0), want("b", 22, priority=2)]
    answer = run([requests[0], requests[1], change_request(requests[2], unserved_since_s=1.0)], shelves)
    assert placed(answer) == [("d", "g1"), ("a", "g2")]
    assert [(one.model, one.want.model) for one in answer.victims] == [("x", "b")]
    assert [(one.reason, one.promised) for one in answer.unmet] == [("waits on g0 for the eviction of x", True)]


def test_two_device_victim_is_evicted_alone_for_a_two_device_replica() -> None:
    """The replica on two devices makes room for both; no other replica is evicted, however cheap."""
    both = on("both", 24, 100, others=1, busy=True)
    shelves = [shelf(device("g0"), on("idle", 4)), shelf(device("g1"), both), shelf(device("g2"), both)]
    assert victims(run([want("a", 20, devices=2)], shelves)) == ["both"]


def counted(
    monkeypatch: pytest.MonkeyPatch, requests: Iterable[PlacementRequest], shelves: Iterable[Bin]
) -> tuple[PackResult, list[int]]:
    """The result, and the number of steps of each search."""
    steps, run_ = list[int](), minimal_eviction._Search.run

    def one(search: minimal_eviction._Search) -> tuple[minimal_eviction.Assignment, ...] | None:
        found = run_(search)
        steps.append(search.steps)
        return found

    monkeypatch.setattr(minimal_eviction, "STEPS_MAX", 1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(minimal_eviction._Search, "run", one)
        return run(requests, shelves), steps


def filled_bin(*free: float) -> list[Bin]:
    """24 GiB devices with this much free memory; x0, on the first, may be evicted, the others may not."""
    return [
        shelf(device(f"g{at}"), on(f"x{at}", 24 - left, kept=at > 0, busy=True, priority=9 * bool(at)))
        for at, left in enumerate(free)
    ]


def test_victim_search_takes_no_step_if_total_free_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [want("a", 11), want("b", 11, ordinal=1), want("c", 6, ordinal=2)]
    answer, steps = counted(monkeypatch, requests, filled_bin(11, 11.5))
    assert (victims(answer), steps) == (["x0"], [0])


def test_victim_search_does_not_repeat_equivalent_assignments(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of seven requests has no room on six devices, each of which fits any request: 720 equivalent assignments."""
    requests = [want(f"w{at}", 6, ordinal=at) for at in range(7)]
    answer, steps = counted(monkeypatch, requests, filled_bin(*(10 + at / 8 for at in range(6))))
    assert victims(answer) == ["x0"]
    assert 6 <= sum(steps) < 6 * 2**6


def test_two_victims_on_one_device_are_spared_by_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    both = on("x", 1, busy=True), on("y", 1, busy=True), on("stays", 12, kept=True, priority=9)
    shelves = [shelf(device("g0", 12)), shelf(device("g1", 24), *both)]
    answer, steps = counted(monkeypatch, [want("a", 10, priority=1), want("b", 12)], shelves)
    assert (victims(answer), len(steps)) == ([], 1)
    monkeypatch.setattr(minimal_eviction._Search, "run", lambda _: None)
    assert victims(run([want("a", 10, priority=1), want("b", 12)], shelves)) == ["x", "y"], "without the search"


def test_victim_search_is_skipped_if_an_unmovable_replica_needs_the_victim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal_eviction, "MOVERS_MAX", 1)
    requests = [want("a", 8, priority=1), want("b", 20)]
    shelves = [shelf(device("g0", 12), on("y", 6)), shelf(device("g1", 24), on("x", 20))]
    answer, steps = counted(monkeypatch, requests, shelves)
    assert (sorted(victims(answer)), min(steps)) == (["x", "y"], 0)
