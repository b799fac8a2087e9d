"""What operators ordered, as the plan sees it: closed Devices and nodes, Replicas that must go, and how long they may.

Owns the meaning of the orders in a World. A cordon closes a Place to whatever is not there yet; a drain also moves what
is there, as a rollout does: a successor is started elsewhere first where there is room. A stop ends every Replica that
a Model has now. Forced, an order waits for nothing but FORCE_S for running Calls, and what a fabric attached there is
given back, in the end though its node does not let go of it. Pure; orders are folded by
`autoscaler.fold.operator_orders`, and made of what people ask by `autoscaler.server.operator_orders`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from autoscaler.contract import ReplicaId
from autoscaler.queries.mig_status import explain_closed_node
from autoscaler.state.capacity_orders import Lease
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.operator_orders import Cordon, CordonTarget
from autoscaler.state.world import Replica, Slice, World

FORCE_S = 10.0
"""Calls on a Replica that is forced to end have so long."""
STOPPED = "stopped by an operator"
WOKEN = "woken by an operator"
CLOSED = "cordoned by an operator"
STILL_THERE = frozenset({S.PENDING, S.STARTING, S.READY, S.UNREADY, S.WAKING, S.DRAINING})
"""A Replica in one of these keeps a stop from being carried out."""


def cordons_on(world: World, slice_: Slice) -> Iterator[Cordon]:
    """The orders about a Slice's Device and node."""
    for place in (CordonTarget("device", slice_.device), CordonTarget("node", slice_.node)):
        if place in world.cordons:
            yield world.cordons[place]


def explain_closed_slice(world: World, slice_: Slice) -> str:
    """Why nothing new is put on a Slice, in words; empty: neither its driver nor an operator minds,
    nor is its node being cut anew.
    """
    why = (explain_closed_node(world, slice_.node) if world.cuttable else "") or slice_.closed
    if why or not world.cordons:
        return why
    return next((cordon.why or f"{_named(cordon.place)} is {CLOSED}" for cordon in cordons_on(world, slice_)), "")


def find_drain_cordon(world: World, replica: Replica) -> Cordon | None:
    """The order by which a Replica leaves its Slices, the most urgent first; None: none does."""
    if not world.cordons:
        return None
    slices = (world.slices[id] for id in replica.slices if id in world.slices)
    drains = [cordon for slice_ in slices for cordon in cordons_on(world, slice_) if cordon.drain]
    return max(drains, key=lambda cordon: (cordon.force, cordon.at_once), default=None)


def explain_drain(cordon: Cordon) -> str:
    """`node n1 is drained by an operator`."""
    return cordon.why or f"{_named(cordon.place)} is drained by an operator"


def is_stop_ordered(world: World, replica: Replica) -> bool:
    """Whether an operator wants this Replica to end: it is not revived, and its end tells nothing of idleness."""
    stop = world.stops.get(replica.model)
    return (stop is not None and replica.created_s <= stop.since_s) or find_drain_cordon(world, replica) is not None


def forced_stop_deadline_s(world: World, replica: Replica) -> float:
    """When a draining Replica is stopped, whatever runs on it, because an operator forces it; infinite: not so."""
    since_s = replica.since_s if replica.drain is None else replica.drain.since_s
    stop, cordon, limit = world.stops.get(replica.model), find_drain_cordon(world, replica), inf
    if stop is not None and stop.force and replica.created_s <= stop.since_s:
        limit = max(since_s, stop.since_s) + FORCE_S
    if cordon is not None and cordon.force:
        limit = min(limit, max(since_s, cordon.since_s) + FORCE_S)
    return limit


def is_force_drained(world: World, lease: Lease) -> bool:
    """Whether an operator drains by force all of a Lease of Devices that are attached to a node: the node, or each."""
    listed = lease.listed
    if listed is None or not lease.offer.node or not world.cordons:
        return False
    forced = {place for place, cordon in world.cordons.items() if cordon.drain and cordon.force}
    devices = {CordonTarget("device", one) for one in listed.device_ids}
    return CordonTarget("node", lease.offer.node) in forced or (bool(devices) and devices <= forced)


def list_target_replicas(world: World, place: CordonTarget) -> tuple[Replica, ...]:
    """Replicas that hold something of a Place, in order of ids."""
    found: dict[ReplicaId, None] = {}
    for slice_ in world.slices.values():
        if place in (CordonTarget("device", slice_.device), CordonTarget("node", slice_.node)):
            found.update(dict.fromkeys(world.by_slice.get(slice_.id, ())))
    return tuple(world.replicas[id] for id in sorted(found))


def list_cordon_targets(world: World) -> set[CordonTarget]:
    """Every Device and node that can be named."""
    devices = {CordonTarget("device", slice_.device) for slice_ in world.slices.values()}
    return devices | {CordonTarget("node", slice_.node) for slice_ in world.slices.values()} | world.cordons.keys()


def _named(place: CordonTarget) -> str:
    return f"{place.kind} {place.name}"
