"""Observations: what happened, as drivers, gateways and people told it. Each is a level or a fact, never a wish.

Owns the types only; `autoscaler.fold.fold` makes the next World out of an old one and a batch of these.
"""

from __future__ import annotations

from enum import StrEnum

from autoscaler.contract import GatewayId, ModelName, ReplicaId, Report
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant
from autoscaler.state.images import Image
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.placement_value import PlacementValues
from autoscaler.state.resources import Beside, HostResources
from autoscaler.state.world import ClusterFacts, Copy, Fact, History, NodeId, Placing, PodRef, Slice, SliceId


class Seen(StrEnum):
    """What a driver sees of a Replica."""

    STARTING = "starting"
    """Its process exists and does not answer yet."""
    READY = "ready"
    UNREADY = "unready"
    """It was ready and its probes fail."""
    TAKEN = "taken"
    """Somebody else ends it, and Calls on it have time: it takes no new ones, and nothing can keep it."""
    LEAVING = "leaving"
    """Its end was ordered, by a leader before us or by somebody else, or its machine ended it (a full disk): as if its
    stop were ordered."""
    EXITED = "exited"
    """Its main process ended; something of it may be left."""
    CLEAN = "clean"
    """Nothing of it is left; `proof` names how that is known."""


class DocumentsSeen(Fact, frozen=True):
    """The whole set of documents, as it is now."""

    models: tuple[Model, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    settings: Settings = Settings()


class SlicesSeen(Fact, frozen=True):
    """The whole inventory of one driver, as it is now."""

    slices: tuple[Slice, ...]
    others: dict[str, int] = {}
    """See World.nodes.others."""


class HostsSeen(Fact, frozen=True):
    """Of all nodes that one driver may look at, what they have beside their Devices now. See World.nodes.hosts."""

    hosts: dict[NodeId, HostResources]


class CopiesSeen(Fact, frozen=True):
    """All Copies of Artifacts on nodes, as far as they are wanted; see World.nodes.copies."""

    copies: frozenset[Copy]
    failed: dict[str, str] = {}
    """See World.learned.unbrought."""


class ImagesSeen(Fact, frozen=True):
    """Of all nodes that one driver looks at, their images as the kubelets report them. See World.nodes.images."""

    images: dict[str, tuple[Image, ...]]


class DisruptionsSeen(Fact, frozen=True):
    """All Replicas that nobody may end for another's sake now, and why; see World.nodes.undisturbed."""

    undisturbed: dict[ReplicaId, str]


class StartSeen(Fact, frozen=True):
    """What stands in the way of a start of a Model, as a driver sees it without starting anything."""

    model: ModelName
    obstacle: str = ""
    """Why a start would surely fail, and what to do, in a sentence; empty: nothing is known to stand in its way."""


class FaultSeen(Fact, frozen=True):
    """An exception that a Model caused. It quarantines the Model, see `autoscaler.fold.faults`."""

    model: ModelName
    """Empty: a driver failed, and no Model explains that."""
    reason: str
    """Empty, where `model` is: the part works again."""
    part: str = "driver"
    """What failed, where `model` is empty."""


class ReplicaSeen(Fact, frozen=True):
    """One Replica as the driver sees it, with its identity, so that a new leader adopts it."""

    id: ReplicaId
    model: ModelName
    spec_hash: str
    intent: str
    slices: tuple[SliceId, ...]
    memory_bytes: int
    slots: int
    seen: Seen
    compute_percent: int = 0
    address: str = ""
    started_s: float | None = None
    placing: Placing = Placing()
    pod: PodRef | None = None
    grew: bool = False
    """Its memory grew since the last look."""
    beside: Beside | None = None
    """What it has of its node beside Devices, by its request; None: the driver does not know."""
    used_bytes: int = 0
    """Of its Device, as the driver measured it lately; 0: it did not."""
    reason: str = ""
    """Why it is so, where the driver knows: exit status, signal, a line of the engine's log."""
    rank: int = 0
    """See Replica."""
    weights: tuple[str, ...] = ()
    """See Replica."""
    actual: tuple[SliceId, ...] = ()
    """What it really has, where that is known and is not `slices`."""
    waits: str = ""
    """Of one that is starting: why no process of it has started yet (no room, no image); empty where one has."""
    proof: str = ""


class Synced(Fact, frozen=True):
    """The driver has listed everything."""


class LeadingSeen(Fact, frozen=True):
    """We lead from now on, in this epoch. The driver says again what there is, to a `Synced`."""

    epoch: int


class FollowingSeen(Fact, frozen=True):
    """We lead no more; nothing that we ordered is under way."""


class Reported(Fact, frozen=True):
    """A gateway reported. `came_s`: when; None: now."""

    report: Report
    came_s: float | None = None


class GatewaySeen(Fact, frozen=True):
    """A gateway process or pod exists, whether or not it reported."""

    gateway: GatewayId
    boot: str = ""
    """Its boot where known: a new one proves the old one dead."""
    watched: bool = False
    """Its process or pod is watched: GatewayGone follows when it ends."""


class GatewayGone(Fact, frozen=True):
    """A gateway process or pod is proven not to exist any more."""

    gateway: GatewayId
    boot: str = ""
    """Its boot where known: another one that has come since lives on."""


class HistorySeen(Fact, frozen=True):
    """What was remembered of a Model before this process started; to who follows: what the leader remembers."""

    model: ModelName
    history: History


class LessonLearnt(Fact, frozen=True):
    """What room is worth was learnt, or remembered; it is sound
    (`autoscaler.placement.learning.training.decode_placement_values`).
    """

    lesson: PlacementValues


class HoldsGranted(Fact, frozen=True):
    """`shares` moved holds: (gateway, Replica, new hold). The fold gives them the next version."""

    holds: tuple[tuple[GatewayId, ReplicaId, int], ...]


class ClockSeen(Fact, frozen=True):
    """What time it is: so much more than our clock says it is in seconds since 1970."""

    unix_offset_s: float


class Tick(Fact, frozen=True):
    """Time passed: reports expire, back-offs end."""


class Transition(Fact, frozen=True):
    """One row of the log: a Replica went from one state to another, and why. `explain` and the ledger read these."""

    at_s: float
    replica: ReplicaId
    model: ModelName
    slices: tuple[SliceId, ...]
    before: ReplicaState | None
    after: ReplicaState
    verb: str
    """The verb of the table, or "seen" where an observation jumped."""
    reason: str


class MountsSeen(Fact, frozen=True):
    """An observation: what holds for all nodes now."""

    facts: ClusterFacts
