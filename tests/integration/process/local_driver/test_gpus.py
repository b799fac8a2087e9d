"""The local driver on GPUs of a fake NVML: what engines see, and the measurement that a device is clean."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers import probes
from autoscaler.drivers.local import driver as local
from autoscaler.drivers.local import proof_of_clean
from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.driver import LocalDriver
from autoscaler.drivers.local.engine_process import EngineProcess
from autoscaler.drivers.local.readiness import Readiness
from autoscaler.state.events import Seen
from tests.support.fakes.nvml import FakeNvml
from tests.support.harness.driver_events import Observed, running
from tests.support.harness.local_rig import GPU0, TINY_ENGINE, LocalRig, launch, python, replica
from tests.support.harness.scenarios import run_on_rig
from tests.support.waiting import until

R1 = ReplicaId("r1")


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@pytest.fixture
def rig(tmp_path: Path, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalRig]:
    monkeypatch.setattr(probes, "PROBE_SECONDS_MAX", 60.0)  # an engine that is paused for seconds fails no probe
    rig = LocalRig(tmp_path, nvml=nvml)
    yield rig
    rig.close()


async def alarms(observed: Observed, what: str, count: int = 1) -> list[str]:
    """Return that many alarms that say this. There may be others before: a killed process may need a while to end."""

    def found() -> list[str]:
        return [one.reason for one in observed.of(R1) if one.seen is Seen.EXITED and what in one.reason]

    await until(f"{count} alarms: {what}", lambda: len(found()) >= count)
    return found()


def test_started_engine_gets_only_its_gpu_in_cuda_visible_devices(rig: LocalRig) -> None:
    shows = python("import os; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)")

    async def scenario() -> None:
        async with running(driver := rig.driver()) as observed:
            driver.start(*replica("r1", shows, slices=("GPU-b",)))
            await observed.until(R1, Seen.CLEAN)

    rig.run(scenario())
    assert rig.state.log(R1).read_text() == "GPU-b\n"


@run_on_rig
async def test_gpu_is_reusable_only_after_nvml_reports_its_memory_free(
    rig: LocalRig, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof_of_clean, "ALARM_S", 0.05)
    driver, (r1, model) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"), slices=("GPU-a",))
    async with running(driver) as observed:
        driver.start(r1, model)
        await observed.until(R1, Seen.STARTING)
        nvml.holders = {"GPU-a": {rig.main(R1): 1 << 30}}
        await observed.until(R1, Seen.READY)
        await until("the GPU processes are recorded", lambda: rig.state.records()[0][0].gpu_pids)
        driver.stop(r1, 5.0)
        await alarms(observed, "still hold GPU memory")
        nvml.failure = "GPU is lost"
        await alarms(observed, "NVML does not report")
        assert Seen.CLEAN not in [o.seen for o in observed.of(R1)]
        nvml.failure, nvml.holders = "", {}
        assert (await observed.until(R1, Seen.CLEAN)).proof == "measured"


WORKER = """
import os, sys, time
worker = os.fork()
if worker == 0:
    time.sleep(60)
with open(sys.argv[2], "w") as written:
    written.write(str(worker))
"""
"""A worker in the engine's group that holds the memory and does not exit with the main process."""


