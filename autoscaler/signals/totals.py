"""Combines the readings of a Model's replicas into totals, and turns counters into rates. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from autoscaler.signals.metric_responses import MetricReading
from autoscaler.state.world import SignalTotal

RATE_WINDOW_S: Final = 60.0
"""Rates are means over this time, because engines count tokens and waiting times when a request ends."""


class CounterSample(NamedTuple):
    """A counter of one replica at one time."""

    at_s: float
    value: float


def add_sample(samples: Sequence[CounterSample], new: CounterSample) -> tuple[CounterSample, ...]:
    """Return the samples of the last `RATE_WINDOW_S` with a new one. A counter that fell has begun again."""
    if samples and new.value < samples[-1].value:
        return (new,)
    return (*(one for one in samples if one.at_s >= new.at_s - RATE_WINDOW_S), new)


def compute_rate(samples: Sequence[CounterSample]) -> MetricReading:
    """Return the mean increase per second; unknown with fewer than two samples."""
    first, last = (samples[0], samples[-1]) if samples else (None, None)
    if first is None or last is None or last.at_s <= first.at_s:
        return MetricReading(None, "a rate needs two readings")
    return MetricReading((last.value - first.value) / (last.at_s - first.at_s))


def sum_readings(readings: Sequence[MetricReading]) -> SignalTotal:
    """Return the total over replicas. It is incomplete if the reading of any replica is unknown."""
    problems = [one.problem for one in readings if one.value is None]
    unknown = problems[0] if problems else ""
    if problems and len(readings) > 1:
        unknown = f"{len(problems)} of {len(readings)} replicas do not report it ({problems[0]})"
    return SignalTotal(total=sum((one.value for one in readings if one.value is not None), 0.0), unknown=unknown)
