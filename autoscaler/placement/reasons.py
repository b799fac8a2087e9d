"""What is free in pieces: of what could hold a Kind, how much, and where most of it is. It moves nobody."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from autoscaler.placement.index.arrays import Flags
from autoscaler.placement.index.residual_waste import Ints
from autoscaler.placement.model.types import Choice
from autoscaler.state.lanes import Kind
from autoscaler.state.resources import BYTES_MAX
from autoscaler.state.world import SliceId

if TYPE_CHECKING:
    from autoscaler.placement.index.index import Yard


class Pieces(NamedTuple):
    """What is free of what could hold a Kind: whole Slices for who needs several, else bytes."""

    need: int
    total: int
    most: int
    """Of one place: a node, or a link of one, for who needs several, else a Slice."""
    places: tuple[tuple[SliceId, ...], ...]
    """Those that could hold it, were nobody there, the roomiest first: their Slices."""


def pieces_of(yard: Yard, kind: Kind, choice: Choice, many: int) -> Pieces:
    """What is free of what could hold it, and where most of it is: `many` such places at most."""
    ask, stock, could = yard.ask(kind), yard.stock, yard.possible(kind, choice)
    if kind.devices > 1:
        fits = could & (stock.left_bytes >= ask.memory[stock.lane_of])
        teams = yard.teams(kind.link)
        free = np.bincount(teams[fits], minlength=len(yard.nodes) + len(teams))
        enough = np.bincount(teams[could], minlength=len(free)) >= kind.devices
        groups = [np.flatnonzero(could & (teams == team)) for team in _most(free, enough, many)]
        need = kind.devices
    else:
        free = np.where(could, stock.left_bytes, 0)
        groups = [np.array([lane]) for lane in _most(free, could, many)]
        need = int(ask.memory[stock.lane_of][could].min(initial=BYTES_MAX))
    places = tuple(tuple(yard.id_of(int(at)) for at in group) for group in groups)
    return Pieces(need, int(free.sum()), int(free.max(initial=0)), places)


def _most(free: Ints, flags: Flags, many: int) -> list[int]:
    """Of the flagged ones those with the most, in order."""
    at = np.flatnonzero(flags)
    return [int(one) for one in at[np.lexsort((at, -free[at]))][:many]]
