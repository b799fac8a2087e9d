"""Whole GPUs, as the device plug-in counts them: one Slice each, for one Replica at a time. Pure.

Also what stands for GPUs that are shared while nobody tells how: they are seen, and closed, with what is to be done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from autoscaler.lanes import Isolation
from autoscaler.slicing import sharing
from autoscaler.slicing.base import NodeFacts, Part, PodFields
from autoscaler.world import Slice


class Whole:
    """See the module."""

    kind: Final = sharing.WHOLE

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """See Slicer."""
        found = sharing.gpus(node)
        if found is None or (found.sharing is not None and found.sharing.kind != self.kind):
            return None
        one = sharing.Sharing(self.kind)
        if found.sharing is not None:
            return sharing.slices(node, found, one, Isolation.HARDWARE)
        seen = found._replace(devices=found.devices or 1)
        return sharing.slices(node, seen, one, Isolation.NONE, sharing.untold(found))

    def fields(self, replica: str, parts: Sequence[Part]) -> PodFields:
        """See Slicer."""
        del replica
        return sharing.limits(parts)
