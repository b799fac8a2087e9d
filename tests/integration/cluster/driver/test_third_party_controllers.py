"""Public issue reports about model serving on Kubernetes, each with the expected behavior, on a real API server.

Other reports are tested with their component: writes to a slow API server in test_scale_from_zero, adopted
workloads in adoption/, several installations in install/, finalizers, quotas and mounts in test_pod_failures.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.kubernetes.api import MERGE, STRATEGIC, Api, ApiError, Object
from autoscaler.state.events import Seen
from tests.contracts.driver import Manner
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.admission_webhook import webhook
from tests.integration.cluster.support.driver.node_fixture import Scene
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.harness.driver_events import running

PULLS: Final = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
CRASHES: Final = {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}}
FAILED: Final = {"terminated": {"exitCode": 1, "reason": "Error", "message": "iptables not ready"}}
SIDECAR: Final = {"restartPolicy": "Always"}
RUNS: Final = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
WAITS_S = 0.5


def proxy(**more: Any) -> Object:
    """The sidecar that a service mesh injects."""
    allowed = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    return {"name": "istio-proxy", "image": "proxy", "command": ["sleep", "1000"], "securityContext": allowed, **more}


def injected(state: Object, name: str = "istio-proxy") -> Object:
    """The status of a pod whose engine waits for the sidecar, as a kubelet writes it."""
    common = {"image": "x", "imageID": "", "ready": False, "restartCount": 0 if state == RUNS else 1}
    return {
        "phase": "Failed" if "terminated" in state else "Pending",
        "initContainerStatuses": [{"name": name, "state": state, **common}],
        "containerStatuses": [{"name": "engine", "state": {"waiting": {"reason": "PodInitializing"}}, **common}],
    }


async def bound(api: Api, path: str) -> Object:
    """Waits until a pod has a node and returns the pod."""
    while True:
        try:
            found = await api.get(path)
        except ApiError as error:
            if error.status != 404:
                raise
        else:
            if found["spec"].get("nodeName"):
                return found
        await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("container", "message"),
    [
        ((PULLS, SIDECAR), "ImagePullBackOff: init container istio-proxy: not found"),
        ((CRASHES, SIDECAR), "CrashLoopBackOff: init container istio-proxy: back-off 5m0s"),
        ((FAILED, {}), "init container istio-proxy ended with status 1: iptables not ready"),
        ((RUNS, {}), "init container istio-proxy has not finished"),
        ((RUNS, SIDECAR), "init container istio-proxy has not started"),
    ],
    ids=["pull", "crash", "error", "runs-on", "sidecar-never-starts"],
)
async def test_injected_init_container_that_blocks_the_engine_fails_the_start(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, container: tuple[Object, Object], message: str
) -> None:
    """kserve/kserve#3254, banzaicloud/koperator#432, grafana/rollout-operator#466."""
    for reason in ("ImagePullBackOff", "CrashLoopBackOff"):
        monkeypatch.setitem(pod_state._INIT_PATIENCE_S, reason, WAITS_S)
    monkeypatch.setattr(pod_state, "INJECTED_S_MAX", WAITS_S)
    (state, more), (one, of) = container, scene.engine("r1")
    scene.node.fall_silent()  # the status is written below
    patch = [{"op": "add", "path": "/spec/initContainers", "value": [proxy(**more)]}]
    async with (
        webhook(scene.api, scene.namespace, tmp_path, patch=patch),
        running(driver := scene.driver()) as observed,
    ):
        driver.start(one, of)
        assert (await bound(scene.api, f"{scene.pods}/r1"))["spec"]["initContainers"][0]["name"] == "istio-proxy"
        await scene.api.patch(f"{scene.pods}/r1/status", {"status": injected(state)}, STRATEGIC)
        assert (await observed.until(one.id, Seen.EXITED)).reason == message


async def test_time_limit_restarts_with_each_injected_init_container(scene: Scene, tmp_path: Path) -> None:
    one, of = scene.engine("r1")
    scene.node.fall_silent()  # the status is written below
    first, second = proxy(name="first"), proxy(name="second")
    patch = [{"op": "add", "path": "/spec/initContainers", "value": [first, second]}]
    async with (
        webhook(scene.api, scene.namespace, tmp_path, patch=patch),
        running(driver := scene.driver()) as observed,
    ):
        driver.start(one, of)
        await bound(scene.api, f"{scene.pods}/r1")
        limits = []
        for name in ("first", "second"):
            await scene.api.patch(f"{scene.pods}/r1/status", {"status": injected(RUNS, name)}, MERGE)
            while not any(seen.waits == f"init container {name} has not finished" for seen in observed.of(one.id)):
                await observed.more()
            limits.append(driver._start_timeouts[one.id])
        assert [limit for limit, _ in limits] == [(60.0, "first"), (60.0, "second")]
        assert limits[0][1].cancelled()


