"""One driver made of two: pods of ours, and those of workloads that were adopted. Decides nothing.

Each order goes to whose Replica it is about, which stands in the Model and in the Replica itself (an adopted one has no
hash of its own spec). What either sees is passed on as it is, but Synced only when both have listed what exists.
"""

from __future__ import annotations

import asyncio
from functools import partial

from autoscaler.drivers.driver import Observation, Observe, SharedDriver
from autoscaler.spec.model import ADOPTED_HASH, Model
from autoscaler.state.events import Synced
from autoscaler.state.world import Replica


class CompositeDriver:
    """`own` starts pods, `adopted` scales what is there."""

    def __init__(self, own: SharedDriver, adopted: SharedDriver) -> None:
        self._own = own
        self._adopted = adopted
        self._synced = set[SharedDriver]()

    async def run(self, observe: Observe) -> None:
        """Both of them, until cancelled."""

        def forward(driver: SharedDriver, seen: tuple[Observation, ...]) -> None:
            told: list[Observation] = [one for one in seen if not isinstance(one, Synced)]
            if len(told) < len(seen):
                self._synced.add(driver)
                if len(self._synced) == 2:
                    told.append(Synced())
            if told:
                observe(tuple(told))

        async with asyncio.TaskGroup() as tasks:
            for driver in (self._own, self._adopted):
                tasks.create_task(driver.run(partial(forward, driver)))

    def lead(self) -> None:
        """Both say again what there is; one that has not listed everything yet says so when it has."""
        self._synced.clear()
        self._own.lead()
        self._adopted.lead()

    async def follow(self) -> None:
        """Both."""
        await asyncio.gather(self._own.follow(), self._adopted.follow())

    def obstacle(self, model: Model) -> str:
        """Of the one that would start it."""
        return (self._own if model.adopted is None else self._adopted).obstacle(model)

    def start(self, replica: Replica, model: Model) -> None:
        """By the one whose Model it is."""
        (self._own if model.adopted is None else self._adopted).start(replica, model)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """By the one that started it."""
        (self._adopted if replica.spec_hash == ADOPTED_HASH else self._own).stop(replica, grace_s)
