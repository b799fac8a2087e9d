"""Weights out of a registry in a cluster: each node's agent brings them, and a pod is made when they are there."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from artifacts.store import Store
from autoscaler.drivers.kubernetes import weights
from autoscaler.drivers.kubernetes.api import Api
from tests.cluster import definitions
from tests.cluster.definitions import models
from tests.cluster.house import House, process
from tests.cluster.kubelet.node import Node
from tests.kit import packed
from tests.kit.fake_process import command

LOADS = """import os, sys
with open(sys.argv[1], 'rb') as file:
    if file.read(4) != b'GGUF':
        sys.exit('these are no weights')
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
"""An engine that reads its weights, as all do, and then is the fake one."""
CONTENT = b"GGUF" + bytes(range(256)) * 4000


def ada(host: str, **spec: Any) -> dict[str, Any]:
    """A Model with these weights, for one GPU."""
    fake = command("--host", "{host}", "--port", "{port}", "--name", "ada")
    words = [sys.executable, "-c", LOADS, "{model_path}", *fake[1:]]
    return definitions.model("ada", **{
        "image": "fake-engine", "command": words, "gpu": {"memory": "1Gi"}, "artifact": f"oci://{host}/{packed.NAME}:v1",
        "idleSeconds": 1, "residencySeconds": 0, **spec,
    })  # fmt: skip


class Scene:
    """A house, a node, the agent on it, and a registry."""

    def __init__(self, house: House, api: Api, namespace: str, node: Node, folder: Path) -> None:
        self.house, self.node, self.store = house, node, folder / "store"
        self._api, self._folder = api, folder
        self._pods = f"/api/v1/namespaces/{namespace}/pods"
        node.shown[weights.STORE] = self.store

    @asynccontextmanager
    async def agent(self) -> AsyncIterator[asyncio.subprocess.Process]:
        way = f"unix:{self._folder / 'contract.sock'}"
        words = ("--node", self.node.name, "--autoscaler", way, "--store", str(self.store))
        nowhere = str(self._folder / "no.sock")
        async with process(self._folder / "agent.log", "agent", *words, "--pod-resources", nowhere) as one:
            yield one

    async def pods(self) -> list[dict[str, Any]]:
        return list((await self._api.get(self._pods))["items"])

    async def at_zero(self) -> None:
        while await self.pods():
            await asyncio.sleep(0.05)

    async def ops(self, path: str) -> Any:
        async with self.house.session.get(f"http://127.0.0.1:{self.house.ops}/api/v1/{path}") as answer:
            return await answer.json()

    async def answers(self) -> dict[str, float]:
        """A Call is answered; the phases of the start."""
        status, said = await self.house.call("ada")
        assert (status, "I am ada" in said) == (200, True), said
        return dict((await self.ops("models/ada"))["last_start_phases"])


def layout(folder: Path) -> Path:
    packed.packed(packed.model(folder / "model", {"ada.gguf": CONTENT}), folder / "layout")
    return folder / "layout"


async def test_weights_are_brought_by_the_agent_of_the_node_and_stay_for_the_next_start(
    house: House, served: Api, namespace: str, node: Node, tmp_path: Path
) -> None:
    scene = Scene(house, served, namespace, node, tmp_path)
    house.write()
    with contextlib.ExitStack() as stack:
        host = stack.enter_context(packed.served(layout(tmp_path)))
        await served.create(models(namespace), ada(host))
        async with house.running(), scene.agent(), asyncio.timeout(180):
            first = await scene.answers()
            assert {"decide", "pull", "place", "load"} <= set(first)
            (pod,) = await scene.pods()
            (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == weights.VOLUME]
            (row,) = Store(scene.store).rows()
            assert volume["hostPath"]["path"].startswith(f"{weights.STORE}/copies/")
            assert row.in_use, "the agent holds it"
            await scene.at_zero()
            stack.close()  # the registry is away
            again = await scene.answers()
            assert again["pull"] < first["pull"]
