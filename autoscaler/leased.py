"""Which Slices are a Lease's, once they are there. Pure.

Owns that assignment, and that nothing new is put on what is given back. A Lease of Devices has those that its provider
names; one of a node that was added has all of it. Knows no Offer and decides nothing.
"""

from __future__ import annotations

from autoscaler.leases import Lease
from autoscaler.world import Slice, SliceId, World

GIVEN_BACK = "it is being given back to who lent it"


def slices_of(world: World, lease: Lease) -> list[Slice]:
    """Those of a Lease that are there, in order of their ids."""
    return sorted((one for one in world.slices.values() if is_of(lease, one)), key=lambda one: one.id)


def is_of(lease: Lease, slice_: Slice) -> bool:
    """Whether a Slice is of a Lease."""
    listed = lease.listed
    if listed is None or not listed.node or slice_.node != listed.node:
        return False
    return not listed.device_ids or slice_.device in listed.device_ids


def shut(world: World) -> dict[SliceId, str]:
    """Slices on which nothing new is put because they are given back; why, in words."""
    going = [one for one in world.capacity.leases.values() if one.leaving]
    if not going:
        return {}
    nodes = {one.listed.node for one in going if one.listed is not None}
    there = (one for one in world.slices.values() if one.node in nodes)
    return {one.id: GIVEN_BACK for one in there if any(is_of(lease, one) for lease in going)}
