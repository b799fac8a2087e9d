"""Where the replay's capacity comes from, what it costs, and what goes wrong with it.

Owns the prices, watts and times of a fabric that attaches GPUs to nodes of ours and of a cloud that adds nodes, and
what becomes of each order: a function of the seed and of the order's number there alone, so that every rule meets the
same luck. Money is billed from when an order cannot be taken back any more until it has ended.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any, NamedTuple

from autoscaler.state.capacity_orders import Offer
from tests.kit.fakeprovider import Fate, Held
from tests.kit.worlds import GI

MEMORY_GI = 16
KINDS = ("refused", "never", "half", "elsewhere", "deaf", "lost_reply", "late", "fails", "slow")
FAULTS = 0.1
"""The part of all orders with which something goes wrong."""
AWAY_S = ((4 * 3600.0, 3600.0), (13 * 3600.0, 3600.0))
"""From when on, and how long, each provider is away; the second one two hours later."""
BILLED_S_MIN = 60.0


class Source(NamedTuple):
    """One provider. Times: the median from an order until it is there; prices: of a Device for an hour."""

    name: str
    takes_s: float
    price: float
    watts: float
    devices_min: int = 1
    devices_max: int = 1
    many: int = 1
    pool: int = 64
    commits: float = 0.2
    """Which part of the time passes before it cannot be taken back."""
    bought: Any = "on-demand"


class Market(NamedTuple):
    """What there is to be had. Figures: docs of clouds' small inference GPUs, and fabric.md section 11."""

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
    """What it could have: Devices for each of these nodes; none: nodes of its own."""
    said: dict[str, Any] = {
        "provider": source.name, "product": "A10", "memory_bytes": MEMORY_GI * GI, "devices_max": source.devices_max,
        "devices_min": source.devices_min, "many": source.many, "expected_s": source.takes_s, "bought": source.bought,
        "price_per_hour": source.price, "watts": source.watts, "shared": True,
    }  # fmt: skip
    names = [*nodes]
    return tuple(Offer(name=name, node=name, **said) for name in names) or (Offer(name="added", **said),)


def fate(source: Source, seed: int, number: int, faults: float) -> Fate:
    """What becomes of the order of that number."""
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
            told: dict[str, Any] = {kind: True}
            return usual._replace(**told)


class Bill(NamedTuple):
    """What was added, over a whole run."""

    cost: float = 0.0
    device_hours: float = 0.0
    kwh: float = 0.0


def bill(paid: Iterable[tuple[Held, float]], end_s: float) -> Bill:
    """Of what was given, each since when it is paid."""
    bills = [_billed(one, since_s, end_s) for one, since_s in paid]
    return Bill(*(sum(amounts) for amounts in zip(*bills, strict=True))) if bills else Bill()


def _billed(one: Held, since_s: float, end_s: float) -> Bill:
    until_s = end_s if one.ended_s is None else one.ended_s
    hours = max(until_s - since_s, BILLED_S_MIN if not one.order.offer.node else 0.0) / 3600.0
    offer, many = one.order.offer, one.order.devices
    if one.fate.half and offer.node:
        many //= 2
    # watts are those of as few Devices as it comes with
    return Bill(
        hours * many * offer.price_per_hour, hours * many, hours * offer.watts * many / offer.devices_min / 1000
    )
