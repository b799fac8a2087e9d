"""FGD: fragmentation gradient descent (Weng et al., USENIX ATC'23), as its simulator computes it.

F of a node is the part of its idle GPU that a typical request cannot use. The score is the decrease of F, through a
sigmoid, *truncated to an integer*. Ties are broken by order. The truncation matters: with exact numbers FGD is worse
than best fit. Typical requests are the most frequent kinds, including CPU-only ones, that make up 95 % of the workload.
F ignores host memory. A request for a part of a GPU tries each GPU in order and uses the first one with the best score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bench.packing.cluster import GPUS_MAX, Cluster, Flags, Ints
from bench.packing.openb import MILLI, Kind

TYPICAL = 0.95
Floats = NDArray[np.float64]


class Asked(NamedTuple):
    """The properties of a typical request that decide where it fits, except for memory."""

    cpu_milli: int
    gpus: int
    milli: int
    models: frozenset[str]


def typical(pods: Sequence[Kind]) -> dict[Asked, float]:
    """Return kinds and their shares, which sum to 1."""
    counts = Counter(Asked(one.cpu_milli, one.gpus, one.milli, one.models) for one in pods)
    kept: dict[Asked, int] = {}
    for asked, count in counts.most_common():
        if sum(kept.values()) >= TYPICAL * len(pods):
            break
        kept[asked] = count
    return {asked: count / sum(kept.values()) for asked, count in kept.items()}


class Fgd:
    """The policy for one cluster and one workload."""

    def __init__(self, cluster: Cluster, pods: Sequence[Kind]) -> None:
        shares = typical(pods)
        self._cpu_only = sum(share for asked, share in shares.items() if not asked.gpus)
        groups = sorted({asked[1:] for asked in shares if asked.gpus}, key=lambda one: (one[0], one[1], sorted(one[2])))
        self._cpus: Ints = np.array(sorted({asked.cpu_milli for asked in shares}), np.int64)
        # below: tables by group (number of GPUs, milli of each, models), so that F is a few sums of rows
        self._need: Ints = np.array([gpus for gpus, _, _ in groups], np.int64)
        self._milli: Ints = np.array([milli for _, milli, _ in groups], np.int64)
        allowed = [[not models or model in models for _, _, models in groups] for model in cluster.models]
        self._allowed: Flags = np.array(allowed, bool)
        by_cpu = np.zeros((len(self._cpus) + 1, len(groups)))
        for asked, share in shares.items():
            if asked.gpus:
                by_cpu[int(np.searchsorted(self._cpus, asked.cpu_milli)) + 1, groups.index(asked[1:])] += share
        self._within: Floats = by_cpu.cumsum(axis=0)
        """[number of `_cpus` up to a node's free CPU, group] -> share of requests: those of the group that fit."""
        self._all: Floats = self._within[-1]
        lefts = np.arange(-1, MILLI + 1)[:, None]
        self._enough: Ints = (lefts >= self._milli).astype(np.int64)
        """[milli left of a GPU + 1, group] -> whether they are enough. `_short` has these milli if not, otherwise 0."""
        self._short: Ints = np.where((lefts >= 0) & (lefts < self._milli), lefts, 0).astype(np.int64)

    def fragments(self, cpu: Ints, model: Ints, left: Ints) -> Floats:
        """Return F of nodes with these amounts left, in milli."""
        total = np.maximum(left, 0).sum(axis=1)[:, None]
        enough = self._enough[left + 1].sum(axis=1) >= self._need
        short = self._short[left + 1].sum(axis=1)
        within = self._within[np.searchsorted(self._cpus, cpu, side="right")]
        within = np.where(enough & self._allowed[model], within, 0.0)
        lost = (within * short + (self._all - within) * total).sum(axis=1)
        made: Floats = lost + self._cpu_only * total[:, 0]
        return made

    def score(self, cluster: Cluster, kind: Kind, at: Ints) -> tuple[Ints, Ints]:
        """See Scorer."""
        before = self.fragments(cluster.cpu[at], cluster.model[at], cluster.left[at])
        if not kind.shares:
            left = cluster.after_whole(kind, at) if kind.gpus else cluster.left[at]
            after = self.fragments(cluster.cpu[at] - kind.cpu_milli, cluster.model[at], left)
            return _whole(before - after), np.zeros(len(at), np.int64)
        scores = np.full((len(at), GPUS_MAX), -1, np.int64)
        nodes, gpus = _distinct(cluster.left[at], kind.milli)
        left = cluster.left[at[nodes]]
        left[np.arange(len(nodes)), gpus] -= kind.milli
        after = self.fragments(cluster.cpu[at[nodes]] - kind.cpu_milli, cluster.model[at[nodes]], left)
        scores[nodes, gpus] = _whole(before[nodes] - after)
        best: Ints = scores.argmax(axis=1)
        return scores[np.arange(len(at)), best], best


def _distinct(left: Ints, milli: int) -> tuple[Ints, Ints]:
    """Return (row, GPU) of each sufficient GPU; of equal ones in a row only the first."""
    fits = left >= milli
    for gpu in range(1, GPUS_MAX):
        fits[:, gpu] &= ~(left[:, :gpu] == left[:, gpu, None]).any(axis=1)
    nodes, gpus = np.nonzero(fits)
    return nodes, gpus


def _whole(falls: Floats) -> Ints:
    scores: Ints = (100 / (1 + np.exp(-falls / MILLI))).astype(np.int64)
    return scores
