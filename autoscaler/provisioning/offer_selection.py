"""Which Offer is taken: of those that are likely enough in time the one that costs the least. Pure.

Owns that order, what an Offer is expected to cost, and the sentence about each that `explain` shows. An Offer stands
here for a number of Devices of it that was found to do (`autoscaler.placement.simulate`). Amounts of money are of the
Settings' one currency; owned capacity costs nothing at the margin, so of such the thriftier is taken.

Offers that are tried for those who lack room, so many in one Plan. Pure.

Owns how that work is shared out: what labels, taints or numbers tell costs nothing, each question is asked once, and
each kind of PlacementRequest has its share of the others. So who fits on nothing, first in line and in all Plans, takes
nobody the Offers that would do for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from heapq import heapify, heappop, heappush
from math import inf
from typing import NamedTuple

from autoscaler.capacity.lead_times import Expected
from autoscaler.placement.model.types import EvictionLevel, PlacementRequest
from autoscaler.placement.simulate import SimulationContext, devices_for
from autoscaler.provisioning.offer_filter import devices_by_node, is_offer_suitable
from autoscaler.state.capacity_orders import Offer, OfferId
from autoscaler.state.world import NodeId
from autoscaler.text import format_duration

IN_TIME = 0.9
"""An Offer that comes in time with this likelihood is sure enough; above it only the price counts."""
NOT_LATE = 0.95
"""So much of the likelihood with which it comes at all is left by the time: who comes seldom, comes no later."""
HOLD_S = 600.0
"""So long a surge is taken to last, and at least so long what was added is paid for."""


class RatedOffer(NamedTuple):
    """One Offer for one lack."""

    offer: Offer
    devices: int
    expected: Expected
    in_time: float
    """How likely a Replica on it is ready before the deadline."""

    @property
    def cost(self) -> float:
        """Expected: while it is awaited, and while it is held; a part of what does not come is paid, too."""
        waited_s = 0.0 if self.expected.mean_s == inf else self.expected.mean_s
        return self.offer.price_per_hour * self.devices * (waited_s + HOLD_S) / 3600.0

    @property
    def sure(self) -> bool:
        """It is not time that makes it unsure."""
        return self.in_time >= min(IN_TIME, NOT_LATE * self.expected.confidence)

    def says(self) -> str:
        """`rack: 1 x A100 on w1, expected 60 s, in time with 90 %, 0.42 for a surge`."""
        offer, takes = self.offer, self.expected.p50_s
        where = f" on {offer.node}" if offer.node else ""
        when = "nobody can say when" if takes == inf else f"expected {format_duration(takes)}"
        price = f", {self.cost:.2f} for a surge" if self.cost else ""
        chance = f"in time with {self.in_time:.0%}"
        ends = "" if offer.lasts_s is None else f", for {format_duration(offer.lasts_s)} at most"
        return f"{offer.provider}: {self.devices} x {offer.product}{where}, {when}, {chance}{price}{ends}"


class Chosen(NamedTuple):
    """What is taken for one lack."""

    rung: RatedOffer
    beside: RatedOffer | None = None
    """A second one, of another provider, started as well: the loser is taken back before its commit point."""


def rate_offer(offer: Offer, devices: int, expected: Expected, deadline_s: float, start_s: float) -> RatedOffer:
    """`deadline_s` from now on, infinite: none; `start_s`: what a Replica takes to be ready once it has its room."""
    return RatedOffer(offer, devices, expected, expected.by(deadline_s - start_s))


def choose_offer(rungs: Iterable[RatedOffer], hedges: frozenset[str] = frozenset()) -> Chosen | None:
    """The cheapest that is likely enough in time; where none is, the likeliest, then the soonest. None: there is none.

    `hedges`: providers that may be started beside another, where that makes it surer.
    """
    return choose_sorted_offer(iter(sorted(rungs, key=rated_offer_sort_key)), hedges)


def choose_sorted_offer(rungs: Iterator[RatedOffer], hedges: frozenset[str] = frozenset()) -> Chosen | None:
    """The same of RatedOffers of which the best comes first; no more of them are asked for than that takes."""
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
    """RatedOffers as they are, the best first. `hopeful`: each with the fewest Devices that its Offer comes with, which
    none is better than; `tried`: with as many as do, None: with no number. What nobody comes to is not tried.
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
    """The first is taken."""
    late = (0.0, 0.0) if one.sure else (-one.in_time, one.expected.p50_s)
    return (not one.sure, *late, one.cost, one.offer.watts, one.offer.id, one.devices)


TRIALS_MAX = 256
"""In one Plan, together; of the best first, so those that it does not come to would be worse."""


def normalize_request(want: PlacementRequest) -> PlacementRequest:
    """What it has in common with those that have room where it has, and wait as long."""
    return want._replace(ordinal=0, unserved_since_s=0.0, reason="", force=EvictionLevel.NONE, begins_s=0.0)


class TrialBudget:
    """One Plan's. `wants`: those that Offers may be tried for."""

    def __init__(self, ground: SimulationContext, wants: Iterable[PlacementRequest]) -> None:
        self._ground = ground
        self._left, self._shares = TRIALS_MAX, dict[PlacementRequest, int]()
        self._kinds = len(set(map(normalize_request, wants)))
        self._known: dict[tuple[PlacementRequest, OfferId, int], int | None] = {}
        self._there = devices_by_node(ground.world)

    def devices(self, want: PlacementRequest, offer: Offer) -> int | None:
        """The fewest of the Offer with which it has room; None: no number does, or there is no time to find out."""
        kind = normalize_request(want)
        key = kind, offer.id, offer.devices_max
        if key not in self._known:
            tried = is_offer_suitable(want, offer, self._there.get(NodeId(offer.node), 0)) and self._may(kind)
            self._known[key] = devices_for(self._ground, want, offer) if tried else None
        return self._known[key]

    def _may(self, kind: PlacementRequest) -> bool:
        """What kinds before it did not use is shared out among those that are left."""
        if kind not in self._shares:
            self._shares[kind] = -(-self._left // max(1, self._kinds - len(self._shares)))
        may = self._shares[kind] > 0 and self._left > 0
        self._shares[kind] -= may
        self._left -= may
        return may
