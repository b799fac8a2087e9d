"""Calls beyond what all GPUs serve have one attached by a played fabric operator (CRO), are answered from it, and it
goes again: one autoscaler and one gateway as processes, a real API server, a node whose GPU count really changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from autoscaler.capacity.fabric_requests import NOTE, REQUESTS, RESOURCES
from autoscaler.drivers.kubernetes.api import Api, Object
from pilotlight.objects import Objects
from tests.cluster import definitions
from tests.cluster.conftest import next_number
from tests.cluster.house import House, model
from tests.cluster.kubelet.node import Node
from tests.kit.fake_cro import FakeCro
from tests.kit.observed import WAIT_S_MAX

GPU = "nvidia.com/gpu"


class Rack:
    """A node with a GPU, one without that can have `most`, and the operator with a fabric of so many."""

    def __init__(self, api: Api, house: House, name: str, logs: Path, has: int = 0) -> None:
        """`has`: GPUs of the node to which others may be attached."""
        self.api, self.house, self.name = api, house, name
        self.model = f"A100-{name}-40GB"
        self.own = Node(api, f"{name}-own", next_number(), {GPU: "1"}, {}, logs)
        self.bare = Node(api, f"{name}-bare", next_number(), {GPU: str(has)}, {"fabric": name}, logs)
        self.counts = [has]
        self.tasks: set[asyncio.Task[None]] = set()
        clock = asyncio.get_running_loop().time
        self.cro = FakeCro(
            Objects(api, api), clock, {self.model: 4}, attach_s=0.3, detach_s=0.3, look_s=0.5, period_s=0.05,
            attached=lambda node, uuid: self._count(1), detached=lambda node, uuid: self._count(-1),
        )  # fmt: skip

    def settings(self, most: int = 2) -> dict[str, object]:
        """With the fabric."""
        device = {"model": self.model, "memory": "40Gi"}
        return {
            "nodes": [{"selector": {"fabric": self.name}, "device": device, "devicesMax": most}],
            "capacity": [{"name": "rack", "cro": {"model": self.model}, "expectedSeconds": 1}],
        }

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Rack]:
        """All of it."""
        await definitions.install_foreign(self.api, "cro")
        async with AsyncExitStack() as stack:
            for node in (self.own, self.bare):
                await stack.enter_async_context(node.running())
            playing = asyncio.create_task(self.cro.run())
            stack.callback(playing.cancel)
            await stack.enter_async_context(self.house.running())
            yield self

    def _count(self, change: int) -> None:
        self.counts.append(self.counts[-1] + change)
        task = asyncio.create_task(self.bare.has({GPU: str(self.counts[-1])}))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def requests(self) -> list[Object]:
        """All for this fabric."""
        there = (await self.api.get(REQUESTS))["items"]
        return [one for one in there if one["spec"]["resource"]["model"] == self.model]

    async def until_gone(self) -> None:
        """Nothing of it is asked for any more; after a Replica has gone that takes half a minute at least."""
        async with asyncio.timeout(2 * WAIT_S_MAX):
            while await self.requests():
                await asyncio.sleep(0.1)

    async def answered(self, model: str) -> None:
        """A Call is; else it is told why not."""
        status, said = await self.house.call(model)
        if status == 200:
            return
        async with self.house.session.get(f"http://127.0.0.1:{self.house.ops}/api/v1/explain/model/{model}") as answer:
            raise AssertionError(said, await answer.text())

    async def where(self, namespace: str) -> dict[str, str]:
        """By Model, the node of its pod."""
        pods = (await self.api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
        return {one["metadata"]["labels"]["pilotlight.dev/model"]: one["spec"]["nodeName"] for one in pods}


@pytest.fixture
async def rack(
    request: pytest.FixtureRequest, api: Api, house: House, namespace: str, tmp_path: Path
) -> AsyncIterator[Rack]:
    """See Rack; at the end nothing of it is left, with whose finalizers ever."""
    one = Rack(api, house, namespace, tmp_path, getattr(request, "param", 0))
    yield one
    for path in (REQUESTS, RESOURCES):
        for left in (await api.get(path))["items"]:
            if left["spec"].get("resource", left["spec"])["model"] == one.model:
                await api.patch(f"{path}/{left['metadata']['name']}", {"metadata": {"finalizers": None}})
                if "deletionTimestamp" not in left["metadata"]:
                    await api.delete(f"{path}/{left['metadata']['name']}")


async def test_calls_that_no_gpu_is_left_for_are_answered_from_one_that_is_attached_and_goes_again(
    rack: Rack, namespace: str
) -> None:
    """Case 1 of Dynamic Device Scaling: a node would be added, but a GPU on one that is there does."""
    rack.house.write(
        model("ada", replicas={"min": 1, "max": 1}), model("bob", idleSeconds=1, replicas={"max": 1}),
        **rack.settings(),
    )  # fmt: skip
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        assert not await rack.requests(), "a GPU that is there is not asked for"
        await rack.answered("bob")
        assert await rack.where(namespace) == {"ada": rack.own.name, "bob": rack.bare.name}
        (request,) = await rack.requests()
        assert request["spec"]["resource"]["size"] == 1
        (note,) = [text for key, text in request["metadata"]["annotations"].items() if key.startswith(NOTE)]
        assert msgspec.json.decode(note)["owner"] == "bob"
        assert rack.counts == [0, 1]
        await rack.until_gone()
        assert rack.counts == [0, 1, 0]
        await rack.answered("ada")


@pytest.mark.parametrize("rack", [1], indirect=True)
async def test_as_few_gpus_are_attached_as_do_beside_those_that_a_node_has(rack: Rack, namespace: str) -> None:
    """Case 2: no node can be added; one more GPU on a node that has one is found, tried one at a time."""
    rack.house.write(model("two", idleSeconds=600, gpu={"count": 2}), **rack.settings(most=4))
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("two")
        assert rack.counts == [1, 2]
        assert await rack.where(namespace) == {"two": rack.bare.name}
        (request,) = await rack.requests()
        assert request["spec"]["resource"]["size"] == 1


async def test_what_an_autoscaler_had_attached_that_is_gone_is_known_to_the_next_and_goes_when_it_is_idle(
    rack: Rack, namespace: str
) -> None:
    rack.house.write(
        model("ada", replicas={"min": 1, "max": 1}), model("bob", idleSeconds=5, replicas={"max": 1}),
        **rack.settings(),
    )  # fmt: skip
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        assert rack.counts == [0, 1]
        await rack.house.autoscaler_anew()
        await rack.answered("bob")
        assert rack.counts == [0, 1], "it is the same one"
        await rack.until_gone()
        assert rack.counts == [0, 1, 0]
