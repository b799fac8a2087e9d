"""What a policy is: integers for nodes, of which the highest wins and among equals the first; and how it is asked fast.

`Rows` keeps what a policy said of every node for each kind of request, and asks again only about nodes that changed
since: a policy's score of a node may depend on nothing but that node and the kind.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from bench.packing.cluster import Cluster, Ints
from bench.packing.openb import Kind

NOWHERE = -(1 << 62)


class Scorer(Protocol):
    """A policy that scores nodes one by one."""

    def score(self, cluster: Cluster, kind: Kind, at: Ints) -> tuple[Ints, Ints]:
        """(score, GPU) for each of these nodes, all of which have room. The GPU counts where the kind shares."""


class Chooser(Protocol):
    """What a replay asks."""

    def choose(self, kind: Kind) -> tuple[int, int] | tuple[int, int, int] | None:
        """(node, GPU); an elastic policy adds how many milli it grants to one that shares. None: it fits nowhere."""


class _Row:
    """One kind's scores, and up to where in the log of changes they are right."""

    def __init__(self, nodes: int) -> None:
        self.scores: Ints = np.full(nodes, NOWHERE, np.int64)
        self.gpus: Ints = np.zeros(nodes, np.int64)
        self.at = -1


class Rows:
    """A Chooser of a Scorer."""

    def __init__(self, cluster: Cluster, scorer: Scorer) -> None:
        self._cluster = cluster
        self._scorer = scorer
        self._rows: dict[Kind, _Row] = {}

    def choose(self, kind: Kind) -> tuple[int, int] | None:
        """See Chooser."""
        row = self._rows.get(kind)
        if row is None:
            row = self._rows[kind] = _Row(len(self._cluster.cpu))
        self._refresh(kind, row)
        best = int(row.scores.argmax())
        return None if row.scores[best] == NOWHERE else (best, int(row.gpus[best]))

    def _refresh(self, kind: Kind, row: _Row) -> None:
        log = self._cluster.log
        if row.at == len(log):
            return
        changed = np.arange(len(row.scores)) if row.at < 0 else np.unique(np.array(log[row.at :], np.int64))
        row.at = len(log)
        fits = self._cluster.feasible(kind, changed)
        row.scores[changed[~fits]] = NOWHERE
        room = changed[fits]
        if len(room):
            row.scores[room], row.gpus[room] = self._scorer.score(self._cluster, kind, room)
