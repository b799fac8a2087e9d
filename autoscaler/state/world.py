"""The World: one immutable snapshot of everything a decision may depend on.

Owns the types only; `autoscaler.fold.fold` makes the next World out of an old one and a batch of observations
(`autoscaler.state.events`). Entities are frozen and replaced whole. All times are seconds of one monotonic clock
(`now_s`), given from outside.
"""

from __future__ import annotations

from typing import NamedTuple, NewType

import msgspec

from autoscaler.agent_contract import WeightsRequest
from autoscaler.contract import (
    GatewayId,
    Level,
    ModelName,
    ReplicaId,
    ReplicaUse,
    Report,
    TenantName,
    Total,
    WeightsReport,
)
from autoscaler.spec.model import Model
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant
from autoscaler.state.capacity_orders import NO_MARKS, Capacity, Marks
from autoscaler.state.capacity_orders import NOTHING as NO_CAPACITY
from autoscaler.state.images import NodeImages
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.mig import Intent, MigNode
from autoscaler.state.node_labels import NodeBackoff, PendingLabels, Taint
from autoscaler.state.operator_orders import Cordon, CordonTarget, NodeAgentStatus, StopOrder
from autoscaler.state.placement_value import PlacementValues
from autoscaler.state.resources import NOTHING, Beside, HostResources, Isolation

SliceId = NewType("SliceId", str)
DeviceId = NewType("DeviceId", str)
NodeId = NewType("NodeId", str)

Version = tuple[int, int]
STORE = "/var/lib/pilotlight/weights"
"""On nodes, unless we are told otherwise."""


class ClusterFacts(NamedTuple):
    """What holds for all nodes, as far as it is known."""

    volumes: bool = False
    """We may make PersistentVolumes."""
    server: Version | None = None
    """Of the API server."""
    store: str = STORE
    """Of the agents, on their nodes."""


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything in the World."""


class Slice(Fact, frozen=True):
    """A share of a Device that Replicas may hold. `shared`: many Replicas up to its memory and compute; else one."""

    id: SliceId
    device: DeviceId
    node: NodeId
    memory_bytes: int
    compute_percent: int = 100
    isolation: Isolation = Isolation.NONE
    shared: bool = True
    product: str = ""
    """The device's product name, matched against `gpu.models`; empty matches only a Model that names none."""
    healthy: bool = True
    labels: dict[str, str] = {}
    labels_known: bool = False
    """Those above are all that its node has; False: it may have others, too."""
    labels_coming: PendingLabels = PendingLabels.NOTHING
    """It is not there yet, and with this its node gets some more."""
    taints: tuple[Taint, ...] = ()
    """Of its node, but for those that every pod of ours tolerates."""
    closed: str = ""
    """Why nothing new may be put there now, as its driver sees it; empty: it is open."""
    kind: str = ""
    """How its Device is sliced: the name of its Slicer (`autoscaler.slicing`); empty: by nobody, the machine's own."""
    device_bytes: int = 0
    """All the memory of its Device, or of what it was cut from, where others have some; 0: it is all its own."""
    overcommitted: bool = False
    """More of it may be given out than its Device has, or than is its own."""
    holders_max: int = 0
    """So many may be on it, Replicas and pods of others together; 0: as many as have room."""
    theirs: int = 0
    """So many pods of others are on it, where that is known of this very Slice."""
    handle: str = ""
    """What its Slicer calls it: a resource's name, a device's UUID, a device of a ResourceSlice."""

    link: str = ""
    """What joins its Device to others of its node more closely than the node does (a PCIe root); empty: not known."""

    @property
    def counted(self) -> str:
        """What it is counted by: its node, and what its Slicer calls it. Of such Slices nobody knows which is whose."""
        return f"{self.node} {self.handle}" if self.handle else self.node


class Copy(Fact, frozen=True):
    """An Artifact complete on one node."""

    artifact: str
    node: NodeId


class Placing(Fact, frozen=True):
    """How far it got on its way to a process, as its driver saw it; None: that was not seen, or not by itself."""

    asked_s: float | None = None
    """The API server has what was asked of it: a pod, or a scale."""
    bound_s: float | None = None
    """It has a node."""
    prepared_s: float | None = None
    """Its node has all of it ready, but for its image and its container."""
    pulled_s: float | None = None
    """The weights that its node was to bring from a registry are there."""


class PodRef(Fact, frozen=True):
    """A Replica's pod."""

    namespace: str
    name: str
    uid: str


