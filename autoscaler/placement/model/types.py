"""The words of packing: Wants in, Placements, victims and unmet PlacementRequests out; and the Shelf, one Slice with
what is on it.

Owns the types that `autoscaler.placement.packer` works on, and the arithmetic of one Shelf. Knows nothing of Models,
Demand or time beyond numbers: `autoscaler.placement.model.bins` fills them from the World, so what-if questions can
fill them from elsewhere. Memory is bytes, compute percent of one Device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.spec.pod import Toleration
from autoscaler.state.capacity_orders import LeaseId
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.resources import (
    NO_GROWTH,
    NOTHING,
    Beside,
    Growth,
    Isolation,
    Link,
    RequestShape,
    ResourceAmount,
    SliceClass,
)
from autoscaler.state.world import NodeId, Slice, SliceId

if TYPE_CHECKING:  # imports NumPy, which processes that only read documents do without
    from autoscaler.placement.model.tenant_isolation import TenantSet


class EvictionLevel(IntEnum):
    """Whom a PlacementRequest may evict; each grade includes those before it. Nobody is evicted before the end of its
    residency.
    """

    NONE = 0
    """Nobody: it takes what is free (a surge of a rollout)."""
    LOWER = 1
    """Those of lower priority (a Replica that no Call waits for)."""
    IDLE = 2
    """Also idle ones of its own priority (one more Replica of a Model that is served)."""
    BUSY = 3
    """Also busy ones of its own priority (Calls wait and no Replica of the Model takes them)."""


class NodeConstraints(NamedTuple):
    """By what a PlacementRequest chooses among nodes: see there."""

    selector: tuple[tuple[str, str], ...]
    tolerations: tuple[Toleration, ...]
    avoids: tuple[NodeId, ...]


class Spread(NamedTuple):
    """By what a PlacementRequest would be apart from the other Replicas of its Model, or near them: labels of nodes, or
    empty.
    """

    label: str = ""
    """To be apart: nodes with one value of it fail together; so do those without it."""
    near: str = ""
    """To be near: nodes with one value of it are; those without it are near nobody."""
    nodes: tuple[NodeId, ...] = ()
    """Where the others are, each as often as there are some."""


class RequiredArtifacts(NamedTuple):
    """What its node is to have before a Replica runs, or has to bring."""

    artifact: str = ""
    """Its weights; empty: none that nodes keep."""
    image: str = ""
    """Its engine's; empty: it needs none."""
    weights_bytes: int = 0
    """0: not known, and taken for much."""


class PlacementRequest(NamedTuple):
    """One Replica that is to be placed."""

    model: ModelName
    ordinal: int = 0
    """Tells the PlacementRequests of one Model apart."""
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
    force: EvictionLevel = EvictionLevel.NONE
    artifact: str = ""
    image: str = ""
    reason: str = ""
    selector: tuple[tuple[str, str], ...] = ()
    """Labels, sorted, that its node must have."""
    tolerations: tuple[Toleration, ...] = ()
    """Taints of nodes that do not keep it away."""
    avoids: tuple[NodeId, ...] = ()
    """Nodes that did not take it lately, sorted."""
    cpu_milli: int = 0
    host_bytes: int = 0
    """CPU and memory of its node, beside Devices."""
    trust: TenantSet = ()
    spare_bytes: int = 0
    """Of `memory_bytes`: with so much less it makes do."""
    spread: Spread | None = None
    link: Link = Link.NODE
    """What joins all of several Devices, at least."""
    growth: Growth = NO_GROWTH
    begins_s: float = 0.0
    """It is not needed before."""

    @property
    def beside(self) -> Beside:
        """Both."""
        return Beside(self.cpu_milli, self.host_bytes)

    @property
    def kind(self) -> RequestShape:
        """What decides where it fits."""
        return RequestShape(
            self.devices, self.memory_bytes, self.compute_percent, self.isolation, self.products, self.cpu_milli,
            self.host_bytes, self.spare_bytes, self.link,
        )  # fmt: skip

    @property
    def least(self) -> PlacementRequest:
        """With which it makes do."""
        return self.granted(self.memory_bytes - self.spare_bytes)

    def granted(self, memory_bytes: int) -> PlacementRequest:
        """The same, of which so much was granted."""
        return self._replace(memory_bytes=memory_bytes, spare_bytes=0) if self.spare_bytes else self

    @property
    def supplies(self) -> RequiredArtifacts:
        """What its node has to bring where it is not there yet."""
        return RequiredArtifacts(self.artifact, self.image, self.memory_bytes * max(1, self.devices))

    @property
    def choice(self) -> NodeConstraints:
        """By what it chooses among nodes."""
        return NodeConstraints(self.selector, self.tolerations, self.avoids)


