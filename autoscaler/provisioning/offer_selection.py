"""Selects which offer to order, estimates deliveries, and bounds the work of testing offers. Pure.

Of the offers that are likely enough to arrive in time, the cheapest is ordered. This module defines that ranking, the
expected cost of an offer, and its description in `explain`. The number of devices in a RatedOffer is sufficient
according to a simulation (`autoscaler.placement.capacity_simulation`). Costs are in the currency of the Settings. Owned
capacity has no marginal cost, so among such offers the lower power draw wins. This module also estimates whether and
when offers and orders in flight can serve unplaced requests. The estimates select the requests for which capacity is
ordered.

`TrialBudget` bounds the simulations of one plan. Checks of labels, taints and amounts are not charged, each combination
is simulated once, and each kind of request has a share of the budget. So requests that fit nowhere cannot exhaust the
budget of those behind them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from autoscaler.capacity.lead_times import NO_LEARNT, Expected, estimate_lead_time
from autoscaler.contract import ModelName
from autoscaler.demand.schedule import compute_replica_floor
from autoscaler.placement.capacity_simulation import SimulationContext, devices_for
from autoscaler.placement.model.types import PlacementRequest, Urgency
from autoscaler.state.capacity import Capacity, Lease, Offer, OfferId
from autoscaler.state.node_labels_and_taints import PendingLabels, can_label_appear, find_untolerated_taint
from autoscaler.state.world import NodeId, World
from autoscaler.text import format_duration


def estimate_delivery(capacity: Capacity, offer: Offer) -> Expected:
    """Expected delivery of an offer, from observed lead times."""
    return estimate_lead_time(offer, capacity.learnt.get(offer.kind, NO_LEARNT))


def build_offer_filter(world: World, coming: Iterable[Offer]) -> Callable[[PlacementRequest], bool]:
    """Return a function that reports whether an offer, or the device size and product of an order in flight, suits a
    request.

    Other requests are ignored, so that they do not block the requests behind them.
    """
    offers = [one for each in world.capacity.offers.values() for one in each]
    sizes = {(one.product, one.memory_bytes // one.parts) for one in coming}
    known: dict[tuple[object, ...], bool] = {}
    there = devices_by_node(world)

    def one(want: PlacementRequest) -> bool:
        least_bytes = want.kind.memory_bytes - want.kind.spare_bytes
        key = want.kind.products, least_bytes, want.kind.devices, want.choice.selector, want.choice.tolerations
        if key not in known:
            known[key] = any(least_bytes <= size and want.kind.rank(of) is not None for of, size in sizes) or any(
                is_offer_suitable(want, offer, there.get(NodeId(offer.node), 0)) for offer in offers
            )
        return known[key]

    return one


def devices_by_node(world: World) -> Mapping[NodeId, int]:
    """How many devices each node has now."""
    return Counter(node for node, _ in {(one.node, one.device) for one in world.nodes.slices.values()})


def is_offer_suitable(want: PlacementRequest, offer: Offer, there: int) -> bool:
    """Whether nothing known about an offer excludes the request. `there`: devices that its node has now."""
    kind, tolerations = want.kind, want.choice.tolerations
    fits = kind.memory_bytes - kind.spare_bytes <= offer.memory_bytes // offer.parts
    enough = kind.devices <= offer.devices_max + there and kind.rank(offer.product) is not None
    return fits and enough and _labelled(want, offer) and find_untolerated_taint(offer.taints, tolerations) is None


def _labelled(want: PlacementRequest, offer: Offer) -> bool:
    labels, coming = offer.labels, PendingLabels.DEVICES if offer.node else PendingLabels.NODE
    unlabelled = bool(offer.node) and not labels
    return all(
        labels[key] == value if key in labels else unlabelled or can_label_appear(key, coming)
        for key, value in want.choice.selector
    )


def remaining_delivery_s(capacity: Capacity, lease: Lease, now_s: float) -> float:
    """Remaining delivery time; infinite if unknown, or if a queued order is overdue or waits for an exhausted quota."""
    of, past_s = estimate_delivery(capacity, lease.offer), now_s - lease.asked_s
    dry = lease.listed is not None and lease.listed.dry
    return inf if lease.offer.queued and (dry or past_s >= of.p95_s) else of.left_s(past_s)


def is_order_too_slow(world: World, lease: Lease, start_s: float, now_s: float) -> bool:
    """Whether no request should wait for a queued order. `start_s`: how long a start of its owner takes.

    True if its delivery time is unknown, or such orders usually take longer than its owner's requests wait; other
    offers are then ordered in addition. The total time is compared: the remaining time decreases and increases, and
    requests would alternate between waiting and not waiting.
    """
    left, model = remaining_delivery_s(world.capacity, lease, now_s), world.models.get(lease.owner)
    if left == inf or not lease.offer.queued:
        return left == inf
    long_s = estimate_delivery(world.capacity, lease.offer).p50_s + start_s
    return model is not None and long_s > model.spec.queue.wait_seconds_max


def compute_deadline_s(world: World, model: ModelName, now_s: float) -> float:
    """When the first waiting request of a model times out or the model's next schedule window begins, whichever is
    earlier; infinite if there is neither.
    """
    levels = ((g.seen_s, one) for g in world.gateways.values() for one in g.levels.get(model, ()))
    waits = ((seen_s, one.soonest_deadline_s) for seen_s, one in levels if one.waiting)
    given_up_s = min((seen_s + left for seen_s, left in waits if left is not None), default=inf)
    return min(
        given_up_s, compute_replica_floor(world, world.models[model], now_s).begins_s if model in world.models else inf
    )


IN_TIME = 0.9
"""Minimum probability of arriving in time for an offer to count as sure; among sure offers only the price decides."""
NOT_LATE = 0.95
"""An offer is also sure if its probability in time is at least this share of its probability of arriving at all."""
HOLD_S = 600.0
"""Assumed duration of a surge, and the minimum time for which added capacity is paid."""


class RatedOffer(NamedTuple):
    """One offer, rated for one request."""

    offer: Offer
    devices: int
    expected: Expected
    in_time: float
    """Probability that a replica on it is ready before the deadline."""

    @property
    def cost(self) -> float:
        """Expected cost during delivery and while held; undelivered capacity is partly paid for, too."""
        waited_s = 0.0 if self.expected.mean_s == inf else self.expected.mean_s
        return self.offer.price_per_hour * self.devices * (waited_s + HOLD_S) / 3600.0

    @property
    def sure(self) -> bool:
        """Whether it is likely enough to arrive in time (IN_TIME, NOT_LATE)."""
        return self.in_time >= min(IN_TIME, NOT_LATE * self.expected.confidence)

    def says(self) -> str:
        """Describe it: `rack: 1 x A100 on w1, expected 60 s, in time with probability 90%, expected cost 0.42`."""
        offer, takes = self.offer, self.expected.p50_s
        where = f" on {offer.node}" if offer.node else ""
        when = "delivery time unknown" if takes == inf else f"expected {format_duration(takes)}"
        price = f", expected cost {self.cost:.2f}" if self.cost else ""
        chance = f"in time with probability {self.in_time:.0%}"
        ends = "" if offer.lasts_s is None else f", for {format_duration(offer.lasts_s)} at most"
        return f"{offer.provider}: {self.devices} x {offer.product}{where}, {when}, {chance}{price}{ends}"


class Chosen(NamedTuple):
    """The offer that is ordered for one request."""

    rung: RatedOffer
    hedge: RatedOffer | None = None
    """Ordered in addition from another provider; the slower order is withdrawn before its commit point."""


def rate_offer(offer: Offer, devices: int, expected: Expected, deadline_s: float, start_s: float) -> RatedOffer:
    """Rate an offer. `deadline_s`: from now, infinite if none; `start_s`: time from placement to readiness."""
    return RatedOffer(offer, devices, expected, expected.by(deadline_s - start_s))


def choose_offer(rungs: Iterable[RatedOffer], hedges: frozenset[str] = frozenset()) -> Chosen | None:
    """Choose the cheapest sure offer, else the likeliest, then the soonest; None without offers.
    `hedges`: providers from which a second offer may be ordered if the first is not sure.
    """
    return choose_sorted_offer(iter(sorted(rungs, key=rated_offer_sort_key)), hedges)


def choose_sorted_offer(rungs: Iterator[RatedOffer], hedges: frozenset[str] = frozenset()) -> Chosen | None:
    """The same for offers sorted best first; reads no more offers than needed."""
    best = next(rungs, None)
    if best is None:
        return None
    provider, hedge = best.offer.provider, None
    if hedges - {provider} and best.in_time < NOT_LATE * IN_TIME:
        hedge = next((one for one in rungs if one.offer.provider in hedges - {provider}), None)
    return Chosen(best, hedge if hedge is not None and hedge.in_time > 0 else None)


def rank_offers_lazily(
    candidates: Iterable[RatedOffer], tried: Callable[[RatedOffer], RatedOffer | None]
) -> Iterator[RatedOffer]:
    """Yield usable offers, best first. An offer is tried only when the iterator reaches it.

    `candidates`: each with its minimum number of devices, and so with the best rank that it can have. `tried`: returns
    a candidate with enough devices, or None.
    """
    heap = [(rated_offer_sort_key(one), number, one, False) for number, one in enumerate(candidates)]
    heapify(heap)
    while heap:
        _, number, one, known = heappop(heap)
        real = one if known else tried(one)
        if real is None:
            continue
        if real.devices == one.devices:
            yield real
        else:
            heappush(heap, (rated_offer_sort_key(real), number, real, True))


def rated_offer_sort_key(one: RatedOffer) -> tuple[bool, float, float, float, float, OfferId, int]:
    """Sort key; the first is ordered."""
    late = (0.0, 0.0) if one.sure else (-one.in_time, one.expected.p50_s)
    return (not one.sure, *late, one.cost, one.offer.watts, one.offer.id, one.devices)


TRIALS_MAX = 256
"""Maximum simulations in one plan, best offers first."""


def normalize_request(want: PlacementRequest) -> PlacementRequest:
    """Reduce a request to its kind: requests of one kind fit the same places and have the same priority."""
    return want._replace(ordinal=0, urgency=Urgency(want.urgency.priority), reason="")


class TrialBudget:
    """The simulation budget of one plan. `wants`: requests for which offers may be tried."""

    def __init__(self, ground: SimulationContext, wants: Iterable[PlacementRequest]) -> None:
        self._ground = ground
        self._left, self._shares = TRIALS_MAX, dict[PlacementRequest, int]()
        self._kinds = len(set(map(normalize_request, wants)))
        self._known: dict[tuple[PlacementRequest, OfferId, int], int | None] = {}
        self._there = devices_by_node(ground.world)

    def devices(self, want: PlacementRequest, offer: Offer) -> int | None:
        """The minimum sufficient number of the offer's devices; None if no number suffices or the budget is spent."""
        kind = normalize_request(want)
        key = kind, offer.id, offer.devices_max
        if key not in self._known:
            tried = is_offer_suitable(want, offer, self._there.get(NodeId(offer.node), 0)) and self._may(kind)
            self._known[key] = devices_for(self._ground, want, offer) if tried else None
        return self._known[key]

    def _may(self, kind: PlacementRequest) -> bool:
        """Take one simulation from the budget; unused shares of earlier kinds are divided among the remaining kinds."""
        if kind not in self._shares:
            self._shares[kind] = -(-self._left // max(1, self._kinds - len(self._shares)))
        may = self._shares[kind] > 0 and self._left > 0
        self._shares[kind] -= may
        self._left -= may
        return may
