"""Nodes as inventory: the facts kept about nodes, and the resulting slices. Pure.

Parses Node objects; the Slicers (`autoscaler.slicing`) know how a node's devices are shared. The limit of pods per node
is not checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import (
    DEVICES_MAX,
    NO_GROUPS,
    AnnotatedLimit,
    Groups,
    read_annotated_limit,
    resolve_max_devices,
)
from autoscaler.drivers.kubernetes.inventory import node_cordons
from autoscaler.drivers.kubernetes.objects.other_pods import OtherPod
from autoscaler.kubernetes.api import Object
from autoscaler.slicing import slicers
from autoscaler.slicing.dra import Got, common_claim_name, dra_device_name
from autoscaler.slicing.hami import drop_healthy_handshake
from autoscaler.slicing.kai import KAI
from autoscaler.slicing.nvidia_device_plugin import parse_number
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.slicing.vendors import RESOURCES
from autoscaler.spec.pod import GPU
from autoscaler.spec.settings import NodeKind, kind_of
from autoscaler.state.images import Image, make_image
from autoscaler.state.node_labels_and_taints import UNNEEDED, Taint
from autoscaler.state.pod_requests import parse_resource_list
from autoscaler.state.resources import NOTHING, HostAmount
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId

RESLICED = "a replica still uses its device with a previous sharing mode"

COVERED_TAINTS = RESOURCES | frozenset({
    GPU, "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "node.kubernetes.io/unschedulable",
})  # fmt: skip
"""Taints that are not kept: our pods tolerate those of their devices, and `usable` covers the others."""
IMAGES_MAX = 200
"""Limit per node. Kubelets report their 50 largest, unless `nodeStatusMaxImages` is set."""


class NodeSeen(NamedTuple):
    """The facts kept about a node."""

    name: str
    labels: dict[str, str]
    usable: bool
    """Ready and schedulable."""
    lost: bool
    """Its kubelet does not report: its pods may be alive."""
    boot: str = ""
    """Changes with every boot of the machine."""
    taints: tuple[Taint, ...] = ()
    """Taints that exclude a pod unless its model tolerates them, and taints that mark the node as unneeded."""
    amounts: Mapping[str, str] = {}
    """Allocatable extended resources: those with a `/` in their name."""
    annotations: Mapping[str, str] = {}
    """The annotations that Slicers read."""
    cpu_memory: HostAmount = NOTHING
    """CPU and memory that pods may use; `NOTHING` if the node does not report them."""
    cordoned: frozenset[str] = frozenset()
    """Devices that an operator cordoned."""
    images: tuple[Image, ...] = ()
    """The images that the kubelet reports, at most `IMAGES_MAX`."""
    kubelet: str = ""
    """Version of the kubelet."""
    runtime: str = ""
    """Container runtime, such as `containerd://2.1.4`."""
    annotated_limit: AnnotatedLimit = AnnotatedLimit()
    """How many devices it can have, including those attached later."""


def read_node(node: Object) -> NodeSeen:
    """Parse a Node, also one without GPUs, where the scheduler may have placed a replica."""
    status = node.get("status", {})
    allocatable: dict[str, str | int] = status.get("allocatable", {})
    amounts = {name: str(many) for name, many in allocatable.items() if "/" in name}
    notes: dict[str, str] = node["metadata"].get("annotations") or {}
    ready = next((one["status"] for one in status.get("conditions") or [] if one["type"] == "Ready"), "")
    info: dict[str, str] = status.get("nodeInfo") or {}
    return NodeSeen(
        node["metadata"]["name"],
        node["metadata"].get("labels") or {},
        ready == "True" and not node["spec"].get("unschedulable", False),
        ready == "Unknown",
        info.get("bootID", ""),
        tuple(
            Taint(one["key"], one.get("value", ""), one["effect"])
            for one in node["spec"].get("taints") or ()
            if one["key"] in UNNEEDED or (one["effect"] != "PreferNoSchedule" and one["key"] not in COVERED_TAINTS)
        ),
        amounts,
        drop_healthy_handshake({name: said for name, said in notes.items() if name in slicers.ANNOTATIONS}),
        parse_resource_list(allocatable),
        frozenset(one.place.name for one in node_cordons.read_node_orders(node).kept if one.place.kind == "device"),
        tuple(
            make_image(tuple(one.get("names") or ()), one.get("sizeBytes", 0))
            for one in (status.get("images") or ())[:IMAGES_MAX]
        ),
        sys.intern(str(info.get("kubeletVersion", ""))),
        sys.intern(str(info.get("containerRuntimeVersion", ""))),
        read_annotated_limit(node["metadata"]),
    )


def count_taken_slices(nodes: Iterable[NodeSeen], slices: Iterable[Slice], pods: Iterable[OtherPod]) -> dict[str, int]:
    """Count, per `Slice.counted`, the slices made unavailable by these pods.
    Units of a node beyond its slices are used up first.
    """
    there = {f"{node.name} {name}": parse_number(many) for node in nodes for name, many in node.amounts.items()}
    slices = list(slices)
    spare: dict[str, dict[str, int]] = {}
    for slice_ in slices:
        if slice_.counted in there:
            left = spare.setdefault(slice_.node, {})
            left[slice_.handle] = left.get(slice_.handle, there[slice_.counted]) - 1
    kais = {slice_.node for slice_ in slices if slice_.kind == KAI}
    for pod in pods:
        left, by_kai = spare.get(pod.node, {}), pod.node in kais
        for name in left:
            whole = 0 if by_kai and pod.reserves else pod.amounts.get(name, 0)
            left[name] -= whole + pod.lost + (pod.kai if by_kai else 0)
    return {f"{node} {name}": -many for node, left in spare.items() for name, many in left.items() if many < 0}


Made = dict[str, tuple[tuple[NodeFacts, bool, tuple[Taint, ...]], tuple[Slice, ...]]]
"""Node -> (inputs of its slices, its slices): most nodes do not change from one call to the next."""


def build_slices(
    nodes: Iterable[NodeSeen],
    declared: Sequence[NodeKind] = (),
    plugin: Callable[[Mapping[str, str]], Mapping[str, Any]] = lambda _: {},
    published: Mapping[str, Sequence[Object]] = {},
    kept: Sequence[str] = (),
    *,
    made: Made | None = None,
    groups: Groups = NO_GROUPS,
) -> tuple[Slice, ...]:
    """Return all slices, ordered by node. `declared`: `nodes` of the Settings. `plugin`: node labels -> configuration
    of its device plug-in, if known. `published`: node -> its ResourceSlices. `kept`: see `NodeFacts`. `made`: cache of
    the previous call, updated by this one. `groups`: machine groups with the maximum devices of their nodes.
    """
    before, found, theirs = {} if made is None else made.copy(), Made(), _by_pool(kept)
    for node in sorted(nodes, key=lambda one: one.name):
        if not (node.amounts or node.annotations or node.name in published):
            continue
        facts = NodeFacts(
            NodeId(node.name), node.labels, node.annotations, node.amounts, _declared(node, declared, groups),
            plugin(node.labels), published.get(node.name, ()), _kept(published.get(node.name, ()), theirs),
        )  # fmt: skip
        of = (facts, node.usable, node.taints)
        known = before.get(node.name)
        found[node.name] = known if known is not None and known[0] == of else (of, _of_node(node, facts))
    if made is not None:
        made.clear()
        made.update(found)
    return tuple(one for _, its in found.values() for one in its)


def _declared(node: NodeSeen, declared: Sequence[NodeKind], groups: Groups) -> NodeKind | None:
    """Return the node's entry in the Settings, with its maximum number of devices from any source."""
    kind = kind_of(node.labels, declared)
    if kind is None or kind.devices_max is not None:
        return kind
    most = resolve_max_devices(node.annotated_limit, node.labels, kind, groups)
    return replace(kind, devices_max=min(most, DEVICES_MAX)) if most else kind


