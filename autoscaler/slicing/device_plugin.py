"""GPUs that the device plug-in shares by MPS (`sharing.mps`): its server keeps each client to its part. Pure.

A client gets 1/replicas of the memory and of the threads, as the plug-in sets its control daemon up. The server is the
fault domain: with it all clients of its Device end.

GPUs that the device plug-in offers several times, their processes taking turns (`sharing.timeSlicing`). Pure.

Nothing keeps one process from the memory of the others, so engines are told how much they may take. Each Slice has an
equal share: a node's kubelet chooses the GPU of a pod, and whichever it takes, as many shares as a GPU is offered
times are no more than the GPU has. A fault of one process can end all on its Device.

Whole GPUs, as the device plug-in counts them: one Slice each, for one Replica at a time. Pure.

Also what stands for GPUs that are shared while nobody tells how: they are seen, and closed, with what is to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoscaler.slicing import nvidia_sharing
from autoscaler.slicing.base import NodeFacts, PodFields, SliceShare
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice


class Mps:
    """See the module."""

    kind: Final = nvidia_sharing.MPS

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = nvidia_sharing.read_gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return nvidia_sharing.build_slices(node, found, found.sharing, Isolation.MEMORY)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """See Slicer."""
        del replica
        return nvidia_sharing.build_pod_limits(parts)


class TimeSlice:
    """See the module."""

    kind: Final = nvidia_sharing.TIMESLICE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = nvidia_sharing.read_gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return nvidia_sharing.build_slices(node, found, found.sharing, Isolation.NONE)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """See Slicer."""
        del replica
        return nvidia_sharing.build_pod_limits(parts)._replace(
            memory_fraction=nvidia_sharing.compute_memory_fraction(parts)
        )


class WholeGpu:
    """See the module."""

    kind: Final = nvidia_sharing.WHOLE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = nvidia_sharing.read_gpus(node)
        if found is None or (found.sharing is not None and found.sharing.kind != self.kind):
            return None
        one = nvidia_sharing.Sharing(self.kind)
        if found.sharing is not None:
            return nvidia_sharing.build_slices(node, found, one, Isolation.HARDWARE)
        seen = found._replace(devices=found.devices or 1)
        return nvidia_sharing.build_slices(
            node, seen, one, Isolation.NONE, nvidia_sharing.explain_unknown_sharing(found)
        )

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """See Slicer."""
        del replica
        return nvidia_sharing.build_pod_limits(parts)
