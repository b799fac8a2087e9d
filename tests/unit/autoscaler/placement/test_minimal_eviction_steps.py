"""Cost of the minimal-eviction search: infeasible and already tried placements are not tried again."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from autoscaler.placement import minimal_eviction, minimal_eviction_input
from autoscaler.placement.model.types import Bin, PackResult, PlacementRequest
from tests.kit.worlds import device
from tests.unit.autoscaler.placement.test_packer import on, run, shelf, victims, want


def counted(
    monkeypatch: pytest.MonkeyPatch, wants: Iterable[PlacementRequest], shelves: Iterable[Bin]
) -> tuple[PackResult, list[int]]:
    """The result, and the number of steps of each search."""
    steps, run_ = list[int](), minimal_eviction._Search.run

    def one(search: minimal_eviction._Search) -> tuple[minimal_eviction_input.Assignment, ...] | None:
        found = run_(search)
        steps.append(search.steps)
        return found

    monkeypatch.setattr(minimal_eviction, "STEPS_MAX", 1 << 30)
    with monkeypatch.context() as patch:
        patch.setattr(minimal_eviction._Search, "run", one)
        return run(wants, shelves), steps


def filled(*free: float) -> list[Bin]:
    """24 GiB devices with this much free memory; x0, on the first, may be evicted, the others may not."""
    return [
        shelf(device(f"g{at}"), on(f"x{at}", 24 - left, kept=at > 0, busy=True, priority=9 * bool(at)))
        for at, left in enumerate(free)
    ]


def test_search_takes_no_step_if_total_free_memory_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    wants = [want("a", 11), want("b", 11, ordinal=1), want("c", 6, ordinal=2)]
    answer, steps = counted(monkeypatch, wants, filled(11, 11.5))
    assert (victims(answer), steps) == (["x0"], [0])


def test_search_does_not_repeat_equivalent_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of seven requests has no room on six devices, each of which fits any request: 720 equivalent assignments."""
    wants = [want(f"w{at}", 6, ordinal=at) for at in range(7)]
    answer, steps = counted(monkeypatch, wants, filled(*(10 + at / 8 for at in range(6))))
    assert victims(answer) == ["x0"]
    assert 6 <= sum(steps) < 6 * 2**6


def test_two_victims_on_one_device_are_spared_by_one_search(monkeypatch: pytest.MonkeyPatch) -> None:
    both = on("x", 1, busy=True), on("y", 1, busy=True), on("stays", 12, kept=True, priority=9)
    shelves = [shelf(device("g0", 12)), shelf(device("g1", 24), *both)]
    answer, steps = counted(monkeypatch, [want("a", 10, priority=1), want("b", 12)], shelves)
    assert (victims(answer), len(steps)) == ([], 1)
    monkeypatch.setattr(minimal_eviction._Search, "run", lambda _: None)
    assert victims(run([want("a", 10, priority=1), want("b", 12)], shelves)) == ["x", "y"], "without the search"


def test_search_is_skipped_if_a_replica_that_stays_needs_the_eviction(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(minimal_eviction_input, "MOVERS_MAX", 1)
    wants = [want("a", 8, priority=1), want("b", 20)]
    shelves = [shelf(device("g0", 12), on("y", 6)), shelf(device("g1", 24), on("x", 20))]
    answer, steps = counted(monkeypatch, wants, shelves)
    assert (sorted(victims(answer)), min(steps)) == (["x", "y"], 0)
