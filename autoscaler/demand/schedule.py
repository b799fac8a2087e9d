"""Windows of `replicas.schedule`: how many replicas a model keeps now, and how early they are started. Pure.

A window takes effect before it begins, by a lead time: the delivery time of the slowest suitable offer (an hour if it
is unknown), plus a start. So capacity is ordered in advance, and the start of the window is the provisioner's deadline.
A window ends early, so that requests finish by its end. Without a wall clock, windows have no effect.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from autoscaler.capacity.lead_times import NO_LEARNT, estimate_lead_time
from autoscaler.queries.granted_memory import spare_bytes
from autoscaler.spec import cron
from autoscaler.spec.model import Model, ReplicaWindow
from autoscaler.state.resources import RequestShape
from autoscaler.state.world import World
from autoscaler.text import format_duration

AHEAD_S = (60.0, 3600.0)
"""Minimum and maximum lead time of a window."""
LOOK_S = 60.0
"""Seconds between two evaluations of the windows, because offers and the time change."""
STARTS = 2.0
"""Assumed duration of a start, in medians of the recorded starts."""
END_PART = 0.25
"""Maximum fraction of a window that is reserved for requests to finish."""


class Floor(NamedTuple):
    """How many replicas a model keeps regardless of demand."""

    least: int
    reason: str
    begins_s: float = inf
    """The start of the window that requires them, if it is in the future; else infinite."""
    next_s: float | None = None
    """When this changes only because time passes."""
    now: int = 0
    """How many replicas it keeps if windows that have not begun yet are ignored."""


def compute_replica_floor(world: World, model: Model, now_s: float) -> Floor:
    """Return the floor: `replicas.min`, or the number that a window requires now if that is more."""
    of = model.spec.replicas
    found = Floor(of.min, f"replicas.min is {of.min}", now=of.min)
    if not of.schedule:
        return found
    if world.unix_offset_s is None:
        return found._replace(next_s=now_s + LOOK_S)
    offset_s, next_s = world.unix_offset_s, inf
    lead = _lead_s(world, model)
    for one in of.schedule:
        drain_s = min(model.spec.drain_seconds_max, one.seconds * END_PART)
        begins = cron.list_occurrences(
            one.cron, one.time_zone, now_s + offset_s - one.seconds, now_s + offset_s + 2 * AHEAD_S[1]
        )
        for unix_s in begins:
            begins_s = unix_s - offset_s
            from_s, until_s = begins_s - lead, begins_s + one.seconds - drain_s
            next_s = min((at_s for at_s in (next_s, from_s, begins_s, until_s) if at_s > now_s), default=inf)
            if from_s <= now_s < until_s and (one.min, -begins_s) > (found.least, -found.begins_s):
                found = Floor(
                    one.min, _says(one, begins_s, now_s), begins_s if begins_s > now_s else inf, now=found.now
                )
            if begins_s <= now_s < until_s:
                found = found._replace(now=max(found.now, one.min))
    return found._replace(next_s=min(next_s, now_s + LOOK_S))


def _says(one: ReplicaWindow, begins_s: float, now_s: float) -> str:
    when = f", which begins in {format_duration(begins_s - now_s)}" if begins_s > now_s else ""
    return f"replicas.schedule keeps {one.min} in the window of `{one.cron}` ({one.time_zone}){when}"


def _lead_s(world: World, model: Model) -> float:
    """Return how long before a window its capacity is ordered. Offers that do not fit the model are ignored."""
    capacity = world.capacity
    history = world.learned.histories.get(model.name)
    starts = sorted(() if history is None else history.starts_s)
    takes, least_bytes = RequestShape(products=model.spec.gpu.models), model.memory_bytes - spare_bytes(model)
    brings = (
        estimate_lead_time(offer, capacity.learnt.get(offer.kind, NO_LEARNT)).p95_s
        for offers in capacity.offers.values()
        for offer in offers
        if takes.rank(offer.product) is not None and least_bytes <= offer.memory_bytes // offer.parts
    )
    takes_s = max(brings, default=0.0) + STARTS * (starts[len(starts) // 2] if starts else AHEAD_S[0])
    return min(max(takes_s, AHEAD_S[0]), AHEAD_S[1])
