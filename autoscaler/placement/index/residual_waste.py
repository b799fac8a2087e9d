"""Learned residual waste (LRV): scores a request on a node by the expected reduction of unused room, less the value of
the place to other requests.

Implements the formula (research/packing 1.4b) in integers, for many nodes at once. Scores are rounded down to BUCKET,
so that the first of nearly equal nodes is chosen and the last ones stay free for large requests; exact scores perform
worse. `autoscaler.placement.index.node_search` checks whether a request fits.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.residual_waste_tables import (
    BINS,
    FORGONE,
    GRAIN,
    IDLE,
    LEVELS,
    UNITS,
    WHOLE,
    Ints,
    Tables,
    bin_of,
    quantize_milli,
)

GAIN: Final = 18
"""Weight of reduced waste before rounding; PRICE: weight of the price of the place."""
PRICE: Final = 10
BUCKET: Final = 1000


class NodeSubset(NamedTuple):
    """Some nodes, in order, with all their lanes; the lanes of one node are adjacent."""

    at: Ints
    """[lanes]: their position in the original arrays."""
    left: Ints
    """[lanes]: milli left; -1: the lane is not to be used."""
    level: Ints
    """[lanes]: see `compute_levels`."""
    seat: Ints
    """[lanes]: index of the lane's node among these nodes."""
    counts: Ints
    """[nodes]: number of lanes."""
    cpu: Ints
    """[nodes]: millicores left; `cpu_size`: millicores in total."""
    cpu_size: Ints
    classes: Ints
    """[nodes]: class in the tables."""

    def sums(self, of_lanes: Ints) -> Ints:
        """[nodes]: sum of `of_lanes` [lanes] per node."""
        up_to = np.zeros(len(of_lanes) + 1, np.int64)
        of_lanes.cumsum(out=up_to[1:])
        ends = self.counts.cumsum()
        found: Ints = up_to[ends] - up_to[ends - self.counts]
        return found

    def ranks(self, flags: Ints) -> Ints:
        """[lanes]: number of set `flags` [lanes; 0 or 1] on the node up to and including the lane."""
        up_to = flags.cumsum()
        ends = self.counts.cumsum()
        before = np.concatenate((np.zeros(1, np.int64), up_to))[ends - self.counts]
        found: Ints = up_to - before[self.seat]
        return found


def compute_levels(part: NodeSubset, left: Ints) -> Ints:
    """[lanes] -> the level of each lane if `left` [lanes] milli are left."""
    idle = part.sums((left == WHOLE).astype(np.int64)) == part.counts
    found: Ints = np.where(idle[part.seat], IDLE, quantize_milli(left))
    return found


def score_lanes(
    tables: Tables, part: NodeSubset, milli: Ints, taken: Ints, cpu_milli: int, *, forgone: Ints | None = None
) -> Ints:
    """[lanes] -> the score of taking `milli` [lanes] of one lane. `taken` [nodes]: approximate milli that this takes of
    a node, whichever lane is chosen. `forgone` [lanes]: requested milli that are not granted.
    """
    total = part.sums(np.maximum(part.left, 0))
    before = _values(tables, part, part.cpu, total, part.level)
    if milli.any():  # taking any part of it makes the node not idle
        at = quantize_milli(np.stack((part.left, np.maximum(part.left - milli, 0))))
    else:
        at = np.stack((part.level, part.level))
    rest = _values(tables, part, part.cpu - cpu_milli, total - taken, at)
    less = part.sums(before - rest[0])[part.seat] + rest[0] - rest[1]
    if forgone is not None:
        less = less + FORGONE * forgone
    return _cut(less, _price(tables, part, taken, cpu_milli)[part.seat])


def score_nodes(tables: Tables, part: NodeSubset, lanes: Ints, cpu_milli: int) -> Ints:
    """[nodes] -> the score of taking these `lanes` [lanes; 0 or 1] whole; no lanes: CPU only."""
    total, taken = part.sums(np.maximum(part.left, 0)), WHOLE * part.sums(lanes)
    left = np.where(lanes > 0, np.minimum(part.left, 0), part.left)
    before = _values(tables, part, part.cpu, total, part.level)
    after = _values(tables, part, part.cpu - cpu_milli, total - taken, compute_levels(part, left))
    return _cut(part.sums(before - after), _price(tables, part, taken, cpu_milli))


def compute_needed_milli(tables: Tables, node: NodeSubset, lane: int) -> int:
    """Return the smallest free room of a lane, in milli, with which the expected use of the node by others is as high
    as with all of its free room. Tables are by levels, so a difference of up to GRAIN does not count.
    """
    left = max(0, int(node.left[lane]))
    lefts = np.repeat(np.maximum(node.left, -1)[None, :], left + 1, axis=0)
    lefts[:, lane] = np.arange(left + 1)
    totals = np.maximum(lefts, 0).sum(axis=1)
    rows = (node.classes * BINS + bin_of(np.broadcast_to(node.cpu, totals.shape), totals)) * (LEVELS + 1)
    idle = (lefts == WHOLE).all(axis=1)
    wasted = tables.values.reshape(-1)[rows[:, None] + np.where(idle[:, None], IDLE, quantize_milli(lefts))].sum(axis=1)
    used = totals * UNITS - wasted
    return int((used + GRAIN * UNITS >= used[left]).argmax())


def _cut(less: Ints, price: Ints) -> Ints:
    found: Ints = (less * GAIN - price) // (BUCKET * UNITS)
    return found


def _price(tables: Tables, part: NodeSubset, taken: Ints, cpu_milli: int) -> Ints:
    """Return the price of the place. CPU counts too, because devices without CPU cannot be used."""
    by_cpu = WHOLE * part.counts * cpu_milli // np.maximum(part.cpu_size, 1)
    found: Ints = PRICE * tables.prices[part.classes] * np.maximum(taken, by_cpu)
    return found


def _values(tables: Tables, part: NodeSubset, cpu_milli: Ints, left: Ints, at: Ints) -> Ints:
    """[..., lanes]: the room of lanes at these levels that is expected to stay unused, in 1/UNITS milli.
    `cpu_milli`, `left`: the CPU and the milli that the nodes have left.
    """
    rows = (part.classes * BINS + bin_of(cpu_milli, left)) * (LEVELS + 1)
    found: Ints = tables.values.reshape(-1)[rows[part.seat] + at]
    return found
