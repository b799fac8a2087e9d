"""Detects replicas that a scheduler keeps off the chosen node, and which nodes models avoid for that. Pure.

Defines how this is recognized, how long it may last while there is room elsewhere, and for how long the node is then
avoided: by that model only, since another may fit there. It is not a failure: the model can start, only not there. If
there is no room elsewhere either, the pod keeps waiting where it is, for capacity.
"""

from __future__ import annotations

from autoscaler.contract import ModelName
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.node_labels import NodeBackoff
from autoscaler.state.world import NodeId, Replica, World

UNSCHEDULABLE = frozenset({"Unschedulable", "SchedulingGated"})
"""Beginnings of `waits` while a scheduler finds no node, or a queue (Kueue) does not let it search (a pod's condition
PodScheduled)."""
STRANDED_S = 5.0
"""A scheduler answers within milliseconds, and again as soon as a pod on that node is gone: if a pod is still kept off
after this time, the plan is wrong about that node. Being sure costs a request no more than this."""
SHUN_S, SHUN_S_MAX = 120.0, 1800.0
"""Back-off of a node: the first value, doubled each time that the model is kept off again, up to the second. The first
is longer than most clouds take to add a node, so that no replica leaves one that is being created for it."""

FORGET_S = 2.0 * SHUN_S_MAX
"""This long after the end of a back-off, the next one is a first one again."""


def is_unschedulable(waits: str) -> bool:
    """Whether it waits for the scheduler."""
    return waits.partition(":")[0] in UNSCHEDULABLE


def relocate_after_s(replica: Replica) -> float | None:
    """When it may relocate, if there is room elsewhere; None: nothing keeps it off."""
    if replica.runtime.stranded_s is None or not replica.resources.slices or replica.state is not ReplicaState.STARTING:
        return None
    return replica.runtime.stranded_s + STRANDED_S


def nodes_of(world: World, replica: Replica) -> set[NodeId]:
    """Nodes where it was placed."""
    return {world.nodes.slices[id].node for id in replica.resources.slices if id in world.nodes.slices}


def list_avoided_nodes(world: World, model: ModelName, now_s: float) -> tuple[NodeId, ...]:
    """The nodes that the model avoids now, in order."""
    backoffs = world.nodes.backoffs
    return tuple(sorted(node for (name, node), one in backoffs.items() if name == model and now_s < one.until_s))


def is_drain_final(replica: Replica) -> bool:
    """Whether it drains because it cannot stay where it is: reviving it would not help."""
    drain = replica.drain
    return drain is not None and (drain.stranded or drain.crowded or drain.taken)


def add_node_backoffs(world: World, replica: Replica, now_s: float) -> dict[tuple[ModelName, NodeId], NodeBackoff]:
    """All back-offs, now that it is given up; those that are long over are dropped.

    A node that gave it other devices than chosen is tried again at once, the first time.
    """
    after = {key: shun for key, shun in world.nodes.backoffs.items() if now_s < shun.until_s + FORGET_S}
    for node in nodes_of(world, replica):
        times = after[replica.model, node].times + 1 if (replica.model, node) in after else 1
        until_s = now_s + min(SHUN_S * 2.0 ** min(times - 1, 16), SHUN_S_MAX)
        until_s = now_s if times == 1 and replica.resources.chosen else until_s
        after[replica.model, node] = NodeBackoff(until_s=until_s, times=times)
    return after


def clear_node_backoffs(world: World, replica: Replica) -> dict[tuple[ModelName, NodeId], NodeBackoff]:
    """The back-offs without those of a replica's nodes: it was scheduled there."""
    nodes = nodes_of(world, replica)
    return {key: shun for key, shun in world.nodes.backoffs.items() if key[0] != replica.model or key[1] not in nodes}
