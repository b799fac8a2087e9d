"""The World: one immutable snapshot of everything a decision may depend on, and the observations that change it.

Owns the types only; `autoscaler.fold` makes the next World out of an old one and a batch of observations. Entities are
frozen and replaced whole. All times are seconds of one monotonic clock (`now_s`), given from outside.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NewType

import msgspec

from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName, Total
from autoscaler.model import Model
from autoscaler.ordered import Cordon, Node, Place, StopOrder
from autoscaler.settings import Settings
from autoscaler.states import ReplicaState
from autoscaler.taints import Shun, Taint
from autoscaler.tenant import Tenant

SliceId = NewType("SliceId", str)
DeviceId = NewType("DeviceId", str)
NodeId = NewType("NodeId", str)


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything in the World."""


class Isolation(IntEnum):
    """How well a Slice is kept apart from its neighbours, from worst to best."""

    NONE = 0
    MEMORY = 1
    HARDWARE = 2


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
    taints: tuple[Taint, ...] = ()
    """Of its node, but for those that every pod of ours tolerates."""
    closed: str = ""
    """Why nothing new may be put there now, as its driver sees it; empty: it is open."""


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


class Replica(Fact, frozen=True):
    """One running copy of a Model, from the decision to place it until its Slices are proven clean."""

    id: ReplicaId
    model: ModelName
    spec_hash: str
    intent: str
    """The idempotency key of the decision that made it."""
    slices: tuple[SliceId, ...]
    memory_bytes: int
    """Claimed on each of its Slices."""
    compute_percent: int = 0
    slots: int = 1
    state: ReplicaState = ReplicaState.PENDING
    since_s: float = 0.0
    """When it entered `state`."""
    created_s: float = 0.0
    wanted_s: float | None = None
    """Since when the Call that made it necessary was not served; None: no Call did."""
    started_s: float | None = None
    """When its first process started."""
    placing: Placing = Placing()
    ready_s: float | None = None
    """When it first became ready."""
    grown_s: float | None = None
    """When its memory was last seen to grow: the start lock of its Device ends `exclusive_seconds` after."""
    address: str = ""
    reason: str = ""
    """Why it was started, in a sentence."""
    found: bool = False
    """It was there, and not started by this leader: what it took to start is not known."""
    pod: PodRef | None = None
    """None: it is none, or its name is not known yet."""
    waits: str = ""
    """Why its first process has not started yet, as the driver sees it; `start.secondsMax` does not count that."""
    stranded_s: float | None = None
    """Since when a scheduler keeps it off its node; None: it does not (`autoscaler.stranded`)."""
    rank: int = 0
    """Of Replicas that can only go in order (a StatefulSet's) the highest goes first."""
    failure: str = ""
    drain: Drain | None = None
    proof: str = ""
    """The proof of clean: measured, unprepared, exited or assumed."""


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
    gone: bool = False
    """Proven dead (its process or pod does not exist), which silence alone is not."""
    gone_version: int = 0
    """Of the Routes made when it was: nobody dead acts on them."""

    levels: dict[ModelName, tuple[Level, ...]] = {}
    """Derived from `report`: its demand per Model; empty once the report has expired."""
    uses: dict[ReplicaId, ReplicaUse] = {}
    """Derived from `report`: its Replicas by id, less what merely ages. Never expires: expired is not dead."""


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
    served_until_s: float | None = None
    """When its last ready Replica stopped taking Calls."""
    stopped_idle_s: float | None = None
    """When it last went to zero for idleness; a start soon after is a regret."""
    regrets: int = 0
    """Each doubles the `auto` idle window, within its bounds."""
    peaks: tuple[tuple[int, int], ...] = ()
    """(bucket, most Calls at once in it) over the idle window: fewer Replicas only when the peak fits them."""


class Load(Fact, frozen=True):
    """Demand of one Model summed over gateways whose report has not expired (kept by the fold)."""

    waiting: int = 0
    running: int = 0
    oldest_s: float | None = None
    """When the Call that waits longest arrived."""
    tenants: frozenset[TenantName] = frozenset()
    waiting_at: frozenset[GatewayId] = frozenset()
    """Gateways where Calls wait."""


