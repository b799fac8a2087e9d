"""A request whose start waits for what never arrives gets 503 within the limit of such waits, and `explain` the reason.

The limit is 60 s; here it is shorter (`short_start_limits`). The autoscaler and the gateway are processes.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final, Literal

import pytest

from autoscaler.kubernetes.api import STRATEGIC, Api, Object
from tests.integration.cluster.support.control_plane.admission_webhook import webhook
from tests.integration.cluster.support.entry_points.short_start_limits import LIMIT_S
from tests.integration.cluster.support.installations.adoption import OURS, Adopting, workload
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node
from tests.integration.cluster.support.kubelet.pod import IMAGE_ERROR

LATE_S = 20.0
"""How much later than the limit the response may be on a busy machine."""
MODULE: Final = "tests.integration.cluster.support.entry_points.short_start_limits"
MOUNT: Final = 'MountVolume.SetUp failed for volume "a" : secret "login" not found'
Case = Literal["pull", "crash", "runs on", "secret", "mount"]
SAID: dict[Case, str] = {
    "pull": "ImagePullBackOff: init container istio-proxy: not found",
    "crash": "CrashLoopBackOff: init container istio-proxy: back-off 5m0s",
    "runs on": "init container istio-proxy has not finished",
    "secret": 'CreateContainerConfigError: secret "login" not found',
    "mount": f"FailedMount: {MOUNT}",
}
"""By what the start waits for: the reason that `explain` reports."""
STATES: dict[Case, Object] = {
    "pull": {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}},
    "crash": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 5m0s"}},
    "runs on": {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
    "secret": {"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "login" not found'}},
}
"""By case: the state of the injected container, or of the engine's container if a Secret is missing."""
INJECTED: Final = frozenset({"pull", "crash", "runs on"})


@asynccontextmanager
async def injecting(api: Api, namespace: str, folder: Path, case: Case) -> AsyncIterator[None]:
    """Runs a webhook that injects a native sidecar into pods, if the case has one."""
    container: Object = {
        "name": "istio-proxy", "image": "proxy", "command": ["sleep", "1000"],
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
    }  # fmt: skip
    if case != "runs on":
        container["restartPolicy"] = "Always"
    patch = [{"op": "add", "path": "/spec/initContainers", "value": [container]}]
    async with AsyncExitStack() as stack:
        if case in INJECTED:
            await stack.enter_async_context(webhook(api, namespace, folder, patch=patch))
        yield


async def scheduled(api: Api, namespace: str) -> Object:
    """Waits for the only pod until it has a node."""
    while True:
        for pod in (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]:
            if pod["spec"].get("nodeName"):
                assert isinstance(pod, dict)
                return pod
        await asyncio.sleep(0.05)


async def stall(api: Api, namespace: str, case: Case) -> None:
    """Reports about the pod what its kubelet would; the kubelet itself is silent."""
    metadata = (await scheduled(api, namespace))["metadata"]
    if case == "mount":
        about = {"kind": "Pod", "namespace": namespace, "name": metadata["name"], "uid": metadata["uid"]}
        event = {
            "apiVersion": "v1", "kind": "Event", "metadata": {"name": "mount", "namespace": namespace},
            "involvedObject": about, "type": "Warning", "reason": "FailedMount", "message": MOUNT,
            "lastTimestamp": metadata["creationTimestamp"],
        }  # fmt: skip
        await api.create(f"/api/v1/namespaces/{namespace}/events", event)
        return
    common = {"image": "x", "imageID": "", "ready": False, "restartCount": 0}
    engine: Object = {"waiting": {"reason": "PodInitializing"}} if case in INJECTED else STATES[case]
    status: Object = {"phase": "Pending", "containerStatuses": [{"name": "engine", "state": engine, **common}]}
    if case in INJECTED:
        status["initContainerStatuses"] = [{"name": "istio-proxy", "state": STATES[case], **common}]
    await api.patch(f"/api/v1/namespaces/{namespace}/pods/{metadata['name']}/status", {"status": status}, STRATEGIC)


