"""Existing Deployments and StatefulSets are served and scaled, on a real control plane, through a real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import Observe
from autoscaler.drivers.kubernetes.adoption.driver import AdoptedDriver
from autoscaler.drivers.kubernetes.adoption.objects import COST, GOES_FIRST, INTENT, REPLICA, SHOWN
from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.kubernetes.kubeconfig import ApiAccess, load_api_access
from autoscaler.spec.document_names import format_replica_id
from autoscaler.spec.model import Adopted, Model, ModelSpec
from autoscaler.state.events import Seen, Synced
from autoscaler.state.world import Replica, ReplicaResources
from tests.contracts.driver import DriverContract, Manner, Rig
from tests.integration.cluster.support.control_plane.service_accounts import acting_as_autoscaler, refused
from tests.integration.cluster.support.driver.contract_rig import ClusterRig
from tests.integration.cluster.support.installations.adoption import LINGO, OURS, Adopting, workload
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import KNOBS
from tests.support.harness.scenarios import run_on_rig
from tests.support.waiting import until

WAIT_S_MAX = 180.0


def owners_of_scale(found: Object) -> list[tuple[str, str, str]]:
    """(manager, operation, subresource) of each owner of the field `spec.replicas`."""
    managed = found["metadata"]["managedFields"]
    owning = [one for one in managed if "f:replicas" in one["fieldsV1"].get("f:spec", {})]
    return [(one["manager"], one["operation"], one.get("subresource", "")) for one in owning]


def writes_of_status(found: Object) -> list[str]:
    """Times of our latest writes to its status."""
    return [
        one["time"]
        for one in found["metadata"]["managedFields"]
        if (one["manager"], one.get("subresource")) == ("pilotlight", "status")
    ]


@pytest.mark.standard
async def test_deployment_with_lingo_annotations_scales_from_zero_and_back(adopting: Adopting) -> None:
    """A Deployment at zero with Lingo's annotation: a request creates a pod and succeeds; then zero again."""
    name = "text-embedding-ada-002"
    notes = {LINGO + "models": name, LINGO + "min-replicas": "0", OURS + "idle-seconds": "600"}
    made = await adopting.api.create(f"{adopting.apps}/deployments", workload(name, 0, notes))
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        status, body = await adopting.embed(name)
        assert (status, '"embedding"' in body) == (200, True), body
        (pod,) = await adopting.pods()
        assert pod["metadata"]["ownerReferences"][0]["kind"] == "ReplicaSet"
        await adopting.annotate(name, {OURS + "idle-seconds": "1"})  # later, so that the pod is observed before
        await adopting.until_pods(0)
        found = await adopting.scale(name)
        assert found["spec"]["replicas"] == 0
        assert found["spec"]["template"] == made["spec"]["template"], "the template is its owner's"
        assert owners_of_scale(found) == [("pilotlight", "Apply", "scale")]


async def test_manual_scale_is_kept_for_hold_seconds_and_then_overridden(adopting: Adopting) -> None:
    notes = {OURS + "models": "ada", OURS + "idle-seconds": "0.5"}
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, notes))
    adopting.write(adoption={"holdSeconds": 600})
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        await adopting.by_hand("ada", 2)
        while len(await adopting.pods()) != 2:  # a pod that was scaled down before may still be terminating
            await asyncio.sleep(0.05)
        assert (await adopting.embed("ada"))[0] == 200
        assert len(await adopting.pods()) == 2
        adopting.hold(1)
        await adopting.until_pods(0)  # when the hold is over and it is idle
        assert owners_of_scale(await adopting.scale("ada")) == [("pilotlight", "Apply", "scale")]


async def test_manual_scale_to_zero_pauses_the_model_for_hold_seconds(adopting: Adopting) -> None:
    """A request is rejected at once during the hold, and wakes the model afterwards."""
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    adopting.write(adoption={"holdSeconds": 600})
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        await adopting.by_hand("ada", 0)
        await adopting.until_pods(0)
        status, body = await adopting.embed("ada")
        assert (status, "paused" in body) == (503, True)
        adopting.hold(1)
        while (await adopting.embed("ada"))[0] != 200:
            await asyncio.sleep(0.1)


