"""How many others of a Model are in the domain of each node, by a label: for who would be apart from them, or near.

Owns the count and what it is worth, the lowest best; keeps which node has which value until it is told that labels are
others now. Where both are asked for nearness comes first: hosts apart within one rack. It chooses nothing.

Several lanes of one node for one request: the node's best, or the best that a link joins. Pure.

Owns that choice over arrays. Promises: a tier counts most; in one tier lanes of one link come before others, however
the two score; then the node with the highest score, then the first; of a team the lanes of the lowest tiers, in order.
Where a link is required there are no others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoscaler.placement.index.request import CROWD_MAX
from autoscaler.placement.index.residual_waste import Ints
from autoscaler.placement.model.types import Spread
from autoscaler.state.world import NodeId


class SpreadCounts:
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


Flags = NDArray[np.bool_]


def find_link_numbers(names: Sequence[Sequence[str]], counts: Sequence[int]) -> Ints | None:
    """[lanes]: the number of what joins each, in order of nodes; -1: nothing that is known. None: nothing does in any
    node but what all of its lanes have in common. `names`: of each node its lanes' links, or none.
    """
    return number_links(names, counts) if any(len(set(of_node)) > 1 for of_node in names) else None


def number_links(names: Sequence[Sequence[str]], counts: Sequence[int]) -> Ints:
    """The same, wherever they are joined."""
    known = dict[tuple[int, str], int]()
    named = ((at, name) for at, of in enumerate(names) for name in (of or [""] * counts[at]))
    return np.array([known.setdefault(one, len(known)) if one[1] else -1 for one in named], np.int64)


def choose_best_lanes(
    devices: int,
    lanes: Flags,
    tiers: Ints,
    scores: Ints,
    node_of: Ints,
    *,
    link_of: Ints | None,
    must: Ints | None = None,
) -> Ints | None:
    """Where the chosen lanes are; None: no node has so many. `lanes`: those that fit; `scores` [nodes]; `must`: of each
    lane the link that is required, as `link_of`; None: none is.
    """
    if must is not None:
        required = _best(devices, lanes & (must >= 0), tiers, scores, node_of, team_of=must)
        return None if required is None else required[1]
    found = _best(devices, lanes, tiers, scores, node_of, team_of=node_of)
    if found is None or link_of is None:
        return None if found is None else found[1]
    joined = _best(devices, lanes & (link_of >= 0), tiers, scores, node_of, team_of=link_of)
    return found[1] if joined is None or joined[0] > found[0] else joined[1]


def _best(
    devices: int, lanes: Flags, tiers: Ints, scores: Ints, node_of: Ints, *, team_of: Ints
) -> tuple[int, Ints] | None:
    """(its tier, its lanes) of the best team; `team_of` [lanes]: all of a team are of one node."""
    many = int(team_of.max(initial=-1)) + 1
    enough = np.bincount(team_of[lanes], minlength=many) >= devices
    at = np.flatnonzero(lanes)
    at = at[enough[team_of[at]]]
    at = at[np.lexsort((at, tiers[at], team_of[at]))]
    counts = np.bincount(team_of[at], minlength=many)
    last = (counts.cumsum() - counts)[enough] + devices - 1
    if not len(last):
        return None
    highest = tiers[at[last]]
    one = int(np.where(highest == highest.min(), scores[node_of[at[last]]], np.iinfo(np.int64).min).argmax())
    chosen = at[last[one] - devices + 1 : last[one] + 1]
    return int(tiers[chosen[-1]]), chosen
