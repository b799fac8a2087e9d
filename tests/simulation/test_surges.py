"""Surges with all kinds of faults. `SURGES` (default 30) sets their number; a failing seed prints how to replay it.

`make test` runs the first seeds, `make test-deep` all of them.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.surges import play

SURGES = int(os.environ.get("SURGES", "30"))
STANDARD = 10
BATCH = 5
"""Seeds in one test, so that a progress dot means something."""


@pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=() if first <= STANDARD else pytest.mark.deep) for first in range(1, SURGES + 1, BATCH)],
)
def test_simulated_surge_orders_no_capacity_twice_and_returns_all_of_it(first: int) -> None:
    for seed in range(first, min(first + BATCH, SURGES + 1)):
        result = play(seed)
        assert not result.broken, f"replay with `python -m tests.simulation.surges {seed}`:\n" + "\n".join(
            result.broken[:10]
        )


def test_simulated_surge_without_faults_serves_all_long_lasting_demand() -> None:
    results = [play(seed, faulty=False) for seed in (2, 5, 9)]
    assert not [line for result in results for line in result.broken]
    assert all(result.served for result in results)
    assert sum(result.orders for result in results), "by what was ordered"
