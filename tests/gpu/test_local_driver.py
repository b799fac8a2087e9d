"""How the local driver uses NVML: usable memory, and replicas that exceed their claim."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from pathlib import Path
from types import ModuleType

import msgspec
import pytest

from autoscaler.contract import ReplicaId
from autoscaler.drivers.local import nvml as nvml_module
from autoscaler.drivers.local.nvml import PyNvml
from autoscaler.state.events import Seen
from tests.support.fakes.nvml import FakeNvml
from tests.support.harness.driver_events import running
from tests.support.harness.local_rig import TINY_ENGINE, LocalRig, python, replica

GIB = 1 << 30
R1 = ReplicaId("r1")


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The simulated NVML instead of the bindings."""
    spec = importlib.util.spec_from_file_location("simulated", Path(__file__).parent / "simulated" / "pynvml.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setenv("SIMULATED_GPU", str(tmp_path / "gpu"))
    monkeypatch.setattr(nvml_module, "pynvml", module)
    return module


def test_memory_reserved_by_the_gpu_driver_is_not_counted_as_usable(simulated: ModuleType) -> None:
    simulated.allocate(GIB)
    (gpu,) = PyNvml().gpus()
    assert gpu.memory_bytes == simulated.TOTAL_BYTES - simulated.RESERVED_BYTES
    assert gpu.used_bytes == GIB


def test_gpu_driver_without_reserved_memory_query_reports_total_as_usable(
    simulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def old(handle: str, version: int = 1) -> object:
        if version != 1:
            raise simulated.NVMLError_FunctionNotFound
        return simulated.Memory(8 * GIB, 0, GIB, 7 * GIB)

    monkeypatch.setattr(simulated, "nvmlDeviceGetMemoryInfo", old)
    (gpu,) = PyNvml().gpus()
    assert (gpu.memory_bytes, gpu.used_bytes) == (8 * GIB, GIB)


def test_replica_over_its_memory_claim_is_logged_at_each_3_percent_growth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("autoscaler.drivers.local.readiness.WEIGH_READY_S", 0.01)
    nvml = FakeNvml()
    rig = LocalRig(tmp_path, nvml=nvml)

    def reports() -> list[str]:
        return [one.message for one in caplog.records if "event=device_memory_exceeded " in one.message]

    async def scenario() -> None:
        driver, (claims, served) = rig.driver(), replica("r1", python(TINY_ENGINE, "{port}"), slices=("GPU-a",))
        claims = msgspec.structs.replace(
            claims, resources=msgspec.structs.replace(claims.resources, memory_bytes=4 * GIB)
        )
        async with running(driver) as observed:
            driver.start(claims, served)
            await observed.until(R1, Seen.READY)
            for used, seen in ((4 * GIB, 0), (5 * GIB, 1), (5 * GIB + 1, 1), (6 * GIB, 2)):
                nvml.holders = {"GPU-a": {rig.main(R1): used}}
                async with asyncio.timeout(60):
                    while observed.of(R1)[-1].used_bytes != used:
                        await observed.more()
                assert len(reports()) == seen
            nvml.holders = {}
            driver.stop(claims, 1.0)
            await observed.until(R1, Seen.CLEAN)

    with caplog.at_level(logging.WARNING):
        try:
            rig.run(scenario())
        finally:
            rig.close()
    assert "replica=r1 used=5Gi claimed=4Gi" in reports()[0]
    assert "raise spec.gpu.memory" in reports()[0]