class Occupant(NamedTuple):
    """A Replica on a Shelf."""

    replica: ReplicaId
    model: ModelName
    state: ReplicaState
    room: ResourceAmount
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
    trust: TenantSet = ()
    beside: Beside = NOTHING
    """What it has of its node."""


@dataclass(slots=True, kw_only=True)
class Bin:
    """One Slice as the packer sees it. `pack` works on copies: what it is given stays as it is."""

    slice: Slice
    whole: bool
    """It is all of its Device, so that a Replica alone on it has a Device of its own."""
    incumbents: tuple[Occupant, ...]
    free: ResourceAmount
    """Held by nobody and promised to nobody."""
    coming: ResourceAmount
    """Held by those who leave, and promised to nobody."""
    locked: bool
    """A Replica is starting on its Device, so that no other may start there now."""
    closed: str = ""
    """Why nothing new is put here, in words; empty: it is open."""
    price: float = 0.0
    """Of its Device, per hour; 0: nothing at the margin, or not known."""
    trusts: frozenset[TenantSet] = frozenset()
    """Of those on it that are not for everybody, where strangers may not be on one Device
    (`autoscaler.placement.model.tenant_isolation`).
    """

    @property
    def lane(self) -> SliceClass:
        """What it has in common with those that are alike."""
        return slice_class_of(self.slice, whole=self.whole, price=self.price)

    def copy(self) -> Bin:
        """Another Shelf with the same things on it."""
        return Bin(
            slice=self.slice,
            whole=self.whole,
            incumbents=self.incumbents,
            free=self.free,
            coming=self.coming,
            locked=self.locked,
            closed=self.closed,
            price=self.price,
            trusts=self.trusts,
        )

    def reserve(self, need: ResourceAmount) -> None:
        """Promises `need` to somebody: first of what is free, then of what is coming."""
        rest = need.less(self.free)
        self.free = self.free.less(need)
        self.coming = self.coming.less(rest)

    def evict(self, replica: ReplicaId) -> None:
        """Its room is coming from now on."""
        after: list[Occupant] = []
        for incumbent in self.incumbents:
            if incumbent.replica == replica and not incumbent.leaving:
                self.coming = self.coming.plus(incumbent.room)
                after.append(incumbent._replace(leaving=True))
            else:
                after.append(incumbent)
        self.incumbents = tuple(after)

    def keep(self, victim: Occupant) -> None:
        """It stays after all: its room is neither coming nor free."""
        rest = victim.room.less(self.coming)
        self.coming = self.coming.less(victim.room)
        self.free = self.free.less(rest)
        self.incumbents = tuple(victim if one.replica == victim.replica else one for one in self.incumbents)


def slice_class_of(one: Slice, *, whole: bool, price: float = 0.0) -> SliceClass:
    """What a Slice has in common with those that are alike. `whole`: it is all of its Device."""
    return SliceClass(one.memory_bytes, one.product, one.compute_percent, one.isolation, one.shared, whole, price)


UNKNOWN_START_S = 60.0
"""What a Model whose start was never measured is taken to need."""


class RestartCosts(NamedTuple):
    """What the packer may expect: what a restart costs."""

    start_s: Mapping[ModelName, float] = {}
    """Seconds that a start of the Model takes: the cost of evicting it."""

    def restart_s(self, model: ModelName) -> float:
        """The cost of starting `model` again."""
        return self.start_s.get(model, UNKNOWN_START_S)


class Placement(NamedTuple):
    """Where a PlacementRequest goes now. `memory_bytes` is claimed on each Slice."""

    want: PlacementRequest
    slices: tuple[SliceId, ...]
    memory_bytes: int
    node: NodeId | None = None
    """Where it is known what nodes have beside Devices; else None, and also for who needs no Device and fits on none of
    these: it may still be put on another.
    """


class Victim(NamedTuple):
    """A Replica that makes room, and for whom."""

    replica: ReplicaId
    model: ModelName
    want: PlacementRequest


class Unplaced(NamedTuple):
    """A PlacementRequest that is not placed now, and why. `never`: no Slice is large enough, whoever leaves."""

    want: PlacementRequest
    reason: str
    never: bool = False
    promised: bool = False
    """Room for it is coming, or is made."""
    slices: tuple[SliceId, ...] = ()
    """Where, if it is on these."""
    ready_s: float | None = None
    """In so many seconds a Replica is expected on what was ordered for it; infinite: nobody can say; None: nothing."""
    lease: LeaseId | None = None
    """It is to be on this, which is on its way."""


class PackResult(NamedTuple):
    """The packer's answer; every PlacementRequest is in `placements` or in `unmet`."""

    placements: tuple[Placement, ...] = ()
    victims: tuple[Victim, ...] = ()
    unmet: tuple[Unplaced, ...] = ()
