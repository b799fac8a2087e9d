"""The nodes of one replay as arrays: what is left of each, who fits where, and what a placement takes.

Rows are nodes in the order in which ties are decided; columns of `left` are GPUs, in thousandths, -1 where there is
none. Owns feasibility (CPU, memory, model, enough GPUs with enough left) and which GPUs whole requests get: the lowest
that are idle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.packing.openb import MILLI, Kind, NodeRow

GPUS_MAX = 8
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


class Cluster:
    """Empty at first."""

    def __init__(self, nodes: Sequence[NodeRow]) -> None:
        self.cpu: Ints = np.array([node.cpu_milli for node in nodes], np.int64)
        self.memory: Ints = np.array([node.memory_mib for node in nodes], np.int64)
        self.gpus: Ints = np.array([node.gpus for node in nodes], np.int64)
        self.left: Ints = np.where(np.arange(GPUS_MAX) < self.gpus[:, None], MILLI, -1).astype(np.int64)
        self.models = tuple(sorted({node.model for node in nodes}))
        self.model: Ints = np.array([self.models.index(node.model) for node in nodes], np.int64)
        self.log: list[int] = []
        """Nodes that changed, in order."""

    def allows(self, kind: Kind) -> Flags:
        """By model, whether the kind may run there."""
        return np.array([not kind.models or model in kind.models for model in self.models])

    def feasible(self, kind: Kind, at: Ints) -> Flags:
        """Which of these nodes have room for it."""
        fits = (self.cpu[at] >= kind.cpu_milli) & (self.memory[at] >= kind.memory_mib)
        if kind.gpus:
            fits &= self.allows(kind)[self.model[at]]
            fits &= (self.left[at] >= kind.milli).sum(axis=1) >= kind.gpus
        return fits

    def total(self, at: Ints) -> Ints:
        """GPU milli left on each of these nodes."""
        sums: Ints = np.maximum(self.left[at], 0).sum(axis=1)
        return sums

    def tightest(self, kind: Kind, at: Ints) -> Ints:
        """Of each of these nodes the GPU with the least that is enough, the lowest index first."""
        left = self.left[at]
        found: Ints = np.where(left >= kind.milli, left, MILLI + 1).argmin(axis=1)
        return found

    def after_whole(self, kind: Kind, at: Ints) -> Ints:
        """What would be left of the GPUs of these nodes if the lowest idle ones were taken."""
        left = self.left[at]
        idle = left == MILLI
        return np.where(idle & (idle.cumsum(axis=1) <= kind.gpus), 0, left)

    def place(self, kind: Kind, node: int, gpu: int) -> None:
        """Takes what it needs; `gpu`: which one, of a kind that shares."""
        self.cpu[node] -= kind.cpu_milli
        self.memory[node] -= kind.memory_mib
        if kind.shares:
            self.left[node, gpu] -= kind.milli
        elif kind.gpus:
            self.left[node] = self.after_whole(kind, np.array([node]))[0]
        self.log.append(node)

    def idle(self) -> tuple[int, float]:
        """(whole GPUs that nobody uses, what is left of the others, in GPUs)."""
        whole = self.left == MILLI
        return int(whole.sum()), float(np.where(whole, 0, np.maximum(self.left, 0)).sum()) / MILLI
