"""Consolidation: moves replicas from paid capacity to owned devices after demand drops. Pure.

Decides which replica moves first while no request lacks room (`autoscaler.rearrange.paid_capacity` finds the replicas
on paid capacity). In addition to the guarantees of every move (`autoscaler.rearrange.replica_migration`), a replica
moves only if free unpaid room exists for it and for all other replicas on the same order. It does not move if it will
stop soon, if its new device has a product that its model ranks lower, or if its model must be spread. A new leader
moves nothing for LEADING_S, since it may not know recent moves. When no replica is left on it,
`autoscaler.provisioning.release` releases the order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from autoscaler.capacity.delivered_slices import is_slice_of_lease
from autoscaler.demand.desired_replicas import list_live_replicas
from autoscaler.demand.idle_timeout import effective_idle_window, median_start_s
from autoscaler.queries.gateway_reports import is_demand_complete
from autoscaler.rearrange.paid_capacity import group_replicas_by_order, list_paid_slices, worst_product_rank
from autoscaler.rearrange.replica_migration import (
    MigrationContext,
    MigrationStep,
    check_stability,
    find_moving_replica,
    reserve_placement,
)
from autoscaler.state.capacity import Lease, LeaseId
from autoscaler.state.world import NO_HISTORY, NO_LOAD, Move, Replica, Slice, World

LEASES_MAX = 8
"""Maximum orders for whose replicas places are sought in one plan."""
LEADING_S = 120.0


class Consolidation(NamedTuple):
    """The move that begins now, if any, and when one may be possible without a new observation."""

    step: MigrationStep | None = None
    next_s: float = inf


def plan_consolidation(ground: MigrationContext) -> Consolidation:
    """Plan the first move of the replicas of an order that can then be released."""
    world, due_s = ground.world, ground.world.leadership.leading_since_s + LEADING_S
    if (
        not world.rented.guests
        or find_moving_replica(world, ground.going) is not None
        or not is_demand_complete(world, ground.now_s)
    ):
        return Consolidation()
    if ground.now_s < due_s:
        return Consolidation(None, due_s)
    those, next_s, tried = group_replicas_by_order(world, world.replicas), inf, 0
    nodes = {listed.node for id in those if (listed := world.capacity.leases[id].listed) is not None}
    there: dict[str, list[Slice]] = {node: [] for node in nodes}
    for slice_ in world.nodes.slices.values():
        if slice_.node in nodes:
            there[slice_.node].append(slice_)
    for id in sorted(those, key=lambda one: _order(world.capacity.leases[one], those[one])):
        lease, guests = world.capacity.leases[id], those[id]
        if _stays(world, lease, guests, there) or not all(_is_needed(ground, one) for one in guests):
            continue
        rests = [check_stability(ground, one) for one in guests]
        if not all(one.may for one in rests):
            next_s = min(next_s, *(one.next_s for one in rests))
        elif steps := _find_unpaid_places(ground, lease, guests):
            return Consolidation(steps[0])
        elif (tried := tried + 1) == LEASES_MAX:
            break
    return Consolidation(None, next_s)


def _order(lease: Lease, guests: Sequence[Replica]) -> tuple[int, float, LeaseId]:
    return len(guests), -lease.offer.price_per_hour * lease.devices, lease.id


def _stays(world: World, lease: Lease, guests: Iterable[Replica], there: dict[str, list[Slice]]) -> bool:
    """Whether the order would be in use even without these replicas."""
    ids, listed = {one.id for one in guests}, lease.listed
    if listed is None:
        return True
    mine = [one for one in there[listed.node] if listed.alone or is_slice_of_lease(lease, one)]
    if any(world.nodes.others.get(one.counted, 0) for one in mine):
        return True
    return any(id not in ids for one in mine for id in world.by_slice.get(one.id, ()))


def _is_needed(ground: MigrationContext, guest: Replica) -> bool:
    """Whether it would still exist when a successor is ready: requests need it, or its idle timeout ends later."""
    world, name = ground.world, guest.model
    model, load = world.models.get(name), world.loads.get(name, NO_LOAD)
    history = world.learned.histories.get(name, NO_HISTORY)
    if model is None:
        return False
    others = sum(one.slots for one in list_live_replicas(world, name) if one.id != guest.id)
    if others:
        return load.waiting + load.running > others and not model.spec.spread
    if load.waiting or load.running or model.spec.replicas.min:
        return True
    left_s = (history.last_activity_s or -inf) + effective_idle_window(world, model, history)[0] - ground.now_s
    return left_s > (median_start_s(history) or 0.0)


def _find_unpaid_places(ground: MigrationContext, lease: Lease, guests: Iterable[Replica]) -> tuple[MigrationStep, ...]:
    """Find an unpaid place for each replica; empty if one replica has none."""
    world, index = ground.world, ground.slice_index
    steps: list[MigrationStep] = []
    paid = list_paid_slices(world)
    nodes = {world.nodes.slices[id].node for id in paid}
    index.arrays.mark()
    try:
        index.set_aside(id for node in nodes for id in index.slices_of(node) if id in paid)
        for guest in sorted(guests, key=lambda one: (-len(one.resources.slices), -one.resources.memory_bytes, one.id)):
            there = reserve_placement(
                ground,
                guest,
                f"move {guest.model} from paid capacity of {lease.id.provider} to devices without extra cost",
            )
            if there is None or worst_product_rank(world, there.want, there.slices) > worst_product_rank(
                world, there.want, guest.resources.slices
            ):
                return ()
            steps.append(MigrationStep(Move(replica=guest.id), there))
    finally:
        index.arrays.rewind()
    return tuple(steps)
