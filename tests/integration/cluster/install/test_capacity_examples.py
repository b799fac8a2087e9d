"""The example values for external capacity, installed unchanged on a real control plane.

Missing components are fakes: the operator of the fabric (CRO) and the controller of ProvisioningRequests, both with
their real definitions, and kubelets for added nodes. The API server keeps an audit log, which shows that it forbids no
request of the chart's pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import re
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import helm_python
import pytest
import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object
from autoscaler.kubernetes.constants import NODES
from autoscaler.providers.cro.objects import REQUESTS, RESOURCES
from autoscaler.providers.provisioning_request.objects import API, ATOMIC, GKE
from pilotlight.cli import keys
from pilotlight.provider_kubernetes_client import Objects
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.install.test_chart import (
    ENDED,
    NAME,
    RELEASE,
    WAITED,
    Release,
    applied,
    call,
    loose_chart,
)
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.components import Plane
from tests.integration.cluster.support.control_plane.custom_resources import TENANTS, tenant
from tests.integration.cluster.support.controllers.karpenter import Joined
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.integration.cluster.support.network.dns_server import addresses, names
from tests.integration.cluster.support.programs.build import TESTPLANE
from tests.support.chart import example
from tests.support.fakes.kubernetes.cro import FakeCro
from tests.support.fakes.kubernetes.provisioner import FakeProvisioner
from tests.support.go_programs import BuildError, build

GPU = "nvidia.com/gpu"
A100 = "NVIDIA-A100-PCIE-40GB"
WAIT_S_MAX = 240.0
PARKED_S_MAX = 90.0
"""A request that waits in its queue would wait for ten minutes."""
POLICY = "apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"
AUDIT, FORBIDDEN = "audit.log", 403
OPS = "http://127.0.0.1:8081/api/v1"


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    """A plane of this module, with an audit log."""
    named = os.environ.get("PILOTLIGHT_TESTPLANE")
    try:
        programs = Path(named) if named else build(TESTPLANE)
    except BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("audited")
    (folder / "policy.yaml").write_text(POLICY)
    flags = [f"--audit-policy-file={folder}/policy.yaml", f"--audit-log-path={folder}/{AUDIT}"]
    one = Plane(folder, programs, {"kube-apiserver": flags})
    one.start()
    yield one
    one.stop()


def merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Merges two sets of values as helm does."""
    both = {key: merged(under[key], one) for key, one in over.items() if isinstance(one, dict) and key in under}
    return {**under, **over, **both}


