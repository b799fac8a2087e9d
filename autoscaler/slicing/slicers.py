"""All Slicers, and the functions that apply them to a node or a replica. Pure.

Slicers that may cover the same devices form a family, one family per vendor. In each family the first Slicer that
recognizes a node's devices gets them, so no device is offered twice. For NVIDIA, KAI, HAMi, Volcano and MIG come before
the Slicers that count GPUs, and ResourceSlices apply only if no other Slicer offers a GPU. Where Settings `nodes`
declare the mechanism that allocates the devices, no other one is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec.structs import replace

from autoscaler.slicing import vendors
from autoscaler.slicing.dra import Dra
from autoscaler.slicing.hami import CORDON, HANDSHAKE, NVIDIA, Hami, HamiAllocation, Volcano, parse_allocations
from autoscaler.slicing.hami import VOLCANO_NAMES as VOLCANO
from autoscaler.slicing.kai import Kai
from autoscaler.slicing.mig import MIXED, Mig
from autoscaler.slicing.nvidia_device_plugin import RESOURCES, Mps, TimeSlice, WholeGpu
from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, Slicer, SliceShare
from autoscaler.spec.settings import PriorityClass
from autoscaler.state.world import Replica, Slice, SliceId

FAMILIES: tuple[tuple[Slicer, ...], ...] = (
    *vendors.build_slicer_families(),
    (Kai(), Hami(), Volcano(), Mig(), TimeSlice(), Mps(), WholeGpu(), Dra()),
)
SLICERS: tuple[Slicer, ...] = tuple(one for family in FAMILIES for one in family)
BY_KIND: Mapping[str, Slicer] = {one.kind: one for one in SLICERS}
UNDETECTED_REASONS = {
    "hami": f"has no annotation {NVIDIA.register}: does HAMi's device plug-in run there?",
    "volcano": f"has no annotation {VOLCANO.register}: does Volcano's vGPU device plug-in run there?",
    "mig": f"offers no {MIXED}..., and no label shows MIG devices: is the MIG strategy of its device plug-in set?",
    "dra": "has no ResourceSlice of its own: does a DRA driver run there?",
}
"""Kinds that Settings `nodes` may declare before a node shows them, with the reason reported until it does."""
_REGISTERS = (
    NVIDIA.register, VOLCANO.register, *(one.register for one in vendors.HAMI), *(one.register for one in vendors.NPUS),
    *(one.register for one in vendors.VENDORS if one.register),
)  # fmt: skip
ANNOTATIONS = frozenset({CORDON, HANDSHAKE, *_REGISTERS})
"""Node annotations that any Slicer reads."""
_ALLOCATED = (
    NVIDIA.allocated, VOLCANO.allocated, *(one.allocated for one in vendors.HAMI),
    *(one.allocated for one in vendors.NPUS),
)  # fmt: skip
_WORDS = (NVIDIA, VOLCANO, *vendors.HAMI)
_DOMAINS = sorted({name.partition("/")[0] for name in (*RESOURCES, *vendors.RESOURCES)})
"""Domains of the device resources of all vendors. Volcano's domain is not included: it also has other resources."""
AMOUNTS_BEGIN = (
    *("deviceclass.resource.kubernetes.io/", "hami.io/", "volcano.sh/gpu-", "volcano.sh/vgpu-"),
    *(f"{domain}/" for domain in _DOMAINS),
)  # fmt: skip
"""Prefixes of resources that count devices, or their memory or cores.

Vendors and administrators choose the names below a vendor's domain, so the whole domain is listed. The first prefix
requests DRA devices (KEP-5004).
"""
NETWORK_BEGIN = (
    "amd.com/nic", "amd.com/vnic", "nvidia.com/hostdev", "nvidia.com/mlnx", "nvidia.com/rdma", "nvidia.com/sriov",
)  # fmt: skip
"""Prefixes of resources in these domains that count network devices; the vendors' network operators offer them."""
_MIXED_DOMAINS = ("amd.com", "aws.amazon.com", "nvidia.com", "volcano.sh")
"""Domains that also have pod annotations unrelated to devices."""
CHOICES = frozenset({"io.kubernetes.cri-o.Devices", *_ALLOCATED, *(one.use for one in _WORDS)})
CHOICES_BEGIN = (
    "cdi.k8s.io/", "hami.io/", "mthreads.ai/", "nvidia.com/numa-bind", "volcano.sh/gpu-", "gpu-fraction", "gpu-memory",
    "gas-", "AWS_NEURON_IDS", "BAIDU_COM_DEVICE_IDX", "CAMBRICON_DSMLU_", "NEURON_ALLOC", "NEURON_RESOURCE_TYPE",
    *(f"{domain}/" for domain in _DOMAINS if domain not in _MIXED_DOMAINS),
    *(f"{domain}/{verb}-" for domain in _MIXED_DOMAINS for verb in ("use", "nouse", "vgpu")),
)  # fmt: skip
"""Pod annotations that select devices (CRI-O, CDI, HAMi, Volcano, KAI, Intel's GPU Aware Scheduling, device plugins of
the vendors): full names (`CHOICES`) and prefixes (this).
"""
_COUNTED = frozenset({*RESOURCES, *(one.resource for one in vendors.VENDORS)})


