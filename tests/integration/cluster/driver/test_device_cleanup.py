"""Proof of clean on a real control plane: a device becomes free as soon as its node's agent reports it as unused.
The agents are fakes that send reports.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from autoscaler.agent_contract import DeviceReport, NodeReport, PodDevices
from autoscaler.drivers.kubernetes.proof_of_clean import FORCED
from autoscaler.kubernetes.api import Api
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node

GI = 1 << 30
LOOK_S, WAIT_S_MAX = 0.05, 180.0


class Agent:
    """A fake agent of a node with two GPUs, of which the engine uses the second."""

    def __init__(self, session: aiohttp.ClientSession, node: str, pod: str, namespace: str) -> None:
        self._session = session
        self._node = node
        self._pod = PodDevices(namespace=namespace, name=pod, devices=("GPU-b",))
        self._numbers = itertools.count(1)

    async def report(self, used_bytes: int, *, runs: bool, healthy: bool = True) -> None:
        devices = (DeviceReport(id="GPU-a", memory_bytes=80 * GI, healthy=healthy),
                   DeviceReport(id="GPU-b", memory_bytes=80 * GI, used_bytes=used_bytes))  # fmt: skip
        pods = (self._pod,) if runs else ()
        report = NodeReport(node=self._node, boot="b", sequence=next(self._numbers), devices=devices, pods=pods)
        async with self._session.post("http://autoscaler/v1/node", data=msgspec.json.encode(report)) as answer:
            assert answer.status == 200


class Scene:
    """A House with one engine that runs on a GPU, and the agent of its node."""

    def __init__(self, house: House, api: Api, pods: str, agent: Agent) -> None:
        self.house, self.api, self.pods, self.agent = house, api, pods, agent

    async def ops(self, path: str) -> Any:
        async with self.house.session.get(f"http://127.0.0.1:{self.house.ops}/api/v1/{path}") as answer:
            return await answer.json()

    async def until_reported(self, *words: str) -> None:
        """Waits until the latest decisions contain all of these words."""
        while True:
            message = " ".join((await self.ops("explain/last"))["sentences"])
            if all(word in message for word in words):
                return
            await asyncio.sleep(LOOK_S)

    async def gone(self) -> None:
        """Waits until no pod is left."""
        while (await self.api.get(self.pods))["items"]:
            await asyncio.sleep(LOOK_S)

    async def replicas(self) -> dict[str, int]:
        found: dict[str, int] = (await self.ops("models/ada"))["replicas"]
        return found


@pytest.fixture
async def scene(tmp_path: Path, kubeconfig: Path, namespace: str, api: Api, node: Node) -> AsyncIterator[Scene]:
    house = House(tmp_path, kubeconfig, namespace)
    house.write(model("ada", idleSeconds=600))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    async with house.running(), asyncio.timeout(WAIT_S_MAX), reporting(tmp_path) as session:
        assert (await house.call("ada"))[0] == 200
        (pod,) = (await api.get(pods))["items"]
        yield Scene(house, api, pods, Agent(session, node.name, pod["metadata"]["name"], namespace))


@asynccontextmanager
async def reporting(folder: Path) -> AsyncIterator[aiohttp.ClientSession]:
    """Yields a client session for the autoscaler's report socket."""
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(folder / "contract.sock"))) as session:
        yield session


async def stop(scene: Scene) -> None:
    """Runs `pilotlight stop ada`."""
    url = f"http://127.0.0.1:{scene.house.ops}/api/v1/models/ada/stop"
    async with scene.house.session.post(url, json={}) as answer:
        assert answer.status == 200, await answer.text()


async def test_device_is_freed_only_when_the_agent_reports_its_memory_as_freed(scene: Scene) -> None:
    await scene.agent.report(70 * GI, runs=True)
    (first, second) = await scene.ops("devices")
    assert (first["used_bytes"], first["replicas"][0]["devices"]) == (70 * GI, ["GPU-b"])
    assert (second["used_bytes"], second["replicas"]) == (None, [])
    await stop(scene)
    await scene.gone()
    await scene.agent.report(70 * GI, runs=False)
    await scene.until_reported("ended")
    assert await scene.replicas(), "its memory is still held"
    await scene.agent.report(GI // 2, runs=False)
    await scene.until_reported("clean: measured")
    assert await scene.replicas() == {}


async def test_device_of_a_force_deleted_pod_is_held_until_its_memory_is_free(scene: Scene) -> None:
    await scene.agent.report(70 * GI, runs=True)
    (pod,) = (await scene.api.get(scene.pods))["items"]
    await scene.api.delete(f"{scene.pods}/{pod['metadata']['name']}", grace_s=0)
    await scene.until_reported(FORCED)
    await scene.agent.report(70 * GI, runs=False)
    assert await scene.replicas()
    await scene.agent.report(0, runs=False)
    await scene.until_reported("clean: measured")


async def test_device_reported_unhealthy_by_the_agent_is_unschedulable(scene: Scene) -> None:
    await scene.agent.report(70 * GI, runs=True, healthy=False)
    (first, second) = await scene.ops("devices")
    assert (first["closed"], second["closed"]) == ("", "the agent of its node reports an unhealthy device")
