"""Detects replicas whose pod the scheduler does not bind to the chosen node, and the nodes that models then avoid.
Pure.

After STRANDED_S the replica is placed on another node, if one has room; otherwise its pod keeps waiting. The model then
avoids the node for a back-off time; other models do not, since they may fit there. This does not count as a failed
start.
"""

from __future__ import annotations

from autoscaler.contract import ModelName
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.node_labels_and_taints import NodeBackoff
from autoscaler.state.world import NodeId, Replica, World

UNSCHEDULABLE = frozenset({"Unschedulable", "SchedulingGated"})
"""The part of `waits` before the colon while a scheduler finds no node, or while a queue (Kueue) does not let it search
(a pod's condition PodScheduled)."""
STRANDED_S = 5.0
"""A scheduler decides within milliseconds, and again as soon as a pod on that node is gone. If a pod is still unbound
after this time, the plan is wrong about that node."""
SHUN_S, SHUN_S_MAX = 120.0, 1800.0
"""Back-off of a node: the initial value, doubled with each repetition, and the maximum. The initial value is longer
than most clouds take to add a node, so that no replica leaves a node that is being created for it."""

FORGET_S = 2.0 * SHUN_S_MAX
"""A back-off that ended this long ago is forgotten."""


def is_unschedulable(waits: str) -> bool:
    """Whether it waits for the scheduler."""
    return waits.partition(":")[0] in UNSCHEDULABLE


def relocate_after_s(replica: Replica) -> float | None:
    """Return when it may be placed on another node; None: its pod is not rejected."""
    if replica.runtime.stranded_s is None or not replica.resources.slices or replica.state is not ReplicaState.STARTING:
        return None
    return replica.runtime.stranded_s + STRANDED_S


def nodes_of(world: World, replica: Replica) -> set[NodeId]:
    """Return the nodes of its slices."""
    return {world.nodes.slices[id].node for id in replica.resources.slices if id in world.nodes.slices}


def list_avoided_nodes(world: World, model: ModelName, now_s: float) -> tuple[NodeId, ...]:
    """Return the nodes that the model avoids now, in order."""
    backoffs = world.nodes.backoffs
    return tuple(sorted(node for (name, node), one in backoffs.items() if name == model and now_s < one.until_s))


def is_drain_final(replica: Replica) -> bool:
    """Whether it drains because it cannot stay on its slices, so that it must not be revived."""
    drain = replica.drain
    return drain is not None and (drain.stranded or drain.crowded or drain.taken)


def add_node_backoffs(world: World, replica: Replica, now_s: float) -> dict[tuple[ModelName, NodeId], NodeBackoff]:
    """Return all back-offs, with those of the nodes of this replica added or extended; forgotten ones are dropped.

    The first time that a node allocated other devices than chosen, it is retried at once.
    """
    after = {key: shun for key, shun in world.nodes.backoffs.items() if now_s < shun.until_s + FORGET_S}
    for node in nodes_of(world, replica):
        times = after[replica.model, node].times + 1 if (replica.model, node) in after else 1
        until_s = now_s + min(SHUN_S * 2.0 ** min(times - 1, 16), SHUN_S_MAX)
        until_s = now_s if times == 1 and replica.resources.chosen else until_s
        after[replica.model, node] = NodeBackoff(until_s=until_s, times=times)
    return after


def clear_node_backoffs(world: World, replica: Replica) -> dict[tuple[ModelName, NodeId], NodeBackoff]:
    """Return the back-offs without those of the replica's nodes, because it was scheduled there."""
    nodes = nodes_of(world, replica)
    return {key: shun for key, shun in world.nodes.backoffs.items() if key[0] != replica.model or key[1] not in nodes}
