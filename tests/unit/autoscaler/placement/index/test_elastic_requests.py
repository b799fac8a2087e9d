"""Elastic requests: granted memory, evictions, and the bound on the total reduction, alone and in the packer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.placement.index.elastic_requests import Elastic, ElasticBudget, PlacedRequest
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.node_search import NodeArrays, NodeCapacity
from autoscaler.placement.index.request_encoding import encode_request
from autoscaler.placement.index.residual_waste_tables import (
    BINS,
    LEVELS,
    Taught,
    build_tables,
    build_untrained_estimate,
    compute_residual_waste,
)
from autoscaler.placement.learning.learner import Draw, Learner
from autoscaler.placement.model.types import Bin, EvictionLevel, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import RequestFrequency, RequestShape, ResourceAmount, SliceClass
from bench.packing.arrivals import Round
from bench.packing.cluster import Cluster
from bench.packing.openb import Kind as Asked
from bench.packing.openb import NodeRow
from bench.packing.ours import make_elastic
from bench.packing.replay import replay
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.worlds import GI, T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import on, shelf, victims

SIZES = {230: 1.0, 460: 2.0, 650: 2.0, 810: 3.0, 1000: 3.0}


def nodes(count: int, lanes: int = 1) -> list[NodeCapacity]:
    return [NodeCapacity(f"n{number}", (SliceClass(1000),) * lanes, 64_000) for number in range(count)]


def share(milli: int) -> RequestShape:
    return make_elastic(RequestShape(memory_bytes=milli))


def granted(one: PlacedRequest | None) -> tuple[int, int] | None:
    """Return (node, bytes), or None without a placement."""
    return None if one is None else (one.place.node, one.load.rooms[0].memory_bytes)


def generous(budget: ElasticBudget) -> ElasticBudget:
    """Record 100 requests that were granted in full."""
    for _ in range(100):
        budget.add(500, 500)
    return budget


# --- hand-computed examples -------------------------------------------------------------------------------------------


def test_only_a_replica_on_part_of_one_device_may_get_less_memory() -> None:
    assert make_elastic(RequestShape(memory_bytes=810)).least.memory_bytes == 729
    assert make_elastic(RequestShape(memory_bytes=815)).least.memory_bytes == 734, "at least nine tenths: 733.5"
    for one in (RequestShape(memory_bytes=0), RequestShape(devices=2, memory_bytes=500), RequestShape(devices=0)):
        assert make_elastic(one) == one
    for wrong in (RequestShape(memory_bytes=5, spare_bytes=5), RequestShape(devices=2, memory_bytes=5, spare_bytes=1)):
        with pytest.raises(ValueError, match=r"spare_bytes of .* is invalid"):
            encode_request(wrong, (SliceClass(1000),))


def test_elastic_replica_gets_the_remaining_memory_if_above_its_minimum() -> None:
    one = Elastic(NodeArrays(nodes(1), build_untrained_estimate(SIZES)))
    generous(one.budget)
    assert granted(one.start(RequestShape(memory_bytes=570))) == (0, 570), (
        "a replica that is not elastic gets the memory that it requests"
    )
    assert granted(one.start(share(460))) == (0, 430)
    assert one.start(share(460)) is None


def test_elastic_replica_gets_less_memory_to_leave_space_for_another() -> None:
    """Learned waste: 41 free levels (of 10 thousandths) are wasted, 42 are used."""
    waste = np.linspace(0, 0.1, LEVELS)
    waste[1:42] = 10.0 * np.arange(1, 42)
    taught = Taught((), build_tables(np.broadcast_to(waste, (1, BINS, LEVELS)), np.zeros(1)))
    one = Elastic(NodeArrays(nodes(1), taught))
    generous(one.budget)
    assert granted(one.start(share(650))) == (0, 585), "35 % left would be too little, 41.5 % are not"
    assert granted(one.start(share(460))) == (0, 415)


def test_elastic_replica_gets_full_memory_if_no_reduction_budget_remains() -> None:
    one = Elastic(NodeArrays(nodes(2), build_untrained_estimate(SIZES)))
    assert granted(one.start(RequestShape(memory_bytes=570))) == (0, 570)
    first = one.start(share(460))
    assert granted(first) == (1, 460), "0 would be fuller, but with less than it asked for"
    assert one.start(share(600)) is None
    generous(one.budget)
    assert granted(one.start(share(600))) == (1, 540)
    assert first is not None
    one.stop(first)
    assert one.arrays.left_bytes.tolist() == [430, 460]
    assert one.budget.count == 101


def test_elastic_budget_rejects_a_mean_reduction_above_5_percent() -> None:
    budget = ElasticBudget()
    assert budget.allows(1000, 950)
    assert not budget.allows(1000, 949)
    budget.add(100_000, 100_000)
    assert budget.allows(1000, 900)
    budget.add(1000, 900)
    assert not budget.allows(1000, 900), "three requests: 1, 0.9 and 0.9"
    large = ElasticBudget()
    for _ in range(9):
        large.add(10, 10)
    assert not large.allows(1000, 900), "by request 0.99, by byte 0.908"


def test_waste_falls_by_half_of_the_memory_an_elastic_replica_gives_up() -> None:
    waste = compute_residual_waste({600: 1.0}, {600: 540})
    assert waste[539] == 539
    assert waste[540] == pytest.approx(-30)
    assert waste[570] == pytest.approx(-15), "it takes all, which is better than 30 left and 60 forgone"
    assert compute_residual_waste({600: 1.0})[570] == 570


# --- invariants -------------------------------------------------------------------------------------------------------

ASKED = st.builds(share, st.integers(1, 1000)) | st.builds(
    lambda bytes_: RequestShape(memory_bytes=bytes_), st.sampled_from([0, 300, 1000])
)


@settings(deadline=None)
@given(st.lists(ASKED, max_size=60), st.data())
def test_elastic_replica_never_gets_less_than_its_minimum_memory(
    kinds: Sequence[RequestShape], data: st.DataObject
) -> None:
    one = Elastic(NodeArrays(nodes(3, 2), build_untrained_estimate(SIZES)))
    running: list[PlacedRequest] = []
    for kind in kinds:
        if running and data.draw(st.integers(0, 4)) == 0:
            one.stop(running.pop(data.draw(st.integers(0, len(running) - 1))))
        fits = NodeArrays.choose(one.arrays, encode_request(kind._replace(spare_bytes=0), one.arrays.lanes)) is not None
        found = one.start(kind)
        assert found is not None or not fits, "who fits with all that it asked for is not refused"
        assert (one.arrays.left_bytes >= 0).all()
        if found is None:
            continue
        running.append(found)
        memory = found.load.rooms[0].memory_bytes
        assert kind.least.memory_bytes <= memory <= (kind.memory_bytes or 1000)
        if kind.spare_bytes and memory < kind.memory_bytes:
            cut = [other for other in running if other.asked_bytes]
            got, asked = sum(each.granted_bytes for each in cut), sum(each.asked_bytes for each in cut)
            assert 100 * got >= 95 * asked
            assert sum(each.granted_bytes / each.asked_bytes for each in cut) >= 0.95 * len(cut) - 1e-9


@settings(deadline=None, max_examples=examples(40))
@given(st.lists(ASKED, max_size=40))
def test_cached_score_rows_give_the_same_choice_as_recomputed_ones(kinds: Sequence[RequestShape]) -> None:
    kept = Elastic(NodeArrays(nodes(3, 2), build_untrained_estimate(SIZES)))
    taken: list[PlacedRequest] = []
    for kind in kinds:
        rebuilt = NodeArrays(nodes(3, 2), build_untrained_estimate(SIZES))
        for one in taken:
            rebuilt.take(one.place, one.load)
        ask = encode_request(kind, rebuilt.lanes)
        place = kept.arrays.choose(ask)
        assert place == rebuilt.choose(ask)
        assert place is None or kept.arrays.granted(ask, place) == rebuilt.granted(ask, place)
        found = kept.start(kind)
        if found is not None:
            taken.append(found)


def test_training_scores_higher_if_replicas_have_elastic_memory() -> None:
    def draws(seed: int) -> Draw:
        return random.Random(seed).randrange

    def best(elastic_: bool) -> tuple[Taught, float]:
        weights = {460: 10, 650: 10, 810: 8, 230: 4, 1000: 4}
        kinds = {size: share(size) if elastic_ and size < 1000 else RequestShape(memory_bytes=size) for size in weights}
        demand = [RequestFrequency(kinds[size], weight) for size, weight in weights.items()]
        return max(Learner(nodes(10, 4), demand, draws, 40).lessons(), key=lambda lesson: lesson[1])

    (taught, cut), (again, _), (_, whole) = best(True), best(True), best(False)
    assert (taught.tables.values == again.tables.values).all()
    assert cut > whole + 2.5, "a point at 95, 100 and 130 % arrived"


# --- the replay's checks ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "milli", "error"),
    [
        (800, 719, "is not allowed for"), (800, 801, "is not allowed for"), (1000, 950, "is not allowed for"),
        (800, 720, "0.9000 and 0.9000"), (800, 0, "is not allowed for"),
    ],
)  # fmt: skip
def test_benchmark_replay_rejects_an_invalid_memory_allocation(asked: int, milli: int, error: str) -> None:
    class Miser:
        def choose(self, kind: Asked) -> tuple[int, int, int]:
            return 0, 0, milli

    round = Round((NodeRow("n", 9000, 9000, 1, "T4"),), (Asked(1, 1, 1, asked, frozenset()),), 1)
    with pytest.raises(AssertionError, match=error):
        replay(round, lambda _: Miser())


def test_benchmark_replay_counts_requested_but_occupies_allocated_memory() -> None:
    seen: list[Cluster] = []

    class Fair:
        def choose(self, kind: Asked) -> tuple[int, int, int]:
            return 0, 0, 500 if kind.milli == 520 else kind.milli

    def make(cluster: Cluster) -> Fair:
        seen.append(cluster)
        return Fair()

    kinds = (Asked(1, 1, 1, 520, frozenset()), Asked(1, 1, 1, 480, frozenset()))
    outcome = replay(Round((NodeRow("n", 9000, 9000, 1, "T4"),), kinds, 1), make)
    assert outcome.used[100] == 100
    assert outcome.grants == pytest.approx(((500 / 520 + 1) / 2, 0.98))
    assert seen[0].left[0, 0] == 20


def want(name: str, memory_gi: float = 10, spare_gi: float = 1, **fields: Any) -> PlacementRequest:
    made = placement_request(name, memory_bytes=int(memory_gi * GI), spare_bytes=int(spare_gi * GI))
    return change_request(made, **fields)


def counted(many: int, bytes_: int) -> ElasticBudget:
    """A budget after `many` grants of the full requested size."""
    budget = ElasticBudget()
    for _ in range(many):
        budget.add(bytes_, bytes_)
    return budget


def run(requests: Sequence[PlacementRequest], shelves: Sequence[Bin], generous: int = 0) -> PackResult:
    yard = SliceIndex(shelves)
    yard.budget = lambda: counted(generous, 10 * GI)
    return pack(requests, yard, frozenset(), RestartCosts(), T0)


def grants(packing: PackResult) -> list[tuple[str, float]]:
    return [(placement.want.model, placement.memory_bytes / GI) for placement in packing.placements]


# --- the packer -------------------------------------------------------------------------------------------------------


def test_elastic_replica_gets_less_memory_in_a_slightly_too_small_gap() -> None:
    hole = shelf(device("g0", 20), on("x", 10.5))
    assert grants(run([want("a")], [hole])) == [("a", 9.5)]
    rigid = run([want("a", spare_gi=0)], [hole]).unmet[0]
    assert rigid.reason.startswith("needs 10Gi on one device; the largest has 9.5Gi free of 20Gi")


def test_packer_grants_full_memory_if_no_reduction_budget_remains() -> None:
    small, large = shelf(device("g0", 20), on("x", 11)), shelf(device("g1", 24))
    assert grants(run([want("a")], [small, large])) == [("a", 10)], "alone with nine tenths all would have too little"
    alone = run([want("a")], [small]).unmet[0]
    assert alone.reason.startswith("needs 10Gi (at least 9Gi) on one device; the largest has 9Gi free of 20Gi")
    assert alone.reason.endswith(
        "; less memory is not granted, because elastic replicas must keep 95 % of theirs on average"
    )
    assert grants(run([want("a")], [small], generous=1)) == [("a", 9)]


def test_elastic_replica_is_unplaced_if_the_reduction_budget_is_used_up() -> None:
    shelves = [shelf(device("g0", 24)), shelf(device("g1", 9)), shelf(device("g2", 9))]
    requests = [
        want("a", unserved_since_s=1.0, products=()),
        want("b", unserved_since_s=2.0),
        want("c", unserved_since_s=3.0),
    ]
    made = run(requests, shelves, generous=1)
    assert sorted(memory for _, memory in grants(made)) == [9, 9, 10]
    assert len(made.placements) == 3, "of four two have all: 95 %"
    assert len(run(requests, shelves).placements) == 2, "of three only one could"


def test_elastic_replica_accepts_a_slightly_too_small_dedicated_slice() -> None:
    cut = shelf(device("g0", 9.5, shared=False))
    assert grants(run([want("a")], [cut])) == [("a", 9.5)]
    never = run([want("a", 11)], [cut]).unmet[0]
    assert (never.never, never.reason) == (True, "needs 10Gi on one device; the largest has 9.5Gi")


def test_elastic_replica_evicts_only_as_much_as_its_minimum_memory_needs() -> None:
    busy = on("busy", 10.5, busy=True)
    starting = shelf(device("g0", 20), busy, locked=True)
    made = run([want("a", force=EvictionLevel.BUSY)], [starting, shelf(device("g1", 10), on("idle", 10))], generous=1)
    assert victims(made) == []
    assert made.unmet[0].promised
    two = shelf(device("g2", 10), on("idle", 9), on("other", 1))
    assert victims(run([want("a", force=EvictionLevel.BUSY)], [two], generous=1)) == ["idle"]
    assert sorted(victims(run([want("a", force=EvictionLevel.BUSY)], [two]))) == ["idle", "other"], (
        "without budget it needs all"
    )


def test_elastic_replica_gets_the_promised_memory_after_an_eviction() -> None:
    two = shelf(device("g2", 10), on("idle", 9), on("other", 1))
    assert victims(run([want("a", force=EvictionLevel.BUSY)], [two], generous=1)) == ["idle"]
    assert grants(run([want("a")], [shelf(device("g2", 10), on("other", 1))], generous=1)) == [("a", 9)]


WANTS = st.lists(
    st.builds(
        lambda number, memory, percent, force: placement_request(
            f"m{number}", number, memory_bytes=memory, spare_bytes=memory * percent // 100, force=force
        ),
        st.integers(0, 99),
        st.integers(1, 1000),
        st.integers(0, 30),
        st.sampled_from([EvictionLevel.NONE, EvictionLevel.BUSY]),
    ),
    max_size=12,
    unique_by=lambda one: one.ordinal,
)
SHELVES = st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 900), st.booleans()), min_size=1, max_size=6)


def _shelf(number: int, size: int, used: int, *, shared: bool) -> Bin:
    free = max(0, size - used) if shared else size
    slice_ = replace(device(f"g{number}", shared=shared), memory_bytes=size)
    return Bin(
        slice=slice_,
        whole=True,
        incumbents=(),
        free=ResourceAmount(free, 100),
        coming=ResourceAmount(0, 0),
        locked=False,
    )


@settings(deadline=None, max_examples=examples(300))
@given(WANTS, SHELVES, st.integers(0, 4))
def test_elastic_replicas_get_at_least_95_percent_of_memory_on_average(
    wants: list[PlacementRequest], sizes: list[tuple[int, int, bool]], generous: int
) -> None:
    shelves = [_shelf(at, size, used, shared=shared) for at, (size, used, shared) in enumerate(sizes)]

    def made(of: Sequence[PlacementRequest]) -> PackResult:
        yard = SliceIndex(shelves)
        yard.budget = lambda: counted(generous, 100)
        return pack(of, yard, frozenset(), RestartCosts(), T0)

    packing = made(wants)
    assert packing == made(wants[::-1]), "the same in any order"
    free = {one.slice.id: one.free.memory_bytes for one in shelves}
    asked, got, parts, count = 100 * generous, 100 * generous, 1.0 * generous, generous
    for placement in packing.placements:
        (id,) = placement.slices
        one, memory = placement.want, placement.memory_bytes
        free[id] -= memory
        assert memory >= one.kind.memory_bytes - one.kind.spare_bytes
        assert memory == one.kind.memory_bytes or one.kind.spare_bytes or not shelves[int(id[1:])].slice.shared
        if one.kind.spare_bytes:
            asked, got = asked + one.kind.memory_bytes, got + min(memory, one.kind.memory_bytes)
            parts, count = parts + min(1.0, memory / one.kind.memory_bytes), count + 1
    assert min(free.values()) >= 0
    assert got >= 0.95 * asked - 1e-9
    assert parts >= 0.95 * count - 1e-4
    for one in wants:
        if made([change_request(one, spare_bytes=0)]).placements:
            assert made([one]).placements, "who fits with all is not refused for making do with less"
