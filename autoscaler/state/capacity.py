"""Capacity orders and offers, as the `World` keeps them, and the observations about them. Pure.

`autoscaler.provisioning.offer_selection` selects offers, `autoscaler.provisioning.provisioner` decides what to order,
and `autoscaler.fold.capacity` folds the observations. Times are in seconds of the `World`'s monotonic clock. An order
(`Lease`) exists from the moment at which it is placed, so that nothing else is ordered for the same replica. Its name
depends on its owner and not on the leader, so that two leaders that order at the same time place one order.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from autoscaler.contract import ModelName
from autoscaler.state import StateRecord
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.pending_claims import PendingDeviceClaim

NAME_MAX = 40
_UNSAFE = re.compile(r"[^a-z0-9-]+")


def lease_intent_key(provider: str, owner: ModelName, number: int) -> str:
    """Return the idempotency key of a capacity order: the `number`th concurrent order of its owner. The provider's name
    is part of it, so that installations with different provider names can share a cluster or fabric.
    """
    return hashlib.sha256(f"capacity/{provider}/{owner}/{number}".encode()).hexdigest()[:10]


def lease_name(provider: str, owner: ModelName, number: int) -> str:
    """Return a name of an order that every provider accepts: RFC 1123, at most 63 characters."""
    stem = _UNSAFE.sub("-", owner.lower())[:NAME_MAX].strip("-")
    return "-".join(part for part in ("pilotlight", stem, lease_intent_key(provider, owner, number)) if part)


def next_lease_name(provider: str, owner: ModelName, taken: Collection[str]) -> str:
    """Return the first name of the owner's orders that is not in use."""
    return next(name for number in range(len(taken) + 1) if (name := lease_name(provider, owner, number)) not in taken)


Bought = Literal["owned", "on-demand", "spot", "reserved", "committed", "flex", "fabric"]
STARTS_MAX, GAPS_MAX = 32, 32
"""The number of samples that are kept per kind of offer; the newest are kept."""
OFFERS_MAX, LISTED_MAX = 256, 4096
"""The maximum number of offers and listed orders of one provider. A longer list is rejected."""
UNSEEN_S = 60.0
"""The time after which an order that its provider does not show may not have been placed, in seconds."""


class LeaseId(NamedTuple):
    """The ID of a capacity order. Names are unique per provider."""

    provider: str
    name: str


class OfferId(NamedTuple):
    """The ID of an offer. It is valid as long as its provider has an offer with this name."""

    provider: str
    name: str


class OfferKind(NamedTuple):
    """The kind of an offer, by which lead times are measured.
    `node`: devices are attached to this node; empty: nodes are added.
    """

    provider: str
    product: str
    node: str
    bought: Bought = "on-demand"
    """Part of the kind, because interruptions of spot nodes do not apply to other nodes of the same pool."""


class Offer(StateRecord, frozen=True):
    """Capacity that a provider can add now. The theoretical maximum of a pool is not an offer."""

    provider: str
    name: str
    product: str
    memory_bytes: int
    """The memory of one device."""
    node: str = ""
    """The node to which devices are attached. Empty: a node with the devices is added."""
    devices_min: int = 1
    devices_max: int = 1
    """The maximum number of devices available at the same time: unused devices for which there is a slot."""
    pool: int | None = None
    """The number of unused devices of the product for all nodes together. None: unknown."""
    parts: int = 1
    """How many times each device is offered (time-slicing, MPS)."""
    device_bytes: int = 0
    """The memory of the device that the offered device is a part of. 0: it is a whole device."""
    shared: bool = False
    """Whether several replicas may share one device, up to its memory."""
    labels: dict[str, str] = {}
    """Labels: those of an existing node, if known; of a new node those that are known in advance."""
    taints: tuple[Taint, ...] = ()
    bought: Bought = "on-demand"
    price_per_hour: float = 0.0
    """The price per device. Owned capacity has no marginal cost."""
    watts: float = 0.0
    """The power with the minimum number of devices, including the node."""
    many: int = 1
    """The number of such offers available now, each with up to `devices_max` devices."""
    expected_s: float | None = 300.0
    """Seconds from the order to usable capacity, until lead times are measured. None: unknown (a queue)."""
    confidence: float = 0.9
    """The fraction of such orders that are delivered, until it is measured."""
    lasts_s: float | None = None
    """The maximum time for which the capacity can be held, in seconds. None: unlimited."""
    queued: bool = False
    """Whether orders wait in a queue, maybe for days. A long wait before admission is no reason to cancel an order."""
    room: bool = False
    """Whether the capacity is a part of existing nodes: no device is added, and other pods run on the node."""

    @property
    def id(self) -> OfferId:
        """The ID of the offer."""
        return OfferId(self.provider, self.name)

    @property
    def kind(self) -> OfferKind:
        """The kind of the offer."""
        return OfferKind(self.provider, self.product, self.node, self.bought)


