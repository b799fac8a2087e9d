"""Elastic requests: one that makes do with a little less memory gets less where that closes a hole, as long as all of
them together have nearly what they asked for.

Owns the Budget (what all that run asked for and were granted) and the order of questions (`place_elastic`): the
NodeArrays says which place and grant are best; where the Budget has not so much left, it is asked again for all that is
wanted. So nobody is refused who fits with all that was asked for. Promises: nobody gets less than it makes do with, and
nobody less than it asked for where the mean of all would then be below MEAN, by request or by byte. A grant stays as it
is. No I/O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from autoscaler.placement.index.node_arrays import LaneAssignment, NodeArrays, RequestUsage, compute_request_usage
from autoscaler.placement.index.request import EncodedRequest, encode_request
from autoscaler.state.resources import RequestShape

LEAST: Final = 900
"""Thousandths of what it asked for with which a request makes do; MEAN those that all have together, at least."""
MEAN: Final = 950
KINDS_MAX: Final = 4096
"""Whose questions are kept."""
_PARTS: Final = 1_000_000


def make_elastic(kind: RequestShape) -> RequestShape:
    """The same request, which makes do with LEAST. Whole Devices are never cut."""
    if kind.devices != 1 or kind.memory_bytes <= 1:
        return kind
    return kind._replace(spare_bytes=kind.memory_bytes * (1000 - LEAST) // 1000)


class PlacedRequest(NamedTuple):
    """One that runs."""

    place: LaneAssignment
    load: RequestUsage
    asked_bytes: int
    """0: it was not elastic."""
    granted_bytes: int


class ElasticBudget:
    """What those asked for and got that are elastic."""

    def __init__(self) -> None:
        self.asked_bytes = self.granted_bytes = self.count = self._parts = 0

    def allows(self, asked_bytes: int, granted_bytes: int) -> bool:
        """Whether one more may be granted so much."""
        by_byte = 1000 * (self.granted_bytes + granted_bytes) >= MEAN * (self.asked_bytes + asked_bytes)
        parts = self._parts + _PARTS * granted_bytes // asked_bytes
        return by_byte and 1000 * parts >= MEAN * _PARTS * (self.count + 1)

    def add(self, asked_bytes: int, granted_bytes: int, sign: int = 1) -> None:
        """It starts; or it stops (-1)."""
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
    """Where one goes, and what it is granted there, which the Budget counts from now on; it is asked for where one is
    elastic. None: it fits nowhere now, or only with more cut off than the Budget has. `choose`, `granted`: see
    NodeArrays.
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
    """A NodeArrays that grants. Requests that are not elastic are placed as ever."""

    def __init__(self, stock: NodeArrays) -> None:
        self.stock = stock
        self.budget = ElasticBudget()
        self._asks: dict[RequestShape, EncodedRequest] = {}

    def start(self, kind: RequestShape) -> PlacedRequest | None:
        """Chooses and takes; None: see `place_elastic`."""
        stock = self.stock

        def choose(one: RequestShape) -> LaneAssignment | None:
            return stock.choose(self._ask(one))

        found = place_elastic(
            kind, lambda: self.budget, choose, lambda one, place: stock.granted(self._ask(one), place)
        )
        if found is None:
            return None
        place, got = found
        load = compute_request_usage(got, stock.nodes[place.node], place.lanes)
        stock.take(place, load)
        return PlacedRequest(place, load, *((kind.memory_bytes, got.memory_bytes) if kind.spare_bytes else (0, 0)))

    def stop(self, one: PlacedRequest) -> None:
        """What `start` took."""
        self.stock.give_back(one.place, one.load)
        if one.asked_bytes:
            self.budget.add(one.asked_bytes, one.granted_bytes, -1)

    def _ask(self, kind: RequestShape) -> EncodedRequest:
        ask = self._asks.get(kind)
        if ask is None:
            if len(self._asks) >= KINDS_MAX:
                self._asks.clear()
            ask = self._asks[kind] = encode_request(kind, self.stock.lanes)
        return ask
