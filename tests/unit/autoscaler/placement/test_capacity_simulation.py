"""Offers simulated as future Slices: which replicas fit on them, and how many devices are needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any  # passes on the arguments of a patched function
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.capacity.delivered_slices import GIVEN_BACK, list_withheld_slices, slices_of
from autoscaler.contract import ModelName
from autoscaler.placement import capacity_simulation
from autoscaler.placement.capacity_simulation import (
    SimulationCache,
    SimulationContext,
    build_virtual_slices,
    devices_for,
    list_missing_devices,
    match_requests_to_orders,
)
from autoscaler.placement.model.request_builder import build_placement_request
from autoscaler.placement.model.types import EvictionLevel, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.capacity import Lease, LeaseId, Listed, Offer
from autoscaler.state.node_labels_and_taints import Taint
from autoscaler.state.resources import HostResources
from autoscaler.state.world import Cordon, CordonTarget, NodeId, SliceId, World
from tests.support.builders.capacity import A, cloud, offer
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import GI, T0, device, model, replace_fields, replica, world


def want(of: Model = A, ordinal: int = 0) -> PlacementRequest:
    return build_placement_request(of, ordinal, T0, EvictionLevel.IDLE, "a test")


def ground(of: World, *taken: str) -> SimulationContext:
    return SimulationContext(of, RestartCosts(), T0, taken=frozenset(map(SliceId, taken)))


def lease(of: Offer, name: str = "x", devices: int = 1, listed: Listed | None = None) -> Lease:
    return Lease(
        id=LeaseId(of.provider, name), offer=of, devices=devices, owner=ModelName("a"), asked_s=T0, sent_s=T0,
        due_s=T0 + 300, listed=listed,
    )  # fmt: skip


def here(of: Offer, *ids: str, node: str = "w1") -> Listed:
    return Listed(name="x", offer=of, devices=len(ids), phase="here", node=node, device_ids=ids)


NOTHING = world([A], [device("cpu", 1, "w1", labels={"zone": "z"}, labels_known=True)])


def test_simulated_slices_of_an_order_have_the_labels_of_its_node_or_offer() -> None:
    (attached,) = build_virtual_slices(NOTHING, offer(), range(1), "x")
    assert (attached.node, attached.labels, attached.labels_known) == ("w1", {"zone": "z"}, True)
    parts = build_virtual_slices(NOTHING, cloud(labels={"pool": "g4"}, parts=3, shared=False), range(2), "x")
    assert len(parts) == len({one.id for one in parts}) == 6
    assert len({one.device for one in parts}) == 2
    assert {(one.node, one.memory_bytes, one.device_bytes) for one in parts} == {("x", 16 * GI // 3, 16 * GI)}
    assert all(one.labels == {"pool": "g4"} for one in parts)


def test_order_size_is_the_fewest_devices_that_fit_the_replica() -> None:
    two = model("a", 16, gpu=Gpu(count=2))
    at = ground(NOTHING)
    assert devices_for(at, want(), offer(devices_max=4)) == 1
    assert devices_for(at, want(two), offer(devices_max=4)) == 2
    assert devices_for(at, want(two), offer(devices_max=1)) is None
    assert devices_for(at, want(), cloud(devices_min=4, devices_max=8)) == 4, "it comes with no fewer"
    one_free = ground(world([A], [device("w1g", 16, "w1", product="A100")]))
    assert devices_for(one_free, want(two), offer(devices_max=4)) == 1
    assert devices_for(ground(one_free.world, "w1g"), want(two), offer(devices_max=4)) == 2, "that one is taken"


@pytest.mark.parametrize("free", range(3))
@pytest.mark.parametrize("lacks", range(1, 6))
def test_order_size_is_the_missing_device_count_or_none_above_the_offer(lacks: int, free: int) -> None:
    """The simulation tries 1, 2, ... up to 4 devices, and returns the first number that fits."""
    there = [device(f"w1-{number}", 16, "w1", product="A100") for number in range(free)]
    at = ground(world([A], [*there, device("cpu", 1, "w1")]))
    wanted = want(model("a", 16, gpu=Gpu(count=lacks + free)))
    assert devices_for(at, wanted, offer(devices_max=4)) == (lacks if lacks <= 4 else None)


def test_order_size_is_none_if_the_offered_devices_do_not_suit_the_replica() -> None:
    at = ground(NOTHING)
    assert devices_for(at, want(model("a", 17)), offer(devices_max=4)) is None
    assert devices_for(at, want(model("a", 16, gpu=Gpu(models=("*h100*",)))), offer(devices_max=4)) is None
    picky = change_request(want(), selector=(("zone", "elsewhere"),))
    assert devices_for(at, picky, offer()) is None
    assert devices_for(at, change_request(picky, selector=(("zone", "z"),)), offer()) == 1


def test_pending_replicas_are_matched_to_separate_orders_earliest_first() -> None:
    both = [want(ordinal=0), want(ordinal=1)]
    first, second = lease(offer(), "x"), lease(cloud(), "y")
    assert set(match_requests_to_orders(ground(NOTHING), both, [first, second]).values()) == {first.id, second.id}
    assert [*match_requests_to_orders(ground(NOTHING), both[:1], [first, second]).values()] == [first.id]
    assert [*match_requests_to_orders(ground(NOTHING), both[:1], [second, first]).values()] == [second.id]
    assert not match_requests_to_orders(ground(NOTHING), [], [first])
    assert not match_requests_to_orders(ground(NOTHING), both, [])


def test_two_device_replica_uses_two_orders_only_if_on_the_same_node() -> None:
    two = want(model("a", 16, gpu=Gpu(count=2)))
    assert match_requests_to_orders(ground(NOTHING), [two], [lease(offer(), "x"), lease(offer(), "y")])
    elsewhere = lease(offer(node="w2", name="w2"), "y")
    assert not match_requests_to_orders(ground(NOTHING), [two], [lease(offer(), "x"), elsewhere])


def test_ordered_device_counts_as_missing_until_the_inventory_lists_it() -> None:
    got = lease(offer(), devices=2, listed=here(offer(), "new0", "new1"))
    assert list(list_missing_devices(NOTHING, got)) == [0, 1]
    one = replace_fields(NOTHING, slices={**NOTHING.nodes.slices, **world([], [device("new0", 16, "w1")]).nodes.slices})
    assert list(list_missing_devices(one, got)) == [1]
    assert [each.id for each in slices_of(one, got)] == ["new0"]


def test_all_devices_of_a_delivered_node_belong_to_its_order() -> None:
    at = world([A], [device("g0", 16, "n1"), device("g1", 16, "n1"), device("other", 16, "n2")])
    node = lease(cloud(), devices=2, listed=here(cloud(), node="n1"))
    assert [one.id for one in slices_of(at, node)] == ["g0", "g1"]
    assert not slices_of(at, lease(cloud()))


def test_slices_of_an_order_being_released_are_withheld_from_placement() -> None:
    at = world([A], [device("new0", 16, "w1"), device("own", 16, "w1")])
    going = replace(lease(offer(), listed=here(offer(), "new0")), release_s=T0)
    capacity = replace(at.capacity, leases={going.id: going})
    assert list_withheld_slices(replace(at, capacity=capacity)) == {"new0": GIVEN_BACK}
    assert not list_withheld_slices(at)


def test_order_simulation_does_not_modify_its_input_state() -> None:
    at = world([A], [device("w1g", 16, "w1", product="A100")], [replica(A, "r1", ["w1g"])])
    before = replace(at)
    match_requests_to_orders(ground(at), [want()], [lease(offer())])
    devices_for(ground(at), want(), offer())
    assert at == before


@given(st.data())
def test_limit_on_similar_pending_replicas_does_not_change_the_match(data: st.DataObject) -> None:
    number = st.integers
    requests = [
        want(model(f"m{at:02}", data.draw(st.sampled_from([4, 8, 16])), gpu=Gpu(count=data.draw(number(1, 2)))))
        for at in range(data.draw(number(1, 12)))
    ]
    leases = [
        lease(
            data.draw(st.sampled_from([offer(), cloud(), cloud(parts=2, shared=False), offer(name="w2", node="w2")])),
            f"x{at}", data.draw(number(1, 3)),
        )
        for at in range(data.draw(number(1, 4)))
    ]  # fmt: skip
    there = [device(f"g{at}", 16, data.draw(st.sampled_from(["w1", "w2"])), product="A100") for at in range(2)]
    at = ground(world([A], there), *(one.id for one in there if data.draw(st.booleans())))
    found = match_requests_to_orders(at, requests, leases)

    with patch.object(capacity_simulation, "_most", lambda *_: len(requests)):
        assert match_requests_to_orders(at, requests, leases) == found


def test_matching_100_replicas_to_100_orders_packs_each_at_most_once() -> None:
    requests = [want(model(f"m{at:03}", 16)) for at in range(100)]
    leases = [lease(cloud(name=f"c{at:03}"), f"x{at:03}") for at in range(100)]
    looked: list[int] = []

    def counted(some: Sequence[PlacementRequest], *given: Any, **words: Any) -> PackResult:
        looked.append(len(some))
        return pack(some, *given, **words)

    with patch.object(capacity_simulation, "pack", counted):
        assert len(match_requests_to_orders(ground(NOTHING), requests, leases)) == 100
        assert sum(looked) == 100
        looked.clear()
        assert (
            len(match_requests_to_orders(ground(NOTHING)._replace(answers=SimulationCache()), requests, leases)) == 100
        )
    assert looked == [1], "all of them are alike"


@given(st.data())
def test_order_simulation_with_a_cache_equals_one_without_a_cache(data: st.DataObject) -> None:
    """Nodes without devices that differ in CPU, labels, taints, and the replicas that avoid them."""
    some, number = st.sampled_from, st.integers
    nodes = [f"w{at}" for at in range(data.draw(number(1, 4)))]
    requests = [
        change_request(want(
            model(f"m{data.draw(number(0, 3))}", data.draw(some([4, 8, 16])), gpu=Gpu(count=data.draw(number(1, 2)))),
            at,
        ), cpu_milli=data.draw(some([0, 1000, 4000])), selector=data.draw(some([(), (("zone", "z"),)])),
            avoids=data.draw(some([(), (NodeId("w0"),)])), priority=data.draw(number(0, 1)),
        )
        for at in range(data.draw(number(1, 5)))
    ]  # fmt: skip
    taints = st.sampled_from([(), (Taint("own", "", "NoSchedule"),)])
    offers = [
        offer(
            name=node, node=node, labels={"zone": data.draw(some("zy")), "name": node}, taints=data.draw(taints),
            shared=data.draw(st.booleans()), parts=data.draw(number(1, 2)), devices_max=data.draw(number(1, 3)),
        )
        for node in nodes
    ]  # fmt: skip
    hosts = {NodeId(one): HostResources(cpu_left_milli=data.draw(some([500, 2000, 8000]))) for one in nodes}
    closed = [CordonTarget("node", "w1")] if data.draw(st.booleans()) else []
    cordons = {one: Cordon(place=one, node=one.name, since_s=T0) for one in closed}
    at = ground(replace_fields(world([A], []), hosts=hosts, cordons=cordons))
    remembers = at._replace(answers=SimulationCache())
    leases = [lease(one, f"x{number}") for number, one in enumerate(offers)]
    assert match_requests_to_orders(remembers, requests, leases) == match_requests_to_orders(at, requests, leases)
    for one in requests:
        assert [devices_for(remembers, one, of) for of in offers] == [devices_for(at, one, of) for of in offers]
