"""Nodes that can be added, for tests of providers: a T4 with three shares in Settings, and an order."""

from __future__ import annotations

from autoscaler.contract import ModelName
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing
from autoscaler.state.capacity import AcquireOrder, LeaseId, Offer, lease_name
from tests.support.builders.worlds import GI

T4_NODES = (
    NodeKind(
        selector={"node.kubernetes.io/instance-type": "g4dn.xlarge"},
        device=NodeDevice(model="T4", memory_bytes=Bytes(16 * GI)),
        slicing=NodeSlicing(kind="timeslice", replicas=3),
    ),
)


def t4_order(provider: str = "g4") -> AcquireOrder:
    """An order for one such node."""
    owner = ModelName("llama-8b")
    offer = Offer(provider=provider, name="g4dn.xlarge/on-demand", product="T4", memory_bytes=16 * GI, parts=3)
    return AcquireOrder(
        id=LeaseId(provider, lease_name(provider, owner, 0)), offer=offer, devices=1, owner=owner, epoch=3, due_s=1e9
    )
