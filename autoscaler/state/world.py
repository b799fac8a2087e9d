"""The `World`: one immutable snapshot of everything a decision may depend on.

The types only; `autoscaler.fold.fold` computes the next `World` from a `World` and a batch of observations
(`autoscaler.state.events`). Records are frozen and replaced as a whole. All times are seconds of one monotonic clock
(`now_s`), which the caller passes. `autoscaler.placement.learning.training` creates and decodes the learned
`PlacementValues`, which are also stored in the state directory and sent between processes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, NewType

import msgspec

from autoscaler.agent_contract import NodeReport, PodDevices, WeightsReport, WeightsRequest
from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName, Total
from autoscaler.spec.model import Model, SignalName
from autoscaler.spec.settings import Settings
from autoscaler.spec.tenant import Tenant
from autoscaler.state import StateRecord
from autoscaler.state.capacity import NO_MARKS, Capacity, Marks
from autoscaler.state.capacity import NOTHING as NO_CAPACITY
from autoscaler.state.images import NodeImages
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.mig import Intent, MigNode
from autoscaler.state.node_labels_and_taints import NodeBackoff, PendingLabels, Taint
from autoscaler.state.resources import NOTHING, HostAmount, HostResources, Isolation, RequestFrequency, SliceClass


class Alike(NamedTuple):
    """Nodes that are equal when they are empty, and their number."""

    lanes: tuple[SliceClass, ...]
    cpu_milli: int
    host_bytes: int
    many: int


class TrainingInput(msgspec.Struct, frozen=True, kw_only=True):
    """The input of learning. It determines the result: equal inputs give equal PlacementValues."""

    nodes: tuple[Alike, ...]
    demand: tuple[RequestFrequency, ...]
    seed: int


class PlacementValues(msgspec.Struct, frozen=True, kw_only=True):
    """The result of learning from a TrainingInput."""

    exercise: TrainingInput
    values: bytes
    """Tables of `autoscaler.placement.index.residual_waste_tables`: each number in four bytes, little-endian."""
    prices: bytes
    learnt: bool = True
    """Whether the values come from replays. False: they only contain how often each size is requested."""


SliceId = NewType("SliceId", str)
DeviceId = NewType("DeviceId", str)
NodeId = NewType("NodeId", str)

Version = tuple[int, int]
STORE = "/var/lib/pilotlight/weights"
"""The default path of the agents' store on their nodes."""


class ClusterFacts(NamedTuple):
    """Facts about the whole cluster, as far as they are known."""

    volumes: bool = False
    """Whether Pilotlight may create PersistentVolumes."""
    server: Version | None = None
    """The version of the API server. None: unknown."""
    store: str = STORE
    """The path of the agents' store on their nodes."""


class Slice(StateRecord, frozen=True):
    """A share of a device that replicas can use. If `shared`, several replicas can use it at the same time, up to its
    memory and compute; otherwise only one.
    """

    id: SliceId
    device: DeviceId
    node: NodeId
    memory_bytes: int
    compute_percent: int = 100
    isolation: Isolation = Isolation.NONE
    shared: bool = True
    product: str = ""
    """The device's product name, matched against `gpu.models`. Empty: it matches only Models that name no product."""
    healthy: bool = True
    labels: dict[str, str] = {}
    labels_known: bool = False
    """Whether `labels` are all labels of the node. False: the node may have more."""
    labels_coming: PendingLabels = PendingLabels.NOTHING
    """The addition that creates the slice, if it does not exist yet: its node will get further labels with it."""
    taints: tuple[Taint, ...] = ()
    """The taints of the node, without those that every replica pod tolerates."""
    closed: str = ""
    """The reason why the driver allows no new replica on it. Empty: it is open."""
    kind: str = ""
    """The name of the slicer that divides the device (`autoscaler.slicing`). Empty: the device is not divided."""
    device_bytes: int = 0
    """The total memory of the physical device that the slice shares with others. 0: the slice has its own memory."""
    overcommitted: bool = False
    """Whether more of it may be allocated than the device, or the slice, has."""
    holders_max: int = 0
    """The maximum number of holders, replicas and pods of others together. 0: no limit except its resources."""
    theirs: int = 0
    """The number of pods of others on it, if that is known for this slice."""
    handle: str = ""
    """The slicer's name for it: a resource name, the UUID of a device, or a device of a ResourceSlice."""

    link: str = ""
    """The link of its device to others of the node (a PCIe root), closer than the node itself. Empty: unknown."""

    @property
    def counted(self) -> str:
        """The key under which the slice is counted: node and handle. Pods of others are known only per key."""
        return f"{self.node} {self.handle}" if self.handle else self.node


