"""Combines two drivers: one for our own pods, one for adopted workloads. Makes no decisions.

Each order is forwarded to the driver that owns the model or replica (the spec hash of an adopted replica is
`ADOPTED_HASH`). Observations are forwarded unchanged, except `Synced`: it is sent when both drivers have listed all
existing replicas.
"""

from __future__ import annotations

import asyncio
from functools import partial

from autoscaler.drivers.driver import Observation, Observe, SharedDriver
from autoscaler.spec.model import ADOPTED_HASH, Model
from autoscaler.state.events import Synced
from autoscaler.state.world import Replica


class CompositeDriver:
    """Forwards to `own`, which starts pods, or to `adopted`, which scales existing workloads."""

    def __init__(self, own: SharedDriver, adopted: SharedDriver) -> None:
        self._own = own
        self._adopted = adopted
        self._synced = set[SharedDriver]()

    async def run(self, observe: Observe) -> None:
        """Run both drivers until cancelled."""

        def forward(driver: SharedDriver, seen: tuple[Observation, ...]) -> None:
            forwarded: list[Observation] = [one for one in seen if not isinstance(one, Synced)]
            if len(forwarded) < len(seen):
                self._synced.add(driver)
                if len(self._synced) == 2:
                    forwarded.append(Synced())
            if forwarded:
                observe(tuple(forwarded))

        async with asyncio.TaskGroup() as tasks:
            for driver in (self._own, self._adopted):
                tasks.create_task(driver.run(partial(forward, driver)))

    def lead(self) -> None:
        """Make both report everything again; a driver still listing reports `Synced` when it has finished."""
        self._synced.clear()
        self._own.lead()
        self._adopted.lead()

    async def follow(self) -> None:
        """Stop leading in both drivers."""
        await asyncio.gather(self._own.follow(), self._adopted.follow())

    def obstacle(self, model: Model) -> str:
        """Return the obstacle of the driver that would start the model."""
        return (self._own if model.adopted is None else self._adopted).obstacle(model)

    def start(self, replica: Replica, model: Model) -> None:
        """Start with the driver that owns the model."""
        (self._own if model.adopted is None else self._adopted).start(replica, model)

    def stop(self, replica: Replica, grace_s: float) -> None:
        """Stop with the driver that started the replica."""
        (self._adopted if replica.spec_hash == ADOPTED_HASH else self._own).stop(replica, grace_s)
