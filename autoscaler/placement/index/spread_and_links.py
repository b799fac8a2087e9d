"""Ranks nodes by the other replicas of a model in their domain, and chooses lanes for several devices. Pure.

`SpreadCounts` ranks nodes, lowest preferred, by the replicas in their domain (nodes with one value of a label), for
requests to be placed apart from these or near them. If both are requested, nearness has precedence: separate hosts in
one rack. Domains are cached until labels change.

`choose_best_lanes` picks several lanes of one node. The tier counts most; within a tier, lanes of one link precede
others, whatever their scores; then the highest node score, then the first node. Within the chosen node or link, the
lanes of the lowest tiers are taken, in order. If a link is required, only its lanes are considered.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autoscaler.placement.index.request_encoding import CROWD_MAX
from autoscaler.placement.index.residual_waste_tables import Ints
from autoscaler.placement.model.types import Spread
from autoscaler.state.world import NodeId


class SpreadCounts:
    """Ranks these sorted nodes; `said` returns the value of a label on each node, empty if it has none."""

    def __init__(self, nodes: Sequence[NodeId], said: Callable[[str], Iterable[str]]) -> None:
        self._nodes = nodes
        self._said = said
        self._domains: dict[str, tuple[Ints, int]] = {}
        """Label -> ([nodes]: number of the node's domain; number of the domain of nodes without the label, or -1)."""

    def forget(self) -> None:
        """Drop the cached domains because labels changed."""
        self._domains.clear()

    def of(self, spread: Spread) -> Ints:
        """[nodes]: rank by the other replicas, see `EncodedRequest.tiers`. Nodes without the label are near none."""
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
        """[nodes]: number of these nodes in each node's domain, at most CROWD_MAX."""
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
    """[lanes]: the number of each lane's link, in order of nodes; -1: unknown. `names`: per node, its lanes' links or
    none. None: no node has lanes of different links.
    """
    return number_links(names, counts) if any(len(set(of_node)) > 1 for of_node in names) else None


def number_links(names: Sequence[Sequence[str]], counts: Sequence[int]) -> Ints:
    """[lanes]: like `find_link_numbers`, but even if no node has lanes of different links."""
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
    """Return where the chosen lanes are. None: no node has enough. `lanes`: those that fit; `scores` [nodes]; `must`:
    the required link of each lane, numbered like `link_of`; None: no link is required.
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
    """Return the (tier, lanes) of the best team; `team_of` [lanes]: a team has lanes of one node only."""
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
