"""The policies that FGD was compared with, as its simulator implements them (`pkg/simulator/plugin/*.go`).

Each uses integer arithmetic like the Go code. A sharing request gets the GPU with the smallest sufficient rest, except
for Random. (The min-max normalisation of BestFit changes no order and is omitted.)
"""

from __future__ import annotations

import random

import numpy as np

from bench.packing.cluster import Cluster, Ints
from bench.packing.openb import MILLI, Kind

CPU_MAX_MILLI, GPU_MAX_MILLI = 128_000, 8_000
"""The largest node's amounts, which scores are relative to."""


class BestFit:
    """Prefer the node with the least CPU and GPU left: the sum of both, relative to the largest node."""

    def score(self, cluster: Cluster, kind: Kind, at: Ints) -> tuple[Ints, Ints]:
        """See Scorer."""
        cpu = (cluster.cpu[at] - kind.cpu_milli) / CPU_MAX_MILLI
        gpu = (cluster.total(at) - kind.total_milli) / GPU_MAX_MILLI
        return ((1 - 0.5 * cpu - 0.5 * gpu) * 100).astype(np.int64), cluster.tightest(kind, at)


class DotProd:
    """The least product of free and requested amounts (Tetris, SIGCOMM'14, reversed)."""

    def score(self, cluster: Cluster, kind: Kind, at: Ints) -> tuple[Ints, Ints]:
        """See Scorer."""
        dot = cluster.cpu[at] / CPU_MAX_MILLI * (kind.cpu_milli / CPU_MAX_MILLI)
        dot = dot + cluster.total(at) / GPU_MAX_MILLI * (kind.total_milli / GPU_MAX_MILLI)
        return (100 * (1 - dot / 2)).astype(np.int64), cluster.tightest(kind, at)


class GpuPacking:
    """Prefer nodes with GPUs in use, then nodes in use, then idle ones; among them the fewest idle GPUs taken."""

    def score(self, cluster: Cluster, kind: Kind, at: Ints) -> tuple[Ints, Ints]:
        """See Scorer."""
        if not kind.gpus:
            return np.zeros(len(at), np.int64), np.zeros(len(at), np.int64)
        left, gpus = cluster.left[at], cluster.gpus[at]
        full = (left == MILLI).sum(axis=1)
        ascending = np.sort(np.where(left >= kind.milli, left, GPU_MAX_MILLI), axis=1)[:, : kind.gpus]
        used_free = (ascending == MILLI).sum(axis=1)
        used = np.maximum(100 - (ascending * 100 // MILLI).sum(axis=1) // 10, 50)
        some = np.where(used_free > 0, np.maximum(50 - used_free, 33), used)
        return np.where(full == gpus, np.maximum(33 - full, full), some).astype(np.int64), cluster.tightest(kind, at)


class Anywhere:
    """Random: any node with room, any of its GPUs with room."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self._cluster = cluster
        self._rng = random.Random(seed)
        self._all: Ints = np.arange(len(cluster.cpu))

    def choose(self, kind: Kind) -> tuple[int, int] | None:
        """See Chooser."""
        room = np.flatnonzero(self._cluster.feasible(kind, self._all))
        if not len(room):
            return None
        node = int(room[self._rng.randrange(len(room))])
        if not kind.shares:
            return node, 0
        gpus = np.flatnonzero(self._cluster.left[node] >= kind.milli)
        return node, int(gpus[self._rng.randrange(len(gpus))])
