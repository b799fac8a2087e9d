"""Nodes of the real Karpenter with its KWOK provider on a real control plane: the contract and end-to-end tests."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Coroutine, Iterator
from datetime import datetime
from pathlib import Path
from signal import SIGCONT, SIGSTOP

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.providers.karpenter.provider import KarpenterNodes
from autoscaler.providers.provider import Provider
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing, Settings
from autoscaler.state.world import World
from tests.contracts.provider import ProviderContract, TakeoverContract
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.control_plane.provider_rig import Lost, ServerRig
from tests.integration.cluster.support.controllers.karpenter import CLAIMS, POOLS, TYPE, Machines, karpenter
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.go_programs import BuildError
from tests.support.harness.driver_events import WAIT_S_MAX
from tests.support.harness.faults.sigstop import deliver

GPU = "nvidia.com/gpu"
TAINT = {"key": GPU, "value": "true", "effect": "NoSchedule"}


@pytest.fixture(scope="module", autouse=True)
def process(plane: Plane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Karpenter, for all tests of the module."""
    try:
        with karpenter(plane.kubeconfig, tmp_path_factory.mktemp("karpenter")) as pid:
            yield pid
    except BuildError as error:
        pytest.skip(str(error))


class KarpenterRig(ServerRig):
    """See Rig. It uses a pool and a namespace of its own. Karpenter is stopped except during waits.
    It launches a node within a tenth of a second, so no order could be cancelled before.
    """

    def __init__(self, kubeconfig: Path, logs: Path, process: int) -> None:
        self._kubeconfig, self._logs, self._process = kubeconfig, logs, process
        self._name = f"nodes-{uuid.uuid4().hex[:8]}"
        kind = NodeKind(
            selector={"test": self._name, "node.kubernetes.io/instance-type": TYPE},
            device=NodeDevice(model="T4", memory_bytes=Bytes(16 << 30)),
            slicing=NodeSlicing(kind="timeslice", replicas=3),
        )  # fmt: skip
        self._world = World(epoch=1, settings=Settings(nodes=(kind,)))
        self._api: Api
        self._nodes: dict[str, str] = {}

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await load_api_access(self._kubeconfig)) as self._api:
            await make_namespace(self._api, self._name)
            self._lost = Lost(self._api, self._api)
            async with Machines(self._api, self._name, self._logs).pooled(limits={GPU: "9"}) as machines:
                await machines.until_accepted()  # a stopped Karpenter does not correct what it reported too early
                deliver(self._process, SIGSTOP)
                try:
                    await scenario
                finally:
                    deliver(self._process, SIGCONT)
            await self._api.delete(f"/api/v1/namespaces/{self._name}")

    def provider(self) -> Provider:
        """See Rig."""
        return KarpenterNodes("g4", self._name, self._lost, lambda: self._world)

    def deliver(self) -> None:
        """See ServerRig."""
        deliver(self._process, SIGCONT)

    async def until_here(self, name: str) -> None:
        """See Rig."""
        await super().until_here(name)
        self._nodes[name] = {one.name: one.node for one in await self.provider().list()}[name]

    async def until_gone(self, name: str) -> None:
        """See Rig."""
        self.deliver()
        await super().until_gone(name)
        deliver(self._process, SIGSTOP)

    def use(self, name: str) -> None:
        """See Rig."""
        container = {"name": "a", "image": "a", "command": ["sleep", "600"], "resources": {"limits": {GPU: "1"}}}
        pod = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": name},
            "spec": {"nodeName": self._nodes[name], "containers": [container], "terminationGracePeriodSeconds": 1},
        }  # fmt: skip
        self._lost.todo = self._api.create(f"/api/v1/namespaces/{self._name}/pods", pod)

    def leave_little(self) -> None:
        """See Rig."""
        self._lost.todo = self._api.patch(f"{POOLS}/{self._name}", {"spec": {"limits": {GPU: "0"}}})