class Copy(StateRecord, frozen=True):
    """A complete copy of an artifact on one node."""

    artifact: str
    node: NodeId


class Placing(StateRecord, frozen=True):
    """When the driver observed each step towards a process. None: the step was not observed, or has no event."""

    asked_s: float | None = None
    """The time at which the API server accepted the pod, or the change of the scale."""
    bound_s: float | None = None
    """The time at which it was bound to a node."""
    prepared_s: float | None = None
    """When its node had prepared everything except image and container."""
    pulled_s: float | None = None
    """When its node had pulled the weights from a registry."""


class PodRef(StateRecord, frozen=True):
    """The pod of a replica."""

    namespace: str
    name: str
    uid: str


class Drain(StateRecord, frozen=True):
    """Why and since when a replica drains. It stops when every known gateway acted on (epoch, version) or later."""

    since_s: float
    reason: str
    came_from: ReplicaState
    epoch: int
    version: int
    victim_of: ModelName | None = None
    """The Model that needs its slice. None: it is not an eviction."""
    stranded: bool = False
    crowded: bool = False
    """Whether one of its slices is overcommitted (`autoscaler.queries.overcommitted_slices`)."""
    taken: bool = False
    """Whether another program ends it (a queue that reclaims quota, an eviction). This does not count as a failure."""


class Move(StateRecord, frozen=True):
    """The replica that a new one replaces, and the Model that gets its place. No Model: it leaves paid capacity."""

    replica: ReplicaId
    room_for: ModelName = ModelName("")


class PaidCapacity(StateRecord, frozen=True):
    """Replicas on paid capacity, and the Models that keep it in use (`autoscaler.rearrange.paid_capacity`)."""

    guests: frozenset[ReplicaId] = frozenset()
    """The replicas on it."""
    idlers: frozenset[ModelName] = frozenset()
    """Models whose idle replicas keep it in use: on it, or on unpaid slices that a replica on it could use instead."""


class ReplicaResources(StateRecord, frozen=True):
    """The resources that a replica occupies."""

    slices: tuple[SliceId, ...]
    """Its actual slices, as far as they are known."""
    memory_bytes: int
    """Claimed on each of its slices."""
    compute_percent: int = 0
    host_request: HostAmount = NOTHING
    """The CPU and memory that it requests of its node."""
    chosen: tuple[SliceId, ...] = ()
    """The slices that the planner chose, if a scheduler placed it elsewhere; empty: those are its slices."""


class ReplicaTimes(StateRecord, frozen=True):
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


class ReplicaRuntime(StateRecord, frozen=True):
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
    """If its workload deletes pods in a fixed order (StatefulSet), the replica with the highest rank stops first."""
    weights: tuple[str, ...] = ()
    """The copies of weights that its pod uses: folders below its node's store."""
    proof: str = ""
    """The proof that nothing of it is left: `measured`, `unprepared`, `exited` or `assumed`
    (docs/reference/replica-states.md).
    """


class Replica(StateRecord, frozen=True):
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


class Grant(StateRecord, frozen=True):
    """An allocation of `hold` slots of a replica to a gateway, made in Routes of `version` (of the current epoch)."""

    version: int
    hold: int


