"""Resources of nodes and slices: CPU and host memory of nodes, amounts and classes of slices, shapes of requests. Pure.

Owns the records and their arithmetic, and the matching of a request shape with a slice class: the amount that it takes,
and its preference for the product. Equal slices share one SliceClass, and equal requests one RequestShape. Memory is in
bytes, compute in percent of one device, CPU in thousandths of a core. Does not depend on the `World`.
"""

from __future__ import annotations

from enum import IntEnum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

CPU_MAX: Final = 1 << 40
BYTES_MAX: Final = 1 << 50
"""More than any node or slice has. Also used for a node whose resources are unknown."""
CORE: Final = 1000


class HostAmount(NamedTuple):
    """CPU and host memory of a node."""

    cpu_milli: int = 0
    host_bytes: int = 0

    def holds(self, need: HostAmount) -> bool:
        """Return whether `need` fits. Resources that are not requested are ignored: their amount may be negative."""
        return all(not asked or asked <= has for has, asked in zip(self, need, strict=True))

    def lack(self, need: HostAmount) -> HostAmount:
        """Return the part of `need` that does not fit."""
        cpu_milli, host_bytes = (max(0, asked - has) if asked else 0 for has, asked in zip(self, need, strict=True))
        return HostAmount(cpu_milli, host_bytes)

    def plus(self, more: HostAmount) -> HostAmount:
        """Return the sum."""
        return HostAmount(self.cpu_milli + more.cpu_milli, self.host_bytes + more.host_bytes)

    def less(self, need: HostAmount) -> HostAmount:
        """Return the difference. It is negative where more is taken than exists."""
        return HostAmount(self.cpu_milli - need.cpu_milli, self.host_bytes - need.host_bytes)

    def most(self, other: HostAmount) -> HostAmount:
        """Return the maximum of each resource."""
        return HostAmount(max(self.cpu_milli, other.cpu_milli), max(self.host_bytes, other.host_bytes))


NOTHING: Final = HostAmount()