@pytest.mark.standard
class TestKarpenterNodesOnServer(ProviderContract, TakeoverContract):
    """The provider contract."""

    @pytest.fixture
    def rig(self, kubeconfig: Path, tmp_path: Path, process: int) -> KarpenterRig:
        """See ProviderContract."""
        return KarpenterRig(kubeconfig, tmp_path, process)


def settings(namespace: str) -> dict[str, object]:
    """Settings with a T4 that is advertised three times, on existing nodes and on those that can be added."""
    kind = {
        "selector": {"test": namespace, "node.kubernetes.io/instance-type": TYPE},
        "device": {"model": "T4", "memory": "16Gi"}, "slicing": {"kind": "timeslice", "replicas": 3},
    }  # fmt: skip
    provider = {"name": "g4", "karpenter": {"nodePool": namespace}, "expectedSeconds": 5}
    return {"nodes": [kind], "capacity": [provider]}


def many(namespace: str, least: int, **spec: object) -> dict[str, object]:
    """A Model with that many replicas, one per slice."""
    there = {"pod": {"nodeSelector": {"test": namespace}}, "gpu": {"memory": "5Gi"}}
    return model("ada", replicas={"min": least, "max": 6}, **there, **spec)


async def nodes_of(api: Api, namespace: str) -> list[str]:
    """Nodes of the replicas' pods."""
    found = (await api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="pilotlight.dev/model"))["items"]
    return sorted(one["spec"].get("nodeName", "") for one in found)


async def ready(house: House) -> int:
    """The number of ready replicas of ada."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/models/ada") as answer:
        return int((await answer.json())["replicas"].get("ready", 0))


async def running(house: House) -> int:
    """The number of running requests of ada, as the autoscaler counts them."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/models/ada") as answer:
        return int((await answer.json())["demand"]["running"])


@pytest.mark.standard
async def test_replica_beyond_three_gpu_time_slices_creates_one_node_claim(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    labels = {"test": namespace, "node.kubernetes.io/instance-type": TYPE}
    there = Node(
        api, f"node-{namespace}", next_number(), {GPU: "3"}, labels, tmp_path, probe_period_s=0.05, taints=(TAINT,)
    )
    async with there.running(), Machines(api, namespace, tmp_path).pooled(limits={GPU: "9"}) as machines:
        house.write(many(namespace, 3), **settings(namespace))
        async with house.running(), asyncio.timeout(WAIT_S_MAX * 3):
            while await ready(house) < 3:
                await asyncio.sleep(0.05)
            assert await nodes_of(api, namespace) == [there.name] * 3
            assert not await machines.claims()
            house.tell(many(namespace, 4), **settings(namespace))
            while await ready(house) < 4:
                assert len(await machines.claims()) <= 1
                await asyncio.sleep(0.05)
            claim = await machines.only()
            notes = claim["metadata"]["annotations"]
            assert claim["metadata"]["name"].startswith("pilotlight-ada-")
            assert notes["pilotlight.dev/owner"] == "ada"
            assert set(await nodes_of(api, namespace)) == {there.name, claim["status"]["nodeName"]}
            house.tell(many(namespace, 6), **settings(namespace))  # its other two shares are free
            while await ready(house) < 6:
                await asyncio.sleep(0.05)
            assert [one["metadata"]["name"] for one in await machines.claims()] == [claim["metadata"]["name"]]
            assert machines.ever == [claim["status"]["nodeName"]]


async def test_deleted_node_claim_waits_for_the_running_request(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """Its NodeClaim is deleted, as by consolidation, drift or a user: Karpenter drains it and waits for our pod."""
    knobs = ("--host", "{host}", "--port", "{port}", "--name", "ada", "--tokens-per-s", "10", "--tokens", "80")
    there = {"pod": {"nodeSelector": {"test": namespace}}, "gpu": {"memory": "5Gi"}, "slots": 1}
    async with Machines(api, namespace, tmp_path).pooled(limits={GPU: "9"}) as machines:
        house.write(model("ada", command=command(*knobs), **there), **settings(namespace))
        async with house.running(), asyncio.timeout(WAIT_S_MAX * 3):
            calling = asyncio.create_task(house.call("ada"))
            while not await ready(house):
                await asyncio.sleep(0.05)
            claim = await machines.only()
            await api.delete(f"{CLAIMS}/{claim['metadata']['name']}")
            status, body = await calling
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 80)
            while claim["metadata"]["uid"] in [one["metadata"]["uid"] for one in await machines.claims()]:
                await asyncio.sleep(0.05)


async def blocked(api: Api, claim: str) -> bool:
    """Whether Karpenter reports that do-not-disrupt kept it from disrupting the node."""
    found = (await api.get("/api/v1/events", fieldSelector=f"involvedObject.name={claim}"))["items"]
    return any(one["reason"] == "DisruptionBlocked" and "do-not-disrupt" in one["message"] for one in found)


async def asks(api: Api, namespace: str, node: str) -> list[bool]:
    """Whether each replica pod on a node has the do-not-disrupt annotation."""
    found = (await api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="pilotlight.dev/model"))["items"]
    there = [one["metadata"]["annotations"] for one in found if one["spec"].get("nodeName") == node]
    return ["karpenter.sh/do-not-disrupt" in one for one in there]


