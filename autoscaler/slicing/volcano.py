"""Volcano's vGPUs: cards that many pods share, as HAMi's library in each container enforces, placed by Volcano. Pure.

Owns its words. A card is one Slice, as Volcano's device plug-in registers it on the node; a pod asks for that card by
its UUID. The rest is as with HAMi (`autoscaler.slicing.hami`), whose code it is, there too. Which queue its pods are in
is the Settings' to say (`pod.annotations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from autoscaler.slicing.base import NodeFacts, PodFields, SliceShare
from autoscaler.slicing.hami import Hami, HamiNames
from autoscaler.slicing.nvidia_sharing import VOLCANO
from autoscaler.state.world import Slice

SCHEDULER = "volcano"
WORDS = HamiNames(
    VOLCANO, "volcano.sh/vgpu-number", "volcano.sh/vgpu-memory", "volcano.sh/vgpu-cores",
    "volcano.sh/vgpu-use-gpuuuid", "volcano.sh/node-vgpu-register", "volcano.sh/vgpu-ids-new",
)  # fmt: skip


class Volcano(NamedTuple):
    """The Slicer."""

    @property
    def kind(self) -> str:
        """See Slice.kind."""
        return WORDS.kind

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """One Slice for each card."""
        return Hami(WORDS).inventory(node)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Cards by their UUIDs, of each as much."""
        asked = Hami(WORDS).fields(replica, parts)
        return PodFields(
            limits=asked.limits, annotations={WORDS.use: asked.annotations[WORDS.use]}, scheduler=SCHEDULER
        )
