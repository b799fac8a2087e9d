"""From zero and back on a real control plane: a Call makes a pod, its engine answers, and then nothing is left."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import yaml

from autoscaler.drivers.kubernetes.api import Api
from tests.cluster.kubelet.node import Node
from tests.cluster.plane import free_ports
from tests.kit.fake_process import command

WAIT_S_MAX = 30.0


@asynccontextmanager
async def process(log: Path, *words: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """`pilotlight WORDS`, ended at the end."""
    with log.open("wb") as output:
        one = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pilotlight", *words, stdout=output, stderr=output, env=dict(os.environ)
        )
    try:
        yield one
    finally:
        if one.returncode is None:
            one.terminate()
        await asyncio.wait_for(one.wait(), WAIT_S_MAX)


class House:
    """One autoscaler and one gateway, as processes, and the documents that they were given."""

    def __init__(self, folder: Path, kubeconfig: Path, namespace: str, *words: str) -> None:
        self._folder = folder
        self._words = ("--driver", "kubernetes", "--kubeconfig", str(kubeconfig), "--namespace", namespace, *words)
        self.listen, self.ops, self._gateway_ops = free_ports(3)
        self.url = f"http://127.0.0.1:{self.listen}"

    def write(self, *documents: dict[str, object], **more: object) -> None:
        """The documents; `more` of the Settings."""
        settings = {"apiVersion": "pilotlight.dev/v1alpha1", "kind": "Settings", "auth": "none", **more}
        (self._folder / "documents.yaml").write_text(yaml.safe_dump_all([settings, *documents]))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[House]:
        """Until the gateway answers."""
        folder, socket = self._folder, str(self._folder / "contract.sock")
        async with AsyncExitStack() as stack:
            scaler = ("autoscaler", *self._words, "--documents", str(folder / "documents.yaml"))
            self.autoscaler = await stack.enter_async_context(
                process(
                    folder / "autoscaler.log", *scaler, "--contract-socket", socket,
                    "--ops", f"127.0.0.1:{self.ops}", "--state", str(folder / "state"),
                )
            )  # fmt: skip
            await stack.enter_async_context(
                process(
                    folder / "gateway.log", "gateway", "--id", "g1", "--autoscaler", f"unix:{socket}",
                    "--listen", f"127.0.0.1:{self.listen}", "--ops", f"127.0.0.1:{self._gateway_ops}",
                )
            )  # fmt: skip
            async with aiohttp.ClientSession() as self.session, asyncio.timeout(WAIT_S_MAX):
                await self._answers()
            async with aiohttp.ClientSession() as self.session:
                yield self

    async def _answers(self) -> None:
        while True:
            try:
                async with self.session.get(f"{self.url}/v1/models") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.05)

    async def call(self, model: str) -> tuple[int, str]:
        """One chat completion: (status, what was said)."""
        body = {"model": model, "messages": [{"role": "user", "content": "hi"}]}
        async with self.session.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            return answer.status, await answer.text()


def model(name: str, **spec: object) -> dict[str, object]:
    """A Model whose engine is the fake one."""
    words = command("--host", "{host}", "--port", "{port}", "--name", name)
    return {
        "apiVersion": "pilotlight.dev/v1alpha1", "kind": "Model", "metadata": {"name": name},
        "spec": {"engine": "command", "image": "fake-engine", "command": words, "gpu": {"memory": "1Gi"}, **spec},
    }  # fmt: skip


@pytest.fixture
def house(tmp_path: Path, kubeconfig: Path, namespace: str) -> House:
    return House(tmp_path, kubeconfig, namespace)


async def test_a_call_at_zero_makes_a_pod_and_zero_comes_back(
    house: House, api: Api, namespace: str, node: Node
) -> None:
    house.write(model("ada", idleSeconds=1, residencySeconds=0))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    async with house.running() as one, asyncio.timeout(60):
        status, said = await one.call("ada")
        assert (status, "I am ada" in said) == (200, True), said
        (pod,) = (await api.get(pods))["items"]
        assert pod["spec"]["nodeName"] == node.name
        while (await api.get(pods))["items"]:
            await asyncio.sleep(0.05)


async def test_pods_outlive_their_autoscaler_and_are_adopted(
    house: House, api: Api, namespace: str, node: Node
) -> None:
    house.write(model("ada", idleSeconds=600))
    pods = f"/api/v1/namespaces/{namespace}/pods"
    async with asyncio.timeout(90):
        async with house.running() as one:
            assert (await one.call("ada"))[0] == 200
            (first,) = (await api.get(pods))["items"]
        async with house.running() as one:
            assert (await one.call("ada"))[0] == 200
            (second,) = (await api.get(pods))["items"]
        assert first["metadata"]["uid"] == second["metadata"]["uid"], "no second start"
        assert node.name == second["spec"]["nodeName"]
