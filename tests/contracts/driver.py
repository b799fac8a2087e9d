"""The contract of every driver, as tests. A driver's test file provides the `rig` fixture and inherits them all.

class TestMine(DriverContract):
    @pytest.fixture
    def rig(self) -> Rig: ...
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import StrEnum
from typing import Protocol

from autoscaler.contract import ReplicaId
from autoscaler.drivers.driver import Driver
from autoscaler.spec.model import Model
from autoscaler.state.events import ReplicaSeen, Seen, SlicesSeen, Synced
from autoscaler.state.world import Replica
from tests.support.harness.driver_events import running
from tests.support.harness.scenarios import run_on_rig


class Manner(StrEnum):
    """How an engine of the suite behaves."""

    GOOD = "good"
    NEVER_READY = "never ready"
    DIES_ON_START = "dies on start"
    CANNOT_START = "cannot start"
    IGNORES_SIGTERM = "ignores SIGTERM"


class Rig(Protocol):
    """An environment for replicas that outlives its drivers."""

    @property
    def began_within_s(self) -> float:
        """Seconds by which the reported process start may be too early: a kubelet reports whole seconds."""

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        """Runs a scenario to its end, in real or virtual time."""

    def driver(self) -> Driver:
        """Returns a new driver; the previous one has ended and may have left engines behind."""

    def replica(self, name: str, manner: Manner) -> tuple[Replica, Model]:
        """Returns a replica to start whose engine behaves in that manner."""

    def kill(self, replica: ReplicaId) -> None:
        """Kills the replica's engine from outside."""

    def exists(self, replica: ReplicaId) -> bool:
        """Whether any process of the replica's engine is alive."""

    async def until_over(self, replica: ReplicaId) -> None:
        """Waits until no process of the engine is alive and a driver can observe that; a kubelet reports it later."""

    def starts(self, replica: ReplicaId) -> int:
        """Returns how many times the replica's engine was started."""


