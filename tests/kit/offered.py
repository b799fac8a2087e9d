"""Small ledgers for tests: Offers, Leases and Worlds that have some. `Any` stands where fields are passed on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from autoscaler.fold.fold import Observation, fold
from autoscaler.planner.plan import plan
from autoscaler.state.actions import AcquireLease, Acted, Action, ReleaseLease
from autoscaler.state.capacity_orders import LeasesSeen, Listed, Offer, OffersSeen, ProvidersSeen
from autoscaler.state.events import Reported, SlicesSeen
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId, World
from tests.kit.worlds import GI, T0, device, gateway, level, model, world

A = model("a", 16, high=4, slots=1)


def offer(provider: str = "rack", name: str = "w1", **fields: Any) -> Offer:
    """A Device of 16 GiB that is attached to node w1 in 30 s."""
    given = {"node": "w1", "product": "A100", "memory_bytes": 16 * GI, "devices_max": 2, "expected_s": 30.0}
    return Offer(provider=provider, name=name, **{**given, "shared": True, "price_per_hour": 1.0, **fields})


def cloud(name: str = "g4", **fields: Any) -> Offer:
    """A node with a Device that is added in 120 s."""
    return offer("cloud", name, **{"node": "", "devices_max": 1, "expected_s": 120.0, "price_per_hour": 2.0, **fields})


def surge(*offers: Offer, waiting: int = 1, waits_s: float | None = None, **fields: Any) -> World:
    """Calls for a Model wait, and no Device is there but what is offered."""
    level_ = level("a", waiting, wait_s=60.0)
    told = gateway(levels=[level_ if waits_s is None else replace(level_, soonest_deadline_s=waits_s)])
    begin = world([A], [device("cpu", 1, "w1")], gateways=[told], leading_since_s=T0 - 500, **fields)
    return offered(begin, *offers)


def offered(begin: World, *offers: Offer, now_s: float = T0, hedges: Iterable[str] = ()) -> World:
    """These are offered, and no Lease is there."""
    names = sorted({one.provider for one in offers})
    seen: list[Observation] = [ProvidersSeen(providers=tuple(names), hedges=frozenset(hedges))]
    for name in names:
        seen.append(OffersSeen(provider=name, offers=tuple(one for one in offers if one.provider == name)))
        seen.append(LeasesSeen(provider=name, leases=(), began_s=now_s))
    return told(begin, *seen, now_s=now_s)


def told(begin: World, *seen: Observation, now_s: float = T0) -> World:
    """The World after that."""
    return fold(begin, seen, now_s)[0]


def acted(begin: World, now_s: float = T0, rounds: int = 4) -> tuple[World, list[Action]]:
    """The World after what is planned, again and again until nothing is; and all of that."""
    done: list[Action] = []
    for _ in range(rounds):
        actions = plan(begin, now_s).actions
        if not actions:
            return begin, done
        done += actions
        begin = told(begin, *(Acted(action=one) for one in actions), now_s=now_s)
    raise AssertionError(f"it does not end: {done}")


def quiet(of: World, now_s: float) -> World:
    """Nobody waits any more, and the gateway has just said so."""
    report = gateway(seen_s=now_s).report
    assert report is not None
    return told(of, Reported(report=replace(report, sequence=int(now_s * 10), epoch=of.epoch)), now_s=now_s)


def waits(of: World, now_s: float, waiting: int = 1) -> World:
    """Calls wait, still or from now on."""
    report = gateway(levels=[level("a", waiting, wait_s=60.0)]).report
    assert report is not None
    return told(of, Reported(report=replace(report, sequence=int(now_s * 10), epoch=of.epoch)), now_s=now_s)


def orders(actions: Iterable[Action]) -> list[tuple[str, int]]:
    """(provider, Devices) of each Lease that is ordered."""
    return [(one.order.id.provider, one.order.devices) for one in actions if isinstance(one, AcquireLease)]


def releases(actions: Iterable[Action]) -> list[ReleaseLease]:
    """What is given back."""
    return [one for one in actions if isinstance(one, ReleaseLease)]


def listed(of: World, provider: str = "rack", **fields: Any) -> tuple[Listed, ...]:
    """The Leases of a World as their provider shows them."""
    leases = [one for id, one in sorted(of.capacity.leases.items()) if id.provider == provider]
    return tuple(
        Listed(name=one.id.name, offer=one.offer, devices=one.devices, owner=one.owner, **fields) for one in leases
    )


def shown(of: World, now_s: float, provider: str = "rack", **fields: Any) -> World:
    """The World after such a list."""
    return told(of, LeasesSeen(provider=provider, leases=listed(of, provider, **fields), began_s=now_s), now_s=now_s)


def arrived(of: World, now_s: float, provider: str = "rack", node: str = "w1", devices: int = 1) -> World:
    """Its Devices are there: their Slices are seen, and the provider says so."""
    ids = tuple(f"new{number}" for number in range(devices))
    new = [
        Slice(id=SliceId(id), device=DeviceId(id), node=NodeId(node), memory_bytes=16 * GI, product="A100", shared=True)
        for id in ids
    ]
    there = told(of, SlicesSeen(slices=(*of.slices.values(), *new)), now_s=now_s)
    return shown(there, now_s, provider, phase="here", committed=True, node=node, device_ids=ids)
