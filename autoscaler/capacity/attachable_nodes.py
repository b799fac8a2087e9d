"""Nodes to which devices can be attached: how many each can have, and the properties of such a device. Pure.

Common to all fabrics. The maximum of a node must be configured: by Settings `nodes[].devicesMax` or, if no entry has
it, by Cluster Autoscaler's annotation on the node or on its MachineSet.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from autoscaler.spec.pod import GPU
from autoscaler.spec.settings import NodeKind, Settings, kind_of
from autoscaler.state.capacity import Group
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.world import NodeId, World

GPU_COUNT = "capacity.cluster-autoscaler.kubernetes.io/gpu-count"
"""Annotation: how many GPUs a node (of a group) can have."""
OWNER_KIND, OWNER_NAME = "cluster.x-k8s.io/owner-kind", "cluster.x-k8s.io/owner-name"
OWNER_NAMESPACE = "cluster.x-k8s.io/cluster-namespace"
"""Annotations that Cluster API sets on nodes."""
DEVICES_MAX = 64
"""Maximum for one node."""
_GIGABYTES = re.compile(r"(?:^|[^0-9])([0-9]{1,4})GB(?:$|[^a-zA-Z0-9])")


class AttachableNode(NamedTuple):
    """A node to which devices can be attached."""

    node: str
    most: int
    """Maximum number of devices, existing ones included."""
    parts: int = 1
    """Number of slices per device."""
    labels: Mapping[str, str] = {}
    taints: tuple[Taint, ...] = ()
    """Taints that can exclude replicas' pods."""


Groups = Mapping[str, tuple[int, Mapping[str, str]]]
"""By machine group: maximum devices of each of its nodes, and their labels (`capacity.group_machines_in_flight`)."""
NO_GROUPS: Groups = MappingProxyType({})


def list_attachable_nodes(
    nodes: Sequence[Mapping[str, Any]], settings: Settings, default: int = 0, groups: Groups = NO_GROUPS
) -> dict[str, AttachableNode]:
    """Select the Nodes that are ready, schedulable and have a maximum. `default`: the maximum if none is configured."""
    found = (_site(node, settings, groups, default) for node in nodes)
    return {one.node: one for one in found if one is not None}


def has_device_limit(nodes: Sequence[Mapping[str, Any]], settings: Settings, groups: Groups = NO_GROUPS) -> bool:
    """Whether a maximum is configured for any of these nodes, including unready and unschedulable ones."""
    found = ((read_annotated_limit(one["metadata"]), one["metadata"].get("labels") or {}) for one in nodes)
    return any(resolve_max_devices(said, labels, kind_of(labels, settings.nodes), groups) for said, labels in found)


def list_node_selectors(settings: Settings) -> tuple[str, ...]:
    """Label selectors of nodes with `devicesMax`; `""` (all nodes) if no Settings entry has it."""
    said = (one.selector for one in settings.nodes if one.devices_max is not None)
    return tuple(sorted({",".join(f"{key}={value}" for key, value in sorted(one.items())) for one in said})) or ("",)


def _site(node: Mapping[str, Any], settings: Settings, groups: Groups, default: int) -> AttachableNode | None:
    metadata, status = node["metadata"], node.get("status", {})
    ready = any(one["type"] == "Ready" and one["status"] == "True" for one in status.get("conditions") or ())
    if not ready or node.get("spec", {}).get("unschedulable") or "deletionTimestamp" in metadata:
        return None
    labels = metadata.get("labels") or {}
    kind = kind_of(labels, settings.nodes)
    most = resolve_max_devices(read_annotated_limit(metadata), labels, kind, groups) or default
    if not most:
        return None
    said = node.get("spec", {}).get("taints") or ()
    taints = (Taint(one["key"], one.get("value", ""), one["effect"]) for one in said)
    excluding = tuple(one for one in taints if one.effect != "PreferNoSchedule" and one.key != GPU)
    return AttachableNode(metadata["name"], min(most, DEVICES_MAX), _parts(kind), labels, excluding)


class AnnotatedLimit(NamedTuple):
    """The maximum number of devices in a Node's annotations."""

    most: int = 0
    """0: none is set."""
    group: str = ""
    """The group that owns the node, where Cluster API records it."""


def read_annotated_limit(metadata: Mapping[str, Any]) -> AnnotatedLimit:
    """Read the limit from a Node's metadata."""
    notes = metadata.get("annotations") or {}
    place = f"{notes.get(OWNER_NAMESPACE, '')}/{notes.get(OWNER_NAME, '')}"
    return AnnotatedLimit(
        parse_device_count(notes.get(GPU_COUNT)), f"{notes.get(OWNER_KIND, '')} {place}" if OWNER_NAME in notes else ""
    )


def resolve_max_devices(said: AnnotatedLimit, labels: Mapping[str, str], kind: NodeKind | None, groups: Groups) -> int:
    """Return the maximum number of devices of a node; 0 if none is set. Precedence: Settings, the node's annotation,
    its group's annotation. A node without a recorded group is matched to a group by labels.
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
    """Parse an annotation or a limit; 0 if it is not a number of devices."""
    text = str(said)
    return int(text) if len(text) <= 3 and text.isascii() and text.isdecimal() else 0


def find_device_memory(product: str, world: World) -> int | None:
    """Return the memory of one device of this product in bytes; None if it is unknown.
    Read from an existing device, else from the Settings, else from the product name, which rounds down.
    """
    for slice_ in world.nodes.slices.values():
        if slice_.product == product and slice_.memory_bytes:
            return slice_.device_bytes or slice_.memory_bytes
    for kind in world.settings.nodes:
        if kind.device.model == product:
            return int(kind.device.memory_bytes)
    named = _GIGABYTES.search(product)
    return None if named is None else int(named[1]) * 10**9


def count_devices_on_node(world: World, node: str) -> int:
    """How many devices of a node are visible."""
    return len({one.device for one in world.nodes.slices.values() if one.node == NodeId(node)})


def list_leased_nodes(world: World) -> frozenset[str]:
    """Nodes with devices of our orders, including those being released."""
    leases = world.capacity.leases.values()
    return frozenset(one.offer.node for one in leases if one.offer.node and one.committed)


def read_group_limits(world: World) -> Groups:
    """Maximum devices per node, for groups with the annotation."""
    return collect_group_limits(one.group for one in world.capacity.groups.values())


def collect_group_limits(groups: Iterable[Group]) -> Groups:
    """Maximum devices per node, for those of these groups that have the annotation."""
    return {one.name: (one.most, one.labels) for one in groups if one.most}
