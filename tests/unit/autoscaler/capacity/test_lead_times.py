"""Lead times of offers, the probability of delivery in time, and how long idle capacity is kept."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.capacity.capacity_reuse import record_release, record_reorder, record_reuse
from autoscaler.capacity.lead_times import (
    COUNTED_MAX,
    NO_LEARNT,
    P95_RATIO,
    WAIT_WORTH,
    estimate_lead_time,
    record_delivery,
    record_failed_delivery,
)
from autoscaler.provisioning.release import GAPS_MIN, KEPT_S, keep_s
from autoscaler.state.capacity import GAPS_MAX, STARTS_MAX, LeadTimeStats
from tests.support.builders.capacity import cloud, offer

SECONDS = st.floats(0.1, 10_000.0)


def test_median_lead_time_without_history_is_the_expected_time() -> None:
    found = estimate_lead_time(offer(expected_s=60.0))
    assert (found.p50_s, found.p95_s) == (60.0, 60.0 * P95_RATIO)
    assert found.by(60.0) == pytest.approx(0.45), "half of those that come, of which there are nine in ten"
    assert found.by(180.0) == pytest.approx(0.9 * 0.95, abs=0.001)
    assert found.by(inf) == 0.9
    assert found.by(0.0) == found.by(-1.0) == 0.0


def test_repeated_deliveries_replace_the_expected_lead_time() -> None:
    learnt = NO_LEARNT
    for _ in range(2):
        learnt = record_delivery(learnt, 10.0)
    assert estimate_lead_time(offer(expected_s=60.0), learnt).p50_s == 60.0, "twice is little"
    for _ in range(6):
        learnt = record_delivery(learnt, 10.0)
    found = estimate_lead_time(offer(expected_s=60.0), learnt)
    assert found.p50_s == 10.0
    assert found.confidence > 0.9


def test_failed_deliveries_lower_confidence_and_successes_raise_confidence() -> None:
    learnt = NO_LEARNT
    for _ in range(40):
        learnt = record_failed_delivery(learnt)
    assert estimate_lead_time(offer(), learnt).confidence < 0.15
    assert learnt.failed <= COUNTED_MAX
    for _ in range(40):
        learnt = record_delivery(learnt, 30.0)
    assert estimate_lead_time(offer(), learnt).confidence > 0.6
    assert len(learnt.took_s) == STARTS_MAX


def test_lead_time_without_an_estimate_is_unknown_until_the_first_delivery() -> None:
    assert estimate_lead_time(cloud(expected_s=None)).p50_s == inf
    assert estimate_lead_time(cloud(expected_s=None)).by(inf) == 0.0
    assert estimate_lead_time(cloud(expected_s=None), record_delivery(NO_LEARNT, 500.0)).p50_s == 500.0


@given(st.lists(SECONDS, max_size=40), SECONDS, SECONDS, SECONDS)
def test_delivery_probability_is_monotonic_and_bounded_by_confidence(
    took: list[float], prior: float, one: float, other: float
) -> None:
    learnt = NO_LEARNT
    for seconds in took:
        learnt = record_delivery(learnt, seconds)
    found = estimate_lead_time(offer(expected_s=prior), learnt)
    assert 0 < found.p50_s <= found.p95_s
    assert found.p50_s <= found.mean_s
    assert 0.0 <= found.by(min(one, other)) <= found.by(max(one, other)) <= found.confidence <= 1.0


def test_idle_keep_time_is_proportional_to_the_lead_time_within_bounds() -> None:
    assert keep_s(NO_LEARNT, 60.0, 0.0) == 60.0 * (1.0 + WAIT_WORTH)
    assert keep_s(NO_LEARNT, 1.0, 0.0) == KEPT_S[0]
    assert keep_s(NO_LEARNT, 1e6, 0.0) == KEPT_S[1]


def test_idle_capacity_is_kept_only_if_it_is_usually_reused_soon() -> None:
    often = LeadTimeStats(gaps_s=(20.0,) * 10)
    assert 20.0 <= keep_s(often, 60.0, 0.0) <= 21.0
    assert keep_s(often, 60.0, 25.0) == 0.0, "that time is over"
    assert keep_s(LeadTimeStats(gaps_s=(inf,) * 10), 60.0, 0.0) == 0.0
    assert keep_s(LeadTimeStats(gaps_s=(5000.0,) * 10), 60.0, 0.0) == 0.0, "it would cost more than to have it again"


def test_reorder_after_a_release_records_the_time_between_both() -> None:
    learnt = NO_LEARNT
    for _ in range(GAPS_MIN):
        learnt = record_reorder(record_release(learnt, 100.0), 140.0)
    assert learnt.gaps_s == (40.0,) * GAPS_MIN
    assert record_reorder(learnt, 500.0) is learnt
    beside = record_reuse(record_release(learnt, 100.0), 7.0)  # another order of the same kind, meanwhile
    assert record_reorder(beside, 140.0).gaps_s == (*learnt.gaps_s, 40.0, 7.0)
    for _ in range(2 * GAPS_MAX):
        learnt = record_reuse(learnt, 1.0)
    assert len(learnt.gaps_s) == GAPS_MAX
