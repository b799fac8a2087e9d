"""Each layout of our MIG geometry can be reached from the instance counts that mig-parted gets, in some order.

mig-parted creates the instances of a GPU one after the other, each where the driver puts it, and tries another order if
one does not fit (`SetMigConfig`, iteratePermutationsUntilSuccess). The driver is simulated: it takes the first free
start, from either end. A node is repartitioned only while it is idle, so each GPU is empty at the beginning.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from autoscaler.slicing.mig_geometry import GEOMETRIES, Cut, Geometry, Layout, list_starts

Counts = tuple[tuple[str, int], ...]


def legal(geometry: Geometry) -> set[Counts]:
    """Instance counts per profile, of all layouts."""
    seen, found, left = set[Layout](), set[Counts](), list[Layout]([()])
    while left:
        on = left.pop()
        found.add(tuple(sorted(Counter(cut.profile for cut in on).items())))
        for profile in geometry.profiles:
            for start in list_starts(geometry, on, profile.name):
                more = tuple(sorted((*on, Cut(profile.name, start))))
                if more not in seen:
                    seen.add(more)
                    left.append(more)
    return found


def orders(geometry: Geometry, counts: Counts, end: int, on: Layout = ()) -> Iterator[tuple[str, ...]]:
    """All orders in which a driver that starts at that end (0, or -1 for the last start) has room for each."""
    if not counts:
        yield ()
    for at, (name, many) in enumerate(counts):
        free = list_starts(geometry, on, name)
        if free:
            rest = (*counts[:at], *([(name, many - 1)] if many > 1 else []), *counts[at + 1 :])
            after = tuple(sorted((*on, Cut(name, free[end]))))
            yield from ((name, *more) for more in orders(geometry, rest, end, after))


@pytest.mark.parametrize("end", [0, -1])
@pytest.mark.parametrize("name", sorted(GEOMETRIES))
def test_every_valid_mig_layout_is_reachable_in_some_creation_order(name: str, end: int) -> None:
    geometry = GEOMETRIES[name]
    lost = [counts for counts in legal(geometry) if next(orders(geometry, counts, end), None) is None]
    assert lost == []


def test_wrong_creation_order_of_mig_slices_does_not_reach_the_layout() -> None:
    """Guards against a test above that would accept anything."""
    geometry = GEOMETRIES["H100-80"]
    balanced = (("1g.10gb", 2), ("2g.20gb", 1), ("3g.40gb", 1))
    found = {*orders(geometry, balanced, 0)}
    assert ("1g.10gb", "1g.10gb", "2g.20gb", "3g.40gb") in found
    assert ("3g.40gb", "2g.20gb", "1g.10gb", "1g.10gb") not in found
    assert next(orders(geometry, (("3g.40gb", 1), ("7g.80gb", 1)), 0), None) is None, "what cannot be is not found"
