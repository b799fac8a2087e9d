"""Which nodes have a Copy of an artifact, as an array over the nodes that there are. It chooses nothing."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence, Set

import numpy as np

from autoscaler.stock import Flags
from autoscaler.world import Copy, NodeId


class Locality:
    """Of these nodes, sorted. `gone`, kept by whom it belongs to: those of them that are not there now."""

    def __init__(self, nodes: Sequence[NodeId], gone: Set[NodeId]) -> None:
        self._nodes = nodes
        self._gone = gone
        self._copies: Set[Copy] = frozenset()
        self._near: dict[str, Flags] = {}

    def tell(self, copies: Set[Copy]) -> None:
        """All that there are now."""
        if copies is self._copies or copies == self._copies:
            return
        numbers = {node: number for number, node in enumerate(self._nodes)}
        self._copies, self._near = copies, {}
        for copy in copies:
            if copy.node in numbers and copy.node not in self._gone:
                near = self._near.setdefault(copy.artifact, np.zeros(len(self._nodes), bool))
                near[numbers[copy.node]] = True

    def forget(self) -> None:
        """A node came or went: all is to be told again."""
        self._copies, self._near = frozenset(), {}

    def knows(self, artifact: str) -> bool:
        """Whether any node has a Copy."""
        return artifact in self._near

    def of(self, artifact: str) -> Flags | None:
        """[nodes]: those with a Copy; None: none has."""
        return self._near.get(artifact)

    def has(self, artifact: str, node: NodeId) -> bool:
        """Whether the node has a Copy."""
        near = self._near.get(artifact)
        return near is not None and bool(near[bisect_left(self._nodes, node)])
