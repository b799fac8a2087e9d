"""GPUs that a DRA driver offers whole or in parts: what they are when their parts have ended, and who shares one. Pure.

Owns two things that Slices alone do not tell. A GPU of which parts are in use is whole again when these have ended, so
who needs all of it waits, and is not told that it fits nowhere. And who needs a part of a GPU that nobody is on claims
it, so that the rest is offered a moment later: who could have some of that rest waits so long, and takes no other GPU.
Chooses no Slice; `autoscaler.placement.packer` does, and which part is claimed is `autoscaler.slicing.dra_claims`'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from math import inf
from typing import NamedTuple

from autoscaler.demand.desired_replicas import BEGINNING
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bins import build_empty_bins, build_hosts
from autoscaler.placement.model.predicates import has_matching_labels, host_shortage_reason, node_exclusion_reason
from autoscaler.placement.model.prices import Prices
from autoscaler.placement.model.types import Bin, PackResult, Placement, PlacementRequest, Unplaced
from autoscaler.slicing.base import SliceShare
from autoscaler.slicing.dra_claims import claimed_mig_profile, find_whole_gpu
from autoscaler.slicing.mig_geometry import geometry_of
from autoscaler.slicing.mig_placement import Fleet, MigPlacement
from autoscaler.state.resources import NO_ROOM, HostResources, ResourceAmount
from autoscaler.state.world import Copy, DeviceId, NodeId, Slice, World

REST_S = 5.0
"""So long after a Replica was ordered onto a GPU the rest of that is waited for: a claim takes well below a second."""


def list_rejoinable_gpus(world: World) -> tuple[Bin, ...]:
    """A Shelf for each GPU of which parts are in use, as it is when nobody has one."""
    prices, found = Prices(world.settings.prices), dict[DeviceId, Bin]()
    for id in sorted(id for id, one in world.slices.items() if one.device_bytes):
        one = world.slices[id]
        whole = find_whole_gpu(one) if one.device not in found else None
        if whole is not None and whole.id not in world.slices:
            found[one.device] = Bin(
                slice=whole, whole=True, incumbents=(), free=ResourceAmount(whole.memory_bytes, whole.compute_percent),
                coming=NO_ROOM, locked=False, price=prices.of(whole),
            )  # fmt: skip
    return tuple(found.values())


def mark_gpu_waits(unmet: tuple[Unplaced, ...], world: World) -> tuple[Unplaced, ...]:
    """Who fits on no Slice that there is, and on a GPU that is whole again some day, waits for that."""
    again = list_rejoinable_gpus(world) if any(one.never for one in unmet) else ()
    if not again:
        return unmet
    nodes = {one.slice.node for one in again}
    there = (one for one in build_empty_bins(world) if one.slice.node in nodes)
    yard = SliceIndex((*there, *again), {node: host for node, host in world.hosts.items() if node in nodes})
    return tuple(_some_day(one, yard, again) if one.never else one for one in unmet)


def _some_day(missing: Unplaced, yard: SliceIndex, again: Iterable[Bin]) -> Unplaced:
    want = missing.want
    if yard.why.never(want) is not None:
        return missing
    fits = (
        one.slice
        for one in again
        if want.kind.takes(one.lane) is not None and has_matching_labels(want.selector, one.slice)
    )
    first = next((one for one in fits if want.kind.rank(one.product) is not None), None)
    of = "" if first is None else f"; {first.id} is whole when those have ended who have parts of it"
    return missing._replace(reason=f"{missing.reason} now{of}", never=False)


class Together(NamedTuple):
    """Who starts, and who waits for the rest of a GPU on which another starts."""

    packing: PackResult
    next_s: float = inf
    """When time alone changes this."""
    back: tuple[Placement, ...] = ()
    """Of those who wait for the rest of another: where they would start, which is free for others."""


def share_split_gpus(packing: PackResult, world: World, now_s: float) -> Together:
    """Of those that would start now on GPUs of which each needs a part, as many on one GPU as it has parts for."""
    parts = {at: part for at, one in enumerate(packing.placements) if (part := _part_of(one, world)) is not None}
    opened = [gpu for gpu in _beginning(world, now_s) if parts]
    if not parts or (len(parts) == 1 and not opened):
        return Together(packing)
    near = _Near(build_hosts(world, now_s), Prices(world.settings.prices), world.copies)
    placed, back, next_s = list[Placement](), dict[Unplaced, Placement](), inf
    for at, one in enumerate(packing.placements):
        part = parts.get(at)
        may = part is not None and one.want.model not in world.by_model  # what replaces another does not wait
        gpu = next((gpu for gpu in opened if part and gpu.takes(one.want, part, near)), None) if may else None
        if gpu is None:
            placed.append(one)
            opened += [] if part is None else [_Gpu(part[0], part[1], one.want.model, now_s + REST_S)]
        else:
            why = f"{gpu.first} starts on {gpu.slice.id} first: the rest of that is offered in a moment"
            back[Unplaced(one.want, why, promised=True)] = one
            next_s = min(next_s, gpu.until_s)
    after = packing._replace(placements=tuple(placed), unmet=(*packing.unmet, *back))
    return Together(after, next_s, tuple(back.values()))


class _Near(NamedTuple):
    """What nodes have, and what is liked of their GPUs."""

    left: Mapping[NodeId, HostResources]
    prices: Prices
    copies: Set[Copy]

    def liking(self, want: PlacementRequest, of: Slice) -> tuple[float, bool]:
        """The lowest is liked best, as by the packer; of GPUs of one product."""
        return self.prices.of(of), Copy(artifact=want.artifact, node=of.node) not in self.copies


class _Gpu:
    """One that somebody is about to have a part of."""

    def __init__(self, slice_: Slice, profile: str, first: str, until_s: float) -> None:
        self.slice, self.first, self.until_s = slice_, first, until_s
        self._parts = Fleet()
        geometry = geometry_of(slice_.product)
        if geometry is not None:
            self._parts.add(slice_.device, geometry)
            self._parts.start(profile)

    def takes(self, want: PlacementRequest, part: tuple[Slice, str], near: _Near) -> bool:
        """Whether it has another part for that, which nobody else is to have from now on. None for who would have an
        idle GPU all the same when the rest is offered: that one is cheaper, or is where its weights are.
        """
        slice_, profile = part
        if slice_.product != self.slice.product or want.spread is not None:
            return False
        if not has_matching_labels(want.selector, self.slice) or node_exclusion_reason(want.choice, self.slice):
            return False
        if host_shortage_reason(want, near.left.get(self.slice.node), "it"):
            return False
        if near.liking(want, slice_) < near.liking(want, self.slice):
            return False
        return isinstance(self._parts.start(profile), MigPlacement)


def _part_of(placement: Placement, world: World) -> tuple[Slice, str] | None:
    """The whole GPU that it is placed on, and the profile of the part that it will claim; None: all, or a part."""
    slice_ = world.slices.get(placement.slices[0]) if len(placement.slices) == 1 else None
    if slice_ is None or slice_.device_bytes:
        return None
    profile = claimed_mig_profile(SliceShare(slice_, placement.memory_bytes, placement.want.compute_percent))
    return (slice_, profile) if profile else None


def _beginning(world: World, now_s: float) -> Iterator[_Gpu]:
    """Those on which a Replica was just ordered that has no part yet. Who is kept off its node will get none there."""
    for replica in world.replicas.values():
        until_s = replica.created_s + REST_S
        if replica.state not in BEGINNING or now_s >= until_s or len(replica.slices) != 1:
            continue
        if replica.stranded_s is not None:
            continue
        slice_ = world.slices.get(replica.slices[0])
        part = (
            None
            if slice_ is None or slice_.device_bytes
            else SliceShare(slice_, replica.memory_bytes, replica.compute_percent)
        )
        profile = "" if part is None else claimed_mig_profile(part)
        if slice_ is not None and profile:
            yield _Gpu(slice_, profile, replica.model, until_s)
