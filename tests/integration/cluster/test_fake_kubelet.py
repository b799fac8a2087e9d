"""The test environment itself: pods run, serve, wait for GPUs, crash, and are cleaned up, as on a real cluster."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

import aiohttp
import pytest

from autoscaler.kubernetes.api import APPLY, Api, Object
from tests.integration.cluster.support.kubelet.node import Node
from tests.integration.cluster.support.kubelet.pod import IMAGE_ERROR

ENGINE = str(Path(__file__).parent / "support" / "entry_points" / "minimal_engine.py")
WAIT_S_MAX = 90.0


def deployment(node: Node, *words: str, gpus: str = "1") -> Object:
    """Builds a Deployment of the smallest engine, at zero."""
    labels = {"app": "m"}
    container = {
        "name": "engine", "image": "engine", "command": [sys.executable, "-S", "-E", ENGINE, "8000", *words],
        "resources": {"limits": {"nvidia.com/gpu": gpus}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}},
    }  # fmt: skip
    pod = {"nodeSelector": {"test": node.name}, "terminationGracePeriodSeconds": 1, "containers": [container]}
    return {
        "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "m"},
        "spec": {
            "replicas": 0, "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        },
    }  # fmt: skip


class Stage:
    """One namespace with a Deployment `m`."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api = api
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.deployments = f"/apis/apps/v1/namespaces/{namespace}/deployments"

    async def scale(self, replicas: int) -> Object:
        """Scales as the product does: by server-side apply, which keeps the ownership of the field at 0, too."""
        scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "m"}}
        return await self.api.patch(
            f"{self.deployments}/m/scale", {**scale, "spec": {"replicas": replicas}}, APPLY, fieldManager="t",
            force="true",
        )  # fmt: skip

    async def until(self, holds: Callable[[list[Object]], object]) -> list[Object]:
        """Polls the pods and returns them once `holds` is true."""
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                found: list[Object] = (await self.api.get(self.pods))["items"]
                if holds(found):
                    return found
                await asyncio.sleep(0.02)


def ready(pods: list[Object]) -> list[Object]:
    """The pods that are ready."""
    yes = ("Ready", "True")
    return [
        pod for pod in pods if any((one["type"], one["status"]) == yes for one in pod["status"].get("conditions", []))
    ]


@pytest.fixture
async def stage(api: Api, namespace: str) -> Stage:
    """Creates a Stage."""
    return Stage(api, namespace)


async def test_pods_answer_on_their_own_addresses_until_scaled_to_zero(stage: Stage, node: Node) -> None:
    await stage.api.create(stage.deployments, deployment(node))
    await stage.scale(2)
    pods = await stage.until(lambda pods: len(ready(pods)) == 2)
    addresses = {pod["status"]["podIP"] for pod in pods}
    assert len(addresses) == 2
    async with aiohttp.ClientSession() as session:
        for address in addresses:
            async with session.get(f"http://{address}:8000/health") as answer:
                assert answer.status == 200
        scaled = await stage.scale(0)
        assert "replicas" not in scaled["spec"], "0 is left out"
        await stage.until(lambda pods: not pods)
        for address in addresses:
            with pytest.raises(aiohttp.ClientConnectorError):
                await session.get(f"http://{address}:8000/health")


async def test_pod_without_a_free_gpu_stays_pending_until_one_is_added(stage: Stage, node: Node) -> None:
    await stage.api.create(stage.deployments, deployment(node))
    await stage.scale(3)
    pods = await stage.until(
        lambda pods: len(ready(pods)) == 2 and len(pods) == 3 and all("conditions" in pod["status"] for pod in pods)
    )
    (waiting,) = [pod for pod in pods if "nodeName" not in pod["spec"]]
    (conditions,) = [one for one in waiting["status"]["conditions"] if one["type"] == "PodScheduled"]
    assert "Insufficient nvidia.com/gpu" in conditions["message"]
    await node.has({"nvidia.com/gpu": "3"})
    await stage.until(lambda pods: len(ready(pods)) == 3)