class World(Fact, frozen=True):
    """The snapshot. Maps are never changed in place; the last group is derived, and a full rebuild gives the same."""

    epoch: int
    version: int = 0
    """Of Routes: rises with every change that a gateway must learn."""
    documented: bool = False
    synced: bool = False
    """Documents were told; the driver has listed all that exists. No catalogue is told, or nothing decided, before."""
    leads: bool = True
    """This process leads. One that follows folds everything, and orders and grants nothing."""
    leading_since_s: float = 0.0
    handed_over: bool = False
    """Every gateway known at the hand-over has reported in this epoch or is proven dead: holds may change."""
    undivided: frozenset[ModelName] = frozenset()
    """Models in which something changed that `shares` must look at; folding its answer (Granted) empties it."""
    settings: Settings = Settings()
    models: dict[ModelName, Model] = {}
    tenants: dict[TenantName, Tenant] = {}
    slices: dict[SliceId, Slice] = {}
    others: dict[NodeId, int] = {}
    """Devices of each node that pods of others have; which ones is not known."""
    shuns: dict[tuple[ModelName, NodeId], Shun] = {}
    copies: frozenset[Copy] = frozenset()
    replicas: dict[ReplicaId, Replica] = {}
    gateways: dict[GatewayId, Gateway] = {}
    histories: dict[ModelName, History] = {}
    attained: dict[ModelName, dict[TenantName, float]] = {}
    """Service that each Tenant got from a Model, in slot-seconds per weight: the virtual time of fair queueing."""
    obstacles: dict[ModelName, str] = {}
    """Models whose start would surely fail, and why: nothing is displaced for them."""
    cordons: dict[Place, Cordon] = {}
    stops: dict[ModelName, StopOrder] = {}
    nodes: dict[str, Node] = {}
    """By name, what agents said; `autoscaler.nodes.fresh` tells what still counts."""

    by_model: dict[ModelName, tuple[ReplicaId, ...]] = {}
    by_slice: dict[SliceId, tuple[ReplicaId, ...]] = {}
    loads: dict[ModelName, Load] = {}


# --- observations: what happened; each is a level or a fact, never a wish ---------------------------------------------


class Seen(StrEnum):
    """What a driver sees of a Replica."""

    STARTING = "starting"
    """Its process exists and does not answer yet."""
    READY = "ready"
    UNREADY = "unready"
    """It was ready and its probes fail."""
    LEAVING = "leaving"
    """Somebody else ordered its end: it takes no new Calls, and nothing can keep it."""
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
    others: dict[NodeId, int] = {}


class StartSeen(Fact, frozen=True):
    """What stands in the way of a start of a Model, as a driver sees it without starting anything."""

    model: ModelName
    obstacle: str = ""
    """Why a start would surely fail, and what to do, in a sentence; empty: nothing is known to stand in its way."""


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
    reason: str = ""
    """Why it is so, where the driver knows: exit status, signal, a line of the engine's log."""
    rank: int = 0
    """See Replica."""
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
    """A gateway reported."""

    report: Report


class GatewaySeen(Fact, frozen=True):
    """A gateway process or pod exists, whether or not it reported."""

    gateway: GatewayId
    boot: str = ""
    """Its boot where known: a new one proves the old one dead."""


class GatewayGone(Fact, frozen=True):
    """A gateway process or pod is proven not to exist any more."""

    gateway: GatewayId
    boot: str = ""
    """Its boot where known: another one that has come since lives on."""


class HistorySeen(Fact, frozen=True):
    """What was remembered of a Model before this process started; to who follows: what the leader remembers."""

    model: ModelName
    history: History


class Granted(Fact, frozen=True):
    """`shares` moved holds: (gateway, Replica, new hold). The fold gives them the next version."""

    holds: tuple[tuple[GatewayId, ReplicaId, int], ...]


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
