"""Cluster faults as the driver reports them to `World`: each has its reason, and no device is lost or used twice.

Case 2 of the fault list on a real API server: admission, quotas, namespaces, images, memory and nodes.
"""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from autoscaler.drivers.kubernetes import volume_failures
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.drivers.kubernetes.objects import pod_state
from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.state.events import Seen
from tests.contracts.driver import Manner
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane.admission_webhook import webhook
from tests.integration.cluster.support.driver.node_fixture import Scene, changed, until_reported
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.integration.cluster.support.kubelet.pod import IMAGE_ERROR, OUT_OF_MEMORY
from tests.support.harness.driver_events import WAIT_S_MAX, running
from tests.support.harness.local_rig import launch

# --- waiting is not a failure -----------------------------------------------------------------------------------------


@pytest.mark.standard
async def test_restricted_pod_security_admits_engine_pods_unless_run_as_root(scene: Scene) -> None:
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    await scene.api.patch(f"/api/v1/namespaces/{scene.namespace}", {"metadata": {"labels": enforce}})
    one, model = scene.engine("r1")
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
    rooted, of_root = scene.engine("r2", security_context={"runAsUser": 0})
    async with running(driver := scene.driver()) as observed:
        driver.start(rooted, of_root)
        refused = await observed.until(rooted.id, Seen.EXITED)
        assert 'violates PodSecurity "restricted' in refused.reason


async def is_there(scene: Scene, path: str) -> bool:
    try:
        await scene.api.get(path)
    except ApiError as error:
        if error.status != 404:
            raise
        return False
    return True


@pytest.mark.standard
async def test_ended_pod_kept_by_a_foreign_finalizer_frees_its_device(scene: Scene) -> None:
    """Its containers have ended, and the pod's object remains. The scheduler, too, counts its GPU as free."""
    (one, model), path, keeps = scene.engine("r1", gpu=0), f"{scene.pods}/r1", ["example.com/keeps"]
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
        await scene.api.patch(path, {"metadata": {"finalizers": keeps}})
        driver.stop(one, 1.0)
        clean = await observed.until(one.id, Seen.CLEAN)
        assert clean.proof == "assumed; its pod is kept by the finalizer example.com/keeps"
        other, second = scene.engine("r2", gpu=0)
        driver.start(other, second)
        await observed.until(other.id, Seen.READY)
    async with running(scene.driver()) as observed:  # a new process observes both
        await observed.until(one.id, Seen.CLEAN)
        await observed.until(other.id, Seen.READY)
        await scene.api.patch(path, {"metadata": {"finalizers": None}})
        while await is_there(scene, path):
            await asyncio.sleep(0.05)
        assert observed.words(one.id)[-1] == "clean"


