"""Deployments and StatefulSets that exist are served and scaled, on a real control plane, through a real gateway."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.kubernetes.access import access
from autoscaler.drivers.kubernetes.adopted import AdoptedDriver
from autoscaler.drivers.kubernetes.api import MERGE, Api, Object
from autoscaler.model import Adopted, Model, ModelSpec
from autoscaler.world import Replica, Seen, Synced
from tests.cluster.conftest import make_namespace, next_number
from tests.cluster.kubelet.container import Container
from tests.cluster.kubelet.node import Node
from tests.cluster.plane import free_ports
from tests.contracts.driver import DriverContract, Manner, Rig
from tests.kit.fake_process import command
from tests.kit.localrig import KNOBS
from tests.kit.observed import running

WAIT_S_MAX = 30.0
LINGO = "lingo.substratus.ai/"
OURS = "pilotlight.dev/"
SERVER = Path(__file__).with_name("adoption_process.py")


@asynccontextmanager
async def process(log: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`python WORDS`, ended at the end."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        one = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdout=output, stderr=output, env=environment
        )
    try:
        yield one
    finally:
        if one.returncode is None:
            one.terminate()
        await asyncio.wait_for(one.wait(), WAIT_S_MAX)


class House:
    """An autoscaler that adopts, a gateway, and a namespace with workloads."""

    def __init__(self, folder: Path, kubeconfig: Path, api: Api, namespace: str) -> None:
        self._folder = folder
        self._kubeconfig = kubeconfig
        self.api = api
        self.apps = f"/apis/apps/v1/namespaces/{namespace}"
        self.pods_path = f"/api/v1/namespaces/{namespace}/pods"
        self.namespace = namespace
        self.listen, self._ops = free_ports(2)
        self.url = f"http://127.0.0.1:{self.listen}"

    @asynccontextmanager
    async def running(self, hold_s: float = 600.0) -> AsyncIterator[House]:
        """Until the gateway answers."""
        socket = self._folder / "contract.sock"
        socket.unlink(missing_ok=True)
        async with AsyncExitStack() as stack:
            scaler = (str(SERVER), str(self._kubeconfig), self.namespace, str(socket), str(hold_s))
            await stack.enter_async_context(process(self._folder / "autoscaler.log", *scaler))
            gateway = (
                "-m", "pilotlight", "gateway", "--id", "g1", "--autoscaler", f"unix:{socket}",
                "--listen", f"127.0.0.1:{self.listen}", "--ops", f"127.0.0.1:{self._ops}",
            )  # fmt: skip
            await stack.enter_async_context(process(self._folder / "gateway.log", *gateway))
            self.session = await stack.enter_async_context(aiohttp.ClientSession())
            async with asyncio.timeout(WAIT_S_MAX):
                await self._answers()
                yield self

    async def _answers(self) -> None:
        while True:
            try:
                async with self.session.get(f"{self.url}/v1/models") as answer:
                    if answer.status == 200 and (await answer.json())["data"]:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)

    async def call(self, model: str, **body: object) -> tuple[int, str]:
        """One Call for embeddings: (status, what was said)."""
        asked = {"model": model, "input": "Your text string goes here", **body}
        async with self.session.post(f"{self.url}/v1/embeddings", json=asked) as answer:
            return answer.status, await answer.text()

    async def chat(self, model: str) -> tuple[int, str]:
        """One chat completion, not streamed: nothing of it is sent before all of it is there."""
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=asked) as answer:
            return answer.status, await answer.text()

    def log(self) -> str:
        """What the autoscaler has said."""
        return (self._folder / "autoscaler.log").read_text()

    async def until_ready(self, count: int) -> None:
        """So many starts have got ready so far."""
        while self.log().count("after=<ReplicaState.READY") < count:
            await asyncio.sleep(0.02)

    async def pods(self) -> list[Object]:
        """Those that are not being deleted."""
        found: list[Object] = (await self.api.get(self.pods_path))["items"]
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    async def until_pods(self, count: int) -> list[Object]:
        """There are so many, and no others end."""
        while len(found := (await self.api.get(self.pods_path))["items"]) != count:
            await asyncio.sleep(0.05)
        return list(found)

    async def scale(self, name: str, kind: str = "deployments") -> Object:
        """The object, to look at its scale and who owns that."""
        return await self.api.get(f"{self.apps}/{kind}/{name}")

    async def by_hand(self, name: str, replicas: int) -> None:
        """`kubectl scale`."""
        path = f"{self.apps}/deployments/{name}/scale"
        await self.api.patch(path, {"spec": {"replicas": replicas}}, MERGE, fieldManager="kubectl")


def workload(name: str, replicas: int, notes: dict[str, str], kind: str = "Deployment", *knobs: str) -> Object:
    """As a person writes it: a real probe of one second, and a template that says nothing of Pilotlight."""
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


def owners_of_scale(found: Object) -> list[tuple[str, str, str]]:
    """(manager, operation, subresource) of each who owns its number of pods."""
    managed = found["metadata"]["managedFields"]
    owning = [one for one in managed if "f:replicas" in one["fieldsV1"].get("f:spec", {})]
    return [(one["manager"], one["operation"], one.get("subresource", "")) for one in owning]


@pytest.fixture
def house(tmp_path: Path, kubeconfig: Path, api: Api, namespace: str, node: Node) -> House:
    assert node.name
    return House(tmp_path, kubeconfig, api, namespace)


async def test_the_lingo_walk_through(house: House) -> None:
    """A Deployment at zero with Lingo's annotation; a Call makes a pod and is answered; then zero again."""
    name = "text-embedding-ada-002"
    notes = {LINGO + "models": name, LINGO + "min-replicas": "0", OURS + "idle-seconds": "1"}
    made = await house.api.create(f"{house.apps}/deployments", workload(name, 0, notes))
    async with house.running():
        status, said = await house.call(name)
        assert (status, '"embedding"' in said) == (200, True), said
        (pod,) = await house.pods()
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "ReplicaSet"
        await house.until_pods(0)
        found = await house.scale(name)
        assert found["spec"]["replicas"] == 0
        assert found["spec"]["template"] == made["spec"]["template"], "the template is its owner's"
        assert owners_of_scale(found) == [("pilotlight", "Apply", "scale")]