async def test_deployment_rollout_during_a_drain_loses_no_request(adopting: Adopting) -> None:
    """Of two replicas with a request each, one drains; then all pods are replaced, and the requests move.

    The engines of the old pods respond only after five minutes, so that the requests still run when they move.
    """
    notes = {OURS + "models": "ada", OURS + "replicas-max": "2", OURS + "slots": "1"}
    body = workload("ada", 0, notes, "Deployment", "--tokens-per-s", "1", "--tokens", "300")
    body["spec"]["strategy"] = {"type": "Recreate"}
    fast = workload("ada", 0, notes, "Deployment", "--tokens-per-s", "100", "--tokens", "300")
    changed = {"metadata": {"annotations": {"version": "2"}}, "spec": fast["spec"]["template"]["spec"]}
    await adopting.api.create(f"{adopting.apps}/deployments", body)
    path = f"{adopting.apps}/deployments/ada"
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        calls = [asyncio.create_task(adopting.call("ada")) for _ in range(2)]
        await adopting.until_replicas("ada", "ready", 2)
        await adopting.until_running("ada", 2)  # a replica without a request would drain at once
        old = {pod["metadata"]["name"] for pod in await adopting.until_pods(2)}
        await adopting.api.patch(path, {"metadata": {"annotations": {OURS + "replicas-max": "1"}}})
        await adopting.until_replicas("ada", "draining", 1)
        await adopting.api.patch(path, {"spec": {"template": changed}})
        assert [status for status, _ in await asyncio.gather(*calls)] == [200, 200]
        while {pod["metadata"]["name"] for pod in await adopting.pods()} & old or len(await adopting.pods()) != 1:
            await asyncio.sleep(0.05)
        assert (await adopting.embed("ada"))[0] == 200


async def test_adopted_pod_keeps_its_replica_id_after_an_autoscaler_restart(adopting: Adopting) -> None:
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        (first,) = await adopting.pods()
        while OURS + "replica" not in first["metadata"].get("annotations", {}):  # it is written beside the start
            await asyncio.sleep(0.05)
            (first,) = await adopting.pods()
        replica = first["metadata"]["annotations"][OURS + "replica"]
        assert replica.startswith("ada-adopted-")
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        (second,) = await adopting.pods()
        assert first["metadata"]["uid"] == second["metadata"]["uid"]
        assert replica in await adopting.read_ops("explain/model/ada")


@pytest.mark.standard
async def test_pod_annotated_as_replica_of_another_model_gets_no_request_for_it(adopting: Adopting) -> None:
    """The mark is set first in the pod template of another owner's workload, then on its pod."""
    for name in ("ada", "thief"):
        body = workload(name, 1, {OURS + "models": name, OURS + "idle-seconds": "600"})
        await adopting.api.create(f"{adopting.apps}/deployments", body)
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        (ada,) = [pod for pod in await adopting.until_pods(2) if pod["metadata"]["labels"]["app"] == "ada"]
        assert [(await adopting.embed(name))[0] for name in ("ada", "thief")] == [200, 200]
        victim = f"{ada['metadata']['name']}-{ada['metadata']['uid'][:5]}"
        assert victim in await adopting.read_ops("explain/model/ada")
        marks = {"metadata": {"annotations": {REPLICA: victim, INTENT: "i"}}}
        await adopting.api.patch(f"{adopting.apps}/deployments/thief", {"spec": {"template": marks}})
        assert "remove it from spec.template" in (await adopting.shown("thief", "WrongAnnotation"))["message"]
        while REPLICA not in (thief := await newest_pod(adopting, "thief"))["metadata"].get("annotations", {}):
            await asyncio.sleep(0.05)
        while (await newest_pod(adopting, "thief"))["metadata"]["annotations"][REPLICA] == victim:
            await asyncio.sleep(0.05)  # until it is a replica of its own
        await adopting.api.patch(f"{adopting.pods_path}/{thief['metadata']['name']}", marks)
        while (await newest_pod(adopting, "thief"))["metadata"]["annotations"][REPLICA] == victim:
            await asyncio.sleep(0.05)
        assert victim not in await adopting.read_ops("explain/model/thief")
        assert victim in await adopting.read_ops("explain/model/ada")
        await adopting.by_hand("ada", 0)
        while ada["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in await adopting.pods()}:
            await asyncio.sleep(0.05)  # until then it may answer
        assert (await adopting.embed("ada"))[0] == 503, "its only pod was deleted, and no other serves it"


async def newest_pod(adopting: Adopting, app: str) -> Object:
    """Returns the pod of a workload that was created last."""
    pods = [pod for pod in await adopting.pods() if pod["metadata"]["labels"]["app"] == app]
    return max(pods, key=lambda pod: (pod["metadata"]["creationTimestamp"], pod["metadata"]["name"]))


@pytest.mark.standard
async def test_statefulset_scales_down_from_its_highest_ordinal(adopting: Adopting) -> None:
    notes = {OURS + "models": "ada", OURS + "replicas-max": "2", OURS + "replicas-min": "2", OURS + "slots": "1",
             OURS + "idle-seconds": "600"}  # fmt: skip
    body = workload("ada", 0, notes, "StatefulSet", "--tokens-per-s", "20", "--tokens", "30")
    await adopting.api.create(f"{adopting.apps}/statefulsets", body)
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        answers = await asyncio.gather(adopting.call("ada"), adopting.call("ada"))
        assert [status for status, _ in answers] == [200, 200]
        assert {pod["metadata"]["name"] for pod in await adopting.until_pods(2)} == {"ada-0", "ada-1"}
        patch = {"metadata": {"annotations": {OURS + "replicas-max": "1", OURS + "replicas-min": None}}}
        await adopting.api.patch(f"{adopting.apps}/statefulsets/ada", patch)
        assert [pod["metadata"]["name"] for pod in await adopting.until_pods(1)] == ["ada-0"]
        assert (await adopting.embed("ada"))[0] == 200


async def test_workload_with_an_hpa_is_scaled_only_to_zero_or_one(adopting: Adopting, namespace: str) -> None:
    notes = {OURS + "models": "ada", OURS + "idle-seconds": "600"}
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, notes))
    target = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "ada"}
    hpa = {
        "apiVersion": "autoscaling/v2", "kind": "HorizontalPodAutoscaler", "metadata": {"name": "ada"},
        "spec": {"scaleTargetRef": target, "minReplicas": 2, "maxReplicas": 3},
    }  # fmt: skip
    await adopting.api.create(f"/apis/autoscaling/v2/namespaces/{namespace}/horizontalpodautoscalers", hpa)
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        assert "HorizontalPodAutoscaler ada also scales it" in await adopting.read_ops("explain/model/ada")
        await adopting.by_hand("ada", 2)  # as the HPA does
        await adopting.until_pods(2)
        await adopting.annotate("ada", {OURS + "idle-seconds": "0.5"})  # later, so that both pods are observed before
        await adopting.until_pods(0)


