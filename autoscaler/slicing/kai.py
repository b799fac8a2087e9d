"""GPUs that the KAI scheduler shares between pods by memory, where Settings `nodes` declare it. Pure.

KAI chooses which of a node's GPUs a pod gets, so slices are counted like the shares of a device plugin, and other
tenants are kept off the node (`autoscaler.placement.model.tenant_isolation`). It does not enforce the memory limit, so
each engine is given its memory fraction. Source: KAI 0.17, docs/gpu-sharing. `gpu-memory` is in MiB of one GPU, cannot
be combined with a GPU in limits, and is rounded up to hundredths of a GPU. KAI may therefore reject a request that just
fits here; such a pod stays pending and is placed again elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from autoscaler.slicing.nvidia_device_plugin import (
    Mps,
    Sharing,
    build_pod_limits,
    build_slices,
    parse_number,
    read_gpus,
)
from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, SliceShare
from autoscaler.spec.quantity import in_mib
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice

KAI = "kai"
KAI_SCHEDULER = "kai-scheduler"
KAI_MEMORY = "gpu-memory"
"""Pod annotation."""
KAI_RESERVES = "kai-resource-reservation"
"""Namespace of KAI's pods that reserve the shared GPUs."""
_KAI_FRACTION, _KAI_DEVICES = "gpu-fraction", "gpu-fraction-num-devices"


def count_kai_gpus(annotations: Mapping[str, str]) -> int:
    """Return how many GPUs the pod shares under KAI; each counts as fully used, since its other users are unknown."""
    shares = KAI_MEMORY in annotations or _KAI_FRACTION in annotations
    return max(1, parse_number(annotations.get(_KAI_DEVICES, 1))) if shares else 0


class Kai(Mps):
    """The Slicer for GPUs shared by KAI."""

    kind = KAI

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per GPU, or None unless Settings declare that KAI allocates the node's GPUs."""
        said = node.declared.slicing if node.declared is not None else None
        found = read_gpus(node)
        if found is None or said is None or said.kind != KAI:
            return None
        return tuple(replace(one, shared=True) for one in build_slices(node, found, Sharing(KAI), Isolation.NONE))

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request an amount of memory of one GPU, or whole GPUs. Raises ValueError for parts of several GPUs."""
        part = parts[0]
        if all(one.memory_bytes >= one.slice.memory_bytes for one in parts):
            return PodFields(limits=build_pod_limits(parts).limits, scheduler=KAI_SCHEDULER)
        if len(parts) > 1:
            raise ValueError(f"{replica}: KAI gives a part of one GPU, or whole GPUs: request whole GPUs")
        fraction = part.memory_bytes * 1000 // part.slice.memory_bytes / 1000
        return PodFields(
            annotations={KAI_MEMORY: str(max(1, in_mib(part.memory_bytes)))},
            memory_fraction=max(0.001, fraction),
            scheduler=KAI_SCHEDULER,
        )
