"""Selects which offer to order, and bounds the work of testing offers. Pure.

Of the offers that are likely enough to arrive in time, the cheapest is ordered. This module defines that ranking, the
expected cost of an offer, and the sentence about each that `explain` shows. A RatedOffer stands for a number of devices
that was found to suffice (`autoscaler.placement.simulate`). Costs are in the one currency of the Settings. Owned
capacity has no marginal cost, so that among such offers the lower power draw wins.

`TrialBudget` bounds the simulations of one plan. Checks of labels, taints and amounts cost nothing, each question is
simulated once, and each kind of request has a share of the budget. So requests that fit nowhere cannot exhaust the
budget of those behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from autoscaler.capacity.lead_times import Expected
from autoscaler.placement.model.types import PlacementRequest, Urgency
from autoscaler.placement.simulate import SimulationContext, devices_for
from autoscaler.provisioning.offer_filter import devices_by_node, is_offer_suitable
from autoscaler.state.capacity_orders import Offer, OfferId
from autoscaler.state.world import NodeId
from autoscaler.text import format_duration

IN_TIME = 0.9
"""An offer with at least this probability of arriving in time is sure enough; above it only the price counts."""
NOT_LATE = 0.95
"""Time does not make an offer unsure if this part of its probability of arriving at all remains: rare is not late."""
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
        """Expected cost while it is awaited and while it is held; what does not arrive is partly paid, too."""
        waited_s = 0.0 if self.expected.mean_s == inf else self.expected.mean_s
        return self.offer.price_per_hour * self.devices * (waited_s + HOLD_S) / 3600.0

    @property
    def sure(self) -> bool:
        """Whether time does not make it uncertain."""
        return self.in_time >= min(IN_TIME, NOT_LATE * self.expected.confidence)

    def says(self) -> str:
        """Describe it: `rack: 1 x A100 on w1, expected 60 s, in time with 90 %, 0.42 for a surge`."""
        offer, takes = self.offer, self.expected.p50_s
        where = f" on {offer.node}" if offer.node else ""
        when = "delivery time unknown" if takes == inf else f"expected {format_duration(takes)}"
        price = f", {self.cost:.2f} for a surge" if self.cost else ""
        chance = f"in time with {self.in_time:.0%}"
        ends = "" if offer.lasts_s is None else f", for {format_duration(offer.lasts_s)} at most"
        return f"{offer.provider}: {self.devices} x {offer.product}{where}, {when}, {chance}{price}{ends}"


class Chosen(NamedTuple):
    """The offer that is ordered for one request."""

    rung: RatedOffer
    beside: RatedOffer | None = None
    """A hedge from another provider, ordered as well: the loser is withdrawn before its commit point."""


def rate_offer(offer: Offer, devices: int, expected: Expected, deadline_s: float, start_s: float) -> RatedOffer:
    """Rate an offer. `deadline_s`: from now, infinite if none; `start_s`: time from placement to readiness."""
    return RatedOffer(offer, devices, expected, expected.by(deadline_s - start_s))


def choose_offer(rungs: Iterable[RatedOffer], hedges: frozenset[str] = frozenset()) -> Chosen | None:
    """Choose the cheapest offer that is likely enough in time, else the likeliest, then the soonest; None without
    offers.

    `hedges`: providers from which a second offer may be ordered where that makes delivery surer.
    """
    return choose_sorted_offer(iter(sorted(rungs, key=rated_offer_sort_key)), hedges)


def choose_sorted_offer(rungs: Iterator[RatedOffer], hedges: frozenset[str] = frozenset()) -> Chosen | None:
    """The same for offers sorted best first; reads no more of them than needed."""
    best = next(rungs, None)
    if best is None:
        return None
    provider, beside = best.offer.provider, None
    if hedges - {provider} and best.in_time < NOT_LATE * IN_TIME:
        beside = next((one for one in rungs if one.offer.provider in hedges - {provider}), None)
    return Chosen(best, beside if beside is not None and beside.in_time > 0 else None)


def rank_offers_lazily(
    hopeful: Iterable[RatedOffer], tried: Callable[[RatedOffer], RatedOffer | None]
) -> Iterator[RatedOffer]:
    """Yield usable offers, best first; offers that are not read are not tried.

    `hopeful`: each with the minimum devices of its offer, which bounds its rank; `tried`: with as many as suffice, or
    None.
    """
    heap = [(rated_offer_sort_key(one), number, one, False) for number, one in enumerate(hopeful)]
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
"""Simulations in one plan, best offers first, so that those left out would be worse."""


def normalize_request(want: PlacementRequest) -> PlacementRequest:
    """Reduce a request to what it shares with those that fit the same places and wait as long."""
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
        """The fewest devices of the offer that suffice; None if no number does or the budget is spent."""
        kind = normalize_request(want)
        key = kind, offer.id, offer.devices_max
        if key not in self._known:
            tried = is_offer_suitable(want, offer, self._there.get(NodeId(offer.node), 0)) and self._may(kind)
            self._known[key] = devices_for(self._ground, want, offer) if tried else None
        return self._known[key]

    def _may(self, kind: PlacementRequest) -> bool:
        """Take one simulation; what earlier kinds did not use is shared among the remaining kinds."""
        if kind not in self._shares:
            self._shares[kind] = -(-self._left // max(1, self._kinds - len(self._shares)))
        may = self._shares[kind] > 0 and self._left > 0
        self._shares[kind] -= may
        self._left -= may
        return may