@pytest.mark.standard
async def test_unmountable_volume_fails_the_start_and_is_named(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(volume_failures, "LOOK_S", 0.1)
    monkeypatch.setattr(volume_failures, "IMAGE_S_MAX", 0.5)
    one, model = scene.engine("r1")
    scene.node.fall_silent()  # the Event is written below, as a kubelet writes it
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        await observed.until(one.id, Seen.STARTING)
        while not (pod := await scene.api.get(f"{scene.pods}/r1"))["spec"].get("nodeName"):
            await asyncio.sleep(0.05)
        about = {"kind": "Pod", "namespace": scene.namespace, "name": "r1", "uid": pod["metadata"]["uid"]}
        event = {
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": "r1.mount", "namespace": scene.namespace},
            "involvedObject": about, "type": "Warning", "reason": "FailedMount",
            "message": 'MountVolume.SetUp failed for volume "a" : secret "login" not found',
            "lastTimestamp": pod["metadata"]["creationTimestamp"],
        }  # fmt: skip
        await scene.api.create(f"/api/v1/namespaces/{scene.namespace}/events", event)
        failed = await observed.until(one.id, Seen.EXITED)
        assert failed.reason == 'FailedMount: MountVolume.SetUp failed for volume "a" : secret "login" not found'


@pytest.mark.standard
async def test_unschedulable_pod_waits_and_the_reason_is_reported(scene: Scene) -> None:
    async with running(driver := scene.driver()) as observed:
        for gpu in (0, 1):
            one, model = scene.engine(f"r{gpu}", gpu=gpu)
            driver.start(one, model)
            await observed.until(one.id, Seen.READY)
        third, model = scene.engine("r3")
        driver.start(third, model)
        reported = await until_reported(observed, third.id, lambda seen: "Insufficient" in seen.waits)
        assert (reported.seen, reported.started_s) == (Seen.STARTING, None)
        assert reported.waits.startswith("Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu")
        await scene.node.has({"nvidia.com/gpu": "3"})
        ready = await observed.until(third.id, Seen.READY)
        assert not ready.waits
        assert observed.words(third.id) == ["starting", "ready"]


async def test_start_waits_while_the_quota_is_exhausted_and_reports_the_quota(scene: Scene) -> None:
    quotas = f"/api/v1/namespaces/{scene.namespace}/resourcequotas"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    await scene.api.create(quotas, quota)
    async with asyncio.timeout(WAIT_S_MAX):
        while not (await scene.api.get(f"{quotas}/q")).get("status", {}).get("hard"):
            await asyncio.sleep(0.02)
    async with running(driver := scene.driver()) as observed:
        first, model = scene.engine("r1")
        driver.start(first, model)
        await observed.until(first.id, Seen.READY)
        second, model = scene.engine("r2", gpu=1)
        driver.start(second, model)
        reported = await until_reported(observed, second.id, lambda seen: seen.waits)
        assert "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1" in reported.waits
        assert not driver.obstacle(model)
        await scene.api.patch(f"{quotas}/q", {"spec": {"hard": {"pods": "2"}}})
        await observed.until(second.id, Seen.READY)
        assert observed.words(second.id) == ["starting", "ready"]


async def test_stopped_start_that_waits_for_quota_creates_no_pod(scene: Scene) -> None:
    quotas = f"/api/v1/namespaces/{scene.namespace}/resourcequotas"
    spec = {"hard": {"pods": "0"}}
    await scene.api.create(
        quotas, {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": spec}
    )
    await refuses_pods(scene)
    async with running(driver := scene.driver()) as observed:
        one, model = scene.engine("r1")
        driver.start(one, model)
        await until_reported(observed, one.id, lambda seen: seen.waits)
        driver.stop(one, 1.0)
        await observed.until(one.id, Seen.CLEAN)
        await scene.api.delete(f"{quotas}/q")
        assert not (await scene.api.get(scene.pods))["items"]


# --- rejections and their reasons -------------------------------------------------------------------------------------


@pytest.mark.standard
async def test_rejected_start_is_allowed_once_a_limit_range_sets_the_limits(scene: Scene) -> None:
    """Neither the Model nor its pods change."""
    core = f"/api/v1/namespaces/{scene.namespace}"
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "q"},
        "spec": {"hard": {"limits.memory": "8Gi"}},
    }
    await scene.api.create(f"{core}/resourcequotas", quota)
    one, model = scene.engine("r1", gpu=0)
    other, _ = scene.engine("r2", gpu=0)
    async with running(driver := scene.driver()) as observed:
        while "hard" not in (await scene.api.get(f"{core}/resourcequotas/q")).get("status", {}):
            await asyncio.sleep(0.05)
        await refuses_pods(scene)
        driver.start(one, model)
        await observed.until(one.id, Seen.EXITED)
        assert "must specify limits.memory" in driver.obstacle(model)
        limits = [{"type": "Container", "default": {"memory": "1Gi"}}]
        body = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "l"}, "spec": {"limits": limits}}
        await scene.api.create(f"{core}/limitranges", body)
        while driver.obstacle(model):
            await asyncio.sleep(0.05)
        while not await is_admitted(scene):
            await asyncio.sleep(0.05)
        driver.start(other, model)
        await observed.until(other.id, Seen.READY)


