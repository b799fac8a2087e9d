"""What of a Slice and of a Want decides whether one holds the other, however many there are of either.

Owns the two records that everything equal shares (Lane, Kind), and the two questions about them: how much a Kind takes
of a Lane, and how much it likes the Lane's product. Memory is bytes, compute percent of one Device, CPU thousandths of
a core. It knows no World and no node, and nothing of what is free.
"""

from __future__ import annotations

from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

EITHER = "|"
"""Between globs of one rank: `*h100*|*h200*`."""


class Isolation(IntEnum):
    """How well a Slice is kept apart from its neighbours, from worst to best."""

    NONE = 0
    MEMORY = 1
    HARDWARE = 2


class Link(IntEnum):
    """What joins Devices of one node, from worst to best."""

    NODE = 0
    """The node: nothing else is asked for."""
    PCIE_ROOT = 1
    NVLINK = 2


class Room(NamedTuple):
    """An amount of one Slice."""

    memory_bytes: int
    compute_percent: int
    places: int = 0
    """Of a Slice that takes only so many; of others nobody has any, and nobody needs one."""

    def holds(self, need: Room) -> bool:
        """Whether `need` fits in."""
        return (
            need.memory_bytes <= self.memory_bytes
            and need.compute_percent <= self.compute_percent
            and need.places <= self.places
        )

    def plus(self, more: Room) -> Room:
        """Both together."""
        return Room(
            self.memory_bytes + more.memory_bytes,
            self.compute_percent + more.compute_percent,
            self.places + more.places,
        )

    def less(self, need: Room) -> Room:
        """What is left, never below nothing."""
        return Room(
            max(0, self.memory_bytes - need.memory_bytes),
            max(0, self.compute_percent - need.compute_percent),
            max(0, self.places - need.places),
        )


NO_ROOM: Final = Room(0, 0)


class Lane(NamedTuple):
    """What Slices that are alike have in common."""

    memory_bytes: int
    product: str = ""
    compute_percent: int = 100
    isolation: Isolation = Isolation.NONE
    shared: bool = True
    """Many may have a part of it; else one has all of it."""
    whole: bool = True
    """It is all of its Device."""
    price: float = 0.0
    """Of its Device, per hour; 0: nothing at the margin, or not known."""

    @property
    def room(self) -> Room:
        """All of it."""
        return Room(self.memory_bytes, self.compute_percent)


class Kind(NamedTuple):
    """What of a request decides where it fits."""

    devices: int = 1
    """Whole ones when > 1; 0 needs none."""
    memory_bytes: int = 0
    """Of each Device; 0 is the whole Device."""
    compute_percent: int = 0
    isolation: Isolation = Isolation.NONE
    products: tuple[str, ...] = ()
    """Globs over the product, see `rank`; empty takes any."""
    cpu_milli: int = 0
    host_bytes: int = 0
    spare_bytes: int = 0
    """Of `memory_bytes`: with so much less it makes do, of a part of one Device."""
    link: Link = Link.NODE
    """What joins all of several, at least."""

    @property
    def least(self) -> Kind:
        """With which it makes do."""
        return self._replace(memory_bytes=self.memory_bytes - self.spare_bytes, spare_bytes=0)

    def takes(self, lane: Lane) -> Room | None:
        """How much of it; None: it can never be there, however empty the Lane is."""
        room = Room(self.memory_bytes, self.compute_percent)
        if not lane.room.holds(room):
            return None
        if self.memory_bytes == 0 or self.devices > 1 or self.isolation > lane.isolation:
            return lane.room if lane.whole else None
        return room if lane.shared else lane.room

    def rank(self, product: str) -> int | None:
        """Position of the first entry that matches, 0 where none is named; None: no match. An entry is one glob, or
        several between EITHER; letters count the same large and small.
        """
        if not self.products:
            return 0
        low = product.lower()
        found = (i for i, globs in enumerate(self.products) if low and _matches(globs.lower(), low))
        return next(found, None)


class Wanted(NamedTuple):
    """How often a Kind is asked for, beside the others."""

    kind: Kind
    weight: int


def _matches(globs: str, product: str) -> bool:
    return any(fnmatchcase(product, glob) for glob in globs.split(EITHER))
