"""Finds replicas on paid capacity, and idle replicas on the unpaid slices that they could use. Pure; decides nothing.

Computes `World.rented`. A delivered order with a price is rented, unless its provider's `keepSeconds` keeps it for days
even if idle. A guest is a replica on a rented order. If no unpaid slice is free for a guest, the least recently used
replica on a suitable slice blocks it. Models of guests and of blocking replicas keep idle replicas for a shorter time,
which depends on how long a start takes (`autoscaler.demand.residency`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter, is_

from msgspec.structs import replace

from autoscaler.capacity.delivered_slices import is_slice_of_lease
from autoscaler.contract import ReplicaId
from autoscaler.fold.fold import Observation, fold
from autoscaler.placement.model.predicates import has_matching_labels, node_exclusion_reason
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest
from autoscaler.rearrange.replica_migration import can_migrate
from autoscaler.spec.capacity import provider_keep_seconds
from autoscaler.state.actions import Acted
from autoscaler.state.capacity import Lease, LeaseId, Offer
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, PaidCapacity, Replica, Slice, SliceId, World

NO_GUESTS = PaidCapacity()
KEPT_S = 86_400.0
"""An order with a longer `keepSeconds` is not rented: vacating it would save nothing for a day."""
GUESTS_MAX = 16
"""Maximum guests for which a blocking replica is sought at once."""


_inputs = attrgetter(
    "capacity", "models", "settings", "stops", "replicas", "nodes.slices", "nodes.cordons", "nodes.undisturbed"
)
"""Fields of `World` whose change can change `PaidCapacity`."""


def advance(world: World, batch: Sequence[Observation], now_s: float) -> tuple[World, tuple[Transition, ...]]:
    """Apply `batch` as `autoscaler.fold.fold.fold` does, then update `World.rented`.
    It is not updated if `batch` has only Acted observations, because our own Actions do not affect it.
    """
    after, transitions = fold(world, batch, now_s)
    if all(isinstance(one, Acted) for one in batch):
        return after, transitions
    if all(map(is_, _inputs(world), _inputs(after))):
        return after, transitions
    some = any(is_rented(after, lease) for lease in after.capacity.leases.values())
    paid = compute_paid_capacity(after) if some else NO_GUESTS
    return (after if paid == after.rented else replace(after, rented=paid)), transitions


def compute_paid_capacity(world: World) -> PaidCapacity:
    """Compute `PaidCapacity`."""
    guests = {one.id: one for those in group_replicas_by_order(world, world.replicas).values() for one in those}
    if not guests:
        return NO_GUESTS
    idlers = {one.model for one in guests.values()}
    wants = [one for id in sorted(guests)[:GUESTS_MAX] if (one := _want(world, guests[id])) is not None]
    if wants:
        slices, paid_slices = world.nodes.slices, list_paid_slices(world)
        free = [one for one in slices.values() if one.id not in paid_slices and _is_free(world, one)]
        idle = [*_idle(world, guests, paid_slices)]
        for want, rank in wants:
            place = next((one for one in free if _could_be(want, rank, one)), None)
            if place is not None:
                free.remove(place)
            elif victim := next((one for one in idle if _could_be(want, rank, slices[one.resources.slices[0]])), None):
                idle.remove(victim)
                idlers.add(victim.model)
    return PaidCapacity(frozenset(guests), frozenset(idlers))


def _want(world: World, guest: Replica) -> tuple[PlacementRequest, int] | None:
    """The guest's placement request and the rank of its current product; None if it cannot move."""
    model = world.models.get(guest.model)
    if model is None or guest.id in world.nodes.undisturbed or len(guest.resources.slices) != 1:
        return None
    if not can_migrate(world, model, guest):
        return None
    want = build_placement_request(model, 0, inf, EvictionLevel.NONE, "", world.settings.pod)
    return want, worst_product_rank(world, want, guest.resources.slices)


def _is_free(world: World, slice_: Slice) -> bool:
    return slice_.healthy and not world.by_slice.get(slice_.id) and not world.nodes.others.get(slice_.counted)


def _idle(world: World, guests: Mapping[ReplicaId, Replica], paid_slices: frozenset[SliceId]) -> Iterator[Replica]:
    """Replicas on one unpaid device with an `auto` idle timeout, least recently used first."""
    found = list[tuple[float, ReplicaId]]()
    for replica in world.replicas.values():
        model = world.models.get(replica.model)
        if model is None or replica.state is not S.READY or replica.id in guests or model.spec.idle_seconds != "auto":
            continue
        if (
            len(replica.resources.slices) == 1
            and replica.resources.slices[0] in world.nodes.slices
            and replica.resources.slices[0] not in paid_slices
        ):
            last_s = world.learned.histories.get(replica.model, NO_HISTORY).last_activity_s
            found.append((-inf if last_s is None else last_s, replica.id))
    return (world.replicas[id] for _, id in sorted(found))


def _could_be(want: PlacementRequest, rank: int, slice_: Slice) -> bool:
    """Whether the request would fit the slice if it were empty, and its product is ranked no worse."""
    if (
        want.kind.memory_bytes > slice_.memory_bytes
        or not has_matching_labels(want.choice.selector, slice_)
        or node_exclusion_reason(want.choice, slice_)
    ):
        return False
    there = want.kind.rank(slice_.product)
    return there is not None and there <= rank


def group_replicas_by_order(world: World, replicas: Mapping[ReplicaId, Replica]) -> dict[LeaseId, list[Replica]]:
    """Map rented orders to the replicas on them; orders without replicas are omitted."""
    there: dict[str, list[Lease]] = {}
    for lease in world.capacity.leases.values():
        if is_rented(world, lease) and lease.listed is not None:
            there.setdefault(lease.listed.node, []).append(lease)
    found: dict[LeaseId, list[Replica]] = {}
    for replica in replicas.values() if there else ():
        slices = [world.nodes.slices[id] for id in replica.resources.slices if id in world.nodes.slices]
        leases = {lease.id for one in slices for lease in there.get(one.node, ()) if is_slice_of_lease(lease, one)}
        for id in leases:
            found.setdefault(id, []).append(replica)
    return found


def is_rented(world: World, lease: Lease) -> bool:
    """Whether the order is delivered, has a price, and would soon be released if idle."""
    if lease.here_s is None or lease.leaving or not _costs(lease.offer):
        return False
    kept_s = provider_keep_seconds(world.settings.capacity, lease.id.provider)
    return kept_s == "auto" or kept_s <= KEPT_S


def _costs(offer: Offer) -> bool:
    """Whether it has a price. Room on existing nodes does not count, since its devices are unknown."""
    return offer.price_per_hour > 0 and not offer.room


def list_paid_slices(world: World) -> frozenset[SliceId]:
    """Slices of all orders with a price."""
    there: dict[str, list[Lease]] = {}
    for lease in world.capacity.leases.values():
        if lease.listed is not None and _costs(lease.offer):
            there.setdefault(lease.listed.node, []).append(lease)
    slices = world.nodes.slices.values() if there else ()
    return frozenset(
        one.id for one in slices if any(is_slice_of_lease(lease, one) for lease in there.get(one.node, ()))
    )


def worst_product_rank(world: World, want: PlacementRequest, ids: tuple[SliceId, ...]) -> int:
    """Worst rank of these slices' products for the model; lower is better."""
    ranks = (want.kind.rank(world.nodes.slices[id].product) for id in ids if id in world.nodes.slices)
    return max((rank for rank in ranks if rank is not None), default=0)
