"""The residency of a replica, and when it may be evicted. Pure.

The residency protects a ready replica from eviction by another model. Times are in seconds of the `World`'s clock.
"""

from __future__ import annotations

from math import inf

from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import BEGINNING
from autoscaler.state.world import NO_HISTORY, NO_LOAD, History, Replica, World

REFUSED_S_MIN = 10.0
"""Minimum time that a rejected cold request counts as demand, since an eviction may be necessary first."""
SERVE_FIRST_S = 1.0
"""Seconds that a new replica is protected while requests wait and none is seen on it, even after its residency."""


def residency_s(model: Model, history: History) -> float:
    """Return how long a ready replica stays before another model may evict it."""
    return model.residency_s(history.starts_s[-1] if history.starts_s else None)


def held_until_s(model: Model, history: History, replica: Replica) -> float:
    """Return until when a ready replica is kept for clients that may retry: until `hold_until_s` and, if no request has
    arrived or finished since it became ready, until the end of its residency, whichever is later.
    """
    ready_s = replica.since_s if replica.times.ready_s is None else replica.times.ready_s
    if has_activity_since(history, ready_s):
        return history.hold_until_s
    return max(ready_s + residency_s(model, history), history.hold_until_s)


def has_activity_since(history: History, ready_s: float) -> bool:
    """Whether a request arrived or finished after `ready_s`."""
    return history.last_activity_s is not None and history.last_activity_s > ready_s


def refused_until_s(history: History) -> float:
    """Return until when a request that was rejected because the model is cold requires a start; 0: none does."""
    refused_s = history.refused_cold_s
    if refused_s is None or (history.served_until_s is not None and history.served_until_s >= refused_s):
        return 0.0
    return max(history.hold_until_s, refused_s + REFUSED_S_MIN)


def evictable_s(world: World, replica: Replica, model: Model, calls: int) -> float:
    """Return when the replica's residency ends; `calls` requests run on it. A starting replica stays while requests
    wait, or for as long as rejected requests count as demand. While requests wait, a ready replica without a request
    stays for at least SERVE_FIRST_S. If no request has arrived since it became ready, `held_until_s` applies.
    """
    load, history = world.loads.get(model.name, NO_LOAD), world.learned.histories.get(model.name, NO_HISTORY)
    if replica.state in BEGINNING:
        return inf if load.waiting else max(history.hold_until_s, refused_until_s(history))
    ready_s = replica.since_s if replica.times.ready_s is None else replica.times.ready_s
    if load.waiting or load.running or has_activity_since(history, ready_s):
        stays_s = residency_s(model, history)
        return ready_s + (max(stays_s, SERVE_FIRST_S) if load.waiting and not calls else stays_s)
    return held_until_s(model, history, replica)