async def test_a_person_who_scales_is_obeyed_for_a_while_and_then_the_scale_is_ours_again(house: House) -> None:
    notes = {OURS + "models": "ada", OURS + "idle-seconds": "0.5"}
    await house.api.create(f"{house.apps}/deployments", workload("ada", 0, notes))
    async with house.running(hold_s=4):
        assert (await house.call("ada"))[0] == 200
        await house.by_hand("ada", 2)
        await house.until_pods(2)
        assert (await house.call("ada"))[0] == 200
        await house.until_pods(0)  # when the hold is over, and it is idle
        assert owners_of_scale(await house.scale("ada")) == [("pilotlight", "Apply", "scale")]


async def test_a_person_who_scales_to_zero_has_switched_it_off(house: House) -> None:
    """A Call is refused at once while that holds, and wakes it afterwards."""
    await house.api.create(f"{house.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    async with house.running(hold_s=4):
        assert (await house.call("ada"))[0] == 200
        await house.by_hand("ada", 0)
        await house.until_pods(0)
        status, said = await house.call("ada")
        assert (status, "paused" in said) == (503, True)
        while (await house.call("ada"))[0] != 200:
            await asyncio.sleep(0.1)


async def test_a_rollout_of_the_deployment_during_a_drain_loses_no_call(house: House) -> None:
    """Two Replicas with a Call each, one drains since one is the most, then all pods are replaced: the Calls move."""
    notes = {OURS + "models": "ada", OURS + "replicas-max": "2", OURS + "slots": "1"}
    body = workload("ada", 0, notes, "Deployment", "--tokens-per-s", "20", "--tokens", "40")
    body["spec"]["strategy"] = {"type": "Recreate"}
    await house.api.create(f"{house.apps}/deployments", body)
    path = f"{house.apps}/deployments/ada"
    async with house.running():
        calls = [asyncio.create_task(house.chat("ada")) for _ in range(2)]
        await house.until_ready(2)
        old = {pod["metadata"]["name"] for pod in await house.until_pods(2)}
        await house.api.patch(path, {"metadata": {"annotations": {OURS + "replicas-max": "1"}}})
        while house.log().count("after=<ReplicaState.DRAINING") < 1:
            await asyncio.sleep(0.02)
        await house.api.patch(path, {"spec": {"template": {"metadata": {"annotations": {"version": "2"}}}}})
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
        while {pod["metadata"]["name"] for pod in await house.pods()} & old or len(await house.pods()) != 1:
            await asyncio.sleep(0.05)
        assert (await house.call("ada"))[0] == 200


async def test_pods_outlive_their_autoscaler_and_keep_their_replica(house: House) -> None:
    await house.api.create(f"{house.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    async with house.running():
        assert (await house.call("ada"))[0] == 200
        (first,) = await house.pods()
        replica = first["metadata"]["annotations"][OURS + "replica"]
        assert replica.startswith("ada-adopted-")
    async with house.running():
        assert (await house.call("ada"))[0] == 200
        (second,) = await house.pods()
        assert first["metadata"]["uid"] == second["metadata"]["uid"]
        assert f"id='{replica}'" in house.log() or f"replica='{replica}'" in house.log()


async def test_a_statefulset_goes_from_its_highest_ordinal(house: House) -> None:
    notes = {OURS + "models": "ada", OURS + "replicas-max": "2", OURS + "slots": "1", OURS + "idle-seconds": "600"}
    body = workload("ada", 0, notes, "StatefulSet", "--tokens-per-s", "20", "--tokens", "30")
    await house.api.create(f"{house.apps}/statefulsets", body)
    async with house.running():
        answers = await asyncio.gather(house.chat("ada"), house.chat("ada"))
        assert [status for status, _ in answers] == [200, 200]
        assert {pod["metadata"]["name"] for pod in await house.until_pods(2)} == {"ada-0", "ada-1"}
        patch = {"metadata": {"annotations": {OURS + "replicas-max": "1"}}}
        await house.api.patch(f"{house.apps}/statefulsets/ada", patch)
        assert [pod["metadata"]["name"] for pod in await house.until_pods(1)] == ["ada-0"]
        assert (await house.call("ada"))[0] == 200


async def test_beside_an_hpa_only_zero_or_one_is_written(house: House) -> None:
    notes = {OURS + "models": "ada", OURS + "idle-seconds": "0.5"}
    await house.api.create(f"{house.apps}/deployments", workload("ada", 0, notes))
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "ada"}
    hpa = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "ada"},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3},
    }  # fmt: skip
    await house.api.create(f"/apis/autoscaling/v2/namespaces/{house.namespace}/horizontalpodautoscalers", hpa)
    async with house.running():
        assert (await house.call("ada"))[0] == 200
        assert "HorizontalPodAutoscaler ada scales it, too" in house.log()
        await house.by_hand("ada", 2)  # as the HPA does
        await house.until_pods(2)
        await house.until_pods(0)


