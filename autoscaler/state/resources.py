"""What nodes have beside their Devices: CPU and memory, and what of that is left.

Owns the two records and their arithmetic. Amounts are thousandths of a core, and bytes. Knows no World.

What of a Slice and of a PlacementRequest decides whether one holds the other, however many there are of either.

Owns the two records that everything equal shares (Lane, Kind), and the two questions about them: how much a Kind takes
of a Lane, and how much it likes the Lane's product. Memory is bytes, compute percent of one Device, CPU thousandths of
a core. It knows no World and no node, and nothing of what is free.
"""

from __future__ import annotations

from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

CPU_MAX: Final = 1 << 40
BYTES_MAX: Final = 1 << 50
"""More than any node has, and more bytes than any Slice: so much is also what a node has about which nothing is known.
"""
CORE: Final = 1000


class Beside(NamedTuple):
    """Amounts of a node's own."""

    cpu_milli: int = 0
    host_bytes: int = 0

    def holds(self, need: Beside) -> bool:
        """Whether `need` fits in. What is not asked for need not be there: a node may have less than nothing left."""
        return all(not asked or asked <= has for has, asked in zip(self, need, strict=True))

    def lack(self, need: Beside) -> Beside:
        """What of `need` does not fit in."""
        cpu_milli, host_bytes = (max(0, asked - has) if asked else 0 for has, asked in zip(self, need, strict=True))
        return Beside(cpu_milli, host_bytes)

    def plus(self, more: Beside) -> Beside:
        """Both together."""
        return Beside(self.cpu_milli + more.cpu_milli, self.host_bytes + more.host_bytes)

    def less(self, need: Beside) -> Beside:
        """What is left; below nothing where more is taken than there is."""
        return Beside(self.cpu_milli - need.cpu_milli, self.host_bytes - need.host_bytes)

    def most(self, other: Beside) -> Beside:
        """The larger of each."""
        return Beside(max(self.cpu_milli, other.cpu_milli), max(self.host_bytes, other.host_bytes))


NOTHING: Final = Beside()


class HostResources(NamedTuple):
    """What a node has beside its Devices, and what of that is left: in the World by pods of others, in a Yard by all.
    `coming` is held by those who leave, and promised to nobody.
    """

    cpu_milli: int = CPU_MAX
    host_bytes: int = BYTES_MAX
    cpu_left_milli: int = CPU_MAX
    left_bytes: int = BYTES_MAX
    coming: Beside = NOTHING

    @property
    def all(self) -> Beside:
        """Of an empty one."""
        return Beside(self.cpu_milli, self.host_bytes)

    @property
    def left(self) -> Beside:
        """Held by nobody, and promised to nobody."""
        return Beside(self.cpu_left_milli, self.left_bytes)

    @property
    def soon(self) -> Beside:
        """With what those have who leave."""
        return self.left.plus(self.coming)

    @property
    def cores_milli(self) -> int:
        """Its CPU in whole cores: what a system keeps for itself makes no two nodes differ."""
        return min(-(-self.cpu_milli // CORE) * CORE, CPU_MAX)

    def without(self, taken: Beside) -> HostResources:
        """`taken` is held by somebody."""
        return self.having(self.left.less(taken))

    def promised(self, need: Beside) -> HostResources:
        """To somebody: first of what is left, then of what is coming."""
        now = need.less(need.less(self.left.most(NOTHING)).most(NOTHING))
        return self.having(self.left.less(now))._replace(coming=self.coming.less(need.less(now)))

    def kept(self, stays: Beside) -> HostResources:
        """By who was to leave and stays: what is promised by now is of what else is coming or left."""
        rest = stays.less(self.coming).most(NOTHING)
        return self.having(self.left.less(rest))._replace(coming=self.coming.less(stays.less(rest)))

    def having(self, left: Beside) -> HostResources:
        """With so much left."""
        return self._replace(cpu_left_milli=left.cpu_milli, left_bytes=left.host_bytes)


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


class ResourceAmount(NamedTuple):
    """An amount of one Slice."""

    memory_bytes: int
    compute_percent: int
    places: int = 0
    """Of a Slice that takes only so many; of others nobody has any, and nobody needs one."""

    def holds(self, need: ResourceAmount) -> bool:
        """Whether `need` fits in."""
        return (
            need.memory_bytes <= self.memory_bytes
            and need.compute_percent <= self.compute_percent
            and need.places <= self.places
        )

    def plus(self, more: ResourceAmount) -> ResourceAmount:
        """Both together."""
        return ResourceAmount(
            self.memory_bytes + more.memory_bytes,
            self.compute_percent + more.compute_percent,
            self.places + more.places,
        )

    def less(self, need: ResourceAmount) -> ResourceAmount:
        """What is left, never below nothing."""
        return ResourceAmount(
            max(0, self.memory_bytes - need.memory_bytes),
            max(0, self.compute_percent - need.compute_percent),
            max(0, self.places - need.places),
        )


NO_ROOM: Final = ResourceAmount(0, 0)


class SliceClass(NamedTuple):
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
    def room(self) -> ResourceAmount:
        """All of it."""
        return ResourceAmount(self.memory_bytes, self.compute_percent)


class RequestShape(NamedTuple):
    """What of a request decides where it fits."""

    devices: int = 1
    """Whole devices if > 1; 0: it needs none."""
    memory_bytes: int = 0
    """Per device; 0: the whole device."""
    compute_percent: int = 0
    isolation: Isolation = Isolation.NONE
    products: tuple[str, ...] = ()
    """Case-insensitive globs over the device's product, in order of preference, see `rank`; empty: any."""
    cpu_milli: int = 0
    host_bytes: int = 0
    """CPU and memory of its node."""
    spare_bytes: int = 0
    """The part of `memory_bytes` that it can do without."""
    link: Link = Link.NODE
    """The least link that must join its devices, if it has several."""

    @property
    def beside(self) -> Beside:
        """CPU and memory of its node, as one amount."""
        return Beside(self.cpu_milli, self.host_bytes)

    @property
    def total_bytes(self) -> int:
        """Memory of all its devices together; also the estimated size of its weights."""
        return self.memory_bytes * max(1, self.devices)

    @property
    def least(self) -> RequestShape:
        """With which it makes do."""
        return self._replace(memory_bytes=self.memory_bytes - self.spare_bytes, spare_bytes=0)

    def takes(self, lane: SliceClass) -> ResourceAmount | None:
        """How much of it; None: it can never be there, however empty the Lane is."""
        room = ResourceAmount(self.memory_bytes, self.compute_percent)
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


class RequestFrequency(NamedTuple):
    """How often a Kind is asked for, beside the others."""

    kind: RequestShape
    weight: int


def _matches(globs: str, product: str) -> bool:
    return any(fnmatchcase(product, glob) for glob in globs.split(EITHER))


class Growth(NamedTuple):
    """How much more memory than it asks for a PlacementRequest makes use of, in steps."""

    most_bytes: int = 0
    step_bytes: int = 1


NO_GROWTH: Final = Growth()
