"""Migrates a replica by starting a successor elsewhere, and relocates stranded replicas. Pure.

Decides which replicas may move and where to. `autoscaler.rearrange.defragmentation` and
`autoscaler.rearrange.consolidation` decide when a move helps. Invariants: one replica moves at a time in the whole
cluster; a replica moves only after its minimum residency, and not again within AGAIN_S; a replica for which a
PodDisruptionBudget allows no disruption does not move. `autoscaler.planner.plan` starts the successor, and
`autoscaler.planner.reconcile` drains the replica that it replaces.

A stranded replica, whose pod is kept off its node for too long, causes a relocation request. The packer considers these
requests after all others. If the packer finds room for one, the stranded replica drains, and the next plan starts
another replica there. Otherwise the replica continues to wait (`autoscaler.queries.unschedulable_replicas`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.residency import residency_s
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.topology import add_spread_nodes
from autoscaler.placement.model.types import EvictionLevel, Placement, PlacementRequest, RestartCosts
from autoscaler.placement.packer import compute_claimed_bytes
from autoscaler.queries.operator_orders import is_stop_ordered
from autoscaler.queries.unschedulable_replicas import STRANDED_S, list_avoided_nodes, nodes_of, relocate_after_s
from autoscaler.spec.model import Model
from autoscaler.state.actions import DrainReplica
from autoscaler.state.lifecycle import BEGINNING
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import NO_HISTORY, Move, Replica, SliceId, World
from autoscaler.text import format_duration

REASON = "its pod cannot be scheduled on the chosen node"


class Elsewhere(NamedTuple):
    """Relocation requests with their replicas, and when the next one is due."""

    by_want: Mapping[PlacementRequest, Replica]
    next_s: float = inf


def build_relocation_requests(world: World, now_s: float, going: Collection[ReplicaId], others: int) -> Elsewhere:
    """Build the requests. `going`: replicas that stop anyway; `others`: number of requests that precede these."""
    found, next_s = dict[PlacementRequest, Replica](), inf
    for id in sorted(id for id, one in world.replicas.items() if one.runtime.stranded_s is not None):
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
    """Drain a stranded replica, since there is room elsewhere."""
    waits = replica.runtime.waits
    reason = f"{REASON} for more than {format_duration(STRANDED_S)}, and there is room elsewhere: {waits}"
    return DrainReplica(replica=replica.id, reason=reason, stranded=True)


AGAIN_S = 1800.0
"""Minimum time between two moves of a replica. By then the request that it made room for is placed or obsolete."""


class MigrationContext(NamedTuple):
    """Inputs of a search for moves."""

    world: World
    slice_index: SliceIndex
    restart_costs: RestartCosts
    now_s: float
    going: Collection[ReplicaId] = ()
    """Replicas that this plan drains."""
    changed_models: Collection[ModelName] = ()
    """Models that this plan changes in another way."""
    taken: Collection[SliceId] = ()
    """Slices that this plan assigns."""


class MigrationStep(NamedTuple):
    """One move for which a place was found."""

    move: Move
    home: Placement
    """Placement of the successor."""


class Stability(NamedTuple):
    """Whether a replica may move; if not, when it may without a new observation."""

    may: bool
    next_s: float = inf
    forbidden: bool = False
    """Only a PodDisruptionBudget prevents the move."""


def find_moving_replica(world: World, going: Collection[ReplicaId]) -> Replica | None:
    """Return the replica that a move in progress replaces; None if no move is in progress.
    If both replicas are ready and neither drains, both are wanted and the move is over.
    """
    for successor in world.replicas.values():
        old = None if successor.move is None else world.replicas.get(successor.move.replica)
        if old is not None and (successor.state in BEGINNING or old.state is not S.READY or old.id in going):
            return old
    return None


def check_stability(ground: MigrationContext, replica: Replica) -> Stability:
    """Check one replica and its model."""
    world, name = ground.world, replica.model
    model = world.models.get(name)
    if model is None or name in ground.changed_models or not can_migrate(world, model, replica):
        return Stability(may=False)
    others = [world.replicas[id] for id in world.by_model.get(name, ())]
    if any(one.state is not S.READY or one.id in ground.going for one in others):
        return Stability(may=False)
    history = world.learned.histories.get(name, NO_HISTORY)
    if name in world.learned.obstacles or history.tries or history.episodes:
        return Stability(may=False)
    since_s = replica.since_s if replica.times.ready_s is None else replica.times.ready_s
    due_s = since_s + residency_s(model, history)
    if replica.move is not None:
        due_s = max(due_s, replica.times.created_s + AGAIN_S)
    if ground.now_s < due_s:
        return Stability(may=False, next_s=due_s)
    forbidden = replica.id in world.nodes.undisturbed
    return Stability(may=not forbidden, forbidden=forbidden)


def can_migrate(world: World, model: Model, replica: Replica) -> bool:
    """Whether an identical replica could replace it (a surge start)."""
    own = model.adopted is None and not replica.runtime.rank and bool(replica.resources.slices)
    same = replica.spec_hash == model.spec_hash() and not is_stop_ordered(world, replica)
    return own and same and model.spec.rollout.surge > 0 and not model.spec.paused


def reserve_placement(ground: MigrationContext, replica: Replica, reason: str) -> Placement | None:
    """Find a new place and reserve it in the slice index; None if there is none."""
    index, world = ground.slice_index, ground.world
    model = world.models[replica.model]
    avoids = list_avoided_nodes(world, model.name, ground.now_s)
    asked = build_placement_request(model, 0, inf, EvictionLevel.NONE, reason, world.settings.pod, avoids)
    asked = asked._replace(kind=asked.kind._replace(spare_bytes=0))
    spread = add_spread_nodes(world, asked, {replica.id}).spread
    place = index.choose(asked.kind, asked.choice, asked.supplies, asked.trust, spread)
    if place is None:
        return None
    index.take(asked.kind, place)
    slices = index.slices(place)
    return Placement(asked, slices, compute_claimed_bytes(asked, (index.shelves[id] for id in slices)))