class DriverContract:
    """The test suite."""

    @run_on_rig
    async def test_started_driver_reports_devices_first_and_replicas_before_synced(self, rig: Rig) -> None:
        async with running(rig.driver()) as observed:
            assert isinstance(observed.all[0], SlicesSeen)
            kinds = [type(one) for one in observed.all]
            assert ReplicaSeen not in kinds[kinds.index(Synced) :]  # an inventory may be repeated at any time
            slices = observed.slices().slices
            assert slices
            assert all(s.healthy and s.memory_bytes > 0 for s in slices)

    @run_on_rig
    async def test_started_replica_becomes_ready_and_is_clean_after_its_stop(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.GOOD)
        async with running(driver := rig.driver()) as observed:
            driver.start(replica, model)
            ready = await observed.until(replica.id, Seen.READY)
            assert rig.exists(replica.id)
            driver.stop(replica, 5.0)
            clean = await observed.until(replica.id, Seen.CLEAN)
            assert observed.words(replica.id) == ["starting", "ready", "exited", "clean"]
            facts = (replica.model, replica.spec_hash, replica.intent, replica.resources.slices, replica.slots)
            assert (ready.model, ready.spec_hash, ready.intent, ready.slices, ready.slots) == facts
            assert ready.address
            assert ready.started_s is not None
            assert clean.proof
            assert not rig.exists(replica.id)

    @run_on_rig
    async def test_start_of_a_running_replica_starts_no_second_engine(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.GOOD)
        async with running(driver := rig.driver()) as observed:
            driver.start(replica, model)
            driver.start(replica, model)
            await observed.until(replica.id, Seen.READY)
            driver.start(replica, model)
            await observed.until(replica.id, Seen.READY, times=2)
            assert rig.starts(replica.id) == 1
            driver.stop(replica, 5.0)
            await observed.until(replica.id, Seen.CLEAN)

    @run_on_rig
    async def test_stop_of_an_absent_or_stopped_replica_is_reported_as_clean(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.GOOD)
        async with running(driver := rig.driver()) as observed:
            driver.stop(replica, 5.0)
            await observed.until(replica.id, Seen.CLEAN)
            driver.start(replica, model)
            await observed.until(replica.id, Seen.READY)
            driver.stop(replica, 5.0)
            driver.stop(replica, 5.0)
            await observed.until(replica.id, Seen.CLEAN, times=2)
            driver.stop(replica, 5.0)
            await observed.until(replica.id, Seen.CLEAN, times=3)
            assert rig.starts(replica.id) == 1

    @run_on_rig
    async def test_killed_replica_is_reported_as_exited_and_cleaned_up(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.GOOD)
        async with running(driver := rig.driver()) as observed:
            driver.start(replica, model)
            await observed.until(replica.id, Seen.READY)
            rig.kill(replica.id)
            exited = await observed.until(replica.id, Seen.EXITED)
            assert "SIGKILL" in exited.reason
            assert (await observed.until(replica.id, Seen.CLEAN)).proof

    @run_on_rig
    async def test_engine_exit_on_start_is_reported_with_its_reason(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.DIES_ON_START)
        async with running(driver := rig.driver()) as observed:
            driver.start(replica, model)
            exited = await observed.until(replica.id, Seen.EXITED)
            assert "status 3" in exited.reason
            await observed.until(replica.id, Seen.CLEAN)
            assert observed.words(replica.id) == ["starting", "exited", "clean"], observed.of(replica.id)

    @run_on_rig
    async def test_replica_that_cannot_start_is_reported_as_exited_with_a_reason(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.CANNOT_START)
        async with running(driver := rig.driver()) as observed:
            driver.start(replica, model)
            assert (await observed.until(replica.id, Seen.EXITED)).reason
            await observed.until(replica.id, Seen.CLEAN)

    @run_on_rig
    async def test_engine_that_ignores_sigterm_is_killed_after_its_grace_period(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.IGNORES_SIGTERM)
        async with running(driver := rig.driver()) as observed:
            driver.start(replica, model)
            await observed.until(replica.id, Seen.READY)
            driver.stop(replica, 60.0)
            driver.stop(replica, 0.3)
            exited = await observed.until(replica.id, Seen.EXITED)
            await observed.until(replica.id, Seen.CLEAN)
            assert "killed" in exited.reason
            assert not rig.exists(replica.id)

    @run_on_rig
    async def test_running_replica_is_adopted_by_the_next_driver(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.GOOD)
        slow, slow_model = rig.replica("r2", Manner.NEVER_READY)
        first, now_s = rig.driver(), asyncio.get_running_loop().time
        ordered_s = now_s()
        async with running(first) as observed:
            first.start(replica, model)
            first.start(slow, slow_model)
            before = await observed.until(replica.id, Seen.READY)
        ready_s = now_s()
        assert rig.exists(replica.id)
        second = rig.driver()
        async with running(second) as observed:
            after = await observed.until(replica.id, Seen.READY)
            assert observed.all.index(after) < observed.all.index(Synced())
            assert observed.words(slow.id) == ["starting"], observed.of(slow.id)
            assert (after.address, after.model, after.intent) == (before.address, before.model, before.intent)
            for one in (before, after):
                assert one.started_s is not None
                assert ordered_s - rig.began_within_s <= one.started_s <= ready_s
            second.start(replica, model)
            assert (rig.starts(replica.id), rig.starts(slow.id)) == (1, 1)
            for each in (replica, slow):
                second.stop(each, 5.0)
                await observed.until(each.id, Seen.CLEAN)
        async with running(rig.driver()) as observed:
            assert not observed.of(replica.id)

    @run_on_rig
    async def test_next_driver_reports_a_replica_that_died_without_a_driver(self, rig: Rig) -> None:
        replica, model = rig.replica("r1", Manner.GOOD)
        first = rig.driver()
        async with running(first) as observed:
            first.start(replica, model)
            await observed.until(replica.id, Seen.READY)
        rig.kill(replica.id)
        await rig.until_over(replica.id)
        async with running(rig.driver()) as observed:
            assert observed.words(replica.id)[-1] == "clean"
