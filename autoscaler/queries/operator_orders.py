"""Evaluates operator orders: closed devices and nodes, replicas that must stop, and their deadlines. Pure.

A cordon closes a device or node to new replicas. A drain also moves the replicas there, as a rollout does: a successor
starts elsewhere first if there is room. A stop ends every replica that a model has now. A forced order waits only
FORCE_S for running requests, and releases devices that a fabric attached there, even if the node does not detach them.
`autoscaler.server.order_effects` creates the orders from requests of operators;
`autoscaler.fold.leadership_and_operator_orders` folds them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf

from autoscaler.contract import ReplicaId
from autoscaler.queries.mig_status import explain_closed_node
from autoscaler.state.capacity import Lease
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Cordon, CordonTarget, Replica, Slice, World

FORCE_S = 10.0
"""How long requests may still run on a replica that is forced to stop."""
STOPPED = "stopped by an operator"
WOKEN = "woken by an operator"
CLOSED = "cordoned by an operator"
STILL_THERE = frozenset({S.PENDING, S.STARTING, S.READY, S.UNREADY, S.WAKING, S.DRAINING})
"""A stop is incomplete while a replica is in one of these states."""


def cordons_on(world: World, slice_: Slice) -> Iterator[Cordon]:
    """Yield the orders that cover a slice's device or node."""
    for place in (CordonTarget("device", slice_.device), CordonTarget("node", slice_.node)):
        if place in world.nodes.cordons:
            yield world.nodes.cordons[place]


def explain_closed_slice(world: World, slice_: Slice) -> str:
    """Return why nothing new is placed on a slice; empty if the slice is open.
    Its driver or an operator closed it, or its node is being repartitioned.
    """
    why = (explain_closed_node(world, slice_.node) if world.nodes.cuttable else "") or slice_.closed
    if why or not world.nodes.cordons:
        return why
    return next((cordon.why or f"{_named(cordon.place)} is {CLOSED}" for cordon in cordons_on(world, slice_)), "")


def find_drain_cordon(world: World, replica: Replica) -> Cordon | None:
    """Return the most urgent drain order for the slices of a replica; None: there is none."""
    if not world.nodes.cordons:
        return None
    slices = (world.nodes.slices[id] for id in replica.resources.slices if id in world.nodes.slices)
    drains = [cordon for slice_ in slices for cordon in cordons_on(world, slice_) if cordon.drain]
    return max(drains, key=lambda cordon: (cordon.force, cordon.at_once), default=None)


def explain_drain(cordon: Cordon) -> str:
    """Return the reason of a drain: `node n1 is drained by an operator`."""
    return cordon.why or f"{_named(cordon.place)} is drained by an operator"


def is_stop_ordered(world: World, replica: Replica) -> bool:
    """Whether an operator ends this replica. Then it is not revived, and its end does not count as an idle stop."""
    stop = world.stops.get(replica.model)
    return (stop is not None and replica.times.created_s <= stop.since_s) or find_drain_cordon(
        world, replica
    ) is not None


def forced_stop_deadline_s(world: World, replica: Replica) -> float:
    """Return when a forced order stops a draining replica despite running requests; infinite: never."""
    since_s = replica.since_s if replica.drain is None else replica.drain.since_s
    stop, cordon, limit = world.stops.get(replica.model), find_drain_cordon(world, replica), inf
    if stop is not None and stop.force and replica.times.created_s <= stop.since_s:
        limit = max(since_s, stop.since_s) + FORCE_S
    if cordon is not None and cordon.force:
        limit = min(limit, max(since_s, cordon.since_s) + FORCE_S)
    return limit


def is_force_drained(world: World, lease: Lease) -> bool:
    """Whether an operator drains by force all devices that an order attached to a node: the whole node, or each of
    these devices.
    """
    listed = lease.listed
    if listed is None or not lease.offer.node or not world.nodes.cordons:
        return False
    forced = {place for place, cordon in world.nodes.cordons.items() if cordon.drain and cordon.force}
    devices = {CordonTarget("device", one) for one in listed.device_ids}
    return CordonTarget("node", lease.offer.node) in forced or (bool(devices) and devices <= forced)


def list_target_replicas(world: World, place: CordonTarget) -> tuple[Replica, ...]:
    """Return the replicas on the device or node, in order of ids."""
    found: dict[ReplicaId, None] = {}
    for slice_ in world.nodes.slices.values():
        if place in (CordonTarget("device", slice_.device), CordonTarget("node", slice_.node)):
            found.update(dict.fromkeys(world.by_slice.get(slice_.id, ())))
    return tuple(world.replicas[id] for id in sorted(found))


def list_cordon_targets(world: World) -> set[CordonTarget]:
    """Return every device and node that an order can name."""
    slices = world.nodes.slices.values()
    devices = {CordonTarget("device", slice_.device) for slice_ in slices}
    return devices | {CordonTarget("node", slice_.node) for slice_ in slices} | world.nodes.cordons.keys()


def _named(place: CordonTarget) -> str:
    return f"{place.kind} {place.name}"
