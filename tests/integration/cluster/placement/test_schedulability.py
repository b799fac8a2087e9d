"""Nodes on which a real scheduler would and would not place a pod: a node that can run the model serves its request."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.state.events import Seen, SlicesSeen
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.driver.node_fixture import Scene
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.harness.driver_events import WAIT_S_MAX, running

GPU = {"nvidia.com/gpu": "1"}
LAB = {"key": "lab", "value": "chem", "effect": "NoSchedule"}


class Pair:
    """A House with two nodes of one GPU each; the plan prefers the first."""

    def __init__(self, api: Api, house: House, namespace: str, kubelets: tuple[Node, Node]) -> None:
        self.api, self.house, self.namespace = api, house, namespace
        self.first, self.second = kubelets
        self.moved = False

    async def answers_from(self, settings: dict[str, Any] | None = None, **spec: Any) -> str:
        """Sends a request and returns the node of the pod. Sets `moved` if another node was tried before."""
        self.house.write(model("ada", idleSeconds=600, **spec), **(settings or {}))
        async with self.house.running(), asyncio.timeout(2 * WAIT_S_MAX):
            status, body = await self.house.call("ada")
            assert status == 200, body
            async with self.house.session.get(f"http://127.0.0.1:{self.house.ops}/api/v1/explain/last") as answer:
                self.moved = "its pod cannot be scheduled on the chosen node" in await answer.text()
            return await self.where()

    async def pod(self) -> Any:
        """Waits until there is one pod, and returns it: the pod of a replica that left its node may still exist."""
        async with asyncio.timeout(WAIT_S_MAX):
            while len(pods := (await self.api.get(f"/api/v1/namespaces/{self.namespace}/pods"))["items"]) != 1:
                await asyncio.sleep(0.05)
        return pods[0]

    async def where(self) -> str:
        return str((await self.pod())["spec"]["nodeName"])


@asynccontextmanager
async def pair(
    api: Api, house: House, namespace: str, logs: Path, taint: dict[str, str] | None = None, **first: str
) -> AsyncIterator[Pair]:
    """`taint` and `first` (amounts) apply to the first node."""
    async with AsyncExitStack() as stack:
        kubelets = [
            Node(api, f"{namespace}-{n}", next_number(), {**GPU, **(first if not n else {})}, {}, logs,
                 taints=(taint,) if taint and not n else ())
            for n in range(2)
        ]  # fmt: skip
        for one in kubelets:
            await stack.enter_async_context(one.running())
        yield Pair(api, house, namespace, (kubelets[0], kubelets[1]))


@asynccontextmanager
async def held_by_others(api: Api, node: str, gpus: str = "1", **more: str) -> AsyncIterator[str]:
    """Creates a pod in another namespace that uses GPUs or other resources of a node; yields its path."""
    name = f"others-{uuid.uuid4().hex[:8]}"
    await make_namespace(api, name)
    limits = {"nvidia.com/gpu": gpus, **more}
    container = {"name": "a", "image": "x", "command": ["/bin/sleep", "600"], "resources": {"limits": limits}}
    spec = {
        "containers": [container], "nodeSelector": {"kubernetes.io/hostname": node}, "terminationGracePeriodSeconds": 1,
    }  # fmt: skip
    path = f"/api/v1/namespaces/{name}/pods"
    await api.create(path, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}, "spec": spec})
    try:
        async with asyncio.timeout(WAIT_S_MAX):
            while not (await api.get(f"{path}/theirs"))["spec"].get("nodeName"):
                await asyncio.sleep(0.02)
        yield f"{path}/theirs"
    finally:
        await api.delete(f"/api/v1/namespaces/{name}")


@pytest.mark.standard
async def test_device_used_by_a_foreign_pod_is_not_chosen(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    async with pair(api, house, namespace, tmp_path) as one, held_by_others(api, one.first.name):
        assert (await one.answers_from(), one.moved) == (one.second.name, False)


async def test_tainted_node_is_not_chosen_without_a_toleration(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    async with pair(api, house, namespace, tmp_path, LAB) as one:
        assert (await one.answers_from(), one.moved) == (one.second.name, False)


async def test_model_with_a_toleration_is_placed_on_the_tainted_node(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    async with pair(api, house, namespace, tmp_path, LAB) as one:
        tolerates = {"tolerations": [{"key": "lab", "operator": "Exists"}]}
        assert await one.answers_from(pod=tolerates) == one.first.name


async def test_pod_that_the_scheduler_cannot_place_moves_to_another_node(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    """The plan has no data about a node's disk; the scheduler has."""
    async with pair(api, house, namespace, tmp_path, None, **{"ephemeral-storage": "1Gi"}) as one:
        requests = {"requests": {"ephemeral-storage": "2Gi"}}
        assert (await one.answers_from(resources=requests), one.moved) == (one.second.name, True)


async def test_node_without_free_cpu_is_not_chosen_despite_a_free_gpu(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    async with pair(api, house, namespace, tmp_path) as one, held_by_others(api, one.first.name, "0", cpu="30"):
        requests = {"requests": {"cpu": "4", "memory": "1Gi"}}
        assert (await one.answers_from(resources=requests), one.moved) == (one.second.name, False)


async def test_model_start_waits_until_a_foreign_pod_frees_its_cpu(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    async with AsyncExitStack() as stack:
        one = await stack.enter_async_context(pair(api, house, namespace, tmp_path))
        nodes = one.first.name, one.second.name
        _, foreign = [await stack.enter_async_context(held_by_others(api, node, "0", cpu="30")) for node in nodes]
        house.write(model("ada", idleSeconds=600, resources={"requests": {"cpu": "4"}}))
        async with house.running(), asyncio.timeout(2 * WAIT_S_MAX):
            calling = asyncio.create_task(house.call("ada"))
            message = ""
            while not any(f"node {node} has too little CPU" in message for node in nodes):
                await asyncio.sleep(0.1)
                async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/explain/model/ada") as answer:
                    message = await answer.text()
            assert not calling.done()
            assert "2 cores left of 32 cores" in message
            await api.delete(foreign)
            status, text = await calling
            assert status == 200, text
            assert await one.where() == one.second.name


async def test_model_priority_selects_the_matching_priority_class(
    api: Api, house: House, namespace: str, tmp_path: Path
) -> None:
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": namespace}}
    await api.create(classes, {**kind, "value": 4711})
    try:
        async with pair(api, house, namespace, tmp_path) as one:
            table = {"priorityClasses": [{"least": 10, "name": namespace}, {"least": 20, "name": "of-nobody"}]}
            await one.answers_from(table, priority=15)
            assert (await one.pod())["spec"]["priority"] == 4711
    finally:
        await api.delete(f"{classes}/{namespace}")


# --- what the driver reports ------------------------------------------------------------------------------------------


async def test_device_is_reported_used_by_others_only_while_a_foreign_pod_runs(scene: Scene) -> None:
    driver, node = scene.driver(), scene.node.name
    async with running(driver) as observed, asyncio.timeout(WAIT_S_MAX):
        own, of = scene.engine("r1")
        driver.start(own, of)
        await observed.until(own.id, Seen.READY)
        async with held_by_others(scene.api, node) as foreign:
            while _others(observed.slices(), node) != 1:
                await observed.more()
            await scene.api.delete(foreign)
            while _others(observed.slices(), node) != 0:
                await observed.more()


def _others(seen: SlicesSeen, node: str) -> int:
    return seen.others.get(f"{node} {next(iter(GPU))}", 0)
