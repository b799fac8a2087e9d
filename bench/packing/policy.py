"""The interface of a policy: integer scores of nodes, where the highest wins and ties go to the first; and a cache.

`Rows` caches the scores of every node for each kind of request, and recomputes them only for nodes that changed. So a
policy's score of a node may depend on nothing but that node and the kind.
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
        """Return (score, GPU) for each of these nodes, all of which have room. Only sharing requests use the GPU."""


class Chooser(Protocol):
    """The interface that a replay uses."""

    def choose(self, kind: Kind) -> tuple[int, int] | tuple[int, int, int] | None:
        """Return (node, GPU); an elastic policy adds the granted milli of a sharing request. None: it fits nowhere."""


class _Row:
    """The scores of one kind, and the position in the log of changes up to which they are valid."""

    def __init__(self, nodes: int) -> None:
        self.scores: Ints = np.full(nodes, NOWHERE, np.int64)
        self.gpus: Ints = np.zeros(nodes, np.int64)
        self.at = -1


class Rows:
    """A Chooser that uses a Scorer."""

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
