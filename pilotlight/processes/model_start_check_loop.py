"""Checks every few seconds whether each Model could start, passes the results to the loop, and logs obstacles.

The driver does the check, in a thread since it waits for disks; `autoscaler.planner.plan` decides the consequences.
When a missing weights file appears, the documents are reloaded first, so that its Model does not start with an
estimated memory need.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from autoscaler.contract import ModelName
from autoscaler.controller.loop import Loop, LoopStep
from autoscaler.exception_handling import Failure, attempt
from autoscaler.spec.model import Model
from autoscaler.state.events import StartSeen
from pilotlight.processes.console import News
from pilotlight.safe_output import write_stderr

LOOK_EVERY_S = 5.0
"""Check interval; documents that change are checked at once. A check takes a few system calls per Model."""

Obstacle = Callable[[Model], str]
"""See `autoscaler.drivers.driver.Driver.obstacle`; called in a thread."""


class Preflight:
    """A listener of `loop`. `read_again` reloads the documents and returns once the loop has them."""

    def __init__(
        self,
        loop: Loop,
        obstacle: Obstacle,
        read_again: Callable[[], Awaitable[None]],
        say: Callable[[str], None] = write_stderr,
    ) -> None:
        self._loop = loop
        self._obstacle = obstacle
        self._read_again = read_again
        self._changed = asyncio.Event()
        self._news = News(
            say,
            one="Model {name} cannot start: {reason}; its requests get 503 model_start_failed",
            more="{count} more models cannot start: `pilotlight status` lists them",
            over="the problem is fixed for {names}",
        )

    def on_step(self, step: LoopStep) -> None:
        """Log the changes of this step; changed documents trigger a check at once."""
        before, after = step.before, step.after
        if before.models is not after.models or before.leadership.synced is not after.leadership.synced:
            self._changed.set()
        if step.before.learned.obstacles is not step.after.learned.obstacles:
            self._news.tell(step.after.learned.obstacles, step.after)

    async def run(self) -> None:
        """Check until cancelled."""
        while True:
            self._changed.clear()
            world = self._loop.world
            synced = world.leadership.synced  # the driver knows no devices before it is synced
            models = tuple(world.models.values()) if synced else ()
            seen, failures = await asyncio.to_thread(self._look, models)
            for name, error in failures.items():
                self._loop.fault(name, "preflight", error)
            news = [one for one in seen if one.obstacle != world.learned.obstacles.get(one.model, "")]
            if any(not one.obstacle and not world.models[one.model].memory_bytes for one in news):
                await self._read_again()
            self._loop.observe(news)
            try:
                async with asyncio.timeout(LOOK_EVERY_S):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def _look(self, models: Sequence[Model]) -> tuple[list[StartSeen], dict[ModelName, Exception]]:
        """Return the obstacle of each Model, and the Models whose check raised an exception."""
        seen, failures = list[StartSeen](), dict[ModelName, Exception]()
        for model in models:
            obstacle = attempt(partial(self._obstacle, model))
            if isinstance(obstacle, Failure):
                failures[model.name] = obstacle.error
            else:
                seen.append(StartSeen(model=model.name, obstacle=obstacle))
        return seen, failures
