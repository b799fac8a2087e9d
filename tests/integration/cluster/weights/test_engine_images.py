"""Engine images in a cluster: replicas start on nodes that have the image, and agents pull images ahead of starts."""

from __future__ import annotations

import asyncio
from pathlib import Path

from autoscaler.kubernetes.api import MERGE, Api
from tests.integration.cluster.placement.test_schedulability import pair
from tests.integration.cluster.support.installations.single_instance import House, model, process
from tests.integration.cluster.support.kubelet.node import Node
from tests.unit.pilotlight.agent.kubelet.test_image_pull import Runtime

ENGINE, FULL = "vllm/engine:1", "docker.io/vllm/engine:1"


async def test_model_is_placed_on_the_node_that_already_has_its_image(
    api: Api, tmp_path: Path, kubeconfig: Path, namespace: str
) -> None:
    house = House(tmp_path, kubeconfig, namespace)
    async with pair(api, house, namespace, tmp_path) as one:
        images = [{"names": [f"{FULL}@sha256:{'a' * 64}", FULL], "sizeBytes": 9 << 30}]
        await api.patch(f"/api/v1/nodes/{one.second.name}/status", {"status": {"images": images}}, MERGE)
        assert await one.answers_from(image=ENGINE) == one.second.name


async def test_agent_pre_pulls_the_image_of_a_model_with_minimum_replicas(
    house: House, node: Node, tmp_path: Path
) -> None:
    runtime = Runtime(tmp_path / "cri.sock")
    house.write(model("ada", image=ENGINE, replicas={"min": 1}))
    words = ("--node", node.name, "--autoscaler", f"unix:{tmp_path / 'contract.sock'}", "--store", str(tmp_path / "w"),
             "--runtime", str(runtime.path), "--pod-resources", str(tmp_path / "no.sock"))  # fmt: skip
    agent = process(tmp_path / "agent.log", "agent", *words)
    async with runtime.running(), agent, house.running(), asyncio.timeout(180):
        await runtime.began.acquire()
    assert runtime.asked[0] == (ENGINE, None)
