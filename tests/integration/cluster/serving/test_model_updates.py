"""Documents that change while Models run on a real control plane: a new spec rolls out, a removed Model drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.watch import Change, ObjectKey, Watched
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.fakes.engines.fake_engine_process import command

WAIT_S_MAX = 180.0


class Pods:
    """The history of the namespace's pods, recorded by a watch, so that short-lived states are not missed."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.watched = Watched(api, f"/api/v1/namespaces/{namespace}/pods", lambda pod: pod, self._hear)
        self._there: dict[ObjectKey, Object] = {}
        self._told: list[list[Object]] = [[]]
        self._news = asyncio.Event()

    def _hear(self, changes: list[Change[Object]]) -> None:
        for key, _, new in changes:
            if new is None:
                del self._there[key]
            else:
                self._there[key] = new
            self._told.append(list(self._there.values()))
        self._news.set()

    async def until_images(self, *images: str) -> list[Object]:
        """Waits for a state in which exactly these images run, starting from the last returned one."""
        while True:
            while self._told:
                found = self._told[0]
                if sorted(pod["spec"]["containers"][0]["image"] for pod in found) == sorted(images):
                    return found
                del self._told[0]
            self._news.clear()
            await self._news.wait()


@pytest.fixture
async def pods(api: Api, namespace: str) -> AsyncIterator[Pods]:
    one = Pods(api, namespace)
    watching = asyncio.create_task(one.watched.run())
    yield one
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


@pytest.mark.standard
async def test_changed_spec_replaces_the_pod_without_losing_a_request(house: House, pods: Pods, node: Node) -> None:
    """Requests arrive all the time; the new replica starts on the free GPU first."""
    house.write(model("ada", idleSeconds=600, image="one"))
    answers: list[int] = []

    async def call_on(one: House, over: asyncio.Event) -> None:
        while not over.is_set():
            answers.append((await one.call("ada"))[0])

    async with house.running() as one, asyncio.timeout(WAIT_S_MAX):
        assert (await one.call("ada"))[0] == 200
        (old,) = await pods.until_images("one")
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(call_on(one, over))
            one.tell(model("ada", idleSeconds=600, image="two"))
            await pods.until_images("one", "two")
            (new,) = await pods.until_images("two")
            over.set()
    assert set(answers) == {200}
    assert node.name == new["spec"]["nodeName"]
    assert old["metadata"]["name"] != new["metadata"]["name"]


async def test_removed_model_finishes_running_and_rejects_queued_requests(house: House, pods: Pods, node: Node) -> None:
    """The running request (40 s, to outlast a pause of any process) completes, although its Model was removed."""
    words = command("--host", "{host}", "--port", "{port}", "--name", "slow", "--tokens", "200", "--tokens-per-s", "5")
    slow = model("slow", idleSeconds=600, image="slow", command=words)
    house.write(slow, model("never", image="never", readinessPath="/nowhere"), model("stays"))
    async with house.running() as one, asyncio.timeout(WAIT_S_MAX):
        served, parked = (asyncio.create_task(one.call(name)) for name in ("slow", "never"))
        await pods.until_images("slow", "never")
        last = f"http://127.0.0.1:{one.ops}/api/v1/models/slow"
        while not (await (await one.session.get(last)).json())["demand"]["running"]:
            await asyncio.sleep(0.02)
        one.tell(model("stays"))
        status, body = await parked
        assert (status, "model_not_found" in body) == (404, True)
        assert (await one.call("slow"))[0] == 404
        assert not served.done()
        assert (await served)[0] == 200
        await pods.until_images()
        assert node.name
