"""Nodes that are added for Pending pods: Cluster Autoscaler is a fake, API server and scheduler are real."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, Object
from autoscaler.providers.cluster_autoscaler.placeholder_pods import KEEPS
from autoscaler.spec.pod import PLACE
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.container import now
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.harness.driver_events import WAIT_S_MAX

GPU = "nvidia.com/gpu"
CLASSES = "/apis/scheduling.k8s.io/v1/priorityclasses"


@asynccontextmanager
async def ranked(api: Api, name: str) -> AsyncIterator[None]:
    """Creates the PriorityClass that the chart has."""
    kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
    await api.create(CLASSES, {**kind, "value": -10, "preemptionPolicy": "Never"})
    try:
        yield
    finally:
        await api.delete(f"{CLASSES}/{name}")


async def pods(api: Api, namespace: str, selector: str) -> list[Object]:
    """Pods of the engines' namespace."""
    found: list[Object] = (await api.get(f"/api/v1/namespaces/{namespace}/pods", labelSelector=selector))["items"]
    return found


async def add_event(api: Api, pod: Object, reason: str, message: str) -> None:
    """Writes an Event as Cluster Autoscaler does."""
    metadata = pod["metadata"]
    about = {"apiVersion": "v1", "kind": "Pod", **{key: metadata[key] for key in ("name", "namespace", "uid")}}
    await api.create(f"/api/v1/namespaces/{metadata['namespace']}/events", {
        "apiVersion": "v1", "kind": "Event", "metadata": {"generateName": f"{metadata['name']}."},
        "involvedObject": about, "reason": reason, "message": message, "type": "Normal", "count": 1,
        "source": {"component": "cluster-autoscaler"}, "firstTimestamp": now(), "lastTimestamp": now(),
    })  # fmt: skip


async def waiting(api: Api, namespace: str) -> Object:
    """Waits for an unschedulable placeholder and returns it."""
    while True:
        for one in await pods(api, namespace, PLACE):
            conditions = {condition["type"]: condition for condition in one["status"].get("conditions", ())}
            if conditions.get("PodScheduled", {}).get("reason") == "Unschedulable":
                return one
        await asyncio.sleep(0.05)


async def settled(api: Api, namespace: str) -> str | None:
    """Waits until no placeholder is left and returns the node of the pod that keeps capacity, or None without one."""
    while True:
        places, keepers = [
            [one for one in await pods(api, namespace, label) if "deletionTimestamp" not in one["metadata"]]
            for label in (PLACE, KEEPS)
        ]
        kept = [str(one["spec"].get("nodeName", "")) for one in keepers]
        if not places and all(kept):
            return kept[0] if kept else None
        await asyncio.sleep(0.05)


def settings(namespace: str, **fields: object) -> dict[str, object]:
    """A node group with the label `test`, and the devices of its nodes."""
    kind = {"selector": {"test": namespace}, "device": {"model": "T4", "memory": "16Gi"}}
    group = {"nodeLabels": {"test": namespace}, "nodesMax": 2, "priorityClass": namespace}
    return {"nodes": [kind], "capacity": [{"name": "t4", "clusterAutoscaler": group, "expectedSeconds": 5, **fields}]}


@pytest.mark.standard
async def test_waiting_request_creates_a_placeholder_and_runs_on_the_added_node(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    """The namespace enforces `restricted`, and both pods are admitted."""
    enforced = {"metadata": {"labels": {"pod-security.kubernetes.io/enforce": "restricted"}}}
    await api.patch(f"/api/v1/namespaces/{namespace}", enforced)
    name = f"node-{namespace}"
    node = Node(api, name, next_number(), {GPU: "1"}, {"test": namespace}, tmp_path, probe_period_s=0.05)
    house.write(model("ada", pod={"nodeSelector": {"test": namespace}}, gpu={"memory": "5Gi"}), **settings(namespace))
    async with ranked(api, namespace), house.running(), asyncio.timeout(3 * WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        calling = tasks.create_task(house.call("ada"))
        place = await waiting(api, namespace)
        assert place["metadata"]["annotations"]["pilotlight.dev/owner"] == "ada"
        assert place["spec"]["priority"] == -10
        await add_event(api, place, "TriggeredScaleUp", "pod triggered scale-up: [{t4 0->1 (max: 2)}]")
        async with node.running():
            assert (await calling)[0] == 200
            (replica,) = await pods(api, namespace, "pilotlight.dev/model=ada")
            assert replica["spec"]["nodeName"] == name
            kept = await settled(api, namespace)
            assert kept in {name, None}, "its keeper is there, or went with a placeholder that the Replica overtook"


async def test_new_placeholder_is_created_if_a_replica_uses_the_headroom_node(
    house: House, api: Api, namespace: str, tmp_path: Path
) -> None:
    name = f"node-{namespace}"
    node = Node(api, name, next_number(), {GPU: "1"}, {"test": namespace}, tmp_path, probe_period_s=0.05)
    ahead = settings(namespace, headroom=1)
    house.write(model("ada", pod={"nodeSelector": {"test": namespace}}, gpu={"memory": "5Gi"}), **ahead)
    async with ranked(api, namespace), house.running(), asyncio.timeout(3 * WAIT_S_MAX):
        place = await waiting(api, namespace)
        assert place["metadata"]["annotations"]["pilotlight.dev/owner"] == "headroom@t4"
        await add_event(api, place, "TriggeredScaleUp", "pod triggered scale-up: [{t4 0->1 (max: 2)}]")
        async with node.running():
            while [one["spec"].get("nodeName") for one in await pods(api, namespace, PLACE)] != [name]:
                await asyncio.sleep(0.05)
            assert (await house.call("ada"))[0] == 200, "it needs no node of its own"
            (replica,) = await pods(api, namespace, "pilotlight.dev/model=ada")
            assert replica["spec"]["nodeName"] == name
            assert (await waiting(api, namespace))["metadata"]["name"] != place["metadata"]["name"]