async def fails(one: House, call: Awaitable[tuple[int, str]], reason: str, begun_s: float) -> None:
    """The response is 503, not before the limit and soon after it, and `explain` then contains the reason."""
    status, said = await call
    took_s = asyncio.get_running_loop().time() - begun_s
    error = json.loads(said)["error"]
    assert (status, error["code"]) == (503, "model_start_failed"), said
    assert "pilotlight explain model" in error["message"], "where the reason is"
    assert LIMIT_S <= took_s <= LIMIT_S + LATE_S
    assert reason in " ".join(json.loads(await one.read_ops("explain/model/ada"))["sentences"])


SOME = [pytest.param(case, marks=[pytest.mark.standard] if case in {"pull", "mount"} else []) for case in SAID]


@pytest.mark.parametrize("case", SOME)
async def test_request_gets_503_when_its_pod_start_exceeds_the_wait_limit(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path, *, case: Case
) -> None:
    """K03, M18, K08: kserve#3254, koperator#432, rollout-operator#466, kserve#1867."""
    house.module = MODULE
    house.write(model("ada"))
    async with injecting(api, namespace, tmp_path, case), house.running() as one, asyncio.timeout(180):
        node.fall_silent()  # only now, since it counts as lost after 40 s
        call = asyncio.create_task(one.call("ada"))
        await scheduled(api, namespace)
        begun_s = asyncio.get_running_loop().time()
        await stall(api, namespace, case)
        await fails(one, call, SAID[case], begun_s)
        again_s = asyncio.get_running_loop().time()
        assert (await one.call("ada"))[0] == 503
        assert asyncio.get_running_loop().time() - again_s < LIMIT_S, "a request right after that does not wait again"


@pytest.mark.parametrize("case", SOME)
async def test_request_gets_503_if_an_adopted_pod_start_exceeds_the_wait_limit(
    adopting: Adopting, namespace: str, node: Node, tmp_path: Path, case: Case
) -> None:
    """C13 and its related cases: knative/serving#4192."""
    adopting.module = MODULE
    api = adopting.api
    await api.create(f"{adopting.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    async with injecting(api, namespace, tmp_path, case), adopting.running() as one, asyncio.timeout(180):
        node.fall_silent()  # only now, since it counts as lost after 40 s
        call = asyncio.create_task(one.call("ada"))
        await scheduled(api, namespace)
        begun_s = asyncio.get_running_loop().time()
        await stall(api, namespace, case)
        await fails(one, call, SAID[case], begun_s)


@pytest.mark.standard
async def test_request_gets_503_if_the_image_of_an_adopted_workload_is_missing(adopting: Adopting) -> None:
    """C13, knative/serving#4192: the kubelet reports ImagePullBackOff until the image exists."""
    adopting.module = MODULE
    body = workload("ada", 0, {OURS + "models": "ada"})
    body["spec"]["template"]["metadata"]["annotations"] = {IMAGE_ERROR: "1"}
    await adopting.api.create(f"{adopting.apps}/deployments", body)
    async with adopting.running() as one, asyncio.timeout(180):
        begun_s = asyncio.get_running_loop().time()
        await fails(one, one.call("ada"), 'ImagePullBackOff: Back-off pulling image "engine"', begun_s)


async def test_request_gets_503_if_pod_security_rejects_an_adopted_workload(
    adopting: Adopting, api: Api, namespace: str
) -> None:
    """The ReplicaSet retries, and only the condition ReplicaFailure reports why. The scale is zero again afterwards."""
    adopting.module = MODULE
    enforced = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await api.patch(f"/api/v1/namespaces/{namespace}", enforced)
    await api.create(f"{adopting.apps}/deployments", workload("ada", 0, {OURS + "models": "ada"}))
    async with adopting.running() as one, asyncio.timeout(180):
        begun_s = asyncio.get_running_loop().time()
        await fails(one, one.call("ada"), 'violates PodSecurity "restricted', begun_s)
        while (found := await one.scale("ada"))["spec"]["replicas"] or "ReplicaFailure" in {
            condition["type"] for condition in found["status"].get("conditions", [])
        }:
            await asyncio.sleep(0.05)
        assert await one.pods() == []
