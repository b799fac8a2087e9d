"""Growth: a starting replica is granted more memory than requested, if no other request can use that memory.

This is the last step of a packer call. It applies to the memory that is then free on each slice:

1. A slice on which an unplaced request fits provides no memory for growth.
2. Every set of replicas that may still be requested fits just as it would without growth, now and after leaving
   replicas are gone (`autoscaler.placement.learning.expected_demand.PossibleStarts`). This includes victims of the same
   plan and replacements.
3. If the value of room was learned (`autoscaler.placement.index.residual_waste_tables`), enough memory is kept that the
   expected use of the node by others is as high as without growth.

Growth is a multiple of the request's step. A replica can use all of a slice that is not shared. A request that was
granted less than requested does not grow. Nothing grows on slices of a DRA driver, which rounds amounts up or
partitions the device by them, nor on overcommitted slices. Replicas start on a device one at a time, so no memory is
granted twice. Invariants: nothing is overcommitted, and placements keep their slices.
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
"""Maximum number of tracked sums. With more, nearly every amount is possible, and all free memory is kept."""


class Taker(NamedTuple):
    """A shape that may still be requested: its minimum and maximum amount of a slice, and how often."""

    least_bytes: int
    most_bytes: int
    many: int


class _Others:
    """Unplaced and possible future requests. Results are cached by slice class, because many slices are alike.

    `waiting`: requests that may be placed some day; `yet`: how often each shape may still be requested.
    """

    def __init__(self, waiting: Iterable[PlacementRequest], yet: Mapping[RequestShape, int]) -> None:
        self._waiting = {(want.kind, want.choice.selector) for want in waiting}
        self._yet = sorted((kind for kind, many in yet.items() if many > 0), key=lambda one: (-one.memory_bytes, one))
        self._many = yet
        self._where: dict[SliceClass, set[Selector]] = {}
        self._takers: dict[SliceClass, list[Taker]] = {}
        self._filled: dict[tuple[SliceClass, int], int] = {}

    def could(self, shelf: Bin) -> bool:
        """Whether any waiting request could be placed there if it were empty."""
        lane = shelf.lane
        if lane not in self._where:
            able = {kind for kind in {kind for kind, _ in self._waiting} if _room(kind, lane) is not None}
            self._where[lane] = {selector for kind, selector in self._waiting if kind in able}
        return any(has_matching_labels(selector, shelf.slice) for selector in self._where[lane])

    def takers(self, lane: SliceClass) -> list[Taker]:
        """Return the shapes that may still be placed there, the largest first, because the fewest of these fit."""
        if lane not in self._takers:
            rooms = ((kind, _room(kind, lane)) for kind in self._yet)
            self._takers[lane] = [
                Taker(room.memory_bytes, max(room.memory_bytes, kind.memory_bytes), self._many[kind])
                for kind, room in rooms
                if room is not None
            ]
        return self._takers[lane]

    def unused(self, lane: SliceClass, left_bytes: int) -> int:
        """Return how many of these bytes these requests cannot fill."""
        key = lane, left_bytes
        if key not in self._filled:
            self._filled[key] = filled_bytes(left_bytes, self.takers(lane))
        return left_bytes - self._filled[key]


def validate_growth(wanted: Iterable[PlacementRequest]) -> None:
    """Raise ValueError if a request has an invalid growth."""
    for growth in {want.growth for want in wanted if want.growth is not NO_GROWTH}:
        for name, amount, least in (("most_bytes", growth.most_bytes, 0), ("step_bytes", growth.step_bytes, 1)):
            if not (isinstance(amount, int) and least <= amount <= SIZE_MAX):
                expected = f"expected an integer from {least} to {SIZE_MAX}"
                raise ValueError(f"growth.{name} of a placement request is {amount}: {expected}")


def grow_placements(
    placements: Sequence[Placement],
    waiting: Sequence[PlacementRequest],
    victims: Collection[ReplicaId],
    overlay: Overlay,
) -> tuple[Placement, ...]:
    """Return the placements with their growth. `waiting`: unplaced requests that may be placed some day.
    `victims`: replicas evicted for them, which may be requested again; `overlay`: the free resources that remain.
    """
    if not any(one.want.growth.most_bytes for one in placements):
        return tuple(placements)
    known = overlay.index.yet(victims)
    yet = Counter(known)
    yet.subtract({kind: many for kind, many in Counter(one.want.kind for one in placements).items() if kind in known})
    others = _Others(waiting, yet)
    return tuple(_grown(one, others, overlay) for one in placements)


def filled_bytes(left_bytes: int, takers: Iterable[Taker]) -> int:
    """Return the maximum of these bytes that the possible replicas (`takers`) can fill together."""
    filled = {(0, 0)}
    """(least, most) that a set of them takes."""
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


def _grown(one: Placement, others: _Others, overlay: Overlay) -> Placement:
    want, growth = one.want, one.want.growth
    if not growth.most_bytes or len(one.slices) != 1 or one.memory_bytes < want.kind.memory_bytes:
        return one
    shelf = overlay.shelf(one.slices[0])
    if shelf.slice.kind == "dra" or shelf.slice.overcommitted:
        return one
    shared = shelf.slice.shared
    room_bytes = _unused(shelf, others, overlay) if shared else shelf.slice.memory_bytes - one.memory_bytes
    room_bytes = (one.memory_bytes + room_bytes) // MIB * MIB - one.memory_bytes  # pods request whole MiB
    got_bytes = min(growth.most_bytes, room_bytes) // growth.step_bytes * growth.step_bytes
    return one._replace(memory_bytes=one.memory_bytes + max(0, got_bytes))


def _unused(shelf: Bin, others: _Others, overlay: Overlay) -> int:
    """Return the bytes that no other request can use."""
    if others.could(shelf):
        return 0
    lane, left_bytes = shelf.lane, shelf.free.memory_bytes
    soon_bytes = left_bytes + shelf.coming.memory_bytes
    unused_bytes = min(others.unused(lane, left_bytes), others.unused(lane, soon_bytes))
    return min(unused_bytes, left_bytes, overlay.index.unneeded(shelf.slice.id))


def _room(kind: RequestShape, lane: SliceClass) -> ResourceAmount | None:
    """Return the minimum that it takes there. None: it does not fit even if the slice is empty."""
    return kind.least.takes(lane) if kind.rank(lane.product) is not None else None