async def test_invalid_annotation_emits_an_event_and_other_workloads_still_serve(adopting: Adopting) -> None:
    await adopting.api.create(
        f"{adopting.apps}/deployments", workload("bad", 0, {OURS + "models": "bad", OURS + "slots": "x"})
    )
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, {LINGO + "models": "ada,babbage"}))
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("bad"))[0] == 404
        message = await adopting.event("bad", "WrongAnnotation")
        assert "annotation pilotlight.dev/slots: expected a whole number" in message
        status, message = await adopting.embed("babbage")
        assert (status, '"babbage"' in message) == (200, True), (
            "its engine receives the model name from the client's request"
        )


async def test_workload_condition_shows_if_its_scale_is_automatic_or_manual(adopting: Adopting) -> None:
    """Shows until when a manual scale holds, then automatic; a wake or a status write of its controller keeps it."""
    notes = {OURS + "models": "ada", OURS + "idle-seconds": "600"}
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, notes))
    adopting.write(adoption={"holdSeconds": 600})
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        usual = await adopting.shown("ada", "Scaled")
        assert (usual["status"], usual["message"]) == ("True", "its scale follows the requests for Model ada")
        before = writes_of_status(await adopting.scale("ada"))
        assert (await adopting.embed("ada"))[0] == 200
        while (await adopting.scale("ada"))["status"].get("availableReplicas") != 1:  # as its controller writes it
            await asyncio.sleep(0.05)
        assert await adopting.shown("ada", "Scaled") == usual
        assert writes_of_status(await adopting.scale("ada")) == before
        began = datetime.now(UTC)
        await adopting.by_hand("ada", 2)
        held = await adopting.shown("ada", "ScaledByHand")
        reported, _, until = held["message"].rpartition(" ")
        assert reported == "scaled to 2 by kubectl; holds until"
        assert datetime.fromisoformat(until) > began
        assert held["lastTransitionTime"] == usual["lastTransitionTime"], "its status is the same"
        adopting.hold(1)
        assert await adopting.shown("ada", "Scaled") == usual, "when the hold is over"
        kinds = {one["type"] for one in (await adopting.scale("ada"))["status"]["conditions"]}
        assert kinds == {"Available", "Progressing", OURS + "Adopted"}


