"""The system behind queueing Providers, in virtual time: in-memory objects and the controller of ProvisioningRequests.

Owns the nodes, pods and Models that the tests of both share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from autoscaler.contract import ModelName
from autoscaler.providers import order_annotations
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.provider import Provider
from autoscaler.providers.provisioning_request import objects
from autoscaler.providers.provisioning_request.objects import ATOMIC, CHECK, GKE
from autoscaler.providers.provisioning_request.provider import COUNTED, ProvisioningProvider
from autoscaler.spec.capacity import ProviderSettings, Provisioning
from autoscaler.spec.pod import CONSUMES, GPU
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Price, Settings
from autoscaler.state.capacity import Listed
from autoscaler.state.world import World
from tests.contracts.provider import OWNER, order
from tests.simulation.environment.virtual_loop import run
from tests.support.fakes.kubernetes.kube_objects import PlayedServer
from tests.support.fakes.kubernetes.provisioner import FakeProvisioner, Fault

NAMESPACE = "engines"
UNIX_S = 1_800_000_000.0
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
TEMPLATES = f"/api/v1/namespaces/{NAMESPACE}/podtemplates"
REQUESTS = f"/apis/{objects.API}/namespaces/{NAMESPACE}/provisioningrequests"
EXPIRED = "CapacityReservationTimeExpired: reservation time is expired"
DRY = "QUOTA_EXCEEDED: Quota 'NVIDIA_L4_GPUS' exceeded. Limit: 0.0 in region europe-west4."
POD: Object = {
    "metadata": {"labels": {"app": "engine"}},
    "spec": {
        "tolerations": [{"key": GPU, "operator": "Exists"}],
        "containers": [{"name": "engine", "image": "vllm", "resources": {"requests": {"cpu": "4"}}}],
    },
}


def settings(count: int = 1) -> Settings:
    device = NodeDevice(model="NVIDIA-L4", memory_bytes=Bytes(24 << 30), count=count)
    price = Price(device="NVIDIA-L4", per_hour=0.5, bought="flex")
    return Settings(nodes=(NodeKind(selector={"pool": "l4"}, device=device),), prices=(price,))


class Quotas(PlayedServer):
    """A server with ResourceQuotas that counts requests as the quota controller does."""

    async def create(self, path: str, body: Object) -> Object:
        """See ApiServer."""
        for at, one in self.objects.items():
            hard = one.get("spec", {}).get("hard", {}).get(COUNTED) if "/resourcequotas/" in at else None
            if hard is not None and path == REQUESTS and len(await self.items(REQUESTS)) >= int(hard):
                raise AnswerError(403, "Forbidden", "exceeded quota: few, requested: 1, used: 0, limited: 0")
        return await super().create(path, body)


class ProvisioningRig:
    """A rig in virtual time; the fake controller polls every 5 s."""

    def __init__(self, class_name: str = ATOMIC, max_run_s: float | None = None, count: int = 1) -> None:
        self.class_name, self.max_run_s, self.count = class_name, max_run_s, count
        self.fault: Fault = ""
        self.server: Quotas
        self.controller: FakeProvisioner

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """See Rig."""

        async def whole() -> None:
            clock = asyncio.get_running_loop().time
            self.server = Quotas(lambda: UNIX_S + clock() + clock() % 7.0 / 7.0)
            self.controller = FakeProvisioner(self.server, NAMESPACE, clock, fault=lambda name: self.fault)
            self.controller.gke = self.class_name == GKE
            await scenario

        run(whole())

    def provider(self, name: str = "queue") -> ProvisioningProvider:
        """See Rig."""
        asked = Provisioning(class_name=self.class_name, max_run_seconds=self.max_run_s)
        named = ProviderSettings(name=name, provisioning_request=asked)
        clock = asyncio.get_running_loop().time
        return ProvisioningProvider(
            named, self.server, NAMESPACE, lambda: World(epoch=1, settings=settings(self.count)), pod_of, clock
        )

    async def go_on(self, seconds: float = 5.0) -> None:
        """Lets the controller work for that long."""
        for _ in range(max(1, int(seconds / 5.0))):
            await asyncio.sleep(5.0)
            if not self.server.away:
                await self.controller.step()

    async def until_here(self, name: str) -> None:
        """See Rig."""
        for _ in range(100):
            await self.go_on()
            if self.class_name == CHECK:
                self.bind(name)
            shown = {one.name: one for one in await self.provider().list()}
            if shown[name].phase == "here":
                return
        raise AssertionError(f"it does not come: {shown}")

    def bind(self, name: str, node: str = "there", gpus: str = "0") -> None:
        """Binds the pod of the order to a node."""
        labels = {"pool": "l4"}
        if f"/api/v1/nodes/{node}" not in self.server.objects:
            self.server.put(f"/api/v1/nodes/{node}", {"metadata": {"labels": labels}, "status": {}})
        notes = dict(zip(CONSUMES, (name, self.class_name), strict=True))
        metadata = {"namespace": NAMESPACE, "labels": {"app.kubernetes.io/managed-by": "pilotlight"}}
        resources = {"limits": {GPU: gpus}} if gpus != "0" else {}
        pod = {"metadata": {**metadata, "annotations": notes}, "status": {"phase": "Running"},
               "spec": {"nodeName": node, "containers": [{"name": "engine", "resources": resources}]}}  # fmt: skip
        self.server.put(f"{PODS}/pod-{name}", pod)

    async def until_gone(self, name: str) -> None:
        """See Rig: at once."""

    def use(self, name: str) -> None:
        """See Rig."""
        node = next(one["metadata"]["annotations"][order_annotations.NODE] for at, one in self.server.objects.items()
                    if at == f"{REQUESTS}/{name}")  # fmt: skip
        self.bind(name, node, gpus="1")

    def leave_little(self) -> None:
        """See Rig."""
        quota = {"spec": {"hard": {COUNTED: "0"}}, "status": {"used": {COUNTED: "0"}}}
        self.server.put(f"/api/v1/namespaces/{NAMESPACE}/resourcequotas/few", quota)

    def go_away(self) -> None:
        """See Rig."""
        self.server.away = True


def pod_of(model: ModelName) -> Object | None:
    return POD if model == OWNER else None


async def only(provider: Provider) -> Listed:
    (one,) = await provider.list()
    return one


def scenario(rig: ProvisioningRig, what: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def whole() -> None:
        await what()

    rig.run(whole())


async def ordered(rig: ProvisioningRig, number: int = 0) -> tuple[ProvisioningProvider, str]:
    provider = rig.provider()
    made = order((await provider.offers())[0], number)
    await provider.acquire(made)
    return provider, made.id.name
