"""Any user's claim gets a GPU of a fabric: published, allocated by the real scheduler, attached, and released.

One autoscaler as a process, a real API server that validates what is published, a fake fabric. The node's driver is a
fake, too: an attached GPU appears as a device of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.state.pending_claims import DRIVER
from tests.integration.cluster.support.installations.single_instance import House
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.builders.resource_slices import DRIVER as NVIDIA
from tests.support.builders.resource_slices import gpu, resource_slice
from tests.support.fakes.redfish import A100, BLOCKS, FakeFabric
from tests.support.harness.driver_events import WAIT_S_MAX
from tests.support.net import certificates

RESOURCE = "/apis/resource.k8s.io/v1"
SLICES = f"{RESOURCE}/resourceslices"
ANY = "any-gpu"
"""The DeviceClass of both the devices of a fabric and those of nodes."""


class Yard:
    """A node without GPUs, the GPUs attached to it, and claims of a namespace that Pilotlight does not serve."""

    def __init__(self, api: Api, house: House, namespace: str, fabric: FakeFabric, folder: Path) -> None:
        self.api, self.house, self.fabric, self.name = api, house, fabric, namespace
        self.node = Node(api, f"{namespace}-bare", next_number(), {}, {"test": namespace}, folder)
        self.claims = f"{RESOURCE}/namespaces/{namespace}/resourceclaims"
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.ca = certificates.write_authority(folder, certificates.OURS)
        self._plugged = asyncio.Event()
        fabric.changed = self._plugged.set

    def tell(self, write: Callable[..., None], *, publish: bool = True) -> None:
        """Writes the Settings."""
        redfish = {
            "url": self.fabric.url, "systems": {self.node.name: self.fabric.path("1")}, "caFile": str(self.ca),
            "publish": publish,
        }  # fmt: skip
        write(capacity=[{"name": "rack", "expectedSeconds": 5, "keepSeconds": 1, "redfish": redfish}])

    async def plug(self) -> None:
        """Publishes the attached GPUs as the node's driver does, until cancelled."""
        driver = resource_slice(self.node.name, "gpus", devices=[])
        await self.api.create(SLICES, driver)
        while True:
            await self._plugged.wait()
            self._plugged.clear()
            there = [self._gpu(one) for one in self.fabric.attached("1")]
            await self.api.patch(f"{SLICES}/{driver['metadata']['name']}", {"spec": {"devices": there}})

    def _gpu(self, block: str) -> Object:
        one = gpu(int(block.removeprefix("Gpu-")))
        one["attributes"] |= {"uuid": {"string": f"GPU-{block}"}, "productName": {"string": A100[0]}}
        return {**one, "capacity": {"memory": {"value": f"{A100[1]}Mi"}}}

    async def published(self) -> list[Object]:
        """Our ResourceSlices for that node, once the pool is complete."""
        there = (await self.api.get(SLICES, fieldSelector=f"spec.driver={DRIVER}"))["items"]
        pools = [(one["spec"]["pool"], one) for one in there]
        return [
            one for pool, one in pools
            if (pool["name"], pool["resourceSliceCount"]) == (f"rack/{self.node.name}", 1)
        ]  # fmt: skip

    async def ask(self, name: str) -> None:
        """Creates a pod with a claim for any A100."""
        product = f"device.attributes['{NVIDIA}'].productName == '{A100[0]}'"
        exactly = {"deviceClassName": ANY, "selectors": [{"cel": {"expression": product}}]}
        requests = [{"name": "gpu", "exactly": exactly}]
        await self.api.create(self.claims, {
            "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": {"name": name},
            "spec": {"devices": {"requests": requests}},
        })  # fmt: skip
        words = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        container = {"name": "c", "image": "fake-engine", "command": words, "resources": {"claims": [{"name": "gpu"}]}}
        await self.api.create(self.pods, {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {
                "terminationGracePeriodSeconds": 1, "nodeSelector": {"test": self.name}, "containers": [container],
                "resourceClaims": [{"name": "gpu", "resourceClaimName": name}],
            },
        })  # fmt: skip

    async def stop(self, name: str) -> None:
        """Deletes the pod and its claim."""
        await self.api.delete(f"{self.pods}/{name}")
        await self.api.delete(f"{self.claims}/{name}")

    async def got(self, name: str) -> Object:
        """The device allocated to its claim; empty if there is none."""
        status = (await self.api.get(f"{self.claims}/{name}")).get("status", {})
        results: list[Object] = status.get("allocation", {}).get("devices", {}).get("results", [])
        return results[0] if results else {}

    async def until_event(self, name: str, type_: str, watches: asyncio.Event) -> Object:
        """Waits until its claim has that condition. Once `watches` is set, the condition may be set only briefly."""
        query = {"fieldSelector": f"metadata.name={name}"}
        try:
            async with contextlib.aclosing(self.api.watch(self.claims, None, query, initial=True)) as changes:
                async for _, claim in changes:
                    watches.set()
                    assert isinstance(claim, dict)
                    for device in claim.get("status", {}).get("devices") or ():
                        for condition in device.get("conditions") or ():
                            if device["driver"] == DRIVER and condition["type"] == type_:
                                return dict(condition)
        finally:
            watches.set()  # an error is raised where the result is awaited
        raise AssertionError(f"{name} never received the condition {type_}")


