"""Residual waste of free memory, in hand-computed examples."""

from __future__ import annotations

from math import exp

import numpy as np
import pytest

from autoscaler.placement.index.residual_waste_tables import (
    ABSENT,
    BINS,
    CPU_EDGES,
    EAGER,
    FULL_BIN,
    IDLE,
    LEVELS,
    RATIO_EDGES,
    UNITS,
    bin_of,
    build_tables,
    build_untrained_estimate,
    compute_residual_waste,
    quantize_milli,
    sample_levels,
)


def test_free_memory_below_the_requested_size_is_entirely_waste() -> None:
    waste = compute_residual_waste({500: 1.0})
    used = 1 - exp(-EAGER)
    assert list(waste[[0, 1, 250, 499]]) == [0, 1, 250, 499]
    assert waste[500] == pytest.approx((1 - used) * 500)
    assert waste[900] == pytest.approx((1 - used) * 900 + used * waste[400])
    assert waste[1000] == pytest.approx((1 - used) * 1000 + used * waste[500])


def test_rare_size_leaves_more_expected_waste_than_a_frequent_one() -> None:
    """Nine of ten requests need 700, one needs 300."""
    waste = compute_residual_waste({700: 9.0, 300: 1.0})
    rare = 1 - exp(-EAGER * 0.1)
    assert waste[300] == pytest.approx((1 - rare) * 300)
    both = 1 - exp(-EAGER)
    assert waste[1000] == pytest.approx((1 - both) * 1000 + both * (0.9 * waste[300] + 0.1 * waste[700]))
    assert waste[300] > waste[700] - waste[400]


def test_free_share_is_rounded_half_up_to_whole_percent() -> None:
    assert quantize_milli(np.array([-1, 0, 4, 5, 14, 15, 994, 995, 1000])).tolist() == [
        ABSENT,
        0,
        0,
        1,
        1,
        2,
        99,
        100,
        100,
    ]
    assert (IDLE, LEVELS) == (101, 102)


def test_cpu_value_on_a_bin_edge_belongs_to_the_upper_bin() -> None:
    cpu = np.array([0, *(edge + off for edge in CPU_EDGES for off in (-1, 0))])
    assert bin_of(cpu, np.full(len(cpu), 4000)).tolist() == [0, 0, 1, 1, 2, 2, 3]
    assert bin_of(np.array([999, 4000, 1 << 50]), np.zeros(3, np.int64)).tolist() == [0, FULL_BIN, FULL_BIN]
    left = 10_000
    for number, edge in enumerate(RATIO_EDGES):
        cpu = np.array([int(edge * left) - 1, int(edge * left)])
        assert bin_of(cpu, np.full(2, left)).tolist() == [3 + number, 4 + number]
    assert bin_of(np.array([1 << 50]), np.array([1])).tolist() == [FULL_BIN - 1]


def test_absent_device_has_value_zero_in_the_waste_tables() -> None:
    made = build_tables(np.full((2, BINS, LEVELS), 1.3), np.array([0.5, 1.0]))
    assert made.values.shape == (2, BINS, LEVELS + 1)
    assert set(made.values[:, :, :LEVELS].ravel().tolist()) == {round(1.3 * UNITS)}
    assert not made.values[:, :, ABSENT].any()
    assert made.prices.tolist() == [UNITS // 2, UNITS]


def test_estimate_without_training_uses_only_the_requested_memory_sizes() -> None:
    made = build_untrained_estimate({300: 1.0}).tables
    expected = np.rint(sample_levels(compute_residual_waste({300: 1.0})) * UNITS)
    assert (made.values[:, :, :LEVELS] == expected).all()
    assert not made.prices.any()
