"""Nodes as inventory: whole GPUs, as the device plug-in counts them and labels describe them. Pure.

Owns the reading of labels (GPU feature discovery's), and where the Settings' `nodes` count: for what the labels of a
node do not tell. A Slice's id is NODE/gpuN: which of a node's GPUs a pod gets is the kubelet's choice, so the number
only counts them. A GPU that a device plug-in shares is offered several times: it is one Slice all the same.
Of pods that are not ours it is only kept how many GPUs each has, and where: they are as many fewer for us.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from autoscaler.drivers.kubernetes.api import Object
from autoscaler.podspec import GPU
from autoscaler.settings import NodeDevice, NodeKind
from autoscaler.taints import Taint
from autoscaler.world import DeviceId, Isolation, NodeId, Slice, SliceId

PRODUCT, MEMORY_MIB, COUNT = "nvidia.com/gpu.product", "nvidia.com/gpu.memory", "nvidia.com/gpu.count"
UNKNOWN_BYTES = 1 << 30
"""Of a GPU whose memory nobody tells: little, so that nothing is placed on a guess."""


TAINTS_TOLD = frozenset({
    GPU, "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable",
})  # fmt: skip
"""Every pod of ours tolerates the first; the others say again what `usable` says."""
HOLDING = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"
"""Selects pods that have what they asked for."""


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
    taints: tuple[Taint, ...] = ()
    """By which it keeps pods away, as ours are without what a Model says."""


class OtherPod(NamedTuple):
    """What is kept of a pod that is not ours, and has GPUs."""

    node: str
    gpus: int


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
        tuple(
            Taint(one["key"], one.get("value", ""), one["effect"])
            for one in node["spec"].get("taints") or ()
            if one["effect"] != "PreferNoSchedule" and one["key"] not in TAINTS_TOLD
        ),
    )


def read_other(pod: Object) -> OtherPod | None:
    """None: it has no GPU. What containers have is theirs together; what the first ones take one after the other, and
    give back, counts where it is more.
    """
    spec = pod["spec"]
    first = [(one, _gpus(one)) for one in spec.get("initContainers") or ()]
    stay = sum(map(_gpus, spec["containers"])) + sum(n for one, n in first if one.get("restartPolicy") == "Always")
    gpus = max(stay, max((n for _, n in first), default=0))
    return OtherPod(spec["nodeName"], gpus) if gpus and spec.get("nodeName") else None


def _gpus(container: Object) -> int:
    limits: Mapping[str, object] = container.get("resources", {}).get("limits") or {}
    text = str(limits.get(GPU, 0))
    return int(text) if text.isdecimal() else 0


def others(nodes: Iterable[NodeSeen], slices: Iterable[Slice], pods: Iterable[OtherPod]) -> dict[NodeId, int]:
    """How many Slices of each node those pods leave none for. A node may have more GPUs than Slices."""
    spare = {NodeId(node.name): node.gpus for node in nodes}
    for slice_ in slices:
        spare[slice_.node] -= 1
    for pod in pods:
        if pod.node in spare:
            spare[NodeId(pod.node)] -= pod.gpus
    return {node: -left for node, left in spare.items() if left < 0}


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
            taints=node.taints,
        )
        for number in range(min(node.gpus, many))
    ]  # fmt: skip
