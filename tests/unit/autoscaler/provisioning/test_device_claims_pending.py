"""Pods' device claims on a fabric: which are pending, ordered, published, reported and released."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from autoscaler.capacity.delivered_slices import CLAIMED, list_withheld_slices
from autoscaler.planner.plan import plan
from autoscaler.provisioning.fabric_device_claims import CLAIM_S, Published, find_published_devices
from autoscaler.provisioning.release import WITHDRAW_S
from autoscaler.spec.capacity import ProviderSettings, Redfish
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import LeaseRefused, Offer, OffersSeen, ProvidersSeen
from autoscaler.state.events import SlicesSeen
from autoscaler.state.pending_claims import (
    DRIVER,
    FAILED,
    RESCHEDULE,
    AwaitedSeen,
    PendingDeviceClaim,
    device_of,
    is_claim_owner,
    kind_of,
    read_pending_device_claims,
)
from autoscaler.state.world import World
from tests.support.builders.capacity import A, acted, arrived, observe, offer, offered, orders, releases, shown, surge
from tests.support.builders.worlds import T0, replace_fields, world

RACK = ProviderSettings(
    name="rack", redfish=Redfish(url="https://fabric.example", systems={"w1": "/redfish/v1/Systems/1"}, publish=True)
)
D0, D1 = device_of("A100", 0), device_of("A100", 1)


def claim(*devices: str, name: str = "c", pool: str = "rack/w1", **status: Any) -> dict[str, Any]:
    """A claim as the scheduler wrote it."""
    results = [{"request": "gpu", "driver": DRIVER, "pool": pool, "device": one} for one in devices]
    given = {"allocation": {"allocationTimestamp": "2026-01-01T00:00:00Z", "devices": {"results": results}}}
    reserved = {"reservedFor": [{"resource": "pods", "name": "p", "uid": "p1"}]}
    return {"metadata": {"namespace": "n", "name": name, "uid": f"u-{name}"}, "status": {**given, **reserved, **status}}


def fabric(*more: Offer, awaited: tuple[PendingDeviceClaim, ...] = (), publish: bool = True) -> World:
    """Two A100 can be attached to w1, and no requests are queued."""
    redfish = RACK.redfish
    assert redfish is not None
    settings = Settings(capacity=(replace(RACK, redfish=replace(redfish, publish=publish)),))
    begin = offered(world([A], leading_since_s=T0 - 500, settings=settings), *(more or (offer(),)))
    return observe(begin, AwaitedSeen(awaited=awaited))


def waits(*claims: dict[str, Any]) -> tuple[PendingDeviceClaim, ...]:
    return tuple(awaited for one in claims for awaited in read_pending_device_claims(one))


def names(of: World, now_s: float = T0) -> list[str]:
    found = find_published_devices(of, now_s)
    assert found is not None
    return [device["name"] for pool in found.pools for device in pool.devices]


def failures(of: World, now_s: float = T0) -> list[tuple[str, str]]:
    """The (condition, reason) of each reported device."""
    found = find_published_devices(of, now_s)
    assert found is not None
    return [(condition, reason) for one in found.statuses for condition, reason, _ in one.devices.values()]


# --- claims -----------------------------------------------------------------------------------------------------------


def test_claim_with_allocated_fabric_devices_is_pending() -> None:
    (one,) = read_pending_device_claims(claim(D1, D0))
    assert (one.provider, one.node, one.kind, one.devices) == ("rack", "w1", kind_of("A100"), (D0, D1))
    assert is_claim_owner(one.owner)


def test_rescheduled_or_unreserved_claim_is_not_pending() -> None:
    condition = {"type": RESCHEDULE, "status": "True"}
    device = {"driver": DRIVER, "pool": "rack/w1", "device": D0, "conditions": [condition]}
    assert not read_pending_device_claims(claim(D0, D1, devices=[device])), "the scheduler takes all of it back"
    assert not read_pending_device_claims(claim(D0, reservedFor=[])), "no pod has it"
    assert not read_pending_device_claims({"metadata": {}, "status": {"allocation": None}})
    assert not read_pending_device_claims(
        {"status": {"reservedFor": [{}], "allocation": {"devices": {"results": [7, {"driver": 1}]}}}}
    )


# --- orders -----------------------------------------------------------------------------------------------------------


def test_device_of_a_pending_claim_is_ordered_only_once() -> None:
    after, done = acted(fabric(awaited=waits(claim(D0))))
    assert orders(done) == [("rack", 1)]
    (lease,) = after.capacity.leases.values()
    assert lease.owner == "claim@n/c"
    again = observe(shown(after, T0 + 20), AwaitedSeen(awaited=waits(claim(D0))), now_s=T0 + 20)
    assert not plan(again, T0 + 20).actions


def test_device_ordered_for_a_claim_is_not_ordered_for_a_replica() -> None:
    begin = observe(
        surge(offer(devices_max=1), settings=Settings(capacity=(RACK,))), AwaitedSeen(awaited=waits(claim(D0)))
    )
    after, done = acted(begin)
    assert orders(done) == [("rack", 1)]
    (lease,) = after.capacity.leases.values()
    assert is_claim_owner(lease.owner), "the scheduler gave it away already"
    assert "no provider offers" in plan(after, T0).unmet[0].reason, "no Replica waits for a claim's"


def test_claim_fails_if_its_device_was_ordered_for_a_replica_first() -> None:
    begin, done = acted(surge(offer(devices_max=1), settings=Settings(capacity=(RACK,))))
    assert orders(done) == [("rack", 1)]
    late = observe(begin, AwaitedSeen(awaited=waits(claim(D0))))
    assert not orders(plan(late, T0).actions)
    assert failures(late) == [(FAILED, "NotAttached")]


def test_order_of_a_deleted_claim_is_withdrawn_unless_committed() -> None:
    after, _ = acted(fabric(awaited=waits(claim(D0))))
    removed = observe(shown(after, T0 + 1), AwaitedSeen(awaited=()), now_s=T0 + 1)
    (given_back,) = releases(plan(removed, T0 + WITHDRAW_S).actions)
    assert given_back.order.uncommitted
    committed = shown(removed, T0 + 2, committed=True)
    assert not releases(plan(committed, T0 + WITHDRAW_S).actions)


def test_order_of_a_pending_claim_is_kept_while_a_provider_is_silent() -> None:
    after, _ = acted(fabric(awaited=waits(claim(D0))))
    silent = observe(shown(after, T0 + 1), ProvidersSeen(providers=("cloud", "rack")), now_s=T0 + 1)
    new = replace_fields(silent, leading_since_s=T0)
    assert not plan(new, T0 + WITHDRAW_S + 1.0).actions
    removed = observe(new, AwaitedSeen(awaited=()), now_s=T0 + 1)
    assert releases(plan(removed, T0 + WITHDRAW_S + 1.0).actions)


# --- reports ----------------------------------------------------------------------------------------------------------


def test_attached_device_is_reported_to_its_claim_and_kept_from_replicas() -> None:
    after, _ = acted(fabric(awaited=waits(claim(D0))))
    assert not failures(after)
    here = arrived(after, T0 + 10)
    assert failures(here, T0 + 10) == [(RESCHEDULE, "Attached")]
    assert len(names(here, T0 + 10)) == 1, "one is left"
    assert list_withheld_slices(here) == {"new0": CLAIMED}


def test_claim_is_updated_only_when_all_its_devices_are_attached() -> None:
    other = offer(name="w1b", product="L40")
    both = read_pending_device_claims(claim(D0, device_of("L40", 0)))
    after, done = acted(fabric(offer(), other, awaited=both))
    assert len(orders(done)) == 2
    first = min(after.capacity.leases.values(), key=lambda one: one.id)
    half = replace(after.capacity, leases={**after.capacity.leases, first.id: replace(first, here_s=T0 + 1)})
    assert not failures(replace(after, capacity=half), T0 + 1)
    whole = replace(half, leases={id: replace(one, here_s=T0 + 1) for id, one in half.leases.items()})
    assert failures(replace(after, capacity=whole), T0 + 1) == [(RESCHEDULE, "Attached")] * 2


def test_refused_or_overdue_order_fails_its_claim_and_is_not_repeated() -> None:
    after, _ = acted(fabric(awaited=waits(claim(D0))))
    (lease,) = after.capacity.leases.values()
    refused = observe(after, LeaseRefused(id=lease.id, reason="other clients claimed the free blocks"))
    assert failures(refused) == [(FAILED, "NotAttached")]
    found = find_published_devices(refused, T0)
    assert found is not None
    ((_, _, message),) = found.statuses[0].devices.values()
    assert message.startswith("other clients claimed the free blocks")
    assert not names(refused), "what is left alone is not published"
    assert not plan(refused, T0).actions
    late_s = lease.due_s + 1.0
    late = shown(replace(after, gateways={}), late_s)
    assert [one.reason for one in releases(plan(late, late_s).actions)]
    still = observe(late, OffersSeen(provider="rack", offers=(offer(),)), now_s=late_s)
    assert failures(still, late_s) == [(FAILED, "NotAttached")]


def test_attached_device_that_no_pod_takes_is_released_after_a_delay() -> None:
    after, _ = acted(fabric(awaited=waits(claim(D0))))
    here = observe(arrived(after, T0 + 10), AwaitedSeen(awaited=()), now_s=T0 + 10)
    others = {here.nodes.slices[id].counted: 1 for id in list_withheld_slices(here)}
    used = observe(here, SlicesSeen(slices=tuple(here.nodes.slices.values()), others=others), now_s=T0 + 12)
    assert not list_withheld_slices(used), "the device was assigned to another pod"
    assert not releases(plan(used, T0 + 12 + 3600).actions), "another pod uses the device"

    idle_s = T0 + 10 + CLAIM_S
    assert not releases(plan(here, idle_s - 1.0).actions)
    (given_back,) = plan(here, idle_s).actions
    removed = acted(here, idle_s)[0]
    assert releases([given_back])
    again = observe(removed, AwaitedSeen(awaited=waits(claim(D0))), now_s=idle_s)
    assert failures(again, idle_s) == [(FAILED, "NotTaken")]
    assert not orders(plan(again, idle_s).actions)


def test_claim_for_devices_of_another_installation_orders_nothing() -> None:
    foreign = claim(D0, name="theirs", pool="rackb/w1")
    assert not failures(fabric(awaited=waits(foreign)))
    assert not acted(fabric(awaited=waits(foreign)))[1], "nor to order"
    both = claim(D0)
    both["status"]["allocation"]["devices"]["results"] += foreign["status"]["allocation"]["devices"]["results"]
    after, _ = acted(fabric(awaited=waits(both)))
    assert not failures(after)
    assert failures(arrived(after, T0 + 10), T0 + 10) == [(RESCHEDULE, "Attached")], (
        "all devices of this installation are present"
    )


# --- publishing -------------------------------------------------------------------------------------------------------


def test_published_devices_keep_their_names_after_an_order() -> None:
    begin = fabric()
    assert names(begin) == [D0, D1]
    given = observe(begin, AwaitedSeen(awaited=waits(claim(D1))))
    assert names(given) == [D1, D0]
    after, _ = acted(given)
    assert names(after) == [D1, D0], "one is on its way, one is left"
    less = observe(after, OffersSeen(provider="rack", offers=(offer(devices_max=1),)), now_s=T0 + 1)
    assert names(less, T0 + 1) == [D1, D0], "the fabric itself reports it by now"


def test_attachable_device_is_published_with_its_binding_conditions() -> None:
    found = find_published_devices(fabric(), T0)
    assert found is not None
    (pool,) = found.pools
    assert (pool.name, pool.node) == ("rack/w1", "w1")
    device = pool.devices[0]
    assert device["bindsToNode"]
    assert device["bindingConditions"] == ["FabricDeviceReady"]
    assert device["bindingFailureConditions"] == ["FabricDeviceReschedule", "FabricDeviceFailed"]
    assert device["attributes"]["gpu.nvidia.com/productName"] == {"string": "A100"}
    assert device["capacity"] == {"gpu.nvidia.com/memory": {"value": "16Gi"}}


def test_devices_are_published_only_if_enabled_and_orders_are_known() -> None:
    assert find_published_devices(fabric(publish=False), T0) == Published()
    assert failures(fabric(publish=False, awaited=waits(claim(D0)))) == [(FAILED, "NotPublished")]
    ended = replace(fabric(awaited=waits(claim(D0))), settings=Settings())
    found = find_published_devices(ended, T0, {"rack"})
    assert found is not None
    assert [one.name for one in found.statuses] == ["c"], "the Settings did name it"
    begin = fabric()
    new = replace_fields(begin, leading_since_s=T0, capacity=replace(begin.capacity, listed_s={}))
    assert find_published_devices(new, T0 + 1.0) is None, "what the leader before published stays"
    assert find_published_devices(new, T0 + 90.0) == Published(), "but not for ever"
    assert find_published_devices(replace_fields(begin, leads=False), T0) is None
