"""Defragmentation: moves replicas where a placement request is unplaced only because free room is fragmented. Pure.

The search is bounded, so it may miss a solution. Guarantees beyond those of every move
(`autoscaler.rearrange.replica_migration`):

- The new place of each moved replica is free, given the moves before it.
- After the last move the request fits, and every move is necessary for that.
- The gained room is worth more than the starts cost.
- At most one move begins in EVERY_S, and none from or to a node where another replica starts or ends.

For a request that needs a whole partitioned GPU, all replicas on it move. `autoscaler.planner.plan` starts the first
successor.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, reduce
from itertools import combinations
from math import inf
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.placement.eviction import sum_amounts
from autoscaler.placement.model.predicates import describe_request, find_required_amount, node_exclusion_reason
from autoscaler.placement.model.topology import WORDS
from autoscaler.placement.model.types import Bin, EvictionLevel, NodeConstraints, Occupant, PlacementRequest, Unplaced
from autoscaler.placement.unplaced_reasons import Pieces, pieces_of
from autoscaler.queries.gateway_reports import is_demand_complete
from autoscaler.rearrange.replica_migration import (
    MigrationContext,
    MigrationStep,
    check_stability,
    find_moving_replica,
    reserve_placement,
)
from autoscaler.rearrange.vacate_gpu import group_parts_by_gpu
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.resources import NOTHING, HostAmount, RequestShape, ResourceAmount
from autoscaler.state.world import Move, NodeId, Replica, SliceId
from autoscaler.text import format_duration, format_size

EVERY_S = 300.0
"""Minimum interval between moves. A start reads a model's weights at full speed, which slows down others on that node
and on the network path. Most starts complete within this time, so that the next plan sees the result."""
WORTH_S = 600.0
"""Value of a device that becomes usable, in device-seconds; a start costs its duration on each of its devices."""
BUSY = 2.0
"""Cost factor of a replica with running requests, which finish on it while it and its successor hold their places."""
PRIORITY_MAX = 3
"""Each priority level of the request above the moved replicas doubles its gain and each level below halves it, up to
this many times.
"""
MOVES_MAX, CANDIDATES_MAX, PLACES_MAX = 4, 8, 16
"""Maximum numbers of moves for one request, of candidate replicas of a place (cheapest first), and of places (most room
first)."""
PROOFS_MAX = 16
"""Maximum sets of moves for which new places are sought, cheapest first."""
FORBIDDEN_NAMED_MAX = 3
"""Maximum models named as blocked by a PodDisruptionBudget."""
KINDS_MAX, WANTS_MAX = 32, 4
"""Maximum kinds of requests that are checked for fragmentation in one plan, in serving order; and maximum requests for
which moves are then sought.
"""


class Defragmented(NamedTuple):
    """The unplaced requests with updated reasons, and the moves that make room for one of them. Only the first move
    begins now.
    """

    unmet: tuple[Unplaced, ...]
    steps: tuple[MigrationStep, ...] = ()
    next_s: float = inf
    """When a move may be possible without a new observation."""


class Moves(NamedTuple):
    """A set of replicas whose moves make room at one place, and its cost."""

    key: tuple[float | int | ReplicaId, ...]
    leave: frozenset[ReplicaId]
    cost_s: float
    slices: tuple[SliceId, ...]
    """The slices for the request."""


def defragment(unmet: Sequence[Unplaced], ground: MigrationContext) -> Defragmented:
    """Find the first move for the first of these requests that moves can serve, and update the reasons of all."""
    search: _Search | None = None
    known: dict[tuple[RequestShape, NodeConstraints], Pieces] = {}
    reasons: dict[PlacementRequest, str] = {}
    after: list[Unplaced] = []
    for missing in unmet:
        after.append(missing)
        kind, urgency = missing.want.kind._replace(spare_bytes=0), missing.want.urgency._replace(unserved_since_s=0.0)
        want = missing.want._replace(ordinal=0, kind=kind, urgency=urgency, reason="")
        is_optional = missing.want.urgency.force <= EvictionLevel.NONE or missing.want.kind.devices <= 0
        if missing.never or missing.promised or is_optional:
            continue
        if want not in reasons and len(reasons) < WANTS_MAX:
            pieces = known.get((want.kind, want.choice))
            if pieces is None and len(known) < KINDS_MAX:
                pieces = known[want.kind, want.choice] = pieces_of(
                    ground.slice_index, want.kind, want.choice, PLACES_MAX
                )
            if pieces is not None and pieces.most < pieces.need <= pieces.total:
                search = search or _Search(ground)
                reasons[want] = (
                    f"needs {describe_request(want)}; {_free(want, pieces)}; {search.first(want, pieces.places)}"
                )
            elif pieces is not None and not pieces.places and want.kind.devices == 1:
                search = search or _Search(ground)
                places = tuple(parts for parts, whole in search.wholes.items() if _fits(want, whole))
                if places:
                    reasons[want] = f"{missing.reason}; {search.first(want, places)}"
        after[-1] = missing._replace(reason=reasons.get(want, missing.reason))
    return Defragmented(tuple(unmet)) if search is None else Defragmented(tuple(after), search.steps, search.next_s)


def _free(want: PlacementRequest, pieces: Pieces) -> str:
    if want.kind.devices > 1:
        where = WORDS[want.kind.link] if want.kind.link else "on one node"
        return f"{pieces.total} are free, at most {pieces.most} {where}"
    return f"{format_size(pieces.total)} is free, at most {format_size(pieces.most)} on one device"


class _Search:
    """Search for the requests of one plan."""

    def __init__(self, ground: MigrationContext) -> None:
        self._ground = ground
        self.steps: tuple[MigrationStep, ...] = ()
        self.next_s = inf
        world = ground.world
        self._moving = find_moving_replica(world, ground.going)
        self._settled: dict[ReplicaId, bool] = {}
        self._forbidden = set[ModelName]()
        """Models with a replica that only a PodDisruptionBudget prevents from moving."""
        restless = {
            world.nodes.slices[id].node
            for replica in world.replicas.values()
            if replica.state is not S.READY or replica.id in ground.going
            for id in replica.resources.slices
            if id in world.nodes.slices
        }
        self._restless: set[NodeId] = restless | {world.nodes.slices[id].node for id in ground.taken}

    @cached_property
    def wholes(self) -> Mapping[tuple[SliceId, ...], Bin]:
        """Parts of each GPU that becomes whole without its replicas."""
        return group_parts_by_gpu(self._ground.world, self._ground.slice_index)

    def first(self, want: PlacementRequest, places: Sequence[tuple[SliceId, ...]]) -> str:
        """Describe the action for the request; store the moves if one may begin now. `places`: where it could fit."""
        world, now_s = self._ground.world, self._ground.now_s
        if self._moving is not None:
            return f"{self._moving.model} moves from {self._where(self._moving.resources.slices)} first"
        if self.steps:
            return f"{self.steps[0].home.want.model} moves first, to make room for {self.steps[0].move.room_for}"
        # an earlier leader may have moved one recently
        due_s = max(world.leadership.leading_since_s, world.moved_s or 0.0) + EVERY_S
        if now_s < due_s:
            self.next_s = min(self.next_s, due_s)
            return f"the next replica may move in {format_duration(due_s - now_s)}"
        if not is_demand_complete(world, now_s):
            return "no replica moves while gateways do not report"
        found, why = self._cheapest(want, places)
        if not found:
            return why
        self.steps = found
        old, there = world.replicas[found[0].move.replica], found[0].home
        then = ", ".join(step.home.want.model for step in found[1:])
        begin = f"moves {old.model} from {self._where(old.resources.slices)} to {self._where(there.slices)} first"
        return f"{begin}, then {then}" if then else begin

    def _where(self, slices: Sequence[SliceId]) -> str:
        known = [self._ground.world.nodes.slices[id] for id in slices if id in self._ground.world.nodes.slices]
        return ", ".join(sorted({one.node if len(slices) > 1 else one.id for one in known})) or "nowhere"

    # --- replicas to move ---------------------------------------------------------------------------------------------

    def _cheapest(
        self, want: PlacementRequest, places: Sequence[tuple[SliceId, ...]]
    ) -> tuple[tuple[MigrationStep, ...], str]:
        """The cheapest moves after which the request fits; or none, and the reason."""
        ways = sorted((way for at in places for way in self._ways(want, at)), key=lambda way: way.key)
        if not ways:
            return (), self._no_move_reason()
        worth = [way for way in ways if way.cost_s < self._gain_s(want, way)]
        if not worth:
            return (), f"moving {self._names(ways[0])} would cost more than it gains"
        proofs = (self._proven(want, way) for way in worth[:PROOFS_MAX])
        steps = next(filter(None, proofs), ())
        return steps, f"there is no other place for {self._names(worth[0])}"

    def _no_move_reason(self) -> str:
        if not self._forbidden:
            return "no replica there may move now"
        return f"a PodDisruptionBudget forbids moving {', '.join(sorted(self._forbidden)[:FORBIDDEN_NAMED_MAX])}"

    def _names(self, way: Moves) -> str:
        replicas = self._ground.world.replicas
        return ", ".join(sorted({replicas[id].model for id in way.leave}))

    def _gain_s(self, want: PlacementRequest, way: Moves) -> float:
        """Gain in device-seconds, weighted by priority."""
        world = self._ground.world
        devices = want.kind.devices
        share = 1.0
        if devices == 1 and want.kind.memory_bytes:
            whole = self.wholes.get(way.slices)
            slice_ = world.nodes.slices[way.slices[0]] if whole is None else whole.slice
            share = min(1.0, want.kind.memory_bytes / slice_.memory_bytes)
        above = min(want.urgency.priority - world.models[world.replicas[id].model].spec.priority for id in way.leave)
        return devices * share * WORTH_S * 2.0 ** max(-PRIORITY_MAX, min(above, PRIORITY_MAX))

    def _ways(self, want: PlacementRequest, at: Sequence[SliceId]) -> Iterator[Moves]:
        """Minimal sets of replicas whose moves make room there."""
        shelves = [self._ground.slice_index.shelf(id) for id in at]
        if shelves[0].slice.node in self._restless:
            return
        by_id = {one.replica: one for shelf in shelves for one in shelf.incumbents if self._may_move(one, want)}
        prices = {id: self._price(one, self._ground.world.replicas[id]) for id, one in by_id.items()}
        cheap = sorted(by_id, key=lambda one: (by_id[one].busy, prices[one], one))[:CANDIDATES_MAX]
        found: list[frozenset[ReplicaId]] = []
        for many in range(1, MOVES_MAX + 1):
            for few in combinations(cheap, many):
                leave = frozenset(few)
                if any(less <= leave for less in found):
                    continue
                slices = self._freed(want, tuple(at), shelves, leave)
                if slices and self._has_host_resources(want, shelves[0].slice.node, leave):
                    found.append(leave)
                    cost_s, busy = sum(prices[id] for id in few), sum(by_id[id].busy for id in few)
                    yield Moves((busy, cost_s, many, *sorted(few)), leave, cost_s, slices)

    def _freed(
        self, want: PlacementRequest, at: tuple[SliceId, ...], shelves: Sequence[Bin], leave: Collection[ReplicaId]
    ) -> tuple[SliceId, ...]:
        """Slices that the request could use without these replicas; of a partitioned GPU all or none."""
        if at not in self.wholes:
            return _room(want, shelves, leave)
        there = {one.replica for shelf in shelves for one in shelf.incumbents}
        return at if leave == there and _fits(want, self.wholes[at]) else ()

    def _has_host_resources(self, want: PlacementRequest, node: NodeId, leave: Collection[ReplicaId]) -> bool:
        """Whether the node has enough CPU and memory without these replicas."""
        host = self._ground.slice_index.hosts.get(node)
        return host is None or host.left.plus(self._amounts(leave)).holds(want.kind.host_request)

    def _amounts(self, leave: Iterable[ReplicaId]) -> HostAmount:
        replicas = self._ground.world.replicas
        return reduce(HostAmount.plus, (replicas[id].resources.host_request for id in leave), NOTHING)

    def _price(self, incumbent: Occupant, replica: Replica) -> float:
        """Device-seconds of starting it elsewhere; at least one second per start, so that no move is free."""
        world = self._ground.world
        sizes = [world.nodes.slices[id].memory_bytes for id in replica.resources.slices if id in world.nodes.slices]
        share = 1.0 if incumbent.others else min(1.0, incumbent.room.memory_bytes / max(1, *sizes))
        restart_s = max(1.0, self._ground.restart_costs.restart_s(replica.model))
        return restart_s * share * len(replica.resources.slices) * (BUSY if incumbent.busy else 1.0)

    def _is_stable(self, replica: Replica) -> bool:
        found = check_stability(self._ground, replica)
        self.next_s = min(self.next_s, found.next_s)
        if found.forbidden:
            self._forbidden.add(replica.model)
        return found.may

    def _may_move(self, incumbent: Occupant, want: PlacementRequest) -> bool:
        id = incumbent.replica
        if id not in self._settled:
            self._settled[id] = self._is_stable(self._ground.world.replicas[id])
        return self._settled[id] and incumbent.model != want.model

    # --- new places ---------------------------------------------------------------------------------------------------

    def _proven(self, want: PlacementRequest, way: Moves) -> tuple[MigrationStep, ...]:
        """Find a new place for each replica, largest first, then room for the request; empty if that fails."""
        index, world = self._ground.slice_index, self._ground.world
        steps: list[MigrationStep] = []
        index.arrays.mark()
        try:
            for node in self._restless:
                index.set_aside(index.slices_of(node))
            index.set_aside(way.slices)
            leave = [world.replicas[id] for id in way.leave]
            for replica in sorted(
                leave, key=lambda one: (-len(one.resources.slices), -one.resources.memory_bytes, one.id)
            ):
                there = reserve_placement(self._ground, replica, f"move {replica.model}: makes room for {want.model}")
                if there is None:
                    return ()
                steps.append(MigrationStep(Move(replica=replica.id, room_for=want.model), there))
            if way.slices in self.wholes:
                return tuple(steps)
            for id in way.slices:
                index.set_free(id, _left(index.shelf(id), way.leave))
            index.gain(world.nodes.slices[way.slices[0]].node, self._amounts(way.leave))
            return tuple(steps) if index.choose(want.kind, want.choice, want.supplies, want.trust) is not None else ()
        finally:
            index.arrays.rewind()


def _fits(want: PlacementRequest, whole: Bin) -> bool:
    return find_required_amount(want, whole) is not None and not node_exclusion_reason(want.choice, whole.slice)


def _left(shelf: Bin, leave: Collection[ReplicaId]) -> ResourceAmount:
    """Free room of the slice without these replicas."""
    return shelf.free.plus(sum_amounts([one for one in shelf.incumbents if one.replica in leave]))


def _room(want: PlacementRequest, shelves: Sequence[Bin], leave: Collection[ReplicaId]) -> tuple[SliceId, ...]:
    """Slices that the request could use without these replicas, free ones first; empty if too few."""
    enough: list[tuple[bool, SliceId]] = []
    for shelf in shelves:
        room = find_required_amount(want, shelf)
        if room is not None and _left(shelf, leave).holds(room):
            enough.append((not shelf.free.holds(room), shelf.slice.id))
    return tuple(id for _, id in sorted(enough)[: want.kind.devices]) if len(enough) >= want.kind.devices else ()
