"""Seeded whole-system runs. `SEEDS` (default 500) says how many; a failing seed prints how to replay it."""

from __future__ import annotations

import os

import pytest

from tests.sim.scenario import play

SEEDS = int(os.environ.get("SEEDS", "500"))
BATCH = 10
"""Seeds in one test, so that a progress dot means something."""


@pytest.mark.parametrize("first", range(1, SEEDS + 1, BATCH))
def test_seeds(first: int) -> None:
    """Safety in the storm, liveness after it, nothing left at the end."""
    for seed in range(first, min(first + BATCH, SEEDS + 1)):
        broken = play(seed).broken
        assert not broken, f"replay with `python -m tests.sim {seed}`:\n" + "\n".join(broken[:10])


@pytest.mark.parametrize("seed", [3, 8, 14])
def test_same_seed_same_trace(seed: int) -> None:
    """I13: a run is a function of its seed."""
    assert play(seed).trace == play(seed).trace
