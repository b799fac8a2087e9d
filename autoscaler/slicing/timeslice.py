"""GPUs that the device plug-in offers several times, their processes taking turns (`sharing.timeSlicing`). Pure.

Nothing keeps one process from the memory of the others, so engines are told how much they may take. Each Slice has an
equal share: a node's kubelet chooses the GPU of a pod, and whichever it takes, as many shares as a GPU is offered
times are no more than the GPU has. A fault of one process can end all on its Device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoscaler.slicing import nvidia_sharing
from autoscaler.slicing.base import NodeFacts, Part, PodFields
from autoscaler.state.lanes import Isolation
from autoscaler.state.world import Slice


class TimeSlice:
    """See the module."""

    kind: Final = nvidia_sharing.TIMESLICE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = nvidia_sharing.gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return nvidia_sharing.slices(node, found, found.sharing, Isolation.NONE)

    def fields(self, replica: str, parts: Sequence[Part]) -> PodFields:
        """See Slicer."""
        del replica
        return nvidia_sharing.limits(parts)._replace(memory_fraction=nvidia_sharing.fraction(parts))