class Example:
    """One of the examples, with overrides for this environment: its program, and a single autoscaler.
    Pods share one network, and the operations port is on loopback where requests need keys.
    """

    def __init__(self, release: Release, plane: Plane, file: str) -> None:
        agent = {"namespace": f"{release.namespace}-agents"}
        bed = release.values(agent=agent, autoscaler={"replicas": 1, "extraArgs": []})
        del bed["settings"]
        self.release, self._plane, self.values = release, plane, merged(example(file), bed)

    async def install(self) -> None:
        """Returns when everything that it installs is ready."""
        one = self.release
        await asyncio.to_thread(one.config.install, one.chart, RELEASE, self.values, namespace=one.namespace, **WAITED)

    async def called(self, key: str, model: str = "tiny") -> tuple[int, str]:
        """Sends a request once the gateway knows the key and the model; returns (status, response text)."""
        gateway, *_ = await addresses(self.release.api, f"{NAME}-gateway", self.release.namespace)
        while (answer := await call(f"http://{gateway}:8080", model, key))[0] in {401, 404}:
            await asyncio.sleep(0.05)
        return answer

    async def answered(self, key: str, model: str = "tiny") -> None:
        """Sends a request and checks that it succeeds; otherwise fails with the explanation."""
        answer = await self.called(key, model)
        if answer[0] != 200:
            raise AssertionError(answer, await self.asked(f"explain/model/{model}"))

    async def asked(self, path: str) -> Any:
        """GET of the operations port."""
        async with aiohttp.ClientSession() as session, session.get(f"{OPS}/{path}") as answer:
            return await answer.json()

    async def ladder(self, model: str = "tiny") -> list[dict[str, Any]]:
        """Waits until `explain` shows the ladder of a model with a waiting request, and returns it."""
        while not (found := (await self.asked(f"explain/model/{model}")).get("ladder", [])):
            await asyncio.sleep(0.05)
        steps: list[dict[str, Any]] = found
        return steps

    async def doctor(self) -> dict[str, Object]:
        """Runs the pod of `helm test` and returns its findings by check."""
        with helm_python.Chart.load(self.release.chart) as chart:
            rendered = chart.render(self.values, name=RELEASE, namespace=self.release.namespace)
        pod = yaml.safe_load(rendered["pilotlight/templates/tests/doctor.yaml"])
        pod["spec"]["containers"][0]["args"].append("--output=json")
        pods = f"/api/v1/namespaces/{self.release.namespace}/pods"
        await self.release.api.create(pods, pod)
        while (await self.release.api.get(f"{pods}/{NAME}-doctor"))["status"]["phase"] not in ENDED:
            await asyncio.sleep(0.05)
        log = next(self.release.logs.glob("*doctor*.log")).read_text()
        return {one["check"]: one for one in json.loads(log)}

    def forbidden(self) -> list[str]:
        """Forbidden requests of the chart's pods, once each; the doctor is excluded, since it probes permissions."""
        found, asked = dict[str, None](), set[str]()
        namespaces = (f":{self.release.namespace}:", f":{self.release.namespace}-agents:")
        for line in (self._plane.folder / AUDIT).read_text().splitlines():
            one = json.loads(line)
            user = one["user"]["username"]
            (pod,) = one["user"].get("extra", {}).get("authentication.kubernetes.io/pod-name", [""])
            if not any(each in user for each in namespaces) or pod.endswith("-doctor"):
                continue
            asked.add(user.rpartition("-")[2])
            if one.get("responseStatus", {}).get("code") == FORBIDDEN:
                found[f"{user} {one['verb']} {one['requestURI']}"] = None
        assert "autoscaler" in asked, "the log names them"
        return [*found]


