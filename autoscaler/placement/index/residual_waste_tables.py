"""The value of room: how much of what a device has left will stay unused, by how full the device and its node are.

Contains the tables of learned residual waste (LRV) and their initial values: the residual recursion, which only knows
how often each size is requested. Tables are integers, so that rounding does not differ between machines.
`autoscaler.placement.learning.learner` does the learning.

Terms: *milli* are thousandths of a device; a *lane* is one slice of a node; a *class* is a set of nodes that are alike
when empty; a *bin* is a range of CPU left on a node per milli left.
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
"""Table step in milli: finer cells would learn too little each."""
IDLE: Final = WHOLE // GRAIN + 1
"""The level of an idle lane on an idle node: taking a part of it excludes requests for the whole node. Without this
level, learning oscillates if many requests take whole nodes, because it cannot distinguish the two cases.
"""
LEVELS: Final = IDLE + 1
ABSENT: Final = LEVELS
"""The level of a lane that a node does not have: no value."""
UNITS: Final = 64
"""Fractions of a milli that tables count in."""
CPU_EDGES: Final = np.array([1000, 3152, 4000])
"""Millicores below which a node has a bin of its own, whatever it has left: few requests find room."""
RATIO_EDGES: Final = np.array([2, 4, 6, 8, 9.5, 11, 12, 14, 18, 26, 40])
"""Millicores per milli left, between bins: most requests ask for 4 to 12."""
FULL_BIN: Final = len(CPU_EDGES) + len(RATIO_EDGES) + 1
BINS: Final = FULL_BIN + 1
EAGER: Final = 30.0
"""How often requests consider room before it counts as left for good."""
FORGONE: Final = UNITS // 2
"""Cost of a milli that an elastic request goes without, in UNITS of one that does not stay unused."""


class Face(NamedTuple):
    """What nodes of one class have in common. Host memory is left out: few requests are short of it."""

    lanes: tuple[tuple[str, int], ...]
    """(product, bytes) per lane, in order."""
    cpu_milli: int


class Tables(NamedTuple):
    """The value of room, indexed by class, then bin, then level; the last class is that of nodes never seen."""

    values: Ints
    """[classes, BINS, LEVELS + 1]: expected unused UNITS of a milli of one lane."""
    prices: Ints
    """[classes]: UNITS of a milli per milli taken there: the cost to requests that fit nowhere else."""


class Taught(NamedTuple):
    """Tables with their classes: a node belongs to the class of its `Face`."""

    faces: tuple[Face, ...]
    tables: Tables


def compute_residual_waste(sizes: Mapping[int, float], least: Mapping[int, int] | None = None) -> Floats:
    """[0 to WHOLE] -> expected unused milli of a device with this much left, if requests of these sizes (milli ->
    weight) arrive at random: w(r) = (1 - e) r + e E[w(r - s) | s <= r], where e = 1 - exp(-EAGER P(s <= r)).

    `least`: size -> its elastic minimum; each request takes the best amount.
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
    """Return what stays unused after the best grant, less the value of what was forgone."""
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
    """Return what is used until something has been learnt."""
    values = np.broadcast_to(sample_levels(compute_residual_waste(sizes)), (1, BINS, LEVELS))
    return Taught((), build_tables(values, np.zeros(1)))


def quantize_milli(left: Ints) -> Ints:
    """Return the levels of lanes with this many milli left; -1: there is no such lane."""
    found: Ints = np.where(left < 0, ABSENT, (left + GRAIN // 2) // GRAIN)
    return found


def bin_of(cpu_milli: Ints, left: Ints) -> Ints:
    """Return the bins of nodes with this much CPU, and this many milli left in all lanes together."""
    by_cpu = CPU_EDGES.searchsorted(cpu_milli, side="right")
    by_ratio = len(CPU_EDGES) + RATIO_EDGES.searchsorted(cpu_milli / np.maximum(left, 1), side="right")
    by_ratio[left <= 0] = FULL_BIN
    found: Ints = np.where(by_cpu < len(CPU_EDGES), by_cpu, by_ratio)
    return found
