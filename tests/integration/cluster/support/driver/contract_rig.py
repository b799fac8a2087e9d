"""Shared parts of the driver contract's rigs on a real control plane: a namespace and a node for one scenario."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Coroutine
from pathlib import Path

from autoscaler.contract import ReplicaId
from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.kubelet.container import Container
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.harness.driver_events import WAIT_S_MAX

ENDED = ("Succeeded", "Failed")


class ClusterRig:
    """Its namespace has the name of its node, which has two GPUs. Up to a hyphen, a pod's name is its replica's."""

    began_within_s = 1.5

    def __init__(self, kubeconfig: Path, logs: Path) -> None:
        self._kubeconfig = kubeconfig
        self._logs = logs
        self._name = f"driver-{uuid.uuid4().hex[:8]}"
        self._containers: dict[str, list[Container]] = {}
        self._api: Api

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        asyncio.run(self._run(scenario))

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await load_api_access(self._kubeconfig)) as self._api:
            await make_namespace(self._api, self._name)
            labels = {"nvidia.com/gpu.product": "H100", "nvidia.com/gpu.memory": "81559"}
            node = Node(self._api, self._name, next_number(), {"nvidia.com/gpu": "2"}, labels, self._logs)
            node.on_container = lambda pod, one: self._containers.setdefault(pod.partition("-")[0], []).append(one)
            async with node.running():
                try:
                    await scenario
                finally:
                    await self._api.delete(f"/api/v1/namespaces/{self._name}")

    def kill(self, replica: ReplicaId) -> None:
        process = self._containers[replica.partition("-")[0]][-1].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def exists(self, replica: ReplicaId) -> bool:
        processes = [one.process for one in self._containers.get(replica.partition("-")[0], [])]
        return any(process is not None and process.returncode is None for process in processes)

    async def until_over(self, replica: ReplicaId) -> None:
        pod = f"/api/v1/namespaces/{self._name}/pods/{replica}"
        async with asyncio.timeout(WAIT_S_MAX):
            while (await self._api.get(pod))["status"]["phase"] not in ENDED:
                await asyncio.sleep(0.02)

    def starts(self, replica: ReplicaId) -> int:
        return len(self._containers.get(replica.partition("-")[0], []))
