"""MIG as the NVIDIA device plugin offers it: one slice per MIG device, and the configuration for repartitioning.

Reads both strategies: `mixed`, where each profile is a resource (`nvidia.com/mig-1g.10gb`), and `single`, where all MIG
devices are alike and named `nvidia.com/gpu`. Writes a chosen layout (`autoscaler.slicing.mig_placement`) in the format
of NVIDIA's mig-parted. Neither chooses a layout nor decides when a node may be repartitioned.

No label names the GPU of a MIG device, and the kubelet assigns any MIG device of the profile. So each one counts as a
device of its own. That is safe: hardware isolates them, a program can use only one (so no replica has two), and as many
replicas get MIG devices of a profile as exist. Limitation: two of them may fail with one GPU, which is not visible.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple

import yaml

from autoscaler.slicing.mig_geometry import Geometry, MigError, geometry_of
from autoscaler.slicing.slicer_protocol import NodeFacts, Object, PodFields, SliceShare
from autoscaler.spec.quantity import parse_bounded_int, parse_count, parse_mebibytes
from autoscaler.state.resources import Isolation
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId

GPU, MIXED = "nvidia.com/gpu", "nvidia.com/mig-"
CONFIG, STATE = "nvidia.com/mig.config", "nvidia.com/mig.config.state"
PRODUCT, STRATEGY = "nvidia.com/gpu.product", "nvidia.com/mig.strategy"
_SINGLE = re.compile(r"(.+)-MIG-([0-9a-z.+]+?)(-SHARED)?")
_PROFILE = re.compile(r"([1-9])g\.([0-9]{1,4})gb([+.-][a-z.]{1,12})?")
"""A whole GPU instance in NVIDIA's notation; `1c.3g.20gb` is a part of one and shares its memory with other parts."""
ALL = 100
"""Percent."""
_COMPUTE_MOST, _SURE_PERCENT, _GB = 7, 95, 10**9
"""Assumed for profiles missing from the table: sevenths of the GPU, and 95 % of the gigabytes in the name."""


class _Resource(NamedTuple):
    """A resource that pods request, and the MIG devices behind it."""

    name: str
    profile: str
    product: str
    labels: str
    """Prefix of its labels."""
    shared: bool


class Mig:
    """The Slicer for MIG devices of the device plugin."""

    kind: ClassVar[str] = "mig"

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return the MIG devices that the kubelet has, by profile."""
        found = [slice_ for one in _resources(node) for slice_ in _slices(node, one, self.kind)]
        return tuple(found) or None

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request one MIG device. Raises ValueError for more than one."""
        if len(parts) != 1:
            raise ValueError(f"{replica}: a program can use one MIG device, not {len(parts)}: request a larger one")
        return PodFields(limits={parts[0].slice.handle: "1"})


def _resources(node: NodeFacts) -> list[_Resource]:
    product = node.labels.get(PRODUCT, "")
    single = _SINGLE.fullmatch(product)
    plain = single[1] if single else product.removesuffix("-SHARED")
    found = [
        _Resource(name, name.removeprefix(MIXED).removesuffix(".shared"), plain, name.removesuffix(".shared"), shared)
        for name in sorted(node.allocatable)
        if name.startswith(MIXED)
        for shared in [name.endswith(".shared") or _replicas(node, name) != 1]
    ]
    if single and not found:
        shared = bool(single[3]) or _replicas(node, GPU) != 1
        name = GPU if parse_count(node.allocatable.get(GPU)) else f"{GPU}.shared"
        found.append(_Resource(name, single[2], plain, GPU, shared))
    return [one._replace(profile=re.sub(r"\.(me|gfx)", r"+\1", one.profile)) for one in found]


def _replicas(node: NodeFacts, labels: str) -> int:
    """Return how many times each MIG device is offered."""
    return max(1, parse_count(node.labels.get(f"{labels}.replicas")))


