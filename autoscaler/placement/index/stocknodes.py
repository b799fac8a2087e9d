"""Nodes as the Stock knows them: with their lanes, where on them a request goes, and what it takes there. Pure.

Owns how much a node and a lane may have at most, so that no sum or key of theirs overflows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Final, NamedTuple

from autoscaler.placement.index.residual_waste import Face
from autoscaler.state.lanes import Kind, Lane, Room
from autoscaler.state.resources import BYTES_MAX, CPU_MAX

PERCENT_MAX: Final = 1 << 20
"""Of compute of a lane: some drivers scale what they give out, and no more than this."""
LANES_MAX: Final = 4000
"""Of one node."""


class Node(NamedTuple):
    """One node, empty."""

    name: str
    lanes: tuple[Lane, ...]
    cpu_milli: int = CPU_MAX
    host_bytes: int = BYTES_MAX
    links: tuple[str, ...] = ()
    """Of each lane: those with one name are joined more closely than by the node; empty: by nothing that is known."""

    @property
    def face(self) -> Face:
        """What makes a class."""
        return Face(tuple((lane.product, lane.memory_bytes) for lane in self.lanes), self.cpu_milli)


class Place(NamedTuple):
    """Where a request goes: a node, and which of its lanes."""

    node: int
    lanes: tuple[int, ...]


class Load(NamedTuple):
    """What a request takes of its Place."""

    rooms: tuple[Room, ...]
    """Of each lane."""
    cpu_milli: int = 0
    host_bytes: int = 0


def load_of(kind: Kind, node: Node, lanes: Sequence[int]) -> Load:
    """What it takes there. Raises ValueError where it can never be."""
    rooms = [room for lane in lanes if (room := kind.takes(node.lanes[lane])) is not None]
    if len(rooms) < len(lanes):
        raise ValueError(f"{kind} can never be on node {node.name}")
    return Load(tuple(rooms), kind.cpu_milli, kind.host_bytes)


def checked(node: Node) -> None:
    """Raises ValueError for what no node is like."""
    lanes = all(0 < lane.memory_bytes <= BYTES_MAX and 0 <= lane.compute_percent <= PERCENT_MAX for lane in node.lanes)
    lanes = lanes and len(node.lanes) <= LANES_MAX and all(0 <= lane.price < inf for lane in node.lanes)
    if not lanes or not 0 <= node.cpu_milli <= CPU_MAX or not 0 <= node.host_bytes <= BYTES_MAX:
        raise ValueError(
            f"node {node.name}: lanes are 1 to {BYTES_MAX} bytes, 0 to {PERCENT_MAX} percent of compute, at a price "
            f"from 0, and at most {LANES_MAX}, CPU at most {CPU_MAX} milli, memory at most {BYTES_MAX} bytes"
        )