class Drain(Fact, frozen=True):
    """Why and since when a Replica drains. Stopped only when every known gateway acted on (epoch, version) or later."""

    since_s: float
    reason: str
    came_from: ReplicaState
    epoch: int
    version: int
    victim_of: ModelName | None = None
    """The Model that its Slice is wanted for; None when it drains for its own sake."""
    stranded: bool = False
    crowded: bool = False
    """More is on a Slice of its than that has (`autoscaler.queries.crowded_slices`)."""
    taken: bool = False
    """Somebody else ends it (a queue that gives its quota to another, an eviction): that is no failure of it."""


class Move(Fact, frozen=True):
    """Whose place a Replica takes, and for whom that makes room; empty: it was on what costs, and goes home."""

    replica: ReplicaId
    room_for: ModelName = ModelName("")


class PaidCapacity(Fact, frozen=True):
    """Who is on capacity that costs, and who else keeps it in use (`autoscaler.rearrange.paid_capacity`)."""

    guests: frozenset[ReplicaId] = frozenset()
    """Replicas on it."""
    idlers: frozenset[ModelName] = frozenset()
    """Models whose idle Replicas let it cost: those of guests, and of those in whose place a guest could be."""


class ReplicaResources(Fact, frozen=True):
    """What a replica occupies."""

    slices: tuple[SliceId, ...]
    """Its actual slices, as far as they are known."""
    memory_bytes: int
    """Claimed on each of its slices."""
    compute_percent: int = 0
    beside: Beside = NOTHING
    """The other resources of its node that it requests."""
    chosen: tuple[SliceId, ...] = ()
    """The slices that the planner chose, if a scheduler placed it elsewhere; empty: those are its slices."""


class ReplicaTimes(Fact, frozen=True):
    """When the start of a replica reached each step."""

    created_s: float = 0.0
    wanted_s: float | None = None
    """Since when the request that caused the start waited; None: no request did."""
    placing: Placing = Placing()
    started_s: float | None = None
    """When its first process started."""
    ready_s: float | None = None
    """When it first became ready."""
    grown_s: float | None = None
    """When its memory was last seen to grow: the start lock of its device ends `exclusive_seconds` later."""


class ReplicaRuntime(Fact, frozen=True):
    """The pod or process of a replica, as its driver reports it."""

    address: str = ""
    pod: PodRef | None = None
    """None: it has no pod, or the name is not known yet."""
    waits: str = ""
    """Why its first process has not started yet; `start.secondsMax` does not count that time."""
    stranded_s: float | None = None
    """Since when a scheduler keeps it off its node; None: it does not (`autoscaler.queries.unschedulable_replicas`)."""
    found: bool = False
    """It was running when this leader first saw it: the duration of its start is not known."""
    marks: Marks = NO_MARKS
    """Annotations and labels of its pod for the provider of its slices."""
    rank: int = 0
    """Of replicas that can only stop in order (of a StatefulSet) the highest stops first."""
    weights: tuple[str, ...] = ()
    """The copies of weights that its pod uses: folders below its node's store."""
    proof: str = ""
    """The proof that nothing of it is left: measured, unprepared, exited or assumed."""


class Replica(Fact, frozen=True):
    """One running copy of a Model, from the decision to place it until its slices are proven clean."""

    id: ReplicaId
    model: ModelName
    spec_hash: str
    intent: str
    """The idempotency key of the decision that created it."""
    resources: ReplicaResources
    slots: int = 1
    state: ReplicaState = ReplicaState.PENDING
    since_s: float = 0.0
    """When it entered `state`."""
    reason: str = ""
    """Why it was started, in a sentence."""
    failure: str = ""
    drain: Drain | None = None
    move: Move | None = None
    """It replaces another replica of its Model (`autoscaler.rearrange.defragmentation`); None: it replaces none."""
    times: ReplicaTimes = ReplicaTimes()
    runtime: ReplicaRuntime = ReplicaRuntime()


class Grant(Fact, frozen=True):
    """A hold given to a gateway on a Replica by Routes of `version` (of the current epoch)."""

    version: int
    hold: int


