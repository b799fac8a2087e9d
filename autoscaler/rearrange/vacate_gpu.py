"""Vacates partitioned GPUs for placement requests that need a whole one. Pure.

Selects the cheapest GPU whose parts can all be vacated, now or by eviction under the usual rules; one that is already
being vacated has precedence. It is preferred to evictions elsewhere that cost more. All replicas on it are evicted, or
none. Until it is whole, only requests that precede this one may use its other parts. Guarantees: no replica is evicted
for a request that has cheaper room elsewhere. A GPU is not vacated if a preceding request gets a part of it, if it is
closed, or if pods of others use it. `autoscaler.planner.plan` carries out the evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from math import inf
from typing import NamedTuple

from autoscaler.contract import ReplicaId
from autoscaler.placement.eviction import (
    COSTS,
    EVICT,
    EvictionOption,
    Key,
    eviction_cost,
    find_eviction_option,
    fit_options_to_host,
)
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bin_builder import NOTHING_KEPT
from autoscaler.placement.model.predicates import node_exclusion_reason
from autoscaler.placement.model.types import (
    Bin,
    EvictionLevel,
    Occupant,
    PackResult,
    PlacementRequest,
    RestartCosts,
    Unplaced,
    Victim,
)
from autoscaler.placement.packer import pack, request_sort_key, wait_reason
from autoscaler.placement.partitionable_gpus import list_rejoinable_gpus, share_split_gpus
from autoscaler.state.resources import NO_ROOM, ResourceAmount
from autoscaler.state.world import Slice, SliceId, World

EMPTYING_MAX = 8
"""Maximum GPUs vacated in one plan, for the first requests in serving order; each costs one more packer run."""


class VacateContext(NamedTuple):
    """Inputs other than the slice index."""

    world: World
    restart_costs: RestartCosts
    now_s: float


class Packed(NamedTuple):
    """The packer's result with vacated and split GPUs included, and the slice index that it applies to."""

    packing: PackResult
    slice_index: SliceIndex
    next_s: float = inf
    """When the result changes without a new observation."""


class _Emptying(NamedTuple):
    """A GPU to be vacated for a placement request."""

    missing: Unplaced
    victims: tuple[Occupant, ...]
    parts: tuple[SliceId, ...]


def pack_vacating_gpus(
    wants: Sequence[PlacementRequest],
    build_index: Callable[[Set[ReplicaId], Mapping[SliceId, str]], SliceIndex],
    ground: VacateContext,
    still: Collection[PlacementRequest],
) -> Packed:
    """Run the packer, and vacate GPUs for requests that it leaves unplaced.

    If a replica starts on a part of a GPU, requests that wait for the rest of that GPU
    (`autoscaler.placement.partitionable_gpus`) release their slices to other requests. `build_index(going, kept)`:
    builds the slice index without the replicas `going` and with the slices `kept` closed, with their reasons. `still`:
    requests for which no GPU is vacated.
    """
    packing, index, _ = _emptied(wants, build_index, ground, still)
    first = share_split_gpus(packing, ground.world, ground.now_s)
    if first.back and any(not one.promised for one in first.packing.unmet):
        back = {one.want for one in first.back}
        packing, other, _ = _emptied([want for want in wants if want not in back], build_index, ground, still)
        both = sorted((*packing.placements, *first.back), key=lambda one: request_sort_key(one.want))
        again = share_split_gpus(packing._replace(placements=tuple(both)), ground.world, ground.now_s)
        if back <= {one.want for one in again.back}:
            return Packed(again.packing, other, again.next_s)
        index = _emptied(wants, build_index, ground, still).slice_index
    return Packed(first.packing, index, first.next_s)


def _emptied(
    wants: Sequence[PlacementRequest],
    build_index: Callable[[Set[ReplicaId], Mapping[SliceId, str]], SliceIndex],
    ground: VacateContext,
    still: Collection[PlacementRequest],
) -> Packed:
    world, restart_costs, now_s = ground
    index = build_index(frozenset(), NOTHING_KEPT)
    packing = pack(wants, index, world.nodes.copies, restart_costs, now_s)
    going, kept, found = set[ReplicaId](), dict[SliceId, str](), list[_Emptying]()
    while len(found) < EMPTYING_MAX:
        one = _Search(index, *ground).next(packing, still)
        if one is None:
            break
        found.append(one)
        going |= {victim.replica for victim in one.victims}
        kept |= dict.fromkeys(
            one.parts, f"its GPU is being vacated for {one.missing.want.model}, which needs a whole GPU"
        )
        settled = {each.missing.want for each in found}
        index = build_index(going, kept)
        packing = pack([want for want in wants if want not in settled], index, world.nodes.copies, restart_costs, now_s)
    more = (Victim(victim.replica, victim.model, one.missing.want) for one in found for victim in one.victims)
    unmet = (*packing.unmet, *(one.missing for one in found))
    return Packed(packing._replace(victims=(*packing.victims, *more), unmet=unmet), index)