async def test_removing_the_models_annotation_drops_condition_and_keeps_pods(adopting: Adopting) -> None:
    path = f"{adopting.apps}/deployments/ada"
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 1, {OURS + "models": "ada"}))
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        await adopting.shown("ada", "Scaled")
        assert (await adopting.embed("ada"))[0] == 200
        await adopting.api.patch(path, {"metadata": {"annotations": {OURS + "slots": "x"}}})
        wrong = await adopting.shown("ada", "WrongAnnotation")
        assert (wrong["status"], "expected a whole number" in wrong["message"]) == ("False", True)
        await adopting.api.patch(path, {"metadata": {"annotations": {OURS + "slots": None, OURS + "models": None}}})
        await adopting.shown("ada")
        while (await adopting.embed("ada"))[0] != 404:
            await asyncio.sleep(0.05)
        assert len(await adopting.pods()) == 1
        assert (await adopting.scale("ada"))["spec"]["replicas"] == 1


async def test_annotation_removed_during_downtime_clears_condition_on_restart(adopting: Adopting) -> None:
    """A name conflict is shown as well, and its condition is removed once its cause is gone."""
    path = f"{adopting.apps}/deployments/ada"
    await adopting.api.create(f"{adopting.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        await adopting.shown("ada", "Scaled")
        await adopting.api.create(f"{adopting.apps}/deployments", workload("bert", 0, {OURS + "models": "ada"}))
        taken = await adopting.shown("bert", "NameTaken")
        assert (taken["status"], "`ada` belongs to Model" in taken["message"]) == ("True", True)
    await adopting.api.patch(path, {"metadata": {"annotations": {OURS + "models": None}}})
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        await adopting.shown("ada")
        await adopting.shown("bert", "Scaled")


async def test_statefulset_condition_dropped_by_its_controller_is_restored(adopting: Adopting) -> None:
    """Only for an unusual state: otherwise each start would need a write."""
    path = f"{adopting.apps}/statefulsets/ada"
    body = workload("ada", 0, {OURS + "models": "ada"}, "StatefulSet")
    await adopting.api.create(f"{adopting.apps}/statefulsets", body)
    async with adopting.running(), asyncio.timeout(WAIT_S_MAX):
        assert (await adopting.embed("ada"))[0] == 200
        assert await adopting.shown("ada", kind="statefulsets") == {}
        await adopting.by_hand("ada", 2, "statefulsets")
        await adopting.until_pods(2)
        while (await adopting.api.get(path))["status"].get("readyReplicas") != 2:
            await asyncio.sleep(0.05)  # the controller writes the status each time
        assert (await adopting.shown("ada", "ScaledByHand", "statefulsets"))["status"] == "True"
        await adopting.api.patch(path, {"metadata": {"annotations": {OURS + "models": None}}})
        await adopting.shown("ada", kind="statefulsets")


class Slow(Api):
    """A process that is paused between its last check of its leadership and the write of a scale."""

    def __init__(self, way: ApiAccess) -> None:
        super().__init__(way)
        self.at_scale, self.goes_on = asyncio.Event(), asyncio.Event()
        self.refused: list[int] = []

    async def apply(self, path: str, body: Object, owner: str, *, force: bool = True) -> Object:
        if path.endswith("/scale"):
            self.at_scale.set()
            await self.goes_on.wait()
        try:
            return await super().apply(path, body, owner, force=force)
        except ApiError as error:
            self.refused.append(error.status)
            raise


@pytest.mark.case("25")
async def test_paused_leader_does_not_overwrite_a_newer_scale(
    api: Api, kubeconfig: Path, namespace: str, node: Node
) -> None:
    """It would have written 1; meanwhile the next leader or a user wrote 2."""
    assert node.name
    path = f"/apis/apps/v1/namespaces/{namespace}/deployments"
    await api.create(path, workload("ada", 0, {OURS + "models": "ada"}))
    found = Adopted(kind="Deployment", namespace=namespace, name="ada")
    model = Model(name=ModelName("ada"), spec=ModelSpec(engine="command"), adopted=found)
    replica = Replica(
        id=ReplicaId("ada-1"),
        model=model.name,
        spec_hash=model.spec_hash(),
        intent="1",
        slots=4,
        resources=ReplicaResources(slices=(), memory_bytes=0),
    )
    async with Slow(await load_api_access(kubeconfig)) as slow:
        old = AdoptedDriver(slow, [namespace], lambda *_: None, hold_s=lambda: 600.0)
        async with running(old):
            old.start(replica, model)
            await slow.at_scale.wait()
            await api.patch(f"{path}/ada/scale", {"spec": {"replicas": 2}}, MERGE, fieldManager="kubectl")
            slow.goes_on.set()
            await until("a request is rejected", lambda: slow.refused)
            assert slow.refused[0] == 409
            assert (await api.get(f"{path}/ada"))["spec"]["replicas"] == 2


class LateDriver(AdoptedDriver):
    """Runs when its workloads exist."""

    create: Callable[[], Awaitable[None]]

    async def run(self, observe: Observe) -> None:
        await self.create()
        await super().run(observe)


class AdoptedRig(ClusterRig):
    """Each replica is the only one of a Deployment of its own."""

    def __init__(self, kubeconfig: Path, logs: Path) -> None:
        super().__init__(kubeconfig, logs)
        self._bodies: list[Object] = []

    async def _create(self) -> None:
        """Creates the Deployments of replicas that do not exist yet."""
        while self._bodies:
            await self._api.create(f"/apis/apps/v1/namespaces/{self._name}/deployments", self._bodies.pop())

    async def until_started_again(self, replica: ReplicaId) -> None:
        """Waits until its kubelet has reported the restart; before that, it appears as ended."""
        pods = f"/api/v1/namespaces/{self._name}/pods"
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                (pod,) = (await self._api.get(pods, labelSelector=f"app={replica.partition('-')[0]}"))["items"]
                (status,) = pod["status"]["containerStatuses"]
                if status["restartCount"] and "running" in status["state"]:
                    return
                await asyncio.sleep(0.02)

    def driver(self) -> AdoptedDriver:
        driver = LateDriver(self._api, [self._name], lambda *_: None, hold_s=lambda: 600.0)
        driver.create = self._create
        return driver

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        body = workload(name, 0, {OURS + "models": name}, "Deployment", *KNOBS.get(manner, ()))
        spec = body["spec"]["template"]["spec"]
        spec["terminationGracePeriodSeconds"] = 1
        if manner is Manner.CANNOT_START:
            spec["containers"][0]["command"] = ["/nowhere/engine"]
        self._bodies.append(body)
        adopted = Adopted(kind="Deployment", namespace=self._name, name=name)
        model = Model(name=ModelName(name), spec=ModelSpec(engine="command"), adopted=adopted)
        intent = "0123456789"
        id = format_replica_id(model.name, model.spec_hash(), intent)
        return Replica(
            id=id,
            model=model.name,
            spec_hash=model.spec_hash(),
            intent=intent,
            slots=4,
            resources=ReplicaResources(slices=(), memory_bytes=0),
        ), model


@pytest.mark.standard
class TestAdoptedDriver(DriverContract):
    """Differences: no inventory, and the kubelet restarts ended containers."""

    test_started_driver_reports_devices_first_and_replicas_before_synced = None  # type: ignore[assignment]
    test_next_driver_reports_a_replica_that_died_without_a_driver = None  # type: ignore[assignment]

    @pytest.fixture
    def rig(self, kubeconfig: Path, tmp_path: Path) -> AdoptedRig:
        return AdoptedRig(kubeconfig, tmp_path)

    @run_on_rig
    async def test_started_driver_without_an_inventory_reports_only_synced(self, rig: Rig) -> None:
        async with running(rig.driver()) as observed:
            assert observed.all == [Synced()]

    @run_on_rig
    async def test_pod_restarted_between_drivers_is_reported_as_the_same_replica(self, rig: Rig) -> None:
        assert isinstance(rig, AdoptedRig)
        replica, model = rig.replica("r1", Manner.GOOD)
        first = rig.driver()
        async with running(first) as observed:
            first.start(replica, model)
            await observed.until(replica.id, Seen.READY)
        rig.kill(replica.id)
        await rig.until_started_again(replica.id)
        async with running(rig.driver()) as observed:
            assert (await observed.until(replica.id, Seen.READY)).intent == replica.intent


@pytest.mark.standard
async def test_admission_policies_allow_only_scale_own_annotations_and_condition(
    api: Api, kubeconfig: Path, namespace: str
) -> None:
    """The chart's policies: with `adoption.everywhere`, permissions alone would cover the images of all pods."""
    labels = {"app": "ada"}
    container = {"name": "a", "image": "old", "command": ["/bin/sleep", "600"]}
    pod: Object = {
        "apiVersion": "v1", "kind": "Pod", "spec": {"containers": [container], "nodeName": "nowhere"},
        "metadata": {"name": "ada", "labels": labels, "annotations": {"theirs": "a", COST: "1"}},
    }  # fmt: skip
    pods, apps = f"/api/v1/namespaces/{namespace}/pods", f"/apis/apps/v1/namespaces/{namespace}/deployments"
    made = await api.create(pods, pod)
    (there,), uid = made["spec"]["containers"], made["metadata"]["uid"]
    await api.create(apps, workload("ada", 0, {OURS + "models": "ada"}))
    notes: Object = {REPLICA: "ada-1", INTENT: "i", COST: GOES_FIRST}
    pods_of_others: list[tuple[str, Object]] = [
        ("not spec", {"spec": {"containers": [{**there, "image": "evil"}]}}),
        ("not spec", {"spec": {"activeDeadlineSeconds": 1}}),
        ("not metadata.labels", {"metadata": {"labels": {"app": "b"}}}),
        ("not metadata.labels", {"metadata": {"labels": None}}),
        ("not metadata.finalizers", {"metadata": {"finalizers": ["example.com/never"]}}),
        ("change only the annotations", {"metadata": {"annotations": {**notes, "theirs": "b"}}}),
        ("change only the annotations", {"metadata": {"annotations": {"theirs": None}}}),
        ("change only the annotations", {"metadata": {"annotations": {"another": "b"}}}),
    ]
    foreign = {"type": "Available", "status": "True", "reason": "a", "message": "b"}
    workloads: list[tuple[str, Object]] = [
        ("not their status", {"status": {"observedGeneration": 99}}),
        ("change only the condition", {"status": {"conditions": [foreign]}}),
        ("not metadata.annotations", {"metadata": {"annotations": {OURS + "models": "b"}}}),
    ]
    values = {"adoption": {"everywhere": True}, "engines": {"namespace": "default"}}
    async with acting_as_autoscaler(api, kubeconfig, namespace, values, "adoption.yaml") as acting:
        async with asyncio.timeout(WAIT_S_MAX):  # a policy takes effect with a delay
            for path, (why, change) in ((f"{pods}/ada", pods_of_others[0]), (f"{apps}/ada/status", workloads[0])):
                while why not in await refused(acting.patch(path, change, MERGE, dryRun="All")):
                    await asyncio.sleep(0.05)
        for why, change in pods_of_others:
            assert why in await refused(acting.patch(f"{pods}/ada", change, MERGE)), change
        for why, change in workloads:
            assert why in await refused(acting.patch(f"{apps}/ada/status", change, MERGE)), change
        for image in ("image", "replicas"):
            assert "orbidden" in await refused(acting.patch(f"{apps}/ada", {"spec": {image: 1}}, MERGE))
        marked = await acting.patch(f"{pods}/ada", {"metadata": {"uid": uid, "annotations": notes}}, MERGE)
        assert marked["metadata"]["annotations"] == {"theirs": "a", **notes}
        unmarked = await acting.patch(f"{pods}/ada", {"metadata": {"annotations": {COST: None}}}, MERGE)
        assert COST not in unmarked["metadata"]["annotations"]
        condition: Object = {"type": SHOWN, "status": "True", "reason": "Adopted", "message": "m"}
        status: Object = {
            "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "ada"},
            "status": {"conditions": [condition]},
        }  # fmt: skip
        shown = await acting.apply(f"{apps}/ada/status", status, "pilotlight")
        assert SHOWN in [one["type"] for one in shown["status"]["conditions"]]
        scale: Object = {
            "apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "ada"}, "spec": {"replicas": 0}
        }  # fmt: skip
        await acting.apply(f"{apps}/ada/scale", scale, "pilotlight")
    await api.delete(f"{pods}/ada", grace_s=0)


@pytest.mark.parametrize("readiness", [False, True])
async def test_adopted_pod_gets_requests_only_after_its_startup_probe(adopting: Adopting, readiness: bool) -> None:
    """K05, vllm-project/production-stack#619: the engine listens while it loads its model, and responds with 503."""
    ada = workload("ada", 0, {OURS + "models": "ada"}, "Deployment", "--start-delay", "4", "--loading-503")
    container = ada["spec"]["template"]["spec"]["containers"][0]
    container["startupProbe"] = {**container["readinessProbe"], "failureThreshold": 600}
    if not readiness:
        del container["readinessProbe"]
    await adopting.api.create(f"{adopting.apps}/deployments", ada)
    async with adopting.running(), asyncio.timeout(120):
        assert [status for status, _ in await asyncio.gather(*(adopting.embed("ada") for _ in range(3)))] == [200] * 3