async def test_node_disruption_waits_for_the_replica_start_and_running_request(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """Karpenter may disrupt empty, underutilized or drifted nodes, but not while the replica starts.
    Once that is ready, it does so at once and waits for the request; afterwards the node is gone.
    """
    knobs = ("--host", "{host}", "--port", "{port}", "--name", "ada", "--tokens-per-s", "10", "--tokens", "600")
    there = {"pod": {"nodeSelector": {"test": namespace}}, "gpu": {"memory": "5Gi"}, "slots": 1}
    eager = {"consolidationPolicy": "WhenEmptyOrUnderutilized", "consolidateAfter": "0s"}
    async with Machines(api, namespace, tmp_path).pooled(limits={GPU: "9"}, disruption=eager) as machines:
        gate = tmp_path / "starts"
        words = ["sh", "-c", 'until [ -e "$0" ]; do sleep 0.1; done; exec "$@"', str(gate), *command(*knobs)]
        house.write(model("ada", command=words, idleSeconds=1, **there), **settings(namespace))
        async with house.running(), asyncio.timeout(WAIT_S_MAX * 6):
            calling = asyncio.create_task(house.call("ada"))
            while not (there_now := await machines.claims()) or not await blocked(
                api, there_now[0]["metadata"]["name"]
            ):
                await asyncio.sleep(0.05)  # Karpenter checks every 10 s, and reports a reason once in two minutes
            assert not await ready(house)
            gate.touch()
            claim = await machines.only()
            node = claim["status"]["nodeName"]
            while True:
                asked = await asks(api, namespace, node)
                if await ready(house):
                    break
                assert all(asked)  # read before: once the replica is ready, it may be disrupted
                await asyncio.sleep(0.05)
            while await asks(api, namespace, node) != [False]:
                await asyncio.sleep(0.05)
            assert machines.ever == [node]
            drift = {"spec": {"template": {"metadata": {"labels": {"test": namespace, "wave": "2"}}}}}
            await api.patch(f"{POOLS}/{namespace}", drift)
            while "deletionTimestamp" not in (await api.get(f"{CLAIMS}/{claim['metadata']['name']}"))["metadata"]:
                assert not calling.done(), "a replica that only serves requests does not block the node's deletion"
                await asyncio.sleep(0.05)
            while await asks(api, namespace, node) != [True]:  # the autoscaler has to notice the deletion first
                assert not calling.done()
                await asyncio.sleep(0.05)
            while not calling.done():
                left = await asks(api, namespace, node)
                assert left == [True] or not await running(house), "it is left alone again"
                await asyncio.sleep(0.05)
            status, body = await calling
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 600)
            while await machines.claims():
                await asyncio.sleep(0.05)


