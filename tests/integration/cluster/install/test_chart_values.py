"""Each value set of the chart on a real API server: installed with helm, without waiting for pods, and uninstalled."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from pathlib import Path
from typing import Any

import helm_python
import pytest
import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.install.test_chart import loose_chart
from tests.integration.cluster.support.control_plane import custom_resources
from tests.support.chart import EVERY_SET, texts

NOT_SERVED = {
    "cert-manager.io": ("Certificate", "Issuer"),
    "monitoring.coreos.com": ("PodMonitor", "ServiceMonitor", "PrometheusRule"),
    "gateway.networking.k8s.io": ("HTTPRoute",),
}
"""Kinds by API group that this control plane does not have: it gets definitions that accept any spec."""

QUOTA = {f"{of}.{what}": most for of in ("requests", "limits") for what, most in (("cpu", "64"), ("memory", "64Gi"))}
"""This quota requires each container of a namespace to specify all four."""


def objects(values: dict[str, Any], namespace: str, name: str = "pl") -> list[Object]:
    """All rendered objects."""
    found = (part for path, part in texts(values, name, namespace).items() if path.endswith(".yaml"))
    return [one for part in found for one in yaml.load_all(part, yaml.CSafeLoader) if one]


def any_spec(group: str, kind: str) -> Object:
    """A definition of a third-party kind without rules."""
    plural = f"{kind.lower()}s"
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{plural}.{group}", "annotations": {"api-approved.kubernetes.io": "unapproved, for tests"},
        },
        "spec": {
            "group": group, "scope": "Namespaced", "names": {"kind": kind, "plural": plural}, "versions": [version],
        },
    }  # fmt: skip


def unshared(name: str, namespace: str) -> dict[str, Any]:
    """The values of a set, in which no other release uses the namespaces that the chart creates."""
    values: dict[str, Any] = yaml.safe_load(yaml.safe_dump(EVERY_SET[name]).replace("home", namespace))
    for part in ("engines", "agent"):
        values[part] = {"namespace": f"{namespace}-{part}", **values.get(part, {})}
    return values


SOME = [
    pytest.param(name, marks=[pytest.mark.standard] if number % 4 == 0 else []) for number, name in enumerate(EVERY_SET)
]
"""All value sets; each takes five seconds, so every fourth is in the standard tier."""


@pytest.mark.parametrize("name", SOME)
async def test_each_value_set_installs_and_uninstall_leaves_no_cluster_role(
    api: Api, kubeconfig: Path, tmp_path: Path, name: str
) -> None:
    release, home = f"r-{uuid.uuid4().hex[:8]}", f"chart-{uuid.uuid4().hex[:8]}"
    values = unshared(name, home)
    for group, kinds in NOT_SERVED.items():
        for kind in kinds:
            await custom_resources.install_one(api, any_spec(group, kind))
    made = objects(values, home, release)
    created = {one["metadata"]["name"] for one in made if one["kind"] == "Namespace"}
    for space in {home} | {one["metadata"].get("namespace", home) for one in made} - created:
        with contextlib.suppress(ApiError):  # another value set uses it, too
            await make_namespace(api, space)
    with helm_python.Config(kubeconfig_path=kubeconfig, namespace=home, qps=1000.0, burst_limit=1000) as config:
        await asyncio.to_thread(config.install, loose_chart(tmp_path), release, values, namespace=home)
        own = f"app.kubernetes.io/instance={release}"
        deployed = await api.get(f"/apis/apps/v1/namespaces/{home}/deployments", labelSelector=own)
        assert len(deployed["items"]) == 2
        await asyncio.to_thread(config.uninstall, release)
    for path in ("rbac.authorization.k8s.io/v1/clusterroles", "scheduling.k8s.io/v1/priorityclasses"):
        assert (await api.get(f"/apis/{path}", labelSelector=own))["items"] == []
    for space in {home} | created:
        await api.delete(f"/api/v1/namespaces/{space}")


def pods(limits: dict[str, str], namespace: str) -> list[Object]:
    """One pod of each workload and of `helm test`, all with these limits; agents in the same namespace."""
    has = {"resources": {"limits": limits}}
    agent = {**has, "enabled": True, "namespace": namespace}
    parts = {"gateway": has, "autoscaler": has, "agent": agent, "doctor": has}
    found = list[Object]()
    for one in objects(parts, namespace):
        if one["kind"] == "Pod":
            found.append(one)
        elif one["kind"] in {"Deployment", "DaemonSet"}:
            template = one["spec"]["template"]
            metadata = {"name": one["metadata"]["name"], "labels": template["metadata"]["labels"]}
            found.append({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})
    return found


async def refusal(api: Api, pod: Object, namespace: str) -> str:
    """Why a pod is rejected; empty if it is admitted (a dry run)."""
    whole = {**pod, "spec": {key: value for key, value in pod["spec"].items() if key != "serviceAccountName"}}
    try:
        await api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", whole)
    except ApiError as error:
        return error.message
    return ""


@pytest.mark.standard
async def test_chart_pods_with_limits_pass_a_quota_that_requires_limits(api: Api) -> None:
    """knative/serving#4134: with limits in the values no container lacks one; without them the quota rejects pods."""
    home = f"chart-{uuid.uuid4().hex[:8]}"
    await make_namespace(api, home)
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "q"}, "spec": {"hard": QUOTA}}
    path = f"/api/v1/namespaces/{home}/resourcequotas"
    await api.create(path, quota)
    while not (await api.get(f"{path}/q")).get("status", {}).get("hard"):
        await asyncio.sleep(0.05)
    made = pods({"cpu": "1", "memory": "1Gi"}, home)
    assert len(made) == 4
    assert [await refusal(api, one, home) for one in made] == [""] * 4
    for one in pods({}, home):
        assert "must specify limits.cpu" in await refusal(api, one, home)
    await api.delete(f"/api/v1/namespaces/{home}")
