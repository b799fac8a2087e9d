"""The driver contract on a real control plane: the same suite as the local driver's, with pods instead of processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.spec.model import Model
from autoscaler.state.world import Replica
from tests.contracts.driver import DriverContract, Manner
from tests.integration.cluster.support.driver.contract_rig import ClusterRig
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
