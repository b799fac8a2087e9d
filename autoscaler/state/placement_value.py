"""Placement values: the learned value of free space, with the input from which it was learned.

Owns the types only. They are plain values: part of the World, stored in the state directory, and sent between
processes. `autoscaler.placement.learning.training` decides when to learn, creates the values and decodes them to
tables.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from autoscaler.state.resources import RequestFrequency, SliceClass


class Alike(NamedTuple):
    """Nodes that are equal when they are empty, and their number."""

    lanes: tuple[SliceClass, ...]
    cpu_milli: int
    host_bytes: int
    many: int


class TrainingInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of learning. It determines the result: equal inputs give equal PlacementValues."""

    nodes: tuple[Alike, ...]
    demand: tuple[RequestFrequency, ...]
    seed: int


class PlacementValues(msgspec.Struct, frozen=True, kw_only=True):
    """The result of learning from a TrainingInput."""

    exercise: TrainingInput
    values: bytes
    """Tables of `autoscaler.placement.index.residual_waste_tables`: each number in four bytes, little-endian."""
    prices: bytes
    learnt: bool = True
    """Whether the values come from replays. False: they only contain how often each size is requested."""
