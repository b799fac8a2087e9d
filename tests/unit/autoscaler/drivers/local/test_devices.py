"""The inventory of one machine: declared, measured or host memory, and the effect of NVML failures."""

from __future__ import annotations

import pytest

from autoscaler.documents.document_rules import SET_BY_DRIVER
from autoscaler.drivers.local import devices
from autoscaler.drivers.local.devices import Devices, filter_visible_gpus, host_bytes
from autoscaler.drivers.local.nvml import NvmlGpu
from autoscaler.drivers.local.replica_processes import MARK
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import DeclaredDevice
from autoscaler.state.resources import Isolation
from autoscaler.state.world import SliceId
from tests.support.fakes.nvml import FakeNvml

A, B = SliceId("GPU-a"), SliceId("GPU-b")


async def test_declared_devices_are_used_without_querying_nvml() -> None:
    nvml = FakeNvml()
    inventory = Devices((DeclaredDevice(name="gpu0", memory_bytes=Bytes(80 << 30), model="H100"),), lambda: nvml)
    (only,) = await inventory.open()
    assert not inventory.host
    assert (only.id, only.device, only.node, only.memory_bytes, only.product) == (
        "gpu0",
        "gpu0",
        "local",
        80 << 30,
        "H100",
    )
    assert only.shared
    assert only.isolation is Isolation.NONE
    assert nvml.asked == 0
    assert not inventory.environment([only.id])
    assert await inventory.look() is None


async def test_each_gpu_is_one_shared_slice_visible_only_to_its_engines() -> None:
    inventory = Devices((), FakeNvml)
    slices = await inventory.open()
    assert [(s.id, s.product, s.memory_bytes) for s in slices] == [
        (A, "NVIDIA H200", 140 << 30),
        (B, "NVIDIA H200", 140 << 30),
    ]
    assert inventory.environment([B]) == {"CUDA_VISIBLE_DEVICES": "GPU-b"}
    assert inventory.environment([A, B]) == {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b"}
    assert inventory.environment([]) == {"CUDA_VISIBLE_DEVICES": ""}
    assert {MARK, "POD_IP", *inventory.environment([])} == set(SET_BY_DRIVER), "what a document may not set"


@pytest.mark.parametrize(
    ("names", "found"),
    [(None, "abc"), ("0", "a"), ("2,0", "ca"), ("GPU-b", "b"), ("1,9,0", "b"), ("", ""), ("-1", ""), ("MIG-1", "")],
)
def test_cuda_visible_devices_restricts_the_gpus_that_are_used(names: str | None, found: str) -> None:
    gpus = tuple(NvmlGpu(f"GPU-{name}", "T4", 1 << 30) for name in "abc")
    assert [one.uuid for one in filter_visible_gpus(gpus, names)] == [f"GPU-{name}" for name in found]


async def test_host_memory_is_the_only_device_without_nvml() -> None:
    (host,) = await Devices((), lambda: None).open()
    assert (host.id, host.product) == ("host", "")
    assert host.memory_bytes > 0


@pytest.mark.parametrize(
    ("total", "limit", "usable"),
    [
        (100 << 30, None, 80 << 30),  # a fifth is reserved
        (8 << 30, None, 6 << 30),  # 2 GiB are reserved
        (2 << 30, None, 1 << 30),  # at most half is reserved
        (100 << 30, 8 << 30, 6 << 30),  # a container's limit counts
    ],
)
def test_part_of_host_memory_or_of_the_container_limit_is_reserved(total: int, limit: int | None, usable: int) -> None:
    assert host_bytes(total, limit) == usable


async def test_lost_gpu_is_unhealthy_until_recovery() -> None:
    nvml = FakeNvml()
    inventory = Devices((), lambda: nvml)
    await inventory.open()
    assert await inventory.look() is None
    nvml.found = (nvml.found[0]._replace(healthy=False), nvml.found[1])
    assert [s.healthy for s in await inventory.look() or ()] == [False, True]
    assert await inventory.look() is None
    nvml.failure = "driver not loaded"
    assert [s.healthy for s in await inventory.look() or ()] == [False, False]
    nvml.failure, nvml.found = "", (nvml.found[0]._replace(healthy=True), nvml.found[1])
    assert [s.healthy for s in await inventory.look() or ()] == [True, True]


async def test_hanging_nvml_marks_devices_unhealthy_and_is_not_queried_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ANSWER_SECONDS_MAX", 0.02)
    nvml = FakeNvml()
    inventory = Devices((), lambda: nvml)
    await inventory.open()
    nvml.answers.clear()
    assert [s.healthy for s in await inventory.look() or ()] == [False, False]
    assert await inventory.look() is None
    assert nvml.asked == 2
    nvml.answers.set()
    monkeypatch.setattr(devices, "ANSWER_SECONDS_MAX", 5.0)
    assert [s.healthy for s in await inventory.look() or ()] == [True, True]


async def test_memory_is_reported_only_for_requested_processes() -> None:
    nvml = FakeNvml()
    nvml.holders = {"GPU-a": {1: 100, 2: 50}, "GPU-b": {1: 10}}
    inventory = Devices((), lambda: nvml)
    await inventory.open()
    assert await inventory.holding([A, B], [1, 3]) == {1: 110}
