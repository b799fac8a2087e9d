"""Slicers for GPUs that the NVIDIA device plugin offers: shared by MPS, time-sliced, or whole. Pure.

- MPS (`sharing.mps`): the plugin's control daemon gives each client 1/replicas of the memory and of the threads, and
  the MPS server enforces it. The server is the fault domain: if it fails, all clients of its device end.
- Time-slicing (`sharing.timeSlicing`): nothing protects the memory of one process from the others, so each engine is
  given its memory fraction. All slices are equal shares: the kubelet chooses a pod's GPU, and the shares on any GPU
  never exceed its memory. A fault of one process can end all processes on its device.
- Whole GPUs: one slice each, for one replica at a time. GPUs whose sharing mode is unknown are listed as closed, with
  the action to take as the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoscaler.slicing import nvidia_sharing
from autoscaler.slicing.base import NodeFacts, PodFields, SliceShare
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice


class Mps:
    """The Slicer for GPUs shared by MPS."""

    kind: Final = nvidia_sharing.MPS

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return the MPS slices, or None if the node is not shared by MPS."""
        found = nvidia_sharing.read_gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return nvidia_sharing.build_slices(node, found, found.sharing, Isolation.MEMORY)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request one unit of the resource per slice."""
        del replica
        return nvidia_sharing.build_pod_limits(parts)


class TimeSlice:
    """The Slicer for time-sliced GPUs."""

    kind: Final = nvidia_sharing.TIMESLICE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return the time-slicing slices, or None if the node is not time-sliced."""
        found = nvidia_sharing.read_gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return nvidia_sharing.build_slices(node, found, found.sharing, Isolation.NONE)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request one unit of the resource per slice, and set the engine's memory fraction."""
        del replica
        return nvidia_sharing.build_pod_limits(parts)._replace(
            memory_fraction=nvidia_sharing.compute_memory_fraction(parts)
        )


class WholeGpu:
    """The Slicer for whole GPUs, and for GPUs whose sharing mode is unknown (closed)."""

    kind: Final = nvidia_sharing.WHOLE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per GPU; closed slices if the sharing mode is unknown; None if the GPUs are shared."""
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
        """Request one GPU per slice."""
        del replica
        return nvidia_sharing.build_pod_limits(parts)