async def test_failed_image_pull_fails_the_start_after_a_timeout(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(pod_state._PATIENCE_S, "ImagePullBackOff", 0.5)
    one, model = scene.engine("r1", annotations={IMAGE_ERROR: "1"})
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        reported = await until_reported(observed, one.id, lambda seen: "Image" in seen.waits)
        assert reported.waits == 'ImagePullBackOff: Back-off pulling image "engine"'
        failed = await observed.until(one.id, Seen.EXITED)
        assert failed.reason == reported.waits
        assert driver.obstacle(model) == failed.reason
        assert not driver.obstacle(changed(model)), "a new spec is tried"
        assert not failed.started_s
        await observed.until(one.id, Seen.CLEAN)


async def test_image_pull_that_recovers_within_the_timeout_fails_no_start(scene: Scene) -> None:
    one, model = scene.engine("r1", annotations={IMAGE_ERROR: "1"})
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        await until_reported(observed, one.id, lambda seen: "ImagePullBackOff" in seen.waits)
        await scene.annotate("r1", {IMAGE_ERROR: None})
        await observed.until(one.id, Seen.READY)
        assert observed.words(one.id) == ["starting", "ready"]
        assert not driver._start_timeouts


async def test_invalid_image_name_fails_the_start_at_once(scene: Scene) -> None:
    one, model = scene.engine("r1", annotations={IMAGE_ERROR: "InvalidImageName"})
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        assert "InvalidImageName" in (await observed.until(one.id, Seen.EXITED)).reason


POLICY = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"


@pytest.mark.standard
async def test_admission_policy_message_is_reported_and_the_start_not_retried(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, create = list[str](), Api.create

    async def counted(api: Api, path: str, body: Object) -> Object:
        asked.append(path)
        return await create(api, path, body)

    name = f"no-engines-{uuid.uuid4().hex[:8]}"
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}]
    only = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": scene.namespace}}}
    head = {"apiVersion": "admissionregistration.k8s.io/v1", "metadata": {"name": name}}
    await scene.api.create(f"{POLICY}ies", head | {
        "kind": "ValidatingAdmissionPolicy",
        "spec": {"matchConstraints": {"resourceRules": rules},
                 "validations": [{"expression": "false", "message": "engines are not allowed on Sundays"}]},
    })  # fmt: skip
    await scene.api.create(f"{POLICY}ybindings", head | {
        "kind": "ValidatingAdmissionPolicyBinding",
        "spec": {"policyName": name, "validationActions": ["Deny"], "matchResources": only},
    })  # fmt: skip
    try:
        await refuses_pods(scene)
        async with running(driver := scene.driver()) as observed:
            one, model = scene.engine("r1")
            monkeypatch.setattr(Api, "create", counted)
            driver.start(one, model)
            failed = await observed.until(one.id, Seen.EXITED)
            assert "engines are not allowed on Sundays" in failed.reason
            await observed.until(one.id, Seen.CLEAN)
            assert driver.obstacle(model) == failed.reason
            assert not driver.obstacle(changed(model)), "a new spec is tried"
            assert asked == [scene.pods]
    finally:
        await scene.api.delete(f"{POLICY}ybindings/{name}")
        await scene.api.delete(f"{POLICY}ies/{name}")


async def is_admitted(scene: Scene) -> bool:
    """Whether a pod is admitted; an admission rule takes effect shortly after its creation."""
    spec = {"containers": [{"name": "a", "image": "a"}]}
    probe = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe"}, "spec": spec}
    try:
        await scene.api.create(f"{scene.pods}?dryRun=All", probe)
    except ApiError:
        return False
    return True


async def refuses_pods(scene: Scene) -> None:
    async with asyncio.timeout(WAIT_S_MAX):
        while await is_admitted(scene):
            await asyncio.sleep(0.05)


async def test_start_rejected_by_a_webhook_fails_with_the_webhook_message(scene: Scene, tmp_path: Path) -> None:
    async with webhook(scene.api, scene.namespace, tmp_path, rejects="no GPUs for you"):
        await refuses_pods(scene)
        async with running(driver := scene.driver()) as observed:
            one, model = scene.engine("r1")
            driver.start(one, model)
            assert "no GPUs for you" in (await observed.until(one.id, Seen.EXITED)).reason
            assert "no GPUs for you" in driver.obstacle(model)


