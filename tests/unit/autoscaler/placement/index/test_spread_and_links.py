"""Placement on several linked devices of one node, compared with an exhaustive reference."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.placement.index import spread_and_links
from autoscaler.placement.index.residual_waste_tables import Ints
from tests.support.example_budget import examples


def slow(devices: int, fits: list[bool], tiers: Ints, values: Ints, must: Ints) -> list[int] | None:
    """The team with the largest value minus the highest tier of its best lanes; the first one on a tie."""
    found: list[tuple[int, int, list[int]]] = []
    for team in sorted({*must.tolist()} - {-1}):
        lanes = sorted((at for at in range(len(fits)) if fits[at] and must[at] == team), key=lambda at: (tiers[at], at))
        chosen = lanes[:devices]
        if len(chosen) == devices:
            found.append((int(values[chosen[0]] - tiers[chosen[-1]]), -team, chosen))
    return max(found)[2] if found else None


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.integers(0, 1 << 30), st.integers(2, 4))
def test_best_set_of_devices_joined_by_one_link_is_chosen(seed: int, devices: int) -> None:
    draw = np.random.default_rng(seed)
    counts = draw.integers(0, 7, int(draw.integers(1, 6)))
    names = [draw.choice(["", "x", "y", "z"], many).tolist() for many in counts]
    node_of, lanes = np.repeat(np.arange(len(counts)), counts), int(counts.sum())
    must = spread_and_links.number_links(names, counts.tolist())
    fits, tiers = draw.random(lanes) < 0.8, draw.integers(0, 3, lanes) << 10
    scores = draw.integers(0, 9, len(counts))
    roots = spread_and_links.find_link_numbers(names, counts.tolist())
    found = spread_and_links.choose_best_lanes(devices, fits, tiers, scores, node_of, link_of=roots, must=must)
    expected = slow(devices, fits.tolist(), tiers, scores[node_of], must)
    assert (None if found is None else found.tolist()) == expected
