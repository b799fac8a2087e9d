"""Which slices belong to a capacity order, what blocks its release, and which GPUs the pods on them hold."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.capacity.delivered_slices import is_release_blocked, is_slice_of_lease, select_pod_marks
from autoscaler.contract import ModelName
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Gpu
from autoscaler.state.actions import StartReplica
from autoscaler.state.capacity import NO_MARKS, Lease, LeasesSeen, Listed, Marks
from autoscaler.state.world import DeviceId, NodeId, Slice, SliceId, World
from tests.support.builders.capacity import (
    A,
    acted,
    arrived,
    cloud,
    observe,
    offer,
    offered,
    orders,
    releases,
    shown,
    surge,
)
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replace_fields, replica, world


def counted(number: int) -> Slice:
    name = f"w1/gpu{number}"
    return Slice(id=SliceId(name), device=DeviceId(name), node=NodeId("w1"), memory_bytes=GI)


@pytest.mark.parametrize(("first", "here"), [(1, [1, 2]), (2, [2, 3]), (None, [])])
def test_capacity_order_owns_gpus_without_uuid_starting_at_its_first_index(first: int | None, here: list[int]) -> None:
    ids = ("w1/GPU-a", "w1/GPU-b")
    listed = Listed(name="a", offer=offer(), devices=2, phase="here", node="w1", device_ids=ids, counted_from=first)
    lease = lease_of(listed)
    assert [number for number in range(4) if is_slice_of_lease(lease, counted(number))] == here
    known = Slice(id=SliceId("x"), device=DeviceId("w1/GPU-b"), node=NodeId("w1"), memory_bytes=GI)
    assert is_slice_of_lease(lease, known), "a known UUID counts"


def lease_of(listed: Listed) -> Lease:
    """The order as its provider lists it."""
    begin = observe(offered(surge(), offer()), LeasesSeen(provider="rack", leases=(listed,), began_s=T0))
    (lease,) = begin.capacity.leases.values()
    return lease


def test_attach_order_owns_no_device_before_its_provider_reports_ids() -> None:
    """Otherwise it would own the node's original devices and count as delivered, and a second one would be ordered."""
    listed = Listed(name="a", offer=offer(), devices=1, node="w1", counted_from=0)
    assert not is_slice_of_lease(lease_of(listed), counted(0))
    added = Listed(name="a", offer=cloud(), devices=1, phase="here", node="w1")
    assert is_slice_of_lease(lease_of(added), counted(0)), "of a node that was added it has all"


def test_no_second_device_is_ordered_while_the_first_is_undelivered() -> None:
    two = model("a", 0, gpu=Gpu(count=2))
    own = replace(counted(0), memory_bytes=16 * GI, shared=False, product="A100", kind="whole")
    waits = gateway(levels=[level("a", 1, wait_s=60.0)])
    begin = offered(world([two], [own], gateways=[waits], leading_since_s=T0 - 500), offer(shared=False))
    after, done = acted(begin)
    assert orders(done) == [("rack", 1)]
    coming = shown(after, T0 + 1, node="w1", committed=True)
    assert not orders(acted(coming, T0 + 1)[1])


def alone(**more: Any) -> World:
    """An order idle for long on w1, whose two GPUs are only counted; it is released only when the node is idle."""
    listed = Listed(
        name="a", offer=offer(), devices=1, phase="here", node="w1", device_ids=("w1/GPU-a",), counted_from=1,
        alone=True,
    )  # fmt: skip
    slices = [replace(counted(at), handle="nvidia.com/gpu") for at in range(2)]
    begin = offered(world([A], slices, gateways=[gateway(seen_s=T0 + 5000)], **more), offer())
    return observe(begin, LeasesSeen(provider="rack", leases=(listed,), began_s=T0 + 1), now_s=T0 + 1)


def test_release_of_devices_without_uuid_waits_until_their_node_is_idle() -> None:
    """An earlier release order would close it, and it would stay as long as the other device is used."""
    idle = alone()
    (lease,) = idle.capacity.leases.values()
    assert not is_release_blocked(idle, lease)
    assert len(releases(plan(idle, T0 + 5000).actions)) == 1
    on_other = replica(A, "a-1", ["w1/gpu0"])
    busy = alone(replicas=[on_other])
    assert is_release_blocked(busy, lease)
    assert not releases(plan(busy, T0 + 5000).actions)
    foreign = alone(others={"w1 nvidia.com/gpu": 1})
    assert is_release_blocked(foreign, lease)
    assert lease.listed is not None
    known = replace(lease, listed=replace(lease.listed, alone=False))
    assert not is_release_blocked(busy, known)


# --- GPUs that pods hold ----------------------------------------------------------------------------------------------


OTHER = ModelName("other")
SAYS = Marks(annotations={"consume": "it"})
NEW, CPU = (SliceId("new0"),), (SliceId("cpu"),)


def lent() -> World:
    """An order whose device has been delivered."""
    after, _ = acted(surge(offer(labels={"pool": "l4"})))
    there = arrived(after, T0 + 1.0)
    fields: dict[str, Any] = {"phase": "here", "committed": True, "node": "w1", "device_ids": ("new0",), "marks": SAYS}
    return shown(there, T0 + 2.0, **fields)


def there(name: str, pool: str) -> dict[SliceId, Slice]:
    """A slice of a node with this pool label."""
    return {SliceId(name): replace(device(name, 16, "w9"), labels={"pool": pool})}


def test_pod_of_any_model_gets_the_annotations_of_its_capacity_order() -> None:
    of = lent()
    assert select_pod_marks(of, A.name, NEW) == select_pod_marks(of, OTHER, NEW) == SAYS
    assert select_pod_marks(of, A.name, CPU) == NO_MARKS


def test_annotations_of_an_undelivered_order_apply_only_to_its_model() -> None:
    after, _ = acted(surge(offer(labels={"pool": "l4"})))
    booked = shown(after, T0 + 1.0, phase="coming", marks=SAYS)
    booked = replace_fields(booked, slices={**booked.nodes.slices, **there("new0", "l4"), **there("x", "t4")})
    assert select_pod_marks(booked, A.name, NEW) == SAYS
    assert select_pod_marks(booked, A.name, (SliceId("x"),)) == NO_MARKS, "of another kind of node"
    assert select_pod_marks(booked, OTHER, NEW) == NO_MARKS


def test_started_replica_carries_the_annotations_of_its_capacity_order() -> None:
    (started,) = (one for one in plan(lent(), T0 + 2.0).actions if isinstance(one, StartReplica))
    assert started.replica.resources.slices == NEW
    assert started.replica.runtime.marks == SAYS
