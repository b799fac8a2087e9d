"""Computes how many replicas of a model are needed now, and why. Ignores devices.

* 0 -> 1: at once.
* 1 -> N: if a request has waited for some time, the ready and starting replicas are too few, and draining the queue
  would take longer than a start.
* 1 -> N, too: if a scaling signal of the model requires it (`autoscaler.demand.scaling_signals`).
* N -> fewer: if the peak of concurrent requests in the last idle timeout fits fewer, and so do the peaks of all scaling
  signals.
* N -> 0: when the idle timeout has passed since the last request finished.

Unknown demand is not zero: scaling down requires reports of all known gateways. The result is a function of the current
levels, so errors do not accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.demand.idle_timeout import effective_idle_window, median_start_s
from autoscaler.demand.residency import held_until_s, refused_until_s
from autoscaler.demand.scaling_signals import SignalNeed, compute_signal_need
from autoscaler.demand.schedule import compute_replica_floor
from autoscaler.queries.gateway_reports import is_demand_complete, list_silent_gateways
from autoscaler.queries.operator_orders import STOPPED, WOKEN, find_drain_cordon
from autoscaler.spec.model import Model
from autoscaler.state import StateRecord
from autoscaler.state.lifecycle import BEGINNING, LIVE
from autoscaler.state.world import NO_HISTORY, NO_LOAD, History, ModelLoad, Replica, World
from autoscaler.text import format_duration, format_tenants

PEAK_BUCKET_S = 0.1
"""Unit of `History.peaks`: bucket b ends at (b + 1) x this."""
PERSIST_S = (0.2, 10.0)
"""Minimum and maximum of the time that a request must wait before another replica starts. Between them, the time is a
quarter of the median start duration."""
PERSIST_UNKNOWN_S = 1.0
EXTRA_WINDOWS, EXTRA_S_MAX = 20.0, 1200.0
"""A second replica that became ready stays for this many idle timeouts, at most 20 minutes, unless there is no demand
or another model needs its slice. With a timeout of a minute, demand that oscillates around a threshold then causes at
most six changes an hour."""

RENTED = " (shortened because it uses paid capacity)"


class DesiredReplicas(StateRecord, frozen=True):
    """How many replicas of a model are needed, and why."""

    model: ModelName
    count: int
    reason: str
    since_s: float | None = None
    """Since when the reason holds."""
    next_s: float | None = None
    """When the answer changes only because time passes."""
    urgent: bool = False
    """Whether requests wait for it, or were rejected because it is cold."""
    begins_s: float | None = None
    """When more than `now` are needed, because a window begins."""
    now: int = 0


class _Case(NamedTuple):
    """One model, with the inputs of `compute_desired_replicas`."""

    world: World
    model: Model
    load: ModelLoad
    history: History
    supply: Sequence[Replica]
    now_s: float
    spare: int = 0
    """Live replicas that are being replaced, not in `supply`: they stay while requests need them."""


def list_live_replicas(world: World, name: ModelName) -> list[Replica]:
    """Return the model's replicas that serve or are about to, in order of ids (as in the index)."""
    replicas = world.replicas
    return [replica for id in world.by_model.get(name, ()) if (replica := replicas[id]).state in LIVE]


def exclude_replaced_replicas(supply: Sequence[Replica]) -> list[Replica]:
    """Return the live replicas without those that are being replaced: only the successor counts."""
    left = {replica.move.replica for replica in supply if replica.move is not None}
    return [replica for replica in supply if replica.id not in left] if left else list(supply)


def is_inactive(world: World, model: Model) -> bool:
    """Whether no replica is needed and none exists, as a quick check: true of most models most of the time."""
    name = model.name
    return (
        name not in world.loads
        and name not in world.by_model
        and not (model.spec.replicas.min or model.spec.replicas.schedule)
        and ((history := world.learned.histories.get(name)) is None or history.refused_cold_s is None)
    )


def mean_call_s(world: World, name: ModelName, load: ModelLoad) -> float | None:
    """Return the mean slot-seconds per request of the waiting tenants since the gateways started; None: unknown."""
    totals = [g.totals.get((name, tenant)) for g in world.gateways.values() for tenant in load.tenants]
    finished = sum(total.finished for total in totals if total is not None)
    busy_us = sum(total.busy_slot_us for total in totals if total is not None)
    return busy_us / finished / 1e6 if finished else None


