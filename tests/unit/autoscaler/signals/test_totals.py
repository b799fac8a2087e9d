"""Rates of counters, and totals over replicas."""

from __future__ import annotations

from itertools import accumulate

from autoscaler.signals.metric_responses import MetricReading
from autoscaler.signals.totals import RATE_WINDOW_S, CounterSample, add_sample, compute_rate, sum_readings


def samples(*pairs: tuple[float, float]) -> tuple[CounterSample, ...]:
    """The samples that are kept after these (time, value) pairs."""
    kept: tuple[CounterSample, ...] = ()
    for at_s, value in pairs:
        kept = add_sample(kept, CounterSample(at_s, value))
    return kept


def test_rate_is_the_mean_increase_over_the_last_minute() -> None:
    assert compute_rate(samples((0, 100), (5, 200))).value == 20.0
    steps = list(accumulate([1000, *[100] * 30]))
    assert compute_rate(samples(*((5.0 * i, value) for i, value in enumerate(steps)))).value == 20.0
    assert len(samples(*((5.0 * i, value) for i, value in enumerate(steps)))) == RATE_WINDOW_S / 5 + 1


def test_rate_of_fewer_than_two_samples_is_unknown() -> None:
    assert compute_rate(()).value is None
    assert compute_rate(samples((0, 100))).value is None
    assert compute_rate(samples((0, 100), (RATE_WINDOW_S + 1, 200))).value is None, "the first one is too old"


def test_counter_of_a_restarted_engine_begins_again() -> None:
    assert compute_rate(samples((0, 100), (5, 200), (10, 10))).value is None
    assert compute_rate(samples((0, 100), (5, 200), (10, 10), (15, 60))).value == 10.0


def test_unchanged_counter_has_the_rate_zero() -> None:
    assert compute_rate(samples((0, 100), (5, 100))).value == 0.0


def test_total_names_the_replicas_that_do_not_report() -> None:
    total = sum_readings([MetricReading(1.0), MetricReading(None, "a timeout"), MetricReading(2.0)])
    assert (total.total, total.unknown) == (3.0, "1 of 3 replicas do not report it (a timeout)")
    assert sum_readings([MetricReading(None, "a timeout")]).unknown == "a timeout"
    assert (sum_readings([]).total, sum_readings([]).unknown) == (0.0, "")
