"""What room is worth: how much of what a device has left will stay unused, by how full it and its node are.

Owns the tables of learned residual waste (LRV) and the numbers that they begin with: the residual recursion, which
knows only how often which size is asked for. Tables are whole numbers, so that no rounding differs between machines.
It learns nothing; `autoscaler.placement.learning.learner` does.

Words: *milli* are thousandths of a device; a *lane* is one Slice of a node; a *class* is nodes that are alike when they
are empty; a *bin* is how much CPU a node has left for each milli that it has left.
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
"""Tables are by tens of milli: finer ones learn too little of each."""
IDLE: Final = WHOLE // GRAIN + 1
"""The level of an idle lane whose node is idle as a whole: who takes a part of that keeps those out who need all of it.
Without it what is learnt where many ask for whole nodes swings to and fro, for it cannot tell the two apart.
"""
LEVELS: Final = IDLE + 1
ABSENT: Final = LEVELS
"""The level of a lane that a node does not have: worth nothing."""
UNITS: Final = 64
"""Parts of a milli that tables count in."""
CPU_EDGES: Final = np.array([1000, 3152, 4000])
"""Thousandths of a core below which a node has a bin of its own, whatever it has left: few requests find room."""
RATIO_EDGES: Final = np.array([2, 4, 6, 8, 9.5, 11, 12, 14, 18, 26, 40])
"""Thousandths of a core for each milli left, between bins: most requests ask for 4 to 12."""
FULL_BIN: Final = len(CPU_EDGES) + len(RATIO_EDGES) + 1
BINS: Final = FULL_BIN + 1
EAGER: Final = 30.0
"""How often room is looked at by requests before it counts as left for good."""
FORGONE: Final = UNITS // 2
"""What a milli counts that an elastic request goes without, in UNITS of one that does not stay unused."""


class Face(NamedTuple):
    """What nodes of one class have in common. Memory of the host is not in it: few requests are short of that."""

    lanes: tuple[tuple[str, int], ...]
    """(product, bytes) of each, in order."""
    cpu_milli: int


class Tables(NamedTuple):
    """What room is worth. Indexed by class, then bin, then level; the last class is that of nodes never seen."""

    values: Ints
    """[classes, BINS, LEVELS + 1]: UNITS of a milli that are expected to stay unused, of one lane."""
    prices: Ints
    """[classes]: UNITS of a milli for each milli that is taken there: what it keeps from those who fit nowhere else."""


class Taught(NamedTuple):
    """Tables, and whose they are: those of a node are of the class of its Face."""

    faces: tuple[Face, ...]
    tables: Tables


def compute_residual_waste(sizes: Mapping[int, float], least: Mapping[int, int] | None = None) -> Floats:
    """[0 to WHOLE] -> milli that stay unused of a device with so much left, where requests of these sizes (milli ->
    weight) come at random: w(r) = (1 - e) r + e E[w(r - s) | s <= r], where e = 1 - exp(-EAGER P(s <= r)).

    `least`: size -> with how much it makes do; it takes what is best.
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
    """What stays unused, less what that counts which was forgone, after the best grant."""
    return min(
        float(waste[left - granted]) - (size - granted) * FORGONE / UNITS
        for granted in range(least, min(size, left) + 1)
    )


def sample_levels(waste: Floats) -> Floats:
    """[LEVELS]: a function of milli as a function of levels."""
    return np.append(waste[::GRAIN], waste[-1])


def build_tables(values: Floats, prices: Floats) -> Tables:
    """Of values [classes, BINS, LEVELS] and prices [classes], in milli."""
    whole = np.zeros((*values.shape[:2], LEVELS + 1), np.int64)
    whole[:, :, :LEVELS] = np.rint(values * UNITS)
    return Tables(whole, np.rint(prices * UNITS).astype(np.int64))


def build_untrained_estimate(sizes: Mapping[int, float]) -> Taught:
    """What is used until something has been learnt."""
    values = np.broadcast_to(sample_levels(compute_residual_waste(sizes)), (1, BINS, LEVELS))
    return Taught((), build_tables(values, np.zeros(1)))


def quantize_milli(left: Ints) -> Ints:
    """Of lanes with so many milli left; -1: there is no such lane."""
    found: Ints = np.where(left < 0, ABSENT, (left + GRAIN // 2) // GRAIN)
    return found


def bin_of(cpu_milli: Ints, left: Ints) -> Ints:
    """Of nodes with so much CPU, and so many milli in all lanes together."""
    by_cpu = CPU_EDGES.searchsorted(cpu_milli, side="right")
    by_ratio = len(CPU_EDGES) + RATIO_EDGES.searchsorted(cpu_milli / np.maximum(left, 1), side="right")
    by_ratio[left <= 0] = FULL_BIN
    found: Ints = np.where(by_cpu < len(CPU_EDGES), by_cpu, by_ratio)
    return found
