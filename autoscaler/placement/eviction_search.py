"""Searches for the cheapest way to place a request that has no room now: wait for leaving replicas, or evict some.

The result is one `EvictionOption` per device (`autoscaler.placement.eviction` defines options and their cost). The
search runs on the packer's working state (`autoscaler.placement.overlay`) and caches options until a change invalidates
them. `autoscaler.placement.packer` uses the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np

from autoscaler.contract import ModelName
from autoscaler.placement.eviction import (
    COMING,
    COSTS,
    EVICT,
    LOCKED,
    TIES_MAX,
    EvictionOption,
    Key,
    Search,
    find_eviction_option,
    fit_options_to_host,
    list_evictable_occupants,
)
from autoscaler.placement.index.elastic_requests import ElasticBudget
from autoscaler.placement.index.eviction_costs import EvictionCost
from autoscaler.placement.index.node_search import Flags
from autoscaler.placement.index.request_encoding import LACKS, NEVER
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.tenant_isolation import domain_of
from autoscaler.placement.model.topology import Team, team_of
from autoscaler.placement.model.types import (
    Bin,
    EvictionLevel,
    NodeConstraints,
    Occupant,
    PlacementRequest,
    RestartCosts,
)
from autoscaler.placement.overlay import Overlay
from autoscaler.state.resources import RequestShape
from autoscaler.state.world import SliceId

LOOKED_AT: Final = 2 * TIES_MAX
"""Number of slices that are sorted first: those that may have the lowest cost."""


class EvictionSearch:
    """The search of one packer call."""

    def __init__(self, overlay: Overlay, restart_costs: RestartCosts, now_s: float) -> None:
        self._overlay, self._index = overlay, overlay.index
        self._now_s = now_s
        self._restart_costs = restart_costs
        self._known: dict[PlacementRequest, dict[SliceId, EvictionOption | None]] = {}
        """Options by the parts of a request that they depend on (`_alike`), also the key of `_searches`."""
        self._searches: dict[PlacementRequest, Search] = {}
        self._grades: dict[tuple[ModelName, int, EvictionLevel], EvictionCost] = {}
        """Eviction costs by the parts of a request that decide which replicas may be evicted (`_grade`). They are as of
        the start of the call, because replicas that leave later make nothing cheaper.
        """
        self._evictable: dict[tuple[ModelName, int, EvictionLevel], dict[SliceId, tuple[Occupant, ...]]] = {}
        self._could: dict[tuple[RequestShape, NodeConstraints], Flags] = {}
        self._none: set[PlacementRequest] = set()
        """Requests without any option, until something changes."""
        self._soon: Ints | None = None
        """[3, lanes]: see `EvictionCostIndex.soon`."""
        self._otherwise: set[SliceId] = set()
        """Slices that changed since `_soon` was computed."""
        overlay.listeners.append(self)

    def forget(self, ids: Iterable[SliceId]) -> None:
        """Drop what is known of these slices, which changed."""
        self._none.clear()
        for id in ids:
            self._otherwise.add(id)
            for known in self._known.values():
                known.pop(id, None)
            for search in self._searches.values():
                search.change(id)

    def reconsider(self, ids: Iterable[SliceId]) -> None:
        """Evaluate these slices again, because CPU or memory of their node changed."""
        ids = frozenset(ids)
        self._none.clear()
        for known in self._known.values():
            for id in ids:
                known.pop(id, None)
        for alike, search in self._searches.items():
            for id in self._among(ids, alike):
                search.look(id)

    def cheapest(
        self, want: PlacementRequest, budget: Callable[[], ElasticBudget]
    ) -> tuple[EvictionOption, ...] | None:
        """Return the options to take, one per device. None: the request cannot fit now.
        An elastic request is promised all that it requests, or its minimum if that costs other replicas less.
        """
        if want.kind.devices > 1:
            return self._team(self._alike(want))
        asked, least = want.kind.memory_bytes, want.least.kind.memory_bytes
        found = self._one(want.granted(asked))
        if found is not None and found.rung < EVICT:
            return (found,)
        if least < asked and budget().allows(asked, least):
            less = self._one(want.least)
            if less is not None and (found is None or less.key[:COSTS] < found.key[:COSTS]):
                budget().add(asked, least)
                return (less,)
        return None if found is None else (found,)

    def _one(self, want: PlacementRequest) -> EvictionOption | None:
        alike = self._alike(want)
        if alike in self._none:
            return None
        found = self._any(alike)
        if found is None:
            self._none.add(alike)
        return found

    def _any(self, want: PlacementRequest) -> EvictionOption | None:
        """Return the cheapest option on one slice; `want` stands for all equivalent requests (`_alike`)."""
        index, kind, choice = self._index, want.kind, want.choice
        soon = {*index.soon(want.trust), *self._emptying(want)}
        coming = self._among(soon, want)
        for rung, ids in ((LOCKED, index.locked(kind, choice)), (COMING, coming)):
            options = (one for one in self._options(want, ids) if one.rung <= rung)
            found = min(options, key=lambda one: one.key, default=None)
            if found is not None:
                return found
        return self._search(want).best() if want.urgency.force > EvictionLevel.NONE else None

    def _emptying(self, want: PlacementRequest) -> Iterator[SliceId]:
        """Yield slices of nodes that lack CPU or memory for it and have a leaving replica that frees some."""
        nodes = {*self._index.emptying, *self._overlay.hosts} if self._index.hosts else ()
        for node in nodes:
            host = self._overlay.host(node)
            if host is not None and any(host.coming) and not host.left.holds(want.kind.host_request):
                yield from self._index.slices_of(node)

    def _search(self, want: PlacementRequest) -> Search:
        """Return the search over all slices that could hold it if they were empty."""
        if want not in self._searches:
            self._searches[want] = Search(self._floors(want), partial(self._option, want))
        return self._searches[want]

    def _floors(self, want: PlacementRequest) -> Iterator[tuple[Key, SliceId]]:
        """Yield, for each slice on which the request may have to evict, a lower bound of the `key` of any option with
        victims. The cheapest slices are first; equal ones are ordered by size and ID.
        """
        index, arrays, ask, grade = self._index, self._index.arrays, self._index.ask(want.kind), self._graded(want)
        at, lane_of, lacks = grade.lanes, arrays.lane_of[grade.lanes], index.locality.lacks(want.supplies)
        there, held = self._at_most(want, grade)[at], arrays.held[at]
        away = np.zeros(len(at), np.int64) if lacks is None else lacks[arrays.node_of[at]]
        cost = ((2 * grade.cost + held) * len(ask.liking) + ask.liking[lane_of]) * LACKS + away
        open_, numbers = self._possible(want), np.full(len(arrays.node_of), NEVER, np.int64)
        numbers[at] = np.where(there, cost, NEVER)
        numbers[self._odd(want)] = -1  # victims may be cheap, and on another slice
        numbers[~open_] = NEVER
        places = np.zeros(len(numbers), np.int64)
        places[at] = np.arange(len(at))
        for number in _in_order(numbers, index.by_size):
            id = index.id_of(number)
            if numbers[number] < 0:
                yield (EVICT,), id
                continue
            one, lane = int(places[number]), arrays.lanes[arrays.lane_of[number]]
            cost_s = int(grade.busy[one]), int(grade.priority[one]), float(grade.restart_s[one]), 1
            locked, rank = bool(held[one]), want.kind.rank(lane.product) or 0
            yield (EVICT, *cost_s, locked, rank, lane.price, int(away[one])), id

    def _odd(self, want: PlacementRequest) -> Flags:
        """[lanes]: where victims may be on another slice: for CPU or memory of the node, or for tenant isolation."""
        index = self._index
        odd = np.zeros(len(index.arrays.node_of), bool)
        if any(want.kind.host_request):
            short = index.short(want.kind.host_request)
            for node, host in self._overlay.hosts.items():
                short[index.number_of(node)] = not host.soon.holds(want.kind.host_request)
            odd |= short[index.arrays.node_of]
        return odd | index.occupancy.strange(want.trust) if want.trust else odd

    def _at_most(self, want: PlacementRequest, grade: EvictionCost) -> Flags:
        """[lanes]: where free room, coming room and the room of all evictable replicas are enough together."""
        index, lane_of, ask = self._index, self._index.arrays.lane_of, self._index.ask(want.kind)
        room = self._room_soon().copy()
        room[:, grade.lanes] += grade.rooms
        there: Flags = (
            (room[0] >= ask.memory[lane_of]) & (room[1] >= ask.compute[lane_of]) & (room[2] >= index.eviction_costs.few)
        )
        return there

    def _room_soon(self) -> Ints:
        """[3, lanes]: the room that is free or coming now."""
        if self._soon is None:
            self._soon = self._index.eviction_costs.soon.copy()
        for id in self._otherwise:
            shelf, at = self._overlay.shelf(id), self._index.lane_at(id)
            if at is not None:
                self._soon[:, at] = shelf.free.plus(shelf.coming)
        self._otherwise.clear()
        return self._soon

    def _graded(self, want: PlacementRequest) -> EvictionCost:
        key = _grade(want)
        if key not in self._grades:
            if not self._grades:
                self._index.look(self._restart_costs)
            self._grades[key] = self._index.eviction_costs.grade(want, self._now_s, self._overlay.gone)
        return self._grades[key]

    def _alike(self, want: PlacementRequest) -> PlacementRequest:
        """Reduce the request to a key that all requests with the same options share."""
        model = want.model if self._index.is_here(want.model) else ModelName("")
        urgency, supplies = want.urgency._replace(unserved_since_s=0.0), self._index.locality.known(want.supplies)
        return want._replace(model=model, ordinal=0, urgency=urgency, supplies=supplies, spread=None, reason="")

    def _possible(self, want: PlacementRequest) -> Flags:
        """[lanes]: those that could hold it if they were empty."""
        key = want.kind, want.choice
        if key not in self._could:
            self._could[key] = self._index.possible(*key)
        return self._could[key]

    def _among(self, ids: Iterable[SliceId], want: PlacementRequest) -> list[SliceId]:
        """Return those of these slices that could hold it."""
        could = self._possible(want)
        return [id for id in ids if (at := self._index.lane_at(id)) is not None and could[at]]

    def _options(self, want: PlacementRequest, ids: Iterable[SliceId]) -> Iterator[EvictionOption]:
        """Yield the cheapest option of each of these slices that has one."""
        known = self._known.setdefault(want, {})
        for id in ids:
            if id not in known:
                known[id] = self._option(want, id)
            found = known[id]
            if found is not None:
                yield found

    def _team(self, want: PlacementRequest) -> tuple[EvictionOption, ...] | None:
        """Return the cheapest options for `devices` devices of one node, or of one link if the request needs it."""
        by_team: dict[Team, list[EvictionOption]] = {}
        for one in self._options(want, self._members(want)):
            by_team.setdefault(team_of(one.shelf.slice, want.kind.link), []).append(one)
        found = (
            self._hosted(want, sorted(options, key=lambda o: o.key)[: want.kind.devices])
            for options in by_team.values()
            if len(options) >= want.kind.devices
        )
        ways = filter(None, found)
        return min(ways, key=lambda way: (way[-1].rung, *(o.key for o in reversed(way))), default=None)

    def _members(self, want: PlacementRequest) -> Iterator[SliceId]:
        """Yield the slices that may have an option. Nodes with fewer of them than requested devices are left out."""
        index = self._index
        at = np.flatnonzero(self._at_most(want, self._graded(want)) & self._possible(want))
        nodes = index.arrays.node_of[at]
        return map(index.id_of, at[np.bincount(nodes)[nodes] >= want.kind.devices].tolist())

    def _hosted(self, want: PlacementRequest, team: Sequence[EvictionOption]) -> tuple[EvictionOption, ...] | None:
        node = team[0].shelf.slice.node
        host = self._overlay.host(node)
        if host is None:
            return tuple(team)
        return fit_options_to_host(
            want, team, host, self._overlay.around(node), restart_costs=self._restart_costs, now_s=self._now_s
        )

    def _option(self, want: PlacementRequest, id: SliceId) -> EvictionOption | None:
        """Return the cheapest way to use this slice. None: none now. For several devices, host needs are left out."""
        shelf, index = self._overlay.shelf(id), self._index
        if want.trust and index.occupancy.expects_stranger(domain_of(shelf.slice), want.trust):
            return None
        strangers = self._overlay.strangers(want, shelf.slice) if want.trust else ()
        away = index.locality.lack(want.supplies, shelf.slice.node)
        those = None if self._overlay.is_changed(id) else self._those(want, shelf)
        found = find_eviction_option(
            want, shelf, self._restart_costs, self._now_s, away=away, strangers=strangers, those=those
        )
        if found is None or want.kind.devices > 1:
            return found
        with_host = self._hosted(want, (found,))
        return None if with_host is None else with_host[0]

    def _those(self, want: PlacementRequest, shelf: Bin) -> tuple[Occupant, ...]:
        """Return the evictable replicas on a slice that did not change since the start, cheapest first."""
        known = self._evictable.setdefault(_grade(want), {})
        if shelf.slice.id not in known:
            known[shelf.slice.id] = list_evictable_occupants(want, shelf, self._restart_costs, self._now_s)
        return known[shelf.slice.id]


def _grade(want: PlacementRequest) -> tuple[ModelName, int, EvictionLevel]:
    """Return the parts of a request that decide who may be evicted."""
    return want.model, want.urgency.priority, want.urgency.force


def _in_order(numbers: Ints, by_size: Ints) -> Iterator[int]:
    """[lanes] -> those that are not NEVER, lowest first, then by `by_size`. Sorts lazily: callers rarely read far."""
    at = by_size[numbers[by_size] < NEVER]
    left, many = numbers[at], LOOKED_AT
    while len(at):
        most = np.partition(left, many - 1)[many - 1] if many < len(at) else NEVER
        now = left <= most
        yield from at[now][np.argsort(left[now], kind="stable")].tolist()
        at, left, many = at[~now], left[~now], many * 8
