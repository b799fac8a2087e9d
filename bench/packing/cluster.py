"""The nodes of one replay as arrays: free amounts, feasible nodes, and the effect of a placement.

Rows are nodes in the order that breaks ties; columns of `left` are GPUs, in thousandths, -1 if the node has no such
GPU. A node is feasible if its CPU, memory and GPU model suffice, and enough
of its GPUs have the requested amount free. Requests for whole GPUs get the idle ones with
the lowest numbers.
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
    """The nodes, initially empty."""

    def __init__(self, nodes: Sequence[NodeRow]) -> None:
        self.cpu: Ints = np.array([node.cpu_milli for node in nodes], np.int64)
        self.memory: Ints = np.array([node.memory_mib for node in nodes], np.int64)
        self.gpus: Ints = np.array([node.gpus for node in nodes], np.int64)
        self.left: Ints = np.where(np.arange(GPUS_MAX) < self.gpus[:, None], MILLI, -1).astype(np.int64)
        self.models = tuple(sorted({node.model for node in nodes}))
        self.model: Ints = np.array([self.models.index(node.model) for node in nodes], np.int64)
        self.log: list[int] = []
        """Changed nodes, in order."""

    def allows(self, kind: Kind) -> Flags:
        """Return by model whether the kind may run there."""
        return np.array([not kind.models or model in kind.models for model in self.models])

    def feasible(self, kind: Kind, at: Ints) -> Flags:
        """Return which of these nodes have room for it."""
        fits = (self.cpu[at] >= kind.cpu_milli) & (self.memory[at] >= kind.memory_mib)
        if kind.gpus:
            fits &= self.allows(kind)[self.model[at]]
            fits &= (self.left[at] >= kind.milli).sum(axis=1) >= kind.gpus
        return fits

    def total(self, at: Ints) -> Ints:
        """Return the free GPU milli of each of these nodes."""
        sums: Ints = np.maximum(self.left[at], 0).sum(axis=1)
        return sums

    def tightest(self, kind: Kind, at: Ints) -> Ints:
        """Return for each of these nodes the GPU with the smallest sufficient free amount; of equal ones the first."""
        left = self.left[at]
        found: Ints = np.where(left >= kind.milli, left, MILLI + 1).argmin(axis=1)
        return found

    def after_whole(self, kind: Kind, at: Ints) -> Ints:
        """Return the free GPU amounts of these nodes after the lowest idle GPUs would be taken."""
        left = self.left[at]
        idle = left == MILLI
        return np.where(idle & (idle.cumsum(axis=1) <= kind.gpus), 0, left)

    def place(self, kind: Kind, node: int, gpu: int) -> None:
        """Take the amounts that it needs. `gpu`: the GPU of a sharing request."""
        self.cpu[node] -= kind.cpu_milli
        self.memory[node] -= kind.memory_mib
        if kind.shares:
            self.left[node, gpu] -= kind.milli
        elif kind.gpus:
            self.left[node] = self.after_whole(kind, np.array([node]))[0]
        self.log.append(node)

    def idle(self) -> tuple[int, float]:
        """Return (number of unused whole GPUs, free amount of the others, in GPUs)."""
        whole = self.left == MILLI
        return int(whole.sum()), float(np.where(whole, 0, np.maximum(self.left, 0)).sum()) / MILLI
