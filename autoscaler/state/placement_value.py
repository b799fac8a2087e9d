"""A PlacementValues: what room is worth, as it was learnt, with all that it was learnt from.

Owns the types only, which are plain values: the World has one, a file of the state directory keeps it, and it is told
from one process to another. `autoscaler.placement.learning.training` says when to learn, makes one, and takes it as
tables.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from autoscaler.state.resources import RequestFrequency, SliceClass


class Alike(NamedTuple):
    """Nodes that are alike when they are empty, and how many there are."""

    lanes: tuple[SliceClass, ...]
    cpu_milli: int
    host_bytes: int
    many: int


class TrainingInput(msgspec.Struct, frozen=True, kw_only=True):
    """What one learns from: the same TrainingInput gives the same PlacementValues."""

    nodes: tuple[Alike, ...]
    demand: tuple[RequestFrequency, ...]
    seed: int


class PlacementValues(msgspec.Struct, frozen=True, kw_only=True):
    """What a TrainingInput taught."""

    exercise: TrainingInput
    values: bytes
    """As `autoscaler.placement.index.residual_waste.Tables` has them, each number in four bytes, the lowest first."""
    prices: bytes
    learnt: bool = True
    """By replays; False: it knows only how often which size is asked for."""
