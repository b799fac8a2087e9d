"""Arrival processes: how many requests, when, and the same again for the same seed."""

from __future__ import annotations

import random
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.arrivals import burst_arrivals, constant_arrivals, poisson_arrivals
from tests.support.example_budget import examples


def test_constant_and_burst_arrivals_are_evenly_spaced() -> None:
    assert constant_arrivals(4, 1) == (0.0, 0.25, 0.5, 0.75)
    assert constant_arrivals(0.5, 3) == (0.0, 2.0)
    assert burst_arrivals(4, 0.2) == (0.0, 0.05, 0.1, 0.15000000000000002)
    assert burst_arrivals(3, 0) == (0.0, 0.0, 0.0)


def test_poisson_arrivals_repeat_only_for_the_same_seed() -> None:
    first, again, other = (poisson_arrivals(50, 10, random.Random(seed).random) for seed in (7, 7, 8))
    assert first == again != other


def test_poisson_gaps_have_the_expected_mean_and_deviation() -> None:
    moments = poisson_arrivals(100, 200, random.Random(1).random)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    variance = sum((gap - mean) ** 2 for gap in gaps) / len(gaps)
    assert abs(mean - 0.01) < 0.0003
    assert abs(variance**0.5 - mean) < 0.0005


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(rate=st.floats(0.1, 500), seconds=st.floats(0.01, 5), seed=st.integers(0, 99))
def test_arrival_times_ascend_and_stay_within_the_run_duration(rate: float, seconds: float, seed: int) -> None:
    for moments in (constant_arrivals(rate, seconds), poisson_arrivals(rate, seconds, random.Random(seed).random)):
        assert all(earlier <= later for earlier, later in pairwise(moments))
        assert all(0 <= at_s < seconds * (1 + 1e-9) for at_s in moments)