Pooled = dict[str, list[tuple[int, str]]]
"""(driver/pool) -> entries with their positions in the full list."""


def _by_pool(kept: Sequence[str]) -> Pooled:
    found: Pooled = {}
    for at, entry in enumerate(kept):
        found.setdefault(entry.rpartition("/")[0], []).append((at, entry))
    return found


def _kept(published: Sequence[Object], kept: Pooled) -> tuple[str, ...]:
    """Return the entries of the node's own pools, in order."""
    pools = {f"{one['spec'].get('driver', '')}/{one['spec']['pool']['name']}" for one in published}
    return tuple(entry for _, entry in sorted(one for pool in pools for one in kept.get(pool, ())))


def _of_node(node: NodeSeen, facts: NodeFacts) -> tuple[Slice, ...]:
    return tuple(
        replace(one, healthy=node.usable, labels=node.labels, labels_known=True, taints=node.taints)
        for one in slicers.list_slices(facts)
    )


def close_claimed_slices(slices: Sequence[Slice], own: Collection[tuple[str, Got]]) -> tuple[Slice, ...]:
    """Close the shared slices whose device one of our pods holds through a claim other than the shared one.
    `own`: names and allocations of our claims.
    """
    if not own:
        return tuple(slices)
    held: dict[str, set[str]] = {}
    for name, got in own:
        held.setdefault(got.entry, set()).add(name)
    return tuple(
        replace(one, closed=RESLICED)
        if not one.closed and (common := common_claim_name(one)) and held.get(dra_device_name(one), set()) - {common}
        else one
        for one in slices
    )


def close_stale_slices(slices: Sequence[Slice], held: Iterable[SliceId]) -> tuple[tuple[Slice, ...], list[OtherPod]]:
    """Close the slices of devices that one of our pods holds under an old id. `held`: slices of our pods that have not
    ended.

    Also return the held slices whose device no longer exists, as usage by other pods. If a node's slices are not
    counted by resource, this usage cannot be attributed, so all its slices are closed.
    """
    known, devices = {one.id for one in slices}, {one.device for one in slices}
    shut, lost = set[DeviceId](), list[OtherPod]()
    for id in held:
        device = DeviceId("/".join(id.split("/")[:2]))
        if device in devices and id not in known:
            shut.add(device)
        elif id not in known:
            lost.append(OtherPod(id.partition("/")[0], lost=1))
    waits = {one.node for one in lost}
    shut |= {one.device for one in slices if one.node in waits and not slicers.is_counted_resource(one.handle)}
    if not shut:
        return tuple(slices), lost
    return tuple(
        replace(one, closed=RESLICED) if one.device in shut and not one.closed else one for one in slices
    ), lost
