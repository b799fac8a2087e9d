"""The MIG benchmark: a tiny run by hand, the same arrivals for all, and the pool as its theory predicts."""

from __future__ import annotations

import pytest

from autoscaler.slicing.mig_geometry import GEOMETRIES, Cut, build_layout
from autoscaler.state.world import DeviceId
from bench.packing.mig import (
    LOAD,
    MIXES,
    POLICIES,
    Arrival,
    BestFit,
    Ours,
    Pool,
    accepted,
    arrivals,
    chooser,
    closed,
    run,
)

H100 = GEOMETRIES["H100-80"]
TINY = [  # on one H100
    Arrival(0.0, "1g.10gb", 4.0),  # best fit: at 0; ours, which expects the 4g: at 6
    Arrival(1.0, "4g.40gb", 2.0),  # only where 0 to 3 are free
    Arrival(2.0, "3g.40gb", 1.0),  # best fit: at 4; ours: none, 6 is taken
    Arrival(3.0, "7g.80gb", 1.0),  # nowhere: the 1g is there until 4
    Arrival(4.0, "7g.80gb", 1.0),  # an instance that ends at 4 is free at 4
]


def test_accepted_work_of_a_small_mig_run_equals_a_hand_calculation() -> None:
    """Work requested: 4 + 8 + 3 + 7 + 7 = 29."""
    mix = {"1g.10gb": 1.0, "4g.40gb": 1.0}
    assert accepted(BestFit(1, 1), TINY, -1) == pytest.approx(100 * (4 + 3 + 7) / 29)
    assert accepted(Ours(mix, 1), TINY, -1) == pytest.approx(100 * (4 + 8 + 7) / 29)
    assert accepted(Pool(1), TINY, -1) == pytest.approx(100 * (4 + 8 + 7) / 29)  # 1 + 4 of 7, then no 3g


def test_arrivals_during_warm_up_are_simulated_but_not_counted() -> None:
    assert accepted(BestFit(1, 1), TINY, 1.0) == pytest.approx(100 * (3 + 7) / (3 + 7 + 7))


def test_best_fit_uses_the_shortest_free_gap_on_the_fullest_device() -> None:
    on = build_layout(H100, [("1g.10gb", 2), ("2g.20gb", 4)])
    assert [run(H100, on, Cut("1g.10gb", start)) for start in (0, 1, 3, 6)] == [2, 2, 1, 2]
    for order, starts in ((1, [0, 1]), (-1, [6, 5])):
        best = BestFit(2, order)
        assert [best.start("1g.10gb") for _ in starts] == [("gpu-00000", Cut("1g.10gb", start)) for start in starts]
    best = BestFit(2, 1)
    assert best.start("4g.40gb") == ("gpu-00000", Cut("4g.40gb", 0))
    assert best.start("2g.20gb") == ("gpu-00000", Cut("2g.20gb", 4))
    assert best.start("1g.20gb") == ("gpu-00000", Cut("1g.20gb", 6))
    assert best.start("1g.10gb") == ("gpu-00001", Cut("1g.10gb", 0))
    best.stop(DeviceId("gpu-00000"), Cut("2g.20gb", 4))
    assert best.start("2g.20gb") == ("gpu-00000", Cut("2g.20gb", 4))


def test_pool_rejects_a_slice_that_exceeds_its_free_memory() -> None:
    pool = Pool(1)
    assert [pool.start("3g.40gb") is None for _ in range(3)] == [False, False, True]
    pool.stop(DeviceId("all"), Cut("3g.40gb", 0))
    assert pool.start("4g.40gb") is not None


@pytest.mark.parametrize("mix", MIXES)
def test_arrivals_of_one_seed_are_repeatable_and_match_the_load(mix: str) -> None:
    asked = arrivals(MIXES[mix], 1, 200.0)
    assert asked == arrivals(MIXES[mix], 1, 200.0) != arrivals(MIXES[mix], 2, 200.0)
    work = sum(H100.profile(one.profile).compute * one.life for one in asked)
    assert work / (200 * 100 * H100.compute) == pytest.approx(LOAD, rel=0.03)


@pytest.mark.deep
def test_simulated_pool_accepts_the_share_that_kaufman_roberts_gives() -> None:
    """Exact for a pool of one resource (IEEE Trans. Commun. 1981): all work in compute slices, memory never binding."""
    mix, slices = {"1g.10gb": 5.0, "2g.20gb": 3.0, "4g.40gb": 2.0}, H100.compute * 10
    works = {name: H100.profile(name).compute for name in mix}
    rate = LOAD * slices / sum(share * works[name] for name, share in mix.items())
    held = [1.0]
    for level in range(1, slices + 1):
        parts = (rate * mix[name] * work * held[level - work] for name, work in works.items() if work <= level)
        held.append(sum(parts) / level)
    lost = {name: sum(held[slices - work + 1 :]) / sum(held) for name, work in works.items()}
    exact = 1 - sum(mix[n] * works[n] * lost[n] for n in mix) / sum(mix[n] * works[n] for n in mix)
    measured = [accepted(Pool(10), arrivals(mix, seed, 1500.0, devices=10), 10.0) for seed in range(1, 9)]
    assert sum(measured) / len(measured) == pytest.approx(100 * exact, abs=0.2)


def test_pilotlight_accepts_more_than_best_fit_and_less_than_the_pool() -> None:
    mix = MIXES["alike in work"]
    asked = arrivals(mix, 1, 20.0, devices=30)
    found = {policy: accepted(chooser(policy, mix, 30), asked, 5.0) for policy in POLICIES}
    assert found["best fit"] < found["ours"] < found["pool"]
    assert closed([3.0, 5.0], [2.0, 4.0], [6.0, 8.0]) == pytest.approx(0.25)
