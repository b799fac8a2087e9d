"""The chart on a real control plane: install, upgrade, rollback and uninstall; its pods run with its permissions.

Pods are local processes with exactly the bound tokens, files and arguments that the chart specifies.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import random
import re
import shutil
import sys
import uuid
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import helm_python
import pytest
import yaml

from autoscaler.drivers.kubernetes.adoption.objects import REPLICA
from autoscaler.drivers.kubernetes.inventory.node_cordons import ANNOTATION
from autoscaler.kubernetes.api import MERGE, Api, ApiError, Object
from autoscaler.kubernetes.constants import NODES
from autoscaler.spec.installation_ownership import INSTALLATION, installation_id
from pilotlight.cli import keys
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.clients.gateway_requests import chat
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.custom_resources import TENANTS, tenant
from tests.integration.cluster.support.installations.adoption import OURS, workload
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.integration.cluster.support.network.dns_server import addresses, names
from tests.support.chart import CHART, ROOT

RELEASE = "pl"
NAME = f"{RELEASE}-pilotlight"
WAITED: Any = {"wait": "watcher", "timeout": 240}
"""Options that make helm commands wait until everything is ready."""
WAIT_S_MAX = 180.0
ENDED = ("Succeeded", "Failed")


class Release(NamedTuple):
    """One helm installation, in a namespace of its own."""

    chart: Path
    config: helm_python.Config
    api: Api
    namespace: str
    engines: str
    logs: Path
    node: str

    def values(self, **more: Any) -> dict[str, Any]:
        """Values for this machine: the program is that of this checkout, and all pods share one network."""
        loose = {"resources": {}, "extraArgs": ["--ops=$(POD_IP):8081"]}
        return {
            "image": {"command": [str(ROOT / ".venv/bin/pilotlight")]},
            "listenHost": "$(POD_IP)",
            "settings": {"auth": "none"},
            "engines": {"namespace": self.engines},
            "gateway": {
                "resources": {},
                "extraArgs": ["--ops=127.0.0.1:0"],
                "preStopSeconds": 1,
                "graceSeconds": 10,
                **more.pop("gateway", {}),
            },
            "autoscaler": {**loose, **more.pop("autoscaler", {})},
            **more,
        }

    async def install(self, **more: Any) -> None:
        """Installs the release and returns when everything is ready."""
        values = self.values(**more)
        await asyncio.to_thread(self.config.install, self.chart, RELEASE, values, namespace=self.namespace, **WAITED)

    async def upgrade(self, **more: Any) -> None:
        """Upgrades the release and returns when everything is ready."""
        values = self.values(**more)
        await asyncio.to_thread(self.config.upgrade, self.chart, RELEASE, values, namespace=self.namespace, **WAITED)

    def hook(self, template: str, **more: Any) -> str:
        """Renders one template of a hook."""
        with helm_python.Chart.load(self.chart) as chart:
            rendered = chart.render(self.values(**more), name=RELEASE, namespace=self.namespace)
        return rendered[f"pilotlight/templates/{template}"]

    async def get(self, kind: str, name: str) -> Object:
        """Reads an object of the release's namespace."""
        group = {"deployments": "/apis/apps/v1"}.get(kind, "/api/v1")
        return await self.api.get(f"{group}/namespaces/{self.namespace}/{kind}/{name}")


@pytest.fixture
def chart(tmp_path: Path) -> Path:
    """See `loose_chart`."""
    return loose_chart(tmp_path)


def loose_chart(tmp_path: Path) -> Path:
    """The chart without `kubeVersion`: a plane that is built from modules does not know its own version."""
    copy = tmp_path / "chart"
    shutil.copytree(CHART, copy)
    text = (copy / "Chart.yaml").read_text()
    (copy / "Chart.yaml").write_text(re.sub(r"(?m)^kubeVersion:.*$", "", text))
    return copy


@pytest.fixture
async def house(api: Api, tmp_path: Path) -> AsyncIterator[Node]:
    """A node for all pods, which probes with the requested periods."""
    labels = {"nvidia.com/gpu.product": "Test-GPU", "nvidia.com/gpu.memory": "81920"}
    name = f"node-{uuid.uuid4().hex[:8]}"
    async with Node(api, name, next_number(), {"nvidia.com/gpu": "2"}, labels, tmp_path).running() as one:
        yield one


