"""Ranks nodes by the weights and images that they already have. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from typing import Final

import numpy as np

from autoscaler.placement.index.node_search import Flags
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.types import RequiredArtifacts
from autoscaler.state.images import Whereabouts
from autoscaler.state.world import Copy, NodeId

IMAGE_BYTES: Final = 8 << 30
"""Assumed size of an image whose size no node reports: engines with CUDA have 3 to 10 GiB."""


IMAGES_MAX: Final = 1024
"""Images with a cached array of nodes."""


class ArtifactLocality:
    """Locality on these sorted nodes. `gone`: the removed ones, a set that the caller updates."""

    def __init__(self, nodes: Sequence[NodeId], gone: Set[NodeId]) -> None:
        self._nodes = nodes
        self._gone = gone
        self._copies: Set[Copy] = frozenset()
        self._near: dict[str, Flags] = {}
        self._images = Whereabouts()
        self._version = 0
        self._stocked: dict[str, Flags | None] = {}

    def set_copies(self, copies: Set[Copy]) -> None:
        """Set all weight copies that exist now."""
        if copies is self._copies or copies == self._copies:
            return
        numbers = {node: number for number, node in enumerate(self._nodes)}
        self._copies, self._near = copies, {}
        for copy in copies:
            if copy.node in numbers and copy.node not in self._gone:
                near = self._near.setdefault(copy.artifact, np.zeros(len(self._nodes), bool))
                near[numbers[copy.node]] = True

    def set_images(self, images: Whereabouts) -> None:
        """Set the locations of images, which the caller keeps up to date."""
        if images is not self._images or images.version != self._version:
            self._images, self._version, self._stocked = images, images.version, {}

    def forget(self) -> None:
        """Drop everything because a node was added or removed; `set_copies` and `set_images` must be called again."""
        self._copies, self._near, self._stocked = frozenset(), {}, {}

    def known(self, of: RequiredArtifacts) -> RequiredArtifacts:
        """Return the artifacts that any node has; the others are ignored."""
        artifact = of.artifact if of.artifact in self._near else ""
        return of._replace(artifact=artifact, image=of.image if self._with(of.image) is not None else "")

    def lacks(self, of: RequiredArtifacts) -> Ints | None:
        """[nodes]: rank of the missing artifacts, below LACKS. None: all nodes are equal."""
        near, stocked = self._near.get(of.artifact), self._with(of.image)
        if near is None and stocked is None:
            return None
        found: Ints = np.zeros(len(self._nodes), np.int64)
        for has, rank in zip((near, stocked), self._ranks(of), strict=True):
            if has is not None:
                found += rank * ~has
        return found

    def lack(self, of: RequiredArtifacts, node: NodeId) -> int:
        """Return the rank of the missing artifacts of one node."""
        near, stocked = self._near.get(of.artifact), self._with(of.image)
        if near is None and stocked is None:
            return 0
        at, (weights, image) = bisect_left(self._nodes, node), self._ranks(of)
        return weights * _lacked(near, at) + image * _lacked(stocked, at)

    def _ranks(self, of: RequiredArtifacts) -> tuple[int, int]:
        """Return the rank of missing weights, and of a missing image."""
        image_bytes = self._images.size_bytes(of.image) or IMAGE_BYTES
        return (1, 2) if 0 < of.weights_bytes < image_bytes else (2, 1)

    def _with(self, image: str) -> Flags | None:
        """[nodes]: those that have the image. None: no node has it."""
        if not image:
            return None
        if image not in self._stocked:
            if len(self._stocked) >= IMAGES_MAX:
                self._stocked.clear()
            here = self._images.of(image)
            has = np.array([node in here and node not in self._gone for node in self._nodes], bool)
            self._stocked[image] = has if has.any() else None
        return self._stocked[image]


def _lacked(has: Flags | None, at: int) -> bool:
    return has is not None and not has[at]
