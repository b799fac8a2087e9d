"""What Leases are called: by whom they are for, and not by which leader orders them. Pure.

Owns these names, so that two leaders who order at once order one, and the same name said again is the same Lease.

Capacity that could be added and that was: Offers, Leases and the orders about them, as the World keeps them.

Owns these types, and what brings them into the World. Which Offer is taken is
`autoscaler.provisioning.offer_selection`'s, what is ordered `autoscaler.provisioning.provisioner`', how it gets into
the World `autoscaler.fold.capacity`'s. Times are seconds, moments of the World's monotonic clock. A Lease is here from
the moment it is ordered, so that nobody else is ordered for the same lack; its name says for whom it is and not by
which leader, so that two leaders who order at once order one.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from typing import Literal, NamedTuple

from autoscaler.contract import ModelName
from autoscaler.state.device_claims import PendingDeviceClaim
from autoscaler.state.node_labels import Taint
from autoscaler.state.operator_orders import StateRecord

NAME_MAX = 40
_UNSAFE = re.compile(r"[^a-z0-9-]+")


def lease_intent_key(provider: str, owner: ModelName, number: int) -> str:
    """The idempotency key of a Lease: the `number`th that its owner has at once. With its provider: so several
    installations that share a cluster, or a fabric, and name their providers apart are in nobody's way.
    """
    return hashlib.sha256(f"capacity/{provider}/{owner}/{number}".encode()).hexdigest()[:10]


def lease_name(provider: str, owner: ModelName, number: int) -> str:
    """A name that everybody takes: RFC 1123, at most 63 characters."""
    stem = _UNSAFE.sub("-", owner.lower())[:NAME_MAX].strip("-")
    return "-".join(part for part in ("pilotlight", stem, lease_intent_key(provider, owner, number)) if part)


def next_lease_name(provider: str, owner: ModelName, taken: Collection[str]) -> str:
    """The first of its names that no Lease has."""
    return next(name for number in range(len(taken) + 1) if (name := lease_name(provider, owner, number)) not in taken)


Bought = Literal["owned", "on-demand", "spot", "reserved", "committed", "flex", "fabric"]
STARTS_MAX, GAPS_MAX = 32, 32
"""Of one kind of Offer so many are remembered, the newest."""
OFFERS_MAX, LISTED_MAX = 256, 4096
"""Of one provider; what is beyond is no answer."""
UNSEEN_S = 60.0
"""What its provider does not show by then may not have been ordered at all."""


class LeaseId(NamedTuple):
    """A Lease: names are a provider's own."""

    provider: str
    name: str


class OfferId(NamedTuple):
    """An Offer, as long as its provider calls it so."""

    provider: str
    name: str


class OfferKind(NamedTuple):
    """By what it is learnt how long Offers take. `node`: where Devices are attached; empty: nodes are added."""

    provider: str
    product: str
    node: str
    bought: Bought = "on-demand"
    """What becomes of spot nodes tells nothing of others of the same pool."""


class Offer(StateRecord, frozen=True):
    """Capacity that a provider says it could add, now and really: of what a pool has at most nothing is said."""

    provider: str
    name: str
    product: str
    memory_bytes: int
    """Of one Device."""
    node: str = ""
    """Devices are attached to it; empty: a node is added that has them."""
    devices_min: int = 1
    devices_max: int = 1
    """So many Devices can be had at once: as many as are free there, and as have a place."""
    pool: int | None = None
    """Of the product so many Devices are free for all nodes together; None: nobody says."""
    parts: int = 1
    """Each Device is offered so many times (time-slicing, MPS)."""
    device_bytes: int = 0
    """Of the Device that what is offered is a part of; 0: it is a Device."""
    shared: bool = False
    """Several Replicas may be on one Device, up to its memory."""
    labels: dict[str, str] = {}
    """Of a node that is there all that it has, if any is told; of one that is added those that are known ahead."""
    taints: tuple[Taint, ...] = ()
    bought: Bought = "on-demand"
    price_per_hour: float = 0.0
    """Of one Device; owned capacity costs nothing at the margin."""
    watts: float = 0.0
    """With as few Devices as it comes with: a node's own are among them."""
    many: int = 1
    """So many such can be had now, each of up to `devices_max`."""
    expected_s: float | None = 300.0
    """From the order until it can be used, while nothing is learnt; None: nobody can say (a queue)."""
    confidence: float = 0.9
    """The part of such orders that come at all, while nothing is learnt."""
    lasts_s: float | None = None
    """The longest that it may be held; None: as long as one likes."""
    queued: bool = False
    """Orders of it wait in a queue, for days where it must be: none is given up because it takes long, before it
    is granted."""
    room: bool = False
    """It is room on nodes that are there: no Device comes with it, and others are on its node."""

    @property
    def id(self) -> OfferId:
        """See OfferId."""
        return OfferId(self.provider, self.name)

    @property
    def kind(self) -> OfferKind:
        """See Kind."""
        return OfferKind(self.provider, self.product, self.node, self.bought)


