"""GPUs that the device plug-in shares by MPS (`sharing.mps`): its server keeps each client to its part. Pure.

A client gets 1/replicas of the memory and of the threads, as the plug-in sets its control daemon up. The server is the
fault domain: with it all clients of its Device end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoscaler.slicing import nvidia_sharing
from autoscaler.slicing.base import NodeFacts, Part, PodFields
from autoscaler.state.lanes import Isolation
from autoscaler.state.world import Slice


class Mps:
    """See the module."""

    kind: Final = nvidia_sharing.MPS

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = nvidia_sharing.gpus(node)
        if found is None or found.sharing is None or found.sharing.kind != self.kind:
            return None
        return nvidia_sharing.slices(node, found, found.sharing, Isolation.MEMORY)

    def fields(self, replica: str, parts: Sequence[Part]) -> PodFields:
        """See Slicer."""
        del replica
        return nvidia_sharing.limits(parts)
