"""GPUs of a fabric with a fake operator (CRO) and its own definitions on a real API server: the provider contract."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Coroutine
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.providers.cro.objects import API, MANAGED_BY, REQUESTS, RESOURCES
from autoscaler.providers.cro.provider import NODES, CroFabric
from autoscaler.providers.provider import Attended, Provider
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Settings
from autoscaler.state.world import World
from pilotlight.provider_kubernetes_client import Objects
from tests.contracts.provider import ProviderContract, TakeoverContract, order, release
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.provider_rig import Lost, ServerRig
from tests.support.fakes.kubernetes.cro import NONE_FREE, FakeCro
from tests.support.harness.driver_events import WAIT_S_MAX

pytestmark = pytest.mark.standard

GPU = "nvidia.com/gpu"


class CroRig(ServerRig):
    """See Rig. It uses a node, a model and a namespace of its own. Devices are attached only after `deliver`."""

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._name = f"fabric-{uuid.uuid4().hex[:8]}"
        self._model = f"A100-{self._name}-40GB"
        kind = NodeKind(
            selector={"test": self._name}, device=NodeDevice(model=self._model, memory_bytes=Bytes(40 << 30)),
            devices_max=4,
        )  # fmt: skip
        self._world = World(epoch=1, settings=Settings(nodes=(kind,)))
        self._held = {self._model}
        self._api: Api
        self._cro: FakeCro

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await load_api_access(self._kubeconfig)) as self._api:
            await custom_resources.install_foreign(self._api, "cro")
            await make_namespace(self._api, self._name)
            await self._node()
            self._lost, loop = Lost(self._api, self._api), asyncio.get_running_loop()
            self._cro = FakeCro(
                Objects(self._api, self._api), loop.time, {self._model: 3}, attach_s=0.1, detach_s=0.1, look_s=0.5,
                period_s=0.02, never=self._held,
            )  # fmt: skip
            playing = asyncio.create_task(self._cro.run())
            try:
                await scenario
            finally:
                playing.cancel()
                await asyncio.wait([playing])
                await self._clean()
        assert playing.cancelled(), playing.exception()

    async def _node(self) -> None:
        """Creates a ready node without a kubelet: the controllers tolerate that for the duration of a test."""
        labels = {"test": self._name}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._name, "labels": labels}}
        await self._api.create(NODES, node)
        status = {"conditions": [{"type": "Ready", "status": "True"}]}
        await self._api.patch(f"{NODES}/{self._name}/status", {"status": status})

    async def _clean(self) -> None:
        for path in (REQUESTS, RESOURCES):
            for one in (await self._api.get(path))["items"]:
                spec = one["spec"].get("resource", one["spec"])
                if spec["model"] == self._model:
                    at = f"{path}/{one['metadata']['name']}"
                    try:
                        await self._api.patch(at, {"metadata": {"finalizers": None}})
                        if "deletionTimestamp" not in one["metadata"]:
                            await self._api.delete(at)
                    except ApiError as error:
                        if error.status != 404:  # its controller has removed the finalizer meanwhile
                            raise
        await self._api.delete(f"{NODES}/{self._name}")
        await self._api.delete(f"/api/v1/namespaces/{self._name}")

    def provider(self) -> Provider:
        """See Rig."""
        return CroFabric("rack", self._model, self._lost, lambda: self._world)

    def deliver(self) -> None:
        """See ServerRig."""
        self._held.clear()

    def use(self, name: str) -> None:
        """See Rig."""
        container = {"name": "a", "image": "a", "resources": {"limits": {GPU: "1"}}}
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": self._name, "containers": [container]},
        }  # fmt: skip
        self._lost.todo = self._api.create(f"/api/v1/namespaces/{self._name}/pods", pod)

    def leave_little(self) -> None:
        """See Rig."""
        self.deliver()
        self._lost.todo = self._used_up()

    async def _used_up(self) -> None:
        self._cro.pool[self._model] = 0
        spec = {"type": "gpu", "model": self._model, "target_node": "another"}
        labels = {MANAGED_BY: "another"}
        metadata = {"name": f"{self._name}-another", "labels": labels}
        made = {"apiVersion": API, "kind": "ComposableResource", "metadata": metadata, "spec": spec}
        await self._api.create(RESOURCES, made)
        async with asyncio.timeout(WAIT_S_MAX):
            while (await self._api.get(f"{RESOURCES}/{metadata['name']}")).get("status", {}).get("error") != NONE_FREE:
                await asyncio.sleep(0.05)


class TestCroFabricOnServer(ProviderContract, TakeoverContract):
    """The provider contract."""

    @pytest.fixture
    def rig(self, kubeconfig: Path) -> CroRig:
        """See ProviderContract."""
        return CroRig(kubeconfig)


def test_watch_reports_delivery_and_release_of_a_fabric_order(kubeconfig: Path) -> None:
    """The provider is listed only after the watch reported a change."""
    rig = CroRig(kubeconfig)

    async def scenario() -> None:
        provider, news = rig.provider(), asyncio.Event()
        assert isinstance(provider, Attended)
        hearing = asyncio.ensure_future(provider.attend(news.set))

        async def until(*phases: str) -> None:
            async with asyncio.timeout(WAIT_S_MAX):
                while [one.phase for one in await provider.list()] != [*phases]:
                    await news.wait()
                    news.clear()

        made = order((await provider.offers())[0])
        await provider.acquire(made)
        rig.deliver()
        await until("here")
        await provider.release(release(made))
        await until()
        assert not hearing.done()
        hearing.cancel()

    rig.run(scenario())
