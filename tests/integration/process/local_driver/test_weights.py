"""Weights fetched before an engine starts: waited for, inherited, released, or no longer needed."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.driver import LocalDriver
from autoscaler.spec.model import Model
from autoscaler.state.events import Seen
from tests.contracts.driver import Manner
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import GPU0, ArgvLaunch, LocalRig, launch, python, replica
from tests.support.harness.scenarios import run_on_rig
from tests.support.waiting import until

pytestmark = pytest.mark.standard


class Brought:
    """Weights as a Supply provides them: an open file."""

    def __init__(self, model: Model, path: Path) -> None:
        paths = (path, path.with_name(f"{path.name}-adapter"))
        for one in paths:
            one.touch()
        self.model = replace(model, spec=replace(model.spec, artifact=f"file://{path}"))
        self.lease_fds = tuple(os.open(one, os.O_RDONLY) for one in paths)
        self.closed = 0

    def close(self) -> None:
        for fd in self.lease_fds:
            os.close(fd)
        self.closed += 1


class Bringer:
    """A Supply that waits until it is released."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.go = asyncio.Event()
        self.fails: Exception | None = None
        self.brought: list[Brought] = []
        self.cancelled = 0

    def closed(self) -> list[int]:
        return [one.closed for one in self.brought]

    def __call__(self, model: Model, report: Callable[[str], None]) -> Awaitable[Brought]:
        return self._bring(model, report)

    async def _bring(self, model: Model, report: Callable[[str], None]) -> Brought:
        report("half of it")
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails is not None:
            raise self.fails
        self.brought.append(Brought(model, self.path))
        return self.brought[-1]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[LocalRig]:
    one = LocalRig(tmp_path)
    yield one
    one.close()


def driver(rig: LocalRig, bringer: Bringer) -> LocalDriver:
    return LocalDriver(rig.state, launch, Devices((GPU0,)), supply=bringer)


def open_files(pid: int) -> set[str]:
    """Return what a process has open, without what it closes meanwhile: connections of probes."""
    found = set[str]()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(str(path.readlink()))
    return found


@run_on_rig
async def test_engine_starts_only_after_its_weights_are_pulled(rig: LocalRig, tmp_path: Path) -> None:
    one, model = rig.replica("r1", Manner.GOOD)
    bringer = Bringer(tmp_path / "weights")
    artifacts = list[str | None]()

    def launches(model: Model, host: str, port: int, *given: object) -> ArgvLaunch:
        artifacts.append(model.spec.artifact)
        return launch(model, host, port)

    at = LocalDriver(rig.state, launches, Devices((GPU0,)), supply=bringer)
    async with running(at) as observed:
        at.start(one, model)
        at.start(one, model)
        first = await observed.until(one.id, Seen.STARTING, times=3)
        assert (first.started_s, first.waits) == (None, "its weights are being fetched: half of it")
        assert not rig.exists(one.id)
        bringer.go.set()
        ready = await observed.until(one.id, Seen.READY)
        assert ready.waits == ""
        assert ready.placing.pulled_s is not None
        assert ready.started_s is not None
        assert ready.placing.pulled_s <= ready.started_s
        (brought,) = bringer.brought
        assert artifacts == [brought.model.spec.artifact]
        assert {str(tmp_path / "weights"), str(tmp_path / "weights-adapter")} <= open_files(rig.main(one.id))
        assert bringer.closed() == [0]
        at.stop(one, 5.0)
        await observed.until(one.id, Seen.CLEAN)
        assert bringer.closed() == [1]


@run_on_rig
async def test_failed_weights_pull_fails_the_start_with_its_reason(rig: LocalRig, tmp_path: Path) -> None:
    one, model = rig.replica("r1", Manner.GOOD)
    bringer = Bringer(tmp_path / "weights")
    at = driver(rig, bringer)
    async with running(at) as observed:
        bringer.fails = RuntimeError("the registry is away")
        bringer.go.set()
        at.start(one, model)
        ended = await observed.until(one.id, Seen.EXITED)
        assert ended.reason == "its weights: the registry is away"
        await observed.until(one.id, Seen.CLEAN)
        bringer.fails = None
        at.start(one, model)
        await observed.until(one.id, Seen.READY)


@run_on_rig
async def test_engine_that_cannot_start_releases_its_weights(rig: LocalRig, tmp_path: Path) -> None:
    one, model = rig.replica("r1", Manner.CANNOT_START)
    bringer = Bringer(tmp_path / "weights")
    bringer.go.set()
    at = driver(rig, bringer)
    async with running(at) as observed:
        at.start(one, model)
        await observed.until(one.id, Seen.CLEAN)
        assert bringer.closed() == [1]


@run_on_rig
async def test_pull_is_cancelled_when_the_replica_or_driver_stops(rig: LocalRig, tmp_path: Path) -> None:
    (one, model), (other, second) = (rig.replica(name, Manner.GOOD) for name in ("r1", "r2"))
    bringer = Bringer(tmp_path / "weights")
    at = driver(rig, bringer)
    async with running(at) as observed:
        at.start(one, model)
        at.start(other, second)
        await observed.until(one.id, Seen.STARTING, times=2)
        at.stop(one, 60.0)
        assert (await observed.until(one.id, Seen.EXITED)).reason == "stopped"
        await observed.until(one.id, Seen.CLEAN)
        assert bringer.cancelled == 1
    assert bringer.cancelled == 2
    async with running(driver(rig, bringer)) as observed:
        assert observed.of(other.id) == []


@run_on_rig
async def test_replica_without_weights_to_pull_starts_without_a_pull(rig: LocalRig) -> None:
    one, model = replica("r1", python("import time; time.sleep(60)"))
    at = LocalDriver(rig.state, launch, Devices((GPU0,)), supply=lambda _model, _told: None)
    async with running(at):
        at.start(one, model)
        await until("it runs", lambda: rig.exists(one.id))  # its mark becomes readable a moment after its exec
