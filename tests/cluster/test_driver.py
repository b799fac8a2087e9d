"""The driver contract on a real control plane: the same suite as the local driver's, with pods for processes."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import Coroutine
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.access import access
from autoscaler.drivers.kubernetes.api import Api, ApiError
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.model import Model
from autoscaler.world import Replica
from tests.cluster.conftest import make_namespace, next_number
from tests.cluster.kubelet.container import Container
from tests.cluster.kubelet.node import Node
from tests.contracts.driver import DriverContract, Manner
from tests.kit.fake_process import command
from tests.kit.localrig import KNOBS, launch, replica


class ClusterRig:
    """A rig of the contract suite: a namespace and a node, which live for one scenario."""

    began_within_s = 1.5

    def __init__(self, kubeconfig: Path, logs: Path) -> None:
        self._kubeconfig = kubeconfig
        self._logs = logs
        self._name = f"driver-{uuid.uuid4().hex[:8]}"
        self._containers: dict[str, list[Container]] = {}

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        asyncio.run(self._run(scenario))

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await access(self._kubeconfig)) as api:
            self._api = api
            await make_namespace(api, self._name)
            labels = {"nvidia.com/gpu.product": "H100", "nvidia.com/gpu.memory": "81559"}
            node = Node(api, self._name, next_number(), {"nvidia.com/gpu": "2"}, labels, self._logs)
            node.on_container = lambda pod, one: self._containers.setdefault(pod, []).append(one)
            async with node.running():
                try:
                    await scenario
                finally:
                    await api.delete(f"/api/v1/namespaces/{self._name}")

    def driver(self) -> KubernetesDriver:
        return KubernetesDriver(self._api, self._name, launch, lambda _: "engine", assume_after_s=0.05)

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        slices = (f"{self._name}/gpu{int(name[1:]) - 1}",)
        if manner is Manner.CANNOT_START:
            return replica(name, ("/nowhere/engine", "{port}"), slices)
        words = command("--host", "{host}", "--port", "{port}", *KNOBS[manner])
        return replica(name, tuple(words), slices)

    def kill(self, replica: ReplicaId) -> None:
        process = self._containers[replica][-1].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def exists(self, replica: ReplicaId) -> bool:
        processes = [one.process for one in self._containers.get(replica, [])]
        return any(process is not None and process.returncode is None for process in processes)

    def starts(self, replica: ReplicaId) -> int:
        return len(self._containers.get(replica, []))


class TestKubernetesDriver(DriverContract):
    @pytest.fixture
    def rig(self, kubeconfig: Path, tmp_path: Path) -> ClusterRig:
        return ClusterRig(kubeconfig, tmp_path)


async def test_a_namesake_is_neither_taken_nor_deleted(api: Api, namespace: str, node: Node) -> None:
    """A pod of the same name that another decision made."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    container = {"name": "other", "image": "x", "command": ["/bin/sleep", "60"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "r1"}, "spec": {"containers": [container]}}
    made = await api.create(pods, body)
    with pytest.raises(ApiError):
        await api.delete(f"{pods}/r1", uid="another")
    assert (await api.get(f"{pods}/r1"))["metadata"]["uid"] == made["metadata"]["uid"]
    assert node.name
