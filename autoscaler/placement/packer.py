"""The packer: places requests on slices and selects the replicas to evict for those that do not fit.

It serves production, what-if queries and simulation alike; `autoscaler.planner.plan` starts and drains the replicas.
Invariants: neither a slice nor the CPU or memory of a node is overcommitted; the devices of a request that needs a link
share one; no replica of higher priority, within its residency or with an awaited start is evicted; a request evicts on
one slice only (on one node if it takes several devices or the node is short of CPU or memory), and not at all while
room is coming; the result does not depend on the order of the input, which is not modified.

The victim set is minimal: with any victim spared, the requests that have room (placed or promised) could not all be
placed, on whatever slices. In such an alternative, a request that is placed now must be placed now too, with the memory
it was granted; a request with promised room must find it, in its turn, free, coming, or held by victims that it or an
earlier request there may evict. Mere preferences (cheap devices, weight copies, spreading, nearness) give way. This
holds within the search bounds of `autoscaler.placement.minimal_eviction`; beyond them a victim may be evicted in vain.

If there is room, `autoscaler.placement.index.node_arrays` chooses the place: preferred products, then cheap devices,
then near or apart from other replicas of the model, then nodes with its weights and image, then the least waste. An
elastic request may be granted less than it asks for (`autoscaler.placement.index.elastic`). If there is no room, the
cheapest way to make some is taken. Finally, requests that can grow get memory that is of no use to others
(`autoscaler.placement.growth`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cached_property, reduce
from math import isnan

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.eviction import COMING, EVICT, LOCKED, EvictionOption, Key, eviction_cost, sum_host_requests
from autoscaler.placement.eviction_options import EvictionSearch
from autoscaler.placement.growth import grow_placements, validate_growth
from autoscaler.placement.index.elastic import MEAN, ElasticBudget, place_elastic
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.minimal_eviction import find_fewer_victims
from autoscaler.placement.minimal_eviction_input import Assigned, Assignment, Evictee
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
    yard: SliceIndex,
    copies: Set[Copy],
    outlook: RestartCosts,
    now_s: float,
    *,
    told: bool = True,
) -> PackResult:
    """Place what fits, by priority, then longest unserved, then name; select victims for what does not fit.

    A request with victims is in `unmet` too: a later call places it, once they are gone. With `told=False` the search
    for the reason why a request has no room (now or ever) is skipped, which is faster. Raises ValueError for a request
    with an invalid amount, priority or `unserved_since_s`, without a model, or named twice, and for an invalid time.
    """
    if isnan(now_s):
        raise ValueError(f"now_s is {now_s}: expected a time in seconds")
    validate_growth(wanted)
    yard.locality.tell(copies)
    most = reduce(HostAmount.most, (want.kind.host_request for want in wanted), NOTHING) if yard.hosts else NOTHING
    ordered = _in_turn(wanted)

    first = PackRun(yard, outlook, now_s, most, told=told)
    yard.stock.mark()
    try:
        packing = _place_or_evict(ordered, first)
    finally:
        yard.rewind()
    assignments = first.minimise_evictions(packing.victims)
    if assignments is None:
        return packing
    again = PackRun(yard, outlook, now_s, most, told=told)
    yard.stock.mark()
    try:
        return _place_as_assigned(ordered, again, first.held, assignments)
    finally:
        yard.rewind()


def _place_or_evict(ordered: Sequence[PlacementRequest], bench: PackRun) -> PackResult:
    """Place each request in turn, or select the replicas whose eviction makes room for it."""
    placements: list[Placement] = []
    victims: dict[ReplicaId, tuple[Occupant, PlacementRequest]] = {}
    promised: dict[int, tuple[EvictionOption, ...]] = {}
    unmet: list[Unplaced] = []
    hopeless: dict[PlacementRequest, Unplaced] = {}
    for number, want in enumerate(ordered):
        placement = bench.place(number, want)
        if placement is not None:
            placements.append(placement)
            continue
        alike = want._replace(ordinal=0)
        if alike in hopeless:
            unmet.append(hopeless[alike]._replace(want=want))
            continue
        options = bench.cheapest(want)
        if options is None:
            hopeless[alike] = bench.hopeless(want)
            unmet.append(hopeless[alike])
        else:
            promised[len(unmet)] = options
            where = tuple(one.shelf.slice.id for one in options)
            unmet.append(Unplaced(want, bench.wait(options), promised=True, slices=where))
            victims |= {victim.replica: (victim, want) for victim in bench.evict(number, want, options)}
    spared = bench.spare([victim for victim, _ in victims.values()])
    for at, options in promised.items() if spared else ():
        unmet[at] = unmet[at]._replace(reason=bench.wait([bench.without(one, spared) for one in options]))
    going = (Victim(id, one.model, want) for id, (one, want) in victims.items() if id not in spared)
    return _whole(placements, going, unmet, bench)


def _place_as_assigned(
    ordered: Sequence[PlacementRequest], bench: PackRun, held: Mapping[int, Assigned], puts: Mapping[int, Assignment]
) -> PackResult:
    """Place the requests in `held` as `puts` says, those placed now first; then the others where they still fit."""
    placements: dict[int, Placement] = {}
    unmet: dict[int, Unplaced] = {}
    victims: list[Victim] = []
    for number in sorted(held, key=lambda number: (not held[number].now, number)):
        want, put = ordered[number], puts[number]
        placement = bench.start(number, want, held[number], put)
        if placement is not None:
            placements[number] = placement
            continue
        options = bench.options(held[number].want, put)
        unmet[number] = Unplaced(want, bench.wait(options), promised=True, slices=put.slices)
        victims += (Victim(one.replica, one.model, want) for one in bench.evict(number, want, options))
    for number, want in enumerate(ordered):
        if number not in held:
            placement = bench.place(number, want)
            if placement is None:
                unmet[number] = bench.hopeless(want)
            else:
                placements[number] = placement
    return _whole(
        [placements[number] for number in sorted(placements)],
        victims,
        [unmet[number] for number in sorted(unmet)],
        bench,
    )


def _whole(
    placements: Sequence[Placement], victims: Iterable[Victim], unmet: Sequence[Unplaced], bench: PackRun
) -> PackResult:
    """Build the result, and grow placements now that all other requests have their room."""
    going, waiting = tuple(victims), [one.want for one in unmet if not one.never]
    grown = grow_placements(placements, waiting, {one.replica for one in going}, bench.supposed)
    return PackResult(grown, going, tuple(unmet))


def _in_turn(wanted: Sequence[PlacementRequest]) -> list[PlacementRequest]:
    """Validate the requests and sort them by precedence. Raises ValueError: see `pack`."""
    named = set[tuple[ModelName, int]]()
    for want in wanted:
        if not want.model:
            raise ValueError("model of a request is empty: expected the name of a Model")
        if (want.model, want.ordinal) in named:
            raise ValueError(f"ordinal of a request is {want.ordinal} twice for {want.model}: expected each once")
        named.add((want.model, want.ordinal))
        urgency = want.urgency
        for field, amount in (("priority", urgency.priority), ("unserved_since_s", urgency.unserved_since_s)):
            if isnan(amount):
                raise ValueError(f"{field} of a request is {amount}: expected a number")
    return sorted(wanted, key=request_sort_key)


def request_sort_key(want: PlacementRequest) -> Key:
    """Sort key by precedence: priority, then longest unserved, then name."""
    return (-want.urgency.priority, want.urgency.unserved_since_s, want.model, want.ordinal)


class PackRun:
    """State of one call of the packer."""

    def __init__(self, yard: SliceIndex, outlook: RestartCosts, now_s: float, most: HostAmount, *, told: bool) -> None:
        self._yard = yard
        self._told = told
        self._now_s = now_s
        self._outlook = outlook
        self.supposed = Overlay(yard, most)
        self._ways = EvictionSearch(self.supposed, outlook, now_s)
        self._placed: dict[ModelName, list[NodeId]] = {}
        """Nodes given to requests with a spread, by model."""
        self.held: dict[int, Assigned] = {}
        """By number of the request in order: what it was granted or promised."""
        self._evicted: dict[ReplicaId, list[SliceId]] = {}
        self._unwelcome: set[ReplicaId] = set()
        """Replicas of conflicting tenants where room is promised: they leave whether their room is needed or not."""

    @cached_property
    def _budget(self) -> ElasticBudget:
        """The budget of elastic requests, to which this call adds what it places or promises."""
        return self._yard.budget()

    # --- room now -----------------------------------------------------------------------------------------------------

    def place(self, number: int, want: PlacementRequest) -> Placement | None:
        """Reserve room and lock the devices, because a replica is about to start. None: there is no room now."""
        yard, spread = self._yard, want.spread
        if spread is not None:
            spread = spread._replace(nodes=(*spread.nodes, *self._placed.get(want.model, ())))
        found = place_elastic(
            want.kind,
            lambda: self._budget,
            lambda kind: yard.choose(kind, want.choice, want.supplies, want.trust, spread),
            yard.granted,
        )
        place = None if found is None else found[0]
        node = None if place is None else yard.nodes[place.node]
        if want.kind.devices == 0:
            return self._start(number, want, want, (), node)
        if found is None or place is None:
            return None
        return self._start(number, want, want.granted(found[1].memory_bytes), yard.slices(place), node)

    def start(self, number: int, want: PlacementRequest, held: Assigned, put: Assignment) -> Placement | None:
        """Like `place`, on the slices of `put`. None: there is no room yet."""
        got, shelves = held.want, [self.supposed.shelf(id) for id in put.slices]
        node = shelves[0].slice.node if shelves else held.node
        host = None if node is None else self.supposed.host(node)
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
        return free and not self.supposed.strangers(got, shelf.slice)

    def _start(
        self, number: int, want: PlacementRequest, got: PlacementRequest, ids: tuple[SliceId, ...], node: NodeId | None
    ) -> Placement:
        """Record a placement. `got` is the request as it was granted."""
        if want.spread is not None and node is not None and ids:
            self._placed.setdefault(want.model, []).append(node)
        shelves = [self.supposed.shelf(id) for id in ids]
        for id in ids:
            shelf = self.supposed.change(id)
            room = find_required_amount(got, shelf)
            if room is None or not shelf.free.holds(room):
                raise AssertionError(f"{id} was chosen for {want.model}, and has no room for it")
            shelf.reserve(room)
            self.supposed.promise(want, shelf.slice)
            self.supposed.lock(shelf.slice)
        seat = self._seat(want, node)
        self.held[number] = Assigned(got, ids, True, seat)
        return Placement(want, ids, compute_claimed_bytes(got, shelves) if ids else want.kind.memory_bytes, seat)

    def _seat(self, want: PlacementRequest, node: NodeId | None) -> NodeId | None:
        """Reserve CPU and memory of the node, if its capacity is known."""
        host = None if node is None else self.supposed.host(node)
        if node is None or host is None:
            return None
        self.supposed.suppose(node, host.promised(want.kind.host_request))
        return node

    # --- room to be made ----------------------------------------------------------------------------------------------

    def hopeless(self, want: PlacementRequest) -> Unplaced:
        """Return the request as unplaced, with the reason."""
        if not self._told:
            return Unplaced(want, "")
        never = self._yard.why.never(want)
        if never is not None:
            return Unplaced(want, never, never=True)
        closed = self._yard.why.closed(want)
        scarce = self._yard.why.scarce(want)
        if want.kind.devices > 1:
            node = [self.supposed.shelf(id) for id in self._yard.why.team(want)]
            return Unplaced(want, team_reason(want, node, closed, self._now_s, scarce))
        best = self._yard.why.roomiest(want)
        why = unmet_reason(want, None if best is None else self.supposed.shelf(best), closed, self._now_s, scarce)
        if want.kind.spare_bytes and not self._budget.allows(want.kind.memory_bytes, want.least.kind.memory_bytes):
            why += f"; all elastic Replicas together are to have {MEAN // 10} % of what they ask for"
        return Unplaced(want, why)

    def cheapest(self, want: PlacementRequest) -> tuple[EvictionOption, ...] | None:
        """Return the options to take, one per device. None: there is no way now."""
        return self._ways.cheapest(want, lambda: self._budget)

    def options(self, got: PlacementRequest, put: Assignment) -> tuple[EvictionOption, ...]:
        """Return the options to take on the slices of `put`. `got` is the request as it was granted."""
        shelves = [self.supposed.shelf(id) for id in put.slices]
        here = {one.replica for shelf in shelves for one in shelf.incumbents}
        strangers = [self.supposed.strangers(got, shelf.slice) for shelf in shelves]
        here |= {one.replica for some in strangers for one in some}
        host = self.supposed.host(shelves[0].slice.node)
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
        """Promise the room to the request, so that no later request counts on it; return the victims, each once."""
        full = want.granted(want.kind.memory_bytes)
        got = full if all(find_required_amount(full, one.shelf) == one.need for one in options) else want.least
        self.held[number] = Assigned(got, tuple(one.shelf.slice.id for one in options), False)
        victims = {victim.replica: victim for option in options for victim in option.victims}
        chosen = [id for option in options for id in self._touched(option)]
        self.supposed.gone |= victims.keys()
        for replica, victim in victims.items():
            held = self._yard.held_by(victim, chosen)
            self._evicted[replica] = [id for id in held if self.supposed.holds(id, replica)]
            for id in self._evicted[replica]:
                shelf = self.supposed.change(id)
                shelf.evict(replica)
                self._yard.sync(shelf)
        for one in options:
            self._unwelcome |= {stranger.replica for stranger in one.strangers}
            shelf = self.supposed.change(one.shelf.slice.id)
            shelf.reserve(one.need)
            self.supposed.promise(want, shelf.slice)
            self._yard.sync(shelf)
        node = options[0].shelf.slice.node
        host = self.supposed.host(node)
        if host is not None:
            coming = host.coming.plus(sum_host_requests(victims.values()))
            self.supposed.suppose(node, host._replace(coming=coming).promised(want.kind.host_request))
        return tuple(victims.values())

    def spare(self, victims: Sequence[Occupant]) -> Set[ReplicaId]:
        """Return the victims that can stay, most expensive first, because later evictions made enough room."""
        spared: set[ReplicaId] = set()
        for victim in sorted(
            victims, key=lambda one: (*eviction_cost([one], self._outlook), one.replica), reverse=True
        ):
            shelves = [self.supposed.shelf(id) for id in self._evicted[victim.replica]]
            roomy = all(one.free.plus(one.coming).holds(victim.room) for one in shelves)
            node = shelves[0].slice.node
            host = self.supposed.host(node)
            roomy = roomy and (host is None or host.soon.holds(victim.beside))
            if not roomy or victim.replica in self._unwelcome:
                continue
            for one in shelves:
                one.keep(victim)
            if host is not None:
                self.supposed.hosts[node] = host.kept(victim.beside)
            spared.add(victim.replica)
        return spared

    def going(self, victims: Iterable[Victim]) -> list[Evictee]:
        """Return these victims with their slices, the most expensive first."""
        found: list[Evictee] = []
        for replica in (victim.replica for victim in victims):
            ids = self._evicted[replica]
            there = self._yard.shelf(ids[0]).incumbents
            found += [Evictee(one, tuple(ids)) for one in there if one.replica == replica][:1]
        return sorted(
            found, key=lambda one: (*eviction_cost([one.victim], self._outlook), one.victim.replica), reverse=True
        )

    def minimise_evictions(self, victims: Sequence[Victim]) -> dict[int, Assignment] | None:
        """Find an assignment of the requests in `held` that spares at least one victim; None: there is none."""
        going = self.going(victims)
        if not going or sum(max(1, one.want.kind.devices) for one in self.held.values()) < 2:
            return None  # for one request on one slice the victim set is minimal already
        found = find_fewer_victims([*self.held.values()], going, self._yard, self._now_s)
        return None if found is None else dict(zip(self.held, found, strict=True))

    def without(self, one: EvictionOption, spared: Set[ReplicaId]) -> EvictionOption:
        """Return the option with the spared replicas in place."""
        victims = tuple(victim for victim in one.victims if victim.replica not in spared)
        if len(victims) == len(one.victims):
            return one
        return one._replace(
            victims=victims, rung=EVICT if victims else COMING, shelf=self.supposed.shelf(one.shelf.slice.id)
        )

    def _touched(self, one: EvictionOption) -> Sequence[SliceId]:
        """Return the slices that its victims may be on."""
        if one.wide:
            return self._yard.slices_of(one.shelf.slice.node)
        return self._yard.together(one.shelf.slice) if one.strangers else (one.shelf.slice.id,)

    def wait(self, options: Sequence[EvictionOption]) -> str:
        """Explain why a request with promised room is not placed yet."""
        worst = max(options, key=lambda option: option.rung)
        there = self.supposed.around(worst.shelf.slice.node) if worst.wide else worst.shelf.incumbents
        return wait_reason(worst, there)


def wait_reason(one: EvictionOption, there: Iterable[Occupant]) -> str:
    """Explain why a request with this option is not placed yet. `there`: the replicas whose leaving may be awaited."""
    where = one.shelf.slice.id
    if one.rung == EVICT:
        return f"makes room on {where}: {_names(one.victims)} {_verb(one.victims)} to leave"
    leaving = tuple(i for i in (*one.strangers, *there) if i.leaving)
    if one.rung == COMING and leaving:
        return f"waits on {where} until {_names(leaving)} {_verb(leaving, 'has', 'have')} left"
    if one.rung == COMING:
        return f"waits on {where} for room that is promised"
    return f"waits on {where} until the Replica that is starting there is ready: one starts at a time"


def compute_claimed_bytes(want: PlacementRequest, shelves: Iterable[Bin]) -> int:
    """Return the bytes that the request claims on each of its slices."""
    shared = [shelf for shelf in shelves if want.kind.memory_bytes == 0 or shelf.slice.shared]
    rooms = (room for shelf in shared if (room := find_required_amount(want, shelf)) is not None)
    return min((room.memory_bytes for room in rooms), default=want.kind.memory_bytes)


def _names(incumbents: Sequence[Occupant]) -> str:
    return ", ".join(sorted({incumbent.model for incumbent in incumbents}))


def _verb(incumbents: Sequence[Occupant], one: str = "is", many: str = "are") -> str:
    return one if len({incumbent.model for incumbent in incumbents}) == 1 else many
