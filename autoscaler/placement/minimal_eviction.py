"""Exact search for a smaller victim set: which victims of a batch can stay if its requests are placed differently.

For each victim the search tests, on a limited number of slices (those that the batch uses, and some others with room),
whether all requests that have room can be placed without it. Each request must keep its outcome: placed now, or
promised room that is free, coming, or held by victims that it or an earlier request there may evict. The slice index
supplies the state before the batch. If the search reaches its bounds, the victim is evicted.
`autoscaler.placement.packer` applies the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Final, NamedTuple

import numpy as np

from autoscaler.contract import ReplicaId
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.predicates import can_evict, find_required_amount
from autoscaler.placement.model.tenant_isolation import Domain, TenantSet, domain_of, has_tenant_conflict
from autoscaler.placement.model.topology import Team, name_device_link, team_of
from autoscaler.placement.model.types import Occupant, PlacementRequest
from autoscaler.state.resources import Link, ResourceAmount
from autoscaler.state.world import DeviceId, NodeId, SliceId

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


STEPS_MAX: Final = 2000
"""Placement attempts per batch; each remaining victim gets an equal share of the remaining attempts."""


def find_fewer_victims(
    held: Sequence[Assigned], victims: Sequence[Evictee], index: SliceIndex, now_s: float
) -> tuple[Assignment, ...] | None:
    """Return an assignment for each of `held` that spares victims. None: none was found within the search bounds.
    `held` is in order of precedence; `victims` has the most expensive first.
    """
    inputs = MinimalEvictionInput(held, victims, index, now_s)
    going, found, left = {one.victim.replica: one for one in victims}, None, STEPS_MAX
    for at, one in enumerate(victims):
        if one.victim.replica not in going:
            continue
        others = [other for id, other in going.items() if id != one.victim.replica]
        search = _Search(inputs, others, left // (len(victims) - at))
        puts = search.run()
        left -= search.steps
        if puts is not None:
            found = puts
            stay = {victim.replica for put in puts for victim in put.victims}
            going = {id: other for id, other in going.items() if id in stay}
    return found


class _Search:
    """Tests whether all requests fit if only these victims are evicted. Places the largest requests first, and each at
    its old place if possible.
    """

    def __init__(self, inputs: MinimalEvictionInput, victims: Sequence[Evictee], steps_max: int) -> None:
        self._inputs, self._victims = inputs, victims
        self.steps, self._steps_max = 0, steps_max
        self._may_go = {one.victim.replica for one in victims}
        self._rooms = _rooms(inputs, victims)
        self._now = [one.free for one in inputs.shelves]
        """Room left per slice for requests placed now; `_left`: for all requests, once all victims are gone."""
        self._left = [one.free.plus(one.coming) for one in inputs.shelves]
        for at, rooms in enumerate(self._rooms):
            for room in rooms.values():
                self._left[at] = self._left[at].plus(room)
        self._hosts_now = {node: host.left for node, host in inputs.hosts.items()}
        self._hosts = {node: host.soon for node, host in inputs.hosts.items()}
        for one in victims:
            node = inputs.node_of(one)
            if node in self._hosts:
                self._hosts[node] = self._hosts[node].plus(one.victim.host_usage)
        self._starts: set[DeviceId] = set()
        self._guests: dict[Domain, list[TenantSet]] = {}
        self._many: dict[NodeId, int] = {}
        """Number of requests assigned per node."""
        self._at: dict[int, tuple[CandidateSlot, ...]] = {}
        """Assigned slots by number of the request."""
        self._failed: set[Hashable] = set()
        self._room_bytes = 0
        """Bytes left on all slices that could hold any request still to be assigned."""
        self._whole = 0
        """How often all requests had a slot, regardless of who may evict whom."""

    def run(self) -> tuple[Assignment, ...] | None:
        """Return the assignments. None: none was found within the search bounds."""
        inputs = self._inputs
        for number, one in enumerate(inputs.held):
            if number in inputs.movers:
                continue
            spots = tuple(inputs.spots[number])
            if len(spots) < one.want.kind.devices or not self._fit(number, spots):
                return None
            self._take(number, spots)
        sizes = {number: _size(inputs.held[number].want, inputs.spots[number]) for number in inputs.movers}
        self._order = sorted(inputs.movers, key=lambda number: (-sizes[number], number))
        self._needs = [sum(sizes[number] for number in self._order[turn:]) for turn in range(len(self._order))]
        useful = {spot.at for number in inputs.movers for spot in inputs.spots[number]}
        self._room_bytes = sum(self._left[at].memory_bytes for at in useful)
        return self._place(0)

    def _place(self, turn: int) -> tuple[Assignment, ...] | None:
        if turn == len(self._order):
            self._whole += 1
            return self._in_turn()
        if self._room_bytes < self._needs[turn]:
            return None
        state = self._state(turn)
        if state in self._failed:
            return None
        whole, number = self._whole, self._order[turn]
        for spots in self._ways(number):
            self._take(number, spots)
            found = self._place(turn + 1)
            if found is not None:
                return found
            self._give_back(number, spots)
        if whole == self._whole:
            self._failed.add(state)
        return None

    def _state(self, turn: int) -> Hashable:
        """Return a key of everything that decides whether the remaining requests can be placed."""
        taken = [(number, self._at[number]) for number in self._order[:turn]]
        left = frozenset((spot.at, self._left[spot.at], self._now[spot.at]) for _, spots in taken for spot in spots)
        nodes = {self._inputs.seat(number, spots) for number, spots in taken} - {None}
        hosts = frozenset((node, self._hosts[node], self._hosts_now[node]) for node in nodes if node is not None)
        guests = frozenset((domain, frozenset(there)) for domain, there in self._guests.items())
        return turn, left, hosts, guests

    # --- where one may be ---------------------------------------------------------------------------------------------

    def _ways(self, number: int) -> Iterator[tuple[CandidateSlot, ...]]:
        """Yield the slot combinations to try, one of each group of equivalent ones."""
        inputs, devices, tried = self._inputs, self._inputs.held[number].want.kind.devices, set[Hashable]()
        by_team: dict[Team, list[CandidateSlot]] = {}
        for spot in inputs.spots[number]:
            if self._fits(number, spot):
                one = inputs.shelves[spot.at].slice
                by_team.setdefault(team_of(one, inputs.held[number].want.kind.link), []).append(spot)
        for spots in by_team.values():
            for some in combinations(spots, devices):
                if self.steps >= self._steps_max:
                    return
                self.steps += 1
                like = self._like(some[0]) if devices == 1 else frozenset(Counter(map(self._like, some)).items())
                if like not in tried and self._has_host(number, some):
                    tried.add(like)
                    yield some

    def _like(self, spot: CandidateSlot) -> Hashable:
        """Return a key that is equal for equally suitable slices."""
        inputs, at = self._inputs, spot.at
        node = inputs.shelves[at].slice.node
        there: Hashable = node if self._many.get(node) else inputs.nodes_alike[node]
        return there, inputs.alike[at], self._left[at], self._now[at]  # a start here uses some of `_now`

    def _fit(self, number: int, spots: Sequence[CandidateSlot]) -> bool:
        return all(self._fits(number, spot) for spot in spots) and self._has_host(number, spots)

    def _fits(self, number: int, spot: CandidateSlot) -> bool:
        inputs, one = self._inputs, self._inputs.held[number]
        if not self._left[spot.at].holds(spot.room):
            return False
        if one.now and (
            not self._now[spot.at].holds(spot.room) or inputs.shelves[spot.at].slice.device in self._starts
        ):
            return False
        domain, trust = inputs.domains[spot.at], one.want.trust
        if domain is None or not trust:
            return True
        gone = all(i.replica in self._may_go or i.leaving for i in inputs.strangers(one.want, spot.at))
        return gone and not any(has_tenant_conflict(trust, other) for other in self._guests.get(domain, ()))

    def _has_host(self, number: int, spots: Sequence[CandidateSlot]) -> bool:
        one, node = self._inputs.held[number], self._inputs.seat(number, spots)
        if node is None:
            return True
        return self._hosts[node].holds(one.want.kind.host_request) and (
            not one.now or self._hosts_now[node].holds(one.want.kind.host_request)
        )

    def _take(self, number: int, spots: tuple[CandidateSlot, ...]) -> None:
        one = self._inputs.held[number]
        self._at[number] = spots
        for at, room in spots:
            self._left[at] = self._left[at].less(room)
            self._room_bytes -= room.memory_bytes
            if one.now:
                self._now[at] = self._now[at].less(room)
        self._change(number, spots, 1)

    def _give_back(self, number: int, spots: tuple[CandidateSlot, ...]) -> None:
        one = self._inputs.held[number]
        del self._at[number]
        for at, room in spots:
            self._left[at] = self._left[at].plus(room)
            self._room_bytes += room.memory_bytes
            if one.now:
                self._now[at] = self._now[at].plus(room)
        self._change(number, spots, -1)

    def _change(self, number: int, spots: tuple[CandidateSlot, ...], sign: int) -> None:
        """Add what the request takes of devices, domains and its node, or remove it (`sign` is -1)."""
        inputs, one = self._inputs, self._inputs.held[number]
        for at, _ in spots:
            slice_, domain = inputs.shelves[at].slice, inputs.domains[at]
            self._many[slice_.node] = self._many.get(slice_.node, 0) + sign
            if one.now and sign > 0:
                self._starts.add(slice_.device)
            elif one.now:
                self._starts.discard(slice_.device)
            if domain is not None and one.want.trust and sign > 0:
                self._guests.setdefault(domain, []).append(one.want.trust)
            elif domain is not None and one.want.trust:
                self._guests[domain].remove(one.want.trust)
        node = inputs.seat(number, spots)
        if node is not None:
            for hosts in (self._hosts, self._hosts_now) if one.now else (self._hosts,):
                more = one.want.kind.host_request
                hosts[node] = hosts[node].less(more) if sign > 0 else hosts[node].plus(more)

    # --- which victims each request evicts ----------------------------------------------------------------------------

    def _in_turn(self) -> tuple[Assignment, ...] | None:
        """Give requests placed now the free room, then each other request, in order of precedence, free or coming room;
        where that is too little, evict all victims there that the request may evict.
        """
        inputs, after = self._inputs, _After(self._inputs, self._rooms, self._victims)
        for number, spots in self._at.items():
            if inputs.held[number].now:
                after.take(number, spots)
        gone: dict[int, tuple[Occupant, ...]] = {}
        for number in sorted(self._at):
            if not inputs.held[number].now:
                found = after.evicted(number, self._at[number])
                if found is None:
                    return None
                gone[number] = found
                after.take(number, self._at[number])
        return tuple(
            Assignment(tuple(inputs.ids[spot.at] for spot in self._at[number]), gone.get(number, ()))
            for number in sorted(self._at)
        )


class _After:
    """Room free or coming per slice and host while requests take their part one after the other."""

    def __init__(
        self,
        inputs: MinimalEvictionInput,
        rooms: Sequence[Mapping[ReplicaId, ResourceAmount]],
        victims: Sequence[Evictee],
    ) -> None:
        self._inputs, self._rooms = inputs, rooms
        self._left = [one.free.plus(one.coming) for one in inputs.shelves]
        self._hosts = {node: host.soon for node, host in inputs.hosts.items()}
        self._stay = {one.victim.replica: one for one in victims}

    def take(self, number: int, spots: Sequence[CandidateSlot]) -> None:
        """Subtract what the request takes there."""
        for at, room in spots:
            self._left[at] = self._left[at].less(room)
        node = self._inputs.seat(number, spots)
        if node is not None:
            self._hosts[node] = self._hosts[node].less(self._inputs.held[number].want.kind.host_request)

    def evicted(self, number: int, spots: Sequence[CandidateSlot]) -> tuple[Occupant, ...] | None:
        """Return the victims that the request evicts. None: it does not get its room this way."""
        inputs, want = self._inputs, self._inputs.held[number].want
        found: list[Occupant] = []
        for at, room in spots:
            for one in inputs.strangers(want, at):
                if not one.leaving and one.replica in self._stay:
                    found += self._go(want, [one.replica])
            if not self._left[at].holds(room):
                found += self._go(want, self._rooms[at])
        node = inputs.seat(number, spots)
        if node is not None and not self._hosts[node].holds(want.kind.host_request):
            found += self._go(want, self._host_users(node))
        rooms = all(self._left[at].holds(room) for at, room in spots)
        alone = not any(i.replica in self._stay for at, _ in spots for i in inputs.strangers(want, at))
        return (
            tuple(found)
            if rooms and alone and (node is None or self._hosts[node].holds(want.kind.host_request))
            else None
        )

    def _host_users(self, node: NodeId) -> Iterator[ReplicaId]:
        """Return the victims that use CPU or memory of the node."""
        return (
            id for id, one in self._stay.items() if any(one.victim.host_usage) and self._inputs.node_of(one) == node
        )

    def _go(self, want: PlacementRequest, those: Iterable[ReplicaId]) -> Iterator[Occupant]:
        """Remove and yield those of these victims that the request may evict."""
        for id in [*those]:
            one = self._stay.get(id)
            if one is None or not can_evict(want, one.victim, self._inputs.now_s):
                continue
            del self._stay[id]
            for at, rooms in enumerate(self._rooms):
                if id in rooms:
                    self._left[at] = self._left[at].plus(rooms[id])
            node = self._inputs.node_of(one)
            if node in self._hosts:
                self._hosts[node] = self._hosts[node].plus(one.victim.host_usage)
            yield one.victim


def _rooms(inputs: MinimalEvictionInput, victims: Sequence[Evictee]) -> list[dict[ReplicaId, ResourceAmount]]:
    """Return what each victim holds, per slice."""
    found: list[dict[ReplicaId, ResourceAmount]] = [{} for _ in inputs.ids]
    for victim, ids in victims:
        for at in map(inputs.number.__getitem__, ids):
            there = inputs.shelves[at].incumbents
            found[at] |= {one.replica: one.room for one in there if one.replica == victim.replica}
    return found


def _size(want: PlacementRequest, spots: Sequence[CandidateSlot]) -> int:
    """Return the least number of bytes that the request takes."""
    return want.kind.devices * min((spot.room.memory_bytes for spot in spots), default=0)
