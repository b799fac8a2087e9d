"""How much more capacity is available now: unused and attachable, not the configured maximum."""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.capacity.remaining_offers import SILENT_S, count_offered_devices
from autoscaler.server.metrics import Metrics
from autoscaler.state.capacity import LeaseRefused
from tests.support.builders.capacity import acted, cloud, observe, offer, surge
from tests.support.builders.worlds import T0

RACK = ("rack", "A100")


def test_shared_device_pool_is_counted_once_over_all_nodes() -> None:
    nodes = [offer(name=f"w{at}", node=f"w{at}", devices_max=3, pool=4) for at in range(5)]
    begin = surge(*nodes)
    assert count_offered_devices(begin.capacity, T0) == {RACK: 4}
    after, _ = acted(begin)
    assert count_offered_devices(after.capacity, T0) == {RACK: 3}, "one was ordered since"


def test_offered_devices_are_counted_up_to_the_limit_of_each_offer() -> None:
    at = surge(offer(devices_max=2), cloud(many=3, devices_min=4, devices_max=4))
    assert count_offered_devices(at.capacity, T0) == {RACK: 2, ("cloud", "A100"): 12}


def test_queued_offer_is_not_counted_as_available() -> None:
    assert not count_offered_devices(surge(cloud("dws", queued=True)).capacity, T0)


def test_refused_offer_and_silent_provider_count_as_zero_devices() -> None:
    after, _ = acted(surge(offer()))
    (id,) = after.capacity.leases
    refused = observe(after, LeaseRefused(id=id, reason="none left"), now_s=T0 + 1)
    assert count_offered_devices(refused.capacity, T0 + 2) == {RACK: 0}
    assert count_offered_devices(surge(offer()).capacity, T0 + SILENT_S + 60) == {RACK: 0}


def test_offered_devices_are_exported_per_provider_and_product() -> None:
    at = surge(offer(devices_max=2))
    line = 'pilotlight_devices_on_offer{product="A100",provider="rack"} 2.0'
    assert line in Metrics(lambda: at, lambda: T0).text().decode().splitlines()
    removed = replace(at, capacity=replace(at.capacity, offers={}))
    assert "devices_on_offer{" not in Metrics(lambda: removed, lambda: T0).text().decode()
