"""Two installations in one cluster that share the namespace of their engines and read the same Models."""

from __future__ import annotations

import asyncio
from pathlib import Path

from autoscaler.kubernetes.api import Api, Object
from autoscaler.spec.installation_ownership import INSTALLATION, installation_id
from tests.integration.cluster.support.control_plane import custom_resources
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node

ROUNDS = 40


def house_of(folder: Path, kubeconfig: Path, namespace: str, *words: str) -> House:
    folder.mkdir()
    return House(folder, kubeconfig, namespace, *words)


async def pods_of(api: Api, namespace: str) -> dict[str, Object]:
    """Model -> its pod."""
    found = (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
    return {one["metadata"]["labels"]["pilotlight.dev/model"]: one for one in found}


async def test_two_installations_in_one_namespace_delete_no_pods_of_each_other(
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
        assert owners == [installation_id(namespace, "pilotlight"), installation_id(namespace, "other")]
        assert all(pod["spec"]["nodeName"] == node.name for pod in after.values())


async def test_pods_without_the_installation_label_are_adopted(
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


async def conditions(api: Api, namespace: str, name: str) -> dict[str, str]:
    """Condition type -> message, of a Model."""
    found = await api.get(f"{custom_resources.models(namespace)}/{name}")
    return {one["type"]: one["message"] for one in found.get("status", {}).get("conditions", ())}


async def until_answers(house: House, name: str, status: int) -> None:
    """Waits until the gateway responds with this status, which shows whether its installation serves the model."""
    while (await house.call(name))[0] != status:
        await asyncio.sleep(0.05)


async def test_model_read_by_two_installations_is_served_by_only_one_of_them(
    tmp_path: Path, kubeconfig: Path, namespace: str, api: Api, node: Node
) -> None:
    """One is cluster-wide, and one of the Model's namespace is installed later. Then the Model selects the latter."""
    await custom_resources.install(api)
    await api.create(custom_resources.models(namespace), model("ada", gpu={"count": 0}, idleSeconds=600))
    wide = house_of(tmp_path / "wide", kubeconfig, namespace)
    narrow = house_of(tmp_path / "narrow", kubeconfig, namespace, "--lease", "other", "--scope", "namespace")
    for house in (wide, narrow):
        house.write()
    async with asyncio.timeout(180), wide.running() as one:
        await until_answers(one, "ada", 200)
        async with narrow.running() as two:
            assert (await two.call("ada"))[0] == 404
            while "ServedElsewhere" not in (found_conditions := await conditions(api, namespace, "ada")):
                await asyncio.sleep(0.05)
            assert found_conditions["ServedElsewhere"].startswith(
                f"installation {namespace}/pilotlight serves the Models of"
            )
            while (await conditions(api, namespace, "ada")).get("Ready") != "1 replica serves requests":  # by the other
                await asyncio.sleep(0.05)
            (pod,) = (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
            assert pod["metadata"]["labels"][INSTALLATION] == installation_id(namespace, "pilotlight")
            named = {"spec": {"installation": f"{namespace}/other"}}
            await api.patch(f"{custom_resources.models(namespace)}/ada", named)
            await until_answers(two, "ada", 200)
            await until_answers(one, "ada", 404)
            why = f"spec.installation is {namespace}/other"
            while why not in (await conditions(api, namespace, "ada")).get("ServedElsewhere", ""):
                await asyncio.sleep(0.05)
            while len(pods := (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]) > 1:
                await asyncio.sleep(0.05)
            assert pods[0]["metadata"]["labels"][INSTALLATION] == installation_id(namespace, "other")
            assert pods[0]["spec"]["nodeName"] == node.name
