"""DRA claims with the real scheduler: a pinned device is allocated; counters and capacity are used up and returned.

ResourceSlices are written by hand, as NVIDIA's driver writes them; pods run, but no device is prepared for them.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator

import pytest

from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.slicing.dra import Dra, Got, list_alternatives, read_allocations
from autoscaler.slicing.mig_geometry import Cut
from autoscaler.slicing.slicer_protocol import NodeFacts, Object, PodFields, SliceShare
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing
from autoscaler.state.world import NodeId, Slice
from tests.integration.cluster.support.kubelet.node import Node
from tests.support import golden
from tests.support.builders.resource_slices import (
    DRIVER,
    H100,
    classes,
    cut_name,
    gpu,
    many,
    partitionable,
    resource_slice,
)
from tests.support.builders.slices import find_slice

RESOURCE = "/apis/resource.k8s.io/v1"
WAIT_S_MAX = 90.0
GIB = 1 << 30


class Bench:
    """One node's ResourceSlices, and pods with claims in one namespace."""

    def __init__(self, api: Api, namespace: str, node: str) -> None:
        self.api = api
        self.node = node
        self.declared: NodeKind | None = None
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.claims = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"

    async def publish(self, *objects: Object) -> None:
        """Publishes objects as a driver on the node would."""
        for one in objects:
            await self.api.create(f"{RESOURCE}/resourceslices", one)

    async def slices(self, slicer: Dra, *kept: str) -> dict[str, Slice]:
        """Device -> slice, from the API server's current objects."""
        found = await self.api.get(f"{RESOURCE}/resourceslices", fieldSelector=f"spec.nodeName={self.node}")
        facts = NodeFacts(NodeId(self.node), declared=self.declared, devices=found["items"], kept=kept)
        there = slicer.inventory(facts) or ()
        return {one.id.rpartition("/")[2]: one for one in there}

    async def start(self, name: str, fields: PodFields) -> str:
        """Creates a pod with these fields and returns its name."""
        for claim in fields.claims:
            with contextlib.suppress(ApiError):  # claims shared by several pods exist already
                await self.api.create(self.claims, claim)
        pod = golden.pod(name, fields)
        pod["spec"] |= {"terminationGracePeriodSeconds": 1}
        pod["spec"]["containers"][0]["command"] = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        await self.api.create(self.pods, pod)
        return name

    async def stop(self, name: str) -> None:
        """Deletes the pod and its own claim."""
        await self.api.delete(f"{self.pods}/{name}")
        await self.api.delete(f"{self.claims}/{name}")

    async def got(self, name: str) -> tuple[Got, ...]:
        """Waits until its claim is allocated and its pod is bound; returns the allocation."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not (got := read_allocations(await self.api.get(f"{self.claims}/{name}"))):
                await asyncio.sleep(0.02)
            await self.bound(name)
        return got

    async def bound(self, name: str) -> None:
        """Waits until its pod is on the node."""
        async with asyncio.timeout(WAIT_S_MAX):
            while (await self.api.get(f"{self.pods}/{name}"))["spec"].get("nodeName") != self.node:
                await asyncio.sleep(0.02)

    async def refused(self, name: str) -> None:
        """Waits until the scheduler reports its pod as unschedulable."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                conditions = (await self.api.get(f"{self.pods}/{name}"))["status"].get("conditions", ())
                if any("cannot allocate all claims" in one.get("message", "") for one in conditions):
                    break
                await asyncio.sleep(0.02)
        assert not read_allocations(await self.api.get(f"{self.claims}/{name}"))


async def create_device_classes(api: Api) -> None:
    """Creates NVIDIA's DeviceClasses, which may exist from the previous test."""
    for device_class in classes():
        with contextlib.suppress(ApiError):
            await api.create(f"{RESOURCE}/deviceclasses", device_class)


