"""Two installations in one cluster, which share the namespace of their engines."""

from __future__ import annotations

import asyncio
from pathlib import Path

from autoscaler.drivers.kubernetes.api import Api, Object
from autoscaler.ownership import INSTALLATION, identity
from tests.cluster.house import House, model
from tests.cluster.kubelet.node import Node

ROUNDS = 40


def house_of(folder: Path, kubeconfig: Path, namespace: str, *words: str) -> House:
    folder.mkdir()
    return House(folder, kubeconfig, namespace, *words)


async def pods_of(api: Api, namespace: str) -> dict[str, Object]:
    """By Model."""
    found = (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
    return {one["metadata"]["labels"]["pilotlight.dev/model"]: one for one in found}


async def test_each_leaves_the_pods_of_the_other_alone(
    tmp_path: Path, kubeconfig: Path, namespace: str, api: Api, node: Node
) -> None:
    blue = house_of(tmp_path / "blue", kubeconfig, namespace)
    green = house_of(tmp_path / "green", kubeconfig, namespace, "--lease", "other")
    blue.write(model("ada", idleSeconds=600))
    green.write(model("bob", idleSeconds=600), model("cat", idleSeconds=1, residencySeconds=0))
    async with asyncio.timeout(180), blue.running() as one:
        assert (await one.call("ada"))[0] == 200
        before = await pods_of(api, namespace)
        async with green.running() as two:
            assert (await two.call("bob"))[0] == 200
            assert (await two.call("cat"))[0] == 200
            for _ in range(ROUNDS):
                assert [(await one.call("ada"))[0], (await two.call("bob"))[0]] == [200, 200]
            while "cat" in (after := await pods_of(api, namespace)):
                await asyncio.sleep(0.05)
        assert after["ada"]["metadata"]["uid"] == before["ada"]["metadata"]["uid"]
        owners = [after[name]["metadata"]["labels"][INSTALLATION] for name in ("ada", "bob")]
        assert owners == [identity(namespace, "pilotlight"), identity(namespace, "other")]
        assert all(pod["spec"]["nodeName"] == node.name for pod in after.values())


async def test_pods_without_the_label_are_taken_over_and_serve_on(
    house: House, namespace: str, api: Api, node: Node
) -> None:
    house.write(model("ada", idleSeconds=600))
    async with asyncio.timeout(180), house.running() as one:
        assert (await one.call("ada"))[0] == 200
        pod = (await pods_of(api, namespace))["ada"]
        path = f"/api/v1/namespaces/{namespace}/pods/{pod['metadata']['name']}"
        await one.autoscaler_anew(lambda: api.patch(path, {"metadata": {"labels": {INSTALLATION: None}}}))
        while INSTALLATION not in (after := await api.get(path))["metadata"]["labels"]:
            await asyncio.sleep(0.05)
        assert (await one.call("ada"))[0] == 200
        assert after["metadata"]["uid"] == pod["metadata"]["uid"]
        assert [*await pods_of(api, namespace)] == ["ada"]
        assert after["spec"]["nodeName"] == node.name
