"""Candidate Slices for a placement request of a batch if there are more than the search may use."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.minimal_eviction import PLACES_MAX, Assigned, MinimalEvictionInput
from autoscaler.placement.model.types import Bin, PlacementRequest
from autoscaler.state.world import NodeId, SliceId
from tests.support.builders.worlds import T0, device
from tests.unit.autoscaler.placement.test_packer import on, placed, run, shelf, victims, want


def looked_at(
    one: PlacementRequest, shelves: Iterable[Bin], *, now: bool, at: tuple[str, ...] = ("here",)
) -> list[str]:
    """Candidate Slices of a request placed on `here`, which has more free memory than the others."""
    there = [shelf(device(id, 80)) for id in at]
    return list(
        MinimalEvictionInput([Assigned(one, tuple(map(SliceId, at)), now)], [], SliceIndex((*there, *shelves)), T0).ids
    )


def tight(many: int = PLACES_MAX) -> list[Bin]:
    """Empty devices of 12 GiB."""
    return [shelf(device(f"t{at:02}", 12)) for at in range(many)]


def test_slices_with_the_least_free_memory_are_considered_first() -> None:
    roomy = [shelf(device(f"a{at:02}", 24)) for at in range(PLACES_MAX)]
    assert looked_at(want("a", 10), [*roomy, *tight()], now=True) == ["here", *(one.slice.id for one in tight())]
    found = looked_at(want("a", 10), [*roomy, *tight(3)], now=True)
    assert (len(found), found[:4]) == (1 + PLACES_MAX, ["here", "t00", "t01", "t02"])


def test_replica_starting_now_considers_only_slices_that_are_free_now() -> None:
    coming = [shelf(device(f"c{at:02}", 12), on(f"x{at}", 10, leaving=True)) for at in range(PLACES_MAX)]
    locked = [shelf(device(f"l{at:02}", 12), locked=True) for at in range(PLACES_MAX)]
    free = shelf(device("z", 24))
    for others in (coming, locked):
        assert looked_at(want("a", 10), [*others, free], now=True) == ["here", "z"]
        assert len(looked_at(want("a", 10), [*others, free], now=False)) == 1 + PLACES_MAX, "it waits anyway"


def test_slices_already_assigned_do_not_count_toward_places_max() -> None:
    on_ = tuple(f"h{at:02}" for at in range(PLACES_MAX))
    roomier = [shelf(device(f"r{at:02}", 90)) for at in range(PLACES_MAX)]
    assert len(looked_at(want("a", 10), roomier, now=True, at=on_)) == 2 * PLACES_MAX


def test_multi_device_replica_considers_only_nodes_with_enough_devices() -> None:
    alone = [shelf(device(f"a{at:02}", 80, f"n{at:02}")) for at in range(PLACES_MAX)]
    both = [shelf(device(f"z{at}", 80, "z")) for at in range(2)]
    two = want("a", 0, devices=2)
    assert looked_at(two, [*alone, *both], now=True, at=("h0", "h1")) == ["h0", "h1", "z0", "z1"]
    there = [shelf(device(id, 80, id)) for id in ("h0", "h1")]
    held = Assigned(two, (SliceId("h0"), SliceId("h1")), now=True)
    assert MinimalEvictionInput([held], [], SliceIndex((*there, *alone, *both)), T0).ids == ["h0", "h1", "z0", "z1"], (
        "each counts once"
    )


def test_replica_never_moves_to_a_forbidden_node_to_spare_a_victim() -> None:
    """On g1 is room for a, and with a there, b would need no eviction."""
    shelves = [shelf(device("g0", 12)), shelf(device("g1", 24, "n1"), on("x", 14, busy=True))]
    assert victims(run([want("a", 10, priority=1), want("b", 12)], shelves)) == []
    kept_off = want("a", 10, priority=1, avoids=(NodeId("n1"),))
    answer = run([kept_off, want("b", 12)], shelves)
    assert (placed(answer), victims(answer)) == ([("a", "g0")], ["x"])
    labelled = [replace(one.slice, labels={"zone": one.slice.node}, labels_known=True) for one in shelves]
    shelves = [shelf(slice_, *one.incumbents) for slice_, one in zip(labelled, shelves, strict=True)]
    here = want("a", 10, priority=1, selector=(("zone", shelves[0].slice.node),))
    assert victims(run([here, want("b", 12)], shelves)) == ["x"]
