"""Where each PlacementRequest of a batch might be, and how it was there before the batch: what the search for spared
victims is on.

Owns the choice of the Slices that are looked at (those that the batch is on, and some with room), which of them are
alike, and the words of that search. It puts nobody anywhere; `autoscaler.placement.minimal_eviction` does.
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
"""So many PlacementRequests may change places, those that have room promised first; the others stay where they are."""
PLACES_MAX: Final = 16
"""Beside the Slices that the batch is on, so many are looked at for each PlacementRequest, the tightest first."""


class Assigned(NamedTuple):
    """A PlacementRequest that has room by now."""

    want: PlacementRequest
    """As it was granted."""
    slices: tuple[SliceId, ...]
    now: bool
    """It is placed; else room is promised to it."""
    node: NodeId | None = None
    """Whose CPU and memory it takes, where it is known what that has."""


class Assignment(NamedTuple):
    """Where it goes, and who goes for it."""

    slices: tuple[SliceId, ...]
    victims: tuple[Occupant, ...] = ()


class Evictee(NamedTuple):
    """A victim, and on which Slices it is."""

    victim: Occupant
    slices: tuple[SliceId, ...]


class CandidateSlot(NamedTuple):
    """One way to have one Slice."""

    at: int
    room: ResourceAmount


class MinimalEvictionInput:
    """The Slices that are looked at, as they were before the batch, and where each PlacementRequest might be."""

    def __init__(self, held: Sequence[Assigned], victims: Sequence[Evictee], yard: SliceIndex, now_s: float) -> None:
        self.held, self.yard, self.now_s = held, yard, now_s
        self._strangers: dict[tuple[TenantSet, int], tuple[Occupant, ...]] = {}
        promised = [at for at, one in enumerate(held) if not one.now]
        order = [*promised, *(at for at, one in enumerate(held) if one.now)]
        self.movers = [at for at in order if held[at].slices][:MOVERS_MAX]
        self._touched = {id for one in held for id in one.slices} | {id for one in victims for id in one.slices}
        may = [self._ids(one) if at in self.movers else [*one.slices] for at, one in enumerate(held)]
        self.ids = [*dict.fromkeys([*(id for ids in may for id in ids), *sorted(self._touched)])]
        self.number = {id: at for at, id in enumerate(self.ids)}
        self.shelves = [yard.shelf(id) for id in self.ids]
        self.domains = [domain_of(one.slice) for one in self.shelves]
        self.spots = [self._spots(one, ids) for one, ids in zip(held, may, strict=True)]
        nodes = {one.slice.node for one in self.shelves}  # on others is nobody who could be in anybody's way
        self.hosts = {node: yard.hosts[node] for node in nodes if node in yard.hosts}
        self.alike = self._alike(victims)
        there: dict[NodeId, list[int]] = {}
        for at, shelf in enumerate(self.shelves):
            there.setdefault(shelf.slice.node, []).append(self.alike[at])
        known: dict[Hashable, int] = {}
        self.nodes_alike = {
            node: known.setdefault((self.hosts.get(node), *sorted(those)), len(known)) for node, those in there.items()
        }
        """Of each node the same number as of others that are as it is."""

    def _ids(self, one: Assigned) -> list[SliceId]:
        """Where it is first, then where the batch is, then the tightest that have room free or coming."""
        want, yard, stock = one.want, self.yard, self.yard.stock
        ask, soon = yard.ask(want.kind), yard.roster.soon
        could = yard.possible(want.kind, want.choice)
        memory = ask.memory[stock.lane_of]
        fits = could & (soon[0] >= memory) & (soon[1] >= ask.compute[stock.lane_of]) & (soon[2] >= yard.roster.few)
        if one.now:
            fits &= (stock.left_bytes >= memory) & ~stock.held
        lanes = {id: at for id in sorted(self._touched) if (at := yard.lane_at(id)) is not None and could[at]}
        fits[[*lanes.values()]] = False
        more = np.flatnonzero(fits)
        if want.devices == 1:
            more = more[np.argsort(soon[0, more] - memory[more], kind="stable")]
        else:
            teams = yard.teams(want.link)
            many = np.bincount(teams[[*more, *lanes.values()]], minlength=len(fits))
            more = more[many[teams[more]] >= want.devices]
        return [*dict.fromkeys((*one.slices, *lanes, *map(yard.id_of, more[:PLACES_MAX].tolist())))]

    def _spots(self, one: Assigned, ids: Iterable[SliceId]) -> list[CandidateSlot]:
        rooms = ((self.number[id], find_required_amount(one.want, self.shelves[self.number[id]])) for id in ids)
        return [CandidateSlot(at, room) for at, room in rooms if room is not None and self._is_open(one, at)]

    def _is_open(self, one: Assigned, at: int) -> bool:
        """Whether nobody who stays and no start is in its way there."""
        if one.now:
            strangers = self.yard.company.among_strangers(self.domains[at], one.want.trust)
            return not strangers and not self.shelves[at].locked
        return not any(stranger.stuck for stranger in self.strangers(one.want, at))

    def strangers(self, want: PlacementRequest, at: int) -> tuple[Occupant, ...]:
        """Who has to be gone from its Domain before the PlacementRequest is there."""
        if not want.trust or not self.yard.company.among_strangers(self.domains[at], want.trust):
            return ()
        key = want.trust, at
        if key not in self._strangers:
            there = (i for id in self.yard.together(self.shelves[at].slice) for i in self.yard.shelf(id).incumbents)
            self._strangers[key] = tuple(
                {i.replica: i for i in there if has_tenant_conflict(want.trust, i.trust)}.values()
            )
        return self._strangers[key]

    def seat(self, number: int, spots: Sequence[CandidateSlot]) -> NodeId | None:
        """Whose CPU and memory it takes there, where that is known."""
        node = self.shelves[spots[0].at].slice.node if spots else self.held[number].node
        return node if node in self.hosts else None

    def node_of(self, one: Evictee) -> NodeId:
        """Where that victim is."""
        return self.shelves[self.number[one.slices[0]]].slice.node

    def _alike(self, victims: Sequence[Evictee]) -> list[int]:
        """Of each Slice the same number as of others that do as well as it, if their node does."""
        odd = {id for one in victims for id in one.slices}
        members: dict[int, list[int]] = {}
        for number, spots in enumerate(self.spots):
            for spot in spots:
                members.setdefault(spot.at, []).append(number)
        known: dict[Hashable, int] = {}
        found: list[int] = []
        for at, shelf in enumerate(self.shelves):
            alone = len(self.yard.beside(shelf.slice.device)) == 1 and shelf.slice.id not in odd
            like: Hashable = at
            if alone and not self.domains[at]:
                link = name_device_link(shelf.slice, Link.PCIE_ROOT)
                like = (*members.get(at, ()), shelf.lane, shelf.free, shelf.coming, link)
            found.append(known.setdefault(like, len(known)))
        return found