class Gateway(Fact, frozen=True):
    """One known gateway: its last report, and every grant that it has not acknowledged yet (newest last)."""

    id: GatewayId
    boot: str = ""
    boots_before: tuple[str, ...] = ()
    """Boots proven dead by a later one, newest last, at most 8: what still comes from them is ignored."""
    seen_s: float = 0.0
    """When it last reported, or when it was proven dead."""
    report: Report | None = None
    """Its last report, of whatever epoch; None: it has not reported to this leader yet, or is proven dead."""
    in_epoch: bool = False
    """It has acted on Routes of this epoch and said so; only then its holds are known."""
    grants: dict[ReplicaId, tuple[Grant, ...]] = {}
    """Per Replica, newest last, holds strictly falling: at most `slots` + 1. Version 0: echoed, never sent."""
    totals: dict[tuple[ModelName, TenantName], Total] = {}
    """The last cumulative counts of this boot."""
    watched: bool = False
    """Its process or pod is watched, so its end will be observed; else nothing proves that it exists."""
    lapsed: bool = False
    """It is not watched and its last report has expired: its slots go to other gateways."""
    gone: bool = False
    """Its process or pod does not exist, which the silence of a watched gateway does not prove."""
    gone_version: int = 0
    """Of the Routes made when it was: nobody dead acts on them."""

    levels: dict[ModelName, tuple[Level, ...]] = {}
    """Derived from `report`: its demand per Model; empty once the report has expired."""
    uses: dict[ReplicaId, ReplicaUse] = {}
    """Derived from `report`: its Replicas by id, less what merely ages. Never expires: expired is not dead."""


class Used(Fact, frozen=True):
    """The most memory that one Replica of a Model was seen to use of a Device."""

    spec_hash: str
    estimated_bytes: int
    """Both of the Model as it was: of another spec or another file it says nothing."""
    bytes: int
    served: bool = False
    """It had served for a while when it was looked at."""


class History(Fact, frozen=True):
    """What is remembered of a Model beyond its Replicas; survives a restart."""

    starts_s: tuple[float, ...] = ()
    """Durations from first process start to ready, newest last, at most 32."""
    last_activity_s: float | None = None
    """Last arrival or finish of a Call at any gateway."""
    refused_cold_s: float | None = None
    """When a cold Call was last refused, or an operator said wake: demand for one start."""
    woken_s: float | None = None
    """When an operator last said wake."""
    hold_until_s: float = 0.0
    """A start nobody waits for any more is kept ready until then (twice the Retry-After that was given)."""
    tries: int = 0
    """Failed tries of the current episode."""
    first_try_s: float | None = None
    """First process start of the episode."""
    retry_at_s: float = 0.0
    """No new try before this."""
    episodes: int = 0
    """Failed episodes in a row: the back-off is 1, 2, 4 ... minutes."""
    refused_until_s: float = 0.0
    """An episode failed: Calls are refused at once until then."""
    failure: str = ""
    failed_hash: str = ""
    """Of the Model when that was said (`Model.spec_hash`); empty: nobody knows."""
    served_until_s: float | None = None
    """When its last ready Replica stopped taking Calls."""
    stopped_idle_s: float | None = None
    """When it last went to zero for idleness; a start soon after is a regret."""
    regrets: int = 0
    """Each doubles the `auto` idle window, within its bounds."""
    used: Used | None = None
    """None: nothing was measured."""
    peaks: tuple[tuple[int, int], ...] = ()
    """(bucket, most Calls at once in it) over the idle window: fewer Replicas only when the peak fits them."""


class Fault(Fact, frozen=True):
    """Exceptions that a Model caused (`autoscaler.controller.containment`)."""

    reason: str
    """The last one: its type, where it was raised, and its message."""
    seen_s: float
    until_s: float
    """Quarantined until then; 0: the quarantine is over, and the Model is on trial."""
    times: int = 1
    """Quarantines in a row: they last 1, 2, 4 ... 30 minutes."""


class MpsServerFailure(Fact, frozen=True):
    """Replicas of one MPS server that ended together, as it seems (`autoscaler.queries.mps_failures`)."""

    first_s: float
    """When the first of them ended."""
    replicas: frozenset[ReplicaId] = frozenset()
    times: int = 0
    """The fall, and the starts that failed there since; 0: others are there, or one ended alone."""
    until_s: float = 0.0
    """Nothing is put there before."""


class ModelLoad(Fact, frozen=True):
    """Demand of one Model summed over gateways whose report has not expired (kept by the fold)."""

    waiting: int = 0
    running: int = 0
    oldest_s: float | None = None
    """When the Call that waits longest arrived."""
    tenants: frozenset[TenantName] = frozenset()
    waiting_at: frozenset[GatewayId] = frozenset()
    """Gateways where Calls wait."""


