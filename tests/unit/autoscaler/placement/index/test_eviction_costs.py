"""The index of eviction victims in `SliceIndex`, compared with a slow reference that scans every Slice."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.eviction import eviction_cost, list_evictable_occupants, sum_amounts
from autoscaler.placement.index.eviction_costs import EvictionCostIndex
from autoscaler.placement.model.types import Bin, EvictionLevel, PlacementRequest, RestartCosts
from autoscaler.state.resources import ResourceAmount
from tests.support.builders.worlds import T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import on, shelf, want

LANES = 6
MODELS = tuple(ModelName(name) for name in "abcd")


def drawn(rng: Random, lane: int) -> Bin:
    """A Slice with random occupants."""
    there = [
        on(rng.choice(MODELS), rng.randrange(1, 9), rng.choice((0, 20)), replica=ReplicaId(f"r{rng.randrange(40)}"),
           priority=rng.randrange(-1, 3), busy=rng.random() < 0.5, kept=rng.random() < 0.3,
           leaving=rng.random() < 0.2, evictable_s=rng.choice((0.0, T0, T0 + 1)))
        for _ in range(rng.randrange(4))
    ]  # fmt: skip
    return shelf(device(f"g{lane}", 80), *there)


def outlook(rng: Random) -> RestartCosts:
    return RestartCosts({name: float(rng.randrange(3)) for name in MODELS[:3]})


def slowly(
    asked: PlacementRequest, shelves: list[Bin], expected: RestartCosts, removed: set[ReplicaId]
) -> dict[int, tuple[tuple[float, ...], ResourceAmount]]:
    """By lane: a lower bound on the cost of one evictable occupant, and the total resources of all of them."""
    found = {}
    for lane, one in enumerate(shelves):
        those = [each for each in list_evictable_occupants(asked, one, expected, T0) if each.replica not in removed]
        costs = [eviction_cost((each,), expected)[:3] for each in those]
        if those:
            least = min(c[0] for c in costs), min(c[1] for c in costs), min(c[2] for c in costs)
            found[lane] = tuple(float(part) for part in least), sum_amounts(those)
    return found


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(st.integers(0, 1 << 30))
def test_eviction_cost_index_equals_a_full_scan_after_random_updates(seed: int) -> None:
    rng = Random(seed)
    roster, shelves, expected = EvictionCostIndex(LANES), [drawn(rng, lane) for lane in range(LANES)], outlook(rng)
    for lane, one in enumerate(shelves):
        roster.put(lane, one)
    for _ in range(6):
        asked = want(rng.choice("abz"), priority=rng.randrange(-1, 3), force=rng.choice(list(EvictionLevel)))
        removed = {i.replica for one in shelves for i in one.incumbents if rng.random() < 0.1}
        roster.look(shelves.__getitem__, expected)
        grade, there = roster.grade(asked, T0, removed), slowly(asked, shelves, expected, removed)
        costs = [
            tuple(float(part) for part in parts)
            for parts in zip(grade.busy, grade.priority, grade.restart_s, strict=True)
        ]
        rooms = (ResourceAmount(*(int(amount) for amount in one)) for one in grade.rooms.T)
        assert dict(zip(grade.lanes.tolist(), zip(costs, rooms, strict=True), strict=True)) == there
        assert [costs[at] for at in grade.cost.argsort(kind="stable")] == sorted(costs)
        later = (i.evictable_s for one in shelves for i in one.incumbents if not i.leaving and i.evictable_s > T0)
        assert roster.next_s(T0) == min(later, default=None)
        lane = rng.randrange(LANES)
        shelves[lane] = drawn(rng, lane)
        if rng.random() < 0.5:
            roster.put(lane, shelves[lane])
            assert tuple(roster.soon[:, lane]) == shelves[lane].free.plus(shelves[lane].coming)
        else:
            roster.stir([lane])
        expected = outlook(rng) if rng.random() < 0.3 else expected


def test_repeated_updates_of_a_slice_reuse_its_eviction_cost_rows() -> None:
    roster, expected = EvictionCostIndex(1), RestartCosts()
    full = shelf(device("g0", 80), *(on(f"x{number}", 1) for number in range(8)))
    roster.put(0, full)
    for _ in range(100):
        roster.look(lambda _: full, expected)
        roster.stir([0])
    assert roster.rows == len(full.incumbents)
