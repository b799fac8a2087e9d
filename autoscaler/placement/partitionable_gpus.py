"""GPUs that a DRA driver offers whole or in parts: waiting for whole GPUs, and sharing a GPU between starts. Pure.

* A GPU with parts in use becomes whole again when these are freed. So a request for a whole GPU waits instead of being
  reported as unplaceable.
* A request for a part of an idle GPU claims that part; then the driver offers the rest. Other requests that can use the
  rest wait for it instead of using another GPU.

`autoscaler.placement.packer` chooses slices; `autoscaler.slicing.dra` chooses the part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from math import inf
from typing import NamedTuple

from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bin_builder import build_empty_bins, build_hosts
from autoscaler.placement.model.predicates import has_matching_labels, host_shortage_reason, node_exclusion_reason
from autoscaler.placement.model.prices import Prices
from autoscaler.placement.model.types import Bin, PackResult, Placement, PlacementRequest, Unplaced
from autoscaler.slicing.dra import claimed_mig_profile, find_whole_gpu
from autoscaler.slicing.mig_geometry import geometry_of
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.slicing.slicer_protocol import SliceShare
from autoscaler.state.lifecycle import BEGINNING
from autoscaler.state.resources import NO_ROOM, HostResources, ResourceAmount
from autoscaler.state.world import Copy, DeviceId, NodeId, Slice, World

REST_S = 5.0
"""Maximum time to wait for the rest of a GPU after a replica was ordered onto it. A claim takes well below a second."""


def list_rejoinable_gpus(world: World) -> tuple[Bin, ...]:
    """Return an empty `Bin` for each GPU with parts in use, as if no part were in use."""
    prices, found = Prices(world.settings.prices), dict[DeviceId, Bin]()
    for id in sorted(id for id, one in world.nodes.slices.items() if one.device_bytes):
        one = world.nodes.slices[id]
        whole = find_whole_gpu(one) if one.device not in found else None
        if whole is not None and whole.id not in world.nodes.slices:
            found[one.device] = Bin(
                slice=whole, whole=True, incumbents=(), free=ResourceAmount(whole.memory_bytes, whole.compute_percent),
                coming=NO_ROOM, locked=False, price=prices.of(whole),
            )  # fmt: skip
    return tuple(found.values())


def mark_gpu_waits(unmet: tuple[Unplaced, ...], world: World) -> tuple[Unplaced, ...]:
    """Mark requests that fit no current slice, but a GPU that will be whole again, as waiting for it."""
    again = list_rejoinable_gpus(world) if any(one.never for one in unmet) else ()
    if not again:
        return unmet
    nodes = {one.slice.node for one in again}
    there = (one for one in build_empty_bins(world) if one.slice.node in nodes)
    index = SliceIndex((*there, *again), {node: host for node, host in world.nodes.hosts.items() if node in nodes})
    return tuple(_mark_gpu_wait(one, index, again) if one.never else one for one in unmet)


def _mark_gpu_wait(missing: Unplaced, index: SliceIndex, again: Iterable[Bin]) -> Unplaced:
    want = missing.want
    if index.why.never(want) is not None:
        return missing
    fits = (
        one.slice
        for one in again
        if want.kind.takes(one.lane) is not None and has_matching_labels(want.choice.selector, one.slice)
    )
    first = next((one for one in fits if want.kind.rank(one.product) is not None), None)
    of = "" if first is None else f"; {first.id} is whole again when all its parts are free"
    return missing._replace(reason=f"{missing.reason} now{of}", never=False)


class Together(NamedTuple):
    """Which requests start now, and which wait for the rest of a GPU on which another starts."""

    packing: PackResult
    next_s: float = inf
    """When this result changes only because time passes."""
    back: tuple[Placement, ...] = ()
    """Placements of the requests that wait; their slices are free for others."""


def share_split_gpus(packing: PackResult, world: World, now_s: float) -> Together:
    """If several requests would each start on a GPU of their own but need only a part of it, let them share one GPU, as
    long as it has parts left.
    """
    parts = {at: part for at, one in enumerate(packing.placements) if (part := _part_of(one, world)) is not None}
    opened = [gpu for gpu in _beginning(world, now_s) if parts]
    if not parts or (len(parts) == 1 and not opened):
        return Together(packing)
    near = _GpuPreferences(build_hosts(world, now_s), Prices(world.settings.prices), world.nodes.copies)
    placed, back, next_s = list[Placement](), dict[Unplaced, Placement](), inf
    for at, one in enumerate(packing.placements):
        part = parts.get(at)
        may = part is not None and one.want.model not in world.by_model  # only first replicas wait
        gpu = next((gpu for gpu in opened if part and gpu.takes(one.want, part, near)), None) if may else None
        if gpu is None:
            placed.append(one)
            opened += [] if part is None else [_Gpu(part[0], part[1], one.want.model, now_s + REST_S)]
        else:
            why = (
                f"waits for the rest of {gpu.slice.id}, which the DRA driver offers as soon as {gpu.first} has "
                f"claimed a part of it"
            )
            back[Unplaced(one.want, why, promised=True)] = one
            next_s = min(next_s, gpu.until_s)
    after = packing._replace(placements=tuple(placed), unmet=(*packing.unmet, *back))
    return Together(after, next_s, tuple(back.values()))


class _GpuPreferences(NamedTuple):
    """Free host resources of nodes, and preferences among their GPUs."""

    left: Mapping[NodeId, HostResources]
    prices: Prices
    copies: Set[Copy]

    def liking(self, want: PlacementRequest, of: Slice) -> tuple[float, bool]:
        """Sort key among GPUs of one product, lowest preferred, as in the packer."""
        return self.prices.of(of), Copy(artifact=want.supplies.artifact, node=of.node) not in self.copies


class _Gpu:
    """A GPU of which a replica is about to claim a part."""

    def __init__(self, slice_: Slice, profile: str, first: str, until_s: float) -> None:
        self.slice, self.first, self.until_s = slice_, first, until_s
        self._parts = Fleet()
        geometry = geometry_of(slice_.product)
        if geometry is not None:
            self._parts.add(slice_.device, geometry)
            self._parts.start(profile)

    def takes(self, want: PlacementRequest, part: tuple[Slice, str], near: _GpuPreferences) -> bool:
        """Reserve another part of the GPU for the request and return whether there is one. It returns False if an idle
        GPU is cheaper or has the weights, because the request would then use that one.
        """
        slice_, profile = part
        if slice_.product != self.slice.product or want.spread is not None:
            return False
        if not has_matching_labels(want.choice.selector, self.slice) or node_exclusion_reason(want.choice, self.slice):
            return False
        if host_shortage_reason(want, near.left.get(self.slice.node), "its node"):
            return False
        if near.liking(want, slice_) < near.liking(want, self.slice):
            return False
        return isinstance(self._parts.start(profile), MigPlacement)


def _part_of(placement: Placement, world: World) -> tuple[Slice, str] | None:
    """Return the whole GPU it is placed on, and the profile that it will claim. None: it is no part of a whole GPU."""
    slice_ = world.nodes.slices.get(placement.slices[0]) if len(placement.slices) == 1 else None
    if slice_ is None or slice_.device_bytes:
        return None
    profile = claimed_mig_profile(SliceShare(slice_, placement.memory_bytes, placement.want.kind.compute_percent))
    return (slice_, profile) if profile else None


def _beginning(world: World, now_s: float) -> Iterator[_Gpu]:
    """Yield GPUs with a replica just ordered that has no part yet. A replica that the scheduler keeps off its node
    (`stranded_s`) does not count, because it will get no part there.
    """
    for replica in world.replicas.values():
        until_s = replica.times.created_s + REST_S
        if replica.state not in BEGINNING or now_s >= until_s or len(replica.resources.slices) != 1:
            continue
        if replica.runtime.stranded_s is not None:
            continue
        slice_ = world.nodes.slices.get(replica.resources.slices[0])
        part = (
            None
            if slice_ is None or slice_.device_bytes
            else SliceShare(slice_, replica.resources.memory_bytes, replica.resources.compute_percent)
        )
        profile = "" if part is None else claimed_mig_profile(part)
        if slice_ is not None and profile:
            yield _Gpu(slice_, profile, replica.model, until_s)
