"""Test setup for faults of the Kubernetes driver: a namespace, and a node with two GPUs and its kubelet."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.driver import KubernetesDriver
from autoscaler.kubernetes.api import Api
from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod
from autoscaler.state.events import ReplicaSeen
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import Drain, Replica
from tests.contracts.driver import Manner
from tests.integration.cluster.support.kubelet.container import Container
from tests.integration.cluster.support.kubelet.node import Node, next_number
from tests.support.fakes.engines.fake_engine_process import command
from tests.support.harness.driver_events import WAIT_S_MAX, Observed
from tests.support.harness.local_rig import KNOBS, launch, replica


class Scene(NamedTuple):
    """A namespace, a node with two GPUs, and the containers that its kubelet runs."""

    api: Api
    namespace: str
    node: Node
    containers: dict[str, Container]

    @property
    def pods(self) -> str:
        return f"/api/v1/namespaces/{self.namespace}/pods"

    def driver(self, api: Api | None = None) -> KubernetesDriver:
        return KubernetesDriver(api or self.api, self.namespace, launch, lambda _: "engine", assume_after_s=0.05)

    def engine(self, name: str, *, gpu: int = 0, manner: Manner = Manner.GOOD, **pod: Any) -> tuple[Replica, Model]:
        """Returns a replica on one of the GPUs; `pod` is merged into the pod of its model."""
        words = command("--host", "{host}", "--port", "{port}", *KNOBS[manner])
        one, of = replica(name, tuple(words), (f"{self.node.name}/gpu{gpu}",))
        of = replace(of, spec=replace(of.spec, pod=Pod(**pod)))
        return replace(one, spec_hash=of.spec_hash()), of

    def kill(self, name: str) -> None:
        process = self.containers[name].process
        assert process is not None
        os.killpg(process.pid, signal.SIGKILL)

    async def annotate(self, name: str, notes: Mapping[str, str | None]) -> None:
        await self.api.patch(f"{self.pods}/{name}", {"metadata": {"annotations": dict(notes)}})


@asynccontextmanager
async def staged(api: Api, namespace: str, logs: Path) -> AsyncIterator[Scene]:
    """Yields a new Scene."""
    containers: dict[str, Container] = {}
    node = Node(api, f"node-{namespace}", next_number(), {"nvidia.com/gpu": "2"}, {}, logs)
    node.on_container = containers.__setitem__
    async with node.running():
        yield Scene(api, namespace, node, containers)


async def until_reported(observed: Observed, id: ReplicaId, holds: Callable[[ReplicaSeen], object]) -> ReplicaSeen:
    """Waits for the first observation of a replica for which `holds` is true."""
    async with asyncio.timeout(WAIT_S_MAX):
        while True:
            for seen in observed.of(id):
                if holds(seen):
                    return seen
            await observed.more()


def changed(model: Model) -> Model:
    """Returns the model with another spec."""
    return replace(model, spec=replace(model.spec, image="another"))


def drained(one: Replica, epoch: int) -> Replica:
    """Returns the replica as the plan passes it to `stop`."""
    return replace(one, drain=Drain(since_s=0.0, reason="idle", came_from=ReplicaState.READY, epoch=epoch, version=1))
