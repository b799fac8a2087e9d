"""Volcano vGPUs: cards shared by many pods, enforced by HAMi's library in each container, scheduled by Volcano. Pure.

Defines Volcano's resource and annotation names. A card is one slice, as Volcano's device plugin registers it on the
node; a pod requests that card by its UUID. The code is shared with HAMi (`autoscaler.slicing.hami`). The Volcano queue
of the pods is set by Settings `pod.annotations`.
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
    """The Slicer for Volcano vGPUs."""

    @property
    def kind(self) -> str:
        """The value of `Slice.kind`."""
        return WORDS.kind

    def inventory(self, node: NodeFacts) -> tuple[Slice, ...] | None:
        """Return one slice per card."""
        return Hami(WORDS).inventory(node)

    def fields(self, replica: str, parts: Sequence[SliceShare]) -> PodFields:
        """Request the cards by UUID, with the same amount of each."""
        asked = Hami(WORDS).fields(replica, parts)
        return PodFields(
            limits=asked.limits, annotations={WORDS.use: asked.annotations[WORDS.use]}, scheduler=SCHEDULER
        )
