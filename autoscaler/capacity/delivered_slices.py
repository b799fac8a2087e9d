"""Maps capacity orders to the slices that they delivered. Pure; decides nothing.

Also selects the `Marks` for pods on these slices, and excludes slices that are being released. An order of devices owns
the devices that its provider names, or the last ones on a node that only counts devices. An order of a node owns all
slices of that node, unless the provider names devices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from autoscaler.contract import ModelName
from autoscaler.state.capacity import NO_MARKS, Lease, Listed, Marks
from autoscaler.state.pending_claims import is_claim_owner
from autoscaler.state.world import Slice, SliceId, World

_COUNTED = re.compile(r"gpu([0-9]{1,4})")
"""Device name on a node whose device plug-in only counts devices (`autoscaler.slicing.nvidia_device_plugin`)."""
GIVEN_BACK = "it is being released to its provider"
CLAIMED = "it was attached for a claim and is reserved for it"


def slices_of(world: World, lease: Lease) -> list[Slice]:
    """The order's slices that exist, in order of ids."""
    return sorted((one for one in world.nodes.slices.values() if is_slice_of_lease(lease, one)), key=lambda one: one.id)


def is_slice_of_lease(lease: Lease, slice_: Slice) -> bool:
    """Whether a slice belongs to an order."""
    listed = lease.listed
    if listed is None or not listed.node or slice_.node != listed.node:
        return False
    if not listed.device_ids:
        return not lease.offer.node
    if slice_.device in listed.device_ids:
        return True
    number = _COUNTED.fullmatch(slice_.device.rpartition("/")[2])
    first = listed.counted_from
    return number is not None and first is not None and 0 <= int(number[1]) - first < len(listed.device_ids)


def is_release_blocked(world: World, lease: Lease) -> bool:
    """Whether the release of an unused order must wait: it requires an empty node, and the node is in use."""
    if lease.listed is None or not lease.listed.alone:
        return False
    there = {one.id: one.counted for one in world.nodes.slices.values() if one.node == lease.listed.node}
    return any(world.nodes.others.get(counted, 0) for counted in there.values()) or has_replica_on_node(world, lease)


def has_replica_on_node(world: World, lease: Lease) -> bool:
    """Whether a replica may use the order: its devices cannot be identified, and its node has a replica."""
    if lease.listed is None or not lease.listed.alone:
        return False
    there = {one.id for one in world.nodes.slices.values() if one.node == lease.listed.node}
    return any(id in there for replica in world.replicas.values() for id in replica.resources.slices)


def select_pod_marks(world: World, model: ModelName, ids: Iterable[SliceId]) -> Marks:
    """Return the marks for a model's pod on these slices: those of the order that owns a slice. If there is none, those
    of an order of the model that is not delivered, has no node yet, and offers labels that agree with a slice.
    """
    there = [world.nodes.slices[id] for id in ids if id in world.nodes.slices]
    marked = [*_marked(world)]
    of = (listed for lease, listed in marked if any(is_slice_of_lease(lease, one) for one in there))
    booked = (
        listed for lease, listed in marked if lease.owner == model and lease.here_s is None and not listed.node
        and any(lease.offer.labels.items() <= one.labels.items() for one in there)
    )  # fmt: skip
    return next((one.marks for one in (*of, *booked)), NO_MARKS)


def _marked(world: World) -> Iterator[tuple[Lease, Listed]]:
    for lease in sorted(world.capacity.leases.values(), key=lambda one: one.id):
        if lease.listed is not None and lease.listed.marks != NO_MARKS and not lease.leaving:
            yield lease, lease.listed


def list_withheld_slices(world: World) -> dict[SliceId, str]:
    """Slices closed to new replicas -> why: being released, or reserved for a claim that does not use them yet."""
    leases = (one for one in world.capacity.leases.values() if not one.offer.room)
    going = [one for one in leases if one.leaving or (is_claim_owner(one.owner) and not one.used)]
    if not going:
        return {}
    nodes = {one.listed.node for one in going if one.listed is not None}
    there = [one for one in world.nodes.slices.values() if one.node in nodes]
    found = ((one.id, lease.leaving) for one in there for lease in going if is_slice_of_lease(lease, one))
    return {id: GIVEN_BACK if leaving else CLAIMED for id, leaving in found}