@pytest.mark.standard
async def test_start_waits_until_an_unavailable_webhook_responds(scene: Scene, tmp_path: Path) -> None:
    """K01 and K02: the API server responds with 500, and a moment later the same request succeeds."""
    async with webhook(scene.api, scene.namespace, tmp_path, listens=False) as listen:
        await refuses_pods(scene)
        async with running(driver := scene.driver()) as observed:
            one, model = scene.engine("r1")
            driver.start(one, model)
            waiting = await until_reported(observed, one.id, lambda seen: seen.waits)
            assert "failed calling webhook" in waiting.waits
            assert driver.obstacle(model) == ""
            await listen()
            await observed.until(one.id, Seen.READY)
            assert observed.words(one.id) == ["starting", "ready"]


async def test_start_in_a_terminating_namespace_fails(api: Api, scene: Scene) -> None:
    name = f"goes-{uuid.uuid4().hex[:8]}"
    await make_namespace(api, name)
    held = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "held", "finalizers": ["test.example/hold"]}}
    path = f"/api/v1/namespaces/{name}/configmaps"
    await api.create(path, held)
    driver = KubernetesDriver(api, name, launch, lambda _: "engine", assume_after_s=0.05)
    async with running(driver) as observed:
        await api.delete(f"/api/v1/namespaces/{name}")
        one, model = scene.engine("r1")
        driver.start(one, model)
        failed = await observed.until(one.id, Seen.EXITED)
        assert "because it is being terminated" in failed.reason
        assert driver.obstacle(model)
    await api.patch(f"{path}/held", {"metadata": {"finalizers": None}})


# --- exits and their reasons ------------------------------------------------------------------------------------------


async def test_out_of_memory_kill_of_an_engine_is_reported_as_oom_killed(scene: Scene) -> None:
    one, model = scene.engine("r1", annotations={OUT_OF_MEMORY: "1"})
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
        scene.kill("r1")
        assert "(OOMKilled)" in (await observed.until(one.id, Seen.EXITED)).reason
        await observed.until(one.id, Seen.CLEAN)


async def test_crashed_engine_is_not_restarted_by_the_driver(scene: Scene) -> None:
    one, model = scene.engine("r1", manner=Manner.DIES_ON_START)
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        assert (await observed.until(one.id, Seen.EXITED)).reason == "ended with status 3"
        await observed.until(one.id, Seen.CLEAN)
        assert not driver.obstacle(model)
        assert not (await scene.api.get(scene.pods))["items"]


async def test_evicted_pod_is_reported_with_the_eviction_reason(scene: Scene) -> None:
    one, model = scene.engine("r1", manner=Manner.IGNORES_SIGTERM)
    async with running(driver := scene.driver()) as observed:
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
        eviction = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": "r1"},
                    "deleteOptions": {"gracePeriodSeconds": 2}}  # fmt: skip
        await scene.api.create(f"{scene.pods}/r1/eviction", eviction)
        taken = await observed.until(one.id, Seen.TAKEN)
        assert taken.reason.startswith("its pod is being deleted: EvictionByEvictionAPI")
        await observed.until(one.id, Seen.CLEAN)
        assert observed.words(one.id) == ["starting", "ready", "taken", "exited", "clean"]


async def test_device_of_a_replica_on_a_lost_node_is_not_reusable(scene: Scene, tmp_path: Path) -> None:
    """Another node is alive: without one, the cluster assumes a fault of its own network and evicts no pod."""
    one, model = scene.engine("r1")
    driver = scene.driver()
    other = Node(scene.api, f"other-{scene.namespace}", next_number(), {}, {}, tmp_path)
    async with other.running(), running(driver) as observed:
        driver.start(one, model)
        await observed.until(one.id, Seen.READY)
        scene.node.fall_silent()
        lost = await observed.until(one.id, Seen.EXITED)
        assert lost.reason == f"its node {scene.node.name} is lost"
        assert observed.words(one.id) == ["starting", "ready", "exited"], "while its node was only silent, it served"
        driver.stop(one, 1.0)
        assert not any(s.healthy for s in observed.slices().slices if s.node == scene.node.name)
        await scene.api.get(f"{scene.pods}/r1")  # it may be alive
        assert "clean" not in observed.words(one.id)
