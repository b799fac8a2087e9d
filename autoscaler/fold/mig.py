"""Folds nodes that allow MIG repartitioning, and our orders to repartition them, into the `World`.

An order is in progress from the decision until its node shows the configuration, or until it is rejected. A new leader
starts without orders in progress: those that were issued are visible on the nodes. Never raises.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.fold.draft import Draft
from autoscaler.state.actions import CutNode
from autoscaler.state.mig import CutRefused, CuttableSeen, Intent

REFUSED_S = 60.0
"""Pause after a rejected order before the node is considered again."""


def apply_repartition(draft: Draft, action: CutNode) -> None:
    """Record that a repartition was decided."""
    intent = Intent(order=action.order, since_s=draft.now_s)
    draft.change_nodes(cutting={**draft.world.nodes.cutting, action.order.node: intent})


def apply_mig_observation(draft: Draft, seen: CuttableSeen | CutRefused) -> None:
    """Fold an observation about MIG nodes."""
    if isinstance(seen, CuttableSeen):
        _nodes(draft, seen)
    else:
        _refused(draft, seen)


def clear_repartition_orders(draft: Draft) -> None:
    """Forget orders in progress, because leadership changed."""
    if draft.world.nodes.cutting:
        draft.change_nodes(cutting={})


def _nodes(draft: Draft, seen: CuttableSeen) -> None:
    nodes = {node.name: node for node in seen.nodes}
    if nodes != draft.world.nodes.cuttable:
        draft.change_nodes(cuttable=nodes)
    left = {
        name: intent
        for name, intent in draft.world.nodes.cutting.items()
        if name in nodes and nodes[name].config != intent.order.config
    }
    if len(left) < len(draft.world.nodes.cutting):
        draft.change_nodes(cutting=left)


def _refused(draft: Draft, seen: CutRefused) -> None:
    intent = draft.world.nodes.cutting.get(seen.node)
    if intent is not None:
        refused = replace(intent, refused=seen.reason, again_s=draft.now_s + REFUSED_S)
        draft.change_nodes(cutting={**draft.world.nodes.cutting, seen.node: refused})
