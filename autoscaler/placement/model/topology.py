"""Device links and replica spreading. Pure.

Links connect devices within a node: NVLink, or a common PCIe root. NVLink is detected by a node label or by product; a
better link satisfies a request for a worse one. The PCIe root of devices from a device plug-in is unknown, which does
not matter where NVLink connects all devices of a node.

Spreading places a replica apart from or near the other replicas of its model, by a node label; nodes with the same
value form a domain. It is a preference (`autoscaler.placement.index.request_encoding`): if no suitable domain has room,
another is used.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Final

from autoscaler.contract import ReplicaId
from autoscaler.demand.desired_replicas import list_live_replicas
from autoscaler.placement.model.types import PlacementRequest
from autoscaler.queries.operator_orders import is_stop_ordered
from autoscaler.queries.unschedulable_replicas import nodes_of
from autoscaler.state.resources import Link
from autoscaler.state.world import NodeId, Slice, World

CLIQUE: Final = "nvidia.com/gpu.clique"
"""The node label that NVIDIA's GPU feature discovery and DRA driver set if the node's GPUs are in an NVLink fabric:
`CLUSTERUUID.CLIQUEID`, one per node. GPUs of one value reach each other by NVLink, also across nodes."""
NVLINKED: Final = (
    "tesla-v100-sxm3-*", "nvidia-a100-sxm4-*", "nvidia-a800-sxm4-*", "nvidia-h100-80gb-hbm3", "nvidia-h800",
    "nvidia-h20", "nvidia-h20-3e", "nvidia-h200", "nvidia-b200", "nvidia-b300-sxm6-*", "nvidia-gb200", "nvidia-gb300",
)  # fmt: skip
"""Products of which NVLink connects all devices of a node, through NVSwitch or, on boards of four, directly: globs
over the lower-case name with `-` for spaces. Source: "GPU Baseboard Topologies" in NVIDIA's guide to NVSwitch systems
(HGX-2, HGX A100, H100, B200; docs.nvidia.com), and their variants. V100 SXM2 is excluded because its mesh does
not connect all pairs, and cards (`-PCIe`, `-NVL`) because nothing reports which of them are bridged."""
WORDS: Final = {Link.PCIE_ROOT: "on one PCIe root", Link.NVLINK: "connected by NVLink"}
UNKNOWN: Final = {
    Link.PCIE_ROOT: "its PCIe root is unknown (a DRA driver may report it, a device plug-in does not)",
    Link.NVLINK: f"neither its product nor the label {CLIQUE} of its node indicates NVLink",
}

Team = tuple[NodeId, str]
"""Devices connected by a link: the node and the name of the link."""


def name_device_link(slice_: Slice, link: Link) -> str:
    """Name the link of its device to others of its node that is at least as good as `link`; empty: none is known."""
    if link is Link.NODE:
        return "node"
    if slice_.labels.get(CLIQUE) or _nvlinked(slice_.product):
        return "nvlink"
    return f"root {slice_.link}" if link is Link.PCIE_ROOT and slice_.link else ""


def team_of(slice_: Slice, link: Link) -> Team:
    """Return the team of its device."""
    return slice_.node, name_device_link(slice_, link)


def count_team_devices(slices: Iterable[Slice], link: Link) -> Mapping[Team, int]:
    """Count these slices per team."""
    return Counter(team_of(one, link) for one in slices)


def link_shortage_reason(slice_: Slice, link: Link, many: Mapping[Team, int], devices: int) -> str:
    """Explain why the slice's team has too few devices; empty: it has enough. `many`: see `count_team_devices`."""
    if devices <= 1:
        return ""
    if not name_device_link(slice_, link):
        return UNKNOWN[link]
    size = many.get(team_of(slice_, link), 0)
    if link is Link.NODE:
        return "" if size >= devices else f"its node has {size} suitable devices of {devices} needed"
    return (
        ""
        if size >= devices
        else f"{devices} suitable devices {WORDS[link]} are needed; including it, its node has only {size}"
    )


@cache
def _nvlinked(product: str) -> bool:
    name = product.strip().lower().replace(" ", "-")
    return any(fnmatchcase(name, one) for one in NVLINKED)


def add_spread_nodes(world: World, want: PlacementRequest, going: Collection[ReplicaId] = ()) -> PlacementRequest:
    """Add the nodes of the model's other replicas to the request's spread.
    Replicas that leave or have an outdated spec do not count.
    """
    model = world.models.get(want.model)
    if want.spread is None or model is None:
        return want
    stay = (
        one
        for one in list_live_replicas(world, model.name)
        if one.id not in going and one.spec_hash == model.spec_hash() and not is_stop_ordered(world, one)
    )
    nodes = sorted(node for one in stay for node in nodes_of(world, one))
    return want._replace(spread=want.spread._replace(nodes=tuple(nodes)))