class Gateway(StateRecord, frozen=True):
    """A known gateway: its last report, and every grant that it has not acknowledged yet (newest last)."""

    id: GatewayId
    boot: str = ""
    boots_before: tuple[str, ...] = ()
    """Boots that a later boot proves dead, newest last, at most 8. Their late messages are ignored."""
    seen_s: float = 0.0
    """When it last reported, or when it was proven dead."""
    report: Report | None = None
    """Its last report, of any epoch. None: it has not reported to this leader yet, or it is proven dead."""
    in_epoch: bool = False
    """Whether it has acknowledged Routes of this epoch. Only then are its allocations known."""
    grants: dict[ReplicaId, tuple[Grant, ...]] = {}
    """The grants of each replica, newest last. Each has fewer slots than the one before it, so there are at most
    `slots` + 1. Version 0: the gateway reported the slots, but they were not granted in this epoch.
    """
    totals: dict[tuple[ModelName, TenantName], Total] = {}
    """The last cumulative counts of this boot."""
    watched: bool = False
    """Whether its process or pod is watched, so that its end is observed. Otherwise nothing proves that it exists."""
    lapsed: bool = False
    """Whether it is unwatched and its last report has expired: other gateways get its slots."""
    gone: bool = False
    """Whether its process or pod is known not to exist. A watched gateway that does not report may still exist."""
    gone_version: int = 0
    """The version of Routes at which the gateway was found gone. A report with this version proves that it exists."""

    levels: dict[ModelName, tuple[Level, ...]] = {}
    """Derived from `report`: its demand per Model. Empty after the report has expired."""
    uses: dict[ReplicaId, ReplicaUse] = {}
    """Derived from `report`: its replicas by ID, without ages. They do not expire: after an expired report, the gateway
    may still use the replicas.
    """
    stalled: tuple[ReplicaId, ...] = ()
    """Derived from `report`: replicas from which its requests get no byte."""


class Used(StateRecord, frozen=True):
    """The highest device memory use observed for one replica of a Model."""

    spec_hash: str
    estimated_bytes: int
    """Estimate and hash are those of the measured Model; the measurement is not valid for another spec or file."""
    bytes: int
    served: bool = False
    """Whether the replica had served for a while when it was measured."""


class History(StateRecord, frozen=True):
    """The state of a Model apart from its replicas. It survives a restart."""

    starts_s: tuple[float, ...] = ()
    """Durations from first process start to ready, newest last, at most 32."""
    last_activity_s: float | None = None
    """The last arrival or end of a request at any gateway."""
    refused_cold_s: float | None = None
    """When a request was last rejected because the Model was cold, or an operator woke it: demand for one start."""
    woken_s: float | None = None
    """When an operator last woke it."""
    hold_until_s: float = 0.0
    """Until then a replica is kept for clients that were asked to retry (twice the Retry-After that was sent)."""
    tries: int = 0
    """The number of failed attempts in the current episode."""
    first_try_s: float | None = None
    """When the first process of the episode started."""
    retry_at_s: float = 0.0
    """The earliest time of the next attempt."""
    episodes: int = 0
    """The number of consecutive failed episodes: the back-off is 1, 2, 4 ... minutes."""
    refused_until_s: float = 0.0
    """After a failed episode, requests are rejected at once until then."""
    failure: str = ""
    failed_hash: str = ""
    """The hash of the Model that failed (`Model.spec_hash`). Empty: unknown."""
    served_until_s: float | None = None
    """When its last ready replica stopped accepting requests."""
    stopped_idle_s: float | None = None
    """When it was last scaled to zero for idleness. A start soon afterwards counts as a regret."""
    regrets: int = 0
    """The number of regrets. Each doubles the `auto` idle timeout, within its limits."""
    used: Used | None = None
    """None: not measured."""
    peaks: tuple[tuple[int, int], ...] = ()
    """(bucket, peak concurrent requests) in the last idle timeout. Scaling down requires that the peak still fits."""


NO_HISTORY = History()


class Fault(StateRecord, frozen=True):
    """Exceptions that a Model caused (`autoscaler.controller.fault_attribution`)."""

    reason: str
    """The last exception: type, location and message."""
    seen_s: float
    until_s: float
    """The end of the quarantine. 0: it is over, and the Model is on probation."""
    times: int = 1
    """Consecutive quarantines: they last 1, 2, 4 ... 30 minutes."""
    part: str = "driver"
    """The part that failed last, as in `FaultSeen`."""