def compute_desired_replicas(world: World, model: Model, now_s: float) -> DesiredReplicas:
    """Compute how many replicas of `model` are needed at `now_s`."""
    name = model.name
    if model.spec.paused:
        return DesiredReplicas(model=name, count=0, reason="paused" if model.adopted is None else model.adopted.message)
    if name in world.stops:
        return DesiredReplicas(model=name, count=0, reason=STOPPED)
    load, history = world.loads.get(name, NO_LOAD), world.learned.histories.get(name, NO_HISTORY)
    there = list_live_replicas(world, name)
    supply = exclude_replaced_replicas(there)
    case = _Case(world, model, load, history, supply, now_s, len(there) - len(supply))
    if load.waiting or (load.running and case.supply):
        answer = _busy(case)
    elif case.supply:
        answer = _idle(case)
    else:
        answer = _refused(case) or DesiredReplicas(model=name, count=0, reason="it has no requests")
    if model.adopted is not None and model.adopted.toggled:
        return replace(answer, count=max(1, len(case.supply)) if answer.count or model.spec.replicas.min else 0)
    kept = compute_replica_floor(world, model, now_s)
    low, high = kept.least, max(kept.least, model.spec.replicas.max)
    if kept.next_s is not None:
        answer = replace(answer, next_s=min(answer.next_s or kept.next_s, kept.next_s))
    if answer.count < low:
        by_hand = model.adopted.message if model.adopted is not None and model.adopted.held else ""
        begins_s, now = None if kept.begins_s == inf else kept.begins_s, max(answer.count, kept.now)
        return replace(answer, count=low, reason=by_hand or kept.reason, begins_s=begins_s, now=now)
    return replace(answer, count=high) if answer.count > high else answer


def _busy(case: _Case) -> DesiredReplicas:
    """Requests wait or run: as many replicas as they need, and at least as many as the recent peak needs."""
    model, load, have = case.model, case.load, len(case.supply)
    most = max(model.spec.replicas.min, model.spec.replicas.max)
    need = min(max(1, _enough(case, load.waiting + (load.running if have else 0))), most)
    signals = compute_signal_need(case.world, model, have, case.now_s)
    wanted = min(signals.needed, most)
    count, reason, next_s = need, _calls(load), None
    if max(need, wanted) < have:
        count, next_s = _fewer(case, max(need, wanted), signals)
        reason += f"; {signals.kept_reason}" if signals.kept > need and not signals.unknown else ""
    elif need > max(have, 1):
        why_not, next_s = _not_yet(case)
        count = max(have, 1, min(need, have + case.spare)) if why_not else need
        reason += f"; {why_not}" if why_not else f": {need} x {model.slots} slots"
    if wanted > need or wanted > count:
        count, reason = max(count, wanted), f"{reason}; {signals.reason}"
    reason += f"; {signals.unknown}" if signals.unknown and have else ""
    next_s = min((at_s for at_s in (next_s, signals.next_s) if at_s is not None), default=None)
    since_s = load.oldest_s if load.waiting else case.history.last_activity_s
    return DesiredReplicas(
        model=model.name, count=count, reason=reason, since_s=since_s, next_s=next_s, urgent=load.waiting > 0
    )


def _not_yet(case: _Case) -> tuple[str, float | None]:
    """Return (why no replica beyond the first is added yet, when that may change). An empty reason: they are added."""
    have, load = len(case.supply), case.load
    median_s = median_start_s(case.history)
    if have:
        low, high = PERSIST_S
        persist_s = PERSIST_UNKNOWN_S if median_s is None else min(max(median_s / 4, low), high)
        due_s = None if load.oldest_s is None else load.oldest_s + persist_s
        if due_s is None or case.now_s < due_s:
            return f"another replica starts when a request has waited {format_duration(persist_s)}", due_s
    call_s = mean_call_s(case.world, case.model.name, load)
    if median_s is not None and call_s is not None:
        drain_s = load.waiting * call_s / (sum(one.slots for one in case.supply) or case.model.slots)
        if drain_s <= median_s:
            return (
                f"the queue drains in about {format_duration(drain_s)}, a start takes {format_duration(median_s)}",
                None,
            )
    return "", None


def _fewer(case: _Case, need: int, signals: SignalNeed) -> tuple[int, float | None]:
    """Return (number of replicas to keep although `need` are enough now, when it may change as time passes)."""
    have, history = len(case.supply), case.history
    if not is_demand_complete(case.world, case.now_s):
        return have, None
    window_s, rented = effective_idle_window(case.world, case.model, history)
    peak, next_s = _peak(history, window_s, case.now_s)
    need = max(need, _enough(case, peak), signals.kept)
    stay_s = window_s if rented else min(EXTRA_WINDOWS * window_s, EXTRA_S_MAX)
    ready = [replica.times.created_s + stay_s for replica in case.supply if replica.state not in BEGINNING]
    young_s = 0.0 if _replaced(case) else max(ready, default=0.0)
    if case.now_s < young_s:
        need, next_s = max(need, len(ready)), young_s if next_s is None else min(next_s, young_s)
    return min(have, need), next_s


