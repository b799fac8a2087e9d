"""LRV, learned residual waste: the score of a request on a node is how much less will stay unused, less what the place
is worth to others.

Owns the formula (research/packing 1.4b), in whole numbers, for many nodes at once. The score is cut to BUCKET: among
nearly equal nodes the first in order wins, which keeps the last ones free for what needs much; exact numbers are worse.
It knows only what is given; whether something fits at all is asked elsewhere
(`autoscaler.placement.index.node_arrays`).
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from autoscaler.placement.index.residual_waste import (
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
"""What less waste counts, and PRICE the price of the place, before the cut."""
PRICE: Final = 10
BUCKET: Final = 1000


class NodeSubset(NamedTuple):
    """Some nodes with all their lanes: the lanes of one node beside each other, the nodes in order."""

    at: Ints
    """[lanes]: where they are in the arrays that they were taken from."""
    left: Ints
    """[lanes]: milli; -1: the lane is not to be used."""
    level: Ints
    """[lanes]: see `compute_levels`."""
    seat: Ints
    """[lanes]: which of these nodes it is of."""
    counts: Ints
    """[nodes]: how many lanes each has."""
    cpu: Ints
    """[nodes]: thousandths of a core that are left, and all of them."""
    cpu_size: Ints
    classes: Ints
    """[nodes]: in the tables."""

    def sums(self, of_lanes: Ints) -> Ints:
        """[nodes]: of [lanes]."""
        up_to = np.zeros(len(of_lanes) + 1, np.int64)
        of_lanes.cumsum(out=up_to[1:])
        ends = self.counts.cumsum()
        found: Ints = up_to[ends] - up_to[ends - self.counts]
        return found

    def ranks(self, flags: Ints) -> Ints:
        """[lanes]: how many of `flags` [lanes; 0 or 1] there are in its node up to it, itself included."""
        up_to = flags.cumsum()
        ends = self.counts.cumsum()
        before = np.concatenate((np.zeros(1, np.int64), up_to))[ends - self.counts]
        found: Ints = up_to - before[self.seat]
        return found


def compute_levels(part: NodeSubset, left: Ints) -> Ints:
    """[lanes] -> the level of each, where so many milli [lanes] are left."""
    idle = part.sums((left == WHOLE).astype(np.int64)) == part.counts
    found: Ints = np.where(idle[part.seat], IDLE, quantize_milli(left))
    return found


def score_lanes(
    tables: Tables, part: NodeSubset, milli: Ints, taken: Ints, cpu_milli: int, *, forgone: Ints | None = None
) -> Ints:
    """[lanes] -> the score of who takes so many `milli` [lanes] of one; of the node that is about `taken` [nodes].

    `forgone` [lanes]: milli that it asked for and goes without.
    """
    total = part.sums(np.maximum(part.left, 0))
    before = _values(tables, part, part.cpu, total, part.level)
    if milli.any():  # whoever takes any of it ends a node's being idle
        at = quantize_milli(np.stack((part.left, np.maximum(part.left - milli, 0))))
    else:
        at = np.stack((part.level, part.level))
    rest = _values(tables, part, part.cpu - cpu_milli, total - taken, at)
    less = part.sums(before - rest[0])[part.seat] + rest[0] - rest[1]
    if forgone is not None:
        less = less + FORGONE * forgone
    return _cut(less, _price(tables, part, taken, cpu_milli)[part.seat])


def score_nodes(tables: Tables, part: NodeSubset, lanes: Ints, cpu_milli: int) -> Ints:
    """[nodes] -> the score of who takes these `lanes` [lanes; 0 or 1] whole; none of any: CPU alone."""
    total, taken = part.sums(np.maximum(part.left, 0)), WHOLE * part.sums(lanes)
    left = np.where(lanes > 0, np.minimum(part.left, 0), part.left)
    before = _values(tables, part, part.cpu, total, part.level)
    after = _values(tables, part, part.cpu - cpu_milli, total - taken, compute_levels(part, left))
    return _cut(part.sums(before - after), _price(tables, part, taken, cpu_milli))


def compute_needed_milli(tables: Tables, node: NodeSubset, lane: int) -> int:
    """The least milli of one lane of a node with which others are expected to use as much of the node as with all that
    is left of it. Tables are by levels, so that less use by a GRAIN is none.
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
    """A node's CPU is worth something, too: who takes much of it keeps others from the devices."""
    by_cpu = WHOLE * part.counts * cpu_milli // np.maximum(part.cpu_size, 1)
    found: Ints = PRICE * tables.prices[part.classes] * np.maximum(taken, by_cpu)
    return found


def _values(tables: Tables, part: NodeSubset, cpu_milli: Ints, left: Ints, at: Ints) -> Ints:
    """[..., lanes]: UNITS of a milli that are expected to stay unused of lanes at these levels, where the nodes have so
    much CPU and so many milli left.
    """
    rows = (part.classes * BINS + bin_of(cpu_milli, left)) * (LEVELS + 1)
    found: Ints = tables.values.reshape(-1)[rows[part.seat] + at]
    return found
