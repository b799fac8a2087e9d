"""Nodes from ProvisioningRequests on a real API server, with their own definition: the contract for each class."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from pathlib import Path

import pytest

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.objects.provisioning_pod_template import build_pod_template
from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.provisioning_request.objects import ATOMIC, CHECK, GKE
from autoscaler.providers.provisioning_request.provider import COUNTED, ProvisioningProvider
from autoscaler.spec.capacity import ProviderSettings, Provisioning
from autoscaler.spec.pod import CONSUMES, GPU, Pod, Toleration
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Settings
from autoscaler.state.world import World
from pilotlight.provider_kubernetes_client import Objects
from tests.contracts.provider import OWNER, ProviderContract, TakeoverContract
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.provider_rig import Lost, ServerRig
from tests.support.builders.worlds import model
from tests.support.fakes.kubernetes.provisioner import FakeProvisioner
from tests.support.harness.driver_events import WAIT_S_MAX

NODES = "/api/v1/nodes"
SETTINGS = Settings(pod=Pod(tolerations=(Toleration(key="cloud.google.com/gke-queued", operator="Exists"),)))


class ProvisioningRig(ServerRig):
    """See Rig. It uses a namespace and a kind of node of its own. Nothing is granted before `until_here`."""

    def __init__(self, kubeconfig: Path, class_name: str) -> None:
        self._kubeconfig, self._class_name = kubeconfig, class_name
        self._name = f"queue-{uuid.uuid4().hex[:8]}"
        device = NodeDevice(model="NVIDIA-L4", memory_bytes=Bytes(24 << 30))
        self._world = World(epoch=1, settings=Settings(nodes=(NodeKind(selector={"test": self._name}, device=device),)))
        self._held = True
        self._api: Api

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await load_api_access(self._kubeconfig)) as self._api:
            await custom_resources.install_foreign(self._api, "autoscaling")
            await make_namespace(self._api, self._name)
            self._lost, clock = Lost(self._api, self._api), asyncio.get_running_loop().time
            played = FakeProvisioner(
                Objects(self._api, self._api),
                self._name,
                clock,
                after_s=0.1,
                boot_s=0.1,
                prefix=f"{self._name}-",
                gke=self._class_name == GKE,
                fault=lambda _: "never" if self._held else "",
            )
            playing = asyncio.create_task(self._play(played))
            try:
                await scenario
            finally:
                playing.cancel()
                await asyncio.wait([playing])
                for path in [f"{NODES}/{one}" for one in (*played.nodes.values(), f"{self._name}-there")]:
                    with contextlib.suppress(ApiError):
                        await self._api.delete(path)
                await self._api.delete(f"/api/v1/namespaces/{self._name}")
        assert playing.cancelled(), playing.exception()

    @staticmethod
    async def _play(played: FakeProvisioner) -> None:
        while True:
            with contextlib.suppress(AnswerError):  # the object is gone or has been replaced
                await played.step()
            await asyncio.sleep(0.05)

    def provider(self) -> ProvisioningProvider:
        """See Rig."""
        asked = Provisioning(class_name=self._class_name, max_run_seconds=3600.0)
        named = ProviderSettings(name="queue", provisioning_request=asked)
        clock = asyncio.get_running_loop().time
        return ProvisioningProvider(named, self._lost, self._name, lambda: self._world, pod_of, clock)

    def deliver(self) -> None:
        """See ServerRig."""
        self._held = False

    async def until_here(self, name: str) -> None:
        """See Rig."""
        self.deliver()
        if self._class_name == CHECK:
            await self._there()
            await self._pod(name, f"{self._name}-there", consumes=name)
        await super().until_here(name)

    async def until_gone(self, name: str) -> None:
        """See Rig: returns at once."""

    async def _there(self) -> None:
        labels, name = {"test": self._name}, f"{self._name}-there"
        with contextlib.suppress(ApiError):
            await self._api.create(
                NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}}
            )

    async def _pod(self, name: str, node: str, *, consumes: str = "", gpus: int = 0) -> None:
        notes = dict(zip(CONSUMES, (consumes, self._class_name), strict=True)) if consumes else {}
        resources = {"limits": {GPU: str(gpus)}} if gpus else {}
        metadata = {
            "name": f"{name}-{gpus}",
            "annotations": notes,
            "labels": {"app.kubernetes.io/managed-by": "pilotlight"},
        }
        spec = {"nodeName": node, "containers": [{"name": "a", "image": "a", "resources": resources}]}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        await self._api.create(f"/api/v1/namespaces/{self._name}/pods", pod)

    def use(self, name: str) -> None:
        """See Rig."""
        node = f"{self._name}-there" if self._class_name == CHECK else f"{self._name}-{name}"
        self._lost.todo = self._pod(name, node, gpus=1)

    def leave_little(self) -> None:
        """See Rig."""
        self._lost.todo = self._used_up()

    async def _used_up(self) -> None:
        path = f"/api/v1/namespaces/{self._name}/resourcequotas"
        quota = {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "few"},
            "spec": {"hard": {COUNTED: "0"}},
        }
        await self._api.create(path, quota)
        async with asyncio.timeout(WAIT_S_MAX):
            while COUNTED not in (await self._api.get(f"{path}/few")).get("status", {}).get("hard", {}):
                await asyncio.sleep(0.05)


def pod_of(name: ModelName) -> Object | None:
    return build_pod_template(model("llama-8b", 16), SETTINGS) if name == OWNER else None


@pytest.mark.standard
class TestAtomicScaleUpOnServer(ProviderContract, TakeoverContract):
    """Cluster Autoscaler adds a node."""

    @pytest.fixture
    def rig(self, kubeconfig: Path) -> ProvisioningRig:
        """See ProviderContract."""
        return ProvisioningRig(kubeconfig, ATOMIC)


@pytest.mark.standard
class TestQueuedProvisioningOnServer(ProviderContract, TakeoverContract):
    """A cloud's queue provides a node."""

    @pytest.fixture
    def rig(self, kubeconfig: Path) -> ProvisioningRig:
        """See ProviderContract."""
        return ProvisioningRig(kubeconfig, GKE)


@pytest.mark.standard
class TestCheckCapacityOnServer(ProviderContract, TakeoverContract):
    """Capacity on an existing node is booked."""

    @pytest.fixture
    def rig(self, kubeconfig: Path) -> ProvisioningRig:
        """See ProviderContract."""
        return ProvisioningRig(kubeconfig, CHECK)