async def test_pod_evicted_without_a_leader_ends_after_its_request(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """Then no leader annotates the node for Karpenter, and only the pod itself delays its end.

    The request lasts a minute, longer than Karpenter needs to evict the pod, even if a process stops for 20 s.
    """
    knobs = ("--host", "{host}", "--port", "{port}", "--name", "ada", "--tokens-per-s", "10", "--tokens", "600")
    there = {"pod": {"nodeSelector": {"test": namespace}}, "gpu": {"memory": "5Gi"}, "slots": 1}
    async with Machines(api, namespace, tmp_path).pooled(limits={GPU: "9"}) as machines:
        house.write(model("ada", command=command(*knobs), **there), **settings(namespace))
        async with house.running(), asyncio.timeout(WAIT_S_MAX * 3):
            calling = asyncio.create_task(house.call("ada"))
            while not await ready(house):
                await asyncio.sleep(0.05)
            claim = await machines.only()
            while await asks(api, namespace, claim["status"]["nodeName"]) != [False]:
                await asyncio.sleep(0.05)
            deliver(house.autoscaler.pid, SIGSTOP)
            try:
                await api.delete(f"{CLAIMS}/{claim['metadata']['name']}")
                while not await leaving(api, namespace):
                    await asyncio.sleep(0.05)
                await asyncio.sleep(1.0)  # an engine that received the signal would end meanwhile
                assert not calling.done()
            finally:
                house.autoscaler.send_signal(SIGCONT)
            status, body = await calling
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 600)
            while claim["metadata"]["uid"] in [one["metadata"]["uid"] for one in await machines.claims()]:
                await asyncio.sleep(0.05)


async def leaving(api: Api, namespace: str) -> bool:
    """Whether a replica's pod is being deleted."""
    found = (await api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector="pilotlight.dev/model"))["items"]
    return any("deletionTimestamp" in one["metadata"] for one in found)


EXPIRES_S = 240.0
"""A successor is ordered when a quarter of it is left. On a busy machine the replacement takes half a minute, and a
process that stops for 20 s must not make it late."""


def unix_s(moment: str) -> float:
    """Parses a timestamp of the API."""
    return datetime.fromisoformat(moment).timestamp()


async def test_expiring_node_is_replaced_and_vacated_before_its_expiry(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """`expireAfter` of its NodePool ends the capacity order, so another node is added in advance.
    A request that runs then completes where it is.
    """
    knobs = ("--host", "{host}", "--port", "{port}", "--name", "ada", "--tokens-per-s", "10", "--tokens", "150")
    there = {"pod": {"nodeSelector": {"test": namespace}}, "gpu": {"memory": "5Gi"}, "slots": 1}
    async with Machines(api, namespace, tmp_path).pooled(limits={GPU: "9"}) as machines:
        expires = {"spec": {"template": {"spec": {"expireAfter": f"{EXPIRES_S:.0f}s"}}}}
        await api.patch(f"{POOLS}/{namespace}", expires)
        house.write(
            model("ada", command=command(*knobs), replicas={"min": 1, "max": 2}, **there), **settings(namespace)
        )
        async with house.running(), asyncio.timeout(WAIT_S_MAX * 5):
            while not await ready(house):
                await asyncio.sleep(0.05)
            first = await machines.only()
            assert first["spec"]["expireAfter"] == f"{EXPIRES_S:.0f}s"
            ends_s = unix_s(first["metadata"]["creationTimestamp"]) + EXPIRES_S
            early_s = ends_s - EXPIRES_S * 0.3
            while time.time() < early_s:
                await asyncio.sleep(0.05)
            calling = asyncio.create_task(house.call("ada"))
            while len(machines.ever) < 2:
                await asyncio.sleep(0.05)
            assert time.time() < ends_s
            ordered_s = [unix_s(claim["metadata"]["creationTimestamp"]) for claim in await machines.claims()]
            assert max(ordered_s) >= early_s, "it is not replaced earlier than needed"
            status, body = await calling
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 150)
            while machines.ever[0] in await nodes_of(api, namespace):
                await asyncio.sleep(0.05)
            assert time.time() < ends_s, "nothing of it is there when Karpenter takes it"
            assert machines.ever[1] in await nodes_of(api, namespace)