class Marks(StateRecord, frozen=True):
    """What a pod has for who lent its node, so that it may use what was lent."""

    annotations: dict[str, str] = {}
    labels: dict[str, str] = {}
    gates: tuple[str, ...] = ()
    """It is not scheduled before somebody takes these away."""
    instead: str = ""
    """A pod of ours that kept its place, and goes when it is made; empty: none."""


NO_MARKS = Marks()


class Listed(StateRecord, frozen=True):
    """One Lease of ours, as its provider lists it now."""

    name: str
    offer: Offer
    """What it is of, as far as the provider still knows."""
    devices: int
    """So many were asked for."""
    phase: Literal["coming", "here", "leaving", "failed"] = "coming"
    committed: bool = False
    """It can no more be taken back without having come: it is paid for, or being made."""
    node: str = ""
    """Where it is; empty: not known yet."""
    device_ids: tuple[str, ...] = ()
    """The Devices that are there, as Slices name theirs. None: of a node that was added all of it, else nothing yet."""
    counted_from: int | None = None
    """Where a node's Devices are only counted, those above are the ones from this number on; None: nobody knows."""
    dry: bool = False
    """It waits for a quota that is used up: nobody can say for how long."""
    alone: bool = False
    """It only goes while nobody has any Device of its node: whose is which is not known there."""
    owner: ModelName = ModelName("")
    epoch: int = 0
    """Of the leader who ordered it."""
    ends_s: float | None = None
    marks: Marks = NO_MARKS
    """What pods have that are put there."""
    says: str = ""
    """What is wrong with it, or what it waits for, in words."""


class Lease(StateRecord, frozen=True):
    """Capacity that was ordered, from then until it is gone."""

    id: LeaseId
    offer: Offer
    devices: int
    owner: ModelName
    """For whose lack it was ordered, and who pays for what it stands idle; or for a claim
    (`autoscaler.state.device_claims`).
    """
    asked_s: float
    sent_s: float
    """When it was last ordered: an answer may be lost."""
    due_s: float
    """When nobody counts on it any more."""
    epoch: int = 0
    hedge: bool = False
    """It was ordered beside another for the same lack: whichever comes first stays."""
    found: bool = False
    """It was there, and not ordered by this leader."""
    listed: Listed | None = None
    """None: its provider has not shown it yet."""
    missing: int = 0
    """In so many lists one after the other it was not any more."""
    stray: bool = False
    """It came when nobody waited for it any more, or somebody else ordered it in our name."""
    here_s: float | None = None
    """When all of it could be used first."""
    in_use: bool = False
    """A Replica is on it, or others are where it is known which of its Devices they have."""
    used: bool = False
    """Somebody was."""
    idle_since_s: float | None = None
    """Since when none is; None: one is, or it is not here."""
    release_s: float | None = None
    """When it was last ordered to be given back; None: it was not."""
    releases: int = 0
    uncommitted: bool = False
    """It is only taken back if it has not come meanwhile."""
    forced: bool = False
    """That was ordered by force."""
    why: str = ""
    """Why it is given back, in words."""

    @property
    def given_up_s(self) -> float:
        """From when on nobody counts on it: it should have come, or its provider should have shown it."""
        return self.due_s if self.listed is not None else min(self.due_s, self.asked_s + UNSEEN_S)

    @property
    def ends_s(self) -> float | None:
        """When its provider takes it back; None: nobody says that it does."""
        return None if self.listed is None else self.listed.ends_s

    @property
    def failed(self) -> bool:
        """Its provider says so."""
        return self.listed is not None and self.listed.phase == "failed"

    def coming(self, now_s: float) -> bool:
        """Whether somebody may wait for it."""
        gone = self.failed or (self.listed is not None and self.listed.phase == "leaving")
        return self.here_s is None and not self.leaving and not gone and now_s < self.given_up_s

    @property
    def leaving(self) -> bool:
        """It was ordered to go."""
        return self.release_s is not None

    @property
    def committed(self) -> bool:
        """See Listed."""
        return self.listed is not None and (self.listed.committed or self.listed.phase == "here")


class LeadTimeStats(StateRecord, frozen=True):
    """What is remembered of one Kind of Offer; survives a restart."""

    took_s: tuple[float, ...] = ()
    """From the order until it could be used, newest last."""
    came: int = 0
    failed: int = 0
    """So many did and did not come; halved together, so that the newest count the most."""
    gaps_s: tuple[float, ...] = ()
    """How long such Leases stood idle until they were used again, newest last; infinite: they were given back."""
    idle_since_s: float | None = None
    """Since when the last that was given back had been idle; None: another was ordered since, or nobody knows."""