async def test_pod_status_shows_crashes_and_image_pull_errors(stage: Stage, node: Node) -> None:
    broken = deployment(node)
    broken["spec"]["template"]["spec"]["containers"][0]["command"] = [
        sys.executable,
        "-S",
        "-E",
        "-c",
        "raise SystemExit(3)",
    ]
    await stage.api.create(stage.deployments, broken)
    await stage.scale(1)
    (pod,) = await stage.until(
        lambda pods: pods and pods[0]["status"].get("containerStatuses", [{}])[0].get("restartCount", 0) > 1
    )
    status = pod["status"]["containerStatuses"][0]
    assert status["lastState"]["terminated"]["exitCode"] == 3
    template = broken["spec"]["template"]
    template["metadata"]["annotations"] = {IMAGE_ERROR: "1"}
    await stage.api.patch(f"{stage.deployments}/m", {"spec": {"template": template}})
    await stage.until(
        lambda pods: any(
            one["state"].get("waiting", {}).get("reason") == "ImagePullBackOff"
            for pod in pods
            for one in pod["status"].get("containerStatuses", [])
        )
    )


async def test_variable_with_an_optional_source_that_does_not_exist_is_unset(stage: Stage, node: Node) -> None:
    """A Secret that does not exist, and a key that a ConfigMap does not have; another key of it is set."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "config"}, "data": {"key": "value"}}
    await stage.api.create(stage.pods.replace("/pods", "/configmaps"), config)
    program = "import os, sys; sys.exit(10 * (os.environ.get('A') == 'value') + len({'B', 'C'} & os.environ.keys()))"
    sources = {
        "A": {"configMapKeyRef": {"name": "config", "key": "key", "optional": True}},
        "B": {"configMapKeyRef": {"name": "config", "key": "none", "optional": True}},
        "C": {"secretKeyRef": {"name": "none", "key": "key", "optional": True}},
    }
    one = deployment(node)
    one["spec"]["template"]["spec"]["containers"][0] |= {
        "command": [sys.executable, "-S", "-E", "-c", program],
        "env": [{"name": name, "valueFrom": source} for name, source in sources.items()],
    }
    await stage.api.create(stage.deployments, one)
    await stage.scale(1)
    (pod,) = await stage.until(
        lambda pods: pods and pods[0]["status"].get("containerStatuses", [{}])[0].get("restartCount", 0) > 0
    )
    assert pod["status"]["containerStatuses"][0]["lastState"]["terminated"]["exitCode"] == 10


async def test_node_with_ready_condition_unknown_becomes_ready_again(api: Api, node: Node) -> None:
    """As after an API server outage longer than the node monitor grace period: the controllers taint the node."""
    path = f"/api/v1/nodes/{node.name}"
    found = await api.get(path)
    lost = [{**one, "status": "Unknown"} if one["type"] == "Ready" else one for one in found["status"]["conditions"]]
    await api.patch(f"{path}/status", {"status": {"conditions": lost}})

    async def ready() -> bool:
        reported = await api.get(path)
        of = {one["type"]: one["status"] for one in reported["status"]["conditions"]}
        return of["Ready"] == "True" and not reported["spec"].get("taints")

    async with asyncio.timeout(WAIT_S_MAX):
        while not await ready():
            await asyncio.sleep(0.05)


async def test_pod_marked_as_unready_becomes_ready_again(stage: Stage, node: Node) -> None:
    """The controllers do that to all pods of a node that they consider lost; the kubelet corrects it."""
    await stage.api.create(stage.deployments, deployment(node))
    await stage.scale(1)
    (pod,) = await stage.until(lambda pods: len(ready(pods)) == 1)
    lost = [{**one, "status": "False"} if one["type"] == "Ready" else one for one in pod["status"]["conditions"]]
    path = f"{stage.pods}/{pod['metadata']['name']}/status"
    written = await stage.api.patch(path, {"status": {"conditions": lost}})
    assert not ready([written])
    await stage.until(lambda pods: len(ready(pods)) == 1)
