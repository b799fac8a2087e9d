"""How nodes that may be cut anew, and our orders about them, get into the World.

Owns an order's way: on its way from the decision until its node shows it, or until it is refused. Whoever begins to
lead has none on its way: what was given stands on the nodes. Never raises.
"""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.fold.draft import Draft
from autoscaler.state.actions import CutNode
from autoscaler.state.mig import CutRefused, CuttableSeen, Intent

REFUSED_S = 60.0
"""A node for which an order was refused is left alone for so long."""


def apply_repartition(draft: Draft, action: CutNode) -> None:
    """It was decided."""
    intent = Intent(order=action.order, since_s=draft.now_s)
    draft.change(cutting={**draft.world.cutting, action.order.node: intent})


def apply_mig_observation(draft: Draft, seen: CuttableSeen | CutRefused) -> None:
    """Takes one of them."""
    if isinstance(seen, CuttableSeen):
        _nodes(draft, seen)
    else:
        _refused(draft, seen)


def clear_repartition_orders(draft: Draft) -> None:
    """Another leads, or we do anew."""
    if draft.world.cutting:
        draft.change(cutting={})


def _nodes(draft: Draft, seen: CuttableSeen) -> None:
    nodes = {node.name: node for node in seen.nodes}
    if nodes != draft.world.cuttable:
        draft.change(cuttable=nodes)
    left = {
        name: intent
        for name, intent in draft.world.cutting.items()
        if name in nodes and nodes[name].config != intent.order.config
    }
    if len(left) < len(draft.world.cutting):
        draft.change(cutting=left)


def _refused(draft: Draft, seen: CutRefused) -> None:
    intent = draft.world.cutting.get(seen.node)
    if intent is not None:
        told = replace(intent, refused=seen.reason, again_s=draft.now_s + REFUSED_S)
        draft.change(cutting={**draft.world.cutting, seen.node: told})
