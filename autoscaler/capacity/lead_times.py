"""Estimates how long an order takes to become usable, and its probability of arriving in time. Pure.

Computed from observed deliveries (`autoscaler.state.capacity.LeadTimeStats`): quantiles in which
`expectedSeconds` counts as PRIOR deliveries, the share of orders that are delivered, and how long idle capacity is
worth keeping. Times are assumed to be log-normal, since occasional delays are very long.
"""

from __future__ import annotations

from math import exp, inf, log
from statistics import NormalDist
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.state.capacity import STARTS_MAX, LeadTimeStats, Offer

PRIOR = 3
"""The expected time has the weight of this many observed deliveries."""
P95_RATIO = 3.0
"""Ratio of the 95th percentile to the median without observations."""
P95_RATIO_MIN = 1.2
_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
SURE = 1 - 1e-9
"""If the order should have been delivered by now with more than this probability, the elapsed time is the estimate of
the remaining time."""
CONFIDENCE_WEIGHT, COUNTED_MAX = 4, 32
WAIT_WORTH = 4.0
"""Cost of one second of waiting requests, in seconds of an idle device."""
DUE_FACTOR, DUE_S = 3.0, (30.0, 3600.0)
"""An order is given up after this multiple of its 95th percentile, limited to the range DUE_S, but never before that
percentile. The time in a queue is unpredictable: a queued order is given up when the maximum of DUE_S has passed since
it was granted."""
NO_LEARNT = LeadTimeStats()


class Expected(NamedTuple):
    """Expected delivery of one offer: seconds from the order until it is usable; infinite if unknown."""

    p50_s: float
    p95_s: float
    confidence: float

    @property
    def mean_s(self) -> float:
        """Mean delivery time of the orders that are delivered."""
        if self.p50_s == inf:
            return inf
        return self.p50_s * exp(self.spread**2 / 2)

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm."""
        return log(self.p95_s / self.p50_s) / _P95

    def by(self, seconds: float) -> float:
        """Probability that it is usable within this many seconds."""
        if seconds <= 0 or self.p50_s == inf:
            return 0.0
        if seconds == inf:
            return self.confidence
        return self.confidence * self._come(seconds)

    def left_s(self, past_s: float) -> float:
        """The median of the remaining time, after `past_s` seconds without delivery."""
        if past_s <= 0 or self.p50_s == inf:
            return self.p50_s
        come = self._come(past_s)
        if come > SURE:
            return past_s
        return max(0.0, self.p50_s * exp(self.spread * _NORMAL.inv_cdf((1.0 + come) / 2.0)) - past_s)

    def _come(self, seconds: float) -> float:
        """The share of delivered orders that took at most this long."""
        return _NORMAL.cdf((log(seconds) - log(self.p50_s)) / self.spread)


def estimate_lead_time(offer: Offer, learnt: LeadTimeStats = NO_LEARNT) -> Expected:
    """Expected delivery of an offer."""
    confidence = (offer.confidence * CONFIDENCE_WEIGHT + learnt.came) / (
        CONFIDENCE_WEIGHT + learnt.came + learnt.failed
    )
    if offer.expected_s is None and not learnt.took_s:
        return Expected(inf, inf, confidence)
    prior_s = offer.expected_s
    unseen = () if prior_s is None else (max(prior_s, 0.001),) * PRIOR
    took = sorted((*unseen, *learnt.took_s))
    p50_s = max(took[(len(took) - 1) // 2], 0.001)
    ratio = max(P95_RATIO_MIN, took[min(len(took) - 1, int(0.95 * len(took)))] / p50_s)
    weight = PRIOR / (PRIOR + len(learnt.took_s))
    return Expected(p50_s, p50_s * max(P95_RATIO_MIN, weight * P95_RATIO + (1 - weight) * ratio), confidence)


def due_after_s(offer: Offer, takes: Expected) -> float:
    """Seconds after which an order is given up; infinite while its provider has it in a queue."""
    if offer.queued or takes.p50_s == inf:
        return inf
    return max(min(max(takes.p95_s * DUE_FACTOR, DUE_S[0]), DUE_S[1]), takes.p95_s)


def record_delivery(learnt: LeadTimeStats, took_s: float) -> LeadTimeStats:
    """Record a delivery that took `took_s`."""
    return _counted(replace(learnt, took_s=(*learnt.took_s, took_s)[-STARTS_MAX:], came=learnt.came + 1))


def record_failed_delivery(learnt: LeadTimeStats) -> LeadTimeStats:
    """Record an order that did not arrive."""
    return _counted(replace(learnt, failed=learnt.failed + 1))


def _counted(learnt: LeadTimeStats) -> LeadTimeStats:
    if learnt.came + learnt.failed <= COUNTED_MAX:
        return learnt
    return replace(learnt, came=learnt.came // 2, failed=learnt.failed // 2)