class MpsServerFailure(StateRecord, frozen=True):
    """Replicas of one MPS server that ended together, presumably with it (`autoscaler.queries.device_health`)."""

    first_s: float
    """When the first of them ended."""
    replicas: frozenset[ReplicaId] = frozenset()
    times: int = 0
    """1 for the failure, plus the number of failed starts since then. 0: the server is not considered failed, because
    other replicas still run or only one ended.
    """
    until_s: float = 0.0
    """The time before which nothing is placed there."""


class SignalTotal(StateRecord, frozen=True):
    """One observation of a scaling signal of a Model."""

    total: float = 0.0
    """The sum over the ready replicas that reported it: a lower bound if others did not."""
    unknown: str = ""
    """Why the sum is incomplete, as a short sentence. Empty: it is complete."""


class Signal(StateRecord, frozen=True):
    """A scaling signal of a Model: its last observation, and its peak over one to two idle timeouts."""

    last: SignalTotal
    seen_s: float
    since_s: float
    """When the current peak period began. A period lasts one idle timeout."""
    peak: float
    """The maximum in the current period."""
    peak_before: float | None = None
    """The maximum in the period before. None: the signal was not observed then, or not all the time."""


class ModelLoad(StateRecord, frozen=True):
    """Demand of one Model, summed over the gateways whose report has not expired. The fold updates it."""

    waiting: int = 0
    running: int = 0
    oldest_s: float | None = None
    """The arrival of the request that has waited longest."""
    tenants: frozenset[TenantName] = frozenset()
    waiting_at: frozenset[GatewayId] = frozenset()
    """Gateways at which requests wait."""


NO_LOAD = ModelLoad()


class CordonTarget(NamedTuple):
    """A device or a node, as an operator names it."""

    kind: Literal["device", "node"]
    name: str


class Cordon(StateRecord, frozen=True):
    """An operator order: nothing new is placed on a device or node until it is removed, also after a restart."""

    place: CordonTarget
    node: str
    """The node of the target."""
    since_s: float
    drain: bool = False
    """Whether running replicas are moved away, too."""
    force: bool = False
    """Whether to stop replicas without waiting for a replacement and after a short time for running requests."""
    why: str = ""
    """The reason if the order is not an operator's: the target is interrupted (`autoscaler.capacity.interruptions`)."""
    soon: bool = False
    """Whether the interruption is in progress, with little time left for a replacement."""
    at_once: bool = False
    """Whether to drain without waiting for a replacement; running requests are still awaited."""


class StopOrder(StateRecord, frozen=True):
    """An operator stopped a Model. The order applies until its replicas have stopped; then requests start it again."""

    since_s: float
    force: bool = False


class NodeAgentStatus(StateRecord, frozen=True):
    """The last report of a node's agent."""

    report: NodeReport
    seen_s: float
    boots_before: tuple[str, ...] = ()
    """Boots of earlier agents, newest last, at most 8. Their late reports are ignored."""
    looked_s: float = 0.0
    """When the agent collected the report."""
    pods_before: tuple[PodDevices, ...] = ()
    """Pods no longer in the report, with their devices, newest last (`autoscaler.fold.agent_reports`)."""

    unhealthy: tuple[str, ...] = ()
    """Derived from `report`: the unhealthy devices."""


