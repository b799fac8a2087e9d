"""`pilotlight doctor` against a real control plane: the report for an admin, and missing permissions of an account."""

from __future__ import annotations

import asyncio
import base64
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from autoscaler.capacity.attachable_nodes import GPU_COUNT, OWNER_KIND, OWNER_NAME, OWNER_NAMESPACE
from autoscaler.kubernetes.api import MERGE, Api
from autoscaler.kubernetes.constants import NODES
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.kubernetes.rbac import list_required_rights
from autoscaler.providers.redfish import client
from pilotlight.cli.main import cli
from pilotlight.doctor.capacity import NO_MOST
from pilotlight.doctor.cluster_checks import Scene, check_cluster
from pilotlight.doctor.finding import Finding, has_blocker
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.control_plane.service_accounts import make_account, token
from tests.integration.cluster.support.controllers.fake_cluster_autoscaler import SETS, machine_set
from tests.integration.cluster.support.kubelet.node import Node
from tests.support.fakes.redfish import PASSWORD, USER, FakeFabric
from tests.support.net import certificates


async def account_kubeconfig(api: Api, admin: Path, namespace: str, name: str, folder: Path) -> Path:
    """Writes a kubeconfig with a bound token of a service account of that name."""
    await make_account(api, namespace, name)
    config: dict[str, Any] = yaml.safe_load(admin.read_text())
    config["users"] = [
        {"name": config["contexts"][0]["context"]["user"], "user": {"token": await token(api, namespace, name)}}
    ]
    path = folder / "account.kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return path


def by_check(findings: list[Finding]) -> dict[str, Finding]:
    return {one.check: one for one in findings}


def scene(namespace: str, **fields: Any) -> Scene:
    return Scene(**{"engines": namespace, "home": namespace, "scope": "cluster", **fields})


