"""A node with four GPUs and room for gateways, and what is seen of the processes that run there, for whole houses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from autoscaler.kubernetes.api import Api
from tests.cluster.conftest import next_number
from tests.cluster.kubelet.container import Container
from tests.cluster.kubelet.node import LATE_S, Node
from tests.cluster.many import Estate, model
from tests.kit.fake_process import command
from tests.kit.serving import Transcribed, transcript


class Stage:
    """The node, what runs on it, and engines that write down their Calls."""

    def __init__(self, node: Node, api: Api, namespace: str, folder: Path) -> None:
        self.node = node
        self.api = api
        self.pods = f"/api/v1/namespaces/{namespace}/pods"
        self.folder = folder
        self.containers: dict[str, Container] = {}
        self.addresses: dict[str, str] = {}
        """Of all pods that ever were there."""
        node.on_container = self._made

    def _made(self, pod: str, container: Container) -> None:
        self.containers[pod] = container
        self.addresses[pod] = container.ip

    def ada(self, tokens_per_s: float, slots: int, **spec: object) -> dict[str, object]:
        """Its answers are as long as their Calls want them, up to 200 tokens."""
        knobs = ("--tokens-per-s", str(tokens_per_s), "--slots", str(slots), "--tokens", "200")
        return model("ada", command=self.engine("ada", *knobs), slots=slots, **spec)

    def engine(self, name: str, *knobs: str, host: str = "{host}", port: str = "{port}") -> list[str]:
        """One that writes down each Call (`calls`)."""
        kept = str(self.folder / f"{name}.jsonl")
        return command("--host", host, "--port", port, "--name", name, "--transcript", kept, *knobs)

    def calls(self, name: str = "ada") -> list[Transcribed]:
        """What its engines wrote down."""
        return transcript(self.folder, name)

    async def engines(self) -> dict[str, bool]:
        """Pods of Replicas -> whether they are being deleted."""
        found = await self.api.get(self.pods, labelSelector="app.kubernetes.io/managed-by=pilotlight")
        return {one["metadata"]["name"]: "deletionTimestamp" in one["metadata"] for one in found["items"]}

    async def ended(self, pod: str) -> None:
        """Its process has."""
        process = self.containers[pod].process
        assert process is not None
        await process.wait()

    def pid(self, pod: str) -> int:
        """Of its process."""
        process = self.containers[pod].process
        assert process is not None
        return process.pid


@asynccontextmanager
async def staged(
    api: Api, namespace: str, folder: Path, *, gpus: int = 4, late_s: float = LATE_S
) -> AsyncIterator[Stage]:
    """A fresh one. `late_s`: an address is given out again so late."""
    name = f"node-{namespace}"
    node = Node(
        api, name, next_number(), {"nvidia.com/gpu": str(gpus)}, {"test": name}, folder, probe_period_s=0.05,
        late_s=late_s,
    )  # fmt: skip
    one = Stage(node, api, namespace, folder)
    async with node.running():
        yield one


async def runs(one: Estate, replicas: int, calls: int, autoscaler: str = "a1") -> None:
    """Until so many Replicas of ada are ready, with so many Calls on them."""

    async def so() -> bool:
        states, demand = await one.counts("ada", autoscaler)
        return (states.get("ready"), demand["running"]) == (replicas, calls)

    await one.until(so)
