"""Evaluates gateway reports: whether demand is complete, what runs where, and whether a drain is acknowledged.

Defines the rules of acknowledged drain (interfaces, section 6): a stop waits until every known gateway has applied
routes in which the replica drains and has no request on it, or until the grace period has ended. Unknown is never zero:
a gateway that is silent and not proven gone may have requests. Decides nothing itself; `autoscaler.planner.plan` uses
the answers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from autoscaler.contract import REPORT_EXPIRY_S, GatewayId, ReplicaId
from autoscaler.queries.operator_orders import forced_stop_deadline_s
from autoscaler.spec.model import ModelSpec
from autoscaler.state.world import Gateway, Replica, World
from autoscaler.text import format_duration

LEADER_WAIT_S = 10.0
"""A new leader stops nothing until every known gateway has reported to it, or for this long."""
PROGRESS_S = 60.0
"""A replica that sent a byte to any gateway within this time is not stalled."""
STALLED = "its engine accepts requests and sends nothing, and several requests waited until their limit"
STALLED_GRACE_S = 10.0
"""How long requests may still run on a stalled replica. Requests without a byte move to another replica."""
DRAIN_SECONDS_MAX = ModelSpec(engine="command").drain_seconds_max
"""The grace period of a replica whose model was deleted."""


class Verdict(NamedTuple):
    """Whether to stop a draining replica now, and why; and when that changes without a new observation."""

    stop: bool
    reason: str
    next_s: float | None = None


def list_known_gateways(world: World) -> Iterator[Gateway]:
    """Return every gateway that reported or exists, and is not proven gone."""
    return (gateway for gateway in world.gateways.values() if not gateway.gone)


def list_silent_gateways(world: World, now_s: float) -> tuple[GatewayId, ...]:
    """Return known gateways whose demand is unknown: no report in this epoch, or an expired one."""
    return tuple(g.id for g in list_known_gateways(world) if not g.in_epoch or now_s >= g.seen_s + REPORT_EXPIRY_S)


def is_demand_complete(world: World, now_s: float) -> bool:
    """Whether the demand of all gateways is known. While no gateway is known at all, a new leader waits for one."""
    if not any(True for _ in list_known_gateways(world)):
        return now_s >= world.leadership.leading_since_s + LEADER_WAIT_S
    return not list_silent_gateways(world, now_s)


def next_change_s(world: World, now_s: float) -> float | None:
    """Return when `is_demand_complete`, or the sum of demand, next changes only because time passes."""
    ends = [g.seen_s + REPORT_EXPIRY_S for g in list_known_gateways(world) if g.report is not None]
    ends.append(world.leadership.leading_since_s + LEADER_WAIT_S)
    return min((end for end in ends if end > now_s), default=None)


def count_running_calls(world: World) -> dict[ReplicaId, int]:
    """Return the number of requests on each replica that has any, as last reported by gateways."""
    calls: dict[ReplicaId, int] = {}
    for gateway in list_known_gateways(world):
        for replica, use in gateway.uses.items():
            if use.in_use:
                calls[replica] = calls.get(replica, 0) + use.in_use
    return calls


def list_stalled_replicas(world: World) -> frozenset[ReplicaId]:
    """Return replicas whose engines accept requests and send nothing: several requests of a gateway waited for longer
    than any request may, and no gateway got a byte.
    """
    stalled = {id for gateway in list_known_gateways(world) for id in gateway.stalled}
    if not stalled:
        return frozenset()
    for gateway in list_known_gateways(world):
        for use in () if gateway.report is None else gateway.report.replicas:
            age_s = use.last_byte_age_s
            if not use.stalled and age_s is not None and age_s < PROGRESS_S:
                stalled.discard(use.replica)
    return frozenset(stalled)


def decide_stop(world: World, replica: Replica, now_s: float) -> Verdict:
    """Decide whether to stop a draining replica."""
    model = world.models.get(replica.model)
    drain = replica.drain
    since_s = replica.since_s if drain is None else drain.since_s
    end_s = since_s + (DRAIN_SECONDS_MAX if model is None else model.spec.drain_seconds_max)
    end_s = min(end_s, forced_stop_deadline_s(world, replica))
    if replica.id in list_stalled_replicas(world):
        end_s = min(end_s, since_s + STALLED_GRACE_S)
    lead_s = world.leadership.leading_since_s + LEADER_WAIT_S
    if now_s < lead_s and (not world.gateways or any(not g.in_epoch for g in list_known_gateways(world))):
        return Verdict(False, "the leader is new, and some gateways have not reported to it", lead_s)
    if now_s >= end_s:
        return Verdict(True, f"drained for {format_duration(now_s - since_s)}; its grace period has ended")
    waits = [why for gateway in list_known_gateways(world) if (why := _holds(gateway, replica))]
    if waits:
        return Verdict(False, "; ".join(waits), end_s)
    return Verdict(True, f"drained in {format_duration(now_s - since_s)}, every gateway has acknowledged")


def _holds(gateway: Gateway, replica: Replica) -> str:
    """Return why the gateway delays the stop of the replica; empty: it does not."""
    report, drain = gateway.report, replica.drain
    if report is None or (drain is not None and (report.epoch, report.version) < (drain.epoch, drain.version)):
        return f"gateway {gateway.id} has not acknowledged"
    use = gateway.uses.get(replica.id)
    return f"{use.in_use} running through gateway {gateway.id}" if use is not None and use.in_use else ""