class HostResources(NamedTuple):
    """The CPU and memory of a node, and their remainder.

    In the `World` only pods of others reduce the remainder; in the search index all pods do. `coming` is held by
    replicas that are stopping, and not promised to another replica yet.
    """

    cpu_milli: int = CPU_MAX
    host_bytes: int = BYTES_MAX
    cpu_left_milli: int = CPU_MAX
    left_bytes: int = BYTES_MAX
    coming: HostAmount = NOTHING

    @property
    def all(self) -> HostAmount:
        """All resources of the node."""
        return HostAmount(self.cpu_milli, self.host_bytes)

    @property
    def left(self) -> HostAmount:
        """Resources that are neither held nor promised."""
        return HostAmount(self.cpu_left_milli, self.left_bytes)

    @property
    def soon(self) -> HostAmount:
        """Resources that are left, including those of stopping replicas."""
        return self.left.plus(self.coming)

    @property
    def cores_milli(self) -> int:
        """The CPU in whole cores, so that small system reservations make no difference between nodes."""
        return min(-(-self.cpu_milli // CORE) * CORE, CPU_MAX)

    def without(self, taken: HostAmount) -> HostResources:
        """Return the node after `taken` was allocated."""
        return self.having(self.left.less(taken))

    def promised(self, need: HostAmount) -> HostResources:
        """Return the node after `need` was promised: first from the remainder, then from what is coming."""
        now = need.less(need.less(self.left.most(NOTHING)).most(NOTHING))
        return self.having(self.left.less(now))._replace(coming=self.coming.less(need.less(now)))

    def kept(self, stays: HostAmount) -> HostResources:
        """Return the node if a stopping replica stays after all. `stays`: the resources of the replica. A part of
        them that was already promised is taken from `left` instead.
        """
        rest = stays.less(self.coming).most(NOTHING)
        return self.having(self.left.less(rest))._replace(coming=self.coming.less(stays.less(rest)))

    def having(self, left: HostAmount) -> HostResources:
        """Return the node with `left` as its free amount."""
        return self._replace(cpu_left_milli=left.cpu_milli, left_bytes=left.host_bytes)


EITHER = "|"
"""The separator of globs of the same rank: `*h100*|*h200*`."""


class Isolation(IntEnum):
    """How well a slice is isolated from its neighbours, from worst to best."""

    NONE = 0
    MEMORY = 1
    HARDWARE = 2


class Link(IntEnum):
    """The link between devices of one node, from worst to best."""

    NODE = 0
    """The same node; no further link."""
    PCIE_ROOT = 1
    NVLINK = 2


class ResourceAmount(NamedTuple):
    """An amount of one slice."""

    memory_bytes: int
    compute_percent: int
    places: int = 0
    """A number of replicas, for slices that limit it; otherwise 0."""

    def holds(self, need: ResourceAmount) -> bool:
        """Return whether `need` fits."""
        return (
            need.memory_bytes <= self.memory_bytes
            and need.compute_percent <= self.compute_percent
            and need.places <= self.places
        )

    def plus(self, more: ResourceAmount) -> ResourceAmount:
        """Return the sum."""
        return ResourceAmount(
            self.memory_bytes + more.memory_bytes,
            self.compute_percent + more.compute_percent,
            self.places + more.places,
        )

    def less(self, need: ResourceAmount) -> ResourceAmount:
        """Return the difference, at least zero."""
        return ResourceAmount(
            max(0, self.memory_bytes - need.memory_bytes),
            max(0, self.compute_percent - need.compute_percent),
            max(0, self.places - need.places),
        )


NO_ROOM: Final = ResourceAmount(0, 0)


class SliceClass(NamedTuple):
    """The common properties of equal slices."""

    memory_bytes: int
    product: str = ""
    compute_percent: int = 100
    isolation: Isolation = Isolation.NONE
    shared: bool = True
    """Whether several replicas can each use a part; otherwise one replica uses all of it."""
    whole: bool = True
    """Whether the slice is the whole device."""
    price: float = 0.0
    """The price of the device per hour. 0: no marginal cost, or unknown."""

    @property
    def room(self) -> ResourceAmount:
        """The whole amount of the slice."""
        return ResourceAmount(self.memory_bytes, self.compute_percent)


class RequestShape(NamedTuple):
    """The properties of a request that decide where it fits."""

    devices: int = 1
    """The number of devices. Above 1: whole devices; 0: none."""
    memory_bytes: int = 0
    """The memory per device. 0: the whole device."""
    compute_percent: int = 0
    isolation: Isolation = Isolation.NONE
    products: tuple[str, ...] = ()
    """Globs over the product, see `rank`. Empty: any product."""
    cpu_milli: int = 0
    host_bytes: int = 0
    """CPU and memory of its node."""
    spare_bytes: int = 0
    """The part of `memory_bytes` that the request can do without if it gets only a part of one device."""
    link: Link = Link.NODE
    """The minimum link between several devices."""

    @property
    def host_request(self) -> HostAmount:
        """The CPU and memory of the node that it requests, as one amount."""
        return HostAmount(self.cpu_milli, self.host_bytes)

    @property
    def total_bytes(self) -> int:
        """The memory of all its devices together. It is also used as the estimated size of its weights."""
        return self.memory_bytes * max(1, self.devices)

    @property
    def least(self) -> RequestShape:
        """The shape with the minimum memory."""
        return self._replace(memory_bytes=self.memory_bytes - self.spare_bytes, spare_bytes=0)

    def takes(self, lane: SliceClass) -> ResourceAmount | None:
        """Return the amount that the request takes of a slice; None: it does not fit even if the slice is empty."""
        room = ResourceAmount(self.memory_bytes, self.compute_percent)
        if not lane.room.holds(room):
            return None
        if self.memory_bytes == 0 or self.devices > 1 or self.isolation > lane.isolation:
            return lane.room if lane.whole else None
        return room if lane.shared else lane.room

    def rank(self, product: str) -> int | None:
        """Return the position of the first matching entry, 0 if there are no entries, None if nothing matches.
        An entry is one glob, or several separated by EITHER. Matching ignores case.
        """
        if not self.products:
            return 0
        low = product.lower()
        found = (i for i, globs in enumerate(self.products) if low and _matches(globs.lower(), low))
        return next(found, None)


class RequestFrequency(NamedTuple):
    """How often a request shape occurs, relative to others."""

    kind: RequestShape
    weight: int


def _matches(globs: str, product: str) -> bool:
    return any(fnmatchcase(product, glob) for glob in globs.split(EITHER))


class Growth(NamedTuple):
    """The additional memory that a request can use beyond its size, in steps."""

    most_bytes: int = 0
    step_bytes: int = 1


NO_GROWTH: Final = Growth()