async def test_pod_modified_by_a_mutating_webhook_is_not_created_again(scene: Scene, tmp_path: Path) -> None:
    """cloudnative-pg#4138, istio#24737: sidecar first, image rewritten, labels added; the sidecar ends last."""
    patch: list[Object] = [
        {"op": "add", "path": "/spec/containers/0", "value": proxy(ports=[{"name": "prom", "containerPort": 15090}])},
        {"op": "replace", "path": "/spec/containers/1/image", "value": "mirror.local/engine"},
        {"op": "add", "path": "/metadata/labels/team", "value": "x"},
        {"op": "add", "path": "/metadata/annotations/sidecar.istio.io~1status", "value": "{}"},
    ]
    async with (
        webhook(scene.api, scene.namespace, tmp_path, patch=patch),
        running(driver := scene.driver()) as observed,
    ):
        one, of = scene.engine("r1")
        driver.start(one, of)
        await observed.until(one.id, Seen.READY)
        made = await scene.api.get(f"{scene.pods}/r1")
        assert [each["name"] for each in made["spec"]["containers"]] == ["istio-proxy", "engine"]
        driver.start(one, of)
        await observed.until(one.id, Seen.READY, 2)
        assert (await scene.api.get(f"{scene.pods}/r1"))["metadata"]["uid"] == made["metadata"]["uid"]
        two, dies = scene.engine("r2", gpu=1, manner=Manner.DIES_ON_START)
        driver.start(two, dies)
        await observed.until(two.id, Seen.EXITED)
        await observed.until(two.id, Seen.CLEAN)
        driver.stop(one, 1.0)
        await observed.until(one.id, Seen.CLEAN)
    assert (await scene.api.get(scene.pods))["items"] == []


async def test_scheduler_preemption_of_one_pod_leaves_the_other_serving(scene: Scene) -> None:
    """Preemption by another owner's pod with a higher PriorityClass."""
    name = f"high-{scene.namespace}"
    classes = "/apis/scheduling.k8s.io/v1/priorityclasses"
    head = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": 1000}
    await scene.api.create(classes, head)
    async with running(driver := scene.driver()) as observed:
        for gpu in (0, 1):
            one, of = scene.engine(f"r{gpu}", gpu=gpu)
            driver.start(one, of)
            await observed.until(one.id, Seen.READY)
        container = {
            "name": "c",
            "image": "c",
            "command": ["sleep", "600"],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        }
        spec = {"priorityClassName": name, "terminationGracePeriodSeconds": 1, "containers": [container]}
        foreign = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "theirs"}, "spec": spec}
        await scene.api.create(scene.pods, foreign)
        both = {ReplicaId("r0"), ReplicaId("r1")}
        while not (taken := [one for id in both for one in observed.of(id) if one.seen is Seen.TAKEN]):
            await observed.more()
        assert "Preemption" in taken[0].reason
        (other,) = both - {taken[0].id}
        known = {"starting", "ready", "unready"}  # a busy machine may delay probes
        assert {*observed.words(other)} <= known, "it goes on"
        await scene.api.delete(f"{scene.pods}/theirs", grace_s=0)
    await scene.api.delete(f"{classes}/{name}")


async def test_foreground_deletion_of_a_model_drains_without_a_new_pod(
    api: Api, house: House, node: Node, namespace: str
) -> None:
    """open-telemetry/opentelemetry-operator#2364, pravega/zookeeper-operator#410: a finalizer keeps the object."""
    await custom_resources.install(api)
    path = f"{custom_resources.models(namespace)}/ada"
    document = model("ada", idleSeconds=600, replicas={"min": 1})
    document["metadata"] = {"name": "ada", "finalizers": ["example.com/hold"]}
    await api.create(custom_resources.models(namespace), document)
    house.write()
    listed = f"/api/v1/namespaces/{namespace}/pods"
    async with house.running():
        while (await house.call("ada"))[0] != 200:
            await asyncio.sleep(0.05)
        made = {one["metadata"]["uid"] for one in (await api.get(listed))["items"]}
        await api._ask("DELETE", path, {"apiVersion": "v1", "kind": "DeleteOptions", "propagationPolicy": "Foreground"})
        while items := (await api.get(listed))["items"]:
            made |= {one["metadata"]["uid"] for one in items}
            assert all(one["spec"].get("nodeName") in (None, node.name) for one in items)
            await asyncio.sleep(0.05)
        while (await house.call("ada"))[0] != 404:  # until the gateway has received the deletion
            await asyncio.sleep(0.05)
        made |= {one["metadata"]["uid"] for one in (await api.get(listed))["items"]}
        assert len(made) == 1
        assert "deletionTimestamp" in (await api.get(path))["metadata"]
        await api.patch(path, {"metadata": {"finalizers": None}}, MERGE)


async def test_devices_of_an_ended_pod_with_a_finalizer_are_reused(
    api: Api, house: House, node: Node, namespace: str
) -> None:
    """kubernetes-sigs/kueue#13830: both GPUs of the node were held, and `explain` names the finalizer."""
    bob = model("bob", idleSeconds=600, gpu={"count": 2})
    house.write(model("ada", idleSeconds=600, gpu={"count": 2}), bob)
    async with house.running():
        assert (await house.call("ada"))[0] == 200
        path = f"/api/v1/namespaces/{namespace}/pods"
        (pod,) = (await api.get(path))["items"]
        assert pod["spec"]["nodeName"] == node.name
        kept = f"{path}/{pod['metadata']['name']}"
        await api.patch(kept, {"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}}, MERGE)
        house.tell(bob)
        assert (await house.call("bob"))[0] == 200
        assert (await api.get(kept))["status"]["phase"] in ("Succeeded", "Failed")
        assert "its pod is kept by the finalizer kueue.x-k8s.io/managed" in await house.read_ops("explain/last")
        await api.patch(kept, {"metadata": {"finalizers": None}}, MERGE)
