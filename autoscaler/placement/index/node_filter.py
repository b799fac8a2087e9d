"""Which nodes admit a request by their labels and taints, and which have its weights and image, for many nodes at once.

Caches, until labels or taints change, the values of each label that a selector uses and the distinct taints. Invariant:
the result equals that of `autoscaler.placement.model.predicates` for each slice.

Nodes are ranked by their missing artifacts: the larger of the two counts more, and both together count most. Weights
are assumed to be as large as the requested memory, images as large as nodes report. An artifact that no node has is
ignored.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set
from typing import Final

import numpy as np

from autoscaler.placement.index.node_arrays import Flags
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.predicates import can_tolerate_taints
from autoscaler.placement.model.types import NodeConstraints, RequiredArtifacts
from autoscaler.state.images import Whereabouts
from autoscaler.state.node_labels_and_taints import PendingLabels, Taint, can_label_appear
from autoscaler.state.world import Copy, NodeId, Slice

KEYS_MAX: Final = 256
"""Labels with cached values."""
ABSENT: Final = -1


class Admitting:
    """Filter for these slices [lanes]; `node_of` numbers the node of each in `nodes`."""

    def __init__(self, slices: Sequence[Slice], node_of: Ints, nodes: Sequence[NodeId]) -> None:
        self._slices = slices
        self._node_of = node_of
        self._nodes = nodes
        self._labels: dict[str, tuple[dict[str, int], Ints]] = {}
        """Label -> the number of each value, and the value number of each lane."""
        self._known: Flags = np.array([one.labels_known for one in slices], bool)
        coming = [one.labels_coming for one in slices]
        self._coming: dict[PendingLabels, Flags] = {
            what: np.array([one is what for one in coming], bool) for what in {*coming} - {PendingLabels.NOTHING}
        }
        taints: dict[tuple[Taint, ...], int] = {}
        self._tainted: Ints = np.array([taints.setdefault(one.taints, len(taints)) for one in slices], np.int64)
        self._taints = tuple(taints)

    def nodes(self, choice: NodeConstraints) -> Flags:
        """[nodes]: those all of whose slices admit a request with these constraints."""
        fits = np.array([can_tolerate_taints(choice, one) for one in self._taints], bool)[self._tainted]
        for key, value in choice.selector:
            numbers, has = self._values(key)
            fits &= (has == numbers.get(value, ABSENT - 1)) | ((has == ABSENT) & self._may_have(key))
        may: Flags = np.bincount(self._node_of[~fits], minlength=len(self._nodes)) == 0
        if choice.avoids:
            avoided = frozenset(choice.avoids)
            with_lanes = np.bincount(self._node_of, minlength=len(self._nodes)) > 0
            may &= ~(with_lanes & np.array([node in avoided for node in self._nodes], bool))
        return may

    def _may_have(self, key: str) -> Flags:
        """[lanes]: those whose node may have the label although it is not reported."""
        may = ~self._known
        for what, there in self._coming.items():
            if can_label_appear(key, what):
                may |= there
        return may

    def _values(self, key: str) -> tuple[dict[str, int], Ints]:
        if key not in self._labels:
            if len(self._labels) >= KEYS_MAX:
                self._labels.clear()
            numbers: dict[str, int] = {}
            values = (one.labels.get(key) for one in self._slices)
            has = [ABSENT if value is None else numbers.setdefault(value, len(numbers)) for value in values]
            self._labels[key] = numbers, np.array(has, np.int64)
        return self._labels[key]


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