@pytest.fixture
async def bench(api: Api, namespace: str, node: Node) -> AsyncIterator[Bench]:
    """With NVIDIA's DeviceClasses. Deletes its ResourceSlices and pods that wait for one of its UUIDs afterwards."""
    await create_device_classes(api)
    one = Bench(api, namespace, node.name)
    yield one
    await api.delete(one.pods)
    found = await api.get(f"{RESOURCE}/resourceslices", fieldSelector=f"spec.nodeName={node.name}")
    for published in found["items"]:
        await api.delete(f"{RESOURCE}/resourceslices/{published['metadata']['name']}")


def all_of(one: Slice) -> list[SliceShare]:
    return [SliceShare(one, one.memory_bytes, one.compute_percent)]


async def test_claim_for_a_specific_gpu_gets_only_that_gpu(bench: Bench) -> None:
    """The driver's first device has no UUID: claims for other devices still work, and it is pinned by its address."""
    nameless = gpu(7)
    nameless["attributes"]["resource.kubernetes.io/pciBusID"] = {"string": "0000:65:00.0"}
    del nameless["attributes"]["uuid"]
    await bench.publish(resource_slice(bench.node, "gpus", devices=[nameless, gpu(0), gpu(1), gpu(2)]))
    slicer = Dra()
    there = await bench.slices(slicer)
    await bench.start("m-1", slicer.fields("m-1", all_of(there["gpu-2"])))
    (got,) = await bench.got("m-1")
    assert find_slice(got, there.values()) == there["gpu-2"]
    await bench.start("m-2", slicer.fields("m-2", all_of(there["gpu-2"])))
    await bench.refused("m-2")  # although two others are free
    await bench.start("m-3", slicer.fields("m-3", [*all_of(there["gpu-0"]), *all_of(there["gpu-1"])]))
    assert [one.entry.rpartition("/")[2] for one in await bench.got("m-3")] == ["gpu-0", "gpu-1"]
    await bench.start("m-4", slicer.fields("m-4", all_of(there["gpu-7"])))
    (got,) = await bench.got("m-4")
    assert find_slice(got, there.values()) == there["gpu-7"]
    await bench.stop("m-1")
    (got,) = await bench.got("m-2")
    assert find_slice(got, there.values()) == there["gpu-2"]


async def test_mig_partitions_are_allocated_until_shared_counters_are_used_up(bench: Bench) -> None:
    await bench.publish(*partitionable(bench.node))
    at = f"{DRIVER}/{bench.node}"
    both = (f"{at}/{cut_name('3g.40gb', 0)}", f"{at}/{cut_name('3g.40gb', 4)}")
    there = await bench.slices(Dra(), *both)
    assert set(there) == {cut_name("3g.40gb", 0), cut_name("3g.40gb", 4)}, "no memory slice is left for others"
    held = []
    for name, one in zip(("m-1", "m-2"), there.values(), strict=True):
        await bench.start(name, Dra().fields(name, all_of(one)))
        (got,) = await bench.got(name)
        held.append(got.entry)
    assert sorted(held) == sorted(both)

    small = (await bench.slices(Dra(), f"{at}/{cut_name('1g.10gb', 5)}"))[cut_name("1g.10gb", 5)]
    await bench.start("m-3", Dra().fields("m-3", all_of(small)))
    await bench.refused("m-3")
    await bench.stop("m-2")
    (got,) = await bench.got("m-3")
    places = Dra().places(NodeFacts(NodeId(bench.node), devices=partitionable(bench.node)))
    (cuts,) = places.values()
    first = min(start for start in H100.profile("1g.10gb").starts if cuts[Cut("1g.10gb", start)] == got.entry)
    removed = next(cut.start for cut, name in cuts.items() if name == held[1])
    assert first == removed, "of a profile the first that fits: its place cannot be asked for"
    after = await bench.slices(Dra(), held[0], got.entry)
    assert {held[0].rpartition("/")[2], got.entry.rpartition("/")[2]} < set(after)


