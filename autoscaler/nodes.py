"""What agents of nodes measured, as far as it still counts. Pure.

Owns the age at which a report ends to count, and which Device of a report is which Slice's. A report that is too old is
no measurement, and none is not zero.
"""

from __future__ import annotations

from autoscaler.contract import NODE_EXPIRY_S, DeviceReport
from autoscaler.ordered import Node
from autoscaler.world import Slice, World


def fresh(node: Node, now_s: float) -> bool:
    """Whether what the agent said still counts."""
    return now_s < node.seen_s + NODE_EXPIRY_S


def measured(world: World, slice_: Slice, now_s: float) -> DeviceReport | None:
    """What the agent of its node measured lately of a Slice's Device; None: nothing that counts."""
    node = world.nodes.get(slice_.node)
    if node is None or not fresh(node, now_s):
        return None
    return next((device for device in node.report.devices if device.id == slice_.device), None)
