"""Keeps devices free in advance (`capacity[].headroom`), so that starts need not wait for them. Pure.

Decides which idle orders are kept, how many devices are missing, and which offer is ordered. A free owned device of a
product that the provider offers counts like an ordered one, so that no headroom is paid for in its place. Capacity that
is about to be removed does not count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import NamedTuple

from autoscaler.capacity.delivered_slices import is_slice_of_lease, list_withheld_slices
from autoscaler.capacity.interruptions import is_lease_ending, is_on_unneeded_node
from autoscaler.capacity.lead_times import NO_LEARNT, estimate_lead_time
from autoscaler.contract import ModelName
from autoscaler.placement.capacity_simulation import SimulationContext
from autoscaler.queries.operator_orders import explain_closed_slice, is_force_drained
from autoscaler.state.capacity import Lease, LeaseId, Offer, OfferId
from autoscaler.state.world import DeviceId, Slice, World

_OWNER = "headroom@"
"""Prefix that no model's name has."""


class Headroom(NamedTuple):
    """`kept`: idle orders that are kept; `lacking`: by provider, how many more devices must be free."""

    kept: frozenset[LeaseId]
    lacking: dict[str, int]


NONE = Headroom(frozenset(), {})


def headroom_owner(provider: str) -> ModelName:
    """The owner of a provider's headroom orders until a model uses them. It is not the name of a model."""
    return ModelName(f"{_OWNER}{provider}")


def compute_headroom(ground: SimulationContext, leases: Collection[Lease], waited: Collection[LeaseId]) -> Headroom:
    """Compute the headroom. `leases`: including new orders; `waited`: those that a request waits for."""
    entries = [one for one in ground.world.settings.capacity if one.headroom and not one.closing]
    if not entries:
        return NONE
    world, kept, lacking = ground.world, set[LeaseId](), dict[str, int]()
    free = _free(ground)
    for entry in entries:
        mine = sorted((one for one in leases if one.id.provider == entry.name), key=lambda one: one.id)
        offers = world.capacity.offers.get(entry.name, ())
        products = {one.product for one in (*offers, *(one.offer for one in mine))}
        there = {of: one for of, one in free.items() if one.product in products}
        leased = {one.id: {of for of, slice_ in there.items() if is_slice_of_lease(one, slice_)} for one in mine}
        lacks = entry.headroom - len(there.keys() - set[DeviceId]().union(*leased.values()))
        for one in sorted(mine, key=lambda one: (one.here_s is None, one.id)):
            counts = _counts(world, one, len(leased[one.id]), ground.now_s, waited)
            if lacks > 0 and counts:
                kept.add(one.id)
                lacks -= counts
        lacking |= {entry.name: lacks} if lacks > 0 else {}
    return Headroom(frozenset(kept), lacking)


def compute_order_devices(offer: Offer, lacks: int) -> int:
    """How many devices to order if `lacks` are missing; nodes are ordered with all their devices."""
    return min(max(lacks, offer.devices_min), offer.devices_max)


def find_cheapest_offer(world: World, offers: Iterable[Offer], lacks: int) -> Offer | None:
    """The offer with the lowest price per missing device, then the shortest delivery time; None if there is none."""

    def key(one: Offer) -> tuple[float, float, OfferId]:
        takes, many = (
            estimate_lead_time(one, world.capacity.learnt.get(one.kind, NO_LEARNT)),
            compute_order_devices(one, lacks),
        )
        return one.price_per_hour * many / min(many, lacks), takes.p50_s, one.id

    return min(offers, key=key, default=None)


def _counts(world: World, lease: Lease, free: int, now_s: float, waited: Collection[LeaseId]) -> int:
    """How many devices of an order are free, or will be when it is delivered."""
    if lease.here_s is None:
        return lease.devices if lease.coming(now_s) and lease.id not in waited else 0
    going = (
        lease.leaving
        or lease.failed
        or is_lease_ending(world, lease)
        or is_on_unneeded_node(world, lease)
        or is_force_drained(world, lease)
    )
    return 0 if going else free


def _free(ground: SimulationContext) -> dict[DeviceId, Slice]:
    """Return one slice of each empty, unassigned device.
    If pods of others use unknown devices of a node, as many devices of the node count as in use.
    """
    world, shut_ = ground.world, list_withheld_slices(ground.world)
    of: dict[DeviceId, list[Slice]] = {}
    for one in world.nodes.slices.values():
        of.setdefault(one.device, []).append(one)
    found: dict[DeviceId, Slice] = {}
    others = dict(world.nodes.others)
    for device, slices in sorted(of.items()):
        first = slices[0]
        if all(_open(ground, one, shut_) for one in slices):
            if others.get(first.counted, 0) > 0:
                others[first.counted] -= len(slices)
            else:
                found[device] = first
    return found


def _open(ground: SimulationContext, one: Slice, shut_: Collection[object]) -> bool:
    world = ground.world
    taken = one.id in ground.taken or one.id in shut_ or one.theirs or world.by_slice.get(one.id)
    return one.healthy and not taken and not explain_closed_slice(world, one)
