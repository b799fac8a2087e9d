"""Each value set of the chart on a real API server: every object that it renders is admitted (a dry run of each)."""

from __future__ import annotations

import contextlib
import functools
import uuid
from typing import Any

import pytest
import yaml

from autoscaler.drivers.kubernetes.api import Api, ApiError, Object
from tests.cluster.conftest import make_namespace
from tests.kit.chart import SETS, texts

NOT_SERVED = frozenset({"Certificate", "Issuer", "PodMonitor", "ServiceMonitor", "PrometheusRule", "HTTPRoute"})
"""Kinds of cert-manager, the Prometheus operator and the Gateway API, which this control plane does not have."""
HOOKS = "helm.sh/hook"


@functools.cache
def rendered(name: str, namespace: str) -> tuple[Object, ...]:
    """What is installed: without hooks, in a namespace that is there."""
    values: dict[str, Any] = SETS[name]
    text = yaml.safe_dump(values).replace("home", namespace)
    found = (part for path, part in texts(yaml.safe_load(text), namespace=namespace).items() if path.endswith(".yaml"))
    objects = [one for part in found for one in yaml.load_all(part, yaml.CSafeLoader) if one]
    return tuple(one for one in objects if HOOKS not in one["metadata"].get("annotations", {}))


async def collection(api: Api, one: Object) -> str:
    """The path of its kind. Raises KeyError where the server does not serve it."""
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
async def test_every_object_of_a_value_set_is_admitted(api: Api, name: str) -> None:
    """Namespaces are made, because a dry run makes none."""
    home = f"chart-{uuid.uuid4().hex[:8]}"
    objects = rendered(name, home)
    assert len(objects) > 10
    await make_namespace(api, home)
    spaces = {one["metadata"].get("namespace", "") for one in objects} - {home, ""}
    there = {one["metadata"]["name"] for one in (await api.get("/api/v1/namespaces"))["items"]}
    for space in spaces - there:
        with contextlib.suppress(ApiError):  # another test makes it
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
