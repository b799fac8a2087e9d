"""Kueue admits a replica and evicts it for another workload: the replica drains, and then the other gets its quota.

One autoscaler and one gateway as processes, a real API server, scheduler and pods; Kueue is a fake. It sets Evicted on
the Workload and deletes the pod, as observed with the real one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest

from autoscaler.kubernetes.api import Api, Object
from autoscaler.providers.kubernetes_access import AnswerError
from autoscaler.providers.kueue import objects
from autoscaler.spec.pod import GPU, PLACE, QUEUE
from pilotlight.provider_kubernetes_client import Objects
from tests.integration.cluster.capacity.test_kueue import WORKLOADS
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.container import Container
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.fakes.kubernetes.kueue import KIND, NEWEST, PREEMPTED, FakeKueue
from tests.support.harness.driver_events import WAIT_S_MAX

pytestmark = pytest.mark.standard

TOKENS, LONG = 20, 400
"""Tokens of a response, ten per second. The long one lasts 40 s, so that it still runs if a process stops for 20 s."""
RIVAL = "a-rival"
"""Sorts before the replicas' pods: the fake Kueue admits pods of the same second in the order of their names."""


class Queue:
    """A LocalQueue with quota for one GPU, its node, and the containers that run there."""

    def __init__(self, api: Api, house: House, namespace: str, logs: Path) -> None:
        self.api, self.house, self.namespace = api, house, namespace
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.workloads = f"/apis/{NEWEST}/namespaces/{namespace}/workloads"
        self.node = Node(
            api, f"node-{namespace}", next_number(), {GPU: "1"}, {"test": namespace}, logs, probe_period_s=0.05
        )
        self.node.on_container = lambda pod, container: self.engines.update({pod: container})
        self.engines: dict[str, Container] = {}
        """Pod name -> container, of all replicas that ever ran and of the rival."""
        clock = asyncio.get_running_loop().time
        self.kueue = FakeKueue(Objects(api, api), namespace, clock, {self.node.name: 1}, schedules=False)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Runs Kueue and the House, without a node yet."""
        await custom_resources.install_foreign(self.api, "kueue")
        await self.api.apply(custom_resources.definition("workloads", "kueue.x-k8s.io"), WORKLOADS, "test")
        queue = {"apiVersion": NEWEST, "kind": "LocalQueue", "metadata": {"name": "serving"},
                 "spec": {"clusterQueue": "gpus"}}  # fmt: skip
        await self.api.create(f"/apis/{NEWEST}/namespaces/{self.namespace}/localqueues", queue)
        playing = asyncio.create_task(self._play())
        try:
            async with self.house.running():
                yield
        finally:
            playing.cancel()
            await asyncio.wait([playing])
            assert playing.cancelled(), playing.exception()

    async def _play(self) -> None:
        while True:
            with suppress(AnswerError):  # the object is gone or has been replaced
                await self.kueue.step()
            await asyncio.sleep(0.05)

    def settings(self) -> dict[str, object]:
        """Settings with nodes like those of the test, and that queue."""
        kind = {"selector": {"test": self.namespace}, "device": {"model": "T4", "memory": "16Gi"}}
        return {
            "nodes": [kind],
            "capacity": [{"name": "queue", "kueue": {"localQueue": "serving"}, "expectedSeconds": 60}],
        }

    async def queued(self) -> list[Object]:
        """Pods of the queue, except the rival."""
        found: list[Object] = (await self.api.get(self.pods, labelSelector=QUEUE))["items"]
        return [one for one in found if one["metadata"]["name"] != RIVAL]

    async def place(self) -> Object:
        """Waits until Kueue has admitted the placeholder pod, and returns it."""
        while True:
            for one in await self.queued():
                if PLACE in one["metadata"]["labels"] and not one["spec"].get("schedulingGates"):
                    return one
            await asyncio.sleep(0.05)

    async def replica(self) -> Object:
        """The only replica pod that is not being deleted."""
        there = (await self.api.get(self.pods, labelSelector="pilotlight.dev/model=ada"))["items"]
        (found,) = [one for one in there if "deletionTimestamp" not in one["metadata"]]
        assert isinstance(found, dict)
        return found

    async def compete(self) -> None:
        """Creates a rival pod of the queue that requests the GPU."""
        container = {
            "name": "a", "image": "a", "command": ["sleep", "600"], "resources": {"limits": {GPU: "1"}}
        }  # fmt: skip
        await self.api.create(self.pods, {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": RIVAL, "labels": {QUEUE: "serving"}},
            "spec": {
                "containers": [container], "schedulingGates": [{"name": objects.GATE}],
                "nodeSelector": {"test": self.namespace}, "terminationGracePeriodSeconds": 1,
            },
        })  # fmt: skip

    async def conditions(self, pod: str) -> dict[str, str]:
        """Reasons of the true conditions of the pod's Workload, by type."""
        found = await self.api.get(f"{self.workloads}/pod-{pod}")
        return {one["type"]: one["reason"] for one in found["status"]["conditions"] if one["status"] == "True"}