def _slices(node: NodeFacts, of: _Resource, kind: str) -> list[Slice]:
    many, count_label = parse_count(node.allocatable.get(of.name)), node.labels.get(f"{of.labels}.count")
    if of.shared:
        many //= _replicas(node, of.labels)
    if count_label is not None:
        many = min(many, parse_count(count_label))
    memory_bytes, compute_percent = _what(node, of)
    short = f"mig-{of.profile}"
    return [
        Slice(
            id=SliceId(f"{node.name}/{short}-{number}"), device=DeviceId(f"{node.name}/{short}-{number}"),
            node=node.name, memory_bytes=memory_bytes, compute_percent=compute_percent, isolation=Isolation.HARDWARE,
            shared=False, product=of.product, closed=_closed(node, of), kind=kind, handle=of.name,
            device_bytes=parent_memory_bytes(of.product, memory_bytes, compute_percent),
        )
        for number in range(many)
    ]  # fmt: skip


def _what(node: NodeFacts, of: _Resource) -> tuple[int, int]:
    """Return memory and percent of the GPU's compute, from labels if present, else from the profile."""
    memory_bytes, slices, of_all = mig_profile_capacity(of.profile, of.product)
    memory_bytes = parse_mebibytes(node.labels.get(f"{of.labels}.memory")) or memory_bytes
    slices = parse_bounded_int(node.labels.get(f"{of.labels}.slices.gi"), of_all) or slices
    return memory_bytes, max(1, 100 * slices // of_all)


def mig_profile_capacity(profile: str, product: str) -> tuple[int, int, int]:
    """Return (memory, compute slices, the GPU's compute slices), by the geometry table, else by the profile's name."""
    geometry, match = geometry_of(product), _PROFILE.fullmatch(profile)
    if geometry is not None and geometry.has(profile):
        found = geometry.profile(profile)
        return found.memory_bytes, found.compute, geometry.compute
    slices, gb = (int(match[1]), int(match[2])) if match else (1, 1)
    of_all = _COMPUTE_MOST if geometry is None else geometry.compute
    return max(1, gb) * _GB * _SURE_PERCENT // 100, min(slices, of_all), of_all


def parent_memory_bytes(product: str, memory_bytes: int, compute_percent: int) -> int:
    """Return the memory of the GPU that a MIG device is part of; 0 if the MIG device is the whole GPU.
    It comes from the table; for other products it is estimated from the share of compute, not of memory.
    """
    if compute_percent >= ALL:
        return 0
    geometry = geometry_of(product)
    known = max(one.memory_bytes for one in geometry.profiles) if geometry is not None else 0
    return known if known > memory_bytes else memory_bytes * ALL // compute_percent


def _closed(node: NodeFacts, of: _Resource) -> str:
    if of.shared:
        return "its MIG device is offered to several pods, and the pods on each MIG device are not known"
    if not _PROFILE.fullmatch(of.profile):
        return f"MIG profile {of.profile} is a part of a larger one and shares its memory with other parts"
    state = node.labels.get(STATE, "success")
    return "" if state == "success" else f"its node is being repartitioned: label {STATE} is {state[:63]}"


def build_mig_slice(node: NodeId, product: str, profile: str) -> Slice:
    """Build the slice that the node would report for a hypothetical MIG device."""
    resource = MIXED + profile.replace("+", ".")
    (found,) = Mig().inventory(NodeFacts(node, {PRODUCT: product}, {}, {resource: "1"})) or ()
    return found


# --- repartitioning ---------------------------------------------------------------------------------------------------


def build_mig_parted_config(name: str, geometry: Geometry, wanted: Mapping[int, Sequence[str]]) -> Object:
    """Build a mig-parted configuration called `name` from the profiles on each GPU of a node, by GPU index.
    mig-parted takes counts per profile and chooses the placements, which must be read back.
    """
    for number, profiles in wanted.items():
        for profile in profiles:
            if not geometry.has(profile):
                raise MigError(f"GPU {number}: {geometry.name} has no MIG profile {profile!r}")
    return {
        "version": "v1",
        "mig-configs": {
            name: [
                {
                    "devices": [number], "mig-enabled": bool(profiles),
                    "mig-devices": dict(sorted(Counter(profiles).items())),
                }
                for number, profiles in sorted(wanted.items())
            ]
        },
    }  # fmt: skip


def build_mig_config_map(name: str, namespace: str, parted_: Object) -> Object:
    """Build the ConfigMap that mig-parted reads on a node; the node's label CONFIG selects an entry."""
    return {
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name, "namespace": namespace},
        "data": {"config.yaml": yaml.safe_dump(parted_, sort_keys=False)},
    }  # fmt: skip