class Nodes(Fact, frozen=True):
    """The nodes: their Devices, resources and contents, and what limits their use. Maps are never changed in place."""

    slices: dict[SliceId, Slice] = {}
    others: dict[str, int] = {}
    """By `Slice.counted`: how many of these Slices pods of others have; which ones is not known."""
    hosts: dict[NodeId, HostResources] = {}
    """What nodes have beside their Devices, and what others leave of it; of one that is not here any amount fits."""
    agents: dict[str, NodeAgentStatus] = {}
    """By name, what agents said; `autoscaler.queries.device_health.is_report_fresh` tells what still counts."""
    copies: frozenset[Copy] = frozenset()
    images: dict[str, NodeImages] = {}
    """By node: what its kubelet and its agent say."""
    mounting: ClusterFacts | None = None
    """By what it is chosen how pods see weights; None: there are no pods, or nobody knows yet."""
    cordons: dict[CordonTarget, Cordon] = {}
    backoffs: dict[tuple[ModelName, NodeId], NodeBackoff] = {}
    mps_failures: dict[tuple[NodeId, DeviceId | None], MpsServerFailure] = {}
    """By what ends with an MPS server: a Device, or (None) all that MPS shares of a node."""
    undisturbed: dict[ReplicaId, str] = {}
    """Replicas of which PodDisruptionBudgets allow no disruption now: their names. Nobody moves them."""
    cuttable: dict[str, MigNode] = {}
    """By name: the nodes that may be cut anew."""
    cutting: dict[str, Intent] = {}
    """By node: our orders to cut it that it does not show yet."""


class Learned(Fact, frozen=True):
    """What was measured, reported or computed about Models and their artifacts. Maps are never changed in place."""

    histories: dict[ModelName, History] = {}
    attained: dict[ModelName, dict[TenantName, float]] = {}
    """Service that each Tenant got from a Model, in slot-seconds per weight: the virtual time of fair queueing."""
    obstacles: dict[ModelName, str] = {}
    """Models whose start would surely fail, and why: nothing is displaced for them."""
    faults: dict[ModelName, Fault] = {}
    """Models that caused an exception lately."""
    unbrought: dict[str, str] = {}
    """Artifacts that could not be brought, or looked at, ahead of a start, and why; it is tried again."""
    looked: dict[WeightsRequest, WeightsReport] = {}
    """What agents found artifacts to be that were only looked at, of Models that there are."""
    lesson: PlacementValues | None = None
    """What room is worth here; None: nobody knows yet what is asked for."""


class Leadership(Fact, frozen=True):
    """Whether this process leads, and its progress in taking over from the previous leader."""

    documented: bool = False
    synced: bool = False
    """Documents were told; the driver has listed all that exists. No catalogue is told, or nothing decided, before."""
    leads: bool = True
    """This process leads. One that follows folds everything, and orders and grants nothing."""
    leading_since_s: float = 0.0
    handed_over: bool = False
    """Every gateway known at the hand-over has reported in this epoch or is proven dead: holds may change."""


class World(Fact, frozen=True):
    """The snapshot. Maps are never changed in place; the last group is derived, and a full rebuild gives the same."""

    epoch: int
    version: int = 0
    """Of Routes: rises with every change that a gateway must learn."""
    leadership: Leadership = Leadership()
    unix_offset_s: float | None = None
    """With it a moment of our clock is in seconds since 1970; None: nobody knows what time of day it is."""
    installation: str = ""
    """Part of the names of what is started and ordered: several installations may share a cluster."""
    settings: Settings = Settings()
    models: dict[ModelName, Model] = {}
    tenants: dict[TenantName, Tenant] = {}
    nodes: Nodes = Nodes()
    replicas: dict[ReplicaId, Replica] = {}
    gateways: dict[GatewayId, Gateway] = {}
    learned: Learned = Learned()
    capacity: Capacity = NO_CAPACITY
    """What could be added and was; nothing where no provider is."""
    rented: PaidCapacity = PaidCapacity()
    stops: dict[ModelName, StopOrder] = {}
    moved_s: float | None = None
    """When a Replica was last started to make room by taking the place of another; None: never, under this leader."""
    degraded: str = ""
    """Exceptions that no Model explains, and where they were raised; empty: there are none."""
    undivided: frozenset[ModelName] = frozenset()
    """Models in which something changed that `shares` must look at; folding its answer (Granted) empties it."""

    by_model: dict[ModelName, tuple[ReplicaId, ...]] = {}
    by_slice: dict[SliceId, tuple[ReplicaId, ...]] = {}
    loads: dict[ModelName, ModelLoad] = {}
