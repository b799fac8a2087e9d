"""Nodes that are removed while requests run on them: on a real API server, announced as by Karpenter and clouds."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, Object
from tests.integration.cluster.support.entry_points import held_engine
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.harness.driver_events import WAIT_S_MAX

GPU = "nvidia.com/gpu"
TOKENS = 100


async def pods(api: Api, namespace: str) -> list[Object]:
    """Pods of replicas."""
    at = f"/api/v1/namespaces/{namespace}/pods"
    found: list[Object] = (await api.get(at, labelSelector="pilotlight.dev/model=ada"))["items"]
    return found


def name_of(pod: Object) -> str:
    """The pod's name."""
    return str(pod["metadata"]["name"])


async def asks(api: Api, namespace: str, name: str) -> bool:
    """Whether a pod has the do-not-disrupt annotation."""
    pod = await api.get(f"/api/v1/namespaces/{namespace}/pods/{name}")
    return "karpenter.sh/do-not-disrupt" in pod["metadata"]["annotations"]


async def running(house: House) -> int:
    """Requests running on replicas of ada, as reported last by gateways."""
    async with house.session.get(f"http://127.0.0.1:{house.ops}/api/v1/models/ada") as answer:
        return int((await answer.json())["demand"]["running"])


@pytest.mark.parametrize("key", ["karpenter.sh/disrupted", "aws-node-termination-handler/spot-itn"])
async def test_replica_on_a_node_tainted_for_disruption_finishes_its_request(
    house: House, api: Api, namespace: str, tmp_path: Path, key: str
) -> None:
    nodes = [
        Node(api, f"{name}-{namespace}", next_number(), {GPU: "1"}, {"test": namespace}, tmp_path, probe_period_s=0.05)
        for name in ("a", "b")
    ]
    release, knobs = tmp_path / "release", ("--tokens", str(TOKENS))
    words = held_engine.command(release, "--host", "{host}", "--port", "{port}", "--name", "ada", *knobs)
    house.write(model("ada", command=words, pod={"nodeSelector": {"test": namespace}}, slots=1))
    async with nodes[0].running(), house.running(), asyncio.timeout(3 * WAIT_S_MAX):
        first = asyncio.create_task(house.call("ada"))
        while not await running(house):
            await asyncio.sleep(0.05)
        (pod,) = await pods(api, namespace)
        while await asks(api, namespace, name_of(pod)):
            await asyncio.sleep(0.05)
        async with nodes[1].running():
            taint = {"key": key, "effect": "NoSchedule"}
            await api.patch(f"/api/v1/nodes/{nodes[0].name}", {"spec": {"taints": [taint]}})
            while not await asks(api, namespace, name_of(pod)):
                assert not first.done(), "a node that is to go waits for it"
                await asyncio.sleep(0.05)
            second = asyncio.create_task(house.call("ada"))
            while not (others := [one for one in await pods(api, namespace) if name_of(one) != name_of(pod)]):
                await asyncio.sleep(0.05)
            assert not first.done()
            release.touch()
            status, body = await first
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, TOKENS)
            assert (await second)[0] == 200
            while name_of(pod) in map(name_of, await pods(api, namespace)):
                await asyncio.sleep(0.05)
            (left,) = await pods(api, namespace)
            assert (name_of(left), left["spec"]["nodeName"]) == (name_of(others[0]), nodes[1].name)