class Marks(StateRecord, frozen=True):
    """Marks that a pod needs in order to use provided capacity."""

    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    gates: tuple[str, ...] = ()
    """Scheduling gates: the pod is not scheduled before a controller removes them."""
    instead: str = ""
    """The placeholder pod that reserves its place and is deleted when the pod is created. Empty: none."""


NO_MARKS = Marks()


class Listed(StateRecord, frozen=True):
    """A capacity order as its provider lists it now."""

    name: str
    offer: Offer
    """The offer, as far as the provider still knows it."""
    devices: int
    """The number of ordered devices."""
    phase: Literal["coming", "here", "leaving", "failed"] = "coming"
    committed: bool = False
    """Whether the order cannot be cancelled before it arrives: it is paid for, or being created."""
    node: str = ""
    """The node of the capacity. Empty: unknown so far."""
    device_ids: tuple[str, ...] = ()
    """The delivered devices, as slices name them. None: all devices of an added node; otherwise nothing so far."""
    counted_from: int | None = None
    """If the devices of a node are only counted: the number of the first device of this order. None: unknown."""
    dry: bool = False
    """Whether the order waits for quota, so that the time is unknown."""
    alone: bool = False
    """Whether the capacity is removed only while no device of its node is in use, because their users are unknown."""
    owner: ModelName = ModelName("")
    epoch: int = 0
    """The epoch of the leader that placed the order."""
    ends_s: float | None = None
    marks: Marks = NO_MARKS
    """Marks for pods that are placed on the capacity."""
    says: str = ""
    """A problem of the order, or what it waits for, as text."""


class Lease(StateRecord, frozen=True):
    """A capacity order and its capacity, from the order until the capacity is removed."""

    id: LeaseId
    offer: Offer
    devices: int
    owner: ModelName
    """The Model for which it was ordered and to which idle time is charged; or a claim
    (`autoscaler.state.pending_claims`).
    """
    asked_s: float
    sent_s: float
    """When the order was last sent. It is repeated because a response may be lost."""
    due_s: float
    """When the order counts as overdue."""
    epoch: int = 0
    hedge: bool = False
    """Whether it is a second order for the same replica. The order that arrives first is kept."""
    found: bool = False
    """Whether it existed before this leader started."""
    listed: Listed | None = None
    """The provider's entry. None: the provider has not listed the order yet."""
    missing: int = 0
    """The number of consecutive lists without the order."""
    stray: bool = False
    """Whether nothing waited for it when it arrived, or another program ordered it under this name."""
    here_s: float | None = None
    """The time at which all of its capacity first became usable."""
    in_use: bool = False
    """Whether a replica uses it, or other pods do where their devices are known."""
    used: bool = False
    """Whether it has ever been in use."""
    idle_since_s: float | None = None
    """The time at which it became idle. None: it is in use or has not arrived."""
    release_s: float | None = None
    """The time at which its release was last ordered. None: never."""
    releases: int = 0
    uncommitted: bool = False
    """Whether the release is canceled if the capacity arrives in the meantime."""
    forced: bool = False
    """Whether the release was forced."""
    why: str = ""
    """The reason for the release, as text."""

    @property
    def given_up_s(self) -> float:
        """The time from which nothing waits for the order: it is overdue, or the provider did not list it in time."""
        return self.due_s if self.listed is not None else min(self.due_s, self.asked_s + UNSEEN_S)

    @property
    def ends_s(self) -> float | None:
        """The time at which the provider withdraws the capacity. None: unknown."""
        return None if self.listed is None else self.listed.ends_s

    @property
    def failed(self) -> bool:
        """Whether the provider reports that the order failed."""
        return self.listed is not None and self.listed.phase == "failed"

    def coming(self, now_s: float) -> bool:
        """Return whether replicas may wait for the order."""
        gone = self.failed or (self.listed is not None and self.listed.phase == "leaving")
        return self.here_s is None and not self.leaving and not gone and now_s < self.given_up_s

    @property
    def leaving(self) -> bool:
        """Whether the release was ordered."""
        return self.release_s is not None

    @property
    def committed(self) -> bool:
        """Whether the order can no longer be cancelled; see Listed."""
        return self.listed is not None and (self.listed.committed or self.listed.phase == "here")


class LeadTimeStats(StateRecord, frozen=True):
    """Lead times of one kind of offer. They are kept over a restart."""

    took_s: tuple[float, ...] = ()
    """Times from the order until the capacity was usable, newest last."""
    came: int = 0
    failed: int = 0
    """The numbers of delivered and failed orders. Both are halved together, so that recent orders weigh more."""
    gaps_s: tuple[float, ...] = ()
    """How long such capacity was idle before it was used again, newest last. Infinite: it was released."""
    idle_since_s: float | None = None
    """The start of the idle time of the last released capacity. None: another order followed, or it is unknown."""


