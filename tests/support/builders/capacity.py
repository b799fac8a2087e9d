"""Small ledgers for tests: Offers, capacity orders and Worlds with both. `Any` marks fields that are passed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from autoscaler.fold.fold import Observation
from autoscaler.planner.plan import plan
from autoscaler.rearrange.paid_capacity import advance
from autoscaler.state.actions import AcquireLease, Acted, Action, ReleaseLease
from autoscaler.state.capacity import LeasesSeen, Listed, Offer, OffersSeen, ProvidersSeen
from autoscaler.state.events import Reported, SlicesSeen
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId, World
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, world

A = model("a", 16, high=4, slots=1)


def offer(provider: str = "rack", name: str = "w1", **fields: Any) -> Offer:
    """An Offer of a device of 16 GiB that is attached to node w1 in 30 s."""
    given = {"node": "w1", "product": "A100", "memory_bytes": 16 * GI, "devices_max": 2, "expected_s": 30.0}
    return Offer(provider=provider, name=name, **{**given, "shared": True, "price_per_hour": 1.0, **fields})


def cloud(name: str = "g4", **fields: Any) -> Offer:
    """An Offer of a node with a device that is added in 120 s."""
    return offer("cloud", name, **{"node": "", "devices_max": 1, "expected_s": 120.0, "price_per_hour": 2.0, **fields})


def surge(*offers: Offer, waiting: int = 1, waits_s: float | None = None, **fields: Any) -> World:
    """Requests for a Model are queued, and no devices exist except those on offer."""
    level_ = level("a", waiting, wait_s=60.0)
    at = gateway(levels=[level_ if waits_s is None else replace(level_, soonest_deadline_s=waits_s)])
    begin = world([A], [device("cpu", 1, "w1")], gateways=[at], leading_since_s=T0 - 500, **fields)
    return offered(begin, *offers)


def offered(begin: World, *offers: Offer, now_s: float = T0, hedges: Iterable[str] = ()) -> World:
    """The `World` with these offers and no capacity orders."""
    names = sorted({one.provider for one in offers})
    seen: list[Observation] = [ProvidersSeen(providers=tuple(names), hedges=frozenset(hedges))]
    for name in names:
        seen.append(OffersSeen(provider=name, offers=tuple(one for one in offers if one.provider == name)))
        seen.append(LeasesSeen(provider=name, leases=(), began_s=now_s))
    return observe(begin, *seen, now_s=now_s)


def observe(begin: World, *seen: Observation, now_s: float = T0) -> World:
    """The `World` after these observations."""
    return advance(begin, seen, now_s)[0]


def acted(begin: World, now_s: float = T0, rounds: int = 4) -> tuple[World, list[Action]]:
    """Plans repeatedly until nothing is left to do; returns the `World` and all Actions."""
    done: list[Action] = []
    for _ in range(rounds):
        actions = plan(begin, now_s).actions
        if not actions:
            return begin, done
        done += actions
        begin = observe(begin, *(Acted(action=one) for one in actions), now_s=now_s)
    raise AssertionError(f"it does not end: {done}")


def quiet(of: World, now_s: float) -> World:
    """The `World` after the gateway has just reported that no requests are queued."""
    report = gateway(seen_s=now_s).report
    assert report is not None
    return observe(of, Reported(report=replace(report, sequence=int(now_s * 10), epoch=of.epoch)), now_s=now_s)


def waits(of: World, now_s: float, waiting: int = 1) -> World:
    """The `World` with queued requests, whether new or not."""
    report = gateway(levels=[level("a", waiting, wait_s=60.0)]).report
    assert report is not None
    return observe(of, Reported(report=replace(report, sequence=int(now_s * 10), epoch=of.epoch)), now_s=now_s)


def orders(actions: Iterable[Action]) -> list[tuple[str, int]]:
    """(provider, devices) of each capacity order placed."""
    return [(one.order.id.provider, one.order.devices) for one in actions if isinstance(one, AcquireLease)]


def releases(actions: Iterable[Action]) -> list[ReleaseLease]:
    """The releases of capacity orders."""
    return [one for one in actions if isinstance(one, ReleaseLease)]


def listed(of: World, provider: str = "rack", **fields: Any) -> tuple[Listed, ...]:
    """The `World`'s capacity orders as their provider lists them."""
    leases = [one for id, one in sorted(of.capacity.leases.items()) if id.provider == provider]
    return tuple(
        Listed(name=one.id.name, offer=one.offer, devices=one.devices, owner=one.owner, **fields) for one in leases
    )


def shown(of: World, now_s: float, provider: str = "rack", **fields: Any) -> World:
    """The `World` after such a list."""
    return observe(of, LeasesSeen(provider=provider, leases=listed(of, provider, **fields), began_s=now_s), now_s=now_s)


def arrived(of: World, now_s: float, provider: str = "rack", node: str = "w1", devices: int = 1) -> World:
    """The `World` after delivery: the devices' Slices are observed, and the provider lists them."""
    ids = tuple(f"new{number}" for number in range(devices))
    new = [
        Slice(id=SliceId(id), device=DeviceId(id), node=NodeId(node), memory_bytes=16 * GI, product="A100", shared=True)
        for id in ids
    ]
    there = observe(of, SlicesSeen(slices=(*of.nodes.slices.values(), *new)), now_s=now_s)
    return shown(there, now_s, provider, phase="here", committed=True, node=node, device_ids=ids)
