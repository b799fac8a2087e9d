"""Types of the packer: placement requests as input; placements, victims and unplaced requests as output; and `Bin`, one
slice with its occupants.

Independent of the `World`: `autoscaler.placement.model.bin_builder` converts one to these types. Memory is in bytes,
compute in percent of one device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.spec.pod import Toleration
from autoscaler.state.capacity import LeaseId
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.resources import NO_GROWTH, NOTHING, Growth, HostAmount, RequestShape, ResourceAmount, SliceClass
from autoscaler.state.world import NodeId, Slice, SliceId

if TYPE_CHECKING:  # imports NumPy, which processes that only read documents do without
    from autoscaler.placement.model.tenant_isolation import TenantSet


class EvictionLevel(IntEnum):
    """Which replicas a request may evict. Each level includes those before it.
    No replica is evicted within its residency.
    """

    NONE = 0
    """None: it takes only what is free (a surge of a rollout)."""
    LOWER = 1
    """Replicas of lower priority (for a replica that no request waits for)."""
    IDLE = 2
    """Also idle replicas of its own priority (for one more replica of a model that is served)."""
    BUSY = 3
    """Also busy replicas of its own priority (requests wait and no replica of the model takes them)."""


class NodeConstraints(NamedTuple):
    """Constraints on the nodes of a request."""

    selector: tuple[tuple[str, str], ...] = ()
    """Labels that its node must have, sorted."""
    tolerations: tuple[Toleration, ...] = ()
    """Node taints that do not exclude it."""
    avoids: tuple[NodeId, ...] = ()
    """Nodes that its model avoids after a failed binding, sorted."""


class Urgency(NamedTuple):
    """The precedence of a request, and which replicas it may evict."""

    priority: int = 0
    unserved_since_s: float = 0.0
    """Of two requests of equal priority, the longer unserved one is placed first, so that none starves."""
    force: EvictionLevel = EvictionLevel.NONE
    begins_s: float = 0.0
    """The time from which it is needed."""


class Spread(NamedTuple):
    """Node labels by which a request is placed apart from, or near, its model's other replicas; empty: not wanted."""

    label: str = ""
    """Spread over values of this label: nodes of one value fail together, as do those without the label."""
    near: str = ""
    """Prefer nodes with the same value of this label; nodes without it are near no other."""
    nodes: tuple[NodeId, ...] = ()
    """Nodes of the other replicas, one entry per replica."""


class RequiredArtifacts(NamedTuple):
    """Artifacts that its node needs before a replica runs."""

    artifact: str = ""
    """Its weights; empty: nodes store none."""
    image: str = ""
    """Its engine image; empty: it needs none."""
    weights_bytes: int = 0
    """0: unknown, and assumed to be large."""


class PlacementRequest(NamedTuple):
    """One replica to be placed."""

    model: ModelName
    ordinal: int = 0
    """Distinguishes the requests of one model."""
    kind: RequestShape = RequestShape()
    """The properties that decide where it fits."""
    urgency: Urgency = Urgency()
    choice: NodeConstraints = NodeConstraints()
    supplies: RequiredArtifacts = RequiredArtifacts()
    """The artifacts that its node has to fetch if they are missing there."""
    trust: TenantSet = ()
    spread: Spread | None = None
    growth: Growth = NO_GROWTH
    reason: str = ""

    @property
    def least(self) -> PlacementRequest:
        """The same request at its minimum memory."""
        return self.granted(self.kind.memory_bytes - self.kind.spare_bytes)

    def granted(self, memory_bytes: int) -> PlacementRequest:
        """Return the same request with this much memory granted."""
        if not self.kind.spare_bytes:
            return self
        kind = self.kind._replace(memory_bytes=memory_bytes, spare_bytes=0)
        return self._replace(kind=kind, supplies=self.supplies._replace(weights_bytes=kind.total_bytes))


class Occupant(NamedTuple):
    """A replica on a slice."""

    replica: ReplicaId
    model: ModelName
    state: ReplicaState
    room: ResourceAmount
    """The amount that it holds of the slice: everything if the slice is exclusive."""
    priority: int = 0
    busy: bool = False
    """Requests run on it or wait for its model."""
    kept: bool = False
    """Its model is at its minimum (`replicas.min`), so only a request of higher priority may evict it."""
    evictable_s: float = 0.0
    """When its residency ends; infinite: requests wait for its start."""
    leaving: bool = False
    """It drains, stops or is scrubbed, so its room counts as coming."""
    stuck: bool = False
    """Its stop is overdue, so its room does not count as coming."""
    others: int = 0
    """Number of further slices that the replica holds."""
    trust: TenantSet = ()
    host_usage: HostAmount = NOTHING
    """CPU and memory that it holds on its node."""


