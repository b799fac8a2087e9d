"""Input of the search for a smaller victim set: where each request of a batch could be placed, as before the batch.

Selects the slices to consider (those that the batch uses, and some others with room) and groups equivalent ones.
`autoscaler.placement.minimal_eviction` performs the search.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.predicates import find_required_amount
from autoscaler.placement.model.tenant_isolation import TenantSet, domain_of, has_tenant_conflict
from autoscaler.placement.model.topology import name_device_link
from autoscaler.placement.model.types import Occupant, PlacementRequest
from autoscaler.state.resources import Link, ResourceAmount
from autoscaler.state.world import NodeId, SliceId

MOVERS_MAX: Final = 24
"""Maximum number of requests that may be moved, those with promised room first; the others keep their slices."""
PLACES_MAX: Final = 16
"""Maximum number of further slices per request, in addition to those that the batch uses, the tightest first."""


class Assigned(NamedTuple):
    """A request that has room."""

    want: PlacementRequest
    """The request as it was granted."""
    slices: tuple[SliceId, ...]
    now: bool
    """Whether it is placed; else room is promised to it."""
    node: NodeId | None = None
    """The node whose CPU and memory it takes, if the capacity of that is known."""


class Assignment(NamedTuple):
    """The slices that a request gets, and the victims that it evicts."""

    slices: tuple[SliceId, ...]
    victims: tuple[Occupant, ...] = ()


class Evictee(NamedTuple):
    """A victim and its slices."""

    victim: Occupant
    slices: tuple[SliceId, ...]


class CandidateSlot(NamedTuple):
    """A slice, by its number, and the amount that a request takes of it."""

    at: int
    room: ResourceAmount


class MinimalEvictionInput:
    """The slices considered, as they were before the batch, and the candidate slots of each request."""

    def __init__(self, held: Sequence[Assigned], victims: Sequence[Evictee], index: SliceIndex, now_s: float) -> None:
        self.held, self.index, self.now_s = held, index, now_s
        self._strangers: dict[tuple[TenantSet, int], tuple[Occupant, ...]] = {}
        promised = [at for at, one in enumerate(held) if not one.now]
        order = [*promised, *(at for at, one in enumerate(held) if one.now)]
        self.movers = [at for at in order if held[at].slices][:MOVERS_MAX]
        self._touched = {id for one in held for id in one.slices} | {id for one in victims for id in one.slices}
        may = [self._ids(one) if at in self.movers else [*one.slices] for at, one in enumerate(held)]
        self.ids = [*dict.fromkeys([*(id for ids in may for id in ids), *sorted(self._touched)])]
        self.number = {id: at for at, id in enumerate(self.ids)}
        self.shelves = [index.shelf(id) for id in self.ids]
        self.domains = [domain_of(one.slice) for one in self.shelves]
        self.spots = [self._spots(one, ids) for one, ids in zip(held, may, strict=True)]
        nodes = {one.slice.node for one in self.shelves}  # replicas on other nodes conflict with none of these requests
        self.hosts = {node: index.hosts[node] for node in nodes if node in index.hosts}
        self.alike = self._alike(victims)
        there: dict[NodeId, list[int]] = {}
        for at, shelf in enumerate(self.shelves):
            there.setdefault(shelf.slice.node, []).append(self.alike[at])
        known: dict[Hashable, int] = {}
        self.nodes_alike = {
            node: known.setdefault((self.hosts.get(node), *sorted(those)), len(known)) for node, those in there.items()
        }
        """Node -> a number that equivalent nodes share."""

    def _ids(self, one: Assigned) -> list[SliceId]:
        """List its current slices, then the slices of the batch, then the tightest with room free or coming."""
        want, index, arrays = one.want, self.index, self.index.arrays
        ask, soon = index.ask(want.kind), index.eviction_costs.soon
        could = index.possible(want.kind, want.choice)
        memory = ask.memory[arrays.lane_of]
        fits = (
            could
            & (soon[0] >= memory)
            & (soon[1] >= ask.compute[arrays.lane_of])
            & (soon[2] >= index.eviction_costs.few)
        )
        if one.now:
            fits &= (arrays.left_bytes >= memory) & ~arrays.held
        lanes = {id: at for id in sorted(self._touched) if (at := index.lane_at(id)) is not None and could[at]}
        fits[[*lanes.values()]] = False
        more = np.flatnonzero(fits)
        if want.kind.devices == 1:
            more = more[np.argsort(soon[0, more] - memory[more], kind="stable")]
        else:
            teams = index.teams(want.kind.link)
            many = np.bincount(teams[[*more, *lanes.values()]], minlength=len(fits))
            more = more[many[teams[more]] >= want.kind.devices]
        return [*dict.fromkeys((*one.slices, *lanes, *map(index.id_of, more[:PLACES_MAX].tolist())))]

    def _spots(self, one: Assigned, ids: Iterable[SliceId]) -> list[CandidateSlot]:
        rooms = ((self.number[id], find_required_amount(one.want, self.shelves[self.number[id]])) for id in ids)
        return [CandidateSlot(at, room) for at, room in rooms if room is not None and self._is_open(one, at)]

    def _is_open(self, one: Assigned, at: int) -> bool:
        """Whether neither a replica that stays nor a start keeps the request off that slice."""
        if one.now:
            strangers = self.index.occupancy.among_strangers(self.domains[at], one.want.trust)
            return not strangers and not self.shelves[at].locked
        return not any(stranger.stuck for stranger in self.strangers(one.want, at))

    def strangers(self, want: PlacementRequest, at: int) -> tuple[Occupant, ...]:
        """Return the replicas that must leave the slice's domain before the request can start there."""
        if not want.trust or not self.index.occupancy.among_strangers(self.domains[at], want.trust):
            return ()
        key = want.trust, at
        if key not in self._strangers:
            there = (i for id in self.index.together(self.shelves[at].slice) for i in self.index.shelf(id).incumbents)
            self._strangers[key] = tuple(
                {i.replica: i for i in there if has_tenant_conflict(want.trust, i.trust)}.values()
            )
        return self._strangers[key]

    def seat(self, number: int, spots: Sequence[CandidateSlot]) -> NodeId | None:
        """Return the node whose CPU and memory the request takes there, if its capacity is known."""
        node = self.shelves[spots[0].at].slice.node if spots else self.held[number].node
        return node if node in self.hosts else None

    def node_of(self, one: Evictee) -> NodeId:
        """Return the victim's node."""
        return self.shelves[self.number[one.slices[0]]].slice.node

    def _alike(self, victims: Sequence[Evictee]) -> list[int]:
        """Number the slices such that equivalent ones (given equivalent nodes) share a number."""
        odd = {id for one in victims for id in one.slices}
        members: dict[int, list[int]] = {}
        for number, spots in enumerate(self.spots):
            for spot in spots:
                members.setdefault(spot.at, []).append(number)
        known: dict[Hashable, int] = {}
        found: list[int] = []
        for at, shelf in enumerate(self.shelves):
            alone = len(self.index.slices_on(shelf.slice.device)) == 1 and shelf.slice.id not in odd
            like: Hashable = at
            if alone and not self.domains[at]:
                link = name_device_link(shelf.slice, Link.PCIE_ROOT)
                like = (*members.get(at, ()), shelf.lane, shelf.free, shelf.coming, link)
            found.append(known.setdefault(like, len(known)))
        return found
