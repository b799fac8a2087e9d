"""Scope `namespace` on a real control plane: declared devices, scheduler and quota messages, and disabled features.

Requests to the API server have administrator permissions here: tests/integration/cluster/install/test_chart.py verifies
that the permissions of the namespace suffice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from autoscaler.kubernetes.api import Api, Object
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node

GPU = "nvidia.com/gpu"
WAIT_S_MAX = 180.0


class Alone(House):
    """A House that may read its own namespace only."""

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, api: Api) -> None:
        super().__init__(folder, kubeconfig, namespace, "--scope", "namespace")
        self._api = api
        self._core = f"/api/v1/namespaces/{namespace}"

    async def pods(self) -> dict[str, Object]:
        """Model -> its pod."""
        found = (await self._api.get(f"{self._core}/pods", labelSelector="pilotlight.dev/model"))["items"]
        return {one["metadata"]["labels"]["pilotlight.dev/model"]: one for one in found}

    async def why(self, name: str, holds: Callable[[str], bool]) -> str:
        """Waits until `holds` is true for the output of `explain` for a model, and returns the output."""
        while True:
            async with self.session.get(f"http://127.0.0.1:{self.ops}/api/v1/explain/model/{name}") as answer:
                if answer.status == 200 and holds(response := " ".join((await answer.json())["sentences"])):
                    return response
            await asyncio.sleep(0.05)

    async def off(self) -> list[str]:
        """The disabled features."""
        async with self.session.get(f"http://127.0.0.1:{self.ops}/api/v1/off") as answer:
            messages: list[str] = (await answer.json())["sentences"]
            return messages


@pytest.fixture
def alone(tmp_path: Path, kubeconfig: Path, namespace: str, api: Api) -> Alone:
    return Alone(tmp_path, kubeconfig, namespace, api)


def declared(node: Node, **device: Any) -> Object:
    """The entry in the Settings for the test's own node, selected by its label."""
    return {"selector": {"test": node.name}, "device": {"model": "T4", "memory": "16Gi", **device}}


@pytest.mark.standard
async def test_model_with_namespace_scope_runs_on_devices_declared_in_settings(alone: Alone, node: Node) -> None:
    two: Object = {"gpu": {"count": 2, "models": ["t4"]}, "residencySeconds": 0}
    nodes = [declared(node, count=2)]
    alone.write(model("ada", **two, idleSeconds=600), nodes=nodes)
    async with alone.running() as one, asyncio.timeout(WAIT_S_MAX):
        assert (await one.call("ada"))[0] == 200
        spec = (await alone.pods())["ada"]["spec"]
        assert (spec["nodeName"], spec["nodeSelector"], "affinity" in spec) == (node.name, {"test": node.name}, False)
        assert spec["containers"][0]["resources"]["limits"] == {GPU: "2"}
        assert any("nodes are not read" in sentence for sentence in await alone.off())
        one.tell(model("ada", **two, idleSeconds=1), nodes=nodes)  # later, so that the pod is observed before
        while await alone.pods():
            await asyncio.sleep(0.05)


async def test_unschedulable_pod_blocks_further_pods_for_the_same_nodes(alone: Alone, node: Node) -> None:
    """Three nodes are declared, but there is one GPU, and then more."""
    await node.has({GPU: "1"})
    alone.write(*(model(name, idleSeconds=600) for name in ("ada", "bob", "eve")), nodes=[declared(node)] * 3)
    async with alone.running() as one, asyncio.timeout(WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        assert (await one.call("ada"))[0] == 200
        bob = tasks.create_task(one.call("bob"))
        await alone.why("bob", lambda reported: "Unschedulable" in reported)
        eve = tasks.create_task(one.call("eve"))
        reported = await alone.why("eve", lambda reported: "Not placed" in reported)
        assert "bob already waits for a node of this kind: Unschedulable" in reported
        assert sorted(await alone.pods()) == ["ada", "bob"], "no second one is ordered"
        assert not bob.done()
        assert not eve.done()
        await node.has({GPU: "3"})
        assert [(await bob)[0], (await eve)[0]] == [200, 200]


async def test_model_start_waits_while_other_pods_use_the_whole_gpu_quota(
    alone: Alone, api: Api, namespace: str, node: Node
) -> None:
    """No devices are declared: the quota determines their number, and another owner's pod has the only one."""
    core = f"/api/v1/namespaces/{namespace}"
    quota = {"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "gpus"}}
    await api.create(f"{core}/resourcequotas", {**quota, "spec": {"hard": {f"requests.{GPU}": "1"}}})
    while "used" not in (await api.get(f"{core}/resourcequotas/gpus")).get("status", {}):
        await asyncio.sleep(0.02)
    others: Object = {
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "others"},
        "spec": {
            "nodeSelector": {"not": "there"}, "terminationGracePeriodSeconds": 0,
            "containers": [{"name": "one", "image": "one", "resources": {"limits": {GPU: "1"}}}],
        },
    }  # fmt: skip
    await api.create(f"{core}/pods", others)
    alone.write(model("ada", gpu={"count": 1}))
    async with alone.running() as one, asyncio.timeout(WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        ada = tasks.create_task(one.call("ada"))
        full = f"ResourceQuota gpus allows 1 {GPU}, and all are in use"
        await alone.why(
            "ada", lambda reported: "Not placed" in reported and full in reported
        )  # the quota may be read last
        assert not await alone.pods()
        await api.delete(f"{core}/pods/others")
        assert (await ada)[0] == 200
    assert node.name


async def test_missing_permission_for_volumes_is_reported_before_any_start(alone: Alone, node: Node) -> None:
    """Volumes of node stores need a cluster-wide permission."""
    artifact: Object = {"artifact": "oci://registry.example/llama:8b"}
    alone.write(model("ada", **artifact), nodes=[declared(node)], weights={"mount": "volume"})
    async with alone.running() as one, asyncio.timeout(WAIT_S_MAX):
        reported = await alone.why(
            "ada", lambda reported: "It cannot start" in reported and "may not create Pers" in reported
        )
        assert "put them into a claim (pvc://), or set weights.mount: hostPath" in reported
        assert (await one.call("ada"))[0] == 503
        assert any("weights are mounted from claims (pvc://)" in sentence for sentence in await alone.off())
        assert not await alone.pods()
