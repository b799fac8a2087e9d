"""A Loop that the test steps itself, over a driver without effects: for tests that read the `World` over HTTP."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence

from autoscaler.controller.loop import Loop
from autoscaler.drivers.driver import Observe
from autoscaler.fold.fold import Observation
from autoscaler.spec.model import Model
from autoscaler.state.world import Replica, World
from tests.support.builders.worlds import T0


class IdleDriver:
    """Records what it was ordered to start and to stop."""

    def __init__(self) -> None:
        self.started: list[Replica] = []
        self.stopped: list[Replica] = []
        self.obstacles: dict[str, str] = {}
        """Why a start of a Model is certain to fail."""
        self.on_start: Callable[[Replica], None] = lambda replica: None

    async def run(self, observe: Observe) -> None:
        await asyncio.get_running_loop().create_future()

    def obstacle(self, model: Model) -> str:
        return self.obstacles.get(model.name, "")

    def start(self, replica: Replica, model: Model) -> None:
        self.started.append(replica)
        self.on_start(replica)

    def stop(self, replica: Replica, grace_s: float) -> None:
        self.stopped.append(replica)


class NotingLoop(Loop):
    """Records all observations."""

    def __init__(
        self, world: World, driver: IdleDriver, clock: Callable[[], float], writes_s: Callable[[], float]
    ) -> None:
        super().__init__(world, driver, clock, writes_s)
        self.observed: list[Observation] = []

    def observe(self, batch: Sequence[Observation]) -> None:
        self.observed += batch
        super().observe(batch)


class SteppedLoop:
    """Observes and decides when the test requests it, at the time `now_s`, which only the test changes."""

    def __init__(self, world: World, now_s: float = T0) -> None:
        self.now_s = now_s
        self.writes_s = math.inf
        """For how long it may act."""
        self.driver = IdleDriver()
        self.loop = NotingLoop(world, self.driver, lambda: self.now_s, lambda: self.writes_s)

    def step(self, *batch: Observation) -> World:
        """One decision over the current `World` and `batch`."""
        self.loop.observe(batch)
        self.loop.step()
        return self.loop.world