def is_device_resource(resource: str) -> bool:
    """Return whether an extended resource is an amount of devices, or of their memory or cores."""
    return resource.startswith(AMOUNTS_BEGIN) and not resource.startswith(NETWORK_BEGIN)


def is_device_annotation(annotation: str) -> bool:
    """Return whether a pod annotation selects the pod's devices, or how much of them it gets."""
    return annotation in CHOICES or annotation.startswith(CHOICES_BEGIN)


def list_slices(node: NodeFacts) -> tuple[Slice, ...]:
    """Return all slices of a node, in order."""
    return tuple(one for family in FAMILIES for one in _of(family, node))


def _of(family: tuple[Slicer, ...], node: NodeFacts) -> tuple[Slice, ...]:
    """Return the slices of one family; closed if the node does not show the declared mechanism yet."""
    kind = node.declared.slicing.kind if node.declared is not None and node.declared.slicing is not None else ""
    said = [one for one in family if kind in UNDETECTED_REASONS and one.kind.partition("-")[0] == kind]
    slices = _first(said or family, node)
    if slices is not None or not said:
        return slices or ()
    why = f"Settings `nodes` declare its devices as {kind}, but its node {UNDETECTED_REASONS[kind]}"
    return tuple(replace(one, closed=why) for one in _first(family, node) or ())


def _first(family: Iterable[Slicer], node: NodeFacts) -> tuple[Slice, ...] | None:
    found = (one.inventory(node) for one in family)
    return next((slices for slices in found if slices is not None), None)


def is_counted_resource(resource: str) -> bool:
    """Return whether slices of some kind are counted by this resource: each unit that a pod requests takes one."""
    return resource in _COUNTED or resource.startswith(MIXED)


def parse_hami_allocations(annotations: Mapping[str, str]) -> tuple[HamiAllocation, ...]:
    """Return a pod's allocations of cards shared by HAMi, of any vendor."""
    return tuple(one for allocated in _ALLOCATED for one in parse_allocations(annotations, allocated))


def build_pod_fields(
    replica: Replica, known: Mapping[SliceId, Slice], ranked: PriorityClass | None = None, instead: Sequence[Slice] = ()
) -> PodFields | None:
    """Build the resource request of a replica's pod; None if a slice is unknown. All slices are of one kind.
    `ranked`: Settings of its model's priority class; `instead`: alternatives to its only slice.
    """
    if not replica.resources.slices or not all(id in known for id in replica.resources.slices):
        return None
    parts = [
        SliceShare(known[id], replica.resources.memory_bytes, replica.resources.compute_percent)
        for id in replica.resources.slices
    ]
    slicer = BY_KIND[parts[0].slice.kind]
    if isinstance(slicer, Hami) and ranked is not None:
        slicer = slicer._replace(priority=ranked.hami_priority)
    if isinstance(slicer, Dra) and instead:
        return slicer.either(replica.id, [parts[0], *(parts[0]._replace(slice=one) for one in instead)])
    return slicer.fields(replica.id, parts)
