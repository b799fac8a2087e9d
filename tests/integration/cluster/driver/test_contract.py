"""The driver contract on a real control plane: the same suite as the local driver's, with pods instead of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.spec.model import Model
from autoscaler.state.world import Replica
from tests.contracts.driver import DriverContract, Manner
from tests.integration.cluster.support.driver.contract_rig import ClusterRig
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.harness.local_rig import KNOBS, launch, replica

pytestmark = pytest.mark.standard


class OwnRig(ClusterRig):
    """Replicas are pods that we create."""

    def driver(self) -> KubernetesDriver:
        return KubernetesDriver(self._api, self._name, launch, lambda _: "engine", assume_after_s=0.05)

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        slices = (f"{self._name}/gpu{int(name[1:]) - 1}",)
        if manner is Manner.CANNOT_START:
            return replica(name, ("/nowhere/engine", "{port}"), slices)
        words = command("--host", "{host}", "--port", "{port}", *KNOBS[manner])
        return replica(name, tuple(words), slices)


class TestKubernetesDriver(DriverContract):
    @pytest.fixture
    def rig(self, kubeconfig: Path, tmp_path: Path) -> OwnRig:
        return OwnRig(kubeconfig, tmp_path)


async def test_pod_with_the_same_name_but_another_uid_is_not_deleted(api: Api, namespace: str, node: Node) -> None:
    """The pod with that name belongs to another decision."""
    pods = f"/api/v1/namespaces/{namespace}/pods"
    container = {"name": "other", "image": "x", "command": ["/bin/sleep", "60"]}
    body = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "r1"}, "spec": {"containers": [container]}}
    made = await api.create(pods, body)
    with pytest.raises(ApiError):
        await api.delete(f"{pods}/r1", uid="another")
    assert (await api.get(f"{pods}/r1"))["metadata"]["uid"] == made["metadata"]["uid"]
    assert node.name