@dataclass(slots=True, kw_only=True)
class Bin:
    """One slice as the packer sees it. `pack` works on copies and does not modify its input."""

    slice: Slice
    whole: bool
    """It is a whole device."""
    incumbents: tuple[Occupant, ...]
    free: ResourceAmount
    """Neither held nor promised."""
    coming: ResourceAmount
    """Held by leaving replicas, and not promised."""
    locked: bool
    """A replica is starting on its device, so no other may start there now."""
    closed: str = ""
    """Why nothing new is placed here; empty: it is open."""
    price: float = 0.0
    """Price of its device per hour; 0: no marginal cost, or unknown."""
    trusts: frozenset[TenantSet] = frozenset()
    """Tenant sets of its occupants that are limited to some tenants, if conflicting tenants may not share its device
    (`autoscaler.placement.model.tenant_isolation`).
    """

    @property
    def lane(self) -> SliceClass:
        """Its slice class, common to equivalent slices."""
        return slice_class_of(self.slice, whole=self.whole, price=self.price)

    def copy(self) -> Bin:
        """Return a copy. Changes of its fields do not affect this one."""
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
        """Promise `need`: first from what is free, then from what is coming."""
        rest = need.less(self.free)
        self.free = self.free.less(need)
        self.coming = self.coming.less(rest)

    def evict(self, replica: ReplicaId) -> None:
        """Mark a replica as leaving, so that its room counts as coming."""
        after: list[Occupant] = []
        for incumbent in self.incumbents:
            if incumbent.replica == replica and not incumbent.leaving:
                self.coming = self.coming.plus(incumbent.room)
                after.append(incumbent._replace(leaving=True))
            else:
                after.append(incumbent)
        self.incumbents = tuple(after)

    def keep(self, victim: Occupant) -> None:
        """Undo the eviction of a victim, so that its room is neither coming nor free."""
        rest = victim.room.less(self.coming)
        self.coming = self.coming.less(victim.room)
        self.free = self.free.less(rest)
        self.incumbents = tuple(victim if one.replica == victim.replica else one for one in self.incumbents)


def slice_class_of(one: Slice, *, whole: bool, price: float = 0.0) -> SliceClass:
    """Return the class of a slice: equivalent slices have the same class. `whole`: the slice is its whole device."""
    return SliceClass(one.memory_bytes, one.product, one.compute_percent, one.isolation, one.shared, whole, price)


UNKNOWN_START_S = 60.0
"""Assumed start time of a model whose start was never measured."""


class RestartCosts(NamedTuple):
    """The cost of restarting each model."""

    start_s: Mapping[ModelName, float] = {}
    """Start time of each model in seconds: the cost of evicting it."""

    def restart_s(self, model: ModelName) -> float:
        """Return the cost of starting `model` again, in seconds."""
        return self.start_s.get(model, UNKNOWN_START_S)


class Placement(NamedTuple):
    """Where a request is placed now. `memory_bytes` is claimed on each slice."""

    want: PlacementRequest
    slices: tuple[SliceId, ...]
    memory_bytes: int
    node: NodeId | None = None
    """Its node. None: the host resources of nodes are unknown, or a request without devices fits on no known node; it
    may still be placed on another one.
    """


class Victim(NamedTuple):
    """A replica to evict, and the request that needs its room."""

    replica: ReplicaId
    model: ModelName
    want: PlacementRequest


class Unplaced(NamedTuple):
    """A request that is not placed now, and why. `never`: no slice is large enough, even empty."""

    want: PlacementRequest
    reason: str
    never: bool = False
    promised: bool = False
    """Room for it is coming, or victims are being evicted."""
    slices: tuple[SliceId, ...] = ()
    """The slices with the promised room, if known."""
    ready_s: float | None = None
    """Seconds until a replica is expected on capacity ordered for it; infinite: unknown; None: none was ordered."""
    lease: LeaseId | None = None
    """The capacity order in flight that it will be placed on."""


class PackResult(NamedTuple):
    """The packer's result; every request is in `placements` or in `unmet`."""

    placements: tuple[Placement, ...] = ()
    victims: tuple[Victim, ...] = ()
    unmet: tuple[Unplaced, ...] = ()
