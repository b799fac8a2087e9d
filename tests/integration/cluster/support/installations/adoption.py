"""An autoscaler that adopts the workloads of a namespace, and the workloads as users write and scale them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from autoscaler.kubernetes.api import MERGE, Api, Object
from tests.integration.cluster.support.installations.single_instance import WAIT_S_MAX, House
from tests.support.fakes.engines.fake_engine_process import command

LINGO, OURS = "lingo.substratus.ai/", "pilotlight.dev/"


class Adopting(House):
    """A House that adopts workloads, in its own namespace only."""

    def __init__(self, folder: Path, kubeconfig: Path, api: Api, namespace: str) -> None:
        super().__init__(folder, kubeconfig, namespace, "--adopt-in", namespace)
        self.api = api
        self.apps = f"/apis/apps/v1/namespaces/{namespace}"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self._events_path = f"/api/v1/namespaces/{namespace}/events"
        self.write()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Adopting]:
        """Yields when the gateway knows the workloads."""
        async with super().running():
            async with asyncio.timeout(WAIT_S_MAX):
                while not await self._lists_any():
                    await asyncio.sleep(0.05)
            yield self

    async def _lists_any(self) -> bool:
        async with self.session.get(f"{self.url}/v1/models") as answer:
            return bool((await answer.json())["data"])

    async def embed(self, model: str) -> tuple[int, str]:
        """Sends one embeddings request and returns (status, response text)."""
        asked = {"model": model, "input": "Your text string goes here"}
        async with self.session.post(f"{self.url}/v1/embeddings", json=asked) as answer:
            return answer.status, await answer.text()

    async def until_replicas(self, model: str, state: str, count: int) -> None:
        """Waits until `count` replicas of a model are in a state."""
        while json.loads(await self.read_ops(f"models/{model}"))["replicas"].get(state, 0) != count:
            await asyncio.sleep(0.02)

    async def until_running(self, model: str, calls: int) -> None:
        """Waits until that many requests of a model run on replicas."""
        while json.loads(await self.read_ops(f"models/{model}"))["demand"]["running"] != calls:
            await asyncio.sleep(0.02)

    async def pods(self) -> list[Object]:
        """Pods that are not being deleted."""
        found: list[Object] = (await self.api.get(self.pods_path))["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    async def until_pods(self, count: int) -> list[Object]:
        """Waits until exactly `count` pods exist, terminating ones included."""
        while len(found := (await self.api.get(self.pods_path))["items"]) != count:
            await asyncio.sleep(0.05)
        return list(found)

    async def event(self, name: str, reason: str) -> str:
        """Waits for an Event on a workload and returns its message."""
        selector = f"involvedObject.name={name},reason={reason}"
        while not (found := (await self.api.get(self._events_path, fieldSelector=selector))["items"]):
            await asyncio.sleep(0.05)
        return str(found[-1]["message"])

    async def scale(self, name: str) -> Object:
        """Returns a Deployment, to inspect its scale and the owners of that field."""
        return await self.api.get(f"{self.apps}/deployments/{name}")

    async def shown(self, name: str, reason: str = "", kind: str = "deployments") -> Object:
        """Waits for our condition on a workload with that reason (empty: no condition) and returns it."""
        while True:
            found = (await self.api.get(f"{self.apps}/{kind}/{name}"))["status"].get("conditions", [])
            own = [one for one in found if one["type"] == OURS + "Adopted"]
            if [one["reason"] for one in own] == ([reason] if reason else []):
                return own[0] if own else {}
            await asyncio.sleep(0.05)

    async def annotate(self, name: str, notes: dict[str, str], kind: str = "deployments") -> None:
        """Sets annotations as the workload's owner does."""
        await self.api.patch(f"{self.apps}/{kind}/{name}", {"metadata": {"annotations": notes}})

    def hold(self, seconds: int) -> None:
        """Sets `holdSeconds`, during which a manual scale is left unchanged; running processes reload it."""
        self.tell(adoption={"holdSeconds": seconds})

    async def by_hand(self, name: str, replicas: int, kind: str = "deployments") -> None:
        """Runs the equivalent of `kubectl scale`."""
        path = f"{self.apps}/{kind}/{name}/scale"
        await self.api.patch(path, {"spec": {"replicas": replicas}}, MERGE, fieldManager="kubectl")


def workload(name: str, replicas: int, notes: dict[str, str], kind: str = "Deployment", *knobs: str) -> Object:
    """Returns a workload as a user writes it: a real probe every second, and a template without Pilotlight keys."""
    words = command("--host", "$(POD_IP)", "--port", "8080", "--name", name, *knobs)
    container = {
        "name": "engine", "image": "engine", "command": words, "ports": [{"containerPort": 8080}],
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8080}, "periodSeconds": 1},
    }  # fmt: skip
    spec: dict[str, Any] = {
        "replicas": replicas, "selector": {"matchLabels": {"app": name}},
        "template": {"metadata": {"labels": {"app": name}}, "spec": {"containers": [container]}},
    }  # fmt: skip
    if kind == "StatefulSet":
        spec |= {"serviceName": name, "podManagementPolicy": "Parallel"}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "annotations": notes}, "spec": spec}
