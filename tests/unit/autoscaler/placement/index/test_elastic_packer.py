"""Elastic `PlacementRequest` objects in the packer: reduced grants, evictions, and the bound on the total reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.placement.index.elastic import ElasticBudget
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.types import Bin, EvictionLevel, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import ResourceAmount
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.worlds import GI, T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import on, shelf, victims


def want(name: str, memory_gi: float = 10, spare_gi: float = 1, **fields: Any) -> PlacementRequest:
    made = placement_request(name, memory_bytes=int(memory_gi * GI), spare_bytes=int(spare_gi * GI))
    return change_request(made, **fields)


def counted(many: int, bytes_: int) -> ElasticBudget:
    """A budget after `many` grants of the full requested size."""
    budget = ElasticBudget()
    for _ in range(many):
        budget.add(bytes_, bytes_)
    return budget


def run(wants: Sequence[PlacementRequest], shelves: Sequence[Bin], generous: int = 0) -> PackResult:
    yard = SliceIndex(shelves)
    yard.budget = lambda: counted(generous, 10 * GI)
    return pack(wants, yard, frozenset(), RestartCosts(), T0)


def grants(packing: PackResult) -> list[tuple[str, float]]:
    return [(placement.want.model, placement.memory_bytes / GI) for placement in packing.placements]


# --- the packer -------------------------------------------------------------------------------------------------------


def test_elastic_replica_gets_less_memory_in_a_slightly_too_small_gap() -> None:
    hole = shelf(device("g0", 20), on("x", 10.5))
    assert grants(run([want("a")], [hole])) == [("a", 9.5)]
    rigid = run([want("a", spare_gi=0)], [hole]).unmet[0]
    assert rigid.reason.startswith("needs 10Gi on one device; the largest has 9.5Gi free of 20Gi")


def test_packed_elastic_replica_gets_its_full_memory_if_no_budget_remains() -> None:
    small, large = shelf(device("g0", 20), on("x", 11)), shelf(device("g1", 24))
    assert grants(run([want("a")], [small, large])) == [("a", 10)], "alone with nine tenths all would have too little"
    alone = run([want("a")], [small]).unmet[0]
    assert alone.reason.startswith("needs 10Gi (at least 9Gi) on one device; the largest has 9Gi free of 20Gi")
    assert alone.reason.endswith(
        "; its minimum is refused, so that elastic replicas keep 95 % of their requests in total"
    )
    assert grants(run([want("a")], [small], generous=1)) == [("a", 9)]


def test_replica_is_unplaced_if_earlier_ones_used_up_the_elastic_budget() -> None:
    shelves = [shelf(device("g0", 24)), shelf(device("g1", 9)), shelf(device("g2", 9))]
    wants = [
        want("a", unserved_since_s=1.0, products=()),
        want("b", unserved_since_s=2.0),
        want("c", unserved_since_s=3.0),
    ]
    made = run(wants, shelves, generous=1)
    assert sorted(memory for _, memory in grants(made)) == [9, 9, 10]
    assert len(made.placements) == 3, "of four two have all: 95 %"
    assert len(run(wants, shelves).placements) == 2, "of three only one could"


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
