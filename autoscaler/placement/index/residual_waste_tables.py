"""Tables of learned residual waste (LRV): the part of a device's free room that is expected to stay unused, by how full
the device and its node are.

The initial values use only the frequency of each request size (residual recursion);
`autoscaler.placement.learning.learner` improves them. Tables contain integers, so that rounding does not differ between
machines.

Terms:

* *milli*: thousandths of a device
* *lane*: one slice of a node
* *class*: a set of nodes that are equal when empty
* *bin*: a range of free CPU per free milli of a node
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

WHOLE: Final = 1000
"""Milli of a whole device."""
GRAIN: Final = 10
"""Table step in milli: finer cells would have too few samples."""
IDLE: Final = WHOLE // GRAIN + 1
"""The level of an idle lane on an idle node: taking a part of it excludes requests for the whole node. Without this
level, learning oscillates if many requests take whole nodes, because it cannot distinguish the two cases.
"""
LEVELS: Final = IDLE + 1
ABSENT: Final = LEVELS
"""The level of a lane that a node does not have: no value."""
UNITS: Final = 64
"""Tables count in fractions of a milli: in 1/UNITS milli."""
CPU_EDGES: Final = np.array([1000, 3152, 4000])
"""Millicores below which a node has a separate bin, regardless of its free milli: few requests fit there."""
RATIO_EDGES: Final = np.array([2, 4, 6, 8, 9.5, 11, 12, 14, 18, 26, 40])
"""Boundaries between bins, in millicores per milli left; most requests need 4 to 12."""
FULL_BIN: Final = len(CPU_EDGES) + len(RATIO_EDGES) + 1
BINS: Final = FULL_BIN + 1
EAGER: Final = 30.0
"""Mean number of requests that arrive before free room counts as unused."""
FORGONE: Final = UNITS // 2
"""Cost of a milli that an elastic request is not granted, in 1/UNITS of a used milli."""


class Face(NamedTuple):
    """The common properties of the nodes of one class. Host memory is left out, because it is rarely scarce."""

    lanes: tuple[tuple[str, int], ...]
    """(product, bytes) per lane, in order."""
    cpu_milli: int


class Tables(NamedTuple):
    """The value of room, indexed by class, then bin, then level; the last class is that of nodes never seen."""

    values: Ints
    """[classes, BINS, LEVELS + 1]: the room of one lane that is expected to stay unused, in 1/UNITS milli."""
    prices: Ints
    """[classes]: the cost of each milli taken there to requests that fit nowhere else, in 1/UNITS milli."""


class Taught(NamedTuple):
    """Tables with their classes: a node belongs to the class of its `Face`."""

    faces: tuple[Face, ...]
    tables: Tables


def compute_residual_waste(sizes: Mapping[int, float], least: Mapping[int, int] | None = None) -> Floats:
    """Return [0 to WHOLE] -> expected unused milli of a device with this many milli free.

    Requests of these sizes (milli -> weight) arrive at random: w(r) = (1 - e) r + e E[w(r - s) | s <= r], where
    e = 1 - exp(-EAGER P(s <= r)). `least`: size -> its elastic minimum; each request takes the best amount.
    """
    enough = {size: size if least is None else least.get(size, size) for size in sizes}
    total = sum(sizes.values())
    waste = np.zeros(WHOLE + 1)
    for left in range(1, WHOLE + 1):
        fits = [(size, weight / total) for size, weight in sizes.items() if enough[size] <= left]
        share = sum(weight for _, weight in fits)
        if not share:
            waste[left] = left
            continue
        used = 1 - exp(-EAGER * share)
        after = sum(weight * _after(waste, left, size, enough[size]) for size, weight in fits) / share
        waste[left] = (1 - used) * left + used * after
    return waste


def _after(waste: Floats, left: int, size: int, least: int) -> float:
    """Return the unused milli after the best grant, less the value of the milli that were not granted."""
    return min(
        float(waste[left - granted]) - (size - granted) * FORGONE / UNITS
        for granted in range(least, min(size, left) + 1)
    )


def sample_levels(waste: Floats) -> Floats:
    """[LEVELS]: convert a function of milli to one of levels."""
    return np.append(waste[::GRAIN], waste[-1])


def build_tables(values: Floats, prices: Floats) -> Tables:
    """Convert values [classes, BINS, LEVELS] and prices [classes], in milli, to tables."""
    whole = np.zeros((*values.shape[:2], LEVELS + 1), np.int64)
    whole[:, :, :LEVELS] = np.rint(values * UNITS)
    return Tables(whole, np.rint(prices * UNITS).astype(np.int64))


def build_untrained_estimate(sizes: Mapping[int, float]) -> Taught:
    """Return the values that are used before the first training."""
    values = np.broadcast_to(sample_levels(compute_residual_waste(sizes)), (1, BINS, LEVELS))
    return Taught((), build_tables(values, np.zeros(1)))


def quantize_milli(left: Ints) -> Ints:
    """Return the levels of lanes that have `left` milli; a negative number means that the lane does not exist."""
    found: Ints = np.where(left < 0, ABSENT, (left + GRAIN // 2) // GRAIN)
    return found


def bin_of(cpu_milli: Ints, left: Ints) -> Ints:
    """Return the bins of nodes with this much CPU, and this many milli left in all lanes together."""
    by_cpu = CPU_EDGES.searchsorted(cpu_milli, side="right")
    by_ratio = len(CPU_EDGES) + RATIO_EDGES.searchsorted(cpu_milli / np.maximum(left, 1), side="right")
    by_ratio[left <= 0] = FULL_BIN
    found: Ints = np.where(by_cpu < len(CPU_EDGES), by_cpu, by_ratio)
    return found
