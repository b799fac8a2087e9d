"""The documented scheduler profile with the real scheduler: a node is filled up before the next one is used."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from autoscaler.kubernetes.api import Api, Object
from tests.integration.cluster.support.kubelet.node import Node, next_number

WAIT_S_MAX = 90.0
GPUS = 4


def pod(name: str, test: str, scheduler: str) -> Object:
    """A pod that sleeps, with one GPU."""
    container = {
        "name": "a", "image": "x", "command": ["/bin/sleep", "600"],
        "resources": {"limits": {"nvidia.com/gpu": "1"}},
    }  # fmt: skip
    spec = {
        "schedulerName": scheduler, "nodeSelector": {"test": test}, "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }  # fmt: skip
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def placed(api: Api, namespace: str, name: str, scheduler: str) -> str:
    """Creates another pod and returns its node."""
    path = f"/api/v1/namespaces/{namespace}/pods"
    await api.create(path, pod(name, namespace, scheduler))
    async with asyncio.timeout(WAIT_S_MAX):
        while not (node := (await api.get(f"{path}/{name}"))["spec"].get("nodeName")):
            await asyncio.sleep(0.02)
    return str(node)


@pytest.mark.parametrize(("scheduler", "nodes_used"), [("pilotlight-fill", 1), ("default-scheduler", 2)])
async def test_documented_scheduler_profile_packs_pods_onto_fewer_nodes(
    api: Api, namespace: str, tmp_path: Path, scheduler: str, nodes_used: int
) -> None:
    async with AsyncExitStack() as stack:
        for number in range(2):
            node = Node(
                api,
                f"{namespace}-{number}",
                next_number(),
                {"nvidia.com/gpu": str(GPUS)},
                {"test": namespace},
                tmp_path,
            )
            await stack.enter_async_context(node.running())
        used = {await placed(api, namespace, f"p{number}", scheduler) for number in range(GPUS)}
        assert len(used) == nodes_used