def _replaced(case: _Case) -> bool:
    """Whether some replicas replace others, so that a new replica is not an additional one."""
    hash = case.model.spec_hash()
    old = sum(one.spec_hash != hash or find_drain_cordon(case.world, one) is not None for one in case.supply)
    return 0 < old < len(case.supply)


def _peak(history: History, window_s: float, now_s: float) -> tuple[int, float | None]:
    """Return (maximum of concurrent requests over the last `window_s`, when its oldest bucket expires)."""
    ends = [(calls, (bucket + 1) * PEAK_BUCKET_S + window_s) for bucket, calls in history.peaks]
    counted = [(calls, end_s) for calls, end_s in ends if end_s > now_s]
    return max((calls for calls, _ in counted), default=0), min((end_s for _, end_s in counted), default=None)


def _idle(case: _Case) -> DesiredReplicas:
    """No request waits or runs: zero after the idle timeout, once no start is in progress."""
    world, history, supply, now_s = case.world, case.history, case.supply, case.now_s
    name = case.model.name
    if not is_demand_complete(world, now_s):
        who = ", ".join(list_silent_gateways(world, now_s)) or "no gateway is known yet"
        reason = f"kept because gateways that have not reported may have requests ({who})"
        return DesiredReplicas(model=name, count=len(supply), reason=reason)
    signals = compute_signal_need(world, case.model, len(supply), now_s)
    count, next_s = _fewer(case, 1, signals) if len(supply) > 1 else (1, None)
    last_s = history.last_activity_s
    if any(replica.state in BEGINNING for replica in supply):
        reason = "its start is completed although no request waits"
        return DesiredReplicas(model=name, count=count, reason=reason, since_s=last_s, next_s=next_s)
    activity = "last used"
    if last_s is None:
        last_s = max(r.since_s if r.times.ready_s is None else r.times.ready_s for r in supply)
    if last_s < world.leadership.leading_since_s:  # the previous leader may have exited with unrecorded requests
        activity, last_s = "not used since this leader began", world.leadership.leading_since_s
    window_s, rented = effective_idle_window(world, case.model, history)
    held_s = max(held_until_s(case.model, history, replica) for replica in supply)
    zero_s = max(last_s + window_s, held_s)
    if now_s >= zero_s:
        return DesiredReplicas(
            model=name, count=0, reason=f"idle for {format_duration(now_s - last_s)}", since_s=last_s
        )
    reason = (
        f"{activity} {format_duration(now_s - last_s)} ago, idle timeout "
        f"{format_duration(window_s)}{RENTED if rented else ''}"
    )
    if held_s > last_s + window_s:
        whom = (
            "because an operator ran `pilotlight wake`" if history.woken_s is not None else "for clients that may retry"
        )
        reason = f"kept ready {whom}, for {format_duration(held_s - now_s)}"
    next_s = zero_s if next_s is None else min(next_s, zero_s)
    return DesiredReplicas(model=name, count=count, reason=reason, since_s=last_s, next_s=next_s)


def _refused(case: _Case) -> DesiredReplicas | None:
    """The demand for one replica after a request was rejected because the model is cold; None: no such request."""
    end_s = refused_until_s(case.history)
    if case.now_s >= end_s:
        return None
    refused_s = case.history.refused_cold_s
    reason = WOKEN if refused_s == case.history.woken_s else "a request was rejected because no replica was ready"
    return DesiredReplicas(model=case.model.name, count=1, reason=reason, since_s=refused_s, next_s=end_s, urgent=True)


def unserved_since_s(world: World, name: ModelName, now_s: float) -> float:
    """Return since when requests wait for a model that is not served: the later of arrival and end of service."""
    load, history = world.loads.get(name, NO_LOAD), world.learned.histories.get(name, NO_HISTORY)
    arrived_s = load.oldest_s if load.waiting else history.refused_cold_s
    if arrived_s is None:
        return now_s
    return arrived_s if history.served_until_s is None else max(arrived_s, history.served_until_s)


def _calls(load: ModelLoad) -> str:
    """Describe the load: `3 waiting, tenant acme`."""
    counts = [f"{load.waiting} waiting"] if load.waiting else []
    counts += [f"{load.running} running"] if load.running else []
    return ", ".join([*counts, format_tenants(load.tenants)] if load.tenants else counts)


def _enough(case: _Case, calls: int) -> int:
    """Return the number of replicas whose slots suffice for this number of requests.

    Existing replicas are counted first, those with the fewest slots before others, because any of them may be removed.
    New replicas follow.
    """
    many = 0
    for slots in sorted(one.slots for one in case.supply):
        if calls <= 0:
            return many
        many, calls = many + 1, calls - slots
    return many - (-max(0, calls) // case.model.slots)  # rounded up
