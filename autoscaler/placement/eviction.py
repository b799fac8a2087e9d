"""Eviction cost and victim selection: which replicas to evict from a slice, and which slice is the cheapest to use.

Victims are ordered by cost: idle first, then lower priority, then faster to restart, then fewer. The module selects
the cheapest few on one slice, and searches many slices while evaluating as few of them as possible. If a request finds
a device but too little CPU or memory on its node, `fit_options_to_host` waits for replicas that leave, or selects the
fewest and cheapest victims that free enough on both the devices and the host. Invariant: no replica is evicted
needlessly. `autoscaler.planner.plan` executes evictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

from autoscaler.placement.model.predicates import can_evict, find_required_amount
from autoscaler.placement.model.types import Bin, Occupant, PlacementRequest, RestartCosts
from autoscaler.state.resources import NO_ROOM, NOTHING, HostAmount, HostResources, ResourceAmount
from autoscaler.state.world import SliceId

FREE, LOCKED, COMING, EVICT = range(4)
"""Tiers, cheapest first: room now; room now, but another replica is starting there; room coming; room after evictions.
If a request for several devices has no place, some of the devices may still have room now.
"""
COSTS: Final = 5
"""Leading parts of a `key` that state the cost to others: the tier and `eviction_cost`."""
TIES_MAX: Final = 64
"""Maximum number of slices of possibly equal cost that are compared by how tight the fit is."""

Key = tuple[float | int | str, ...]


class EvictionOption(NamedTuple):
    """An option to make room for a request on one slice; the smallest `key` is the best."""

    rung: int
    key: Key
    shelf: Bin
    need: ResourceAmount
    victims: tuple[Occupant, ...] = ()
    strangers: tuple[Occupant, ...] = ()
    """Conflicting replicas in its domain that must stop before a start there: they are leaving, or victims too."""
    wide: bool = False
    """Whether it waits for CPU or memory of the node. Victims and leaving replicas may then be on any slice there."""


def find_eviction_option(
    want: PlacementRequest,
    shelf: Bin,
    restart_costs: RestartCosts,
    now_s: float,
    *,
    away: int,
    strangers: Sequence[Occupant] = (),
    those: Sequence[Occupant] | None = None,
) -> EvictionOption | None:
    """Return the cheapest way to use this slice. None: there is none now.

    `away`: rank of the missing artifacts of the node; `strangers`: replicas in the slice's domain that conflict with
    the request; `those`: its evictable replicas, cheapest first, if known.
    """
    room, rank = find_required_amount(want, shelf), want.kind.rank(shelf.slice.product)
    if room is None or rank is None:
        return None
    chosen = tuple(one for one in strangers if not one.leaving)
    if any(one.stuck for one in strangers) or not all(can_evict(want, one, now_s) for one in chosen):
        return None
    soon = shelf.free.plus(shelf.coming)
    going = sum_amounts(one for one in shelf.incumbents if one in chosen) if chosen else NO_ROOM
    if not strangers and shelf.free.holds(room):
        rung = LOCKED if shelf.locked else FREE
    elif soon.plus(going).holds(room):
        rung = EVICT if chosen else COMING
    else:
        lack, rung = room.less(soon.plus(going)), EVICT
        if chosen or those is None:
            rest = [one for one in shelf.incumbents if one not in chosen] if chosen else shelf.incumbents
            more = choose_victims(want, rest, lack, restart_costs, now_s)
        else:
            more = _first(those, lambda some: sum_amounts(some).holds(lack), restart_costs)
        if not more:
            return None
        chosen += more
    after = (shelf.free if rung <= LOCKED else soon).less(room)
    tie = (shelf.slice.memory_bytes, shelf.slice.id)
    key = (rung, *eviction_cost(chosen, restart_costs), shelf.locked, rank, shelf.price, away, after.memory_bytes, *tie)
    return EvictionOption(rung, key, shelf, room, chosen, tuple(strangers))


def list_evictable_occupants(
    want: PlacementRequest, shelf: Bin, restart_costs: RestartCosts, now_s: float
) -> tuple[Occupant, ...]:
    """List the replicas on the slice that may be evicted, cheapest first. The list is the same for all requests of one
    model, priority and eviction level.
    """
    return _ordered([one for one in shelf.incumbents if can_evict(want, one, now_s)], restart_costs)


def choose_victims(
    want: PlacementRequest,
    incumbents: Sequence[Occupant],
    lack: ResourceAmount,
    restart_costs: RestartCosts,
    now_s: float,
) -> tuple[Occupant, ...]:
    """Choose the victims that free at least `lack`: the best single one, or the cheapest few. Empty: there are none."""
    evictable = [one for one in incumbents if can_evict(want, one, now_s)]
    return choose_cheapest(evictable, lambda some: sum_amounts(some).holds(lack), restart_costs)


def choose_cheapest(
    evictable: Sequence[Occupant], enough: Callable[[Sequence[Occupant]], bool], restart_costs: RestartCosts
) -> tuple[Occupant, ...]:
    """Choose the best single replica that is `enough`, or the cheapest few. Empty: all together are not enough."""
    return _first(_ordered(evictable, restart_costs), enough, restart_costs)


def _ordered(those: Sequence[Occupant], restart_costs: RestartCosts) -> tuple[Occupant, ...]:
    return tuple(sorted(those, key=lambda one: (*eviction_cost((one,), restart_costs), one.replica)))


def _first(
    candidates: Sequence[Occupant], enough: Callable[[Sequence[Occupant]], bool], restart_costs: RestartCosts
) -> tuple[Occupant, ...]:
    """Like `choose_cheapest`, for candidates that are sorted already."""
    if not enough(candidates):
        return ()
    if len(candidates) == 1 or enough(candidates[:1]):
        return tuple(candidates[:1])
    few: list[Occupant] = []
    for incumbent in candidates:
        few.append(incumbent)
        if enough(few):
            break
    if len(few) == 1:
        return tuple(few)
    for incumbent in reversed(few[:-1]):
        fewer = [other for other in few if other is not incumbent]
        if enough(fewer):
            few = fewer
    alone = next(([one] for one in candidates if enough([one])), few)
    return tuple(alone if eviction_cost(alone, restart_costs) < eviction_cost(few, restart_costs) else few)


def eviction_cost(chosen: Sequence[Occupant], restart_costs: RestartCosts) -> Key:
    """Return (number of busy ones, highest priority, total restart seconds, count)."""
    if len(chosen) == 1:
        one = chosen[0]
        return (int(one.busy), one.priority, restart_costs.restart_s(one.model), 1)
    if not chosen:
        return (0, 0, 0.0, 0)
    restart_s = sum(restart_costs.restart_s(one.model) for one in chosen)
    return (sum(one.busy for one in chosen), max(one.priority for one in chosen), restart_s, len(chosen))


def sum_amounts(incumbents: Iterable[Occupant]) -> ResourceAmount:
    """Return the sum of what they hold of their slice."""
    memory_bytes = compute_percent = places = 0
    for incumbent in incumbents:
        memory_bytes += incumbent.room.memory_bytes
        compute_percent += incumbent.room.compute_percent
        places += incumbent.room.places
    return ResourceAmount(memory_bytes, compute_percent, places)


class Search:
    """Finds the cheapest option among slices. Only TIES_MAX slices of equal cost, the smallest, are compared by how
    tight the fit is. A slice is evaluated only if its floor (a lower bound of `key`) is not above the best known
    option, and again after it changed. Floors must be sorted, equal ones by size and id.
    """

    def __init__(
        self, floors: Iterable[tuple[Key, SliceId]], work_out: Callable[[SliceId], EvictionOption | None]
    ) -> None:
        self._floors = iter(floors)
        self._next = next(self._floors, None)
        self._work_out = work_out
        self._known: dict[SliceId, EvictionOption | None] = {}
        self._heap: list[tuple[Key, SliceId]] = []
        self._stale: set[SliceId] = set()

    def change(self, id: SliceId) -> None:
        """Mark a slice as changed."""
        if id in self._known:
            self._stale.add(id)

    def look(self, id: SliceId) -> None:
        """Like `change`; the slice may also cost less than its floor now, or have its first option."""
        self._stale.add(id)

    def best(self) -> EvictionOption | None:
        """Return the cheapest option now. None: there is none."""
        for id in sorted(self._stale):
            self._add(id)
        self._stale.clear()
        ties = 0
        while self._next is not None:
            lowest, id = self._next
            found = self._first()
            if found is not None:
                known = found.key[: len(lowest)]
                ties += lowest == known
                if lowest > known or ties > TIES_MAX:
                    return found
            self._next = next(self._floors, None)
            self._add(id)
        return self._first()

    def _add(self, id: SliceId) -> None:
        found = self._known[id] = self._work_out(id)
        if found is not None:
            heappush(self._heap, (found.key, id))

    def _first(self) -> EvictionOption | None:
        while self._heap:
            key, id = self._heap[0]
            found = self._known[id]
            if found is not None and found.key == key:
                return found
            heappop(self._heap)
        return None


def fit_options_to_host(
    want: PlacementRequest,
    team: Sequence[EvictionOption],
    host: HostResources,
    around: Iterable[Occupant],
    *,
    restart_costs: RestartCosts,
    now_s: float,
) -> tuple[EvictionOption, ...] | None:
    """Adapt options, all of slices of one node, to the CPU and memory that the request needs there.
    `around`: the replicas on the node. None: the request cannot fit now.
    """
    chosen = {one.replica: one for option in team for one in option.victims}
    if host.left.holds(want.kind.host_request):
        return tuple(team)
    if host.soon.plus(sum_host_requests(chosen.values())).holds(want.kind.host_request):
        return tuple(_as(option, COMING, option.victims, restart_costs) for option in team)
    must = {one.replica: one for option in team for one in option.strangers if one.replica in chosen}
    more = {one.replica: one for one in around if one.replica not in must and can_evict(want, one, now_s)}
    useful = [one for one in more.values() if any(one.host_usage) or one.replica in chosen]
    lacks = [(_here(option), _lack(option, must.values())) for option in team]
    short = host.soon.plus(sum_host_requests(must.values())).lack(want.kind.host_request)

    def enough(some: Sequence[Occupant]) -> bool:
        going = {one.replica for one in some}
        rooms = (sum_amounts(room for id, room in here.items() if id in going).holds(lack) for here, lack in lacks)
        return sum_host_requests(some).holds(short) and all(rooms)

    found = choose_cheapest(useful, enough, restart_costs)
    victims = (*must.values(), *found)
    return tuple(_as(option, EVICT, victims, restart_costs) for option in team) if found else None


def sum_host_requests(incumbents: Iterable[Occupant]) -> HostAmount:
    """Return the sum of the CPU and memory that they hold on their node."""
    total = NOTHING
    for one in incumbents:
        total = total.plus(one.host_usage)
    return total


def _here(option: EvictionOption) -> dict[str, Occupant]:
    return {one.replica: one for one in option.shelf.incumbents}


def _lack(option: EvictionOption, going: Iterable[Occupant]) -> ResourceAmount:
    """Return the amount that the option's slice still lacks once these replicas are gone, too."""
    here = _here(option)
    shelf = option.shelf
    gone = sum_amounts(here[one.replica] for one in going if one.replica in here)
    return option.need.less(shelf.free.plus(shelf.coming).plus(gone))


def _as(
    option: EvictionOption, rung: int, victims: tuple[Occupant, ...], restart_costs: RestartCosts
) -> EvictionOption:
    rung = max(rung, EVICT if victims else rung)
    key = (rung, *eviction_cost(victims, restart_costs), *option.key[COSTS:])
    return option._replace(rung=rung, key=key, victims=victims, wide=True)
