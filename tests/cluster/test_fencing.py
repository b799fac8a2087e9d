"""A second leader at the moment of every write: the first may not write any more after its n-th, for each n."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.contract import GatewayId, ModelName, ReplicaUse, Report
from autoscaler.drivers.kubernetes.access import access
from autoscaler.drivers.kubernetes.api import Api
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.loop import Loop
from autoscaler.model import Model, ModelSpec
from autoscaler.states import ReplicaState as S
from autoscaler.world import DocumentsSeen, LeadingSeen, Reported, World
from pilotlight.cluster import image, launch
from tests.cluster.kubelet.node import Node
from tests.kit.fake_process import command
from tests.kit.worlds import level

LIMIT_S = 60
WRITES = 3
"""One create; a mark and a delete."""


def model(name: str) -> Model:
    words = command("--host", "{host}", "--port", "{port}", "--name", name)
    spec = ModelSpec(
        engine="command", image="fake", command=tuple(words), idle_seconds=600.0, residency_seconds=0.0,
    )  # fmt: skip
    return Model(name=ModelName(name), spec=spec, memory_bytes=1 << 30, slots=4)


ADA, BOB = model("ada"), model("bob")


class Fence:
    """So many writes more, then none."""

    def __init__(self) -> None:
        self.left = math.inf

    def write(self) -> float:
        """Asked once for each write."""
        self.left -= 1
        return 0.0 if self.left < 0 else math.inf

    def act(self) -> float:
        """Asked at each step."""
        return 0.0 if self.left <= 0 else math.inf


class Process:
    """One autoscaler: the real loop and driver, with a fence for an elector."""

    def __init__(self, api: Api, fence: Fence, namespace: str) -> None:
        self.fence = fence
        self.driver = KubernetesDriver(api, namespace, launch, image, assume_after_s=0.05)
        self.loop = Loop(World(epoch=0, leads=False), self.driver, time.monotonic, fence.act)

    def lead(self, epoch: int) -> None:
        self.loop.observe((LeadingSeen(epoch=epoch),))
        self.driver.lead()

    async def until(self, **wanted: S | None) -> None:
        """Waits until the Replicas are exactly these, by Model."""
        async with asyncio.timeout(LIMIT_S):
            while [(r.model, r.state) for r in self.loop.world.replicas.values()] != sorted(wanted.items()):
                await asyncio.sleep(0.02)


class House:
    """Two processes and one gateway, whose reports both get. `calls`: the Model that Calls wait for."""

    def __init__(self, first: Process, second: Process) -> None:
        self.first = first
        self.second = second
        self.calls = ""
        self._sequence = 0

    async def gateway(self) -> None:
        """Acts on the Routes of the higher epoch."""
        while True:
            worlds = [one.loop.world for one in (self.first, self.second)]
            acted_on = max(worlds, key=lambda world: world.epoch)
            uses = tuple(ReplicaUse(replica=id) for id in acted_on.replicas)
            self._sequence += 1
            report = Report(
                gateway=GatewayId("g1"), boot="b", sequence=self._sequence, epoch=acted_on.epoch,
                version=acted_on.version, levels=(level(self.calls, 1),) if self.calls else (), replicas=uses,
            )  # fmt: skip
            for one in (self.first, self.second):
                one.loop.observe((Reported(report=report),))
            await asyncio.sleep(0.03)

    def documents(self, *models: Model) -> None:
        for one in (self.first, self.second):
            one.loop.observe((DocumentsSeen(models=models),))


@asynccontextmanager
async def house(kubeconfig: Path, namespace: str) -> AsyncIterator[House]:
    way, fences = await access(kubeconfig), (Fence(), Fence())
    async with Api(way, fences[0].write) as one, Api(way, fences[1].write) as two, asyncio.TaskGroup() as tasks:
        both = House(Process(one, fences[0], namespace), Process(two, fences[1], namespace))
        works = [both.first.loop.run(), both.second.loop.run(), both.gateway()]
        running = [tasks.create_task(work) for work in works]
        yield both
        for task in running:
            task.cancel()


@pytest.mark.parametrize("writes", range(WRITES + 1))
async def test_case_26_the_second_leader_ends_what_the_first_began_at_every_write_and_does_nothing_twice(
    kubeconfig: Path, namespace: str, node: Node, api: Api, writes: int
) -> None:
    """One Model goes from the documents, another is called: a create, a mark, a delete, and a hand-over in between."""
    ran = list[str]()
    node.on_container = lambda pod, _: ran.append(pod.partition("-")[0])
    async with house(kubeconfig, namespace) as both, asyncio.timeout(LIMIT_S):
        both.documents(ADA, BOB)
        while not both.first.loop.world.synced or not both.second.loop.world.synced:
            await asyncio.sleep(0.01)
        both.first.lead(1)
        both.calls = "bob"
        await both.second.until(bob=S.READY)

        both.first.fence.left = writes
        both.calls = "ada"
        both.documents(ADA)
        while both.first.fence.left > 0 and [r.model for r in both.second.loop.world.replicas.values()] != ["ada"]:
            await asyncio.sleep(0.01)
        while both.first.driver._ordered:  # the margin of leadership is for requests that are under way
            await asyncio.sleep(0.01)
        both.second.lead(2)
        await both.second.until(ada=S.READY)
        left = (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
        assert [one["metadata"]["name"].partition("-")[0] for one in left] == ["ada"]
        assert ran == ["bob", "ada"], "no second start"
        assert both.first.fence.left <= 0, "it wrote so often, and no more"
