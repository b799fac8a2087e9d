"""Devices kept free in advance (headroom)."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autoscaler.fold.capacity import BARRED_S
from autoscaler.planner.plan import plan
from autoscaler.provisioning.headroom import headroom_owner
from autoscaler.spec.capacity import Cro, ProviderSettings
from autoscaler.state.actions import AcquireLease
from autoscaler.state.capacity import Lease, LeaseRefused, LeasesSeen, Listed
from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import Cordon, CordonTarget, Slice, World
from tests.support.builders.capacity import (
    A,
    acted,
    arrived,
    cloud,
    observe,
    offer,
    offered,
    orders,
    quiet,
    releases,
    surge,
    waits,
)
from tests.support.builders.worlds import T0, device, gateway, replace_fields, world

LONG_S = 100_000.0


def kept(of: World, headroom: int, name: str = "rack", keep_s: float = 0.0) -> World:
    """The `World` with Settings that keep this many devices of a provider free, and idle ones for `keep_s`."""
    entry = ProviderSettings(name=name, cro=Cro(model="A100"), headroom=headroom, keep_seconds=keep_s)
    return replace(of, settings=replace(of.settings, capacity=(entry,)))


def leases(of: World) -> list[Lease]:
    """The capacity orders in the order of their ids."""
    return [one for _, one in sorted(of.capacity.leases.items())]


def calm(*slices: Slice, **fields: Any) -> World:
    """A `World` without requests."""
    there = slices or (device("cpu", 1, "w1"),)
    return world([A], there, gateways=[gateway()], leading_since_s=T0 - 500, **fields)


def test_headroom_is_ordered_without_demand_and_kept_while_idle() -> None:
    begin = kept(offered(calm(), offer(devices_max=4)), 2)
    after, done = acted(begin)
    assert orders(done) == [("rack", 2)]
    (lease,) = after.capacity.leases.values()
    assert lease.owner == headroom_owner("rack")
    assert not plan(after, T0 + 30.0).actions, "the capacity is being delivered, although no request waits for it"
    here = arrived(after, T0 + 40.0, devices=2)
    for later_s in (41.0, 100.0, LONG_S):
        assert not plan(quiet(here, T0 + later_s), T0 + later_s).actions, "it is not given back, though it is idle"


def test_no_capacity_is_ordered_without_headroom_and_without_demand() -> None:
    assert not plan(kept(offered(calm(), offer()), 0), T0).actions


def test_headroom_larger_than_an_offer_takes_several_orders() -> None:
    _, done = acted(kept(offered(calm(), cloud(many=8)), 3, "cloud"), rounds=5)
    assert orders(done) == [("cloud", 1)] * 3


def test_headroom_orders_no_more_devices_than_are_offered() -> None:
    _, done = acted(kept(offered(calm(), offer(devices_max=2)), 5))
    assert orders(done) == [("rack", 2)]


def test_headroom_order_uses_the_soonest_of_the_cheapest_offers() -> None:
    dear, slow, soon = offer(name="w1", price_per_hour=3.0), offer(name="w2", node="w2"), offer(name="w3", node="w3")
    slow = replace(slow, expected_s=300.0)
    after, _ = acted(kept(offered(calm(), dear, slow, soon), 1))
    assert [one.offer.name for one in after.capacity.leases.values()] == ["w3"]


def test_headroom_cost_includes_the_unneeded_devices_of_an_offer() -> None:
    large = offer(name="w8", price_per_hour=1.0, devices_min=8, devices_max=8)
    small = offer(name="w1", price_per_hour=1.2)
    for headroom, devices in ((1, 1), (7, 8)):
        _, done = acted(kept(offered(calm(), large, small), headroom))
        assert orders(done) == [("rack", devices)]


def test_only_free_usable_devices_of_the_gpu_model_count_as_headroom() -> None:
    free = device("gpu0", 16, "w1")
    like = replace(free, product="A100")
    assert not plan(kept(offered(calm(like), offer()), 1), T0).actions
    for of in (free, replace(like, healthy=False), replace(like, closed="repartitioning"), replace(like, theirs=1)):
        assert orders(plan(kept(offered(calm(of), offer()), 1), T0).actions) == [("rack", 1)]
    place = CordonTarget("node", "w1")
    closed = {place: Cordon(place=place, node="w1", since_s=T0)}
    assert orders(plan(kept(offered(calm(like, cordons=closed), offer()), 1), T0).actions) == [("rack", 1)]


def test_devices_used_by_foreign_pods_do_not_count_as_headroom() -> None:
    two = [replace(device(f"gpu{number}", 16, "w1"), product="A100", handle="nvidia.com/gpu") for number in range(2)]
    for others, lacks in ((0, []), (1, [("rack", 1)]), (2, [("rack", 2)])):
        begin = kept(offered(calm(*two, others={"w1 nvidia.com/gpu": others}), offer()), 2)
        assert orders(plan(begin, T0).actions) == lacks


def test_headroom_used_by_a_model_is_ordered_again_at_once() -> None:
    after, _ = acted(kept(offered(calm(), offer(devices_max=4)), 1))
    here = arrived(after, T0 + 40.0)
    _, done = acted(waits(here, T0 + 50.0), T0 + 50.0)
    assert [type(one).__name__ for one in done] == ["StartReplica", "AcquireLease"]
    assert orders(done) == [("rack", 1)]


def test_idle_capacity_above_the_headroom_is_released() -> None:
    after, _ = acted(kept(offered(calm(), offer(devices_max=1), offer(name="w2", node="w2", devices_max=1)), 2))
    new = [replace(device(f"{lease.offer.node}-new", 16, lease.offer.node), product="A100") for lease in leases(after)]
    here = observe(
        after,
        SlicesSeen(slices=(*after.nodes.slices.values(), *new)),
        LeasesSeen(
            provider="rack",
            began_s=T0 + 40.0,
            leases=tuple(
                Listed(
                    name=lease.id.name, offer=lease.offer, devices=1, owner=lease.owner, phase="here", committed=True,
                    node=lease.offer.node, device_ids=(f"{lease.offer.node}-new",),
                ) for lease in leases(after)
            ),
        ),
        now_s=T0 + 40.0,
    )  # fmt: skip
    assert [one.here_s for one in leases(here)] == [T0 + 40.0] * 2
    assert not plan(quiet(here, T0 + 90.0), T0 + 90.0).actions
    for headroom, goes in ((1, 1), (0, 2)):
        assert len(releases(plan(kept(quiet(here, T0 + 90.0), headroom), T0 + 90.0).actions)) == goes
    closes = kept(quiet(here, T0 + 90.0), 2, keep_s=LONG_S)
    entry = replace(closes.settings.capacity[0], closing=True)
    closes = replace(closes, settings=replace(closes.settings, capacity=(entry,)))
    assert len(releases(plan(closes, T0 + 90.0).actions)) == 2, "of what closes nothing is kept"


def test_headroom_does_not_keep_a_force_drained_device() -> None:
    after, _ = acted(kept(offered(calm(), offer()), 1))
    here = quiet(arrived(after, T0 + 40.0), T0 + 50.0)
    place = CordonTarget("node", "w1")
    drained = replace_fields(
        here, cordons={place: Cordon(place=place, node="w1", since_s=T0 + 45.0, drain=True, force=True)}
    )
    assert len(releases(plan(drained, T0 + 50.0).actions)) == 1


def test_refused_headroom_offer_is_retried_after_a_delay() -> None:
    after, _ = acted(kept(offered(calm(), offer()), 1))
    (id,) = after.capacity.leases
    refused = observe(after, LeaseRefused(id=id, reason="the quota is used up"), now_s=T0 + 1.0)
    made = plan(refused, T0 + 2.0)
    assert not made.actions
    assert made.next_s is not None
    assert made.next_s <= T0 + 1.0 + BARRED_S[0]
    assert orders(plan(refused, T0 + 1.0 + BARRED_S[0]).actions) == [("rack", 1)]


def test_waiting_requests_use_the_devices_ordered_as_headroom() -> None:
    after, _ = acted(kept(offered(calm(), offer(devices_max=1)), 1))
    made = plan(waits(after, T0 + 1.0), T0 + 1.0)
    assert not releases(made.actions)
    assert made.unmet[0].lease in after.capacity.leases, "it waits for that one"
    (first,) = plan(kept(surge(offer(devices_max=1)), 1), T0).actions
    assert isinstance(first, AcquireLease)
    assert first.order.owner == "a", "the only one is for who calls"


def test_headroom_is_not_ordered_before_providers_list_their_orders() -> None:
    begin = kept(offered(calm(), offer()), 1)
    begin = replace_fields(begin, leading_since_s=T0, capacity=replace(begin.capacity, listed_s={}))
    assert not plan(begin, T0 + 1.0).actions