@pytest.fixture
async def release(chart: Path, api: Api, namespace: str, kubeconfig: Path, house: Node) -> AsyncIterator[Release]:
    engines = f"{namespace}-engines"
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
        async with names(api):
            yield Release(chart, config, api, namespace, engines, house.logs, house.name)
            await asyncio.to_thread(config.uninstall, RELEASE, ignore_not_found=True)
    with contextlib.suppress(ApiError):  # it was not created with scope `namespace`
        await api.delete(f"/api/v1/namespaces/{engines}")


async def call(url: str, model: str, key: str = "") -> tuple[int, str]:
    """Sends one chat completion and returns (status, response text)."""
    async with aiohttp.ClientSession() as session:
        answer = await chat(session, url, model, {"Authorization": f"Bearer {key}"} if key else {})
    return answer.status, answer.text


def tiny(**more: Any) -> Object:
    """examples/tiny.yaml with this machine's Python; it scales to zero as soon as its idle timeout permits."""
    document: Object = yaml.safe_load((ROOT / "examples" / "tiny.yaml").read_text())
    spec = document["spec"]
    spec["command"] = [sys.executable, *spec["command"][1:]]
    spec |= {"idleSeconds": 600, "residencySeconds": 0, **more}
    return document


async def models(release: Release, *documents: Object) -> None:
    """Writes the documents to a Secret."""
    await release.api.create(f"/api/v1/namespaces/{release.namespace}/secrets", {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "tenants"},
        "stringData": {"models.yaml": yaml.safe_dump_all(documents)},
    })  # fmt: skip


async def applied(release: Release, namespace: str, **more: Any) -> Object:
    """Creates a Model resource and returns its status once an autoscaler has observed it."""
    path = custom_resources.models(namespace)
    await release.api.create(path, tiny(**more))
    while "conditions" not in (found := (await release.api.get(f"{path}/tiny")).get("status", {})):
        await asyncio.sleep(0.05)
    status: Object = found
    return status


@contextlib.asynccontextmanager
async def tenant_key(release: Release) -> AsyncIterator[str]:
    """Yields the key of a Tenant that exists meanwhile."""
    key, entry = keys.generate_key("tenant", "key")
    name = f"t-{uuid.uuid4().hex[:8]}"
    await release.api.create(TENANTS, tenant(name, keys=[{"name": entry.name, "sha256": entry.sha256}]))
    try:
        yield key
    finally:
        await release.api.delete(f"{TENANTS}/{name}")


async def wakes_answers_and_sleeps(release: Release, engines: str, key: str = "") -> Object:
    """Sends a request through each gateway, with a key if required; returns the model's pod."""
    pods, mine = f"/api/v1/namespaces/{engines}/pods", "app.kubernetes.io/managed-by=pilotlight"
    while len(gateways := await addresses(release.api, f"{NAME}-gateway", release.namespace)) < 2:
        await asyncio.sleep(0.05)
    for gateway in gateways:
        url = f"http://{gateway}:8080"
        while key and (await call(url, "none", key))[0] == 401:  # until the gateway has received the Tenant
            await asyncio.sleep(0.05)
        assert not key or (await call(url, "tiny"))[0] == 401, "no Call without a key"
        while (answer := await call(url, "tiny", key))[0] == 404:  # until the gateway has received the Model
            await asyncio.sleep(0.05)
        assert (answer[0], "tiny" in answer[1]) == (200, True), answer[1]
    (pod,) = (await release.api.get(pods, labelSelector=mine))["items"]
    await release.api.patch(f"{custom_resources.models(engines)}/tiny", {"spec": {"idleSeconds": 1}}, MERGE)
    while (await release.api.get(pods, labelSelector=mine))["items"]:
        await asyncio.sleep(0.05)
    await is_told_in_events(release, engines, "Started")
    nothing_was_forbidden(release)
    found: Object = pod
    return found


async def is_told_in_events(release: Release, namespace: str, reason: str) -> None:
    """Checks that an Event on the Model has the reason, for `kubectl describe`."""
    selector = f"involvedObject.kind=Model,involvedObject.name=tiny,reason={reason}"
    while not (await release.api.get(f"/api/v1/namespaces/{namespace}/events", fieldSelector=selector))["items"]:
        await asyncio.sleep(0.05)