class Nodes(StateRecord, frozen=True):
    """The nodes: devices, resources, contents and limits of their use. Maps are never changed in place."""

    slices: dict[SliceId, Slice] = {}
    others: dict[str, int] = {}
    """`Slice.counted` -> the number of such slices that pods of others use. Which of them is unknown."""
    hosts: dict[NodeId, HostResources] = {}
    """The CPU and memory of nodes, and what pods of others leave. A node that is missing here has no limit."""
    agents: dict[str, NodeAgentStatus] = {}
    """Node name -> the agent's last report; `autoscaler.queries.agent_reports.is_report_fresh` checks its age."""
    copies: frozenset[Copy] = frozenset()
    images: dict[str, NodeImages] = {}
    """Node name -> the images that its kubelet and its agent report."""
    mounting: ClusterFacts | None = None
    """The facts that determine how pods mount weights. None: there are no pods, or the facts are unknown so far."""
    cordons: dict[CordonTarget, Cordon] = {}
    backoffs: dict[tuple[ModelName, NodeId], NodeBackoff] = {}
    mps_failures: dict[tuple[NodeId, DeviceId | None], MpsServerFailure] = {}
    """Keyed by the domain of one MPS server: a device, or (None) all devices of the node that MPS shares."""
    undisturbed: dict[ReplicaId, str] = {}
    """Replicas that PodDisruptionBudgets protect now -> names of the budgets. They are not moved."""
    cuttable: dict[str, MigNode] = {}
    """Node name -> a node whose GPUs may be repartitioned."""
    cutting: dict[str, Intent] = {}
    """Node name -> a repartitioning order that the node does not show yet."""


class Learned(StateRecord, frozen=True):
    """Measured, reported or computed facts about Models and their artifacts. Maps are never changed in place."""

    histories: dict[ModelName, History] = {}
    attained: dict[ModelName, dict[TenantName, float]] = {}
    """The service that each tenant got from a Model, in slot-seconds per weight: the virtual time of fair queueing."""
    signals: dict[ModelName, dict[SignalName, Signal]] = {}
    """The scaling signals that the Models' `scaling` names, as last observed."""
    obstacles: dict[ModelName, str] = {}
    """Models whose start would certainly fail, and why. Nothing is evicted for them."""
    faults: dict[ModelName, Fault] = {}
    """Models that recently caused an exception."""
    unbrought: dict[str, str] = {}
    """Artifacts that could not be fetched or inspected before a start, and why. It is retried."""
    looked: dict[WeightsRequest, WeightsReport] = {}
    """The results of inspections by agents of artifacts of the current Models."""
    lesson: PlacementValues | None = None
    """The learned value of free space. None: not learned yet."""


class Leadership(StateRecord, frozen=True):
    """Whether this process leads, and its progress in taking over from the previous leader."""

    documented: bool = False
    synced: bool = False
    """Whether documents were read and the driver has listed everything. Before that, nothing is sent or decided."""
    leads: bool = True
    """Whether this process leads. A follower folds all observations, but orders and grants nothing."""
    leading_since_s: float = 0.0
    handed_over: bool = False
    """Whether every gateway known at the hand-over has reported in this epoch or is dead: allocations may change."""


class World(StateRecord, frozen=True):
    """The snapshot. Maps are never changed in place. The last group is derived: a rebuild gives the same values."""

    epoch: int
    version: int = 0
    """The version of Routes. It increases with every change that gateways must receive."""
    leadership: Leadership = Leadership()
    unix_offset_s: float | None = None
    """Add it to a time of the monotonic clock to get seconds since 1970. None: the time of day is unknown."""
    installation: str = ""
    """Part of the names of everything that is started or ordered, so that installations can share a cluster."""
    settings: Settings = Settings()
    models: dict[ModelName, Model] = {}
    tenants: dict[TenantName, Tenant] = {}
    nodes: Nodes = Nodes()
    replicas: dict[ReplicaId, Replica] = {}
    gateways: dict[GatewayId, Gateway] = {}
    learned: Learned = Learned()
    capacity: Capacity = NO_CAPACITY
    """Available and ordered capacity. Empty: there is no provider."""
    rented: PaidCapacity = PaidCapacity()
    stops: dict[ModelName, StopOrder] = {}
    moved_s: float | None = None
    """When a replica was last started to make room by replacing another. None: never, under this leader."""
    degraded: str = ""
    """Exceptions that no Model explains, and where they were raised. Empty: none."""
    undivided: frozenset[ModelName] = frozenset()
    """Models with changes that `shares` must process. Folding its result (Granted) clears the set."""

    by_model: dict[ModelName, tuple[ReplicaId, ...]] = {}
    by_slice: dict[SliceId, tuple[ReplicaId, ...]] = {}
    loads: dict[ModelName, ModelLoad] = {}
