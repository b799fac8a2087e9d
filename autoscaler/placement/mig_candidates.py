"""Candidates for MIG repartitioning: the nodes, their possible profiles as bins, and which requests fit them. Pure.

Checks whether a profile is large enough, whether the node is free, and whether it can be repartitioned at all, now or
later. `autoscaler.rearrange.mig_repartition` orders the repartitioning and reports it for unplaced requests.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import zip_longest
from math import inf
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.placement.model.bin_builder import BinContext, build_bare_bin, build_bin_context, slices_by_node
from autoscaler.placement.model.predicates import has_matching_labels, rejection_reason
from autoscaler.placement.model.prices import Prices
from autoscaler.placement.model.types import Bin, PlacementRequest
from autoscaler.queries.mig_status import (
    RepartitionStage,
    RepartitionStatus,
    count_shown_profiles,
    determine_repartition_status,
)
from autoscaler.slicing.mig import build_mig_slice
from autoscaler.slicing.mig_geometry import Geometry, MigProfile, geometry_of
from autoscaler.state.mig import MigNode
from autoscaler.state.resources import NOTHING, HostAmount, HostResources, RequestShape, ResourceAmount
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId, World


class RepartitionCandidate(NamedTuple):
    """A node that may be repartitioned."""

    seen: MigNode
    geometry: Geometry
    standing: RepartitionStatus
    there: Counter[str]
    idle: bool
    host: HostResources | None
    """Its host resources without those that others' pods use. All of them are free while it is idle. None: unknown."""

    @property
    def size(self) -> HostAmount | None:
        """Its host resources as the packer counts them. None: unknown."""
        return None if self.host is None else HostAmount(self.host.cores_milli, self.host.host_bytes)

    @property
    def plain(self) -> list[MigProfile]:
        """Its profiles, the smallest first, without those with media engines, which a GPU has only once."""
        plain = (one for one in self.geometry.profiles if not one.media)
        return sorted(plain, key=lambda one: (one.size, one.compute))

    @property
    def may_ever(self) -> bool:
        """Whether it can be repartitioned, now or later."""
        return self.standing.stage is not RepartitionStage.ABANDONED and self.seen.strategy != "single"

    @property
    def rank(self) -> tuple[bool, bool, bool]:
        """Sort key: the lower, the sooner it could have a slice for a request."""
        return not self.may_ever, self.standing.stage is not RepartitionStage.IN_PROGRESS, not self.idle


def list_mig_candidates(world: World) -> tuple[Bin, ...]:
    """Return a `Bin` for each profile that a repartitioned node could have, once for all equivalent nodes.
    Repartitioning in progress counts as not failed, even on its last attempt.
    """
    if not world.nodes.cuttable:
        return ()
    look = Sites(world, -inf)
    alike = dict[object, RepartitionCandidate]()
    for node in look.all:
        if node.may_ever:
            labels = tuple(sorted(node.seen.labels.items()))
            alike.setdefault((node.seen.product, labels, node.seen.taints, node.size), node)
    return tuple(look.shelf(node, one.name) for node in alike.values() for one in node.plain)


