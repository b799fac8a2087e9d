"""Minimal eviction where node CPU is scarce: no victim can be spared, and no node's CPU is exceeded."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.placement import minimal_eviction
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.minimal_eviction import Assigned, Evictee, find_fewer_victims
from autoscaler.placement.model.types import Bin, EvictionLevel, PackResult, PlacementRequest
from autoscaler.state.resources import NOTHING, HostAmount, HostResources
from autoscaler.state.world import NodeId, SliceId
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_minimal_eviction import Batch, Every, holds, spareable
from tests.unit.autoscaler.placement.test_minimal_eviction_options import Has, places
from tests.unit.autoscaler.placement.test_packer import on, shelf, want
from tests.unit.autoscaler.placement.test_packer_hosts import CORES, asks, cores, host_of

SEEDS = st.integers(0, 1 << 40)
LONG = settings(derandomize=True, deadline=None, max_examples=examples(1500))


def scarce(seed: int) -> Batch:
    """2 or 3 nodes with too little CPU for their present and new replicas; memory is short in some of them."""
    rng, shelves, hosts = Random(seed), list[Bin](), dict[NodeId, HostResources]()
    for node in map(NodeId, ("n0", "n1", "n2")[: rng.randint(2, 3)]):
        here: list[Bin] = []
        for at in range(rng.randint(1, 2)):
            there = [
                on(
                    f"x{node}{at}{number}", rng.choice((2, 4, 9)), busy=rng.random() < 0.3,
                    priority=rng.choice((0, 0, 0, 1)), leaving=rng.random() < 0.2, host_usage=cores(rng.randint(0, 3)),
                )
                for number in range(rng.choice((0, 1, 1, 2)))
            ]  # fmt: skip
            here.append(shelf(device(f"g{node}{at}", 24, node), *there))
        held = sum(i.host_usage.cpu_milli for one in here for i in one.incumbents) // CORES
        hosts[node] = host_of(here, held + rng.choice((0, 1, 2, 3, 4)))
        shelves += here
    requests = [
        want(
            f"w{number}",
            rng.choice((2, 5, 9, 12, 20)),
            ordinal=number,
            priority=rng.randint(0, 2),
            force=rng.choice((EvictionLevel.NONE, EvictionLevel.BUSY, EvictionLevel.BUSY, EvictionLevel.BUSY)),
            unserved_since_s=rng.randint(0, 3),
            cpu_milli=rng.choice((0, 1, 2, 3, 4, 5)) * CORES,
            devices=rng.choice((0, 1, 1, 1, 1, 1)),
        )
        for number in range(rng.randint(2, 5))
    ]
    return Batch(requests, shelves, hosts if rng.random() < 0.8 else {NodeId("n0"): hosts[NodeId("n0")]})


def taken(found: Batch, answer: PackResult) -> tuple[dict[NodeId, HostAmount], dict[NodeId, HostAmount]]:
    """By node: what the immediate placements take, and what all placements with assigned room take."""
    nodes = {one.slice.id: one.slice.node for one in found.shelves}
    now, all_ = dict.fromkeys(found.hosts, NOTHING), dict.fromkeys(found.hosts, NOTHING)
    for placed in answer.placements:
        if placed.node in now:
            now[placed.node] = now[placed.node].plus(placed.want.kind.host_request)
            all_[placed.node] = all_[placed.node].plus(placed.want.kind.host_request)
    for missing in answer.unmet:
        node = nodes[missing.slices[0]] if missing.promised else None
        if node in all_:
            all_[node] = all_[node].plus(missing.want.kind.host_request)
    return now, all_


@LONG
@given(SEEDS)
def test_cpu_of_a_node_is_never_exceeded_now_or_after_evictions(seed: int) -> None:
    found = scarce(seed)
    answer, before = found.packed(), found.before()
    holds(found, answer, before)
    now, all_ = taken(found, answer)
    there = {i.replica: (one.slice.node, i) for one in found.shelves for i in one.incumbents}
    for node, host in found.hosts.items():
        removed = [there[one.replica][1] for one in answer.victims if there[one.replica][0] == node]
        soon = host.soon.plus(HostAmount(sum(i.host_usage.cpu_milli for i in removed), 0))
        assert host.left.holds(now[node])
        assert soon.holds(all_[node])


@LONG
@given(SEEDS)
def test_every_victim_is_necessary_for_a_placement_if_cpu_is_scarce(seed: int) -> None:
    """Replicas without a device keep their node, so their CPU is not available to others."""
    found = scarce(seed)
    answer = found.packed()
    hosts = dict(found.hosts)
    for placed in answer.placements:
        if not placed.slices and placed.node in hosts:
            hosts[placed.node] = hosts[placed.node].without(placed.want.kind.host_request)
    rest = answer._replace(placements=tuple(one for one in answer.placements if one.slices))
    assert spareable(rest, Every(found.shelves, hosts)) == []


def steps_of(monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> list[int]:
    """The number of steps of each search."""
    steps, run_ = list[int](), minimal_eviction._Search.run

    def counted(search: minimal_eviction._Search) -> tuple[minimal_eviction.Assignment, ...] | None:
        found = run_(search)
        steps.append(search.steps)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(minimal_eviction._Search, "run", counted)
        work()
    return steps


# --- single cases -----------------------------------------------------------------------------------------------------


def test_two_replicas_start_at_once_only_if_cpu_for_both_is_free_now() -> None:
    """On n0, 2 cores are free, and 2 more after y has left: a and b cannot both start there now."""
    for left in (2, 4):
        leaving = on("y", 1, leaving=True, host_usage=cores(2))
        shelves = [
            shelf(device("g0", 12, "n0")), shelf(device("h0", 12, "n0")), shelf(device("i0", 12, "n0"), leaving),
            shelf(device("q", 24, "q")), shelf(device("r", 24, "q")), shelf(device("p", 24, "p"), on("x", 20)),
        ]  # fmt: skip
        held = [
            Has(asks("a", 2), "q", now=True), Has(asks("b", 2), "r", now=True), Has(want("c", 22), "p"),
            Has(want("d", 22), "q"),
        ]  # fmt: skip
        found = places(held, shelves, {"n0": left + 2, "q": 8, "p": 8})
        assert (found is not None) == (left == 4)


def test_victim_search_places_a_replica_now_only_where_cpu_is_free_now() -> None:
    """The a and b replicas take 4 cores of each node in either case; c can start on n0 only if a1 starts there."""
    shelves = [
        *(shelf(device(f"g{at}", 8, f"n{at}")) for at in range(2)),
        *(shelf(device(f"h{at}", 6, f"n{at}")) for at in range(2)),
        shelf(device("q0", 4, "n0")), shelf(device("y", 3, "n0"), on("y", 3, leaving=True, host_usage=cores(3))),
        shelf(device("q", 24, "q")), shelf(device("p", 24, "p"), on("x", 24)),
    ]  # fmt: skip
    held = [
        Has(asks("a3", 3, 8), "g0", now=True), Has(asks("a1", 1, 8), "g1", now=True), Has(asks("b1", 1, 6), "h0"),
        Has(asks("b3", 3, 6), "h1"), Has(asks("c", 3, 4), "q", now=True), Has(want("d", 22), "p"),
    ]  # fmt: skip
    found = places(held, shelves, {"n0": 7, "n1": 4, "q": 4, "p": 4})
    assert found == {"a3": "g1", "a1": "g0", "b1": "h1", "b3": "h0", "c": "q0", "d": "q"}


def away(*nodes: str) -> tuple[NodeId, ...]:
    return tuple(map(NodeId, nodes))


def later(*held: tuple[PlacementRequest, str]) -> list[Assigned]:
    """Waiting placements, each on the given Slice."""
    return [Assigned(one, (SliceId(at),), now=False) for one, at in held]


def all_going(shelves: list[Bin], *ids: str) -> list[Evictee]:
    there = {one.slice.id: one.incumbents for one in shelves}
    return [Evictee(one, (SliceId(id),)) for id in ids for one in there[SliceId(id)]]


def test_waiting_replica_cannot_use_cpu_that_a_later_replica_frees() -> None:
    """On n0 are 4 cores: a takes 2 and x has 2. Only c may evict x, so b fits there only if it is served after c."""
    x, y = on("x", 20, host_usage=cores(2), kept=True, priority=1), on("y", 20)
    shelves = [shelf(device("g0", 24, "n0")), shelf(device("g1", 24, "n0"), x), shelf(device("p", 24, "p"), y)]
    hosts = {NodeId("n0"): host_of(shelves[:2], 4)}
    a, b = (asks("a", 2, avoids=away("p")), "g0"), (asks("b", 2), "p")
    c = want("c", 22, priority=2), "g1"
    for in_turn, found in (((a, b, c), False), ((a, c, b), True)):
        puts = find_fewer_victims(later(*in_turn), all_going(shelves, "p", "g1"), SliceIndex(shelves, hosts), T0)
        assert (puts is not None) == found


def test_eviction_for_cpu_is_assigned_to_the_replica_that_lacks_cpu() -> None:
    """On q is f, so x stays. y is evicted for b and not for a, which is first; evicting z or w would help neither."""
    y, z, w, x = on("y", 2, host_usage=cores(2)), on("z", 20), on("w", 10, host_usage=cores(2)), on("x", 20)
    shelves = [
        shelf(device("g0", 24, "n0"), y), shelf(device("g1", 24, "n0"), z), shelf(device("g2", 24, "n1"), w),
        shelf(device("q", 24, "q")), shelf(device("p", 24, "p"), x),
    ]  # fmt: skip
    held = later(
        (asks("a", 1, 5, avoids=away("n1", "p", "q")), "g0"), (asks("b", 3, 5, avoids=away("n1", "p", "q")), "g0"),
        (want("d", 20, avoids=away("n1", "p", "q")), "g1"), (asks("e", 3, avoids=away("n0", "p", "q")), "g2"),
        (want("f", 20, avoids=away("n0", "n1")), "p"),
    )  # fmt: skip
    hosts = {NodeId("n0"): host_of(shelves[:2], 4), NodeId("n1"): host_of(shelves[2:3], 4)}
    puts = find_fewer_victims(held, all_going(shelves, "p", "g0", "g1", "g2"), SliceIndex(shelves, hosts), T0)
    assert puts is not None
    assert [[one.model for one in put.victims] for put in puts] == [[], ["y"], ["z"], ["w"], []]


def test_replica_cannot_move_to_a_node_whose_cpu_is_freed_only_later() -> None:
    """After x has left, n0 has CPU for both; but a is first and may evict only y."""
    x = on("x", 4, host_usage=cores(3), kept=True, priority=1)
    shelves = [
        shelf(device("g0", 24, "n0")),
        shelf(device("g1", 24, "n0"), x),
        shelf(device("p", 24, "p"), on("y", 20)),
    ]
    held = later((asks("a", 1, 20), "p"), (asks("b", 2, 20, priority=2), "g1"))
    for many, found in ((3, False), (4, True)):
        hosts = {NodeId("n0"): host_of(shelves[:2], many), NodeId("p"): host_of([], 8)}
        assert (
            find_fewer_victims(held, all_going(shelves, "p", "g1"), SliceIndex(shelves, hosts), T0) is not None
        ) == found


def test_victim_search_is_skipped_if_an_unmovable_replica_needs_victim_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal_eviction, "MOVERS_MAX", 1)
    shelves = [shelf(device("g0", 12, "n0")), shelf(device("g1", 24, "n1"), on("x", 2, host_usage=cores(2)))]
    held = [
        Assigned(asks("a", 1, 8), (SliceId("g0"),), now=False),
        Assigned(asks("b", 4, 8), (SliceId("g1"),), now=False),
    ]
    yard = SliceIndex(shelves, {one.slice.node: host_of([one], 4) for one in shelves})
    x = Evictee(shelves[1].incumbents[0], (SliceId("g1"),))
    assert steps_of(monkeypatch, lambda: find_fewer_victims(held, [x], yard, T0)) == [0]


def test_victim_search_is_pruned_if_total_cpu_is_insufficient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only on n0 can a start, which leaves no core for b, wherever each c is placed."""
    shelves = [shelf(device(f"g{at}", 24, "n0")) for at in range(4)]
    shelves += [shelf(device("p", 24, "p"), on("x", 20))]
    held = [
        Assigned(asks("a", 3, 20), (SliceId("g0"),), now=True), Assigned(asks("b", 2, 10), (SliceId("p"),), now=False),
        *(Assigned(want(f"c{at}", 4 - at / 2), (SliceId("g1"),), now=False) for at in range(3)),
    ]  # fmt: skip
    held = [one._replace(want=change_request(one.want, avoids=away("p"))) for one in held]
    hosts = {NodeId("n0"): host_of(shelves[:4], 4)}
    yard, x = SliceIndex(shelves, hosts), Evictee(shelves[4].incumbents[0], (SliceId("p"),))
    assert steps_of(monkeypatch, lambda: find_fewer_victims(held, [x], yard, T0)) == [7]
