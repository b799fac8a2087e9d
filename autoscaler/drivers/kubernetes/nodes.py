"""Nodes as inventory: whole GPUs, as the device plug-in counts them and labels describe them. Pure.

Owns the reading of labels (GPU feature discovery's), and where the Settings' `nodes` count: for what the labels of a
node do not tell. A Slice's id is NODE/gpuN: which of a node's GPUs a pod gets is the kubelet's choice, so the number
only counts them. A GPU that a device plug-in shares is offered several times: it is one Slice all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autoscaler.drivers.kubernetes.api import Object
from autoscaler.podspec import GPU
from autoscaler.settings import NodeDevice, NodeKind
from autoscaler.world import DeviceId, Isolation, NodeId, Slice, SliceId

PRODUCT, MEMORY_MIB, COUNT = "nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.count"
UNKNOWN_BYTES = 1 << 30
"""Of a GPU whose memory nobody tells: little, so that nothing is placed on a guess."""


class NodeSeen(NamedTuple):
    """What is kept of a node."""

    name: str
    gpus: int
    """As many as pods may ask for."""
    labels: dict[str, str]
    usable: bool
    """Ready, and open to new pods."""
    lost: bool
    """Its kubelet is silent: what it runs may live, and nobody knows."""
    boot: str = ""
    """Differs at every start of its machine."""


def read(node: Object) -> NodeSeen:
    """Also of a node without GPUs, where the scheduler may have put a Replica."""
    status = node.get("status", {})
    gpus = str(status.get("allocatable", {}).get(GPU, 0))
    ready = next((one["status"] for one in status.get("conditions") or [] if one["type"] == "Ready"), "")
    return NodeSeen(
        node["metadata"]["name"],
        int(gpus) if gpus.isdecimal() else 0,
        node["metadata"].get("labels") or {},
        ready == "True" and not node["spec"].get("unschedulable", False),
        ready == "Unknown",
        status.get("nodeInfo", {}).get("bootID", ""),
    )


def slices(nodes: Sequence[NodeSeen], declared: Sequence[NodeKind] = ()) -> tuple[Slice, ...]:
    """All of them, in order. `declared`: the Settings' `nodes`."""
    return tuple(
        slice_ for node in sorted(nodes) if node.gpus for slice_ in _of(node, device_of(node.labels, declared))
    )


def device_of(labels: Mapping[str, str], declared: Sequence[NodeKind]) -> NodeDevice | None:
    """What the Settings say of the devices of a node with these labels; None: nothing."""
    return next((kind.device for kind in declared if kind.selector.items() <= labels.items()), None)


def _of(node: NodeSeen, declared: NodeDevice | None) -> list[Slice]:
    product, memory, count = (node.labels.get(name, "") for name in (PRODUCT, MEMORY_MIB, COUNT))
    memory_bytes = UNKNOWN_BYTES if declared is None else int(declared.memory_bytes)
    many = node.gpus if declared is None else declared.count
    if memory.isdecimal():
        memory_bytes = int(memory) << 20
    if count.isdecimal():
        many = int(count)
    if declared is not None:
        product = product or declared.model
    return [
        Slice(
            id=SliceId(f"{node.name}/gpu{number}"), device=DeviceId(f"{node.name}/gpu{number}"),
            node=NodeId(node.name), memory_bytes=memory_bytes, isolation=Isolation.HARDWARE, shared=False,
            product=product, healthy=node.usable, labels=node.labels, labels_known=True,
        )
        for number in range(min(node.gpus, many))
    ]  # fmt: skip
