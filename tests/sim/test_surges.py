"""Surges with all that goes wrong. `SURGES` (default 30) says how many; a failing seed prints how to replay it."""

from __future__ import annotations

import os

import pytest

from tests.sim.surges import play

SURGES = int(os.environ.get("SURGES", "30"))
BATCH = 5
"""Seeds in one test, so that a progress dot means something."""


@pytest.mark.parametrize("first", range(1, SURGES + 1, BATCH))
def test_nothing_is_supplied_twice_and_nothing_is_left(first: int) -> None:
    for seed in range(first, min(first + BATCH, SURGES + 1)):
        result = play(seed)
        assert not result.broken, f"replay with `python -m tests.sim.surges {seed}`:\n" + "\n".join(result.broken[:10])


@pytest.mark.parametrize("seed", [2, 5, 9])
def test_without_faults_everybody_is_served(seed: int) -> None:
    result = play(seed, faulty=False)
    assert not result.broken
    assert result.served
    assert result.orders
