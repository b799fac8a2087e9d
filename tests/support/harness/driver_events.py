"""Observations of drivers: runs a driver for a test and records all its observations; also builds such by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from autoscaler.contract import ReplicaId
from autoscaler.drivers.driver import Driver, Observation
from autoscaler.state.events import ReplicaSeen, Seen, SlicesSeen, Synced
from autoscaler.state.world import Replica

WAIT_S_MAX = 90.0


def seen_of(
    replica: Replica, seen: Seen, *, address: str = "", started_s: float | None = None, reason: str = "",
    proof: str = "",
) -> ReplicaSeen:  # fmt: skip
    """A driver's observation of a replica that it was ordered to start."""
    of = replica
    return ReplicaSeen(
        id=of.id, model=of.model, spec_hash=of.spec_hash, intent=of.intent, slices=of.resources.slices, seen=seen,
        memory_bytes=of.resources.memory_bytes, compute_percent=of.resources.compute_percent, slots=of.slots,
        address=address, started_s=started_s, reason=reason, proof=proof,
    )  # fmt: skip


class Observed:
    """A driver's observations so far."""

    def __init__(self) -> None:
        self.all: list[Observation] = []
        self.at_s: list[float] = []
        self._new = asyncio.Event()

    def observe(self, batch: tuple[Observation, ...]) -> None:
        """The driver's `observe`."""
        self.all += batch
        self.at_s += [asyncio.get_running_loop().time()] * len(batch)
        self._new.set()

    def of(self, replica: ReplicaId) -> list[ReplicaSeen]:
        """All observations of one Replica."""
        return [o for o in self.all if isinstance(o, ReplicaSeen) and o.id == replica]

    def words(self, replica: ReplicaId) -> list[str]:
        """The states in which one replica was observed, without repetitions."""
        words = [o.seen.value for o in self.of(replica)]
        return [word for i, word in enumerate(words) if i == 0 or words[i - 1] != word]

    def slices(self) -> SlicesSeen:
        """The latest inventory."""
        return [o for o in self.all if isinstance(o, SlicesSeen)][-1]

    async def until(self, replica: ReplicaId, seen: Seen, times: int = 1) -> ReplicaSeen:
        """The first (or n-th) observation in that state; fails after WAIT_S_MAX with the states seen instead."""
        try:
            async with asyncio.timeout(WAIT_S_MAX):
                while True:
                    found = [o for o in self.of(replica) if o.seen is seen]
                    if len(found) >= times:
                        return found[times - 1]
                    await self.more()
        except TimeoutError:
            raise AssertionError(f"{replica} was never {seen}: {self.of(replica)}") from None

    async def more(self) -> None:
        """Waits for a new observation."""
        self._new.clear()
        await self._new.wait()

    async def synced(self) -> None:
        """Waits until everything that exists was listed."""
        async with asyncio.timeout(WAIT_S_MAX):
            while not any(isinstance(o, Synced) for o in self.all):
                await self.more()


@asynccontextmanager
async def running(driver: Driver) -> AsyncIterator[Observed]:
    """Runs the driver, which has listed everything; at the end it is only cancelled."""
    observed = Observed()
    task = asyncio.create_task(driver.run(observed.observe))
    synced = asyncio.create_task(observed.synced())
    try:
        await asyncio.wait((task, synced), return_when=asyncio.FIRST_COMPLETED)
        assert not task.done(), task.exception()
        yield observed
        assert not task.done(), task.exception()
    finally:
        for each in (task, synced):
            each.cancel()
        await asyncio.gather(task, synced, return_exceptions=True)