async def until(holds: Callable[[], Any]) -> None:
    """Polls until `holds` is true."""
    async with asyncio.timeout(WAIT_S_MAX):
        while not await holds():
            await asyncio.sleep(0.05)


@pytest.fixture
async def yard(api: Api, house: House, namespace: str, tmp_path: Path) -> AsyncIterator[Yard]:
    """Runs everything except the autoscaler; deletes the driver's objects afterwards."""
    kinds = f"device.driver in ['{NVIDIA}', '{DRIVER}'] && device.attributes['{NVIDIA}'].type == 'gpu'"
    with contextlib.suppress(ApiError):  # it may exist from the previous test
        await api.create(f"{RESOURCE}/deviceclasses", {
            "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": {"name": ANY},
            "spec": {"selectors": [{"cel": {"expression": kinds}}]},
        })  # fmt: skip
    async with FakeFabric(gpus=(A100,), login="none").serving(certificates.sides().server) as fabric:
        one = Yard(api, house, namespace, fabric, tmp_path)
        one.tell(house.write)
        async with one.node.running():
            playing = asyncio.create_task(one.plug())
            yield one
            playing.cancel()
            await asyncio.wait([playing])
            await api.delete(one.pods)
            await api.delete(f"{SLICES}/{one.node.name}-gpus")
            assert playing.cancelled(), playing.exception()


@pytest.mark.standard
async def test_foreign_claim_gets_an_attached_gpu_that_is_detached_afterwards(yard: Yard) -> None:
    yard.fabric.hold = True
    async with yard.house.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await until(yard.published)
        ((published,), attached) = await yard.published(), yard.fabric.attached("1")
        assert len(published["spec"]["devices"]) == 1
        assert not attached, "it is not there, and could be"
        assert published["spec"]["devices"][0]["bindingConditions"] == ["FabricDeviceReady"]
        await yard.ask("p")

        async def given() -> bool:
            return (await yard.got("p")).get("driver") == DRIVER

        await until(given)

        async def patched() -> bool:
            return bool(yard.fabric.patches(yard.fabric.path("1")))

        await until(patched)
        assert "nodeName" not in (await yard.api.get(f"{yard.pods}/p"))["spec"], "it waits before it is bound"
        (marked,) = [one.client for one in yard.fabric.blocks.values() if one.gpu]
        assert marked is not None
        assert f"owner=claim@{yard.name}/p" in marked
        watches = asyncio.Event()
        telling = asyncio.create_task(yard.until_event("p", "FabricDeviceReschedule", watches))
        await watches.wait()
        yard.fabric.finish()
        condition = await telling
        assert (condition["status"], condition["reason"]) == ("True", "Attached")

        async def bound() -> bool:
            return bool((await yard.api.get(f"{yard.pods}/p"))["spec"].get("nodeName") == yard.node.name)

        await until(bound)
        got = await yard.got("p")
        assert (got["driver"], got["device"]) == (NVIDIA, "gpu-1"), "the scheduler gave it the device of the node"
        assert len(yard.fabric.patches(yard.fabric.path("1"))) == 1, "one device, attached once"

        async def withdrawn() -> bool:
            return not await yard.published()

        await until(withdrawn)  # nothing more could be attached
        await yard.stop("p")

        async def detached() -> bool:
            return not yard.fabric.attached("1") and not any(one.client for one in yard.fabric.blocks.values())

        await until(detached)
        await until(yard.published)
        (again,) = await yard.published()
        assert again["spec"]["pool"]["generation"] == 2, "made anew, and seen to be kept"
        yard.tell(yard.house.tell, publish=False)
        await until(withdrawn)


async def test_failed_attach_is_reported_on_the_claim_and_leaves_no_order(yard: Yard) -> None:
    yard.fabric.refuse = 400
    async with yard.house.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await until(yard.published)
        watches = asyncio.Event()
        telling = asyncio.create_task(yard.until_event("p", "FabricDeviceFailed", watches))
        await watches.wait()
        await yard.ask("p")
        condition = await telling
        assert condition["reason"] == "NotAttached"
        assert "127.0.0.1" not in condition["message"]
        await yard.stop("p")

        async def unmarked() -> bool:
            return not any(one.client for one in yard.fabric.blocks.values())

        await until(unmarked)
        assert not yard.fabric.attached("1")
        assert yard.fabric.patches(BLOCKS), "it was marked before"