async def test_claim_for_a_partition_at_a_position_gets_exactly_that_partition(bench: Bench) -> None:
    await bench.publish(*partitionable(bench.node, places=True))
    wanted = tuple(
        f"{DRIVER}/{bench.node}/{cut_name(*cut)}" for cut in (("1g.10gb", 6), ("2g.20gb", 2), ("1g.10gb", 4))
    )
    there = await bench.slices(Dra(), *wanted)
    for number, name in enumerate(wanted):
        one = there[name.rpartition("/")[2]]
        await bench.start(f"m-{number}", Dra().fields(f"m-{number}", all_of(one)))
        (got,) = await bench.got(f"m-{number}")
        assert find_slice(got, there.values()) == one, "not the first of its profile"


async def test_claim_beyond_the_free_memory_of_a_shared_gpu_is_not_allocated(bench: Bench) -> None:
    await bench.publish(resource_slice(bench.node, "many", devices=[many(0)]))
    one = (await bench.slices(Dra()))["gpu-0"]
    assert one.shared
    for name in ("m-1", "m-2", "m-3", "m-4"):
        much = 20 * GIB - 1 if name == "m-4" else 30 * GIB
        await bench.start(name, Dra().fields(name, [SliceShare(one, much)]))
        if name == "m-3":
            await bench.refused(name)
            continue
        (got,) = await bench.got(name)
        assert got.memory_bytes == (20 * GIB if name == "m-4" else 30 * GIB), "rounded as we asked"
        assert find_slice(got, [one]) is one
    await bench.stop("m-1")
    (got,) = await bench.got("m-3")
    assert got.memory_bytes == 30 * GIB


async def test_prioritized_list_allocates_the_first_free_device(bench: Bench) -> None:
    await bench.publish(resource_slice(bench.node, "gpus", devices=[gpu(0), gpu(1)]))
    there = await bench.slices(Dra())
    own = there["gpu-1"]
    choices = [
        *all_of(own),
        *(part for one in list_alternatives(own, there.values(), {own.id}) for part in all_of(one)),
    ]
    for name, device, choice in (("m-1", "gpu-1", "gpu/choice-0"), ("m-2", "gpu-0", "gpu/choice-1")):
        await bench.start(name, Dra().either(name, choices))
        (got,) = await bench.got(name)
        assert (got.request, find_slice(got, there.values())) == (choice, there[device])
    await bench.start("m-3", Dra().either("m-3", choices))
    await bench.refused("m-3")


async def test_pods_that_share_a_gpu_use_one_claim(bench: Bench) -> None:
    await bench.publish(resource_slice(bench.node, "gpus", devices=[gpu(0)]))
    slicer, slicing = Dra(), NodeSlicing(kind="dra", sharing="mps")
    bench.declared = NodeKind(
        selector={}, device=NodeDevice(model="H100", memory_bytes=Bytes(80 * GIB)), slicing=slicing
    )
    one = (await bench.slices(slicer))["gpu-0"]
    for name in ("m-1", "m-2"):
        fields = slicer.fields(name, [SliceShare(one, 20 * GIB, 40)])
        await bench.start(name, fields)
        await bench.bound(name)
    (claim,) = (await bench.api.get(bench.claims))["items"]
    assert sorted(pod["name"] for pod in claim["status"]["reservedFor"]) == ["m-1", "m-2"]


async def test_gpu_with_a_device_taint_is_not_allocated(bench: Bench) -> None:
    bad = gpu(0, taints=[{"key": "xid", "value": "79", "effect": "NoSchedule"}])
    await bench.publish(resource_slice(bench.node, "gpus", devices=[bad]))
    one = (await bench.slices(Dra()))["gpu-0"]
    assert "xid=79:NoSchedule" in one.closed
    await bench.start("m-1", Dra().fields("m-1", all_of(one)))
    await bench.refused("m-1")