@pytest.fixture
async def bed(api: Api, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    """A node for all pods of the chart, with the labels that the example requires."""
    name = f"node-{uuid.uuid4().hex[:8]}"
    async with Node(api, name, next_number(), {GPU: "0"}, request.param, tmp_path).running() as one:
        yield one


@pytest.fixture
async def release(
    api: Api, namespace: str, kubeconfig: Path, bed: Node, tmp_path: Path
) -> AsyncIterator[Release]:  # fmt: skip
    """Yields a Release; deletes everything that belongs to it afterwards."""
    engines, chart = f"{namespace}-engines", loose_chart(tmp_path)
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
        async with names(api):
            yield Release(chart, config, api, namespace, engines, bed.logs, bed.name)
            await asyncio.to_thread(config.uninstall, RELEASE, ignore_not_found=True)
    tiny = f"{custom_resources.models(engines)}/tiny"  # otherwise it blocks the deletion of the namespace
    for path in (tiny, f"/api/v1/namespaces/{engines}", f"/api/v1/namespaces/{namespace}-agents"):
        with contextlib.suppress(ApiError):
            await api.delete(path)


@contextlib.asynccontextmanager
async def both_keys(release: Release) -> AsyncIterator[tuple[str, str]]:
    """Yields two keys of a Tenant that exists meanwhile: one for requests, one for operator orders."""
    name, made = f"t-{uuid.uuid4().hex[:8]}", [keys.generate_key(role, role) for role in ("tenant", "operator")]
    entries = [{"name": one.name, "sha256": one.sha256, "role": one.role} for _, one in made]
    await release.api.create(TENANTS, tenant(name, keys=entries))
    try:
        yield made[0][0], made[1][0]
    finally:
        await release.api.delete(f"{TENANTS}/{name}")


@contextlib.asynccontextmanager
async def fabric(api: Api, bed: Node) -> AsyncIterator[FakeCro]:
    """Runs the fake operator; attached and detached GPUs change the node's resources."""
    there, group = [0], asyncio.TaskGroup()

    def changed(by: int) -> None:
        there[0] += by
        group.create_task(bed.has({GPU: str(there[0])}))

    cro = FakeCro(
        Objects(api, api), asyncio.get_running_loop().time, {A100: 4}, attach_s=0.3, detach_s=0.3, look_s=0.5,
        period_s=0.05, attached=lambda node, uuid: changed(1), detached=lambda node, uuid: changed(-1),
    )  # fmt: skip
    try:
        async with group:  # an error of the operator fails the test
            playing = group.create_task(cro.run())
            yield cro
            playing.cancel()
    finally:
        for path in (REQUESTS, RESOURCES):
            for left in (await api.get(path))["items"]:
                with contextlib.suppress(ApiError):  # it may be gone by now
                    await api.patch(f"{path}/{left['metadata']['name']}", {"metadata": {"finalizers": None}})
                    await api.delete(f"{path}/{left['metadata']['name']}")


FABRIC = {"example.com/fabric": "rack-1", "nvidia.com/gpu.present": "true"}


@pytest.mark.parametrize("bed", [FABRIC], indirect=True)
async def test_onprem_example_detaches_a_stuck_gpu_by_force_on_drain(release: Release, plane: Plane, bed: Node) -> None:
    api, one = release.api, Example(release, plane, "values-onprem-mig-fabric.yaml")
    await custom_resources.install_foreign(api, "cro")
    await make_namespace(api, "gpu-operator")
    await one.install()
    async with asyncio.timeout(WAIT_S_MAX), both_keys(release) as (key, operator), fabric(api, bed) as cro:
        finding = (await one.doctor())["capacity rack-1"]
        message = f"the CustomResourceDefinitions are installed; GPUs can be attached to {bed.name}"
        assert (finding["grade"], finding["says"]) == ("ok", message)
        await applied(release, release.engines, gpu={"memory": "20Gi", "models": ["*A100*"]})
        await one.answered(key)
        resource = await online(api)
        cro.busy, cro.look_s = (lambda node, uuid: True), math.inf  # it looks again when this test has seen it stuck
        assert f"1 x {A100} of rack-1 is released, by force if necessary" in await drained(bed, operator)
        await until_stuck(api)
        cro.look_s, cro.due_s[resource] = 0.5, 0.0
        while (left := (await api.get(RESOURCES))["items"]) and not left[0]["spec"]["force_detach"]:
            assert left[0]["metadata"]["name"] == resource
            await asyncio.sleep(0.05)
        while (await api.get(RESOURCES))["items"]:
            await asyncio.sleep(0.05)
        await is_told(release, "CapacityForced")
        assert one.forbidden() == []


async def drained(bed: Node, operator: str) -> str:
    """Sends the request of `pilotlight drain --force` and returns the announced effect."""
    url, head = f"{OPS}/nodes/{bed.name}/drain", {"Authorization": f"Bearer {operator}"}
    async with aiohttp.ClientSession() as session, session.post(url, json={"force": True}, headers=head) as answer:
        assert answer.status == 200, await answer.text()
        return str((await answer.json())["says"])


async def online(api: Api) -> str:
    """The only resource's name, once the operator reports it online; the node may show the GPU before."""
    while True:
        (one,) = (await api.get(RESOURCES))["items"]
        if one["status"]["state"] == "Online":
            return str(one["metadata"]["name"])
        await asyncio.sleep(0.05)


async def until_stuck(api: Api) -> None:
    """Waits until the operator reports a process on the GPU; it must not be forced before."""
    while True:
        (one,) = (await api.get(RESOURCES))["items"]
        assert not one["spec"]["force_detach"] or one["status"].get("error"), "it was not forced at first"
        if "there are processes" in one["status"].get("error", ""):
            return
        await asyncio.sleep(0.05)


async def is_told(release: Release, reason: str) -> None:
    """Waits for an Event on the Model."""
    path = f"/api/v1/namespaces/{release.engines}/events"
    while not (await release.api.get(path, fieldSelector=f"involvedObject.name=tiny,reason={reason}"))["items"]:
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def cloud(release: Release, after_s: float = 0.2) -> AsyncIterator[FakeProvisioner]:
    """Runs a fake that fulfils ProvisioningRequests after `after_s`, with a kubelet for each node that it adds."""
    api, clock = release.api, asyncio.get_running_loop().time
    played = FakeProvisioner(
        Objects(api, api), release.engines, clock, after_s=after_s, boot_s=0.2, prefix=f"{release.namespace}-"
    )

    async def play(stack: contextlib.AsyncExitStack) -> None:
        joined = set[str]()
        while True:
            await played.step()
            for node in {*played.nodes.values()} - joined:
                joined.add(node)
                kubelet = Joined(api, node, next_number(), {GPU: "1"}, {}, release.logs, probe_period_s=0.05)
                await stack.enter_async_context(kubelet.running())
            await asyncio.sleep(0.05)

    async with contextlib.AsyncExitStack() as stack, asyncio.TaskGroup() as group:  # an error in `play` fails the test
        playing = group.create_task(play(stack))
        yield played
        playing.cancel()


ON_GKE = {"cloud.google.com/gke-gpu": "true"}


async def requests(release: Release) -> list[Object]:
    """All ProvisioningRequests of the engines' namespace."""
    found = await release.api.get(f"/apis/{API}/namespaces/{release.engines}/provisioningrequests")
    return list(found["items"])


@pytest.mark.parametrize("bed", [ON_GKE], indirect=True)
async def test_gke_example_orders_an_atomic_node_for_a_model_that_needs_an_l4(release: Release, plane: Plane) -> None:
    api, one = release.api, Example(release, plane, "values-gke-dws.yaml")
    await custom_resources.install_foreign(api, "autoscaling")
    await one.install()
    async with asyncio.timeout(WAIT_S_MAX), both_keys(release) as (key, _), cloud(release) as played:
        found = await one.doctor()
        assert {name: found[f"capacity {name}"]["grade"] for name in ("atomic", "dws")} == {"atomic": "ok", "dws": "ok"}
        await applied(release, release.engines, gpu={"memory": "20Gi", "models": ["*L4*"]})
        played.fault = lambda name: "unseen"  # the request waits until this test has seen the ladder
        waits = asyncio.create_task(one.answered(key))
        ladder = await one.ladder()
        (chosen,) = [step for step in ladder if step["chosen"]]
        assert (chosen["kind"], chosen["provider"]) == ("offer", "atomic")
        (queue,) = [step for step in ladder if step["provider"] == "dws"]
        assert (queue["chosen"], queue["why_not"]) == (False, "insufficient room on this offer"), "those are H100s"
        played.fault = lambda name: ""
        await waits
        (request,) = await requests(release)
        assert request["spec"]["provisioningClassName"] == ATOMIC
        (node,) = played.nodes.values()
        found = await api.get(f"{NODES}/{node}")
        assert found["metadata"]["labels"]["cloud.google.com/gke-accelerator"] == "nvidia-l4"
        assert one.forbidden() == []


@pytest.mark.parametrize("bed", [ON_GKE], indirect=True)
async def test_gke_example_orders_queued_h100s_once_and_fails_requests_early(release: Release, plane: Plane) -> None:
    one = Example(release, plane, "values-gke-dws.yaml")
    await custom_resources.install_foreign(release.api, "autoscaling")
    await one.install()
    days = cloud(release, after_s=3 * 86_400.0)
    async with asyncio.timeout(WAIT_S_MAX), both_keys(release) as (key, _), days as played:
        await applied(release, release.engines, gpu={"memory": "20Gi", "models": ["*H100*"]})
        waits = False
        while not waits:
            async with asyncio.timeout(PARKED_S_MAX):
                status, body = await one.called(key)
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_capacity")
            explained = await one.asked("explain/model/tiny")
            chosen = [step["provider"] for step in explained.get("ladder", []) if step["chosen"]]  # of a recent request
            ordered = r"ordered from dws( .* ago)?, delivery time unknown"
            waits = bool(chosen) and any(re.search(ordered, line) for line in explained["sentences"])
        assert chosen == ["dws"]
        while not played.granted:
            await asyncio.sleep(0.05)
        (request,) = await requests(release)
        assert request["spec"]["provisioningClassName"] == GKE
        assert request["spec"]["parameters"] == {"maxRunDurationSeconds": "604800"}
        for _ in range(3):
            async with asyncio.timeout(PARKED_S_MAX):
                assert (await one.called(key))[0] == 503
        assert [still["metadata"]["uid"] for still in await requests(release)] == [request["metadata"]["uid"]]
        assert one.forbidden() == []
