"""What joins Devices of one node more closely than the node does, as far as that is known of their Slices. Pure.

Owns what is known of NVLink: by a label of the node, and by products. A better link does for a worse one. Devices that
a device plug-in only counts have no PCIe root that is known; where NVLink joins all of a node, that does not matter.

Where the other Replicas of a Model are, for one that is to be elsewhere, or near: by a label of nodes, its domain.

Owns who counts. Pure. It is a liking, never a rule (`autoscaler.placement.index.request`): where no other domain has
room, two share one, and where theirs has none it is in another.
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
from autoscaler.queries.cordons import is_stop_ordered
from autoscaler.queries.stranded_pods import nodes_of
from autoscaler.state.resources import Link
from autoscaler.state.world import NodeId, Slice, World

CLIQUE: Final = "nvidia.com/gpu.clique"
"""The label that NVIDIA's GPU feature discovery and DRA driver give a node whose GPUs are in an NVLink fabric:
`CLUSTERUUID.CLIQUEID`, one for a node. GPUs of one value reach each other by NVLink, on other nodes, too."""
NVLINKED: Final = (
    "tesla-v100-sxm3-*", "nvidia-a100-sxm4-*", "nvidia-a800-sxm4-*", "nvidia-h100-80gb-hbm3", "nvidia-h800",
    "nvidia-h20", "nvidia-h20-3e", "nvidia-h200", "nvidia-b200", "nvidia-b300-sxm6-*", "nvidia-gb200", "nvidia-gb300",
)  # fmt: skip
"""Products of which NVLink joins all of a node to all, by NVSwitch or, on boards of four, directly: globs over the name
with `-` for spaces, in small letters. After "GPU Baseboard Topologies" in NVIDIA's guide to NVSwitch systems (HGX-2,
HGX A100, H100, B200; docs.nvidia.com) and their kin. V100 of SXM2 is none (a mesh where not all reach all), nor is any
card (`-PCIe`, `-NVL`): bridges join two or four of them, and nothing tells which."""
WORDS: Final = {Link.PCIE_ROOT: "of one PCIe root", Link.NVLINK: "joined by NVLink"}
UNKNOWN: Final = {
    Link.PCIE_ROOT: "its PCIe root is not known (a DRA driver may tell it, a device plug-in does not)",
    Link.NVLINK: f"it is not known to have NVLink (by its product, or by the label {CLIQUE} of its node)",
}

Team = tuple[NodeId, str]
"""Devices that a link joins: their node, and the link."""


def name_device_link(slice_: Slice, link: Link) -> str:
    """What joins its Device to others of its node so well, or better; empty: nothing that is known."""
    if link is Link.NODE:
        return "node"
    if slice_.labels.get(CLIQUE) or _nvlinked(slice_.product):
        return "nvlink"
    return f"root {slice_.link}" if link is Link.PCIE_ROOT and slice_.link else ""


def team_of(slice_: Slice, link: Link) -> Team:
    """The Team that its Device is of."""
    return slice_.node, name_device_link(slice_, link)


def count_team_devices(slices: Iterable[Slice], link: Link) -> Mapping[Team, int]:
    """Of each Team, how many of these it has."""
    return Counter(team_of(one, link) for one in slices)


def link_shortage_reason(slice_: Slice, link: Link, many: Mapping[Team, int], devices: int) -> str:
    """What lacks of a link to so many, in words; empty: nothing. `many`: see `count_team_devices`."""
    if devices <= 1:
        return ""
    if not name_device_link(slice_, link):
        return UNKNOWN[link]
    size = many.get(team_of(slice_, link), 0)
    if link is Link.NODE:
        return "" if size >= devices else f"of its node only {size} could hold it, not {devices}"
    return "" if size >= devices else f"of its node only {size} are {WORDS[link]} with it, not {devices}"


@cache
def _nvlinked(product: str) -> bool:
    name = product.strip().lower().replace(" ", "-")
    return any(fnmatchcase(name, one) for one in NVLINKED)


def add_spread_nodes(world: World, want: PlacementRequest, going: Collection[ReplicaId] = ()) -> PlacementRequest:
    """The PlacementRequest, told of the nodes of those that stay: not of who goes, nor of a spec that another
    replaces.
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
