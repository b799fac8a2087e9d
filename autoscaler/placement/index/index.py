"""Incremental search index over all slices, reused between packer calls; the caller reports what changed.

Maps slices to lanes of `NodeArrays` and back, and stores facts about nodes: admission by labels and taints, weights and
images, CPU and memory. Invariants: queries return the same results as a new index of the same bins, and a packer call
leaves the index unchanged.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from functools import cache
from typing import Final

import numpy as np

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.index.artifact_locality import ArtifactLocality
from autoscaler.placement.index.elastic_requests import ElasticBudget
from autoscaler.placement.index.eviction_costs import EvictionCostIndex
from autoscaler.placement.index.node_filter import Admitting
from autoscaler.placement.index.node_search import (
    LANES_MAX,
    PERCENT_MAX,
    Flags,
    LaneAssignment,
    NodeArrays,
    NodeCapacity,
    compute_request_usage,
)
from autoscaler.placement.index.request_encoding import EncodedRequest, encode_request
from autoscaler.placement.index.residual_waste_tables import Ints, Taught, build_untrained_estimate
from autoscaler.placement.index.spread_and_links import SpreadCounts, number_links
from autoscaler.placement.model.tenant_isolation import DomainOccupancy, TenantSet, domain_of, group_slices_by_domain
from autoscaler.placement.model.topology import name_device_link
from autoscaler.placement.model.types import Bin, NodeConstraints, Occupant, RequiredArtifacts, RestartCosts, Spread
from autoscaler.placement.unplaced_reasons import UnschedulableReasons
from autoscaler.state.resources import (
    BYTES_MAX,
    NO_ROOM,
    NOTHING,
    HostAmount,
    HostResources,
    Link,
    RequestShape,
    ResourceAmount,
)
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId

ASKS_MAX: Final = 4096
"""Request shapes whose encoding is cached."""
GONE_MAX: Final = 256
"""Removed nodes that are kept in case they reappear."""
ANY_SIZE: Final = dict.fromkeys(range(50, 1001, 50), 1.0)
"""Request sizes in thousandths of a device (milli) -> weights, assumed while demand is unknown."""


def _node_facts(slice_: Slice) -> tuple[object, ...]:
    """Return the labels and taints of its node."""
    return slice_.labels, slice_.labels_known, slice_.labels_coming, slice_.taints


@cache
def build_default_estimate() -> Taught:
    """Return the values of room that are used while demand is unknown."""
    return build_untrained_estimate(ANY_SIZE)


class SliceIndex:
    """Index of bins by slice. An invalid slice (no memory, or out of bounds) is left out, so nothing is placed there.

    `full` returns a `Bin` with its occupants if the given bins have none, since occupants only matter when there is no
    room. Raises ValueError if two slices have the same id.
    """

    def __init__(
        self,
        shelves: Iterable[Bin],
        hosts: Mapping[NodeId, HostResources] | None = None,
        taught: Taught | None = None,
        full: Callable[[SliceId], Bin] | None = None,
    ) -> None:
        ordered = sorted(
            (
                one for one in shelves
                if 0 < one.slice.memory_bytes <= BYTES_MAX and 0 <= one.slice.compute_percent <= PERCENT_MAX
            ), key=lambda shelf: shelf.slice.id,
        )  # fmt: skip
        self.shelves: dict[SliceId, Bin] = {shelf.slice.id: shelf for shelf in ordered}
        if len(self.shelves) < len(ordered):
            raise ValueError("two slices have the same id")
        self.full = full
        self.hosts = dict(hosts or {})
        self.budget: Callable[[], ElasticBudget] = ElasticBudget
        """Returns the budget of running elastic replicas; computed on demand."""
        self.yet: Callable[[Collection[ReplicaId]], Mapping[RequestShape, int]] = lambda _: {}
        """Returns the shapes that may still be requested, and how often, once these replicas are gone; on demand."""
        self.judges = taught is not None
        """Whether the value of room was learned; else all sizes are assumed to be equally frequent."""
        self.coming: set[SliceId] = set()
        """Slices with leaving replicas, and possibly some without them any more."""
        self.emptying: set[NodeId] = set()
        """Nodes with leaving replicas that hold CPU or memory."""
        self.held: Callable[[ReplicaId], Iterable[SliceId]] | None = None
        """Returns the slices of a replica; None: find them in `shelves`."""
        self.models: Collection[ModelName] | None = None
        """Models that have replicas; None: find them in `shelves`."""
        self._devices: dict[DeviceId, list[SliceId]] = {}
        by_node: dict[NodeId, list[Bin]] = {node: [] for node in self.hosts}
        for shelf in ordered:
            if len(by_node.setdefault(shelf.slice.node, [])) < LANES_MAX:
                by_node[shelf.slice.node].append(shelf)
            self._devices.setdefault(shelf.slice.device, []).append(shelf.slice.id)
        self.nodes: tuple[NodeId, ...] = tuple(sorted(by_node))
        self._ids = [tuple(shelf.slice.id for shelf in by_node[node]) for node in self.nodes]
        self._where = {
            id: LaneAssignment(node, (at,)) for node, ids in enumerate(self._ids) for at, id in enumerate(ids)
        }
        self.arrays = NodeArrays(
            [self._node(node, by_node[node]) for node in self.nodes], taught or build_default_estimate()
        )
        self._soon: Ints = np.full((2, len(self.nodes)), BYTES_MAX, np.int64)
        """[2, nodes]: CPU and memory left or coming; more than any request needs if unknown."""
        self._set_hosts()
        self._domains = group_slices_by_domain(shelf.slice for shelf in ordered)
        self._lane_at = numbers = {id: int(self.arrays.first[at.node]) + at.lanes[0] for id, at in self._where.items()}
        lanes = {domain: [numbers[id] for id in ids if id in numbers] for domain, ids in self._domains.items()}
        self.occupancy = DomainOccupancy(lanes, len(numbers))
        by_id = np.array([numbers[id] for id in self.shelves if id in numbers], np.int64)
        self.by_size: Ints = by_id[np.argsort(self.arrays.size_bytes[by_id], kind="stable")]
        """Lanes, the smallest first, equal ones in order of slice ids."""
        self.eviction_costs = EvictionCostIndex(len(numbers))
        self._settle(ordered)
        self._asks: dict[RequestShape, EncodedRequest] = {}
        self._may: dict[NodeConstraints, Flags | None] = {}
        self._crowds = SpreadCounts(self.nodes, self._said)
        self._teams: dict[Link, Ints] = {}
        self._admitting: Admitting | None = None
        self.why = UnschedulableReasons(self)
        self._gone: set[NodeId] = set()
        """Removed nodes without slices, which may reappear."""
        self.locality = ArtifactLocality(self.nodes, self._gone)

    def _set_hosts(self) -> None:
        for number, node in enumerate(self.nodes):
            if node in self.hosts:
                self._set_host(number, self.hosts[node])

    def _settle(self, shelves: Iterable[Bin]) -> None:
        for shelf in shelves:
            self.sync(shelf)
            self._meet(shelf)
            if shelf.slice.id in self._lane_at:
                self.eviction_costs.put(self._lane_at[shelf.slice.id], shelf)

    def _node(self, node: NodeId, shelves: list[Bin]) -> NodeCapacity:
        host = self.hosts.get(node, HostResources())
        links = tuple(shelf.slice.link for shelf in shelves)
        return NodeCapacity(node, tuple(shelf.lane for shelf in shelves), host.cores_milli, host.host_bytes, links)

    # --- changes ------------------------------------------------------------------------------------------------------

    def put(self, shelf: Bin) -> None:
        """Update a slice, whose size and kind must be the same as before. A slice that was left out is ignored."""
        before = self.shelves.get(shelf.slice.id)
        if before is None:
            return
        self.shelves[shelf.slice.id] = shelf
        self.models = None
        if _node_facts(before.slice) != _node_facts(shelf.slice):
            self._may.clear()
            self._crowds.forget()
            self._teams.clear()
            self._admitting = None
            self.why.forget()
        self.coming.discard(shelf.slice.id)
        self.sync(shelf)
        if before.trusts != shelf.trusts:
            self._meet(shelf)
        at = self.lane_at(shelf.slice.id)
        if at is not None:
            self.eviction_costs.put(at, shelf)

    def stir(self, ids: Iterable[SliceId]) -> None:
        """Mark the occupants of these slices as possibly changed, with the same amounts held."""
        self.eviction_costs.stir(self._lane_at[id] for id in ids if id in self._lane_at)

    def look(self, restart_costs: RestartCosts) -> None:
        """Bring `eviction_costs` up to date with the slices."""
        self.eviction_costs.look(lambda at: self.shelf(self.id_of(at)), restart_costs)

    def teach(self, taught: Taught | None) -> None:
        """Set the value of room from now on. None: unknown."""
        self.judges = taught is not None
        self.arrays.teach(taught or build_default_estimate())

    def admits(self, node: NodeId, host: HostResources | None) -> bool:
        """Whether a node can change to this without a new index. `host` None: the node is gone or unknown."""
        at = bisect_left(self.nodes, node)
        if at == len(self.nodes) or self.nodes[at] != node:
            return False
        of = self.arrays.nodes[at]
        if host is None:
            return not of.lanes and len(self._gone) < GONE_MAX
        return (of.cpu_milli, of.host_bytes) == (host.cores_milli, host.host_bytes)

    def put_host(self, node: NodeId, host: HostResources | None) -> None:
        """Update the host resources left on a node; `admits` must allow it."""
        at, there = bisect_left(self.nodes, node), host is not None
        if there == (node in self._gone):
            (self._gone.discard if there else self._gone.add)(node)
            self.arrays.set_there(at, there=there)
            self.locality.forget()
            self.why.forget()
        if host is not None:
            self.hosts[node] = host
            self._set_host(at, host)
        else:
            self.hosts.pop(node, None)
            self.emptying.discard(node)

    def suppose(self, node: NodeId, host: HostResources) -> None:
        """Like `put_host`, until the `NodeArrays` is rewound."""
        self.arrays.set_host(bisect_left(self.nodes, node), *host.left.most(NOTHING))

    def _set_host(self, number: int, host: HostResources) -> None:
        node = self.nodes[number]
        self._soon[:, number] = host.soon
        self.arrays.set_host(number, *host.left.most(NOTHING))
        if any(host.coming):
            self.emptying.add(node)
        else:
            self.emptying.discard(node)

    def sync(self, shelf: Bin) -> None:
        """Pass the free room of a `Bin` to the `NodeArrays`. The index itself only records whether room is coming."""
        if shelf.slice.id not in self._where:
            return
        shut = bool(shelf.closed) or not shelf.slice.healthy
        self._set_lane(shelf.slice, shelf.free, shut=shut, held=shelf.locked)
        if any(shelf.coming):
            self.coming.add(shelf.slice.id)

    def _set_lane(self, slice_: Slice, free: ResourceAmount, *, shut: bool, held: bool) -> None:
        """Update a lane. A slice that takes no more replicas counts as having nothing free."""
        node, (lane,) = self._where[slice_.id]
        full = slice_.holders_max and not free.places
        self.arrays.set(node, lane, NO_ROOM if full else free, shut=shut, held=held)

    def rewind(self) -> None:
        """Restore the state at the mark of the `NodeArrays`."""
        self.arrays.rewind()
        self.occupancy.forget()

    def _meet(self, shelf: Bin) -> None:
        """Update which tenants are in the slice's domain."""
        domain = domain_of(shelf.slice)
        if domain is not None:
            self.occupancy.put(domain, {one for id in self._domains[domain] for one in self.shelves[id].trusts})

    # --- queries ------------------------------------------------------------------------------------------------------

    def shelf(self, id: SliceId) -> Bin:
        """Return the `Bin` of a slice with its occupants."""
        return self.shelves[id] if self.full is None else self.full(id)

    def ask(self, kind: RequestShape) -> EncodedRequest:
        """Return the encoded request, cached."""
        if kind not in self._asks:
            if len(self._asks) >= ASKS_MAX:
                self._asks.clear()
            self._asks[kind] = encode_request(kind, self.arrays.lanes)
        return self._asks[kind]

    def slices(self, place: LaneAssignment) -> tuple[SliceId, ...]:
        """Return the slices of an assignment."""
        return tuple(self._ids[place.node][lane] for lane in place.lanes)

    def soon(self, trust: TenantSet) -> Set[SliceId]:
        """Return slices that a replica is leaving, or whose domain a conflicting tenant may be leaving."""
        if not trust or not self.coming:
            return self.coming
        left = {domain_of(self.shelves[id].slice) for id in self.coming}
        strange = (one for one in left if one and self.occupancy.among_strangers(one, trust))
        return self.coming.union(*(self._domains[one] for one in strange))

    def slices_on(self, device: DeviceId) -> list[SliceId]:
        """Return all slices of a device."""
        return self._devices[device]

    def together(self, slice_: Slice) -> Sequence[SliceId]:
        """Return all slices of its domain; without a domain, the slice alone."""
        domain = domain_of(slice_)
        return (slice_.id,) if domain is None else self._domains[domain]

    def choose(
        self,
        kind: RequestShape,
        choice: NodeConstraints,
        of: RequiredArtifacts,
        trust: TenantSet = (),
        spread: Spread | None = None,
    ) -> LaneAssignment | None:
        """Return the best place with room now. None: there is none."""
        lacks, free = self.locality.lacks(of), self.occupancy.free(trust) if trust else None
        crowd = None if spread is None or not spread.nodes else self._crowds.of(spread)
        must = self.teams(kind.link) if kind.link else None
        return self.arrays.choose(self.ask(kind), self.where_it_may(choice), lacks, free, crowd, must=must)

    def teams(self, link: Link) -> Ints:
        """[lanes]: number of the group connected by `link` or a better one, in order of nodes. -1: none is known."""
        if link is Link.NODE:
            return self.arrays.node_of
        if link not in self._teams:
            names = [[name_device_link(self.shelves[id].slice, link) for id in ids] for ids in self._ids]
            self._teams[link] = number_links(names, self.arrays.counts.tolist())
        return self._teams[link]

    def granted(self, kind: RequestShape, place: LaneAssignment) -> int:
        """Return how many bytes are best for an elastic request whose place was just chosen."""
        return self.arrays.granted(self.ask(kind), place)

    def unneeded(self, id: SliceId) -> int:
        """Return how many free bytes of a slice others are not expected to use; all of them if unknown."""
        place = self._where.get(id)
        if place is None or not self.judges:
            return BYTES_MAX
        return self.arrays.unneeded(place)

    def locked(self, kind: RequestShape, choice: NodeConstraints) -> Iterator[SliceId]:
        """Return slices with room now on which another replica is starting."""
        may, arrays = self.where_it_may(choice), self.arrays
        fits = arrays.fitting(self.ask(kind), held=True)
        fits = fits if may is None else fits & may[arrays.node_of]
        return (self.id_of(int(at)) for at in np.flatnonzero(fits))

    def possible(self, kind: RequestShape, choice: NodeConstraints) -> Flags:
        """[lanes]: those where it fits if they are empty."""
        may, ask, arrays = self.where_it_may(choice), self.ask(kind), self.arrays
        fits: Flags = (ask.memory[arrays.lane_of] <= arrays.size_bytes) & ~arrays.shut
        if kind.link:
            fits &= self.teams(kind.link) >= 0
        return fits if may is None else fits & may[arrays.node_of]

    # --- what-if changes, until the NodeArrays is rewound -------------------------------------------------------------

    def set_aside(self, ids: Iterable[SliceId]) -> None:
        """Exclude these slices."""
        for id in ids:
            shelf = self.shelves[id]
            self._set_lane(shelf.slice, shelf.free, shut=True, held=shelf.locked)

    def set_free(self, id: SliceId, left: ResourceAmount) -> None:
        """Open a slice with this much room."""
        self._set_lane(self.shelves[id].slice, left, shut=False, held=False)

    def gain(self, node: NodeId, amounts: HostAmount) -> None:
        """Add the host resources of a replica that leaves."""
        if node in self.hosts:
            at, arrays = bisect_left(self.nodes, node), self.arrays
            most = self.arrays.nodes[at]
            cpu_milli = min(most.cpu_milli, int(arrays.cpu[at]) + amounts.cpu_milli)
            arrays.set_host(at, cpu_milli, min(most.host_bytes, int(arrays.host_bytes[at]) + amounts.host_bytes))

    def take(self, kind: RequestShape, place: LaneAssignment) -> None:
        """Place a request. Raises ValueError if there is no room."""
        self.arrays.take(place, compute_request_usage(kind, self.arrays.nodes[place.node], place.lanes))

    def slices_of(self, node: NodeId) -> tuple[SliceId, ...]:
        """Return a node's slices; empty if the node is unknown."""
        at = bisect_left(self.nodes, node)
        return self._ids[at] if at < len(self.nodes) and self.nodes[at] == node else ()

    # --- nodes --------------------------------------------------------------------------------------------------------

    def is_here(self, model: ModelName) -> bool:
        """Whether a replica of that model is on any slice."""
        if self.models is None:
            self.models = {one.model for shelf in self.shelves.values() for one in shelf.incumbents}
        return model in self.models

    def number_of(self, node: NodeId) -> int:
        """Return the node's number in `nodes`."""
        return bisect_left(self.nodes, node)

    def short(self, need: HostAmount) -> Flags:
        """[nodes]: those with too little CPU or memory even once all leaving replicas are gone."""
        asked = [(at, amount) for at, amount in enumerate(need) if amount]
        found: Flags = np.any([self._soon[at] < amount for at, amount in asked], axis=0)
        return found

    def held_by(self, victim: Occupant, chosen: Sequence[SliceId]) -> Iterable[SliceId]:
        """Return slices that include all slices of a victim. For a victim with one slice these are `chosen`, which must
        contain it; the caller ignores the others.
        """
        if not victim.others:
            return chosen
        if self.held is not None:
            return (id for id in self.held(victim.replica) if id in self.shelves)
        return (id for id, one in self.shelves.items() if any(i.replica == victim.replica for i in one.incumbents))

    def id_of(self, at: int) -> SliceId:
        """Return the slice of a lane, by its number in the `NodeArrays`."""
        node = int(self.arrays.node_of[at])
        return self._ids[node][at - int(self.arrays.first[node])]

    def lane_at(self, id: SliceId) -> int | None:
        """Return the lane of a slice. None: the slice is left out."""
        return self._lane_at.get(id)

    def where_it_may(self, choice: NodeConstraints) -> Flags | None:
        """[nodes]: where a request with these constraints may be placed. None: anywhere."""
        if choice not in self._may:
            if len(self._may) >= ASKS_MAX:
                self._may.clear()
            if self._admitting is None:
                lanes = [self.shelves[id].slice for ids in self._ids for id in ids]
                self._admitting = Admitting(lanes, self.arrays.node_of, self.nodes)
            may = self._admitting.nodes(choice)
            self._may[choice] = None if may.all() else may
        return self._may[choice]

    def _said(self, label: str) -> Iterator[str]:
        """Yield each node's value of a label; empty: it has none."""
        return (self.shelves[ids[0]].slice.labels.get(label, "") if ids else "" for ids in self._ids)
