"""Which nodes admit a request by their labels and taints, and which have its weights and image, for many nodes at once.

Caches, until labels or taints change, the values of each label that a selector uses and the distinct taints. Invariant:
the result equals that of `autoscaler.placement.model.predicates` for each slice.

Nodes are ranked by their missing artifacts: the larger of the two counts more, and both together count most. Weights
are assumed to be as large as the requested memory, images as large as nodes report. An artifact that no node has is
ignored.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from autoscaler.placement.index.node_search import Flags
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.predicates import can_tolerate_taints
from autoscaler.placement.model.types import NodeConstraints
from autoscaler.state.node_labels_and_taints import PendingLabels, Taint, can_label_appear
from autoscaler.state.world import NodeId, Slice

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
