"""From zero and back on a real control plane: a request creates a pod, its engine responds, and then no pod is left."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.kubeconfig import load_api_access
from tests.integration.cluster.support.control_plane.admission_webhook import webhook
from tests.integration.cluster.support.control_plane.event_loss_proxy import Lossy
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node


@pytest.mark.standard
async def test_request_with_no_replica_creates_a_pod_that_is_deleted_when_idle(
    house: House, api: Api, namespace: str, node: Node
) -> None:
    house.write(model("ada", idleSeconds=600, residencySeconds=0))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    async with house.running() as one, asyncio.timeout(180):
        status, body = await one.call("ada")
        assert (status, "I am ada" in body) == (200, True), body
        (pod,) = (await api.get(pods))["items"]
        assert pod["spec"]["nodeName"] == node.name
        one.tell(model("ada", idleSeconds=1, residencySeconds=0))  # later, so that the pod is observed before
        while (await api.get(pods))["items"]:
            await asyncio.sleep(0.05)


async def test_pods_survive_an_autoscaler_restart_and_are_adopted(
    house: House, api: Api, namespace: str, node: Node
) -> None:
    house.write(model("ada", idleSeconds=600))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    async with asyncio.timeout(180):
        async with house.running() as one:
            assert (await one.call("ada"))[0] == 200
            (first,) = (await api.get(pods))["items"]
        async with house.running() as one:
            assert (await one.call("ada"))[0] == 200
            (second,) = (await api.get(pods))["items"]
        assert first["metadata"]["uid"] == second["metadata"]["uid"], "no second start"
        assert node.name == second["spec"]["nodeName"]


async def test_request_is_answered_after_a_webhook_delay_longer_than_the_lease(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    """K11, kubernetes#128162: a webhook that hangs, with failurePolicy Ignore, for 20 s; the Lease has 15 s."""
    house.write(model("ada"))
    async with house.running() as one, webhook(api, namespace, tmp_path, delay_s=600, timeout_s=20):
        async with asyncio.timeout(120):
            assert (await one.call("ada"))[0] == 200
        assert len((await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]) == 1, node.name


async def test_request_is_answered_despite_an_etcd_leader_change(
    api: Api, kubeconfig: Path, namespace: str, node: Node, tmp_path: Path
) -> None:
    """K02, carvel-dev/kapp#106: the first write of the pod gets 500 `etcdserver: leader changed`."""
    lossy = Lossy(await load_api_access(kubeconfig))
    async with lossy.running(tmp_path) as way, asyncio.timeout(120):
        house = House(tmp_path, way, namespace)
        house.write(model("ada"))
        async with house.running() as one:
            lossy.fails = 1
            assert (await one.call("ada"))[0] == 200
    assert lossy.fails == 0
    assert [one["spec"]["nodeName"] for one in (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]] == [
        node.name
    ]


async def test_request_is_answered_once_an_unavailable_webhook_returns(
    house: House, api: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    """K01, istio#10983: its Service has no endpoint for a moment."""
    house.write(model("ada"))
    async with house.running() as one, webhook(api, namespace, tmp_path, listens=False) as listen, asyncio.timeout(120):
        call = asyncio.create_task(one.call("ada"))
        while "failed calling webhook" not in await one.read_ops("explain/model/ada"):
            await asyncio.sleep(0.05)
        await listen()
        assert (await call)[0] == 200
        assert len((await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]) == 1, node.name
