"""Growth: who is about to start gets more memory than it asks for, of what is of no use to anybody else.

Owns the rule. It is the last thing that a call of the packer decides, of what is then left of each Slice:

1. Of a Slice that could hold a Want which is not placed now, nothing is given away.
2. Of what is left, now and when those are gone who leave, so much is kept as the Replicas that may be asked for yet
   (`autoscaler.outlook.yet`) could fill at the most: every set of them that would fit without growth fits with it.
3. Where it was learnt what room is worth (`autoscaler.waste`), so much is kept that others are expected to use as much
   of the node as they would without.

What is given is a whole number of the Want's steps. A Slice that only one may have is its own, whatever it asked for.
Who was granted less than it asks for gets no more: what is left there is worth more to others. What is claimed of a DRA
driver does not grow, since that rounds amounts up or cuts the Device by them. One at a time starts on a Device, so that
no two are given the same. Promises: nothing is over-committed, and what was placed stays where it is. It moves nobody
and makes no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from autoscaler.lanes import Kind
from autoscaler.packing import Placement, Shelf, Want
from autoscaler.rulings import need
from autoscaler.supposed import Supposed

MIB: Final = 1 << 20
FILLS_MAX: Final = 512
"""Different amounts that may be filled: of more nearly every amount is one, and all that is left is kept."""


class Taker(NamedTuple):
    """One that may come yet: how little and how much it takes of a Slice, and how often it may come."""

    least_bytes: int
    most_bytes: int
    many: int


def grow(placements: Sequence[Placement], waiting: Sequence[Want], supposed: Supposed) -> tuple[Placement, ...]:
    """The same with what each is given. `waiting`: who is not placed, and may be some day; `supposed`: what is left."""
    if not any(one.want.growth.most_bytes for one in placements):
        return tuple(placements)
    known = supposed.yard.yet()
    yet = Counter(known)
    yet.subtract({kind: many for kind, many in Counter(one.want.kind for one in placements).items() if kind in known})
    return tuple(_grown(one, waiting, yet, supposed) for one in placements)


def filled_bytes(left_bytes: int, takers: Iterable[Taker]) -> int:
    """How much of so much they can fill together at the most."""
    filled = {(0, 0)}
    """Between how little and how much a set of them takes."""
    for least, most, many in takers:
        last = filled
        for _ in range(many):
            last = {(low + least, high + most) for low, high in last if low + least <= left_bytes} - filled
            filled = filled | last
            if len(filled) > FILLS_MAX:
                return left_bytes
            if not last:
                break
    return max(min(high, left_bytes) for _, high in filled)


def _grown(one: Placement, waiting: Sequence[Want], yet: Mapping[Kind, int], supposed: Supposed) -> Placement:
    want, growth = one.want, one.want.growth
    if not growth.most_bytes or len(one.slices) != 1 or one.memory_bytes < want.memory_bytes:
        return one
    shelf = supposed.shelf(one.slices[0])
    if shelf.slice.kind == "dra":
        return one
    shared = shelf.slice.shared
    room_bytes = _unused(shelf, waiting, yet, supposed) if shared else shelf.slice.memory_bytes - one.memory_bytes
    room_bytes = (one.memory_bytes + room_bytes) // MIB * MIB - one.memory_bytes  # as pods ask for it
    got_bytes = min(growth.most_bytes, room_bytes) // growth.step_bytes * growth.step_bytes
    return one._replace(memory_bytes=one.memory_bytes + max(0, got_bytes))


def _unused(shelf: Shelf, waiting: Sequence[Want], yet: Mapping[Kind, int], supposed: Supposed) -> int:
    """Bytes that are of no use to others."""
    if any(_could(want, shelf) for want in waiting):
        return 0
    takers = list(_takers(shelf, yet))
    left_bytes = shelf.free.memory_bytes
    soon_bytes = left_bytes + shelf.coming.memory_bytes
    unused_bytes = min(one - filled_bytes(one, takers) for one in {left_bytes, soon_bytes})
    return min(unused_bytes, left_bytes, supposed.yard.unneeded(shelf.slice.id))


def _could(want: Want, shelf: Shelf) -> bool:
    """Whether it could be there, were nobody else."""
    return want.kind.rank(shelf.slice.product) is not None and need(want.least, shelf) is not None


def _takers(shelf: Shelf, yet: Mapping[Kind, int]) -> Iterable[Taker]:
    """Of each Kind that may come there; the largest first, of which the fewest fit."""
    lane = shelf.lane
    for kind in sorted(yet, key=lambda one: -one.memory_bytes):
        room = kind.least.takes(lane) if yet[kind] > 0 and kind.rank(lane.product) is not None else None
        if room is not None:
            yield Taker(room.memory_bytes, max(room.memory_bytes, kind.memory_bytes), yet[kind])