class BackedOffOffer(StateRecord, frozen=True):
    """An offer that is not used for a while, because an order was rejected or not delivered."""

    until_s: float
    times: int
    why: str


class Group(StateRecord, frozen=True):
    """A MachineSet or MachineDeployment whose nodes other controllers create.
    See `autoscaler.capacity.group_machines_in_flight`.
    """

    name: str
    """A name such as `MachineSet default/t4`."""
    wanted: int = 0
    ready: int = 0
    most: int = 0
    """The maximum number of devices per node. 0: not specified."""
    labels: dict[str, str] = {}
    """Labels of its nodes, as far as the object specifies them."""
    offer: Offer | None = None
    """The capacity of one of its nodes. None: no devices, or unknown."""
    claimed: int = 0
    """The number of devices for which Pending pods of other controllers wait on such nodes."""


class GroupGrowth(StateRecord, frozen=True):
    """A group, and the number of its nodes that are being created since it was last scaled up."""

    group: Group
    coming: int
    shown: int
    since_s: float


class Capacity(StateRecord, frozen=True):
    """The capacity providers, their offers, and all capacity orders."""

    providers: tuple[str, ...] = ()
    """The configured providers."""
    hedges: frozenset[str] = frozenset()
    """Providers that may be used for a second order for the same replica."""
    offers: dict[str, tuple[Offer, ...]] = {}
    """Offers by provider."""
    offered_s: dict[str, float] = {}
    """When each provider last reported its offers."""
    listed_s: dict[str, float] = {}
    """Provider -> when the newest list of orders that this leader has was started."""
    leases: dict[LeaseId, Lease] = {}
    learnt: dict[OfferKind, LeadTimeStats] = {}
    barred: dict[OfferId, BackedOffOffer] = {}
    trouble: dict[str, str] = {}
    """Provider -> the current problem with its list of orders, as text."""
    unanswered: dict[str, str] = {}
    """Provider -> the last problem with its offers or with an order, as text."""
    closed: dict[str, str] = {}
    """Provider without offers -> the reason, if it reports one."""
    awaited: tuple[PendingDeviceClaim, ...] = ()
    """ResourceClaims that were allocated attachable fabric devices and wait for them."""
    groups: dict[str, GroupGrowth] = {}
    """Machine groups by name."""
    grouped: bool = False
    """Whether machine groups were listed, so that a group not among them is new."""

    def wrong(self) -> tuple[tuple[str, str], ...]:
        """Return problems of providers, as text that follows the provider's name, ordered by provider."""
        none = {name: f"offers nothing: {why}" for name, why in self.closed.items()}
        return tuple(sorted({**none, **self.unanswered, **self.trouble}.items()))


NOTHING = Capacity()


class AcquireOrder(StateRecord, frozen=True):
    """An order to acquire capacity. The name identifies the order, so a repetition is the same order."""

    id: LeaseId
    offer: Offer
    devices: int
    owner: ModelName
    epoch: int
    due_s: float
    hedge: bool = False


class ReleaseOrder(StateRecord, frozen=True):
    """An order to release capacity or to cancel an order. It succeeds if the capacity does not exist; capacity in use
    is kept.
    """

    id: LeaseId
    epoch: int
    uncommitted: bool = False
    """Whether to release it only if it has not arrived meanwhile."""
    force: bool = False
    """Whether to release it although it is in use or its node does not release it. An operator forced the drain of its
    place, and it is stuck. The planner never sets this itself.
    """


# --- observations -----------------------------------------------------------------------------------------------------


class ProvidersSeen(StateRecord, frozen=True):
    """The configured providers, before any of them has reported."""

    providers: tuple[str, ...]
    hedges: frozenset[str] = frozenset()


class OffersSeen(StateRecord, frozen=True):
    """All current offers of one provider."""

    provider: str
    offers: tuple[Offer, ...]
    closed: str = ""
    """The reason why there are none, if the provider reports one."""


class LeasesSeen(StateRecord, frozen=True):
    """All orders of this installation that a provider has, regardless of the leader that placed them."""

    provider: str
    leases: tuple[Listed, ...]
    began_s: float
    """When the request was sent. Later orders may be missing."""


class GroupsSeen(StateRecord, frozen=True):
    """All machine groups, regardless of their owner."""

    groups: tuple[Group, ...]


class LeaseRefused(StateRecord, frozen=True):
    """A provider rejected an order: no capacity, no quota, or an invalid order."""

    id: LeaseId
    reason: str


class ProviderTroubled(StateRecord, frozen=True):
    """A provider did not respond, or with an invalid response.

    The problem ends with its next list of orders; a problem with offers or an order ends with its next offers.
    """

    provider: str
    says: str
    listing: bool


class LearntSeen(StateRecord, frozen=True):
    """Lead times that the previous leader measured."""

    learnt: dict[OfferKind, LeadTimeStats]