def nothing_was_forbidden(release: Release) -> None:
    """Checks that no autoscaler logged a missing permission: it continues without optional ones and logs that."""
    logs = [path.read_text() for path in release.logs.glob("*autoscaler*.log")]
    assert logs
    assert not [line for log in logs for line in log.splitlines() if "orbidden" in line]


@pytest.mark.standard
async def test_model_scales_from_and_to_zero_with_the_rights_of_the_chart(release: Release) -> None:
    await release.install(settings={}, autoscaler={"extraArgs": ["--ops=127.0.0.1:0"]})  # keys, as is the default
    async with asyncio.timeout(WAIT_S_MAX), tenant_key(release) as key:
        await applied(release, release.engines)
        await wakes_answers_and_sleeps(release, release.engines, key)
        conditions = (await applied(release, release.namespace, pullSecret="x"))["conditions"]
        (ready,) = (one for one in conditions if one["type"] == "Ready")
        assert (ready["reason"], ready["message"][:36]) == ("Invalid", "spec.pullSecret: uses the pods' name"), ready


async def test_gpu_model_scales_from_and_to_zero_with_namespace_rights_only(release: Release) -> None:
    here = {"kubernetes.io/hostname": release.node}
    nodes = [{"selector": here, "device": {"model": "Test-GPU", "memory": "80Gi", "count": 2}}]
    settings = {"auth": "none", "nodes": nodes}
    await release.install(scope="namespace", settings=settings)
    async with asyncio.timeout(WAIT_S_MAX):
        await applied(release, release.namespace, gpu={"memory": "20Gi", "models": ["*test*"]})
        spec = (await wakes_answers_and_sleeps(release, release.namespace))["spec"]
        assert (spec["nodeSelector"], "affinity" in spec) == (here, False), "the scheduler chose"
        assert spec["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "1"}


async def the_agent_is_heard(release: Release) -> None:
    """Waits until every autoscaler receives the agent's reports, with the token of its account in its own namespace."""
    for autoscaler in await addresses(release.api, f"{NAME}-autoscaler", release.namespace):
        async with aiohttp.ClientSession() as session:
            while True:
                async with session.get(f"http://{autoscaler}:8081/api/v1/nodes") as answer:
                    if release.node in await answer.text():
                        break
                await asyncio.sleep(0.05)


async def test_rolling_update_of_all_components_loses_no_request(release: Release) -> None:
    await models(release, tiny())
    # A client resolves, then connects: it may be paused in between, and the EndpointSlices may be written late.
    gateway: dict[str, Any] = {"preStopSeconds": 30}
    await release.install(tenantsSecret="tenants", gateway=gateway)
    over, messages = asyncio.Event(), list[tuple[int, str]]()

    async def client() -> None:
        while not over.is_set():
            address = random.choice(await addresses(release.api, f"{NAME}-gateway", release.namespace))
            messages.append(await call(f"http://{address}:8080", "tiny"))

    async with asyncio.TaskGroup() as tasks:
        clients = [tasks.create_task(client()) for _ in range(4)]
        changed = {"podAnnotations": {"changed": "yes"}}
        await release.upgrade(tenantsSecret="tenants", gateway={**changed, **gateway}, autoscaler=changed)
        over.set()
        await asyncio.gather(*clients)
    assert {status for status, _ in messages} == {200}, [one for one in messages if one[0] != 200]
    assert len(messages) > 20
    await one_of_those_that_are_left_leads(release)


async def one_of_those_that_are_left_leads(release: Release) -> None:
    lease = f"/apis/coordination.k8s.io/v1/namespaces/{release.namespace}/leases/{NAME}"
    selector = "app.kubernetes.io/component=autoscaler"
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            found = await release.api.get(f"/api/v1/namespaces/{release.namespace}/pods", labelSelector=selector)
            there = {one["metadata"]["name"] for one in found["items"] if "deletionTimestamp" not in one["metadata"]}
            holder = (await release.api.get(lease))["spec"].get("holderIdentity", "")
            if holder.partition("_")[0] in there:
                return
            await asyncio.sleep(0.05)


async def what_is_adopted_wakes_and_sleeps(release: Release, kind: str) -> None:
    """A request creates its pod, which is annotated with its replica, and succeeds; then the scale is 0 again."""
    name, path = kind.lower(), f"/apis/apps/v1/namespaces/{release.namespace}/{kind.lower()}s"
    notes = {OURS + "models": name, OURS + "idle-seconds": "600"}
    await release.api.create(path, workload(name, 0, notes, kind))
    gateway, *_ = await addresses(release.api, f"{NAME}-gateway", release.namespace)

    async def answered() -> tuple[int, str]:
        while (answer := await call(f"http://{gateway}:8080", name))[0] == 404:  # until the workload was discovered
            await asyncio.sleep(0.05)
        return answer

    waits = asyncio.create_task(answered())
    while not await marked(release, name):
        await asyncio.sleep(0.05)
    status, body = await waits
    assert (status, f"I am {name}" in body) == (200, True), body
    await release.api.patch(f"{path}/{name}", {"metadata": {"annotations": {OURS + "idle-seconds": "1"}}})
    while (await release.api.get(f"{path}/{name}"))["spec"]["replicas"]:
        await asyncio.sleep(0.05)


async def marked(release: Release, app: str) -> bool:
    """Whether a pod of it names its replica."""
    pods = await release.api.get(f"/api/v1/namespaces/{release.namespace}/pods", labelSelector=f"app={app}")
    return any(REPLICA in pod["metadata"].get("annotations", {}) for pod in pods["items"])


async def it_is_shown_whose_its_scale_is(release: Release, deployment: str) -> None:
    """Checks that a condition shows who controls the scale."""
    path = f"/apis/apps/v1/namespaces/{release.namespace}/deployments/{deployment}"
    while OURS + "Adopted" not in {
        one["type"] for one in (await release.api.get(path))["status"].get("conditions", [])
    }:
        await asyncio.sleep(0.05)


async def a_cordon_is_kept_on_its_node(release: Release) -> None:
    """Sends the requests of `pilotlight cordon` and `uncordon` to each autoscaler until the leader accepts."""
    for verb, closed in (("cordon", True), ("uncordon", False)):
        answers = list[tuple[int, str]]()
        while 200 not in [status for status, _ in answers]:  # after a pause, the Lease may have expired
            answers = []
            for autoscaler in await addresses(release.api, f"{NAME}-autoscaler", release.namespace):
                url = f"http://{autoscaler}:8081/api/v1/nodes/{release.node}/{verb}"
                async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
                    answers.append((answer.status, await answer.text()))
        assert sorted(status for status, _ in answers) == [200, 503], answers
        found = await release.api.get(f"{NODES}/{release.node}")
        assert (ANNOTATION in found["metadata"].get("annotations", {})) is closed
        assert found["spec"].get("unschedulable", False) is closed


async def test_chart_permissions_suffice_for_agents_adoption_and_cordons(release: Release) -> None:
    """With the permissions that the chart grants for adoption, cordons and agents."""
    agents = f"{release.namespace}-agents"
    changes: dict[str, Any] = {"adoption": {"namespaces": [release.namespace]}, "cordon": {"enabled": True}}
    await release.install(agent={"enabled": True, "namespace": agents}, **changes)
    async with asyncio.timeout(WAIT_S_MAX):
        await the_agent_is_heard(release)
        await asyncio.gather(
            *(what_is_adopted_wakes_and_sleeps(release, kind) for kind in ("Deployment", "StatefulSet"))
        )
        await it_is_shown_whose_its_scale_is(release, "deployment")
        await a_cordon_is_kept_on_its_node(release)
        nothing_was_forbidden(release)
    text = await asyncio.to_thread(partial(release.hook, "tests/doctor.yaml", **changes))
    pods = f"/api/v1/namespaces/{release.namespace}/pods"
    await release.api.create(pods, yaml.safe_load(text))
    async with asyncio.timeout(WAIT_S_MAX):
        while (phase := (await release.api.get(f"{pods}/{NAME}-doctor"))["status"]["phase"]) not in ENDED:
            await asyncio.sleep(0.05)
    log = next(release.logs.glob("*doctor*.log")).read_text()
    assert phase == "Succeeded", log
    assert "warning" not in log, "the chart's rights are all that it looks for"
    await release.api.delete(f"/api/v1/namespaces/{agents}")


async def definitions_can_be_changed(release: Release) -> None:
    """Takes ownership from helm, as documented: `kubectl apply --server-side --force-conflicts`."""
    definition: Object = yaml.safe_load((custom_resources.FOLDER / "models.yaml").read_text())
    path = custom_resources.definition("models")
    schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for text in ("changed", schema.get("description", "")):
        schema["description"] = text
        changed = await release.api.apply(path, definition, "kubectl")
        assert changed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["description"] == text


async def agents_get_a_certificate_of_their_own(release: Release, before: Object) -> None:
    """Autoscalers trust the CA that signs it; gateways keep their certificates."""
    agents = f"{release.namespace}-agents"
    await release.upgrade(agent={"enabled": True, "namespace": agents}, contract={"auth": "certificate"})
    async with asyncio.timeout(WAIT_S_MAX):
        await the_agent_is_heard(release)
    after = (await release.get("secrets", f"{NAME}-contract-server"))["data"]
    assert {key for key in after if after[key] != before[key]} == {"ca.crt"}
    assert base64.b64decode(after["ca.crt"]).startswith(base64.b64decode(before["ca.crt"]).strip())


@pytest.mark.standard
async def test_upgrade_keeps_certificates_and_uninstall_keeps_engine_namespace(release: Release) -> None:
    await release.install()
    await definitions_can_be_changed(release)
    secret = (await release.get("secrets", f"{NAME}-contract-server"))["data"]
    await release.upgrade(gateway={"replicas": 3})
    assert (await release.get("deployments", f"{NAME}-gateway"))["status"]["readyReplicas"] == 3
    assert (await release.get("secrets", f"{NAME}-contract-server"))["data"] == secret, "upgrades keep certificates"
    await agents_get_a_certificate_of_their_own(release, secret)
    await asyncio.to_thread(release.config.rollback, RELEASE, version=1, **WAITED)
    assert (await release.get("deployments", f"{NAME}-gateway"))["spec"]["replicas"] == 2
    await asyncio.to_thread(release.config.uninstall, RELEASE, **WAITED)
    with pytest.raises(ApiError, match="not found"):
        await release.get("deployments", f"{NAME}-gateway")
    kept = await release.api.get(f"/api/v1/namespaces/{release.engines}")
    assert kept["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted", "Models stay"


@contextlib.asynccontextmanager
async def second_release(release: Release, kubeconfig: Path) -> AsyncIterator[Release]:
    """A release of the same name in another namespace, with the same namespace of engines."""
    namespace = f"{release.namespace}-second"
    await make_namespace(release.api, namespace)
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=namespace) as config:
        yield release._replace(config=config, namespace=namespace)
        await asyncio.to_thread(config.uninstall, RELEASE, ignore_not_found=True)
    await release.api.delete(f"/api/v1/namespaces/{namespace}")


async def answers(release: Release) -> None:
    """Checks that each gateway of the release serves its Model."""
    while len(gateways := await addresses(release.api, f"{NAME}-gateway", release.namespace)) < 2:
        await asyncio.sleep(0.05)
    assert [(await call(f"http://{gateway}:8080", "tiny"))[0] for gateway in gateways] == [200, 200]


async def test_uninstall_keeps_pods_of_a_namesake_release_in_the_same_namespace(
    release: Release, kubeconfig: Path
) -> None:
    async def pods() -> dict[str, str]:
        """Uid by installation."""
        found = await release.api.get(f"/api/v1/namespaces/{release.engines}/pods")
        metadata = [one["metadata"] for one in found["items"] if "deletionTimestamp" not in one["metadata"]]
        return {one["labels"][INSTALLATION]: one["uid"] for one in metadata}

    mine = installation_id(release.namespace, NAME)
    await models(release, tiny())
    await release.install(tenantsSecret="tenants")
    async with asyncio.timeout(WAIT_S_MAX), second_release(release, kubeconfig) as other:
        await models(other, tiny())
        await other.install(tenantsSecret="tenants", engines={"namespace": release.engines, "createNamespace": False})
        await answers(release)
        await answers(other)
        before = await pods()
        assert before.keys() == {mine, installation_id(other.namespace, NAME)}
        nothing_was_forbidden(release)  # before the permissions of the second release are deleted
        await asyncio.to_thread(other.config.uninstall, RELEASE, **WAITED)
        await answers(release)
        assert (await pods())[mine] == before[mine]
