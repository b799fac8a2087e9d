"""What a Plan consists of: Actions with reasons. Owns the words; `plan` makes, `fold` applies, `loop` performs them.

An Action is an intent. Folding it (`Acted`) moves its Replica along the table of `autoscaler.state.lifecycle`, which
raises when the table does not allow it; so the World always shows what was ordered, before the driver has done it.
"""

from __future__ import annotations

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.state.capacity_orders import AcquireOrder, LeaseId, ReleaseOrder
from autoscaler.state.mig import CutOrder
from autoscaler.state.world import Fact, Replica, SliceId


class StartReplica(Fact, frozen=True, tag_field="kind", tag="start"):
    """Place and start it. `replica` is PENDING; the driver is idempotent by its `intent`."""

    replica: Replica
    reason: str


class DrainReplica(Fact, frozen=True, tag_field="kind", tag="drain"):
    """No new Calls; stop it when every known gateway has acknowledged, or its grace is over."""

    replica: ReplicaId
    reason: str
    victim_of: ModelName | None = None
    stranded: bool = False
    """It was kept off its node, which its Model shuns for a while."""
    crowded: bool = False
    """More is on a Slice of its than that has, and it is the youngest there."""


class ReviveReplica(Fact, frozen=True, tag_field="kind", tag="revive"):
    """It is wanted again and its stop was not issued: back to the state it came from."""

    replica: ReplicaId
    reason: str


class StopReplica(Fact, frozen=True, tag_field="kind", tag="stop"):
    """The stop order: SIGTERM, `grace_s`, then kill. From draining (acknowledged) or from failed and pending (drop)."""

    replica: ReplicaId
    grace_s: float
    reason: str


class FailReplica(Fact, frozen=True, tag_field="kind", tag="fail"):
    """Its start took longer than `start.secondsMax`: it counts as broken (table verb "broke") and is then stopped."""

    replica: ReplicaId
    reason: str


class FailStart(Fact, frozen=True, tag_field="kind", tag="fail-start"):
    """A start would surely fail, so none is tried: whoever waits is told, and the next try is after a pause."""

    model: ModelName
    reason: str


class CutNode(Fact, frozen=True, tag_field="kind", tag="cut"):
    """The GPUs of an idle node are cut anew. It takes minutes, in which nothing is placed there."""

    order: CutOrder
    reason: str


class AcquireLease(Fact, frozen=True, tag_field="kind", tag="acquire"):
    """Capacity is ordered for whom there is no room. Said again where nobody has seen it: it is the same Lease."""

    order: AcquireOrder
    reason: str


class ReleaseLease(Fact, frozen=True, tag_field="kind", tag="release"):
    """Capacity is given back, on which no Replica is; or taken back before it comes."""

    order: ReleaseOrder
    reason: str


Action = (
    StartReplica | DrainReplica | ReviveReplica | StopReplica | FailReplica | FailStart | CutNode
    | AcquireLease | ReleaseLease
)  # fmt: skip


class Acted(Fact, frozen=True):
    """An Action was decided and is being performed: an observation of our own intent."""

    action: Action


class Unmet(Fact, frozen=True):
    """A Model that is wanted and not placed, and why, in a sentence."""

    model: ModelName
    reason: str
    never: bool = False
    """It can never fit: no Slice is large enough."""
    slices: tuple[SliceId, ...] = ()
    """Where room for it is coming, or is made."""
    ready_s: float | None = None
    """In so many seconds a Replica is expected on what was ordered for it; infinite: nobody can say; None: nothing."""
    lease: LeaseId | None = None
    """It is to be on this, which is on its way."""


class Plan(Fact, frozen=True):
    """The ordered Actions of one tick."""

    actions: tuple[Action, ...] = ()
    unmet: tuple[Unmet, ...] = ()
    next_s: float | None = None
    """When time alone would change the Plan (an idle window ends, a back-off is over); None: only observations can."""
    tries: tuple[ModelName, ...] = ()
    """Models that it starts, or makes room for: whether they could start at all is looked at before it is performed."""
