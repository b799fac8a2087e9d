"""Replicas that a scheduler keeps off the node that was chosen for them, and the nodes shunned for it. Pure.

Owns the word by which that is known, how long it may last while there is room elsewhere, and for how long the node is
shunned then: by that Model, since another may fit there. It is no failure: the Model can start, only not there. Where
there is no room elsewhere either, the pod keeps waiting where it is: for capacity.
"""

from __future__ import annotations

from autoscaler.contract import ModelName
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.node_labels import NodeBackoff
from autoscaler.state.world import NodeId, Replica, World

UNSCHEDULABLE = frozenset({"Unschedulable", "SchedulingGated"})
"""What `waits` begins with while a scheduler finds no node, or a queue (Kueue) does not let it look for one (a pod's
condition PodScheduled)."""
STRANDED_S = 5.0
"""A scheduler answers within milliseconds, and again as soon as a pod on that node is gone: who is still kept off after
that is in a place that the plan is wrong about. To be sure that it is costs a Call no more than that."""
SHUN_S, SHUN_S_MAX = 120.0, 1800.0
"""The first time and at most: twice as long each time that the Model is kept off again. The first is longer than most
clouds take to add a node, so that nobody leaves one that is being made for it."""

FORGET_S = 2.0 * SHUN_S_MAX
"""After the end of a shun the next one is a first one again."""


def is_unschedulable(waits: str) -> bool:
    """Whether it is the scheduler that it waits for."""
    return waits.partition(":")[0] in UNSCHEDULABLE


def relocate_after_s(replica: Replica) -> float | None:
    """From when on it goes where there is room, if there is any; None: nothing keeps it off."""
    if replica.stranded_s is None or not replica.slices or replica.state is not ReplicaState.STARTING:
        return None
    return replica.stranded_s + STRANDED_S


def nodes_of(world: World, replica: Replica) -> set[NodeId]:
    """Where it was placed."""
    return {world.slices[id].node for id in replica.slices if id in world.slices}


def list_avoided_nodes(world: World, model: ModelName, now_s: float) -> tuple[NodeId, ...]:
    """The nodes that the Model shuns now, in order."""
    return tuple(sorted(node for (name, node), shun in world.shuns.items() if name == model and now_s < shun.until_s))


def is_drain_final(replica: Replica) -> bool:
    """Whether it drains because it cannot be where it is: to take it back would help nobody."""
    drain = replica.drain
    return drain is not None and (drain.stranded or drain.crowded or drain.taken)


def add_node_backoffs(world: World, replica: Replica, now_s: float) -> dict[tuple[ModelName, NodeId], NodeBackoff]:
    """All shuns, now that it is given up; those that are long over are forgotten. A node where it was given what
    was not chosen is tried again at once, the first time.
    """
    after = {key: shun for key, shun in world.shuns.items() if now_s < shun.until_s + FORGET_S}
    for node in nodes_of(world, replica):
        times = after[replica.model, node].times + 1 if (replica.model, node) in after else 1
        until_s = now_s + min(SHUN_S * 2.0 ** min(times - 1, 16), SHUN_S_MAX)
        until_s = now_s if times == 1 and replica.chosen else until_s
        after[replica.model, node] = NodeBackoff(until_s=until_s, times=times)
    return after


def clear_node_backoffs(world: World, replica: Replica) -> dict[tuple[ModelName, NodeId], NodeBackoff]:
    """The shuns without those of a Replica's nodes: it was let onto them."""
    nodes = nodes_of(world, replica)
    return {key: shun for key, shun in world.shuns.items() if key[0] != replica.model or key[1] not in nodes}
