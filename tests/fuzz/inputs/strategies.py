"""Inputs near a target's seeds, as Hypothesis draws and shrinks them."""

from __future__ import annotations

from random import Random

from hypothesis import strategies as st

from tests.fuzz.target_registry import Target

PLACES_MAX = 4


def inputs(target: Target) -> st.SearchStrategy[bytes]:
    """A seed that is changed in a few places, or a structured input of the format; sometimes arbitrary bytes."""
    put = st.sampled_from(target.words) | st.binary(max_size=4)
    place = st.tuples(st.integers(0, 1 << 12), st.integers(0, 9), put)
    changed = st.builds(_changed, st.sampled_from(target.seeds), st.lists(place, min_size=1, max_size=PLACES_MAX))
    if (case := target.case) is not None:
        changed |= st.integers(0, 1 << 62).map(lambda number: case(Random(number)))
    return changed | st.binary(max_size=60)


def _changed(data: bytes, places: list[tuple[int, int, bytes]]) -> bytes:
    for number, cut, put in places:
        at = number % (len(data) + 1)
        data = data[:at] + put + data[at + cut :]
    return data
