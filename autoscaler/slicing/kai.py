"""KAI: whole GPUs that its scheduler lets several pods share by memory, where Settings `nodes` say so. Pure.

Owns what a pod says to get a part of one. A GPU is one Slice for many Replicas, up to its memory. Which of a node's
GPUs a pod gets is KAI's choice: so a Slice counts, as shares of a device plug-in do, and strangers are kept off its
node (`autoscaler.placement.model.tenant_isolation`). Nobody keeps to what it asked for, so engines are told their part.
Facts: KAI 0.17, docs/gpu-sharing: `gpu-memory` is MiB of one GPU, beside which no GPU may be in limits, and counts as a
fraction rounded up to hundredths. So KAI may refuse what just fits here; such a pod waits, and is tried elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from autoscaler.slicing.base import NodeFacts, PodFields, SliceShare, in_mib
from autoscaler.slicing.nvidia_sharing import KAI, Sharing, build_pod_limits, build_slices, parse_number, read_gpus
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice

SCHEDULER = "kai-scheduler"
MEMORY = "gpu-memory"
"""An annotation of pods."""
RESERVES = "kai-resource-reservation"
"""The namespace of the pods that keep GPUs which are shared."""
_FRACTION, _DEVICES = "gpu-fraction", "gpu-fraction-num-devices"


def count_kai_gpus(annotations: Mapping[str, str]) -> int:
    """Of how many GPUs KAI gives a pod a part: each counts as all of it, for which others are on it is not known."""
    shares = MEMORY in annotations or _FRACTION in annotations
    return max(1, parse_number(annotations.get(_DEVICES, 1))) if shares else 0


class Kai(NamedTuple):
    """The Slicer."""

    @property
    def kind(self) -> str:
        """See Slice.kind."""
        return KAI

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """One Slice for each GPU; None where the Settings do not say that KAI gives them out."""
        said = node.declared.slicing if node.declared is not None else None
        found = read_gpus(node)
        if found is None or said is None or said.kind != KAI:
            return None
        return tuple(replace(one, shared=True) for one in build_slices(node, found, Sharing(KAI), Isolation.NONE))

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """So much memory of one GPU, or whole GPUs; ValueError for parts of several."""
        part = parts[0]
        if all(one.memory_bytes >= one.slice.memory_bytes for one in parts):
            return PodFields(limits=build_pod_limits(parts).limits, scheduler=SCHEDULER)
        if len(parts) > 1:
            raise ValueError(f"{replica}: KAI gives a part of one GPU, or whole ones; ask for whole ones")
        fraction = part.memory_bytes * 1000 // part.slice.memory_bytes / 1000
        return PodFields(
            annotations={MEMORY: str(max(1, in_mib(part.memory_bytes)))},
            memory_fraction=max(0.001, fraction),
            scheduler=SCHEDULER,
        )
