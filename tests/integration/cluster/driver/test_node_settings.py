"""`nodes` of the Settings on a real control plane: properties that a node's labels lack, also changed at runtime."""

from __future__ import annotations

import asyncio

from autoscaler.kubernetes.api import Api
from tests.integration.cluster.support.installations.single_instance import House, model
from tests.integration.cluster.support.kubelet.node import Node

WAIT_S_MAX = 180.0


async def test_device_memory_added_in_settings_lets_a_large_model_start(
    house: House, api: Api, namespace: str, node: Node
) -> None:
    """No label states the memory of its GPUs, so no large model fits until the Settings do; no other node matches."""
    large = model("ada", gpu={"memory": "20Gi", "models": ["a10"]}, pod={"nodeSelector": {"test": node.name}})
    house.write(large)
    async with house.running() as one, asyncio.timeout(WAIT_S_MAX):
        while "no_capacity" not in (await one.call("ada"))[1]:
            await asyncio.sleep(0.05)
        others = {"selector": {"test": "another"}, "device": {"model": "H100", "memory": "80Gi"}}
        its_own = {"selector": {"test": node.name}, "device": {"model": "A10", "memory": "24Gi", "count": 2}}
        house.tell(large, nodes=[others, its_own])
        while (await one.call("ada"))[0] != 200:
            await asyncio.sleep(0.05)
        (pod,) = (await api.get(f"/api/v1/namespaces/{namespace}/pods"))["items"]
        assert pod["spec"]["nodeName"] == node.name
