"""Tests of the real NVML on machines with a GPU; on others each test reports why it was skipped."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from collections.abc import Iterator

import pytest

from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.nvml import Nvml, NvmlError, PyNvml

HOLDS_MEMORY = """
import ctypes, sys
cuda = ctypes.CDLL("libcuda.so.1")
device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
assert cuda.cuInit(0) == 0 and cuda.cuDeviceGet(ctypes.byref(device), 0) == 0
assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(memory), ctypes.c_size_t(256 << 20)) == 0
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def nvml() -> Nvml:
    try:
        found = PyNvml()
    except NvmlError as error:
        pytest.skip(f"no GPU here: {error}")
    if not found.gpus():
        pytest.skip("no GPU here: NVML lists none")
    return found


@pytest.fixture
def holder(nvml: Nvml) -> Iterator[subprocess.Popen[str]]:
    """A process that holds 256 MiB of a GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.skip(f"no CUDA here: {error}")
    argv = [sys.executable, "-c", HOLDS_MEMORY]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "holds\n"
        yield process
        process.kill()


async def test_each_gpu_listed_by_nvml_is_a_healthy_device(nvml: Nvml) -> None:
    slices = await Devices((), lambda: nvml).open()
    assert slices
    assert all(s.healthy and s.memory_bytes > 1 << 30 and s.product and s.id.startswith("GPU-") for s in slices)


async def test_gpu_memory_of_a_process_is_reported_until_the_process_ends(
    nvml: Nvml, holder: subprocess.Popen[str]
) -> None:
    inventory = Devices((), lambda: nvml)
    slices = [s.id for s in await inventory.open()]
    held = await inventory.holding(slices, [holder.pid])
    if not held:
        pytest.skip("NVML reports no process of this pid namespace: proofs are `exited` here")
    assert held[holder.pid] >= 256 << 20
    holder.kill()
    holder.wait()
    assert not await inventory.holding(slices, [holder.pid])
