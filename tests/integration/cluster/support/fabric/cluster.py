"""Nodes to which a fake fabric operator (CRO) attaches GPUs, so that their count really changes, and one House.

Manages the operator's pool, the nodes' GPU counts (reported as by a device plugin, or as ResourceSlices of a DRA
driver), and a diary of events in order. Pods that were ever unschedulable are recorded by name.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.watch import Change, Watched
from autoscaler.providers.cro.objects import REQUESTS, RESOURCES
from pilotlight.provider_kubernetes_client import Objects
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.installations.single_instance import House
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.builders.resource_slices import classes, gpu, resource_slice
from tests.support.fakes.kubernetes.cro import FakeCro
from tests.support.harness.driver_events import WAIT_S_MAX

GPU, RESOURCE = "nvidia.com/gpu", "/apis/resource.k8s.io/v1"


class Rack:
    """`own`: a node with a GPU; `bare`: a node without one, to which GPUs can be attached. The fabric has four."""

    def __init__(self, api: Api, house: House, name: str, logs: Path, has: int = 0) -> None:
        """`has`: number of GPUs of the node to which others can be attached."""
        self.api, self.house, self.name, self.logs = api, house, name, logs
        self.model = f"A100-{name}-40GB"
        self.own = self.node("own", 1)
        self.bare = self.node("bare", has, fabric=name)
        self.nodes = [self.own, self.bare]
        """Nodes that exist from the beginning."""
        self.may_have: dict[str, Node] = {self.bare.name: self.bare}
        """Name -> node to which GPUs can be attached."""
        self.has = {self.bare.name: has}
        self.counts = [has]
        """History of the total number of GPUs on those nodes."""
        self.dra: dict[str, list[str]] | None = None
        """Node -> GPU UUIDs in its ResourceSlices; None: a device plugin reports the count."""
        self.diary: list[str] = []
        self.log_at: dict[str, str] = {}
        """UUID -> the autoscaler's log when the GPU was attached or detached."""
        self.waited: set[str] = set()
        """Pods of the House that were unschedulable at any moment."""
        self.notes: dict[str, str] = {}
        """Annotations of the bare node."""
        self.tasks: set[asyncio.Task[None]] = set()
        clock = asyncio.get_running_loop().time
        self.cro = FakeCro(
            Objects(api, api), clock, {self.model: 4}, attach_s=0.3, detach_s=0.3, look_s=0.5, period_s=0.05,
            attached=lambda node, uuid: self.changes(node, uuid, 1),
            detached=lambda node, uuid: self.changes(node, uuid, -1),
        )  # fmt: skip

    def node(self, name: str, has: int, memory: str = "256Gi", **labels: str) -> Node:
        """Adds a node with `has` GPUs of its own."""
        amounts = {GPU: str(has), "memory": memory} if has else {"memory": memory}
        return Node(self.api, f"{self.name}-{name}", next_number(), amounts, labels, self.logs, probe_period_s=0.05)

    def kind(self, most: int = 2, **more: object) -> dict[str, object]:
        """The entry in the Settings' `nodes` for nodes that GPUs can be attached to."""
        device = {"model": self.model, "memory": "40Gi"}
        return {"selector": {"fabric": self.name}, "device": device, "devicesMax": most, **more}

    def settings(self, most: int = 2, expected_s: float = 1, **more: object) -> dict[str, object]:
        """Settings with the fabric."""
        return {
            "nodes": [self.kind(most, **more)],
            "capacity": [{"name": "rack", "cro": {"model": self.model}, "expectedSeconds": expected_s}],
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rack]:
        """Runs the nodes, the operator and the House."""
        await custom_resources.install_foreign(self.api, "cro")
        async with AsyncExitStack() as stack:
            for node in self.nodes:
                await stack.enter_async_context(node.running())
            if self.notes:
                path = f"/api/v1/nodes/{self.bare.name}"
                await self.api.patch(path, {"metadata": {"annotations": self.notes}})
            if self.dra is not None:
                await self._publish_classes()
            pods = f"/api/v1/namespaces/{self.name}/pods"
            group = await stack.enter_async_context(asyncio.TaskGroup())  # an error of the operator fails the test
            for works in (self.cro.run(), Watched(self.api, pods, lambda found: found, self._pods).run()):
                stack.callback(group.create_task(works).cancel)
            await stack.enter_async_context(self.house.running())
            yield self

    def _pods(self, changes: list[Change[Object]]) -> None:
        for _, old, new in changes:
            if new is None:
                self.diary.append(f"gone {(old or {})['metadata']['name']}")
                continue
            conditions = {one["type"]: one for one in new["status"].get("conditions", ())}
            if conditions.get("PodScheduled", {}).get("reason") == "Unschedulable":
                self.waited.add(new["metadata"]["name"])

    # --- GPUs are attached and detached -------------------------------------------------------------------------------

    def changes(self, node: str, uuid: str, change: int) -> None:
        """Handles that a GPU was attached to a node or detached from it."""
        self.counts.append(self.counts[-1] + change)
        self.has[node] = self.has.get(node, 0) + change
        self.diary.append(f"{'attached' if change > 0 else 'detached'} {uuid}")
        self.log_at[uuid] = self.log()
        if self.dra is not None:
            there = self.dra.setdefault(node, [])
            change_made = self._publish(node, uuid) if change > 0 else self._unpublish(node, uuid)
            (there.append if change > 0 else there.remove)(uuid)
        else:
            change_made = self.may_have[node].has({GPU: str(self.has[node])})
        task = asyncio.create_task(change_made)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _publish_classes(self) -> None:
        for one in classes():
            with contextlib.suppress(ApiError):  # it may exist from the previous test
                await self.api.create(f"{RESOURCE}/deviceclasses", one)

    async def _publish(self, node: str, uuid: str) -> None:
        """Publishes one more GPU as the node's DRA driver does, each in a pool of its own."""
        name = uuid.lower()
        one = gpu(0)
        one["name"] = name
        one["attributes"] |= {"uuid": {"string": uuid}, "productName": {"string": self.model}}
        one["capacity"] = {"memory": {"value": "40Gi"}}
        made = resource_slice(node, name, pool=f"{node}-{name}", devices=[one])
        await self.api.create(f"{RESOURCE}/resourceslices", made)

    async def _unpublish(self, node: str, uuid: str) -> None:
        await self.api.delete(f"{RESOURCE}/resourceslices/{node}-{uuid.lower()}")

    # --- observed state -----------------------------------------------------------------------------------------------

    async def requests(self) -> list[Object]:
        """All requests for this fabric."""
        there = (await self.api.get(REQUESTS))["items"]
        return [one for one in there if one["spec"]["resource"]["model"] == self.model]

    async def until_gone(self) -> None:
        """Waits until no request is left; after a replica has ended that takes at least half a minute."""
        async with asyncio.timeout(2 * WAIT_S_MAX):
            while await self.requests():
                await asyncio.sleep(0.1)

    async def answered(self, model: str) -> None:
        """Sends a request and checks that it succeeds; otherwise fails with the explanation."""
        status, body = await self.house.call(model)
        if status == 200:
            return
        raise AssertionError(body, await self.explained(model))

    async def explained(self, model: str) -> str:
        """Returns the output of `explain` for a model."""
        return await self.ops(f"api/v1/explain/model/{model}")

    async def ops(self, path: str) -> str:
        """Returns the response of the autoscaler's operations port to a GET."""
        async with self.house.session.get(f"http://127.0.0.1:{self.house.ops}/{path}") as answer:
            return await answer.text()

    def log(self) -> str:
        """The autoscaler's log so far."""
        return (self.logs / "autoscaler.log").read_text()

    async def placed(self, model: str = "") -> dict[str, tuple[str, str]]:
        """Pod -> (model, node), of one model or of all."""
        label = "pilotlight.dev/model"
        pods = await self.api.get(
            f"/api/v1/namespaces/{self.name}/pods", labelSelector=f"{label}={model}" if model else label
        )
        return {
            one["metadata"]["name"]: (one["metadata"]["labels"][label], one["spec"].get("nodeName", ""))
            for one in pods["items"]
        }

    async def where(self) -> dict[str, str]:
        """Model -> the node of its pod."""
        return dict((await self.placed()).values())

    async def clean(self) -> None:
        """Deletes everything, whatever finalizers exist."""
        for path in (REQUESTS, RESOURCES):
            for left in (await self.api.get(path))["items"]:
                if left["spec"].get("resource", left["spec"])["model"] == self.model:
                    with contextlib.suppress(ApiError):  # the operator's last write may delete it first
                        await self.api.patch(f"{path}/{left['metadata']['name']}", {"metadata": {"finalizers": None}})
                        await self.api.delete(f"{path}/{left['metadata']['name']}")
        with contextlib.suppress(ApiError):  # most tests do not install this kind
            await self.api.delete(f"/apis/cluster.x-k8s.io/v1beta2/namespaces/{self.name}/machinesets")
        for node, uuids in (self.dra or {}).items():
            for uuid in uuids:
                with contextlib.suppress(ApiError):  # it may not have been published yet
                    await self._unpublish(node, uuid)


@pytest.fixture
async def rack(
    request: pytest.FixtureRequest, api: Api, house: House, namespace: str, tmp_path: Path
) -> AsyncIterator[Rack]:
    """Yields a Rack that is not started yet; at the end deletes everything that belongs to it."""
    one = Rack(api, house, namespace, tmp_path, getattr(request, "param", 0))
    yield one
    await one.clean()
