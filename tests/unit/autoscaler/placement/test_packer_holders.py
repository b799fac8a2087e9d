"""Slices with a pod limit: an eviction frees a pod slot together with memory, and no victim is unnecessary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.model.predicates import can_evict
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest
from autoscaler.planner.plan import plan
from autoscaler.queries.overcommitted_slices import compute_usable_resources
from autoscaler.state.actions import Plan, StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import Isolation, ResourceAmount
from autoscaler.state.world import Slice, SliceId
from tests.support.builders.placement_requests import placement_request
from tests.support.builders.worlds import GI, T0, device, gateway, kinds, level, model, replica, world
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import placed, run, shelf, victims, want

CARD = device("n0/g", 80, kind="hami", isolation=Isolation.MEMORY, holders_max=2, handle="h")


def on(name: str, memory_gi: float, **fields: Any) -> Occupant:
    """An idle replica that uses one pod slot."""
    return Occupant(
        ReplicaId(f"{name}-r"), ModelName(name), S.READY, ResourceAmount(int(memory_gi * GI), 0, 1)
    )._replace(**fields)


def taken(slice_: Slice, *incumbents: Occupant) -> Bin:
    """A bin of a Slice with a pod limit."""
    made, free = shelf(slice_, *incumbents), compute_usable_resources(slice_)
    for one in incumbents:
        free = free.less(one.room)
    made.free = free
    return made


def planned(memory_gi: float, *there: str) -> Plan:
    """The plan for a high-priority model with these small low-priority replicas on the card."""
    low, high = [model(f"low{at}", 2, low=1) for at in range(2)], model("high", memory_gi, priority=5)
    on_it = [replica(one, one.name, [CARD.id]) for one in low if one.name in there]
    demand = [gateway(levels=[level("high", waiting=1)])]
    return plan(world([*low, high], [CARD], on_it, gateways=demand), T0 + 5)


@pytest.mark.parametrize("memory_gi", [1, 3, 20, 78])
def test_one_replica_is_evicted_if_only_the_device_pod_limit_is_reached(memory_gi: float) -> None:
    made = planned(memory_gi, "low0", "low1")
    assert kinds(made) == ["drain low0"], "the other replica may stay, and all free memory is available to the new one"
    assert [one.reason for one in made.unmet] == ["waits on n0/g for the eviction of low0"]
    starts = [one.replica.model for one in planned(memory_gi, "low1").actions if isinstance(one, StartReplica)]
    assert starts[:1] == ["high"], "it is placed beside the other"


def test_two_replicas_are_evicted_if_one_frees_too_little_memory() -> None:
    assert kinds(planned(79, "low0", "low1")) == ["drain low0", "drain low1"]


def test_pod_slot_freed_by_an_eviction_is_assigned_to_only_one_replica() -> None:
    card = taken(CARD, on("x", 2), on("y", 2))
    assert victims(run([want("a", 3), want("b", 3)], [card])) == ["x", "y"]
    three = run([want("a", 3), want("b", 3), want("c", 3)], [card])
    assert [one.promised for one in three.unmet] == [True, True, False]
    assert three.unmet[2].reason == (
        "needs 3Gi on one device; the largest has 70Gi free of 80Gi, held by x (to be drained), y (to be drained); "
        "at most 2 pods share it"
    )


def test_replica_waiting_for_a_draining_one_evicts_no_other_replica() -> None:
    leaving = on("x", 2, state=S.DRAINING, leaving=True)
    answer = run([want("a", 20)], [taken(CARD, leaving, on("y", 2))])
    assert (victims(answer), answer.unmet[0].reason) == ([], "waits on n0/g until x has stopped")


def test_second_replica_evicts_if_the_first_takes_the_last_pod_slot() -> None:
    answer = run([want("a", 3), want("b", 3)], [taken(CARD, on("x", 2))])
    assert (placed(answer), victims(answer)) == ([("a", "n0/g")], ["x"])


def test_free_memory_without_a_free_pod_slot_requires_an_eviction() -> None:
    """The eviction for the large one frees memory for both, but only one pod slot: the small one needs another."""
    card = taken(replace(CARD, holders_max=3), on("x", 2), on("y", 40), on("z", 2))
    answer = run([want("a", 60, priority=1), want("b", 3)], [card])
    assert len(victims(answer)) == 2


# --- properties -----------------------------------------------------------------------------------------------------

QUICK = settings(derandomize=True, deadline=None, max_examples=examples(200))
NAMES = st.sampled_from([ModelName(name) for name in "abcdef"])


@st.composite
def cards(draw: st.DrawFn) -> list[Bin]:
    made: list[Bin] = []
    for at in range(draw(st.integers(1, 3))):
        most = draw(st.integers(0, 4))
        foreign = draw(st.integers(0, most))
        many = draw(st.integers(0, most - foreign if most else 4))
        there = [
            Occupant(
                ReplicaId(f"g{at}-{number}"),
                draw(NAMES),
                S.READY,
                ResourceAmount(draw(st.integers(1, 6)) * GI, 0, min(1, most)),
                priority=draw(st.integers(0, 2)),
                busy=draw(st.booleans()),
                evictable_s=draw(st.sampled_from([0.0, 0.0, T0 + 1])),
                leaving=draw(st.integers(0, 3)) == 0,
            )
            for number in range(many)
        ]
        made.append(taken(device(f"g{at}", 24, f"n{at % 2}", holders_max=most, theirs=foreign), *there))
    return made


@st.composite
def wanted(draw: st.DrawFn) -> list[PlacementRequest]:
    return [
        placement_request(
            draw(NAMES),
            ordinal,
            memory_bytes=draw(st.sampled_from([1, 2, 5, 9, 20])) * GI,
            priority=draw(st.integers(0, 2)),
            unserved_since_s=draw(st.integers(0, 3)),
            force=draw(st.sampled_from(list(EvictionLevel))),
        )
        for ordinal in range(draw(st.integers(1, 7)))
    ]


def expected(answer: PackResult, ids: Iterable[SliceId]) -> dict[SliceId, list[PlacementRequest]]:
    """The final requests of each Slice: placed now, or with a promised place."""
    found: dict[SliceId, list[PlacementRequest]] = {id: [] for id in ids}
    for one in answer.placements:
        found[one.slices[0]].append(one.want)
    for missing in answer.unmet:
        words = map(SliceId, missing.reason.replace(":", " ").split())
        if missing.promised:
            found[next(word for word in words if word in found)].append(missing.want)
    return found


@QUICK
@given(wanted(), cards())
def test_device_pod_limit_and_memory_are_never_exceeded(wants: list[PlacementRequest], shelves: list[Bin]) -> None:
    answer = run(wants, shelves)
    removed = {one.replica for one in answer.victims}
    now, soon = Counter(one.slices[0] for one in answer.placements), expected(answer, [s.slice.id for s in shelves])
    for one in shelves:
        of, stay = one.slice, [i for i in one.incumbents if not i.leaving and i.replica not in removed]
        assert sum(i.room.memory_bytes for i in stay) + sum(w.kind.memory_bytes for w in soon[of.id]) <= of.memory_bytes
        if of.holders_max and soon[of.id]:
            assert of.theirs + len(stay) + len(soon[of.id]) <= of.holders_max
        if of.holders_max and now[of.id]:
            assert of.theirs + len(one.incumbents) + now[of.id] <= of.holders_max


@QUICK
@given(wanted(), cards())
def test_packer_finds_a_possible_placement_without_needless_pod_victims(
    wants: list[PlacementRequest], shelves: list[Bin]
) -> None:
    for one in wants:
        answer = run([one], shelves)
        ways = [way for each in shelves for way in _ways(one, each)]
        assert (bool(answer.placements) or answer.unmet[0].promised) == bool(ways), (answer, ways)
        if answer.victims:
            assert frozenset(victim.replica for victim in answer.victims) in ways, "all of these, and no fewer of them"
            assert frozenset() not in ways, "no replica is evicted while capacity is being freed"


def _ways(one: PlacementRequest, on_it: Bin) -> list[frozenset[ReplicaId]]:
    """The minimal victim sets that make room for the request, by exhaustive search."""
    willing = sorted(i.replica for i in on_it.incumbents if can_evict(one, i, T0))
    found: list[frozenset[ReplicaId]] = []
    for count in range(len(willing) + 1):
        for some in map(frozenset, combinations(willing, count)):
            stay = [i for i in on_it.incumbents if not i.leaving and i.replica not in some]
            if not any(less <= some for less in found) and _fits(one, on_it.slice, stay):
                found.append(some)
    return found


def _fits(one: PlacementRequest, of: Slice, stay: Sequence[Occupant]) -> bool:
    enough = sum(i.room.memory_bytes for i in stay) + one.kind.memory_bytes <= of.memory_bytes
    return enough and (not of.holders_max or of.theirs + len(stay) < of.holders_max)
