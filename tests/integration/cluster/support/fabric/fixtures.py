"""Shared helpers of fabric tests: documents, a streamed response, a fake node agent, the order of diary entries."""

from __future__ import annotations

import asyncio
import contextlib

import aiohttp
import msgspec

from autoscaler.agent_contract import DeviceReport, NodeReport, PodDevices
from tests.integration.cluster.driver.test_device_cleanup import reporting
from tests.integration.cluster.support.fabric.cluster import Rack
from tests.integration.cluster.support.installations.single_instance import model
from tests.support.fakes.engines.fake_engine_process import command

NO_TIMEOUT = aiohttp.ClientTimeout(total=None)


def settings(rack: Rack, node_costs: float, gpu_costs: float = 1.0, expected_s: float = 1) -> dict[str, object]:
    """Settings with a fabric and a node group, each with its price."""
    configured = rack.settings(expected_s=expected_s)
    kind = {"selector": {"group": rack.name}, "device": {"model": "T4", "memory": "16Gi"}}
    group = {"nodeLabels": {"group": rack.name}, "nodesMax": 2, "priorityClass": rack.name}
    prices = [
        {"device": "T4", "class": "on-demand", "perHour": node_costs},
        {"device": "A100", "class": "fabric", "perHour": gpu_costs},
    ]
    more = {"name": "group", "clusterAutoscaler": group, "expectedSeconds": 5}
    nodes, capacity = configured["nodes"], configured["capacity"]
    assert isinstance(nodes, list)
    assert isinstance(capacity, list)
    return {"nodes": [*nodes, kind], "capacity": [*capacity, more], "prices": prices}


def ada(**spec: object) -> dict[str, object]:
    """A model that occupies the only GPU."""
    return model("ada", replicas={"min": 1, "max": 1}, **spec)


def in_order(diary: list[str], *message: str) -> bool:
    """Whether the diary contains these entries in this order; other entries may lie between them."""
    rest = iter(diary)
    return all(one in rest for one in message)


def slow(name: str, tokens: int, *words: str, **spec: object) -> dict[str, object]:
    """A model whose engine generates ten tokens per second."""
    at = ("--host", "{host}", "--port", "{port}", "--name", name)
    does = command(*at, "--tokens-per-s", "10", "--tokens", str(tokens), *words)
    return model(name, **{"command": does, "idleSeconds": 600, "replicas": {"max": 1}, **spec})


class Stream:
    """One streamed response."""

    def __init__(self, rack: Rack, model: str) -> None:
        self._rack, self._model, self.tokens, self.whole = rack, model, 0, False
        self._came = asyncio.Event()

    async def __aenter__(self) -> Stream:
        self._task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task

    async def _read(self) -> None:
        body = {"model": self._model, "messages": [{"role": "user", "content": "hi"}], "stream": True}
        house = self._rack.house
        async with house.session.post(f"{house.url}/v1/chat/completions", json=body, timeout=NO_TIMEOUT) as answer:
            assert answer.status == 200, await answer.text()
            async for line in answer.content:
                self.tokens += b'"content"' in line
                self.whole |= line.startswith(b"data: [DONE]")
                self._came.set()
        self._came.set()

    async def goes_on(self) -> None:
        """Waits for the next token."""
        before = self.tokens
        while self.tokens == before:
            assert not self.whole, "it has ended"
            assert not self._task.done(), self._task.exception()
            self._came.clear()
            await self._came.wait()

    async def ends(self) -> None:
        """Waits until the response is complete."""
        await self._task
        assert self.whole


class Agent:
    """A fake node agent: reports the memory in use on one GPU and the pod that has that GPU."""

    def __init__(self, rack: Rack, node: str, uuid: str, pod: str) -> None:
        self._rack, self._node, self.uuid, self._pod = rack, node, uuid, pod
        self.used_bytes, self.runs, self.reports_sent = 30 << 30, True, 0

    async def run(self) -> None:
        """Sends the report repeatedly."""
        pods = (PodDevices(namespace=self._rack.name, name=self._pod, devices=(self.uuid,)),)
        async with reporting(self._rack.logs) as session:
            while True:
                device = DeviceReport(id=self.uuid, memory_bytes=40 << 30, used_bytes=self.used_bytes)
                report = NodeReport(
                    node=self._node,
                    boot="b",
                    sequence=self.reports_sent + 1,
                    devices=(device,),
                    pods=pods if self.runs else (),
                )
                async with session.post("http://autoscaler/v1/node", data=msgspec.json.encode(report)) as answer:
                    assert answer.status == 200
                self.reports_sent += 1
                await asyncio.sleep(0.2)

    async def wait_until_sent(self, times: int = 1) -> None:
        """Waits until the current report has been sent that many times."""
        due = self.reports_sent + 1 + times
        while self.reports_sent < due:
            await asyncio.sleep(0.05)
