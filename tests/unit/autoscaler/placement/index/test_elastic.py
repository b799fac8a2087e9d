"""Elastic requests: how much memory each is granted, and the bound on the total reduction."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.placement.index.elastic import Elastic, ElasticBudget, PlacedRequest, make_elastic
from autoscaler.placement.index.node_arrays import NodeArrays, NodeCapacity
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
from autoscaler.state.resources import RequestFrequency, RequestShape, SliceClass
from bench.packing.arrivals import Round
from bench.packing.cluster import Cluster
from bench.packing.openb import Kind as Asked
from bench.packing.openb import NodeRow
from bench.packing.replay import replay
from tests.support.example_budget import examples

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
    assert granted(one.start(RequestShape(memory_bytes=570))) == (0, 570), "who is not elastic gets what it asks for"
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


def test_elastic_replica_gets_its_full_memory_if_no_budget_remains() -> None:
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
        (800, 719, "no grant for"), (800, 801, "no grant for"), (1000, 950, "no grant for"),
        (800, 720, "0.9000 and 0.9000"), (800, 0, "no grant for"),
    ],
)  # fmt: skip
def test_replay_rejects_an_invalid_memory_allocation(asked: int, milli: int, error: str) -> None:
    class Miser:
        def choose(self, kind: Asked) -> tuple[int, int, int]:
            return 0, 0, milli

    round = Round((NodeRow("n", 9000, 9000, 1, "T4"),), (Asked(1, 1, 1, asked, frozenset()),), 1)
    with pytest.raises(AssertionError, match=error):
        replay(round, lambda _: Miser())


def test_replay_counts_requested_memory_but_occupies_only_the_allocated() -> None:
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
