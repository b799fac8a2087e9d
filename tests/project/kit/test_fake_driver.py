"""The fake driver fulfils the contract of the real ones, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

import pytest

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.drivers.driver import Driver
from autoscaler.spec.model import Model, ModelSpec
from autoscaler.state.world import DeviceId, NodeId, Replica, ReplicaResources, Slice, SliceId
from tests.contracts.driver import DriverContract, Manner, Rig
from tests.simulation.environment.virtual_loop import VirtualLoop
from tests.support.fakes.driver import FakeDriver, FakeMachine, Fate

FATES = {
    Manner.GOOD: Fate(),
    Manner.NEVER_READY: Fate(ready_after_s=None),
    Manner.DIES_ON_START: Fate(dies_after_s=0.5, last_words="exited with status 3"),
    Manner.CANNOT_START: Fate(refused="no such file"),
    Manner.IGNORES_SIGTERM: Fate(stops_in_s=1e9),
}


class FakeRig:
    """A fake machine on a loop in virtual time."""

    began_within_s = 0.0

    def __init__(self) -> None:
        self.loop = VirtualLoop()
        gpu = Slice(id=SliceId("gpu0"), device=DeviceId("gpu0"), node=NodeId("local"), memory_bytes=1 << 30)
        self.machine = FakeMachine(self.loop, (gpu,), lambda _, model: FATES[Manner(model.spec.command[0])])

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        self.loop.run_until_complete(scenario)
        self.loop.close()

    def driver(self) -> Driver:
        return FakeDriver(self.machine)

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        model = Model(name=ModelName(name), spec=ModelSpec(engine="command", command=(manner.value,)))
        replica = Replica(
            id=ReplicaId(name),
            model=model.name,
            spec_hash=model.spec_hash(),
            intent=f"intent-{name}",
            resources=ReplicaResources(slices=(SliceId("gpu0"),), memory_bytes=1 << 20),
        )
        return replica, model

    def kill(self, replica: ReplicaId) -> None:
        self.machine.kill(replica)

    def exists(self, replica: ReplicaId) -> bool:
        return replica in self.machine.engines and self.machine.engines[replica].alive

    async def until_over(self, replica: ReplicaId) -> None:
        while self.exists(replica):
            await asyncio.sleep(0.005)

    def starts(self, replica: ReplicaId) -> int:
        return self.machine.started.count(replica)


class TestFakeDriver(DriverContract):
    """Runs DriverContract on the fake driver."""

    @pytest.fixture
    def rig(self) -> Rig:
        return FakeRig()
