"""The weights of one agent, managed by `pilotlight.agent.weights.keeper`, with a clock that stands still."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec

from artifacts.credentials.docker_config import Config
from artifacts.store.store import Store
from autoscaler.agent_contract import NodeWant, NodeWants, WeightsReport
from autoscaler.contract import ReplicaId
from autoscaler.spec.settings import Weights
from pilotlight.agent.weights.fetch import NoSecretError
from pilotlight.agent.weights.keeper import WeightsKeeper
from tests.support.builders.artifacts import packed_models

WAIT_S_MAX = 60.0


class Kept:
    """The weights of one agent, with a clock that stands still."""

    def __init__(self, root: Path) -> None:
        self.root, self.now_s, self.logins = root, 100.0, list[str]()
        self.refuses = ""
        self.keeping = WeightsKeeper(root, self._secret_of, lambda: self.now_s)
        self._changed = asyncio.Event()
        self.keeping.changed = self._changed.set

    async def _secret_of(self, name: str) -> Config:
        self.logins.append(name)
        if self.refuses:
            raise NoSecretError(self.refuses)
        if name == "none":
            raise NoSecretError("pull secret none: NotFound")
        return Config({})

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        task = asyncio.create_task(self.keeping.run())
        yield
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def request(self, *requests: NodeWant, epoch: int = 1, held: tuple[str, ...] = (), **weights: object) -> None:
        settings = Weights(**weights)  # type: ignore[arg-type]  # keys are set by the test
        self.keeping.heard(msgspec.json.encode(NodeWants(epoch=epoch, wants=requests, held=held, weights=settings)))

    @property
    def reports(self) -> tuple[WeightsReport, ...]:
        return self.keeping.report()[1]

    async def until(self, holds: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not holds():
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(0.05):
                        await self._changed.wait()

    def in_use(self) -> list[bool]:
        return [row.in_use for row in Store(self.root).rows()]


def want(host: str, *replicas: str, tag: str = "v1", secret: str = "") -> NodeWant:
    artifact = f"oci://{host}/{packed_models.NAME}:{tag}"
    return NodeWant(artifact=artifact, pull_secret=secret, replicas=tuple(map(ReplicaId, replicas)))
