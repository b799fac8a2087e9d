"""Nodes as inventory: whole GPUs, as the device plug-in counts them and its labels describe them. Pure.

Owns the reading of labels (GPU feature discovery's). A Slice's id is NODE/gpuN: which of a node's GPUs a pod gets is
the kubelet's choice, so the number only counts them.
"""

from __future__ import annotations

from typing import NamedTuple

from autoscaler.drivers.kubernetes.api import Object
from autoscaler.podspec import GPU
from autoscaler.world import DeviceId, Isolation, NodeId, Slice, SliceId

PRODUCT, MEMORY_MIB = "nvidia.com/gpu.product", "nvidia.com/gpu.memory"
UNKNOWN_BYTES = 1 << 30
"""Of a GPU whose memory no label tells: little, so that nothing is placed on a guess."""


class NodeSeen(NamedTuple):
    """What is kept of a node."""

    name: str
    gpus: int
    product: str
    memory_bytes: int
    usable: bool
    """Ready, and open to new pods."""
    lost: bool
    """Its kubelet is silent: what it runs may live, and nobody knows."""


def read(node: Object) -> NodeSeen:
    """Also of a node without GPUs, where the scheduler may have put a Replica."""
    status, labels = node.get("status", {}), node["metadata"].get("labels") or {}
    gpus = str(status.get("allocatable", {}).get(GPU, 0))
    ready = next((one["status"] for one in status.get("conditions") or [] if one["type"] == "Ready"), "")
    memory = labels.get(MEMORY_MIB, "")
    return NodeSeen(
        node["metadata"]["name"],
        int(gpus) if gpus.isdecimal() else 0,
        labels.get(PRODUCT, ""),
        int(memory) << 20 if memory.isdecimal() else UNKNOWN_BYTES,
        ready == "True" and not node["spec"].get("unschedulable", False),
        ready == "Unknown",
    )


def slices(nodes: list[NodeSeen]) -> tuple[Slice, ...]:
    """All of them, in order."""
    return tuple(
        Slice(
            id=SliceId(f"{node.name}/gpu{number}"), device=DeviceId(f"{node.name}/gpu{number}"),
            node=NodeId(node.name), memory_bytes=node.memory_bytes, isolation=Isolation.HARDWARE, shared=False,
            product=node.product, healthy=node.usable,
        )
        for node in sorted(nodes)
        for number in range(node.gpus)
    )  # fmt: skip
