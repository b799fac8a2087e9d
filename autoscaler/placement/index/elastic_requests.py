"""Elastic requests: a request that can run with less memory is granted less if that gives a tighter fit. Pure.

`place_elastic` uses the place and grant that are best by the `NodeArrays`. If the budget does not allow that grant, it
searches for a place with the full amount, so a request that fits in full is always placed. Invariants: no grant is
below the minimum of its request. A grant is reduced only if the mean of all grants stays at or above MEAN, both per
request and weighted by bytes. A grant does not change later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from autoscaler.placement.index.node_search import LaneAssignment, NodeArrays, RequestUsage, compute_request_usage
from autoscaler.placement.index.request_encoding import EncodedRequest, encode_request
from autoscaler.state.resources import RequestShape

MEAN: Final = 950
"""Minimum of the mean grant over all elastic requests, in thousandths of the requested memory."""
KINDS_MAX: Final = 4096
"""Request shapes with a cached encoding."""
_PARTS: Final = 1_000_000


class PlacedRequest(NamedTuple):
    """A request that runs."""

    place: LaneAssignment
    load: RequestUsage
    asked_bytes: int
    """0: it is not elastic."""
    granted_bytes: int


class ElasticBudget:
    """Total memory requested by, and granted to, elastic requests."""

    def __init__(self) -> None:
        self.asked_bytes = self.granted_bytes = self.count = self._parts = 0

    def allows(self, asked_bytes: int, granted_bytes: int) -> bool:
        """Whether one more request may be granted this much."""
        by_byte = 1000 * (self.granted_bytes + granted_bytes) >= MEAN * (self.asked_bytes + asked_bytes)
        parts = self._parts + _PARTS * granted_bytes // asked_bytes
        return by_byte and 1000 * parts >= MEAN * _PARTS * (self.count + 1)

    def add(self, asked_bytes: int, granted_bytes: int, sign: int = 1) -> None:
        """Add a request that starts, or remove one that stops (`sign` is -1)."""
        self.asked_bytes += sign * asked_bytes
        self.granted_bytes += sign * granted_bytes
        self._parts += sign * (_PARTS * granted_bytes // asked_bytes)
        self.count += sign


def place_elastic(
    kind: RequestShape,
    budget: Callable[[], ElasticBudget],
    choose: Callable[[RequestShape], LaneAssignment | None],
    granted: Callable[[RequestShape, LaneAssignment], int],
) -> tuple[LaneAssignment, RequestShape] | None:
    """Return the place of a request and the shape granted there, and add the grant to the budget. None: it fits nowhere
    now, or only with a larger reduction than the budget allows. `budget` is called for elastic requests only; `choose`,
    `granted`: see `NodeArrays`.
    """
    place, asked = choose(kind), kind.memory_bytes
    if place is None or not kind.spare_bytes:
        return None if place is None else (place, kind)
    got = min(asked, granted(kind, place))
    if got < asked and not budget().allows(asked, got):
        got, place = asked, choose(kind._replace(spare_bytes=0))
        if place is None:
            return None
    budget().add(asked, got)
    return place, kind._replace(memory_bytes=got, spare_bytes=0)


class Elastic:
    """Places requests on a `NodeArrays`, elastic ones with reduced grants."""

    def __init__(self, arrays: NodeArrays) -> None:
        self.arrays = arrays
        self.budget = ElasticBudget()
        self._asks: dict[RequestShape, EncodedRequest] = {}

    def start(self, kind: RequestShape) -> PlacedRequest | None:
        """Choose a place and take it. None: see `place_elastic`."""
        arrays = self.arrays

        def choose(one: RequestShape) -> LaneAssignment | None:
            return arrays.choose(self._ask(one))

        found = place_elastic(
            kind, lambda: self.budget, choose, lambda one, place: arrays.granted(self._ask(one), place)
        )
        if found is None:
            return None
        place, got = found
        load = compute_request_usage(got, arrays.nodes[place.node], place.lanes)
        arrays.take(place, load)
        return PlacedRequest(place, load, *((kind.memory_bytes, got.memory_bytes) if kind.spare_bytes else (0, 0)))

    def stop(self, one: PlacedRequest) -> None:
        """Give back what `start` took."""
        self.arrays.give_back(one.place, one.load)
        if one.asked_bytes:
            self.budget.add(one.asked_bytes, one.granted_bytes, -1)

    def _ask(self, kind: RequestShape) -> EncodedRequest:
        ask = self._asks.get(kind)
        if ask is None:
            if len(self._asks) >= KINDS_MAX:
                self._asks.clear()
            ask = self._asks[kind] = encode_request(kind, self.arrays.lanes)
        return ask
