"""A node with four GPUs and capacity for gateways, and the processes observed on it, for end-to-end tests."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from autoscaler.kubernetes.api import Api
from tests.integration.cluster.support.installations.multi_instance import Estate, model
from tests.integration.cluster.support.kubelet.container import Container
from tests.integration.cluster.support.kubelet.node import LATE_S, Node, next_number
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.harness.serve.serve import Transcribed, transcript


class Stage:
    """The node, the processes on it, and engines that record their requests."""

    def __init__(self, node: Node, api: Api, namespace: str, folder: Path) -> None:
        self.node = node
        self.api = api
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.folder = folder
        self.containers: dict[str, Container] = {}
        self.addresses: dict[str, str] = {}
        """Addresses of all pods that ever existed."""
        node.on_container = self._made

    def _made(self, pod: str, container: Container) -> None:
        self.containers[pod] = container
        self.addresses[pod] = container.ip

    def ada(self, tokens_per_s: float, slots: int, **spec: object) -> dict[str, object]:
        """A model whose responses have the requested number of tokens, up to 200."""
        knobs = ("--tokens-per-s", str(tokens_per_s), "--slots", str(slots), "--tokens", "200")
        return model("ada", command=self.engine("ada", *knobs), slots=slots, **spec)

    def engine(self, name: str, *knobs: str, host: str = "{host}", port: str = "{port}") -> list[str]:
        """The command of an engine that records each request (`calls`)."""
        kept = str(self.folder / f"{name}.jsonl")
        return command("--host", host, "--port", port, "--name", name, "--transcript", kept, *knobs)

    def calls(self, name: str = "ada") -> list[Transcribed]:
        """The requests that the model's engines recorded."""
        return transcript(self.folder, name)

    async def engines(self) -> dict[str, bool]:
        """Pods of replicas -> whether they are being deleted."""
        found = await self.api.get(self.pods, labelSelector="app.kubernetes.io/managed-by=pilotlight")
        return {one["metadata"]["name"]: "deletionTimestamp" in one["metadata"] for one in found["items"]}

    async def ended(self, pod: str) -> None:
        """Waits until the pod's process has exited."""
        process = self.containers[pod].process
        assert process is not None
        await process.wait()

    def pid(self, pod: str) -> int:
        """The id of the pod's process."""
        process = self.containers[pod].process
        assert process is not None
        return process.pid


@asynccontextmanager
async def staged(
    api: Api, namespace: str, folder: Path, *, gpus: int = 4, late_s: float = LATE_S
) -> AsyncIterator[Stage]:
    """Yields a new Stage. `late_s`: the delay before an address is reused."""
    name = f"node-{namespace}"
    node = Node(
        api, name, next_number(), {"nvidia.com/gpu": str(gpus)}, {"test": name}, folder, probe_period_s=0.05,
        late_s=late_s,
    )  # fmt: skip
    one = Stage(node, api, namespace, folder)
    async with node.running():
        yield one


async def runs(one: Estate, replicas: int, calls: int, autoscaler: str = "a1") -> None:
    """Waits until ada has that many ready replicas and that many running requests on them."""

    async def so() -> bool:
        states, demand = await one.counts("ada", autoscaler)
        return (states.get("ready"), demand["running"]) == (replicas, calls)

    await one.until(so)
