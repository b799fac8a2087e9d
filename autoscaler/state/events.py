"""Observations from drivers, gateways and operators. Each states a current state or an event, never an action to take.

Owns the types only; `autoscaler.fold.fold` computes the next `World` from a `World` and a batch of observations.
"""

from __future__ import annotations

from enum import StrEnum

from autoscaler.agent_contract import NodeReport
from autoscaler.contract import GatewayId, ModelName, ReplicaId, Report
from autoscaler.spec.model import Model, SignalName
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant
from autoscaler.state import StateRecord
from autoscaler.state.images import Image
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.resources import HostAmount, HostResources
from autoscaler.state.world import (
    ClusterFacts,
    Copy,
    Cordon,
    History,
    NodeId,
    PlacementValues,
    Placing,
    PodRef,
    SignalTotal,
    Slice,
    SliceId,
)


class Seen(StrEnum):
    """The state of a replica as a driver observes it."""

    STARTING = "starting"
    """The process exists and does not respond yet."""
    READY = "ready"
    UNREADY = "unready"
    """It was ready, and its probes fail."""
    TAKEN = "taken"
    """Another program ends it and allows time for requests. It gets no new requests and cannot be kept."""
    LEAVING = "leaving"
    """An earlier leader, another program or its machine (a full disk) ended it. It counts as ordered to stop."""
    EXITED = "exited"
    """The main process ended; other processes or objects may remain."""
    CLEAN = "clean"
    """Nothing of it remains; `proof` names the evidence."""


class DocumentsSeen(StateRecord, frozen=True):
    """The complete set of documents."""

    models: tuple[Model, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    settings: Settings = Settings()


class SlicesSeen(StateRecord, frozen=True):
    """The complete inventory of one driver."""

    slices: tuple[Slice, ...]
    others: dict[str, int] = {}
    """See `World.nodes.others`."""


class HostsSeen(StateRecord, frozen=True):
    """The CPU and memory of all nodes that one driver can read. See `World.nodes.hosts`."""

    hosts: dict[NodeId, HostResources]


class CopiesSeen(StateRecord, frozen=True):
    """All copies of artifacts on nodes, as far as they are needed; see `World.nodes.copies`."""

    copies: frozenset[Copy]
    failed: dict[str, str] = {}
    """See `World.learned.unbrought`."""


class ImagesSeen(StateRecord, frozen=True):
    """The images on all nodes that one driver watches, as their kubelets report them. See `World.nodes.images`."""

    images: dict[str, tuple[Image, ...]]


class DisruptionsSeen(StateRecord, frozen=True):
    """All replicas that must not be evicted now, and the reasons; see `World.nodes.undisturbed`."""

    undisturbed: dict[ReplicaId, str]


class StartSeen(StateRecord, frozen=True):
    """An obstacle to starts of a Model, as a driver detects it without a start."""

    model: ModelName
    obstacle: str = ""
    """Why a start would certainly fail, and what to do, as a sentence. Empty: no obstacle is known."""


class FaultSeen(StateRecord, frozen=True):
    """An exception that a Model caused. It quarantines the Model, see `autoscaler.fold.model_quarantine`."""

    model: ModelName
    """Empty: a driver failed, and no Model explains the failure."""
    reason: str
    """Why it failed. Empty only if `model` is empty: then `part` works again."""
    part: str = "driver"
    """The part that failed."""
    is_over: bool = False
    """Whether the Model no longer makes `part` fail, so that its quarantine ends and is forgotten."""


class SignalsSeen(StateRecord, frozen=True):
    """All scaling signals of a Model, as just read from its engines and from Prometheus."""

    model: ModelName
    signals: dict[SignalName, SignalTotal]


class ReplicaSeen(StateRecord, frozen=True):
    """One replica as the driver observes it, with its identity, so that a new leader adopts it."""

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
    """Whether its memory grew since the last observation."""
    host_request: HostAmount | None = None
    """The CPU and memory that it requests of its node. None: unknown to the driver."""
    used_bytes: int = 0
    """The device memory that the driver last measured. 0: not measured."""
    reason: str = ""
    """The reason for the state, if the driver knows it: exit status, signal, a line of the engine's log."""
    rank: int = 0
    """See Replica."""
    weights: tuple[str, ...] = ()
    """See Replica."""
    actual: tuple[SliceId, ...] = ()
    """The devices that it really has, if known and different from `slices`."""
    waits: str = ""
    """Why no process of a starting replica has started yet (no capacity, no image). Empty: a process has started."""
    proof: str = ""


class Synced(StateRecord, frozen=True):
    """The driver has listed everything."""


class LeadingSeen(StateRecord, frozen=True):
    """The process leads from now on, in this epoch. The driver reports everything again, up to a `Synced`."""

    epoch: int


class FollowingSeen(StateRecord, frozen=True):
    """The process no longer leads; none of its orders is in progress."""


class Reported(StateRecord, frozen=True):
    """A gateway reported. `came_s`: the time of arrival; None: now."""

    report: Report
    came_s: float | None = None


class GatewaySeen(StateRecord, frozen=True):
    """A gateway process or pod exists, whether or not it has reported."""

    gateway: GatewayId
    boot: str = ""
    """Its boot, if known. A new boot proves that the old process ended."""
    watched: bool = False
    """Whether the process or pod is watched, so that GatewayGone follows when it ends."""


class GatewayGone(StateRecord, frozen=True):
    """A gateway process or pod is known to have ended."""

    gateway: GatewayId
    boot: str = ""
    """Its boot, if known. A newer boot of the gateway is not affected."""


class CordonsSeen(StateRecord, frozen=True):
    """All current cordons."""

    cordons: tuple[Cordon, ...]


class ModelWoken(StateRecord, frozen=True):
    """An operator starts a Model. It has the effect of a request that was rejected because the Model is cold."""

    model: ModelName


class ModelStopped(StateRecord, frozen=True):
    """An operator stops all replicas of a Model. `force`: running requests have only a short time to finish."""

    model: ModelName
    force: bool = False


class NodeReported(StateRecord, frozen=True):
    """A report of the agent of a node."""

    report: NodeReport


class HistorySeen(StateRecord, frozen=True):
    """The stored history of a Model from before this process started; for a follower, the leader's history."""

    model: ModelName
    history: History


class LessonLearnt(StateRecord, frozen=True):
    """Placement values were learned or loaded. They are valid (`training.decode_placement_values`)."""

    lesson: PlacementValues


class HoldsGranted(StateRecord, frozen=True):
    """Slots were allocated: (gateway, replica, new allocation). The fold assigns the next version."""

    holds: tuple[tuple[GatewayId, ReplicaId, int], ...]


class ClockSeen(StateRecord, frozen=True):
    """The wall-clock time: the difference between seconds since 1970 and the `World`'s clock."""

    unix_offset_s: float


class Tick(StateRecord, frozen=True):
    """Time passed: reports expire, back-offs end."""


class Transition(StateRecord, frozen=True):
    """One row of the log: a state change of a replica and its reason. `explain` and the ledger read these."""

    at_s: float
    replica: ReplicaId
    model: ModelName
    slices: tuple[SliceId, ...]
    before: ReplicaState | None
    after: ReplicaState
    verb: str
    """The verb of `lifecycle.TRANSITIONS`, or "seen" if an observation skipped states."""
    reason: str


class MountsSeen(StateRecord, frozen=True):
    """An observation: properties of the whole cluster."""

    facts: ClusterFacts
