"""`pilotlight doctor` against a real control plane: what an admin sees, and what a service account lacks."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from autoscaler.drivers.kubernetes.access import access
from autoscaler.drivers.kubernetes.api import Api
from autoscaler.drivers.kubernetes.rights import rights
from pilotlight.checks import Finding, blocked
from pilotlight.checks_cluster import Scene, cluster
from pilotlight.cli import cli
from tests.cluster.accounts import make_account, token
from tests.cluster.kubelet.node import Node


async def account_kubeconfig(api: Api, admin: Path, namespace: str, name: str, folder: Path) -> Path:
    """A kubeconfig with a bound token of a service account of that name."""
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
async def test_an_admin_finds_everything_there(api: Api, namespace: str, node: Node) -> None:
    findings = await cluster(api, scene(namespace))
    found = by_check(findings)
    assert not blocked(findings), findings
    assert found["API server"].says.startswith("Kubernetes v")
    for check in ("Model definition", "Tenant definition", "rights", "engine pods", "GPUs"):
        assert found[check].grade == "ok", found[check]
    assert found["Model definition"].says == "of this version"
    assert found["GPU labels"].grade == "warning", "the node has none"
    assert node.name in found["GPU labels"].says
    assert not (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"], "the pod was a dry run"


@pytest.mark.usefixtures("served")
async def test_a_service_account_without_rights_hears_each_that_is_missing(
    api: Api, kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    path = await account_kubeconfig(api, kubeconfig, namespace, "bare", tmp_path)
    async with Api(await access(path)) as bare:
        findings = await cluster(bare, scene(namespace))
        asked_by_admin = await cluster(api, scene(namespace, account=f"{namespace}:bare"))
    assert blocked(findings)
    missing = [one for one in findings if one.check == "rights"]
    assert len(missing) == len(rights("cluster"))
    for right, one in zip(rights("cluster"), missing, strict=True):
        assert right.use in one.says
        assert f"resources: [{right.resource}], verbs: [{', '.join(right.verbs)}]" in one.fix
        assert one.grade == ("warning" if right.optional else "blocker")
    assert [one for one in asked_by_admin if one.check == "rights"] == missing, "an admin may ask for it"
    assert by_check(findings)["Model definition"].grade == "ok", "what may be seen is seen"
    assert by_check(findings)["nodes"].says.startswith("cannot be looked at")


async def test_a_namespace_that_admits_no_engine_is_a_blocker(api: Api, namespace: str) -> None:
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "none"}, "spec": {"hard": {"pods": "0"}}}
    await api.create(f"/api/v1/namespaces/{namespace}/resourcequotas", quota)
    async with asyncio.timeout(90):
        while by_check(await cluster(api, scene(namespace)))["engine pods"].grade == "ok":
            await asyncio.sleep(0.1)  # until the quota is counted
    found = by_check(await cluster(api, scene(namespace)))["engine pods"]
    assert (found.grade, "quota" in found.says) == ("blocker", True), found
    absent = by_check(await cluster(api, scene("not-there")))["engine pods"]
    assert (absent.grade, absent.fix) == ("blocker", "kubectl create namespace not-there")


async def test_the_command_says_it_line_by_line(kubeconfig: Path, namespace: str) -> None:
    words = ["doctor", "--driver", "kubernetes", "--kubeconfig", str(kubeconfig), "--namespace", namespace]
    done = await asyncio.to_thread(CliRunner().invoke, cli, words, prog_name="pilotlight")
    assert "ok       API server" in done.output


async def test_a_server_that_is_not_there_is_one_blocker(tmp_path: Path) -> None:
    config = {
        "apiVersion": "v1", "kind": "Config", "current-context": "x",
        "clusters": [{"name": "x", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "x", "user": {"token": base64.b64encode(b"x").decode()}}],
        "contexts": [{"name": "x", "context": {"cluster": "x", "user": "x"}}],
    }  # fmt: skip
    (tmp_path / "config").write_text(yaml.safe_dump(config))
    async with Api(await access(tmp_path / "config")) as api:
        (only,) = await cluster(api, scene("x"))
    assert (only.check, only.grade) == ("API server", "blocker")
