"""Documents that change while Models run on a real control plane: a new spec rolls out, a Model that goes drains."""

from __future__ import annotations

import asyncio
import signal

import pytest

from autoscaler.drivers.kubernetes.api import Api, Object
from tests.cluster.house import House, model
from tests.cluster.kubelet.node import Node
from tests.kit.fake_process import command

WAIT_S_MAX = 180.0


class Pods:
    """The pods of the namespace."""

    def __init__(self, api: Api, namespace: str) -> None:
        self._api = api
        self._path = f"/api/v1/namespaces/{namespace}/pods"

    async def now(self) -> list[Object]:
        """All."""
        found: list[Object] = (await self._api.get(self._path))["items"]
        return found

    async def until_images(self, *images: str) -> list[Object]:
        """Once these images, and no others, run there."""
        while True:
            found = await self.now()
            if sorted(pod["spec"]["containers"][0]["image"] for pod in found) == sorted(images):
                return found
            await asyncio.sleep(0.05)


@pytest.fixture
def pods(api: Api, namespace: str) -> Pods:
    return Pods(api, namespace)


def tell(house: House, *documents: dict[str, object]) -> None:
    """Its documents are these from now on."""
    house.write(*documents)
    house.autoscaler.send_signal(signal.SIGHUP)


async def test_a_changed_spec_replaces_the_old_one_without_a_call_lost(house: House, pods: Pods, node: Node) -> None:
    """Calls go on all the time; the new one starts on the free GPU first."""
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
            tell(one, model("ada", idleSeconds=600, image="two"))
            await pods.until_images("one", "two")
            (new,) = await pods.until_images("two")
            over.set()
    assert set(answers) == {200}
    assert node.name == new["spec"]["nodeName"]
    assert old["metadata"]["name"] != new["metadata"]["name"]


async def test_a_model_that_goes_answers_who_waits_404_and_drains_who_is_served(
    house: House, pods: Pods, node: Node
) -> None:
    """The Call that runs (for 3 s) gets its answer, although its Model has left."""
    words = command("--host", "{host}", "--port", "{port}", "--name", "slow", "--tokens", "15", "--tokens-per-s", "5")
    slow = model("slow", idleSeconds=600, image="slow", command=words)
    house.write(slow, model("never", image="never", readinessPath="/nowhere"), model("stays"))
    async with house.running() as one, asyncio.timeout(WAIT_S_MAX):
        assert (await one.call("slow"))[0] == 200
        served, parked = (asyncio.create_task(one.call(name)) for name in ("slow", "never"))
        await pods.until_images("slow", "never")
        tell(one, model("stays"))
        status, said = await parked
        assert (status, "model_not_found" in said) == (404, True)
        assert (await one.call("slow"))[0] == 404
        assert not served.done()
        assert (await served)[0] == 200
        await pods.until_images()
        assert node.name
