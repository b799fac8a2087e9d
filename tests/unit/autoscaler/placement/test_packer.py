"""The packer: placements, victims and unmet placement requests with their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.eviction import (
    EVICT,
    TIES_MAX,
    Key,
    Search,
    eviction_cost,
    find_eviction_option,
    list_evictable_occupants,
    sum_amounts,
)
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.node_search import LANES_MAX
from autoscaler.placement.model.predicates import find_required_amount, has_matching_labels
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import HostResources, Isolation, ResourceAmount
from autoscaler.state.world import Copy, NodeId, Slice
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.worlds import GI, T0, device
from tests.support.example_budget import examples


def on(name: str, memory_gi: float, compute_percent: int = 0, **fields: Any) -> Occupant:
    """An idle, ready replica of the model `name`, resident for a long time."""
    made = Occupant(
        replica=ReplicaId(f"{name}-r"),
        model=ModelName(name),
        state=S.READY,
        room=ResourceAmount(int(memory_gi * GI), compute_percent),
    )
    return made._replace(**fields)


def shelf(slice_: Slice, *incumbents: Occupant, locked: bool = False) -> Bin:
    free, coming = ResourceAmount(slice_.memory_bytes, slice_.compute_percent), ResourceAmount(0, 0)
    for incumbent in incumbents:
        free = free.less(incumbent.room)
        coming = coming.plus(incumbent.room) if incumbent.leaving and not incumbent.stuck else coming
    return Bin(slice=slice_, whole=True, incumbents=incumbents, free=free, coming=coming, locked=locked)


def want(name: str, memory_gi: float = 10, **fields: Any) -> PlacementRequest:
    made = placement_request(name, memory_bytes=int(memory_gi * GI), force=EvictionLevel.BUSY)
    return change_request(made, **fields)


def run(
    requests: Iterable[PlacementRequest], shelves: Iterable[Bin], copies: frozenset[Copy] = frozenset()
) -> PackResult:
    return pack(tuple(requests), SliceIndex(shelves), copies, RestartCosts(start_s={ModelName("cheap"): 1.0}), T0)


def placed(packing: PackResult) -> list[tuple[str, ...]]:
    return [(placement.want.model, *placement.slices) for placement in packing.placements]


def victims(packing: PackResult) -> list[str]:
    return [victim.model for victim in packing.victims]


def test_best_fit_takes_the_slice_with_the_least_memory_left() -> None:
    assert placed(run([want("a")], [shelf(device("g0", 80)), shelf(device("g1", 24))])) == [("a", "g1")]


def test_node_with_a_model_copy_is_preferred_to_a_tight_fit() -> None:
    copies = frozenset({Copy(artifact="oci://a", node=NodeId("n1"))})
    slices = [shelf(device("g0", 12, "n0")), shelf(device("g1", 80, "n1"))]
    assert placed(run([want("a", artifact="oci://a")], slices, copies)) == [("a", "g1")]


def test_first_product_glob_that_matches_a_free_device_is_preferred() -> None:
    slices = [shelf(device("g0", product="NVIDIA L40S")), shelf(device("g1", product="NVIDIA H100 80GB"))]
    assert placed(run([want("a", products=("*h100*", "*l40s*"))], slices)) == [("a", "g1")]
    assert placed(run([want("a", products=("*l40s*",))], slices)) == [("a", "g0")]
    nowhere = run([want("a", products=("*mi300*",))], slices).unmet[0]
    assert nowhere.never
    assert nowhere.reason == "needs a device of product *mi300*; existing products: NVIDIA H100 80GB, NVIDIA L40S"


def test_replica_exceeding_the_free_compute_percent_is_not_placed() -> None:
    half = on("x", 4, 70, evictable_s=T0 + 9)
    assert placed(run([want("a", compute_percent=30)], [shelf(device(), half)])) == [("a", "gpu0")]
    assert placed(run([want("a", compute_percent=31)], [shelf(device(), half)])) == []


def test_hardware_isolation_needs_an_isolated_slice_or_an_empty_device() -> None:
    beside = shelf(device("g0", 80), on("x", 1))
    apart = want("a", isolation=Isolation.HARDWARE, force=EvictionLevel.NONE)
    assert placed(run([apart], [beside])) == []
    alone = run([apart], [beside, shelf(device("g1", 40))]).placements[0]
    assert (alone.slices, alone.memory_bytes) == (("g1",), 40 * GI)
    mig = device("m0", 20, isolation=Isolation.HARDWARE)
    assert run([apart], [shelf(mig)]).placements[0].memory_bytes == 10 * GI


def test_multi_device_replica_gets_whole_free_devices_of_one_node() -> None:
    spread = [shelf(device("g0", node="n0")), shelf(device("g1", node="n1"))]
    big = want("a", 20, devices=2)
    assert run([big], spread).unmet[0].reason == "needs 2 whole devices of 20Gi on one node; the largest node has 1"
    beside = [shelf(device("g2", node="n1"), on("x", 1)), shelf(device("g3", node="n1"))]
    assert placed(run([change_request(big, force=EvictionLevel.NONE)], [*spread, *beside])) == [("a", "g1", "g3")]
    assert victims(run([big], [spread[0], *beside])) == ["x"]


def test_cpu_only_replica_is_placed_without_a_slice() -> None:
    assert placed(run([want("a", devices=0)], [])) == [("a",)]


def test_replica_is_not_placed_on_an_unhealthy_slice() -> None:
    answer = run([want("a")], [shelf(device(healthy=False))])
    assert answer.unmet[0].reason == "needs 10Gi on one device; no suitable device is healthy"
    assert not answer.unmet[0].never


def test_replica_larger_than_every_device_is_reported_as_never_fitting() -> None:
    missing = run([want("a", 40)], [shelf(device(memory_gi=24))]).unmet[0]
    assert (missing.reason, missing.never) == ("needs 40Gi on one device; the largest has 24Gi", True)
    assert run([want("a")], []).unmet[0].reason == "needs 10Gi on one device; there is no device"


def test_eviction_prefers_an_idle_replica_to_a_busy_one() -> None:
    slices = [shelf(device("g0"), on("busy", 20, busy=True)), shelf(device("g1"), on("idle", 20))]
    assert victims(run([want("a")], slices)) == ["idle"]


def test_one_replica_is_evicted_instead_of_two_smaller_ones() -> None:
    slices = [shelf(device("g0"), on("x", 10), on("y", 10)), shelf(device("g1"), on("cheap", 20))]
    assert victims(run([want("a", 20)], slices)) == ["cheap"]
    assert victims(run([want("a", 20)], slices[:1])) == ["x", "y"]


def test_replica_is_not_evicted_before_its_minimum_residency_ends() -> None:
    slices = [shelf(device(), on("llama-8b", 18, busy=True, evictable_s=T0 + 12))]
    answer = run([want("a", 20)], slices)
    assert (victims(answer), answer.unmet[0].never) == ([], False)
    assert answer.unmet[0].reason == (
        "needs 20Gi on one device; the largest has 6Gi free of 24Gi, held by llama-8b (busy, residency ends in 12 s)"
    )
    after = pack((want("a", 20),), SliceIndex(slices), frozenset(), RestartCosts(), T0 + 12)
    assert [victim.model for victim in after.victims] == ["llama-8b"]


def test_lower_priority_replica_does_not_evict_a_higher_priority_one() -> None:
    slices = [shelf(device(), on("x", 20, priority=5))]
    assert victims(run([want("a")], slices)) == []
    assert victims(run([want("a", priority=6, force=EvictionLevel.LOWER)], slices)) == ["x"]


def test_eviction_level_idle_evicts_idle_but_not_busy_replicas() -> None:
    idle, busy = [shelf(device(), on("x", 20))], [shelf(device(), on("x", 20, busy=True))]
    assert [victims(run([want("a", force=force)], idle)) for force in EvictionLevel] == [[], [], ["x"], ["x"]]
    assert [victims(run([want("a", force=force)], busy)) for force in EvictionLevel] == [[], [], [], ["x"]]
    kept = [shelf(device(), on("x", 20, kept=True))]
    assert victims(run([want("a")], kept)) == []


def test_no_eviction_while_a_draining_replica_frees_enough_memory() -> None:
    leaving = shelf(device("g0"), on("x", 20, state=S.DRAINING, leaving=True))
    idle = shelf(device("g1"), on("y", 20))
    answer = run([want("a")], [leaving, idle])
    assert (victims(answer), answer.unmet[0].reason) == ([], "waits on g0 until x has stopped")
    assert victims(run([want("a", 20), want("b", 20)], [leaving, idle])) == ["y"]


def test_another_replica_is_evicted_if_a_terminating_one_is_stuck() -> None:
    stuck = shelf(device("g0"), on("x", 20, state=S.SCRUBBING, leaving=True, stuck=True))
    assert victims(run([want("a")], [stuck, shelf(device("g1"), on("y", 20))])) == ["y"]


def test_one_replica_at_a_time_starts_on_a_device() -> None:
    answer = run([want("a", 4), want("b", 4)], [shelf(device())])
    assert placed(answer) == [("a", "gpu0")]
    assert answer.unmet[0].reason == (
        "waits on gpu0 until the replica that is starting there is ready; replicas start one at a time"
    )
    assert placed(run([want("a", 4)], [shelf(device("g0", 8), locked=True), shelf(device("g1", 80))])) == [("a", "g1")]


def test_replicas_are_placed_by_priority_then_waiting_time_then_name() -> None:
    requests = [want("c", 20, unserved_since_s=5), want("b", 20, unserved_since_s=5), want("a", 20, unserved_since_s=9)]
    assert placed(run(requests, [shelf(device())])) == [("b", "gpu0")]
    assert placed(run([*requests, want("z", 20, priority=1)], [shelf(device())])) == [("z", "gpu0")]


# --- properties -----------------------------------------------------------------------------------------------------

NAMES = st.sampled_from([ModelName(name) for name in "abcdef"])


@st.composite
def incumbents(draw: st.DrawFn, index: int) -> tuple[Occupant, ...]:
    many = draw(st.integers(0, 3))
    return tuple(
        Occupant(
            replica=ReplicaId(f"g{index}-{i}"),
            model=draw(NAMES),
            state=S.READY,
            room=ResourceAmount(draw(st.integers(1, 8)) * GI, draw(st.sampled_from([0, 30]))),
            priority=draw(st.integers(0, 2)),
            busy=draw(st.booleans()),
            kept=draw(st.booleans()),
            evictable_s=draw(st.sampled_from([0.0, T0, T0 + 1])),
            leaving=draw(st.booleans()),
            others=0,
        )
        for i in range(many)
    )


ZONES = ("z1", "z2")


@st.composite
def benches(draw: st.DrawFn) -> list[Bin]:
    made: list[Bin] = []
    zones = [{"zone": draw(st.sampled_from(ZONES))} for _ in range(2)]
    for i in range(draw(st.integers(1, 5))):
        zone = zones[i % 2]
        slice_ = device(f"g{i}", 24, f"n{i % 2}", healthy=draw(st.integers(0, 9)) > 0, labels=zone, labels_known=True)
        made.append(shelf(slice_, *draw(incumbents(i)), locked=draw(st.integers(0, 4)) == 0))
    return made


@st.composite
def wanted(draw: st.DrawFn) -> list[PlacementRequest]:
    return [
        placement_request(
            draw(NAMES),
            ordinal,
            devices=draw(st.sampled_from([1, 1, 1, 2])),
            memory_bytes=draw(st.sampled_from([0, 2, 5, 9, 20])) * GI,
            compute_percent=draw(st.sampled_from([0, 40])),
            isolation=draw(st.sampled_from([Isolation.NONE, Isolation.NONE, Isolation.HARDWARE])),
            priority=draw(st.integers(0, 2)),
            unserved_since_s=draw(st.integers(0, 3)),
            force=draw(st.sampled_from(list(EvictionLevel))),
            selector=draw(st.sampled_from([(), (), (("zone", ZONES[0]),), (("zone", ZONES[1]),)])),
        )
        for ordinal in range(draw(st.integers(1, 6)))
    ]


QUICK = settings(derandomize=True, deadline=None, max_examples=examples(150))


@QUICK
@given(wanted(), benches())
def test_random_packing_never_overcommits_a_slice(wants: list[PlacementRequest], shelves: list[Bin]) -> None:
    taken = {one.slice.id: sum(i.room.memory_bytes for i in one.incumbents) for one in shelves}
    devices = {one.slice.id: one for one in shelves}
    answer = run(wants, shelves)
    for placement in answer.placements:
        assert all(has_matching_labels(placement.want.choice.selector, devices[id].slice) for id in placement.slices)
        assert len(set(placement.slices)) == placement.want.kind.devices
        for id in placement.slices:
            taken[id] += placement.memory_bytes
            assert taken[id] <= devices[id].slice.memory_bytes
            assert devices[id].slice.healthy
            assert not devices[id].locked
    assert sorted(answer_want.ordinal for answer_want in wants) == sorted(
        [placement.want.ordinal for placement in answer.placements] + [missing.want.ordinal for missing in answer.unmet]
    )


@QUICK
@given(wanted(), benches())
def test_replica_is_evicted_only_if_its_priority_residency_and_load_allow(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    known = {incumbent.replica: incumbent for one in shelves for incumbent in one.incumbents}
    answer = run(wants, shelves)
    assert len({victim.replica for victim in answer.victims}) == len(answer.victims)
    for victim in answer.victims:
        incumbent = known[victim.replica]
        assert not incumbent.leaving
        assert incumbent.evictable_s <= T0
        assert incumbent.priority <= victim.want.urgency.priority
        assert incumbent.model != victim.want.model
        assert victim.want.urgency.force > EvictionLevel.NONE
        if incumbent.priority == victim.want.urgency.priority:
            assert not incumbent.kept
            assert victim.want.urgency.force >= (EvictionLevel.BUSY if incumbent.busy else EvictionLevel.IDLE)


@QUICK
@given(wanted(), benches(), st.randoms(use_true_random=False))
def test_shuffled_replicas_and_slices_give_the_same_packing(
    wants: list[PlacementRequest], shelves: list[Bin], rng: Random
) -> None:
    mixed_wants, mixed = sorted(wants, key=lambda _: rng.random()), sorted(shelves, key=lambda _: rng.random())
    assert run(wants, shelves) == run(mixed_wants, mixed)


@QUICK
@given(wanted(), benches())
def test_replica_that_fits_still_fits_with_one_more_empty_device(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    """Holds for a single placement request only: with several, best fit may reorder them if one fits the added
    device better.
    """
    for one in wants:
        more = [*shelves, shelf(device("z9", 24, "n0"))]
        if run([one], shelves).placements:
            assert run([one], more).placements


@QUICK
@given(wanted(), benches())
def test_packing_leaves_its_input_unchanged(wants: list[PlacementRequest], shelves: list[Bin]) -> None:
    before = [one.copy() for one in shelves]
    run(wants, shelves)
    assert before == shelves


def floor(want: PlacementRequest, shelf: Bin, those: Iterable[Occupant]) -> Key | None:
    """Lower bound on the cost of victims there if these are the candidates; None if evicting all is not enough."""
    costs, room = [eviction_cost((one,), RestartCosts()) for one in those], find_required_amount(want, shelf)
    if room is None or not costs or not shelf.free.plus(shelf.coming).plus(sum_amounts(those)).holds(room):
        return None
    least = tuple(map(min, zip(*costs, strict=True)))
    return (EVICT, *least, shelf.locked, want.kind.rank(shelf.slice.product) or 0, shelf.price, True)


@QUICK
@given(wanted(), benches())
def test_victims_of_a_random_replica_equal_those_of_an_exhaustive_search(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    for one in wants:
        if one.kind.devices != 1:
            continue
        everywhere = (find_eviction_option(one, shelf, RestartCosts(), T0, away=True) for shelf in shelves)
        options = {found.shelf.slice.id: found for found in everywhere if found is not None and found.rung == EVICT}
        who = [(shelf, list_evictable_occupants(one, shelf, RestartCosts(), T0)) for shelf in shelves]
        for each, those in who:
            known_who = find_eviction_option(one, each, RestartCosts(), T0, away=True, those=those)
            assert known_who == find_eviction_option(one, each, RestartCosts(), T0, away=True), "it is only quicker"
        floors = [(floor(one, shelf, those), shelf.slice.id) for shelf, those in who]
        known = sorted((lowest, id) for lowest, id in floors if lowest is not None)
        assert {id for _, id in known} >= options.keys()
        search = Search(known, options.get)
        assert search.best() == min(options.values(), key=lambda found: found.key, default=None)
        for id in sorted(options):
            del options[id]
            search.change(id)
            assert search.best() == min(options.values(), key=lambda found: found.key, default=None)


def test_invalid_slices_do_not_prevent_placement_on_valid_ones() -> None:
    odd = [device("g0", 0), device("g1", -1), device("g2", 1 << 40), device("g3", 24, compute_percent=-1)]
    assert placed(run([want("a")], [*(shelf(one) for one in odd), shelf(device("g9", 24))])) == [("a", "g9")]
    assert (
        run([want("a")], [shelf(one) for one in odd]).unmet[0].reason == "needs 10Gi on one device; there is no device"
    )
    many = [shelf(device(f"g{number:05}", 1)) for number in range(LANES_MAX + 1)]
    assert placed(run([want("a", 1)], many)) == [("a", "g00000")]
    with pytest.raises(ValueError, match="two slices have the same id"):
        SliceIndex([shelf(device("g0")), shelf(device("g0"))])


def test_eviction_tie_is_broken_by_local_weights_price_or_device_size() -> None:
    """More Slices than are compared with each other."""
    many = 3 * TIES_MAX

    def held(number: int, memory_gi: float = 24) -> Bin:
        return shelf(device(f"g{number:03}", memory_gi, f"n{number:03}"), on(f"x{number}", memory_gi))

    copies = frozenset({Copy(artifact="oci://a", node=NodeId("n150"))})
    near = run([want("a", artifact="oci://a")], [held(number) for number in range(many)], copies)
    assert victims(near) == ["x150"]
    dear = [replace(held(number), price=1.0 if number >= 100 else 30.0) for number in range(many)]
    assert victims(run([want("a")], dear)) == ["x100"]
    large = [held(number, 80 if number < 100 else 24) for number in range(many)]
    assert victims(run([want("a")], large)) == ["x100"]


def test_both_devices_of_a_two_device_victim_count_as_freed() -> None:
    """One of the two devices is enough for a. b, which is later, waits for the other one and evicts nothing else."""
    both = on("cheap", 20, others=1)
    slices = [shelf(device("g0"), both), shelf(device("g1"), both), shelf(device("g2"), on("y", 20))]
    answer = run([want("a", 20), want("b", 20, force=EvictionLevel.NONE)], slices)
    assert victims(answer) == ["cheap"]
    assert [one.reason for one in answer.unmet] == [
        "waits on g0 for the eviction of cheap", "waits on g1 until cheap has stopped",
    ]  # fmt: skip


def test_exactly_filled_gap_is_preferred_to_a_smaller_empty_device() -> None:
    """Filling a gap exactly is better than using an empty card that is one MiB smaller."""
    holed, whole = device("g0", 15361 / 1024, "n0"), device("g1", 15360 / 1024, "n1")
    assert placed(run([want("a")], [shelf(holed, on("x", 5121 / 1024)), shelf(whole)])) == [("a", "g0")]


def test_node_is_excluded_if_the_selector_does_not_match_all_its_slices() -> None:
    zone = (("zone", "z1"),)
    slices = [shelf(device("g0", labels={"zone": "z1"}, labels_known=True)), shelf(device("g1", labels_known=True))]
    assert placed(run([want("a", selector=zone)], slices)) == []


TWO = want("a", 20, devices=2)
KEPT = on("x", 20, kept=True)
HALF = on("x", 4, 50, kept=True)


def part(name: str, memory_gi: int, isolation: Isolation = Isolation.NONE) -> Bin:
    """A part of a device."""
    made = shelf(device(name, memory_gi, isolation=isolation, compute_percent=50))
    return Bin(
        slice=made.slice, whole=False, incumbents=(), free=made.free, coming=ResourceAmount(0, 0), locked=False
    )  # fmt: skip


NOW = [
    (
        TWO,
        [shelf(device("g0")), shelf(device("g1"), KEPT), shelf(device("g2", node="n1"))],
        (
            "needs 2 whole devices of 20Gi on one node; the node with the most free devices has 1: g1 is held by x "
            "(idle, kept by replicas.min)"
        ),
    ),
    (
        change_request(TWO, devices=5),
        [shelf(device(f"g{number}"), *[KEPT] * (number > 0)) for number in range(6)],
        "needs 5 whole devices of 20Gi on one node; the node with the most free devices has 1: "
        + ", ".join(f"g{number} is held by x (idle, kept by replicas.min)" for number in (1, 2, 3))
        + ", 2 more are not free",
    ),
    (
        TWO,
        [shelf(device("g0")), shelf(device("g1", healthy=False))],
        "needs 2 whole devices of 20Gi on one node; no node has that many healthy devices",
    ),
    (
        want("a", 4, compute_percent=60),
        [shelf(device("g0"), HALF)],
        (
            "needs 4Gi and 60 % of compute on one device; the largest has 20Gi and 50 % of compute free of 24Gi and "
            "100 %, held by x (idle, kept by replicas.min)"
        ),
    ),
]
NEVER = [
    (
        want("a", 4, compute_percent=60),
        [part("g0", 8)],
        "needs 4Gi and 60 % of compute on one device; the largest has 8Gi and 50 % of compute",
    ),
    (want("a", 0), [part("g0", 8)], "needs a whole device; every slice of that size is a part of a device"),
    (
        change_request(TWO, memory_bytes=4 * GI),
        [part("g0", 8), part("g1", 8)],
        "needs 2 whole devices of 4Gi; every slice of that size is a part of a device",
    ),
    (
        want("a", 4, isolation=Isolation.HARDWARE),
        [part("g0", 8, Isolation.MEMORY)],
        (
            "needs 4Gi on one device with hardware isolation; every slice of that size is a part of a device without "
            "this isolation"
        ),
    ),
    (
        want("a", 9, isolation=Isolation.HARDWARE),
        [part("g0", 8, Isolation.MEMORY)],
        "needs 9Gi on one device with hardware isolation; the largest has 8Gi",
    ),
]


@pytest.mark.parametrize(
    ("asked", "there", "reason", "never"), [*((*one, False) for one in NOW), *((*one, True) for one in NEVER)]
)
def test_reason_for_an_unplaced_replica_names_the_scarce_resource(
    asked: PlacementRequest, there: list[Bin], reason: str, *, never: bool
) -> None:
    (missing,) = run([asked], there).unmet
    assert (missing.reason, missing.never) == (reason, never)


def test_reason_names_the_cpu_shortage_of_a_node_with_free_devices() -> None:
    yard = SliceIndex(
        [shelf(device("g0")), shelf(device("g1"))], {NodeId("n0"): HostResources(8000, 64 * GI, 2000, 64 * GI)}
    )
    (missing,) = pack([change_request(TWO, cpu_milli=4000)], yard, frozenset(), RestartCosts(), T0).unmet
    assert missing.reason == (
        "needs 2 whole devices of 20Gi on one node, with 4 cores; node n0 has too little CPU: 2 cores left of 8 cores"
    )
