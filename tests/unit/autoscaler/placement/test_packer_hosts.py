"""The packer on nodes that have too little CPU or host memory for their devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ReplicaId
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.predicates import can_evict, find_required_amount
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import NOTHING, HostAmount, HostResources, ResourceAmount
from autoscaler.state.world import NodeId, SliceId
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import GI, T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import on, placed, shelf, victims, want

N0, N1 = NodeId("n0"), NodeId("n1")
CORES = 1000


def host_of(shelves: Iterable[Bin], cores: int, memory_gi: int = 64) -> HostResources:
    """The host resources of a node with these bins."""
    size = HostAmount(cores * CORES, memory_gi * GI)
    host, coming = HostResources(*size, *size), NOTHING
    for one in {i.replica: i for each in shelves for i in each.incumbents}.values():
        host = host.without(one.host_usage)
        coming = coming.plus(one.host_usage) if one.leaving and not one.stuck else coming
    return host._replace(coming=coming)


def run(requests: Iterable[PlacementRequest], shelves: list[Bin], cores: Mapping[NodeId, int]) -> PackResult:
    hosts = {node: host_of([one for one in shelves if one.slice.node == node], many) for node, many in cores.items()}
    return pack(tuple(requests), SliceIndex(shelves, hosts), frozenset(), RestartCosts(), T0)


def cores(many: int, memory_gi: int = 0) -> HostAmount:
    return HostAmount(many * CORES, memory_gi * GI)


def asks(name: str, many: int, memory_gi: float = 10, **fields: object) -> PlacementRequest:
    return want(name, memory_gi, cpu_milli=many * CORES, **fields)


def test_node_without_enough_cpu_is_skipped() -> None:
    slices = [shelf(device("g0", node="n0")), shelf(device("g1", 80, "n1"))]
    assert placed(run([asks("a", 4)], slices, {N0: 2, N1: 8})) == [("a", "g1")]
    assert placed(run([asks("a", 4)], slices, {N1: 8})) == [("a", "g0")], "of one that is not known any amount fits"


def test_reason_for_an_unplaced_replica_names_the_missing_cpu_and_memory() -> None:
    slices = [shelf(device("g0", node="n0"), on("x", 1, host_usage=cores(3), kept=True))]
    answer = run([asks("a", 2)], slices, {N0: 4}).unmet[0]
    assert not answer.never
    assert answer.reason == (
        "needs 10Gi on one device and 2 cores on its node; node n0 has too little CPU: 1 cores left of 4 cores"
    )
    both = want("a", cpu_milli=2 * CORES, host_bytes=63 * GI)
    kept = on("x", 1, host_usage=cores(3, 60), kept=True)
    assert "has too little CPU and memory: 1 cores left of 4 cores, 4Gi left of 64Gi" in (
        run([both], [shelf(device("g0"), kept)], {N0: 4}).unmet[0].reason
    )


def test_replica_exceeding_cpu_of_every_node_is_reported_as_never_fitting() -> None:
    answer = run([asks("a", 9)], [shelf(device("g0"))], {N0: 8}).unmet[0]
    assert (answer.reason, answer.never) == (
        "needs 10Gi on one device and 9 cores on its node; no node with such devices has more than 8 cores",
        True,
    )


def test_cpu_shortage_evicts_a_replica_on_another_device_of_the_node() -> None:
    slices = [
        shelf(
            device("g0", node="n0"), on("idle", 1, host_usage=cores(2)), on("busy", 1, host_usage=cores(2), busy=True)
        ),
        shelf(device("g1", node="n0")),
    ]
    answer = run([asks("a", 3, 24)], slices, {N0: 5})
    assert victims(answer) == ["idle"]
    assert answer.unmet[0].reason == "waits on g1 for the eviction of idle"


def test_eviction_for_cpu_picks_only_the_replica_that_frees_enough() -> None:
    slices = [
        shelf(device("g0", node="n0"), on("a1", 1), on("a2", 1, host_usage=cores(1)), on("a3", 1, host_usage=cores(4))),
        shelf(device("g1", node="n0")),
    ]
    assert victims(run([asks("z", 4, 24)], slices, {N0: 5})) == ["a3"]


def test_cpu_victim_is_spared_if_a_later_victim_frees_enough() -> None:
    slices = [
        shelf(
            device("g0", node="n0"),
            on("k", 20, kept=True),
            on("x", 1, host_usage=cores(2)),
            on("y", 1, host_usage=cores(5)),
        ),
        shelf(device("g1", node="n0")),
    ]
    assert victims(run([asks("a", 2, 12), asks("b", 3, 12)], slices, {N0: 7})) == ["y"]


def test_new_replica_waits_for_the_cpu_of_a_draining_replica() -> None:
    slices = [
        shelf(device("g0", node="n0"), on("x", 1, host_usage=cores(4), leaving=True)),
        shelf(device("g1", node="n0")),
    ]
    answer = run([asks("a", 3, 24)], slices, {N0: 4})
    assert victims(answer) == []
    assert (answer.unmet[0].reason, answer.unmet[0].promised) == ("waits on g0 until x has stopped", True)


def test_cpu_of_a_draining_replica_is_promised_only_once() -> None:
    leaver = on("x", 1, host_usage=cores(4), leaving=True)
    slices = [
        shelf(device("g0", node="n0"), leaver), shelf(device("g1", node="n0")), shelf(device("g2", node="n0")),
    ]  # fmt: skip
    first, second = run([asks("a", 3, 24), asks("b", 3, 24)], slices, {N0: 4}).unmet
    assert (first.promised, second.promised) == (True, False)
    small = [asks("a", 2, 24), asks("b", 2, 24)]
    assert all(one.promised for one in run(small, slices, {N0: 4}).unmet)


def test_multi_device_replica_needs_its_cpu_once_not_per_device() -> None:
    slices = [shelf(device(f"g{n}", node="n0")) for n in range(2)]
    slices.append(shelf(device("g2", node="n0"), on("x", 1, host_usage=cores(3)), on("y", 1, host_usage=cores(3))))
    answer = run([asks("a", 4, 24, devices=2)], slices, {N0: 8})
    assert len(victims(answer)) == 1, answer
    assert placed(run([asks("a", 2, 24, devices=2)], slices, {N0: 8})) == [("a", "g0", "g1")]


def test_replica_without_cpu_request_fits_a_node_with_overcommitted_cpu() -> None:
    slices = [shelf(device("g0", node="n0"), on("x", 1, host_usage=cores(9)))]
    assert placed(run([want("a", 2)], slices, {N0: 8})) == [("a", "g0")]


QUICK = settings(derandomize=True, deadline=None, max_examples=examples(400))
WANTS = st.lists(
    st.builds(
        lambda name, memory_gi, many, host_gi, devices, priority: want(
            name, memory_gi, cpu_milli=many * CORES, host_bytes=host_gi * GI, devices=devices, priority=priority
        ),
        st.sampled_from("abc"), st.sampled_from([1, 8, 20]), st.integers(0, 6), st.sampled_from([0, 0, 20]),
        st.sampled_from([1, 1, 1, 2, 0]), st.integers(0, 2),
    ),
    max_size=6,
)  # fmt: skip


@st.composite
def benches(draw: st.DrawFn) -> list[Bin]:
    found: list[Bin] = []
    for number in range(draw(st.integers(1, 5))):
        there: list[Occupant] = []
        for at in range(draw(st.integers(0, 3))):
            beside = cores(draw(st.integers(0, 4)), draw(st.sampled_from([0, 10])))
            one = on(f"x{number}{at}", draw(st.sampled_from([2, 8])), host_usage=beside)
            there.append(
                one._replace(
                    leaving=draw(st.integers(0, 4)) == 0, stuck=draw(st.integers(0, 9)) == 0,
                    busy=draw(st.booleans()), kept=draw(st.integers(0, 4)) == 0, priority=draw(st.integers(0, 2)),
                    evictable_s=T0 + draw(st.sampled_from([-1, -1, 1])),
                )
            )  # fmt: skip
        made = shelf(device(f"g{number}", 24, f"n{number % 2}"), *there)
        found.append(replace(made, locked=draw(st.integers(0, 4)) == 0))
    return found


@QUICK
@given(WANTS, benches(), st.integers(4, 14))
def test_random_packing_never_exceeds_or_promises_twice_the_cpu_of_a_node(
    wants: list[PlacementRequest], shelves: list[Bin], many: int
) -> None:
    wants = [one._replace(ordinal=number) for number, one in enumerate(wants)]
    size = {N0: many, N1: many // 2}
    answer = run(wants, shelves, size)
    hosts = {node: host_of([one for one in shelves if one.slice.node == node], size[node]) for node in size}
    left, node_of = {node: host.left for node, host in hosts.items()}, {one.slice.id: one.slice.node for one in shelves}
    for placement in answer.placements:
        if placement.slices:
            (node,) = {node_of[id] for id in placement.slices}
            assert left[node].holds(placement.want.kind.host_request), placement
            left[node] = left[node].less(placement.want.kind.host_request)
    assert len(answer.placements) + len(answer.unmet) == len(wants)
    known = {i.replica: i for one in shelves for i in one.incumbents}
    soon = {node: left[node].plus(hosts[node].coming) for node in left}
    at = {i.replica: one.slice.node for one in shelves for i in one.incumbents}
    for victim in answer.victims:
        assert can_evict(victim.want, known[victim.replica], T0)
        soon[at[victim.replica]] = soon[at[victim.replica]].plus(known[victim.replica].host_usage)
    need_at: dict[NodeId, HostAmount] = defaultdict(lambda: NOTHING)
    for missing in answer.unmet:
        if missing.promised:
            words = map(SliceId, missing.reason.replace(":", " ").split())
            node = node_of[next(word for word in words if word in node_of)]
            need_at[node] = need_at[node].plus(missing.want.kind.host_request)
    assert all(soon[node].holds(asked) for node, asked in need_at.items()), (soon, need_at)


@QUICK
@given(WANTS, benches(), st.integers(4, 14))
def test_packer_finds_a_possible_placement_without_needless_cpu_victims(
    wants: list[PlacementRequest], shelves: list[Bin], many: int
) -> None:
    size = {N0: many, N1: many // 2}
    for one in (each for each in wants if each.kind.devices == 1):
        answer = run([one], shelves, size)
        going = [victim.replica for victim in answer.victims]
        ways = [way for each in shelves for way in _ways(one, each, shelves, size)]
        met = bool(answer.placements) or answer.unmet[0].promised
        assert met == bool(ways), (answer, ways)
        if going:
            assert frozenset(going) in ways, "all of these, and no fewer of them"
            assert frozenset() not in ways, "no replica is evicted while capacity is being freed"


def _ways(one: PlacementRequest, on_it: Bin, shelves: list[Bin], size: dict[NodeId, int]) -> list[frozenset[ReplicaId]]:
    """The minimal victim sets that make room for the request, by exhaustive search."""
    room, node = find_required_amount(one, on_it), on_it.slice.node
    beside = [each for each in shelves if each.slice.node == node]
    host = host_of(beside, size[node])
    willing = {i.replica: i for each in beside for i in each.incumbents if can_evict(one, i, T0)}
    here = {i.replica for i in on_it.incumbents}
    found: list[frozenset[ReplicaId]] = []
    for count in range(len(willing) + 1):
        for some in map(frozenset, combinations(sorted(willing), count)):
            if room is None or any(less <= some for less in found):
                continue
            removed, amounts = ResourceAmount(0, 0), NOTHING
            for id in some:
                removed = removed.plus(willing[id].room) if id in here else removed
                amounts = amounts.plus(willing[id].host_usage)
            on_slice = on_it.free.plus(on_it.coming).plus(removed).holds(room)
            if on_slice and host.soon.plus(amounts).holds(one.kind.host_request):
                found.append(some)
    return found


@pytest.mark.parametrize("force", [EvictionLevel.NONE, EvictionLevel.IDLE])
def test_eviction_level_none_or_idle_evicts_no_busy_replica_for_cpu(force: EvictionLevel) -> None:
    slices = [shelf(device("g0", node="n0"), on("x", 1, host_usage=cores(4), busy=True))]
    assert victims(run([change_request(asks("a", 3), force=force)], slices, {N0: 4})) == []
