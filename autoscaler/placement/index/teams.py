"""Several lanes of one node for one request: the node's best, or the best that a link joins. Pure.

Owns that choice over arrays. Promises: a tier counts most; in one tier lanes of one link come before others, however
the two score; then the node with the highest score, then the first; of a team the lanes of the lowest tiers, in order.
Where a link is required there are no others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autoscaler.placement.index.residual_waste import Ints

Flags = NDArray[np.bool_]


def links(names: Sequence[Sequence[str]], counts: Sequence[int]) -> Ints | None:
    """[lanes]: the number of what joins each, in order of nodes; -1: nothing that is known. None: nothing does in any
    node but what all of its lanes have in common. `names`: of each node its lanes' links, or none.
    """
    return numbered(names, counts) if any(len(set(of_node)) > 1 for of_node in names) else None


def numbered(names: Sequence[Sequence[str]], counts: Sequence[int]) -> Ints:
    """The same, wherever they are joined."""
    known = dict[tuple[int, str], int]()
    named = ((at, name) for at, of in enumerate(names) for name in (of or [""] * counts[at]))
    return np.array([known.setdefault(one, len(known)) if one[1] else -1 for one in named], np.int64)


def best(
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
