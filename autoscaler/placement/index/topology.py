"""How many others of a Model are in the domain of each node, by a label: for who would be apart from them, or near.

Owns the count and what it is worth, the lowest best; keeps which node has which value until it is told that labels are
others now. Where both are asked for nearness comes first: hosts apart within one rack. It chooses nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from autoscaler.placement.index.request import CROWD_MAX
from autoscaler.placement.index.residual_waste import Ints
from autoscaler.placement.model.types import Spread
from autoscaler.state.world import NodeId


class Crowds:
    """Of these nodes, sorted; `said` gives the value of a label on each, empty where it has none."""

    def __init__(self, nodes: Sequence[NodeId], said: Callable[[str], Iterable[str]]) -> None:
        self._nodes = nodes
        self._said = said
        self._domains: dict[str, tuple[Ints, int]] = {}
        """Label -> [nodes]: the number of each one's domain; and the number of those without it, or -1."""

    def forget(self) -> None:
        """Labels are others now."""
        self._domains.clear()

    def of(self, spread: Spread) -> Ints:
        """[nodes]: how little each is liked for the others, see `Ask.tiers`. Who has not the label is near nobody."""
        found: Ints = np.zeros(len(self._nodes), np.int64)
        if spread.near:
            domains, without = self._domains_by(spread.near)
            there = self._count(domains, spread.nodes)
            there[domains == without] = 0
            found += (CROWD_MAX + 1) * (CROWD_MAX - there)
        if spread.label:
            found += self._count(self._domains_by(spread.label)[0], spread.nodes)
        return found

    def _count(self, domains: Ints, nodes: Sequence[NodeId]) -> Ints:
        """[nodes]: how many of these nodes are in each one's domain, CROWD_MAX at most."""
        numbers = [bisect_left(self._nodes, node) for node in nodes]
        there = [at for at, node in zip(numbers, nodes, strict=True) if self._nodes[at : at + 1] == (node,)]
        counts: Ints = np.bincount(domains[there], minlength=len(self._nodes)).astype(np.int64)
        return np.minimum(counts, CROWD_MAX)[domains]

    def _domains_by(self, label: str) -> tuple[Ints, int]:
        if label not in self._domains:
            known = dict[str, int]()
            numbers = [known.setdefault(one, len(known)) for one in self._said(label)]
            self._domains[label] = np.array(numbers, np.int64), known.get("", -1)
        return self._domains[label]
