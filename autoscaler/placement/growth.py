"""Growth: who is about to start gets more memory than it asks for, of what is of no use to anybody else.

Owns the rule. It is the last thing that a call of the packer decides, of what is then left of each Slice:

1. Of a Slice that could hold a PlacementRequest which is not placed now, nothing is given away.
2. Of what is left, now and when those are gone who leave, so much is kept as the Replicas that may be asked for yet
   (`autoscaler.placement.learning.expected_demand.PossibleStarts`) could fill at the most: every set of them that would
   fit without growth fits with it. Who leaves by the same plan may be asked for again, and is one of them; so is who
   takes the place of another. 3. Where it was learnt what room is worth (`autoscaler.placement.index.residual_waste`),
   so much is kept that others are expected to use as much of the node as they would without.

What is given is a whole number of the PlacementRequest's steps. A Slice that only one may have is its own, whatever it
asked for. Who was granted less than it asks for gets no more: what is left there is worth more to others. What is
claimed of a DRA driver does not grow, since that rounds amounts up or cuts the Device by them, and nothing does on a
Slice of which more is given out than there is: it would be nobody's memory. One at a time starts on a Device, so that
no two are given the same. Promises: nothing is over-committed, and what was placed stays where it is. It moves nobody
and makes no room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from autoscaler.contract import ReplicaId
from autoscaler.placement.model.predicates import has_matching_labels
from autoscaler.placement.model.types import Bin, Placement, PlacementRequest
from autoscaler.placement.overlay import Overlay
from autoscaler.spec.quantity import SIZE_MAX
from autoscaler.state.resources import NO_GROWTH, RequestShape, ResourceAmount, SliceClass

MIB: Final = 1 << 20
Selector: TypeAlias = tuple[tuple[str, str], ...]
FILLS_MAX: Final = 512
"""Different amounts that may be filled: of more nearly every amount is one, and all that is left is kept."""


class Taker(NamedTuple):
    """One that may come yet: how little and how much it takes of a Slice, and how often it may come."""

    least_bytes: int
    most_bytes: int
    many: int


class _Others:
    """Who is not placed, and who may come yet: each is asked once about all Slices of one lane, since many are alike.

    `waiting`: who may be placed some day; `yet`: how often each Kind may come.
    """

    def __init__(self, waiting: Iterable[PlacementRequest], yet: Mapping[RequestShape, int]) -> None:
        self._waiting = {(want.kind, want.selector) for want in waiting}
        self._yet = sorted((kind for kind, many in yet.items() if many > 0), key=lambda one: (-one.memory_bytes, one))
        self._many = yet
        self._where: dict[SliceClass, set[Selector]] = {}
        self._takers: dict[SliceClass, list[Taker]] = {}
        self._filled: dict[tuple[SliceClass, int], int] = {}

    def could(self, shelf: Bin) -> bool:
        """Whether anybody who waits could be there, were nobody else."""
        lane = shelf.lane
        if lane not in self._where:
            able = {kind for kind in {kind for kind, _ in self._waiting} if _room(kind, lane) is not None}
            self._where[lane] = {selector for kind, selector in self._waiting if kind in able}
        return any(has_matching_labels(selector, shelf.slice) for selector in self._where[lane])

    def takers(self, lane: SliceClass) -> list[Taker]:
        """Of each Kind that may come there; the largest first, of which the fewest fit."""
        if lane not in self._takers:
            rooms = ((kind, _room(kind, lane)) for kind in self._yet)
            self._takers[lane] = [
                Taker(room.memory_bytes, max(room.memory_bytes, kind.memory_bytes), self._many[kind])
                for kind, room in rooms
                if room is not None
            ]
        return self._takers[lane]

    def unused(self, lane: SliceClass, left_bytes: int) -> int:
        """How much of so much there none of these could fill."""
        key = lane, left_bytes
        if key not in self._filled:
            self._filled[key] = filled_bytes(left_bytes, self.takers(lane))
        return left_bytes - self._filled[key]


def validate_growth(wanted: Iterable[PlacementRequest]) -> None:
    """Raises ValueError for a growth that is none."""
    for growth in {want.growth for want in wanted if want.growth is not NO_GROWTH}:
        for name, amount, least in (("most_bytes", growth.most_bytes, 0), ("step_bytes", growth.step_bytes, 1)):
            if not _counts(amount, least):
                expected = f"expected a whole number, {least} to {SIZE_MAX}"
                raise ValueError(f"growth.{name} of a request is {amount}: {expected}")


def grow_placements(
    placements: Sequence[Placement],
    waiting: Sequence[PlacementRequest],
    victims: Collection[ReplicaId],
    supposed: Overlay,
) -> tuple[Placement, ...]:
    """The same with what each is given. `waiting`: who is not placed, and may be some day; `victims`: who goes for
    them, and may be asked for again; `supposed`: what is left.
    """
    if not any(one.want.growth.most_bytes for one in placements):
        return tuple(placements)
    known = supposed.yard.yet(victims)
    yet = Counter(known)
    yet.subtract({kind: many for kind, many in Counter(one.want.kind for one in placements).items() if kind in known})
    others = _Others(waiting, yet)
    return tuple(_grown(one, others, supposed) for one in placements)


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


def _grown(one: Placement, others: _Others, supposed: Overlay) -> Placement:
    want, growth = one.want, one.want.growth
    if not growth.most_bytes or len(one.slices) != 1 or one.memory_bytes < want.memory_bytes:
        return one
    shelf = supposed.shelf(one.slices[0])
    if shelf.slice.kind == "dra" or shelf.slice.overcommitted:
        return one
    shared = shelf.slice.shared
    room_bytes = _unused(shelf, others, supposed) if shared else shelf.slice.memory_bytes - one.memory_bytes
    room_bytes = (one.memory_bytes + room_bytes) // MIB * MIB - one.memory_bytes  # as pods ask for it
    got_bytes = min(growth.most_bytes, room_bytes) // growth.step_bytes * growth.step_bytes
    return one._replace(memory_bytes=one.memory_bytes + max(0, got_bytes))


def _unused(shelf: Bin, others: _Others, supposed: Overlay) -> int:
    """Bytes that are of no use to others."""
    if others.could(shelf):
        return 0
    lane, left_bytes = shelf.lane, shelf.free.memory_bytes
    soon_bytes = left_bytes + shelf.coming.memory_bytes
    unused_bytes = min(others.unused(lane, left_bytes), others.unused(lane, soon_bytes))
    return min(unused_bytes, left_bytes, supposed.yard.unneeded(shelf.slice.id))


def _counts(amount: object, least: int) -> bool:
    return isinstance(amount, int) and least <= amount <= SIZE_MAX


def _room(kind: RequestShape, lane: SliceClass) -> ResourceAmount | None:
    """What it takes there at the least; None: it can never be there, whoever else is."""
    return kind.least.takes(lane) if kind.rank(lane.product) is not None else None
