"""Each value set of the chart on a real API server: every object that it renders is admitted (a dry run of each)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import uuid
from typing import Any

import pytest
import yaml

from autoscaler.kubernetes.api import Api, ApiError, Object
from tests.integration.cluster.conftest import make_namespace
from tests.support.chart import SETS, texts

NOT_SERVED = frozenset({"Certificate", "Issuer", "PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute"})
"""Kinds of cert-manager, the Prometheus operator and the Gateway API, which this control plane does not have."""
HOOKS = "helm.sh/hook"


QUOTA = {f"{of}.{what}": most for of in ("requests", "limits") for what, most in (("cpu", "64"), ("memory", "64Gi"))}
"""This quota requires each container of a namespace to specify all four."""


@functools.cache
def rendered(name: str, namespace: str) -> tuple[Object, ...]:
    """The objects that helm installs: without hooks, in an existing namespace."""
    text = yaml.safe_dump(SETS[name]).replace("home", namespace)
    return tuple(
        one for one in objects(yaml.safe_load(text), namespace) if HOOKS not in one["metadata"].get("annotations", {})
    )


def objects(values: dict[str, Any], namespace: str) -> list[Object]:
    """All rendered objects."""
    found = (part for path, part in texts(values, namespace=namespace).items() if path.endswith(".yaml"))
    return [one for part in found for one in yaml.load_all(part, yaml.CSafeLoader) if one]


async def collection(api: Api, one: Object) -> str:
    """The path of the object's kind. Raises KeyError if the server does not serve it."""
    version = one["apiVersion"]
    root = f"/apis/{version}" if "/" in version else f"/api/{version}"
    try:
        kinds = {found["kind"]: found for found in (await api.get(root))["resources"] if "/" not in found["name"]}
    except ApiError as error:
        if error.status != 404:
            raise
        kinds = {}
    kind = kinds[one["kind"]]
    within = f"/namespaces/{one['metadata']['namespace']}" if kind["namespaced"] else ""
    return f"{root}{within}/{kind['name']}"


@pytest.mark.standard
@pytest.mark.parametrize("name", SETS)
async def test_api_server_admits_every_rendered_object_of_a_value_set(api: Api, name: str) -> None:
    """Namespaces are created for real, because a dry run creates none."""
    home = f"chart-{uuid.uuid4().hex[:8]}"
    objects = rendered(name, home)
    assert len(objects) > 10
    await make_namespace(api, home)
    spaces = {one["metadata"].get("namespace", "") for one in objects} - {home, ""}
    there = {one["metadata"]["name"] for one in (await api.get("/api/v1/namespaces"))["items"]}
    for space in spaces - there:
        with contextlib.suppress(ApiError):  # another test may create it
            await make_namespace(api, space)
    unserved = set[str]()
    for one in objects:
        try:
            path = await collection(api, one)
        except KeyError:
            unserved.add(one["kind"])
            continue
        admitted = await api.apply(f"{path}/{one['metadata']['name']}?dryRun=All", one, "chart")
        assert admitted["metadata"]["name"] == one["metadata"]["name"]
    assert unserved <= NOT_SERVED
    await api.delete(f"/api/v1/namespaces/{home}")


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
