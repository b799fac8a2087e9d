"""Nodes to which Devices may be attached: how many each can have, and what such a Device is. Pure.

Owns these answers for every fabric. A node has a most only if somebody says so: Settings `nodes[].devicesMax`, or where
these say it of no node, Cluster Autoscaler's annotation for it, on the node or on the MachineSet that it is of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from autoscaler.spec.pod import GPU
from autoscaler.spec.settings import NodeKind, Settings, kind_of
from autoscaler.state.node_labels import Taint
from autoscaler.state.world import NodeId, World

GPU_COUNT = "capacity.cluster-autoscaler.kubernetes.io/gpu-count"
"""Annotation: how many GPUs a node (of a group) can have."""
OWNER_KIND, OWNER_NAME = "cluster.x-k8s.io/owner-kind", "cluster.x-k8s.io/owner-name"
OWNER_NAMESPACE = "cluster.x-k8s.io/cluster-namespace"
"""Annotations that Cluster API puts on nodes."""
DEVICES_MAX = 64
"""Of one node."""
_GIGABYTES = re.compile(r"(?:^|[^0-9])([0-9]{1,4})GB(?:$|[^a-zA-Z0-9])")


class AttachableNode(NamedTuple):
    """A node to which Devices may be attached."""

    node: str
    most: int
    """It can have so many Devices, its own among them."""
    parts: int = 1
    """Each is offered so many times there."""
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    """By which it keeps pods of ours away."""


Groups = Mapping[str, tuple[int, Mapping[str, str]]]
"""By name: how many Devices each node of a group of machines can have, and labels of those
(`autoscaler.capacity.machine_groups`).
"""
NO_GROUPS: Groups = MappingProxyType({})


def list_attachable_nodes(
    nodes: Sequence[Mapping[str, Any]], settings: Settings, untold: int = 0, groups: Groups = NO_GROUPS
) -> dict[str, AttachableNode]:
    """Of Node objects: those that are ready, open, and have a most. `untold`: of those of which nobody says it."""
    found = (_site(node, settings, groups, untold) for node in nodes)
    return {one.node: one for one in found if one is not None}


def has_device_limit(nodes: Sequence[Mapping[str, Any]], settings: Settings, groups: Groups = NO_GROUPS) -> bool:
    """Whether anybody says of any of these how many Devices it can have, be it ready and open or not."""
    found = ((read_annotated_limit(one["metadata"]), one["metadata"].get("labels") or {}) for one in nodes)
    return any(resolve_max_devices(said, labels, kind_of(labels, settings.nodes), groups) for said, labels in found)


def list_node_selectors(settings: Settings) -> tuple[str, ...]:
    """By which labels such nodes are asked for; `""`: all nodes, since only they can say it."""
    said = (one.selector for one in settings.nodes if one.devices_max is not None)
    return tuple(sorted({",".join(f"{key}={value}" for key, value in sorted(one.items())) for one in said})) or ("",)


def _site(node: Mapping[str, Any], settings: Settings, groups: Groups, untold: int) -> AttachableNode | None:
    metadata, status = node["metadata"], node.get("status", {})
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    if not ready or node.get("spec", {}).get("unschedulable") or "deletionTimestamp" in metadata:
        return None
    labels = metadata.get("labels") or {}
    kind = kind_of(labels, settings.nodes)
    most = resolve_max_devices(read_annotated_limit(metadata), labels, kind, groups) or untold
    if not most:
        return None
    said = node.get("spec", {}).get("taints") or ()
    taints = (Taint(one["key"], one.get("value", ""), one["effect"]) for one in said)
    shuns = tuple(one for one in taints if one.effect != "PreferNoSchedule" and one.key != GPU)
    return AttachableNode(metadata["name"], min(most, DEVICES_MAX), _parts(kind), labels, shuns)


class AnnotatedLimit(NamedTuple):
    """What a Node's annotations say of how many Devices it can have."""

    most: int = 0
    """0: nothing."""
    group: str = ""
    """Whose node it is, where Cluster API notes that."""


def read_annotated_limit(metadata: Mapping[str, Any]) -> AnnotatedLimit:
    """Of a Node object."""
    notes = metadata.get("annotations") or {}
    place = f"{notes.get(OWNER_NAMESPACE, '')}/{notes.get(OWNER_NAME, '')}"
    return AnnotatedLimit(
        parse_device_count(notes.get(GPU_COUNT)), f"{notes.get(OWNER_KIND, '')} {place}" if OWNER_NAME in notes else ""
    )


def resolve_max_devices(said: AnnotatedLimit, labels: Mapping[str, str], kind: NodeKind | None, groups: Groups) -> int:
    """How many Devices a node can have: as the Settings say, else itself, else its group, which its labels tell where
    nothing else does; 0: nobody says.
    """
    if kind is not None and kind.devices_max is not None:
        return kind.devices_max
    if said.most or said.group:
        return said.most or groups.get(said.group, (0, {}))[0]
    of = (most for most, theirs in groups.values() if theirs and theirs.items() <= labels.items())
    return next(of, 0)


def _parts(kind: NodeKind | None) -> int:
    slicing = None if kind is None else kind.slicing
    return (slicing.replicas or 1) if slicing is not None and slicing.kind in {"timeslice", "mps"} else 1


def parse_device_count(said: object) -> int:
    """How many an annotation or a limit says; 0: that is no number of Devices."""
    text = str(said)
    return int(text) if len(text) <= 3 and text.isascii() and text.isdecimal() else 0


def find_device_memory(product: str, world: World) -> int | None:
    """Bytes of one such Device: as one that is there has it, as the Settings say it, or as its name does, which is a
    little less than it has; None: nobody says.
    """
    for slice_ in world.slices.values():
        if slice_.product == product and slice_.memory_bytes:
            return slice_.device_bytes or slice_.memory_bytes
    for kind in world.settings.nodes:
        if kind.device.model == product:
            return int(kind.device.memory_bytes)
    named = _GIGABYTES.search(product)
    return None if named is None else int(named[1]) * 10**9


def count_devices_on_node(world: World, node: str) -> int:
    """How many Devices of a node are seen."""
    return len({one.device for one in world.slices.values() if one.node == NodeId(node)})


def list_leased_nodes(world: World) -> frozenset[str]:
    """Nodes on which Devices are by Leases of ours, on their way back, too: what they would take with them."""
    leases = world.capacity.leases.values()
    return frozenset(one.offer.node for one in leases if one.offer.node and one.committed)
