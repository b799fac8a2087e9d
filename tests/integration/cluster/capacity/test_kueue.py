"""Places in a Kueue queue on a real API server: the provider contract, with the real scheduler and pod security.

Kueue itself is a fake. Its LocalQueue has its own definition here; the definition of Workloads, which Pilotlight only
reads, accepts anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Coroutine
from pathlib import Path

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects.provisioning_pod_template import build_pod_template
from autoscaler.kubernetes.api import MERGE, Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.kueue import objects
from autoscaler.providers.kueue.provider import KueuePlaces
from autoscaler.spec.capacity import Kueue, ProviderSettings
from autoscaler.spec.pod import GPU, Resources
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, Settings
from autoscaler.state.world import World
from pilotlight.provider_kubernetes_client import Objects
from tests.contracts.provider import OWNER, ProviderContract, TakeoverContract
from tests.integration.cluster.capacity.test_provisioning_request import NODES
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.kubernetes.resources.test_kubeai_watcher import ANYTHING
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.provider_rig import Lost, ServerRig
from tests.support.builders.worlds import model
from tests.support.fakes.kubernetes.kueue import NEWEST, FakeKueue
from tests.support.harness.driver_events import WAIT_S_MAX

VERSION = {
    "name": "v1beta2", "served": True, "storage": True, "subresources": {"status": {}},
    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": ANYTHING, "status": ANYTHING}}},
}  # fmt: skip
WORKLOADS = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
    "metadata": {"name": "workloads.kueue.x-k8s.io"},
    "spec": {
        "group": "kueue.x-k8s.io", "scope": "Namespaced", "versions": [VERSION],
        "names": {"kind": "Workload", "plural": "workloads", "singular": "workload", "listKind": "WorkloadList"},
    },
}  # fmt: skip


class KueueRig(ServerRig):
    """See Rig. It uses a namespace, a queue and a node of its own; the node is Ready and has no kubelet.

    Kueue does nothing before the first `until_here` or `until_gone`.
    """

    def __init__(self, kubeconfig: Path) -> None:
        self._kubeconfig = kubeconfig
        self._name = f"queue-{uuid.uuid4().hex[:8]}"
        device = NodeDevice(model="NVIDIA-L4", memory_bytes=Bytes(24 << 30), count=2)
        self._world = World(epoch=1, settings=Settings(nodes=(NodeKind(selector={"test": self._name}, device=device),)))
        self._held = True
        self._api: Api

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await load_api_access(self._kubeconfig)) as self._api:
            await custom_resources.install_foreign(self._api, "kueue")
            await self._api.apply(custom_resources.definition("workloads", "kueue.x-k8s.io"), WORKLOADS, "test")
            await make_namespace(self._api, self._name)
            level = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
            await self._api.patch(f"/api/v1/namespaces/{self._name}", level, MERGE)
            await self._furnish()
            self._lost, clock = Lost(self._api, self._api), asyncio.get_running_loop().time
            played = FakeKueue(Objects(self._api, self._api), self._name, clock, {self._name: 2}, schedules=False)
            playing = asyncio.create_task(self._play(played))
            try:
                await scenario
            finally:
                playing.cancel()
                await asyncio.wait([playing])
                await self._api.delete(f"{NODES}/{self._name}")
                await self._api.delete(f"/api/v1/namespaces/{self._name}")
        assert playing.cancelled(), playing.exception()

    async def _furnish(self) -> None:
        queue = {"apiVersion": NEWEST, "kind": "LocalQueue", "metadata": {"name": "serving"},
                 "spec": {"clusterQueue": "gpus"}}  # fmt: skip
        path = f"/apis/{NEWEST}/namespaces/{self._name}/localqueues"
        await self._api.create(path, queue)
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": self._name, "labels": {"test": self._name}}}
        await self._api.create(NODES, node)
        has = {"cpu": "8", "memory": "32Gi", "pods": "110", GPU: "2"}
        ready = {"type": "Ready", "status": "True"}
        status = {"capacity": has, "allocatable": has, "conditions": [ready]}
        await self._api.patch(f"{NODES}/{self._name}/status", {"status": status}, MERGE)
        async with asyncio.timeout(WAIT_S_MAX):
            while (await self._api.get(f"{NODES}/{self._name}"))["spec"].get("taints"):
                await asyncio.sleep(0.05)

    async def _play(self, played: FakeKueue) -> None:
        while True:
            with contextlib.suppress(AnswerError):  # the object is gone or has been replaced
                if not self._held:
                    await played.step()
            await asyncio.sleep(0.05)

    def provider(self) -> KueuePlaces:
        """See Rig."""
        named = ProviderSettings(name="queue", kueue=Kueue(local_queue="serving"))
        return KueuePlaces(named, self._lost, self._name, lambda: self._world, pod_of)

    def deliver(self) -> None:
        """See ServerRig."""
        self._held = False

    async def until_gone(self, name: str) -> None:
        """See Rig."""
        self.deliver()
        await super().until_gone(name)

    def use(self, name: str) -> None:
        """See Rig: a replica's pod takes the place, as the driver creates it."""
        self._lost.todo = self._taken(name)

    async def _taken(self, name: str) -> None:
        path = f"/api/v1/namespaces/{self._name}/pods"
        found = await self._api.get(f"{path}/{name}")
        assert other_pods.read_other_pod(found) is None, "it gives way"
        one = objects.read_place(found)
        assert one is not None
        marks = objects.place_to_lease(one, None, "serving").marks
        same = {key: found["spec"][key] for key in ("containers", "nodeSelector", "securityContext", "tolerations")}
        taker: Object = {
            "apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "replica", "labels": marks.labels, "annotations": marks.annotations},
            "spec": {**same, "schedulingGates": [{"name": gate} for gate in marks.gates]},
        }  # fmt: skip
        taker["spec"]["containers"][0].pop("volumeMounts", None)
        await self._api.create(path, taker)
        await self._api.delete(f"{path}/{marks.instead}", grace_s=0)
        async with asyncio.timeout(WAIT_S_MAX):
            while (await self._api.get(f"{path}/replica"))["spec"].get("nodeName") != self._name:
                await asyncio.sleep(0.05)

    def leave_little(self) -> None:
        """See Rig."""
        path = f"/apis/{NEWEST}/namespaces/{self._name}/localqueues/serving"
        self._lost.todo = self._api.patch(path, {"spec": {"stopPolicy": "Hold"}}, MERGE)


def pod_of(name: ModelName) -> Object | None:
    made = model("llama-8b", 16)
    made = replace(made, spec=replace(made.spec, resources=Resources(requests={"cpu": "1"}), image="engine:1"))
    return build_pod_template(made, Settings()) if name == OWNER else None


@pytest.mark.standard
class TestKueuePlacesOnServer(ProviderContract, TakeoverContract):
    """The provider contract."""

    @pytest.fixture
    def rig(self, kubeconfig: Path) -> KueueRig:
        """See ProviderContract."""
        return KueueRig(kubeconfig)