@pytest.fixture
async def queue(api: Api, house: House, namespace: str, tmp_path: Path) -> Queue:
    """Creates a Queue."""
    return Queue(api, house, namespace, tmp_path)


async def streamed(house: House, began: asyncio.Event, tokens: int) -> list[str]:
    """The events of one streamed response of that many tokens. `began` is set with the first."""
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "ada", "stream": True, "messages": messages, "max_tokens": tokens}
    events: list[str] = []
    timeout = aiohttp.ClientTimeout(total=None)
    async with house.session.post(f"{house.url}/v1/chat/completions", json=body, timeout=timeout) as answer:
        assert answer.status == 200, await answer.text()
        async for line in answer.content:
            if line.startswith(b"data: "):
                events.append(line.decode().removeprefix("data: ").strip())
                began.set()
    return events


def whole(events: list[str], tokens: int) -> bool:
    """Whether all tokens and the end were received."""
    return events[-1] == "[DONE]" and sum('"content"' in one for one in events) >= tokens


async def test_replica_preempted_by_kueue_holds_its_quota_until_its_stream_ends(queue: Queue) -> None:
    words = command("--host", "{host}", "--port", "{port}", "--name", "ada", "--tokens-per-s", "10",
                    "--tokens", str(LONG))  # fmt: skip
    house = queue.house
    house.write(model("ada", command=words, slots=1, idleSeconds=1), **queue.settings())
    async with queue.running(), asyncio.timeout(6 * WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        began = asyncio.Event()
        first = tasks.create_task(streamed(house, began, LONG))
        await queue.place()
        while "it is admitted and has no node yet" not in await explanation(house):
            await asyncio.sleep(0.05)
        async with queue.node.running():
            await began.wait()
            pod = await queue.replica()
            name = pod["metadata"]["name"]
            await queue.compete()
            queue.kueue.preempted.add(f"pod-{name}")
            while "deletionTimestamp" not in (await queue.api.get(f"{queue.pods}/{name}"))["metadata"]:
                await asyncio.sleep(0.02)
            conditions = await queue.conditions(name)
            assert (conditions["Evicted"], conditions["Preempted"]) == ("Preempted", "InClusterQueue")
            assert not first.done()
            again = asyncio.Event()
            second = tasks.create_task(streamed(house, again, TOKENS))
            while f"{KIND}: {PREEMPTED}" not in await explanation(house):
                await asyncio.sleep(0.05)
            gated = (await queue.api.get(f"{queue.pods}/{RIVAL}"))["spec"]["schedulingGates"]
            assert [one["name"] for one in gated] == [objects.GATE], (
                "the replica holds the quota until its pod is deleted"
            )
            assert whole(await first, LONG)
            while RIVAL not in queue.engines:
                await asyncio.sleep(0.05)
            process = queue.engines[name].process
            assert process is not None
            assert process.returncode is not None, "within seconds of its last Call, though its pod had ten minutes"
            assert not again.is_set(), "the next waits for quota"
            await queue.api.delete(f"{queue.pods}/{RIVAL}")
            assert whole(await second, TOKENS)
            assert len([one for one in queue.engines if one.startswith("ada-")]) == 2, "another Replica gave it"
            while await queue.queued() or (await queue.api.get(queue.workloads))["items"]:
                await asyncio.sleep(0.05)


async def explanation(house: House) -> str:
    """The output of `explain model ada`."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/explain/model/ada") as answer:
        return await answer.text()
