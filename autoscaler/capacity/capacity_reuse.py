"""How often released capacity was ordered again, from which the time that idle capacity is kept follows. Pure."""

from __future__ import annotations

from math import inf

from msgspec.structs import replace

from autoscaler.state.capacity import GAPS_MAX, LeadTimeStats


def record_reuse(learnt: LeadTimeStats, gap_s: float) -> LeadTimeStats:
    """Record that idle capacity was used again after `gap_s`."""
    return replace(learnt, gaps_s=(*learnt.gaps_s, gap_s)[-GAPS_MAX:])


def record_release(learnt: LeadTimeStats, since_s: float) -> LeadTimeStats:
    """Record that capacity idle since `since_s` was released."""
    return replace(record_reuse(learnt, inf), idle_since_s=since_s)


def record_reorder(learnt: LeadTimeStats, now_s: float) -> LeadTimeStats:
    """Record a new order: the capacity released last would have been reused now."""
    if learnt.idle_since_s is None:
        return learnt
    at = max((at for at, gap in enumerate(learnt.gaps_s) if gap == inf), default=len(learnt.gaps_s))
    gaps_s = (*learnt.gaps_s[:at], now_s - learnt.idle_since_s, *learnt.gaps_s[at + 1 :])
    return replace(learnt, gaps_s=gaps_s[-GAPS_MAX:], idle_since_s=None)
