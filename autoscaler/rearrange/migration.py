"""Who is kept off its node for too long asks for a place elsewhere, and leaves for it if there is one. Pure.

Owns those PlacementRequests: they are asked of the packer beside all others and after them, and never placed. Where
there is room for one its Replica drains, and the next look starts another there; else it goes on waiting where it is
(`autoscaler.queries.stranded_pods`).

Moves: a Replica's successor starts elsewhere, and takes its place. Pure.

Owns who may move and where to, for whom that does some good: room in pieces (`autoscaler.rearrange.defragmentation`),
capacity that costs (`autoscaler.rearrange.consolidation`). Promises: one Replica moves at a time in the whole cluster;
only who has served its residency moves, and nobody again within AGAIN_S, so that nobody is sent to and fro; nobody of
whom a PodDisruptionBudget allows no disruption. It starts nothing: `autoscaler.planner.plan` starts the successor, and
`autoscaler.planner.reconcile` lets go whose place is taken.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.desired_replicas import BEGINNING, NO_HISTORY, residency_s
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.bins import build_placement_request
from autoscaler.placement.model.topology import add_spread_nodes
from autoscaler.placement.model.types import EvictionLevel, Placement, PlacementRequest, RestartCosts
from autoscaler.placement.packer import compute_claimed_bytes
from autoscaler.queries.cordons import is_stop_ordered
from autoscaler.queries.stranded_pods import STRANDED_S, list_avoided_nodes, nodes_of, relocate_after_s
from autoscaler.spec.model import Model
from autoscaler.state.actions import DrainReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Move, Replica, SliceId, World
from autoscaler.text import format_duration

REASON = "kept off its node"


class Elsewhere(NamedTuple):
    """The place elsewhere that each would take -> who that is; and when another asks, too."""

    by_want: Mapping[PlacementRequest, Replica]
    next_s: float = inf


def build_relocation_requests(world: World, now_s: float, going: Collection[ReplicaId], others: int) -> Elsewhere:
    """`going`: who leaves anyway; `others`: so many PlacementRequests go before these."""
    found, next_s = dict[PlacementRequest, Replica](), inf
    for id in sorted(id for id, one in world.replicas.items() if one.stranded_s is not None):
        replica = world.replicas[id]
        due_s, model = relocate_after_s(replica), world.models.get(replica.model)
        if due_s is not None and due_s > now_s:
            next_s = min(next_s, due_s)
        if due_s is None or now_s < due_s or id in going or model is None:
            continue
        avoids = tuple(sorted({*list_avoided_nodes(world, model.name, now_s), *nodes_of(world, replica)}))
        load = world.loads.get(model.name)
        force = EvictionLevel.BUSY if load is not None and load.waiting else EvictionLevel.LOWER
        found[build_placement_request(model, others + len(found), inf, force, REASON, world.settings.pod, avoids)] = (
            replica
        )
    return Elsewhere(found, next_s)


def drain_stranded_replica(replica: Replica) -> DrainReplica:
    """There is room elsewhere."""
    reason = (
        f"kept off its node for more than {format_duration(STRANDED_S)}, and there is room elsewhere: {replica.waits}"
    )
    return DrainReplica(replica=replica.id, reason=reason, stranded=True)


AGAIN_S = 1800.0
"""Who was moved stays so long: what it made room for has come by then, or is not wanted any more."""


class MigrationContext(NamedTuple):
    """What a search begins with."""

    world: World
    yard: SliceIndex
    outlook: RestartCosts
    now_s: float
    going: Collection[ReplicaId] = ()
    """Who leaves by this Plan."""
    astir: Collection[ModelName] = ()
    """Models about which this Plan does something else."""
    taken: Collection[SliceId] = ()
    """Slices that this Plan puts somebody on."""


class MigrationStep(NamedTuple):
    """One move, proven."""

    move: Move
    home: Placement
    """The successor's."""


class Stability(NamedTuple):
    """Whether a Replica is as it should be, and has been for a while; else when time alone makes it so."""

    may: bool
    next_s: float = inf
    forbidden: bool = False
    """Only a PodDisruptionBudget is in its way."""


def find_moving_replica(world: World, going: Collection[ReplicaId]) -> Replica | None:
    """The Replica that leaves its place, or is about to, because another takes it; None: no move is under way. Where
    both serve and neither goes, both are wanted by now: that move is over.
    """
    for heir in world.replicas.values():
        old = None if heir.move is None else world.replicas.get(heir.move.replica)
        if old is not None and (heir.state in BEGINNING or old.state is not S.READY or old.id in going):
            return old
    return None


def check_stability(ground: MigrationContext, replica: Replica) -> Stability:
    """Of one Replica and its Model."""
    world, name = ground.world, replica.model
    model = world.models.get(name)
    if model is None or name in ground.astir or not can_migrate(world, model, replica):
        return Stability(may=False)
    others = [world.replicas[id] for id in world.by_model.get(name, ())]
    if any(one.state is not S.READY or one.id in ground.going for one in others):
        return Stability(may=False)
    history = world.histories.get(name, NO_HISTORY)
    if name in world.obstacles or history.tries or history.episodes:
        return Stability(may=False)
    since_s = replica.since_s if replica.ready_s is None else replica.ready_s
    due_s = since_s + residency_s(model, history)
    if replica.move is not None:
        due_s = max(due_s, replica.created_s + AGAIN_S)
    if ground.now_s < due_s:
        return Stability(may=False, next_s=due_s)
    forbidden = replica.id in world.undisturbed
    return Stability(may=not forbidden, forbidden=forbidden)


def can_migrate(world: World, model: Model, replica: Replica) -> bool:
    """Whether another could be started beside it that is just like it, and then it could go."""
    own = model.adopted is None and not replica.rank and bool(replica.slices)
    same = replica.spec_hash == model.spec_hash() and not is_stop_ordered(world, replica)
    return own and same and model.spec.rollout.surge > 0 and not model.spec.paused


def reserve_placement(ground: MigrationContext, replica: Replica, reason: str) -> Placement | None:
    """Where it would be, which it takes in the Yard; None: nowhere."""
    yard, world = ground.yard, ground.world
    model = world.models[replica.model]
    avoids = list_avoided_nodes(world, model.name, ground.now_s)
    asked = build_placement_request(model, 0, inf, EvictionLevel.NONE, reason, world.settings.pod, avoids)._replace(
        spare_bytes=0
    )
    spread = add_spread_nodes(world, asked, {replica.id}).spread
    place = yard.choose(asked.kind, asked.choice, asked.supplies, asked.trust, spread)
    if place is None:
        return None
    yard.take(asked.kind, place)
    slices = yard.slices(place)
    return Placement(asked, slices, compute_claimed_bytes(asked, (yard.shelves[id] for id in slices)))
