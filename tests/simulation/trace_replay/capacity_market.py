"""Capacity offers of the replay: prices, delivery times and failures.

Models a fabric that attaches GPUs to owned nodes and a cloud that adds nodes. The fate of each order depends only on
the seed and the order's number at its provider, so that every policy meets the same failures. Capacity is billed from
the moment when its order can no longer be cancelled until it has ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from autoscaler.state.capacity import Offer
from tests.support.builders.worlds import GI
from tests.support.fakes.provider import Fate, Held

MEMORY_GI = 16
KINDS = ("refused", "never", "half", "elsewhere", "deaf", "lost_reply", "late", "fails", "slow")
FAULTS = 0.1
"""Fraction of all orders that fail in some way."""
AWAY_S = ((4 * 3600.0, 3600.0), (13 * 3600.0, 3600.0))
"""Start and length of each provider's outages; those of the second provider are two hours later."""
BILLED_S_MIN = 60.0


class Source(NamedTuple):
    """One provider. Times: median from order to delivery; prices: per device and hour."""

    name: str
    takes_s: float
    price: float
    watts: float
    devices_min: int = 1
    devices_max: int = 1
    many: int = 1
    pool: int = 64
    commits: float = 0.2
    """Fraction of the delivery time after which the order cannot be cancelled any more."""
    bought: Any = "on-demand"


class Market(NamedTuple):
    """The available capacity. Figures: documentation of clouds' small inference GPUs, and fabric.md section 11."""

    name: str
    fabric: Source
    cloud: Source


MARKETS = {
    one.name: one
    for one in (
        Market(
            "fabric cheaper",
            Source("rack", 45.0, 0.8, 300.0, devices_max=2, pool=8, commits=0.5, bought="fabric"),
            Source("cloud", 240.0, 1.2, 700.0, many=16),
        ),
        Market(
            "node cheaper",
            Source("rack", 45.0, 1.2, 300.0, devices_max=2, pool=8, commits=0.5, bought="fabric"),
            Source("cloud", 180.0, 0.5, 700.0, many=16, bought="spot"),
        ),
        Market(
            "nodes of four",
            Source("rack", 45.0, 1.2, 300.0, devices_max=2, pool=8, commits=0.5, bought="fabric"),
            Source("cloud", 240.0, 1.0, 1600.0, devices_min=4, devices_max=4, many=8),
        ),
    )
}


def offers(source: Source, nodes: Iterable[str] = ()) -> tuple[Offer, ...]:
    """The provider's possible offers: devices for each of these nodes; without nodes, new nodes."""
    fields: dict[str, Any] = {
        "provider": source.name, "product": "A10", "memory_bytes": MEMORY_GI * GI, "devices_max": source.devices_max,
        "devices_min": source.devices_min, "many": source.many, "expected_s": source.takes_s, "bought": source.bought,
        "price_per_hour": source.price, "watts": source.watts, "shared": True,
    }  # fmt: skip
    names = [*nodes]
    return tuple(Offer(name=name, node=name, **fields) for name in names) or (Offer(name="added", **fields),)


def fate(source: Source, seed: int, number: int, faults: float) -> Fate:
    """The fate of the order with this number."""
    rng = random.Random(f"{seed}/{source.name}/{number}")
    took_s = source.takes_s * rng.lognormvariate(0.0, 0.35)
    usual = Fate(after_s=took_s, commits_s=took_s * source.commits)
    if rng.random() >= faults:
        return usual
    match rng.choice(KINDS):
        case "refused":
            return usual._replace(refused="no quota")
        case "elsewhere":
            return usual._replace(elsewhere="w9")
        case "fails":
            return usual._replace(fails_s=took_s * 0.8)
        case "slow":
            return usual._replace(after_s=took_s * 10)
        case kind:
            options: dict[str, Any] = {kind: True}
            return usual._replace(**options)


class Bill(NamedTuple):
    """Cost of the added capacity over a whole run."""

    cost: float = 0.0
    device_hours: float = 0.0
    kwh: float = 0.0


def bill(paid: Iterable[tuple[Held, float]], end_s: float) -> Bill:
    """Cost of the delivered capacity, each item with the time from which it is billed."""
    bills = [_billed(one, since_s, end_s) for one, since_s in paid]
    return Bill(*(sum(amounts) for amounts in zip(*bills, strict=True))) if bills else Bill()


def _billed(one: Held, since_s: float, end_s: float) -> Bill:
    until_s = end_s if one.ended_s is None else one.ended_s
    hours = max(until_s - since_s, BILLED_S_MIN if not one.order.offer.node else 0.0) / 3600.0
    offer, many = one.order.offer, one.order.devices
    if one.fate.half and offer.node:
        many //= 2
    # watts are those of the smallest number of devices that it comes with
    return Bill(
        hours * many * offer.price_per_hour, hours * many, hours * offer.watts * many / offer.devices_min / 1000
    )
