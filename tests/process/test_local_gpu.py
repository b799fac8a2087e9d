"""The local driver on GPUs, as a fake NVML tells of them: what engines see, and the proof of clean that is measured."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers import clearing, local
from autoscaler.world import Seen
from tests.kit.fakenvml import FakeNvml
from tests.kit.localrig import TINY_ENGINE, LocalRig, python, replica
from tests.kit.observed import running

R1 = ReplicaId("r1")


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def rig(tmp_path: Path, nvml: FakeNvml) -> Iterator[LocalRig]:
    rig = LocalRig(tmp_path, nvml=nvml)
    yield rig
    rig.close()


def test_an_engine_sees_the_gpu_of_its_slice_only(rig: LocalRig) -> None:
    shows = python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)")

    async def scenario() -> None:
        driver = rig.driver()
        async with running(driver) as observed:
            driver.start(*replica("r1", shows, slices=("GPU-b",)))
            await observed.until(R1, Seen.CLEAN)

    rig.run(scenario())
    assert rig.state.log(R1).read_text() == "GPU-b\n"


def test_a_slice_is_clean_only_when_nvml_says_that_the_memory_is_back(
    rig: LocalRig, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clearing, "ALARM_S", 0.05)

    async def scenario() -> None:
        driver, (r1, model) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"), slices=("GPU-a",))
        async with running(driver) as observed:
            driver.start(r1, model)
            await observed.until(R1, Seen.STARTING)
            nvml.holders = {"GPU-a": {rig.main(R1): 1 << 30}}
            await observed.until(R1, Seen.READY)
            async with asyncio.timeout(5):
                while not rig.state.records()[0][0].gpu_pids:
                    await asyncio.sleep(0.005)
            driver.stop(r1, 5.0)
            held = await observed.until(R1, Seen.EXITED, times=2)
            assert "still hold GPU memory" in held.reason
            nvml.failure = "GPU is lost"
            lost = await observed.until(R1, Seen.EXITED, times=3)
            assert "NVML does not tell" in lost.reason
            assert Seen.CLEAN not in [o.seen for o in observed.of(R1)]
            nvml.failure, nvml.holders = "", {}
            assert (await observed.until(R1, Seen.CLEAN)).proof == "measured"

    rig.run(scenario())


def test_a_replica_that_nvml_never_saw_is_proven_by_its_processes(rig: LocalRig) -> None:
    async def scenario() -> None:
        driver, (r1, model) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"), slices=("GPU-a",))
        async with running(driver) as observed:
            driver.start(r1, model)
            await observed.until(R1, Seen.READY)
            driver.stop(r1, 5.0)
            assert (await observed.until(R1, Seen.CLEAN)).proof == "exited"

    rig.run(scenario())


def test_a_gpu_that_is_lost_is_told(rig: LocalRig, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LOOK_EVERY_S", 0.01)

    async def scenario() -> None:
        async with running(rig.driver()) as observed:
            assert [s.healthy for s in observed.slices().slices] == [True, True]
            nvml.found = (nvml.found[0], nvml.found[1]._replace(healthy=False))
            async with asyncio.timeout(5):
                while [s.healthy for s in observed.slices().slices] != [True, False]:
                    await observed.more()

    rig.run(scenario())


def test_an_engine_whose_memory_grows_while_it_starts_is_told_so(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoscaler.drivers.readiness.WEIGH_EVERY_S", 0.05)
    grows = (
        "import time\nkept = []\nfor _ in range(40): kept.append(b'x' * (4 << 20)); time.sleep(0.02)\ntime.sleep(60)"
    )

    async def scenario() -> None:
        driver, (r1, model) = rig.driver(), replica("r1", python(grows), slices=("GPU-a",))
        async with running(driver) as observed:
            driver.start(r1, model)
            async with asyncio.timeout(10):
                while sum(o.grew for o in observed.of(R1)) < 3:
                    await observed.more()
            driver.stop(r1, 0.0)
            await observed.until(R1, Seen.CLEAN)

    rig.run(scenario())
