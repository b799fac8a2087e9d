"""The words of packing: Wants in, Placements, victims and unmet Wants out; and the Shelf, one Slice with what is on it.

Owns the types that `autoscaler.packer` works on, and the arithmetic of one Shelf. Knows nothing of Models, Demand or
time beyond numbers: `autoscaler.shelves` fills them from the World, so what-if questions can fill them from elsewhere.
Memory is bytes, compute percent of one Device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.podspec import Toleration
from autoscaler.states import ReplicaState
from autoscaler.world import Isolation, NodeId, Slice, SliceId


class Force(IntEnum):
    """Whom a Want may evict; each grade includes those before it. Nobody is evicted before the end of its residency."""

    NONE = 0
    """Nobody: it takes what is free (a surge of a rollout)."""
    LOWER = 1
    """Those of lower priority (a Replica that no Call waits for)."""
    IDLE = 2
    """Also idle ones of its own priority (one more Replica of a Model that is served)."""
    BUSY = 3
    """Also busy ones of its own priority (Calls wait and no Replica of the Model takes them)."""


class Choice(NamedTuple):
    """By what a Want chooses among nodes: see there."""

    selector: tuple[tuple[str, str], ...]
    tolerations: tuple[Toleration, ...]
    avoids: tuple[NodeId, ...]


class Want(NamedTuple):
    """One Replica that is to be placed."""

    model: ModelName
    ordinal: int = 0
    """Tells the Wants of one Model apart."""
    devices: int = 1
    """Whole Devices when > 1; 0 needs none."""
    memory_bytes: int = 0
    """Of each Device; 0 is the whole Device."""
    compute_percent: int = 0
    isolation: Isolation = Isolation.NONE
    products: tuple[str, ...] = ()
    """Case-insensitive globs over the Device's product, in order of preference; empty takes any."""
    priority: int = 0
    unserved_since_s: float = 0.0
    """The longer unserved of two goes first, so that nobody starves."""
    force: Force = Force.NONE
    artifact: str = ""
    reason: str = ""
    selector: tuple[tuple[str, str], ...] = ()
    """Labels, sorted, that its node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that do not keep it away."""
    avoids: tuple[NodeId, ...] = ()
    """Nodes that did not take it lately, sorted."""

    @property
    def choice(self) -> Choice:
        """By what it chooses among nodes."""
        return Choice(self.selector, self.tolerations, self.avoids)


class Room(NamedTuple):
    """An amount of one Slice."""

    memory_bytes: int
    compute_percent: int

    def holds(self, need: Room) -> bool:
        """Whether `need` fits in."""
        return need.memory_bytes <= self.memory_bytes and need.compute_percent <= self.compute_percent

    def plus(self, more: Room) -> Room:
        """Both together."""
        return Room(self.memory_bytes + more.memory_bytes, self.compute_percent + more.compute_percent)

    def less(self, need: Room) -> Room:
        """What is left, never below nothing."""
        return Room(max(0, self.memory_bytes - need.memory_bytes), max(0, self.compute_percent - need.compute_percent))


class Incumbent(NamedTuple):
    """A Replica on a Shelf."""

    replica: ReplicaId
    model: ModelName
    state: ReplicaState
    room: Room
    """What it holds of the Slice: everything where it is there alone by right."""
    priority: int = 0
    busy: bool = False
    """Calls run on it or wait for its Model."""
    kept: bool = False
    """Its Model wants no fewer (`replicas.min`): only a higher priority may evict it."""
    evictable_s: float = 0.0
    """When its residency ends; infinite: never (somebody waits for its start)."""
    leaving: bool = False
    """It drains, stops or is scrubbed: its room is coming."""
    stuck: bool = False
    """It should have left long ago: its room is not counted on."""
    others: int = 0
    """On how many other Slices it is, too."""


@dataclass(slots=True, kw_only=True)
class Shelf:
    """One Slice as the packer sees it. `pack` works on copies: what it is given stays as it is."""

    slice: Slice
    whole: bool
    """It is all of its Device, so that a Replica alone on it has a Device of its own."""
    incumbents: tuple[Incumbent, ...]
    free: Room
    """Held by nobody and promised to nobody."""
    coming: Room
    """Held by those who leave, and promised to nobody."""
    locked: bool
    """A Replica is starting on its Device, so that no other may start there now."""
    closed: str = ""
    """Why nothing new is put here, in words; empty: it is open."""

    def copy(self) -> Shelf:
        """Another Shelf with the same things on it."""
        return Shelf(
            slice=self.slice,
            whole=self.whole,
            incumbents=self.incumbents,
            free=self.free,
            coming=self.coming,
            locked=self.locked,
            closed=self.closed,
        )

    def reserve(self, need: Room) -> None:
        """Promises `need` to somebody: first of what is free, then of what is coming."""
        rest = need.less(self.free)
        self.free = self.free.less(need)
        self.coming = self.coming.less(rest)

    def evict(self, replica: ReplicaId) -> None:
        """Its room is coming from now on."""
        after: list[Incumbent] = []
        for incumbent in self.incumbents:
            if incumbent.replica == replica and not incumbent.leaving:
                self.coming = self.coming.plus(incumbent.room)
                after.append(incumbent._replace(leaving=True))
            else:
                after.append(incumbent)
        self.incumbents = tuple(after)


class Offer(NamedTuple):
    """Capacity that could be added. There is no Provider yet, so there are no Offers and the packer reads none."""

    slices: tuple[Slice, ...]
    expected_s: float
    price: float


class Shape(NamedTuple):
    """What the histogram of demand counts: equal Wants."""

    devices: int
    memory_bytes: int
    compute_percent: int


UNKNOWN_START_S = 60.0
"""What a Model whose start was never measured is taken to need."""


class Outlook(NamedTuple):
    """What the packer may expect: who is wanted how often, what a restart costs, and what could be added."""

    histogram: Mapping[Shape, float] = {}
    """Shape -> share of the demand lately; they sum to 1. For policies that place by what will come: best fit does not.
    """
    start_s: Mapping[ModelName, float] = {}
    """Seconds that a start of the Model takes: the cost of evicting it."""
    offers: tuple[Offer, ...] = ()

    def restart_s(self, model: ModelName) -> float:
        """The cost of starting `model` again."""
        return self.start_s.get(model, UNKNOWN_START_S)


class Placement(NamedTuple):
    """Where a Want goes now. `memory_bytes` is claimed on each Slice."""

    want: Want
    slices: tuple[SliceId, ...]
    memory_bytes: int


class Victim(NamedTuple):
    """A Replica that makes room, and for whom."""

    replica: ReplicaId
    model: ModelName
    want: Want


class Missing(NamedTuple):
    """A Want that is not placed now, and why. `never`: no Slice is large enough, whoever leaves."""

    want: Want
    reason: str
    never: bool = False


class Packing(NamedTuple):
    """The packer's answer; every Want is in `placements` or in `unmet`."""

    placements: tuple[Placement, ...] = ()
    victims: tuple[Victim, ...] = ()
    unmet: tuple[Missing, ...] = ()