@pytest.mark.case("20")
@pytest.mark.standard
@run_on_rig
async def test_gpu_memory_of_a_dead_worker_blocks_the_device_until_freed(
    rig: LocalRig, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After SIGKILL of the main process, its worker is killed with its group, but NVML still reports the memory.
    This also happens while a driver is stuck. It is logged every ALARM_S; the device is not clean until it is free.
    """
    monkeypatch.setattr(proof_of_clean, "ALARM_S", 0.2)
    written = tmp_path / "worker"
    driver, (r1, served) = (
        rig.driver(),
        replica("r1", python(WORKER + TINY_ENGINE, "{port}", str(written)), ("GPU-a",)),
    )
    async with running(driver) as observed:
        driver.start(r1, served)
        await observed.until(R1, Seen.READY)
        worker = int(written.read_text())
        nvml.holders = {"GPU-a": {worker: 1 << 30}}
        await until("the GPU processes are recorded", lambda: rig.state.records()[0][0].gpu_pids)
        rig.kill(R1)
        first, *_ = await alarms(observed, "still hold GPU memory", 2)
        assert not rig.processes(R1), "the whole group is killed"
        assert Seen.CLEAN not in [one.seen for one in observed.of(R1)]
        assert str(worker) in first
        nvml.holders = {}
        assert (await observed.until(R1, Seen.CLEAN)).proof == "measured"


@run_on_rig
async def test_replica_not_seen_by_nvml_frees_its_gpu_when_its_processes_exit(rig: LocalRig) -> None:
    driver, (r1, model) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"), slices=("GPU-a",))
    async with running(driver) as observed:
        driver.start(r1, model)
        await observed.until(R1, Seen.READY)
        driver.stop(r1, 5.0)
        assert (await observed.until(R1, Seen.CLEAN)).proof == "exited"


@run_on_rig
async def test_slice_of_a_gpu_that_nvml_reports_as_unhealthy_is_unhealthy(
    rig: LocalRig, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOOK_EVERY_S", 0.01)
    async with running(rig.driver()) as observed:
        assert [s.healthy for s in observed.slices().slices] == [True, True]
        nvml.found = (nvml.found[0], nvml.found[1]._replace(healthy=False))
        async with asyncio.timeout(60):
            while [s.healthy for s in observed.slices().slices] != [True, False]:
                await observed.more()


@run_on_rig
async def test_memory_growth_of_a_starting_engine_is_reported(
    rig: LocalRig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The engine grows once more when the test has created a file, so that each growth is measured by itself."""
    monkeypatch.setattr("autoscaler.drivers.local.readiness.WEIGH_EVERY_S", 0.05)
    grows = (
        "import os, time\nkept = []\nwhile True:\n"
        f"    if os.path.exists('{tmp_path}/grow-%d' % len(kept)): kept.append(b'x' * (8 << 20))\n"
        "    time.sleep(0.01)\n"
    )
    driver, (r1, model) = rig.driver(), replica("r1", python(grows), slices=("GPU-a",))
    async with running(driver) as observed:
        driver.start(r1, model)
        for number in range(3):
            known = sum(o.grew for o in observed.of(R1))
            (tmp_path / f"grow-{number}").touch()
            async with asyncio.timeout(60):
                while sum(o.grew for o in observed.of(R1)) == known:
                    await observed.more()
        driver.stop(r1, 0.0)
        await observed.until(R1, Seen.CLEAN)


@run_on_rig
async def test_gpu_memory_use_of_a_ready_engine_is_reported(
    rig: LocalRig, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reported for each device of the engine, without host memory."""
    monkeypatch.setattr("autoscaler.drivers.local.readiness.WEIGH_READY_S", 0.05)
    driver, (r1, model) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"), slices=("GPU-a", "GPU-b"))
    async with running(driver) as observed:
        driver.start(r1, model)
        await observed.until(R1, Seen.READY)
        assert observed.of(R1)[-1].used_bytes == 0, "its memory was not measured, or it uses none"
        for gib in (6, 8):
            nvml.holders = {"GPU-a": {rig.main(R1): gib << 30}, "GPU-b": {rig.main(R1): 2 << 30}}
            async with asyncio.timeout(60):
                while observed.of(R1)[-1].used_bytes != (gib + 2) << 29:
                    await asyncio.sleep(0.005)
        assert observed.of(R1)[-1].seen is Seen.READY


def test_memory_use_is_resident_size_on_the_host_and_zero_on_declared_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, really_weigh = list[str](), Readiness._weigh

    async def weigh(self: Readiness, engine: EngineProcess) -> bool:
        grew = await really_weigh(self, engine)
        looks.append(engine.record.id)
        return grew

    monkeypatch.setattr(Readiness, "_weigh", weigh)
    rig = LocalRig(tmp_path)
    grows = python("x = b'x' * (64 << 20)" + TINY_ENGINE, "{port}")

    async def used(devices: Devices, slice_: str, name: str) -> int:
        driver, (one, model) = LocalDriver(rig.state, launch, devices), replica(name, grows, slices=(slice_,))
        async with running(driver) as observed:
            driver.start(one, model)
            await observed.until(one.id, Seen.READY)
            await until("it was looked at", lambda: name in looks)
            driver.stop(one, 1.0)
            await observed.until(one.id, Seen.CLEAN)
            return max(seen.used_bytes for seen in observed.of(one.id))

    async def scenario() -> None:
        assert 64 << 20 < await used(Devices((), lambda: None), "host", "h1") < 256 << 20
        assert await used(Devices((GPU0,)), "gpu0", "h2") == 0

    try:
        rig.run(scenario())
    finally:
        rig.close()
