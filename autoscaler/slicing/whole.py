"""Whole GPUs, as the device plug-in counts them: one Slice each, for one Replica at a time. Pure.

Also what stands for GPUs that are shared while nobody tells how: they are seen, and closed, with what is to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoscaler.slicing import nvidia_sharing
from autoscaler.slicing.base import NodeFacts, Part, PodFields
from autoscaler.state.lanes import Isolation
from autoscaler.state.world import Slice


class Whole:
    """See the module."""

    kind: Final = nvidia_sharing.WHOLE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = nvidia_sharing.gpus(node)
        if found is None or (found.sharing is not None and found.sharing.kind != self.kind):
            return None
        one = nvidia_sharing.Sharing(self.kind)
        if found.sharing is not None:
            return nvidia_sharing.slices(node, found, one, Isolation.HARDWARE)
        seen = found._replace(devices=found.devices or 1)
        return nvidia_sharing.slices(node, seen, one, Isolation.NONE, nvidia_sharing.untold(found))

    def fields(self, replica: str, parts: Sequence[Part]) -> PodFields:
        """See Slicer."""
        del replica
        return nvidia_sharing.limits(parts)
