"""The packer: places requests on slices and selects the replicas to evict for those that do not fit.

Used by the planner, what-if queries and simulations. `autoscaler.planner.plan` starts and drains the replicas.

1. If a request fits, `autoscaler.placement.index.node_search` chooses the place, by product, price, nearness to or
   spread from other replicas of the model, weights and image on the node, and least waste. An elastic request may be
   granted less memory than requested (`autoscaler.placement.index.elastic_requests`).
2. If it does not fit, it waits for room that is coming, or evicts the cheapest victims
   (`autoscaler.placement.eviction_search`).
3. Requests that can grow get memory that no other request can use (`autoscaler.placement.memory_growth`).

Invariants:

* Neither a slice nor the CPU or memory of a node is overcommitted.
* The devices of a request that needs a link share one.
* No replica of higher priority, within its residency or with an awaited start is evicted.
* A request evicts on one slice only, or on one node if it takes several devices or the node lacks CPU or memory. It
  evicts nothing while room is coming.
* The result does not depend on the order of the input, which is not modified.
* The victim set is minimal: with any victim spared, the requests that have room (placed or promised) could not all be
  placed, on any slices. In such an alternative each request keeps its outcome: placed now with the granted memory, or
  promised room that is free, coming, or held by victims that it or an earlier request may evict. Preferences (price,
  weight copies, spreading, nearness) are ignored. Beyond the search bounds of `autoscaler.placement.minimal_eviction`,
  an unnecessary victim is possible.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property, reduce
from math import isnan

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.eviction import COMING, EVICT, LOCKED, EvictionOption, Key, eviction_cost, sum_host_requests
from autoscaler.placement.eviction_search import EvictionSearch
from autoscaler.placement.index.elastic_requests import MEAN, ElasticBudget, place_elastic
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.memory_growth import grow_placements, validate_growth
from autoscaler.placement.minimal_eviction import Assigned, Assignment, Evictee, find_fewer_victims
from autoscaler.placement.model.predicates import find_required_amount, team_reason, unmet_reason
from autoscaler.placement.model.types import (
    Bin,
    Occupant,
    PackResult,
    Placement,
    PlacementRequest,
    RestartCosts,
    Unplaced,
    Victim,
)
from autoscaler.placement.overlay import Overlay
from autoscaler.state.resources import NO_ROOM, NOTHING, HostAmount
from autoscaler.state.world import Copy, NodeId, SliceId


def pack(
    wanted: Sequence[PlacementRequest],
    index: SliceIndex,
    copies: Set[Copy],
    restart_costs: RestartCosts,
    now_s: float,
    *,
    explain: bool = True,
) -> PackResult:
    """Place what fits, by priority, then longest unserved, then name; select victims for what does not fit.

    A request with victims is in `unmet` too: a later call places it, once they are gone. With `explain=False` the
    packer skips the slower search for the reason why a request has no room. Raises ValueError for a request with an
    invalid amount, priority or `unserved_since_s`, without a model, or named twice, and for an invalid time.
    """
    if isnan(now_s):
        raise ValueError(f"now_s is {now_s}: expected a time in seconds")
    validate_growth(wanted)
    index.locality.set_copies(copies)
    most = reduce(HostAmount.most, (want.kind.host_request for want in wanted), NOTHING) if index.hosts else NOTHING
    ordered = _in_turn(wanted)

    first = PackRun(index, restart_costs, now_s, most, explain=explain)
    index.arrays.mark()
    try:
        packing = _place_or_evict(ordered, first)
    finally:
        index.rewind()
    assignments = first.minimise_evictions(packing.victims)
    if assignments is None:
        return packing
    again = PackRun(index, restart_costs, now_s, most, explain=explain)
    index.arrays.mark()
    try:
        return _place_as_assigned(ordered, again, first.held, assignments)
    finally:
        index.rewind()


def _place_or_evict(ordered: Sequence[PlacementRequest], run: PackRun) -> PackResult:
    """Place each request in order, or select the replicas whose eviction makes room for it."""
    placements: list[Placement] = []
    victims: dict[ReplicaId, tuple[Occupant, PlacementRequest]] = {}
    promised: dict[int, tuple[EvictionOption, ...]] = {}
    unmet: list[Unplaced] = []
    unplaced: dict[PlacementRequest, Unplaced] = {}
    for number, want in enumerate(ordered):
        placement = run.place(number, want)
        if placement is not None:
            placements.append(placement)
            continue
        alike = want._replace(ordinal=0)
        if alike in unplaced:
            unmet.append(unplaced[alike]._replace(want=want))
            continue
        options = run.cheapest(want)
        if options is None:
            unplaced[alike] = run.explain_unplaced(want)
            unmet.append(unplaced[alike])
        else:
            promised[len(unmet)] = options
            where = tuple(one.shelf.slice.id for one in options)
            unmet.append(Unplaced(want, run.wait(options), promised=True, slices=where))
            victims |= {victim.replica: (victim, want) for victim in run.evict(number, want, options)}
    spared = run.spare([victim for victim, _ in victims.values()])
    for at, options in promised.items() if spared else ():
        unmet[at] = unmet[at]._replace(reason=run.wait([run.without(one, spared) for one in options]))
    going = (Victim(id, one.model, want) for id, (one, want) in victims.items() if id not in spared)
    return _whole(placements, going, unmet, run)


def _place_as_assigned(
    ordered: Sequence[PlacementRequest], run: PackRun, held: Mapping[int, Assigned], puts: Mapping[int, Assignment]
) -> PackResult:
    """Place the requests in `held` by their assignments `puts`, those placed now first; then the others that fit."""
    placements: dict[int, Placement] = {}
    unmet: dict[int, Unplaced] = {}
    victims: list[Victim] = []
    for number in sorted(held, key=lambda number: (not held[number].now, number)):
        want, put = ordered[number], puts[number]
        placement = run.start(number, want, held[number], put)
        if placement is not None:
            placements[number] = placement
            continue
        options = run.options(held[number].want, put)
        unmet[number] = Unplaced(want, run.wait(options), promised=True, slices=put.slices)
        victims += (Victim(one.replica, one.model, want) for one in run.evict(number, want, options))
    for number, want in enumerate(ordered):
        if number not in held:
            placement = run.place(number, want)
            if placement is None:
                unmet[number] = run.explain_unplaced(want)
            else:
                placements[number] = placement
    return _whole(
        [placements[number] for number in sorted(placements)], victims, [unmet[number] for number in sorted(unmet)], run
    )


def _whole(
    placements: Sequence[Placement], victims: Iterable[Victim], unmet: Sequence[Unplaced], run: PackRun
) -> PackResult:
    """Build the result, and grow placements now that all other requests have their room."""
    going, waiting = tuple(victims), [one.want for one in unmet if not one.never]
    grown = grow_placements(placements, waiting, {one.replica for one in going}, run.overlay)
    return PackResult(grown, going, tuple(unmet))


def _in_turn(wanted: Sequence[PlacementRequest]) -> list[PlacementRequest]:
    """Validate the requests and sort them by precedence. Raises ValueError: see `pack`."""
    named = set[tuple[ModelName, int]]()
    for want in wanted:
        if not want.model:
            raise ValueError("model of a placement request is empty: expected the name of a Model")
        if (want.model, want.ordinal) in named:
            raise ValueError(
                f"two placement requests of {want.model} have ordinal {want.ordinal}: expected distinct ordinals"
            )
        named.add((want.model, want.ordinal))
        urgency = want.urgency
        for field, amount in (("priority", urgency.priority), ("unserved_since_s", urgency.unserved_since_s)):
            if isnan(amount):
                raise ValueError(f"{field} of a placement request is {amount}: expected a number")
    return sorted(wanted, key=request_sort_key)


def request_sort_key(want: PlacementRequest) -> Key:
    """Sort key by precedence: priority, then longest unserved, then name."""
    return (-want.urgency.priority, want.urgency.unserved_since_s, want.model, want.ordinal)


class PackRun:
    """State of one call of the packer."""

    def __init__(
        self, index: SliceIndex, restart_costs: RestartCosts, now_s: float, most: HostAmount, *, explain: bool
    ) -> None:
        self._index = index
        self._explain = explain
        self._now_s = now_s
        self._restart_costs = restart_costs
        self.overlay = Overlay(index, most)
        self._ways = EvictionSearch(self.overlay, restart_costs, now_s)
        self._placed: dict[ModelName, list[NodeId]] = {}
        """Nodes given to requests with a spread, by model."""
        self.held: dict[int, Assigned] = {}
        """By number of the request: the room that it was granted or promised."""
        self._evicted: dict[ReplicaId, list[SliceId]] = {}
        self._unwelcome: set[ReplicaId] = set()
        """Replicas of conflicting tenants where room is promised: they are evicted even if their room is not needed."""

    @cached_property
    def _budget(self) -> ElasticBudget:
        """The budget of elastic requests, to which this call adds what it places or promises."""
        return self._index.budget()

    # --- room now -----------------------------------------------------------------------------------------------------

    def place(self, number: int, want: PlacementRequest) -> Placement | None:
        """Reserve room and lock the devices for a start. None: there is no room now."""
        index, spread = self._index, want.spread
        if spread is not None:
            spread = spread._replace(nodes=(*spread.nodes, *self._placed.get(want.model, ())))
        found = place_elastic(
            want.kind,
            lambda: self._budget,
            lambda kind: index.choose(kind, want.choice, want.supplies, want.trust, spread),
            index.granted,
        )
        place = None if found is None else found[0]
        node = None if place is None else index.nodes[place.node]
        if want.kind.devices == 0:
            return self._start(number, want, want, (), node)
        if found is None or place is None:
            return None
        return self._start(number, want, want.granted(found[1].memory_bytes), index.slices(place), node)

    def start(self, number: int, want: PlacementRequest, held: Assigned, put: Assignment) -> Placement | None:
        """Like `place`, on the slices of `put`. None: there is no room yet."""
        got, shelves = held.want, [self.overlay.shelf(id) for id in put.slices]
        node = shelves[0].slice.node if shelves else held.node
        host = None if node is None else self.overlay.host(node)
        if not held.now and not (
            all(self._is_free(got, one) for one in shelves)
            and (host is None or host.left.holds(want.kind.host_request))
        ):
            return None
        if want.kind.spare_bytes:
            self._budget.add(want.kind.memory_bytes, got.kind.memory_bytes)
        return self._start(number, want, got, put.slices, node)

    def _is_free(self, got: PlacementRequest, shelf: Bin) -> bool:
        room = find_required_amount(got, shelf)
        free = room is not None and shelf.free.holds(room) and not shelf.locked
        return free and not self.overlay.strangers(got, shelf.slice)

    def _start(
        self, number: int, want: PlacementRequest, got: PlacementRequest, ids: tuple[SliceId, ...], node: NodeId | None
    ) -> Placement:
        """Record a placement. `got` is the request as it was granted."""
        if want.spread is not None and node is not None and ids:
            self._placed.setdefault(want.model, []).append(node)
        shelves = [self.overlay.shelf(id) for id in ids]
        for id in ids:
            shelf = self.overlay.change(id)
            room = find_required_amount(got, shelf)
            if room is None or not shelf.free.holds(room):
                raise AssertionError(f"{id} was chosen for {want.model} but has no room for it")
            shelf.reserve(room)
            self.overlay.promise(want, shelf.slice)
            self.overlay.lock(shelf.slice)
        seat = self._seat(want, node)
        self.held[number] = Assigned(got, ids, True, seat)
        return Placement(want, ids, compute_claimed_bytes(got, shelves) if ids else want.kind.memory_bytes, seat)

    def _seat(self, want: PlacementRequest, node: NodeId | None) -> NodeId | None:
        """Reserve CPU and memory of the node, if its capacity is known."""
        host = None if node is None else self.overlay.host(node)
        if node is None or host is None:
            return None
        self.overlay.suppose(node, host.promised(want.kind.host_request))
        return node

    # --- room to be made ----------------------------------------------------------------------------------------------

    def explain_unplaced(self, want: PlacementRequest) -> Unplaced:
        """Return the request as unplaced, with the reason."""
        if not self._explain:
            return Unplaced(want, "")
        never = self._index.why.never(want)
        if never is not None:
            return Unplaced(want, never, never=True)
        closed = self._index.why.closed(want)
        scarce = self._index.why.scarce(want)
        if want.kind.devices > 1:
            node = [self.overlay.shelf(id) for id in self._index.why.team(want)]
            return Unplaced(want, team_reason(want, node, closed, self._now_s, scarce))
        best = self._index.why.roomiest(want)
        why = unmet_reason(want, None if best is None else self.overlay.shelf(best), closed, self._now_s, scarce)
        if want.kind.spare_bytes and not self._budget.allows(want.kind.memory_bytes, want.least.kind.memory_bytes):
            why += (
                f"; less memory is not granted, because elastic replicas must keep {MEAN // 10} % of theirs on average"
            )
        return Unplaced(want, why)

    def cheapest(self, want: PlacementRequest) -> tuple[EvictionOption, ...] | None:
        """Return the options to take, one per device. None: there is no way now."""
        return self._ways.cheapest(want, lambda: self._budget)

    def options(self, got: PlacementRequest, put: Assignment) -> tuple[EvictionOption, ...]:
        """Return the options to take on the slices of `put`. `got` is the request as it was granted."""
        shelves = [self.overlay.shelf(id) for id in put.slices]
        here = {one.replica for shelf in shelves for one in shelf.incumbents}
        strangers = [self.overlay.strangers(got, shelf.slice) for shelf in shelves]
        here |= {one.replica for some in strangers for one in some}
        host = self.overlay.host(shelves[0].slice.node)
        wide = any(one.replica not in here for one in put.victims)
        wide = wide or (host is not None and not host.left.holds(got.kind.host_request))
        rung = EVICT if put.victims else COMING
        if rung == COMING and not wide and not any(strangers):
            rung = (
                LOCKED if all(one.free.holds(find_required_amount(got, one) or NO_ROOM) for one in shelves) else COMING
            )
        return tuple(
            EvictionOption(rung, (), shelf, find_required_amount(got, shelf) or NO_ROOM, put.victims, some, wide)
            for shelf, some in zip(shelves, strangers, strict=True)
        )

    def evict(self, number: int, want: PlacementRequest, options: Sequence[EvictionOption]) -> tuple[Occupant, ...]:
        """Promise the room to the request, so that later requests do not count on it; return the victims, each once."""
        full = want.granted(want.kind.memory_bytes)
        got = full if all(find_required_amount(full, one.shelf) == one.need for one in options) else want.least
        self.held[number] = Assigned(got, tuple(one.shelf.slice.id for one in options), False)
        victims = {victim.replica: victim for option in options for victim in option.victims}
        chosen = [id for option in options for id in self._touched(option)]
        self.overlay.gone |= victims.keys()
        for replica, victim in victims.items():
            held = self._index.held_by(victim, chosen)
            self._evicted[replica] = [id for id in held if self.overlay.holds(id, replica)]
            for id in self._evicted[replica]:
                shelf = self.overlay.change(id)
                shelf.evict(replica)
                self._index.sync(shelf)
        for one in options:
            self._unwelcome |= {stranger.replica for stranger in one.strangers}
            shelf = self.overlay.change(one.shelf.slice.id)
            shelf.reserve(one.need)
            self.overlay.promise(want, shelf.slice)
            self._index.sync(shelf)
        node = options[0].shelf.slice.node
        host = self.overlay.host(node)
        if host is not None:
            coming = host.coming.plus(sum_host_requests(victims.values()))
            self.overlay.suppose(node, host._replace(coming=coming).promised(want.kind.host_request))
        return tuple(victims.values())

    def spare(self, victims: Sequence[Occupant]) -> Set[ReplicaId]:
        """Return the victims that can stay, most expensive first, because later evictions made enough room."""
        spared: set[ReplicaId] = set()
        for victim in sorted(
            victims, key=lambda one: (*eviction_cost([one], self._restart_costs), one.replica), reverse=True
        ):
            shelves = [self.overlay.shelf(id) for id in self._evicted[victim.replica]]
            roomy = all(one.free.plus(one.coming).holds(victim.room) for one in shelves)
            node = shelves[0].slice.node
            host = self.overlay.host(node)
            roomy = roomy and (host is None or host.soon.holds(victim.host_usage))
            if not roomy or victim.replica in self._unwelcome:
                continue
            for one in shelves:
                one.keep(victim)
            if host is not None:
                self.overlay.hosts[node] = host.kept(victim.host_usage)
            spared.add(victim.replica)
        return spared

    def going(self, victims: Iterable[Victim]) -> list[Evictee]:
        """Return these victims with their slices, the most expensive first."""
        found: list[Evictee] = []
        for replica in (victim.replica for victim in victims):
            ids = self._evicted[replica]
            there = self._index.shelf(ids[0]).incumbents
            found += [Evictee(one, tuple(ids)) for one in there if one.replica == replica][:1]
        return sorted(
            found, key=lambda one: (*eviction_cost([one.victim], self._restart_costs), one.victim.replica), reverse=True
        )

    def minimise_evictions(self, victims: Sequence[Victim]) -> dict[int, Assignment] | None:
        """Find an assignment of the requests in `held` that spares at least one victim; None: there is none."""
        going = self.going(victims)
        if not going or sum(max(1, one.want.kind.devices) for one in self.held.values()) < 2:
            return None  # for one request on one slice the victim set is minimal already
        found = find_fewer_victims([*self.held.values()], going, self._index, self._now_s)
        return None if found is None else dict(zip(self.held, found, strict=True))

    def without(self, one: EvictionOption, spared: Set[ReplicaId]) -> EvictionOption:
        """Return the option with the spared replicas in place."""
        victims = tuple(victim for victim in one.victims if victim.replica not in spared)
        if len(victims) == len(one.victims):
            return one
        return one._replace(
            victims=victims, rung=EVICT if victims else COMING, shelf=self.overlay.shelf(one.shelf.slice.id)
        )

    def _touched(self, one: EvictionOption) -> Sequence[SliceId]:
        """Return the slices that its victims may be on."""
        if one.wide:
            return self._index.slices_of(one.shelf.slice.node)
        return self._index.together(one.shelf.slice) if one.strangers else (one.shelf.slice.id,)

    def wait(self, options: Sequence[EvictionOption]) -> str:
        """Explain why a request with promised room is not placed yet."""
        worst = max(options, key=lambda option: option.rung)
        there = self.overlay.around(worst.shelf.slice.node) if worst.wide else worst.shelf.incumbents
        return wait_reason(worst, there)


def wait_reason(one: EvictionOption, there: Iterable[Occupant]) -> str:
    """Explain why a request with this option is not placed yet. `there`: replicas that may have to stop first."""
    where = one.shelf.slice.id
    if one.rung == EVICT:
        return f"waits on {where} for the eviction of {_names(one.victims)}"
    leaving = tuple(i for i in (*one.strangers, *there) if i.leaving)
    if one.rung == COMING and leaving:
        verb = "has" if len({occupant.model for occupant in leaving}) == 1 else "have"
        return f"waits on {where} until {_names(leaving)} {verb} stopped"
    if one.rung == COMING:
        return f"waits on {where} for memory that is about to be released"
    return f"waits on {where} until the replica that is starting there is ready; replicas start one at a time"


def compute_claimed_bytes(want: PlacementRequest, shelves: Iterable[Bin]) -> int:
    """Return the bytes that the request claims on each of its slices."""
    shared = [shelf for shelf in shelves if want.kind.memory_bytes == 0 or shelf.slice.shared]
    rooms = (room for shelf in shared if (room := find_required_amount(want, shelf)) is not None)
    return min((room.memory_bytes for room in rooms), default=want.kind.memory_bytes)


def _names(incumbents: Sequence[Occupant]) -> str:
    return ", ".join(sorted({incumbent.model for incumbent in incumbents}))