class _Search(NamedTuple):
    """Search after one run of the packer."""

    slice_index: SliceIndex
    world: World
    restart_costs: RestartCosts
    now_s: float

    def next(self, packing: PackResult, still: Collection[PlacementRequest]) -> _Emptying | None:
        """The GPU to vacate for the first request that is unplaced, or whose evictions elsewhere cost more."""
        others = self._others(packing)
        left = {
            one.want for one in packing.unmet if not one.promised and one.want.urgency.force > EvictionLevel.NONE
        } | others.keys()
        wants = sorted((want for want in left if want.kind.devices == 1 and want not in still), key=request_sort_key)
        found = group_parts_by_gpu(self.world, self.slice_index) if wants else {}
        for want in wants if found else ():
            taken = {*_before(want, packing)}
            open_ = (shelf for parts, shelf in found.items() if taken.isdisjoint(parts))
            ways = filter(None, (self._way(want, shelf) for shelf in open_))
            way = min(ways, key=lambda one: one.key, default=None)
            if way is not None and way.key[:COSTS] < others.get(want, (inf,)):
                whole = way.shelf.slice
                there = self._around(whole) if way.wide else way.shelf.incumbents
                missing = Unplaced(want, wait_reason(way, there), promised=True, slices=(whole.id,))
                return _Emptying(missing, way.victims, tuple(self.slice_index.slices_on(whole.device)))
        return None

    def _others(self, packing: PackResult) -> dict[PlacementRequest, Key]:
        """Cost of the evictions that the packer would make, by request."""
        going: dict[PlacementRequest, list[Occupant]] = {}
        for victim in packing.victims:
            on = (id for id in self.world.replicas[victim.replica].resources.slices if id in self.slice_index.shelves)
            there = (one for id in on for one in self.slice_index.shelf(id).incumbents if one.replica == victim.replica)
            going.setdefault(victim.want, []).extend([*there][:1])
        return {want: (EVICT, *eviction_cost(those, self.restart_costs)) for want, those in going.items()}

    def _way(self, want: PlacementRequest, shelf: Bin) -> EvictionOption | None:
        """The evictions that vacate the GPU for the request; None if it cannot be vacated now."""
        index, node = self.slice_index, shelf.slice.node
        if node_exclusion_reason(want.choice, shelf.slice):
            return None
        away = index.locality.lack(want.supplies, node)
        found = find_eviction_option(
            want.granted(want.kind.memory_bytes), shelf, self.restart_costs, self.now_s, away=away
        )
        host = index.hosts.get(node)
        if found is None or host is None:
            return found
        around = self._around(shelf.slice)
        with_host = fit_options_to_host(
            want, (found,), host, around, restart_costs=self.restart_costs, now_s=self.now_s
        )
        return None if with_host is None else with_host[0]

    def _around(self, of: Slice) -> list[Occupant]:
        """All replicas on its node."""
        return [one for id in self.slice_index.slices_of(of.node) for one in self.slice_index.shelf(id).incumbents]


def group_parts_by_gpu(world: World, index: SliceIndex) -> dict[tuple[SliceId, ...], Bin]:
    """For each GPU that is whole when its replicas are gone: map its parts to the whole GPU with these replicas."""
    found: dict[tuple[SliceId, ...], Bin] = {}
    for whole in list_rejoinable_gpus(world):
        parts = tuple(index.slices_on(whole.slice.device))
        shelves = [index.shelf(id) for id in parts]
        if not any(one.closed or one.slice.theirs or not one.slice.healthy for one in shelves):
            there = {one.replica: one for shelf in shelves for one in shelf.incumbents}
            found[parts] = _with(whole, [there[id] for id in sorted(there)])
    return found


def _before(want: PlacementRequest, packing: PackResult) -> Iterator[SliceId]:
    """Slices that requests preceding this one have or will get."""
    mine = request_sort_key(want)
    settled = [(one.want, one.slices) for one in packing.placements]
    settled += [(one.want, one.slices) for one in packing.unmet]
    return (id for other, slices in settled if request_sort_key(other) < mine for id in slices)


def _with(whole: Bin, there: Sequence[Occupant]) -> Bin:
    """Return the whole GPU with these occupants. It is free when no occupant is left; until then each occupant has an
    equal part.
    """
    all_, many = whole.free, max(1, len(there))
    each = ResourceAmount(all_.memory_bytes // many, all_.compute_percent // many)
    rest = all_.less(ResourceAmount(each.memory_bytes * (many - 1), each.compute_percent * (many - 1)))
    shelf = whole.copy()
    shelf.incumbents = tuple(one._replace(room=each if at else rest) for at, one in enumerate(there))
    shelf.free = NO_ROOM
    shelf.coming = NO_ROOM if there else all_
    for one in shelf.incumbents:
        shelf.coming = shelf.coming.plus(one.room) if one.leaving else shelf.coming
    return shelf
