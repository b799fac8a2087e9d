"""Decides which capacity to order for placement requests that have no room. Pure.

Invariant: at most one order is in flight per unplaced replica, hedges excepted. A request that fits on an order in
flight, or on machines that others add, waits for it. For the remaining requests, the best offer
(`autoscaler.provisioning.offer_selection`) is ordered with the minimum sufficient number of devices; other requests
that fit on it wait for it, too. An order that is queued for longer than usual is kept, but no request waits for it, and
other offers are ordered in addition.

While a provider has not listed its orders, nothing is ordered from any provider (for at most a minute).
`autoscaler.provisioning.release` decides what is released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from math import inf
from typing import NamedTuple

from autoscaler.capacity.group_machines_in_flight import list_group_leases
from autoscaler.capacity.lead_times import Expected, due_after_s
from autoscaler.capacity.remaining_offers import SILENT, compute_remaining_offer, find_offer_backoff, has_current_offers
from autoscaler.contract import ModelName
from autoscaler.demand.schedule import STARTS
from autoscaler.placement.capacity_simulation import (
    SimulationCache,
    SimulationContext,
    compute_min_devices,
    match_requests_to_orders,
)
from autoscaler.placement.model.types import EvictionLevel, PackResult, PlacementRequest, Unplaced
from autoscaler.placement.packer import request_sort_key
from autoscaler.provisioning.fabric_device_claims import commit_claim
from autoscaler.provisioning.headroom import (
    NONE,
    compute_headroom,
    compute_order_devices,
    find_cheapest_offer,
    headroom_owner,
)
from autoscaler.provisioning.offer_selection import (
    Chosen,
    RatedOffer,
    TrialBudget,
    build_offer_filter,
    choose_sorted_offer,
    compute_deadline_s,
    estimate_delivery,
    is_order_too_slow,
    normalize_request,
    rank_offers_lazily,
    rate_offer,
    remaining_delivery_s,
)
from autoscaler.provisioning.release import plan_releases
from autoscaler.provisioning.unplaceable_models import build_future_fit_check
from autoscaler.state.actions import AcquireLease, ReleaseLease
from autoscaler.state.capacity import AcquireOrder, Lease, LeaseId, Offer, OfferId, next_lease_name
from autoscaler.state.pending_claims import is_claim_owner
from autoscaler.state.world import NO_LOAD, Replica
from autoscaler.text import format_duration

WANTS_MAX = 512
"""Maximum requests considered in one plan, in serving order; later plans consider the others."""
KINDS_MAX = 64
"""Maximum kinds of requests for which offers are sought in one plan."""
ORDERS_MAX = 8
"""Maximum orders in one plan; the next plan orders more."""
UNLISTED_S = 60.0
"""How long a new leader orders nothing while a provider has not listed its orders, which may be in flight."""
REORDER_S = 15.0
"""If a provider's list that began this many seconds after an order does not show it, the order was lost. It is repeated
under the same name.
"""


class ProvisioningResult(NamedTuple):
    """Orders and releases, unplaced requests with updated reasons, and when these change without a new observation."""

    actions: tuple[AcquireLease | ReleaseLease, ...]
    unmet: tuple[Unplaced, ...]
    next_s: float = inf


def provision_capacity(packing: PackResult, starts: Iterable[Replica], ground: SimulationContext) -> ProvisioningResult:
    """Plan orders and releases. `packing`: the packer's result; `starts`: replicas that the plan starts."""
    capacity = ground.world.capacity
    if not (capacity.providers or capacity.offers or capacity.leases):
        return ProvisioningResult((), packing.unmet)
    taken = {id for one in packing.placements for id in one.slices}
    taken |= {id for one in packing.unmet if one.promised for id in one.slices}
    taken |= {id for one in starts for id in one.resources.slices}
    return Provisioner(ground._replace(taken=frozenset(taken)), packing.unmet).plan()


def evaluate_offers(ground: SimulationContext, want: PlacementRequest) -> list[tuple[Offer, RatedOffer | str]]:
    """Rate every offer for an unplaced request: a RatedOffer, or why it cannot be used now. For explanations."""
    return [*Provisioner(ground, [Unplaced(want, "")]).judged(want)]