async def test_wrong_annotations_are_said_and_harm_nobody_else(house: House) -> None:
    await house.api.create(
        f"{house.apps}/deployments", workload("bad", 0, {OURS + "models": "bad", OURS + "slots": "x"})
    )
    await house.api.create(f"{house.apps}/deployments", workload("ada", 0, {LINGO + "models": "ada,babbage"}))
    async with house.running():
        assert (await house.call("bad"))[0] == 404
        assert "annotation pilotlight.dev/slots: expected a whole number" in house.log()
        status, said = await house.call("babbage")
        assert (status, '"babbage"' in said) == (200, True), "its engine hears the name that the client said"


class AdoptedRig:
    """A rig of the driver contract: each Replica is the only one of a Deployment of its own."""

    began_within_s = 1.5

    def __init__(self, kubeconfig: Path, logs: Path) -> None:
        self._kubeconfig = kubeconfig
        self._logs = logs
        self._name = f"adopted-{uuid.uuid4().hex[:8]}"
        self._bodies: list[Object] = []
        self._containers: dict[str, list[Container]] = {}

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        asyncio.run(self._run(scenario))

    async def _run(self, scenario: Coroutine[object, object, None]) -> None:
        async with Api(await access(self._kubeconfig)) as api:
            self._api = api
            await make_namespace(api, self._name)
            node = Node(api, self._name, next_number(), {}, {}, self._logs)
            node.on_container = lambda pod, one: self._containers.setdefault(pod.split("-")[0], []).append(one)
            for body in self._bodies:
                await api.create(f"/apis/apps/v1/namespaces/{self._name}/deployments", body)
            async with node.running():
                try:
                    await scenario
                finally:
                    await api.delete(f"/api/v1/namespaces/{self._name}")

    def driver(self) -> AdoptedDriver:
        return AdoptedDriver(self._api, [self._name], lambda _: None, hold_s=lambda: 600.0)

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        body = workload(name, 0, {OURS + "models": name}, "Deployment", *KNOBS.get(manner, ()))
        spec = body["spec"]["template"]["spec"]
        spec["terminationGracePeriodSeconds"] = 1
        if manner is Manner.CANNOT_START:
            spec["containers"][0]["command"] = ["/nowhere/engine"]
        self._bodies.append(body)
        adopted = Adopted(kind="Deployment", namespace=self._name, name=name)
        model = Model(name=ModelName(name), spec=ModelSpec(engine="command"), adopted=adopted)
        return Replica(
            id=ReplicaId(name), model=model.name, spec_hash=model.spec_hash(), intent=f"intent-{name}", slices=(),
            memory_bytes=0, slots=4,
        ), model  # fmt: skip

    def kill(self, replica: ReplicaId) -> None:
        process = self._containers[replica][-1].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    def exists(self, replica: ReplicaId) -> bool:
        processes = [one.process for one in self._containers.get(replica, [])]
        return any(process is not None and process.returncode is None for process in processes)

    def starts(self, replica: ReplicaId) -> int:
        return len(self._containers.get(replica, []))


class TestAdoptedDriver(DriverContract):
    """What differs: it has no inventory, and a kubelet starts again what ended."""

    @pytest.fixture
    def rig(self, kubeconfig: Path, tmp_path: Path) -> AdoptedRig:
        return AdoptedRig(kubeconfig, tmp_path)

    def test_the_inventory_comes_first_and_synced_after_all_that_exists(self, rig: Rig) -> None:
        """There is none."""

        async def scenario() -> None:
            async with running(rig.driver()) as observed:
                assert observed.all == [Synced()]

        rig.run(scenario())

    def test_what_ended_between_two_drivers_is_clean(self, rig: Rig) -> None:
        """Its kubelet has started it again: it is the same Replica."""
        replica, model = rig.replica("r1", Manner.GOOD)

        async def scenario() -> None:
            first = rig.driver()
            async with running(first) as observed:
                first.start(replica, model)
                await observed.until(replica.id, Seen.READY)
            rig.kill(replica.id)
            async with running(rig.driver()) as observed:
                assert (await observed.until(replica.id, Seen.READY)).intent == replica.intent

        rig.run(scenario())