class Sites:
    """Candidates of one world. `taken`: slices that are being assigned now."""

    def __init__(self, world: World, now_s: float, taken: Collection[SliceId] = ()) -> None:
        self.world, self.now_s = world, now_s
        self._prices = Prices(world.settings.prices)
        self._cuts: dict[tuple[str, str], Slice] = {}
        self._shelves: dict[tuple[str, str], Bin] = {}
        self._held: dict[tuple[RequestShape, str, HostAmount | None], tuple[str, ...]] = {}
        self._free: dict[str, list[Bin]] = {}
        busy, there = _busy(world, taken), count_shown_profiles(world)
        known = (
            RepartitionCandidate(
                seen,
                geometry,
                determine_repartition_status(world, seen, there[name], now_s),
                there[name],
                name not in busy,
                world.nodes.hosts.get(NodeId(name)),
            )
            for name, seen in sorted(world.nodes.cuttable.items())
            if (geometry := geometry_of(seen.product)) is not None
        )
        self.all = sorted(known, key=lambda node: node.rank)
        self._alike: dict[tuple[str, HostAmount | None], list[RepartitionCandidate]] = {}
        for node in self.all:
            self._alike.setdefault((node.seen.product, node.size), []).append(node)

    def shelf(self, node: RepartitionCandidate, profile: str) -> Bin:
        """Return an empty slice of that profile."""
        seen = node.seen
        if (seen.name, profile) not in self._shelves:
            if (seen.product, profile) not in self._cuts:
                self._cuts[seen.product, profile] = build_mig_slice(NodeId(seen.name), seen.product, profile)
            made, id = self._cuts[seen.product, profile], SliceId(f"{seen.name}/to-be-cut-{profile}")
            labelled = replace(
                made, id=id, device=DeviceId(id), node=NodeId(seen.name), labels=seen.labels, labels_known=True,
                taints=seen.taints,
            )  # fmt: skip
            self._shelves[seen.name, profile] = Bin(
                slice=labelled, whole=not made.device_bytes, incumbents=(), coming=ResourceAmount(0, 0), locked=False,
                free=ResourceAmount(made.memory_bytes, made.compute_percent), price=self._prices.of(labelled),
            )  # fmt: skip
        return self._shelves[seen.name, profile]

    def nearest(self, wants: Iterable[PlacementRequest], many: int) -> list[RepartitionCandidate]:
        """Select up to `many` nodes: the best one for each request, then the second best, and so on."""
        unlike = {(want.kind, want.choice): want for want in wants}
        found = dict[str, RepartitionCandidate]()
        for turn in zip_longest(*(self._where(want) for want in unlike.values())):
            for node in turn:
                if node is not None and len(found) < many:
                    found[node.seen.name] = node
            if len(found) >= many:
                break
        return sorted(found.values(), key=lambda node: (node.rank, node.seen.name))

    def _where(self, want: PlacementRequest) -> Iterator[RepartitionCandidate]:
        """Yield the nodes on which the request could be placed, by rank."""
        alike = [many for many in self._alike.values() if self._holding(want.least.kind, many[0])]
        for node in heapq.merge(*alike, key=lambda node: (node.rank, node.seen.name)):
            if self.fitting(want, node):
                yield node

    def _holding(self, kind: RequestShape, node: RepartitionCandidate) -> tuple[str, ...]:
        """Return the profiles of such nodes that are large enough, smallest first; none if the host is too small."""
        key = kind, node.seen.product, node.size
        if key not in self._held:
            need, size = HostAmount(kind.cpu_milli, kind.host_bytes), node.size
            fits = kind.rank(node.seen.product) is not None and (size is None or size.lack(need) == NOTHING)
            names = [one.name for one in node.plain] if fits else []
            self._held[key] = tuple(one for one in names if kind.takes(self.shelf(node, one).lane) is not None)
        return self._held[key]

    def fitting(
        self, want: PlacementRequest, node: RepartitionCandidate, host: HostResources | None = None
    ) -> list[str]:
        """Return the profiles of a node that the request fits: first with its full memory, smallest profile first, then
        with its minimum. `host`: the free host resources of the node, if they count.
        """
        found = dict[str, None]()
        for one in dict.fromkeys((want, want.least)):
            names = self._holding(one.kind, node)
            found |= {
                name: None for name in names if not rejection_reason(one, self.shelf(node, name), self.now_s, {}, host)
            }
        return list(found)

    @cached_property
    def _there(self) -> tuple[BinContext, Mapping[NodeId, Sequence[SliceId]]]:
        return build_bin_context(self.world, self.now_s), slices_by_node(self.world)

    def shows(self, want: PlacementRequest, node: RepartitionCandidate) -> bool:
        """Whether an idle node already shows a slice that fits the request, which then lacks something else."""
        name = node.seen.name
        if name not in self._free:
            look, slices = self._there
            found = (build_bare_bin(look, self.world.nodes.slices[id]) for id in slices.get(NodeId(name), ()))
            self._free[name] = list(
                {(one.lane, one.free, one.closed, one.slice.healthy): one for one in found}.values()
            )
        return any(not rejection_reason(want.least, shelf, self.now_s, {}) for shelf in self._free[name])

    def some_day(self, want: PlacementRequest) -> tuple[RepartitionCandidate, Slice] | None:
        """Return a node where it fits once the node is free and open, and a slice there. None: there is none."""
        for many in self._alike.values():
            holding = self._holding(want.least.kind, many[0])
            for node in many if holding else ():
                slice_ = self.shelf(node, holding[0]).slice
                if node.may_ever and has_matching_labels(want.choice.selector, slice_):
                    return node, slice_
        return None


def _busy(world: World, taken: Collection[SliceId]) -> set[str]:
    """Return nodes on which anything is in use, or about to be."""
    held = {id for replica in world.replicas.values() for id in replica.resources.slices} | {*taken}
    ours = {world.nodes.slices[id].node if id in world.nodes.slices else id.partition("/")[0] for id in held}
    return ours | {counted.partition(" ")[0] for counted, many in world.nodes.others.items() if many > 0}