class Provisioner:
    """Plans the orders and releases of one plan, in stages (`plan`)."""

    def __init__(self, ground: SimulationContext, unmet: Sequence[Unplaced]) -> None:
        self.ground, self.unmet = ground._replace(answers=SimulationCache()), unmet
        self.world, self.now_s, self.capacity = ground.world, ground.now_s, ground.world.capacity
        self.next_s = inf
        ground = self.ground
        self.others = {one.id: one for one in list_group_leases(self.world, self.now_s)}
        """Machines that other controllers add, represented as orders; these are never released."""
        there = (*self.capacity.leases.values(), *self.others.values())
        coming = [one for one in there if one.coming(self.now_s) and not is_claim_owner(one.owner)]
        coming.sort(key=lambda one: (one.asked_s + self._expected(one.offer).p50_s, one.id))
        lacking = [one.want for one in unmet if not one.promised and one.want.urgency.force > EvictionLevel.NONE]
        fits = build_offer_filter(self.world, [one.offer for one in coming])
        able = sorted(filter(fits, lacking), key=request_sort_key)
        self.wants, self.later_wants = able[:WANTS_MAX], {one.model for one in able[WANTS_MAX:]}
        self.vain = [one for one in lacking if not fits(one)]
        queued = {one.id for one in coming if self._stands(one)}
        due = [one for one in coming if one.id not in queued]
        self.queued = self._match_queued_orders([one for one in coming if one.id in queued])
        self.hedged = match_requests_to_orders(ground, self.wants, [one for one in due if one.hedge])
        self.got = {
            **self.hedged,
            **match_requests_to_orders(ground, self.wants, [one for one in due if not one.hedge]),
        }
        self.orders: list[AcquireLease] = []
        self.leases: dict[LeaseId, Lease] = dict(self.capacity.leases)
        self._of: dict[OfferId, list[Lease]] = {}
        """Orders by offer; offers from one pool for all nodes share an entry."""
        for lease in self.leases.values():
            self._of.setdefault(_whose(lease.offer), []).append(lease)
        self.pledged: set[LeaseId] = set()
        """Orders that claims wait for."""
        self.said: dict[PlacementRequest, str] = {}
        self.asked: set[PlacementRequest] = set()
        """Requests for which this plan placed an order whose delivery time is unknown."""
        self.trials = TrialBudget(self.ground, (one for one in self.wants if one not in self.got))
        self.sought: dict[tuple[PlacementRequest, bool], bool] = {}
        """By kind of request: whether there was an offer for the last request."""
        self.room = NONE
        """Capacity that is kept free ahead of need."""
        self.asks = False
        """Some providers' orders are unknown: nothing is ordered, and no request is reported as unplaceable."""

    def later(self, at_s: float) -> None:
        """Record that the result changes at `at_s` even without a new observation."""
        if self.now_s < at_s < self.next_s:
            self.next_s = at_s

    def _expected(self, offer: Offer) -> Expected:
        return estimate_delivery(self.capacity, offer)

    def _stands(self, lease: Lease) -> bool:
        if lease.offer.queued:
            self.later(lease.asked_s + self._expected(lease.offer).p95_s)
        return is_order_too_slow(self.world, lease, self._start_s(lease.owner), self.now_s)

    def _left_s(self, lease: Lease) -> float:
        return remaining_delivery_s(self.capacity, lease, self.now_s)

    def _start_s(self, model: ModelName) -> float:
        return self.ground.restart_costs.restart_s(model)

    def _match_queued_orders(self, queued: Sequence[Lease]) -> dict[PlacementRequest, LeaseId]:
        """Match queued orders to requests. The owner of an order precedes other requests, which order elsewhere;
        otherwise the owner would queue another order.
        """
        owners, priorities = {one.owner for one in queued}, [one.urgency.priority for one in self.wants]
        above = max(priorities, default=0) - min(priorities, default=0) + 1
        wants = dict[PlacementRequest, PlacementRequest]()
        for one in self.wants:
            priority = one.urgency.priority + above * (one.model in owners)
            wants[one._replace(urgency=one.urgency._replace(priority=priority))] = one
        return {
            wants[one]: lease
            for one, lease in match_requests_to_orders(self.ground, sorted(wants, key=request_sort_key), queued).items()
        }

    def plan(self) -> ProvisioningResult:
        """Run the stages: order for claims, requests and headroom; release unneeded orders; explain."""
        self._note_claim_orders()
        self.asks = not self._are_orders_known()
        if not self.asks:
            self._repeat_lost_orders()
            self._order_for_claims()
            self._order_for_requests()
        self._order_headroom()
        released = [*plan_releases(self.ground, self._wanted(), self.room.kept, self.later)]
        gone = {one.order.id for one in released}
        orders = (one for one in self.orders if one.order.id not in gone)
        return ProvisioningResult((*released, *orders), tuple(map(self._explain, self.unmet)), self.next_s)

    # --- stages -------------------------------------------------------------------------------------------------------

    def _note_claim_orders(self) -> None:
        pledges = [commit_claim(one, self.world, self.leases.values(), self.now_s) for one in self.capacity.awaited]
        self.pledged = {one.lease.id for one in pledges if one.lease is not None}

    def _are_orders_known(self) -> bool:
        """Whether every provider has listed its orders, or has had UNLISTED_S to do so."""
        silent = set(self.capacity.providers) - self.capacity.listed_s.keys()
        until_s = self.world.leadership.leading_since_s + UNLISTED_S
        if silent:
            self.later(until_s)
        return not silent or self.now_s >= until_s

    def _repeat_lost_orders(self) -> None:
        for lease in sorted(self.capacity.leases.values(), key=lambda one: one.id):
            if self._lost(lease):
                again = AcquireOrder(
                    id=lease.id, offer=lease.offer, devices=lease.devices, owner=lease.owner, epoch=self.world.epoch,
                    due_s=lease.due_s, hedge=lease.hedge,
                )  # fmt: skip
                self.orders.append(
                    AcquireLease(order=again, reason="its provider does not list it: the order may be lost")
                )

    def _order_for_claims(self) -> None:
        """Order for the claims that the scheduler allocated; they precede unplaced requests."""
        for awaited in self.capacity.awaited:
            one = commit_claim(awaited, self.world, self.leases.values(), self.now_s)
            if one.offer is not None and len(self.orders) < ORDERS_MAX:
                reason = f"claim {awaited.namespace}/{awaited.name} was allocated an attachable device"
                self._make(awaited.owner, one.offer, len(awaited.devices), self._expected(one.offer), reason)

    def _order_for_requests(self) -> None:
        if self.vain:
            self.said |= dict.fromkeys(self.vain, self._none())
        for want in self.wants:
            if want not in self.got and len(self.orders) < ORDERS_MAX:
                self._seek(want)

    def _order_headroom(self) -> None:
        """Place one order at each provider with too little headroom; the next plan orders the rest."""
        self.room = compute_headroom(self.ground, self.leases.values(), self._wanted())
        for provider, lacks in () if self.asks else self.room.lacking.items():
            rests = map(self._left, self.capacity.offers.get(provider, ()))
            offer = find_cheapest_offer(self.world, [one for one in rests if not isinstance(one, str)], lacks)
            if offer is not None:
                many = compute_order_devices(offer, lacks)
                reason = f"{lacks} more free devices are needed as headroom"
                made = self._make(headroom_owner(provider), offer, many, self._expected(offer), reason)
                self.room = self.room._replace(kept=self.room.kept | {made.id})

    # --- orders -------------------------------------------------------------------------------------------------------

    def _seek(self, want: PlacementRequest) -> None:
        """Order an offer, unless this plan found none for this kind: availability only decreases in a plan."""
        kind = normalize_request(want), want in self.queued
        if not self.sought.get(kind, len(self.sought) < KINDS_MAX):
            self.said[want] = self._none()
            return
        # If requests wait, a second order (a hedge) may be placed unless the first is sure to arrive in time.
        is_awaited = self.world.loads.get(want.model, NO_LOAD).waiting > 0
        hedges = self.capacity.hedges if want not in self.hedged and is_awaited else frozenset()
        chosen = choose_sorted_offer(self._rungs(want), hedges)
        self.sought[kind] = chosen is not None
        if chosen is not None and chosen.rung.sure and not self._timely(want, chosen.rung):
            self.said[want] = f"it is needed later; capacity from {chosen.rung.offer.provider} will be ordered in time"
            chosen = choose_sorted_offer(self._rungs(want, endless=True))
        elif chosen is None:
            self.said[want] = self._none()
        if chosen is not None:
            self._take(want, chosen)

    def _timely(self, want: PlacementRequest, one: RatedOffer) -> bool:
        """Whether to order now for a need that begins later; capacity that arrives early costs while idle."""
        takes_s = one.expected.p95_s
        from_s = -inf if takes_s == inf else want.urgency.begins_s - takes_s - STARTS * self._start_s(want.model)
        self.later(from_s)
        return self.now_s >= from_s

    def _lost(self, lease: Lease) -> bool:
        due_s = lease.sent_s + REORDER_S
        waits = lease.listed is None and lease.coming(self.now_s)
        return waits and self.capacity.listed_s.get(lease.id.provider, -inf) >= due_s

    def judged(self, want: PlacementRequest) -> Iterator[tuple[Offer, RatedOffer | str]]:
        """Rate every offer: a RatedOffer, or why it cannot be used now."""
        deadline_s = compute_deadline_s(self.world, want.model, self.now_s) - self.now_s
        for offer, rest in self._open(want):
            if isinstance(rest, str):
                yield offer, rest
            else:
                found = self._tried_rung(
                    want, rest, self._rung(want, offer, compute_min_devices(want, rest), deadline_s)
                )
                yield offer, found or "insufficient room on this offer"

    def _rungs(self, want: PlacementRequest, *, endless: bool = False) -> Iterator[RatedOffer]:
        """Usable offers, best first. `endless`: only those with an unknown delivery time."""
        deadline_s = compute_deadline_s(self.world, want.model, self.now_s) - self.now_s
        found = ((offer, rest) for offer, rest in self._open(want) if not isinstance(rest, str))
        open_ = {offer.id: (offer, rest) for offer, rest in found if not endless or self._expected(offer).p50_s == inf}
        rungs = (self._rung(want, offer, compute_min_devices(want, rest), deadline_s) for offer, rest in open_.values())
        return rank_offers_lazily(rungs, lambda one: self._tried_rung(want, open_[one.offer.id][1], one))

    def _tried_rung(self, want: PlacementRequest, rest: Offer, one: RatedOffer) -> RatedOffer | None:
        """The offer with the minimum sufficient number of devices; None if no number suffices."""
        many = self.trials.devices(want, rest)
        return None if many is None else one._replace(devices=many)

    def _rung(self, want: PlacementRequest, offer: Offer, devices: int, deadline_s: float) -> RatedOffer:
        return rate_offer(
            offer, devices, self._expected(offer), deadline_s, self.ground.restart_costs.restart_s(want.model)
        )

    def _open(self, want: PlacementRequest) -> Iterator[tuple[Offer, Offer | str]]:
        """Every offer, with its remaining part or why nothing remains."""
        for provider in sorted(self.capacity.offers):
            for offer in sorted(self.capacity.offers[provider], key=lambda one: one.name):
                if want in self.queued and (offer.queued or self._expected(offer).p50_s == inf):
                    yield offer, "this replica already has an order in a queue"
                else:
                    yield offer, self._left(offer)

    def _left(self, offer: Offer) -> Offer | str:
        """The offer minus the orders placed since it was read, or why nothing remains."""
        if not has_current_offers(self.capacity, offer.provider, self.now_s):
            return SILENT
        if (bar := find_offer_backoff(self.capacity, offer.id, self.now_s)) is not None:
            self.later(bar.until_s)
        return compute_remaining_offer(self.capacity, self._of.get(_whose(offer), ()), offer, self.now_s)

    def _take(self, want: PlacementRequest, chosen: Chosen) -> None:
        for one, hedge in ((chosen.rung, False), (chosen.hedge, True)):
            if one is None:
                continue
            reason = f"{want.reason}: {one.says()}"
            made = self._make(want.model, one.offer, one.devices, one.expected, reason, hedge=hedge)
            if one.expected.p50_s == inf:
                self.said[want] = f"ordered from {one.offer.provider}, delivery time unknown"
                self.asked.add(want)
            elif not hedge:
                self.got[want] = made.id
                rest = [each for each in self.wants if each not in self.got]
                self.got |= match_requests_to_orders(self.ground, [want, *rest], [made])

    def _make(
        self, owner: ModelName, offer: Offer, devices: int, takes: Expected, reason: str, *, hedge: bool = False
    ) -> Lease:
        """Record a new order."""
        whose = f"{self.world.installation}/{offer.provider}" if self.world.installation else offer.provider
        name = next_lease_name(whose, owner, {id.name for id in self.leases})
        due_s = self.now_s + due_after_s(offer, takes)
        made = AcquireOrder(
            id=LeaseId(offer.provider, name), offer=offer, devices=devices, owner=owner, epoch=self.world.epoch,
            due_s=due_s, hedge=hedge,
        )  # fmt: skip
        lease = Lease(
            id=made.id, offer=offer, devices=devices, owner=owner, epoch=made.epoch, hedge=hedge,
            asked_s=self.now_s, sent_s=self.now_s, due_s=due_s,
        )  # fmt: skip
        self.leases[made.id] = lease
        self._of.setdefault(_whose(offer), []).append(lease)
        self.orders.append(AcquireLease(order=made, reason=reason))
        return lease

    def _wanted(self) -> frozenset[LeaseId]:
        """Orders that a request or claim waits for."""
        wanted = {*self.got.values(), *self.hedged.values(), *self.queued.values(), *self.pledged}
        return frozenset(wanted | {one.id for one in self.capacity.leases.values() if one.owner in self.later_wants})

    # --- reasons ------------------------------------------------------------------------------------------------------

    def _explain(self, missing: Unplaced) -> Unplaced:
        """Update a request's reason: the order that it waits for, or why nothing is ordered."""
        want = missing.want
        got = self.got.get(want)
        lease = None if got is None else self.leases.get(got) or self.others.get(got)
        if lease is not None:
            left = self._left_s(lease)
            where = f" on {lease.offer.node}" if lease.offer.node else ""
            what = f"{lease.devices} x {lease.offer.product}{where}"
            reason = f"waiting for {what} from {lease.id.provider}, expected in about {format_duration(left)}"
            ready_s = left + self._start_s(want.model)
            return missing._replace(
                reason=reason, never=False, promised=True, slices=(), ready_s=ready_s, lease=lease.id
            )
        queued = self.leases.get(self.queued[want]) if want in self.queued else None
        more = self._queued(queued) if queued is not None else self.said.get(want)
        if want in self.queued or want in self.asked:
            left = inf if queued is None else self._left_s(queued)
            missing = missing._replace(never=False, ready_s=left + self._start_s(want.model))
        if missing.never and self._some_day(want.model):
            missing = missing._replace(never=False)
        if self.asks:
            missing = missing._replace(
                never=False, reason=f"{missing.reason}; some providers have not listed their orders yet"
            )
        return missing if more is None else missing._replace(reason=f"{missing.reason}; {more}")

    @cached_property
    def _some_day(self) -> Callable[[ModelName], bool]:
        """The check whether a model may fit later; built only if some request fits no existing device."""
        return build_future_fit_check(self.world, self.now_s)

    def _queued(self, lease: Lease) -> str:
        """Describe a queued order that the request does not wait for, as an addition to its reason."""
        asked_s, listed, left = self.now_s - lease.asked_s, lease.listed, self._left_s(lease)
        when = "delivery time unknown" if left == inf else f"expected in about {format_duration(left)}"
        said = "" if listed is None or not listed.says else f": {listed.says}"
        return f"ordered from {lease.id.provider} {format_duration(asked_s)} ago, {when}{said}"

    def _none(self) -> str:
        bars = ((of, one) for of, one in self.capacity.barred.items() if self.now_s < one.until_s)
        causes = [one.why for of, one in bars if not is_claim_owner(ModelName(of.name))][-1:]
        causes += [f"{provider} {says}" for provider, says in self.capacity.wrong()]
        return "; ".join(("no provider offers what it needs now", *causes))


def _whose(offer: Offer) -> OfferId:
    return offer.id if offer.pool is None else OfferId(offer.provider, f"{offer.product}, on any node")
