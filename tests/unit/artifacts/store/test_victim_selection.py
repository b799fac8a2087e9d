"""Which Copies are evicted: none in use or pinned, enough or none, no more than needed, least valuable first."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from artifacts.store.victim_selection import Candidate, Choice, select_victims

GIB = 1 << 30
BLOBS = {f"b{number}": size for number, size in enumerate((1, 5, 7, 20, 50, 90))}


def copy(name: str, size: int = GIB, age_s: float = 3600.0, cost_s: float = 10.0) -> Candidate:
    return Candidate(name, {f"of {name}": size}, age_s=age_s, cost_s=cost_s)


def freed(candidates: Sequence[Candidate], removed: Sequence[str]) -> int:
    """Count the freed bytes in another way: those of all Copies, less those of the remaining ones."""
    rest = [one for one in candidates if one.name not in removed]

    def taken(of: Sequence[Candidate]) -> int:
        return sum(one.own_bytes for one in of) + sum({k: v for one in of for k, v in one.blobs.items()}.values())

    return taken(candidates) - taken(rest)


@st.composite
def shelves(draw: st.DrawFn) -> list[Candidate]:
    names = draw(st.lists(st.integers(0, 50), unique=True, max_size=7))
    return [
        Candidate(
            str(name), {blob: BLOBS[blob] for blob in draw(st.sets(st.sampled_from(sorted(BLOBS)), max_size=4))},
            draw(st.integers(0, 40)), age_s=draw(st.floats(0, 1e6)), cost_s=draw(st.floats(0, 1e4)),
            left=draw(st.booleans()), pinned=draw(st.integers(0, 3)) == 0, in_use=draw(st.integers(0, 3)) == 0,
        )
        for name in names
    ]  # fmt: skip


@given(shelves(), st.integers(-5, 300), st.randoms(use_true_random=False))
def test_victim_set_is_minimal_and_excludes_pinned_or_used_copies(
    shelf: list[Candidate], needed: int, rng: random.Random
) -> None:
    found = select_victims(shelf, needed)
    held = {one.name for one in shelf if one.held}
    assert not held & set(found.gone)
    assert found.freed_bytes == freed(shelf, found.gone)
    if found.lacking_bytes:
        assert not found.gone
        assert found.lacking_bytes == needed - freed(shelf, [one.name for one in shelf if not one.held])
    else:
        assert found.freed_bytes >= needed
        for one in found.gone:  # freeing is monotone, so no smaller subset is enough either
            assert freed(shelf, [other for other in found.gone if other != one]) < needed
    again = shelf.copy()
    rng.shuffle(again)
    assert select_victims(again, needed) == found


def test_nothing_is_evicted_when_no_bytes_are_needed() -> None:
    assert select_victims([copy("a")], 0) == Choice()


def test_nothing_is_evicted_if_all_evictable_copies_free_too_little() -> None:
    shelf = [copy("a"), copy("b")._replace(pinned=True), copy("c")._replace(in_use=True, pinned=True)]
    assert select_victims(shelf, 2 * GIB) == Choice((), 0, GIB, pinned_bytes=GIB, in_use_bytes=GIB)


@pytest.mark.parametrize(
    ("candidates", "needed", "victim"),
    [
        ([copy("new", age_s=100.0), copy("old", age_s=200.0)], 1, "old"),
        ([copy("slow", age_s=200.0, cost_s=100.0), copy("quick", age_s=100.0)], 1, "quick"),
        ([copy("slow", age_s=2000.0, cost_s=100.0), copy("quick", age_s=100.0)], 1, "slow"),
        ([copy("small", GIB), copy("large", 8 * GIB)], GIB, "large"),
        ([copy("old", age_s=1e9), Candidate("left", {}, GIB, left=True)], GIB, "left"),
        ([copy("small", 1, age_s=1e9, cost_s=1.0), copy("large", GIB, age_s=1e9, cost_s=2 * GIB)], GIB, "large"),
    ],
    ids=["longest unused", "quick to fetch", "very old", "larger", "left by an unfinished pull", "large enough alone"],
)
def test_copy_that_is_old_large_or_cheap_to_fetch_is_evicted_first(
    candidates: list[Candidate], needed: int, victim: str
) -> None:
    assert select_victims(candidates, needed).gone == (victim,)


def test_shared_file_is_freed_only_with_its_last_copy() -> None:
    shared = {"shared": GIB}
    one, two = Candidate("one", shared, age_s=1e6), Candidate("two", shared, age_s=1e5)
    assert select_victims([one, two], GIB).gone == ("one", "two")
    assert select_victims([one, two._replace(pinned=True)], GIB).lacking_bytes == GIB
