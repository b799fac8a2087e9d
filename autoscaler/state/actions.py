"""The Actions of a Plan, each with a reason. The planner creates them, `fold` applies them, the loop executes them.

An Action is an intent. Folding it (`Acted`) changes the state of its replica by the table of
`autoscaler.state.lifecycle`, and raises if the table does not allow the change. So the `World` shows an ordered change
before the driver has made it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.state import StateRecord
from autoscaler.state.capacity import AcquireOrder, LeaseId, ReleaseOrder
from autoscaler.state.events import Transition
from autoscaler.state.mig import CutOrder
from autoscaler.state.world import Replica, SliceId, World


class StartReplica(StateRecord, frozen=True, tag_field="kind", tag="start"):
    """Place and start a replica. `replica` is PENDING; the driver uses its `intent` as idempotency key."""

    replica: Replica
    reason: str


class DrainReplica(StateRecord, frozen=True, tag_field="kind", tag="drain"):
    """Send a replica no new requests; stop it once all known gateways acknowledged or the grace period is over."""

    replica: ReplicaId
    reason: str
    victim_of: ModelName | None = None
    stranded: bool = False
    """Whether the replica's pod was not scheduled to its node, so that its Model avoids the node for a while."""
    crowded: bool = False
    """Whether a slice of the replica is overcommitted and the replica is the youngest on it."""


class ReviveReplica(StateRecord, frozen=True, tag_field="kind", tag="revive"):
    """Keep a draining replica: it is needed again and no stop was ordered. It returns to its previous state."""

    replica: ReplicaId
    reason: str


class StopReplica(StateRecord, frozen=True, tag_field="kind", tag="stop"):
    """Stop a replica: SIGTERM, kill after `grace_s`.
    Ordered only after all known gateways acknowledged the drain or the drain timed out, or for a replica without
    requests, such as a failed or pending one (table verb "drop").
    """

    replica: ReplicaId
    grace_s: float
    reason: str


class FailReplica(StateRecord, frozen=True, tag_field="kind", tag="fail"):
    """Fail a start that exceeded `start.secondsMax`: the replica is broken (table verb "broke") and then stopped."""

    replica: ReplicaId
    reason: str


class FailStart(StateRecord, frozen=True, tag_field="kind", tag="fail-start"):
    """Do not attempt a start that would certainly fail. Waiting requests fail; the next attempt follows a pause."""

    model: ModelName
    reason: str


class CutNode(StateRecord, frozen=True, tag_field="kind", tag="cut"):
    """Repartition the GPUs of an idle node. This takes minutes, in which nothing is placed on the node."""

    order: CutOrder
    reason: str


class AcquireLease(StateRecord, frozen=True, tag_field="kind", tag="acquire"):
    """Order capacity for replicas without a place.
    Repeated while the provider does not show the order; the name identifies it, so a repetition is the same order.
    """

    order: AcquireOrder
    reason: str


class ReleaseLease(StateRecord, frozen=True, tag_field="kind", tag="release"):
    """Release capacity on which no replica runs, or cancel an order before it arrives."""

    order: ReleaseOrder
    reason: str


Action = (
    StartReplica | DrainReplica | ReviveReplica | StopReplica | FailReplica | FailStart | CutNode
    | AcquireLease | ReleaseLease
)  # fmt: skip


class Acted(StateRecord, frozen=True):
    """An Action was decided and is being executed. This is an observation of our own intent."""

    action: Action


class Unmet(StateRecord, frozen=True):
    """A Model that needs a replica for which there is no place, and the reason as a sentence."""

    model: ModelName
    reason: str
    never: bool = False
    """Whether it can never fit, because no slice is large enough."""
    slices: tuple[SliceId, ...] = ()
    """Slices on which a place is being made, or that are being added."""
    ready_s: float | None = None
    """Expected seconds until a replica is ready on capacity ordered for it. Infinite: unknown; None: no order."""
    lease: LeaseId | None = None
    """The capacity order that is in progress for it."""


class Plan(StateRecord, frozen=True):
    """The ordered Actions of one tick, and the Models that could not be placed."""

    actions: tuple[Action, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    next_s: float | None = None
    """When the Plan next changes without an observation (an idle timeout or a back-off ends). None: never."""
    tries: tuple[ModelName, ...] = ()
    """Models that it starts or makes room for. Before execution, a driver checks whether they can start."""


class Decided(Protocol):
    """One step of the loop."""

    @property
    def before(self) -> World:
        """The `World` before the step."""

    @property
    def after(self) -> World:
        """The `World` after the step."""

    @property
    def plan(self) -> Plan:
        """The last plan of the step."""

    @property
    def actions(self) -> Sequence[Action]:
        """The Actions that were executed."""

    @property
    def transitions(self) -> Sequence[Transition]:
        """The state transitions of replicas."""
