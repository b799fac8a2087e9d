"""Estimates how long an order takes to become usable, and how likely it is there in time. Pure.

Arithmetic on observed deliveries (`autoscaler.state.capacity_orders.LeadTimeStats`): quantiles in which
`expectedSeconds` counts as PRIOR deliveries, the share of orders that arrive at all, and how long idle capacity is
worth keeping. Times are assumed to be log-normal: occasional delays are very long.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, inf, log
from statistics import NormalDist
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.state.capacity_orders import GAPS_MAX, STARTS_MAX, LeadTimeStats, Offer

PRIOR = 3
"""The expected time counts as this many deliveries."""
P95_RATIO = 3.0
"""Ratio of the 95th percentile to the median, while nothing is observed."""
P95_RATIO_MIN = 1.2
_NORMAL = NormalDist()
_P95 = _NORMAL.inv_cdf(0.95)
SURE = 1 - 1e-9
"""If an order should have arrived with this probability, the rest of the distribution says nothing more."""
CONFIDENCE_WEIGHT, COUNTED_MAX = 4, 32
WAIT_WORTH = 4.0
"""One second of waiting requests is worth this many seconds of an idle device."""
DUE_FACTOR, DUE_S = 3.0, (30.0, 3600.0)
"""An order is given up after this multiple of its 95th percentile, within DUE_S, and never before that percentile. From
a queue, whose times do not predict what follows, it is given up the maximum of DUE_S after it was granted."""
KEPT_S = (30.0, 1800.0)
"""Bounds of how long idle capacity is kept, fast or slow, while nothing is observed."""
GAPS_MIN = 3
"""From this many observed gaps on, they decide instead of the cost of getting it again."""
NO_LEARNT = LeadTimeStats()


class Expected(NamedTuple):
    """Expected delivery of one offer: seconds from the order until it is usable; infinite if unknown."""

    p50_s: float
    p95_s: float
    confidence: float

    @property
    def mean_s(self) -> float:
        """Mean of the orders that arrive."""
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
        """The share, of orders that arrive, that has arrived by then."""
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
    """How long an order is waited for; infinite as long as its provider has it in a queue."""
    if offer.queued or takes.p50_s == inf:
        return inf
    return max(min(max(takes.p95_s * DUE_FACTOR, DUE_S[0]), DUE_S[1]), takes.p95_s)


def record_delivery(learnt: LeadTimeStats, took_s: float) -> LeadTimeStats:
    """Record a delivery, after this many seconds."""
    return _counted(replace(learnt, took_s=(*learnt.took_s, took_s)[-STARTS_MAX:], came=learnt.came + 1))


def record_failed_delivery(learnt: LeadTimeStats) -> LeadTimeStats:
    """Record an order that did not arrive."""
    return _counted(replace(learnt, failed=learnt.failed + 1))


def record_reuse(learnt: LeadTimeStats, gap_s: float) -> LeadTimeStats:
    """Record that idle capacity was used again after `gap_s`."""
    return replace(learnt, gaps_s=(*learnt.gaps_s, gap_s)[-GAPS_MAX:])


def record_release(learnt: LeadTimeStats, since_s: float) -> LeadTimeStats:
    """Record that capacity idle since `since_s` was released."""
    return replace(record_reuse(learnt, inf), idle_since_s=since_s)


def record_reorder(learnt: LeadTimeStats, now_s: float) -> LeadTimeStats:
    """Record another order: the capacity released last would have been used again now."""
    if learnt.idle_since_s is None:
        return learnt
    at = max((at for at, gap in enumerate(learnt.gaps_s) if gap == inf), default=len(learnt.gaps_s))
    gaps_s = (*learnt.gaps_s[:at], now_s - learnt.idle_since_s, *learnt.gaps_s[at + 1 :])
    return replace(learnt, gaps_s=gaps_s[-GAPS_MAX:], idle_since_s=None)


def keep_s(learnt: LeadTimeStats, attach_s: float, idle_s: float) -> float:
    """How long capacity that has been idle for `idle_s` is kept, from the beginning of that; `attach_s`: its lead time.

    With few observations, as long as it costs to get it again (so at most twice the optimum); else as long as the
    expected benefit, P(used within h) x cost of getting it again, exceeds the expected idle time within h.
    """
    cost_s = min(max(attach_s * (1.0 + WAIT_WORTH), KEPT_S[0]), KEPT_S[1])
    if len(learnt.gaps_s) < GAPS_MIN:
        return cost_s
    left = sorted(gap - idle_s for gap in learnt.gaps_s if gap > idle_s)
    worth = [h for h in left if h < inf and _gain(left, h, cost_s) > 0]
    return idle_s + max(worth) if worth else 0.0


def _gain(left: Sequence[float], horizon_s: float, cost_s: float) -> float:
    reused = sum(gap <= horizon_s for gap in left) / len(left)
    return reused * cost_s - sum(min(gap, horizon_s) for gap in left) / len(left)


def _counted(learnt: LeadTimeStats) -> LeadTimeStats:
    if learnt.came + learnt.failed <= COUNTED_MAX:
        return learnt
    return replace(learnt, came=learnt.came // 2, failed=learnt.failed // 2)