@pytest.mark.usefixtures("served")
@pytest.mark.standard
async def test_doctor_finds_no_blocker_with_admin_rights(api: Api, namespace: str, node: Node) -> None:
    findings = await check_cluster(api, scene(namespace))
    found = by_check(findings)
    assert not has_blocker(findings), findings
    assert found["API server"].says.startswith("Kubernetes v")
    for check in ("Model definition", "Tenant definition", "rights", "engine pods", "GPUs"):
        assert found[check].grade == "ok", found[check]
    assert found["Model definition"].says == "installed, with all fields of this version of Pilotlight"
    assert found["GPU labels"].grade == "warning", "the node has none"
    assert node.name in found["GPU labels"].says
    assert not (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"], "the pod was a dry run"


@pytest.mark.usefixtures("served")
async def test_each_missing_right_of_a_service_account_is_reported(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    path = await account_kubeconfig(api, kubeconfig, namespace, "bare", tmp_path)
    async with Api(await load_api_access(path)) as bare:
        findings = await check_cluster(bare, scene(namespace))
        asked_by_admin = await check_cluster(api, scene(namespace, account=f"{namespace}:bare"))
    assert has_blocker(findings)
    missing = [one for one in findings if one.check == "rights"]
    assert len(missing) == len(list_required_rights("cluster"))
    for right, one in zip(list_required_rights("cluster"), missing, strict=True):
        assert right.use in one.says
        assert f"resources: [{right.resource}], verbs: [{', '.join(right.verbs)}]" in one.fix
        assert one.grade == ("warning" if right.optional else "blocker")
    assert [one for one in asked_by_admin if one.check == "rights"] == missing, "an admin may ask for it"
    assert by_check(findings)["Model definition"].grade == "ok", "what may be seen is seen"
    assert by_check(findings)["nodes"].says.startswith("the check failed")


@pytest.mark.usefixtures("served")
async def test_machine_set_annotation_satisfies_the_device_maximum_check(api: Api, namespace: str, node: Node) -> None:
    await custom_resources.install_foreign(api, "cro")
    at = scene(namespace, capacity=("cro",))
    assert NO_MOST in [one.says for one in await check_cluster(api, at)]
    await machine_set(api, namespace, {GPU_COUNT: "4"})
    of = {OWNER_KIND: "MachineSet", OWNER_NAME: namespace, OWNER_NAMESPACE: namespace}
    await api.patch(f"{NODES}/{node.name}", {"metadata": {"annotations": of}})
    assert NO_MOST not in [one.says for one in await check_cluster(api, at)]
    await api.delete(f"{SETS.format(namespace)}/{namespace}")


async def test_doctor_reports_a_namespace_that_admits_no_engine_pod_as_blocker(api: Api, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await api.create(f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    async with asyncio.timeout(90):
        while by_check(await check_cluster(api, scene(namespace)))["engine pods"].grade == "ok":
            await asyncio.sleep(0.1)  # until the quota controller has counted
    found = by_check(await check_cluster(api, scene(namespace)))["engine pods"]
    assert (found.grade, "quota" in found.says) == ("blocker", True), found
    absent = by_check(await check_cluster(api, scene("not-there")))["engine pods"]
    assert (absent.grade, absent.fix) == ("blocker", "kubectl create namespace not-there")


@pytest.mark.standard
async def test_doctor_command_on_a_reachable_cluster_reports_the_api_server_ok(
    kubeconfig: Path, namespace: str
) -> None:
    words = ["doctor", "--driver", "kubernetes", "--kubeconfig", str(kubeconfig), "--namespace", namespace]
    done = await asyncio.to_thread(CliRunner().invoke, cli, words, prog_name="pilotlight")
    assert "ok       API server" in done.output


async def test_unreachable_api_server_is_the_only_problem_reported(tmp_path: Path) -> None:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "x", "user": {"token": base64.b64encode(b"x").decode()}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    async with Api(await load_api_access(tmp_path / "config")) as api:
        (only,) = await check_cluster(api, scene("x"))
    assert (only.check, only.grade) == ("API server", "blocker")


NAMED = ("rack", "dws", "pool", "group", "pod2")
CAPACITY = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
  - selector: {example.com/doctor: "1"}
    device: {model: NVIDIA-A100, memory: 40Gi, count: 1}
    devicesMax: 4
capacity:
  - {name: rack, cro: {model: NVIDIA-A100}}
  - {name: dws, provisioningRequest: {class: queued-provisioning.gke.io, selector: {example.com/doctor: "1"}}}
  - {name: pool, karpenter: {nodePool: nobodys}}
  - {name: group, clusterAutoscaler: {nodeLabels: {example.com/doctor: "1"}, priorityClass: nobodys}}
  - name: pod2
    redfish: {url: "URL", secretRef: fabric, systems: {w1: /redfish/v1/Systems/1}}
"""


@pytest.mark.usefixtures("served")
async def test_doctor_reports_a_grade_for_each_capacity_provider_in_settings(
    api: Api, kubeconfig: Path, namespace: str, node: Node, tmp_path: Path, *, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("CONNECT_S_MAX", "READ_S_MAX"):
        monkeypatch.setattr(client, limit, 60.0)  # this process, which also runs the fabric, may be paused for 20 s
    for foreign in ("cro", "autoscaling"):
        await custom_resources.install_foreign(api, foreign)
    await api.patch(f"/api/v1/nodes/{node.name}", {"metadata": {"labels": {"example.com/doctor": "1"}}}, MERGE)
    await api.create(f"/api/v1/namespaces/{namespace}/secrets", {
        "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "fabric"},
        "stringData": {"username": USER, "password": PASSWORD, "ca.crt": certificates.pem(certificates.OURS)},
    })  # fmt: skip
    file = tmp_path / "settings.yaml"
    words = ["--driver", "kubernetes", "--kubeconfig", str(kubeconfig), "--namespace", namespace]
    async with FakeFabric().serving(certificates.sides().server) as fabric:
        file.write_text(CAPACITY.replace("URL", fabric.url))
        done = await asyncio.to_thread(
            CliRunner().invoke, cli, ["doctor", *words, "--settings", str(file), "--output", "json"]
        )
    found = {one["check"]: one for one in json.loads(done.output)}
    grades = {name: (found[f"capacity {name}"]["grade"], found[f"capacity {name}"]["says"]) for name in NAMED}
    assert grades == {
        "rack": ("ok", f"the CustomResourceDefinitions are installed; GPUs can be attached to {node.name}"),
        "dws": ("ok", grades["dws"][1]),
        "pool": ("blocker", grades["pool"][1]),
        "group": ("blocker", "PriorityClass nobodys does not exist, so placeholder pods cannot be created"),
        "pod2": (
            "ok",
            (
                f"the Redfish service accepts the user of Secret fabric of namespace {namespace}; "
                "it has 3 GPUs, and the systems of all configured nodes (1)"
            ),
        ),
    }
    assert grades["pool"][1].startswith(("Karpenter: nodepools", "NodePool nobodys does not exist"))
    assert done.exit_code == 1
    assert PASSWORD not in done.output
    assert "127.0.0.1" not in done.output
    kept = {one["metadata"]["name"] for one in (await api.get(f"/api/v1/namespaces/{namespace}/configmaps"))["items"]}
    assert "pilotlight-fabric" not in kept, "nothing is changed"