class BackedOffOffer(StateRecord, frozen=True):
    """An Offer that is not taken for a while: it was refused, or did not come."""

    until_s: float
    times: int
    why: str


class Group(StateRecord, frozen=True):
    """Machines that others make nodes of, as their MachineSet or MachineDeployment says it
    (`autoscaler.capacity.machine_groups`).
    """

    name: str
    """`MachineSet default/t4`."""
    wanted: int = 0
    ready: int = 0
    most: int = 0
    """Devices that each of its nodes can have; 0: it does not say."""
    labels: dict[str, str] = {}
    """Of its nodes, as far as it tells."""
    offer: Offer | None = None
    """What one of its nodes brings; None: nothing, or nobody says."""
    claimed: int = 0
    """Devices that pods of others wait for that could be there."""


class GroupGrowth(StateRecord, frozen=True):
    """A Group, and how many of its nodes are on their way since it was raised last."""

    group: Group
    coming: int
    shown: int
    since_s: float


class Capacity(StateRecord, frozen=True):
    """All of it."""

    providers: tuple[str, ...] = ()
    """Those that there are."""
    hedges: frozenset[str] = frozenset()
    """Those that may be started beside another for one lack."""
    offers: dict[str, tuple[Offer, ...]] = {}
    """By provider."""
    offered_s: dict[str, float] = {}
    """When it last said so."""
    listed_s: dict[str, float] = {}
    """By provider: when the newest list began that this leader has."""
    leases: dict[LeaseId, Lease] = {}
    learnt: dict[OfferKind, LeadTimeStats] = {}
    barred: dict[OfferId, BackedOffOffer] = {}
    trouble: dict[str, str] = {}
    """By provider: what is wrong with its list now, in words."""
    unanswered: dict[str, str] = {}
    """By provider: what was wrong when it was asked for its offers, or given an order."""
    closed: dict[str, str] = {}
    """By provider that offers nothing: why, where it says so."""
    awaited: tuple[PendingDeviceClaim, ...] = ()
    """What claims of anybody were given of what fabrics could attach, and wait for."""
    groups: dict[str, GroupGrowth] = {}
    """By name."""
    grouped: bool = False
    """They were looked at: one that is not among them is new."""

    def wrong(self) -> tuple[tuple[str, str], ...]:
        """What is wrong with providers, in words that follow their names; in the order of these."""
        none = {name: f"offers nothing: {why}" for name, why in self.closed.items()}
        return tuple(sorted({**none, **self.unanswered, **self.trouble}.items()))


NOTHING = Capacity()


class AcquireOrder(StateRecord, frozen=True):
    """A Lease is to be ordered. The same name again is the same Lease."""

    id: LeaseId
    offer: Offer
    devices: int
    owner: ModelName
    epoch: int
    due_s: float
    hedge: bool = False


class ReleaseOrder(StateRecord, frozen=True):
    """A Lease is to be given back, or taken back before it came. What is not there is success; what is used stays."""

    id: LeaseId
    epoch: int
    uncommitted: bool = False
    """Only if it has not come meanwhile."""
    force: bool = False
    """Though it is used, or its node does not let go of it: an operator drains by force what it is of, and it is stuck.
    The plan never says so of itself."""


# --- observations -----------------------------------------------------------------------------------------------------


class ProvidersSeen(StateRecord, frozen=True):
    """All providers, before any of them has said anything."""

    providers: tuple[str, ...]
    hedges: frozenset[str] = frozenset()


class OffersSeen(StateRecord, frozen=True):
    """All Offers of one provider, as they are now."""

    provider: str
    offers: tuple[Offer, ...]
    closed: str = ""
    """Why there are none, where it says so."""


class LeasesSeen(StateRecord, frozen=True):
    """All Leases of ours that one provider has, whoever ordered them."""

    provider: str
    leases: tuple[Listed, ...]
    began_s: float
    """When it was asked: what was ordered later need not be in it."""


class GroupsSeen(StateRecord, frozen=True):
    """All groups of machines, whoever they are of."""

    groups: tuple[Group, ...]


class LeaseRefused(StateRecord, frozen=True):
    """A provider will not: it has none, a quota is used up, or the order is wrong."""

    id: LeaseId
    reason: str


class ProviderTroubled(StateRecord, frozen=True):
    """It gave no answer, or one that is none. That ends with its next list; where its offers or an order were at fault,
    with its next offers.
    """

    provider: str
    says: str
    listing: bool


class LearntSeen(StateRecord, frozen=True):
    """What the leader before us had learnt."""

    learnt: dict[OfferKind, LeadTimeStats]
