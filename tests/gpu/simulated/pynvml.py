"""A simulated NVML: the part of NVIDIA's Python bindings that Pilotlight calls, for runs without a GPU.

Put this folder first on PYTHONPATH and set SIMULATED_GPU to a folder. Simulated engines call `allocate`; the memory of
an ended process stays in use for LINGER_S, as on a real device while the driver frees it.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

UUID = "GPU-51313131-0000-4000-8000-000000000000"
PRODUCT = "Simulated GPU"
DRIVER = "580.0"
TOTAL_BYTES = 8 << 30
RESERVED_BYTES = 64 << 20
"""Reserved by the driver and unavailable to processes."""
LINGER_S = 0.15
nvmlMemory_v2 = 2
NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_FUNCTION_NOT_FOUND = 13


class NVMLError(Exception):
    """The base class of the bindings' errors."""

    def __init__(self, value: int = NVML_ERROR_NOT_SUPPORTED) -> None:
        super().__init__("Not Supported")
        self.value = value


class NVMLError_NotSupported(NVMLError):
    """The device does not support the function."""


class NVMLError_FunctionNotFound(NVMLError):
    """The driver is too old for the function."""


class OutOfMemoryError(Exception):
    """The error that CUDA reports when an allocation does not fit."""


class Memory(NamedTuple):
    """Bytes of a device."""

    total: int
    reserved: int
    used: int
    free: int


class Process(NamedTuple):
    """One process that holds memory of a device."""

    pid: int
    usedGpuMemory: int


def allocate(size_bytes: int) -> None:
    """Set the device memory of this process. Raises OutOfMemoryError."""
    with _locked() as folder:
        others = sum(size for pid, size in _holders(folder).items() if pid != os.getpid())
        free = min(TOTAL_BYTES - RESERVED_BYTES - others, _mps_limit_bytes())
        if size_bytes > free:
            raise OutOfMemoryError(f"CUDA out of memory: {size_bytes >> 20} MiB wanted, {free >> 20} MiB free")
        (folder / str(os.getpid())).write_text(str(size_bytes))


def _mps_limit_bytes() -> int:
    """The limit of a client of the MPS daemon, such as `0=2G` or `0=512MB`."""
    number, unit = re.findall(r"^0=(\d+)([GM])|$", os.environ.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", ""))[0]
    return int(number) << {"G": 30, "M": 20}[unit] if number else TOTAL_BYTES


def nvmlInit() -> None:
    """Do nothing: the simulation needs no initialisation."""


def nvmlSystemGetDriverVersion() -> str:
    """The simulated driver's version."""
    return DRIVER


def nvmlDeviceGetCount() -> int:
    """One device."""
    return 1


def nvmlDeviceGetHandleByIndex(index: int) -> str:
    """The UUID serves as the handle."""
    return UUID


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    """The UUID serves as the handle."""
    return uuid


def nvmlDeviceGetUUID(handle: str) -> str:
    """The device's UUID."""
    return handle


def nvmlDeviceGetName(handle: str) -> str:
    """The product name."""
    return PRODUCT


def nvmlDeviceGetMigMode(handle: str) -> list[int]:
    """As on a product without MIG."""
    raise NVMLError


def nvmlDeviceGetMemoryInfo(handle: str, version: int = 1) -> Memory:
    """Version 1 counts reserved memory as used, version 2 reports it separately."""
    with _locked() as folder:
        used = sum(_holders(folder).values())
    free = TOTAL_BYTES - RESERVED_BYTES - used
    return Memory(TOTAL_BYTES, RESERVED_BYTES, used if version == nvmlMemory_v2 else used + RESERVED_BYTES, free)


def nvmlDeviceGetComputeRunningProcesses(handle: str) -> list[Process]:
    """All processes that hold memory."""
    with _locked() as folder:
        return [Process(pid, size) for pid, size in _holders(folder).items()]


def nvmlDeviceGetGraphicsRunningProcesses(handle: str) -> list[Process]:
    """None: no process uses graphics."""
    return []


def nvmlDeviceGetMPSComputeRunningProcesses(handle: str) -> list[Process]:
    """None: there is no MPS daemon."""
    return []


@contextmanager
def _locked() -> Iterator[Path]:
    folder = Path(os.environ["SIMULATED_GPU"])
    folder.mkdir(exist_ok=True, parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield folder


def _holders(folder: Path) -> dict[int, int]:
    """Bytes by pid, of living processes and of those that ended less than LINGER_S ago."""
    found: dict[int, int] = {}
    for path in folder.iterdir():
        if not path.name.isdecimal():
            continue
        pid, ended = int(path.name), folder / f"{path.name}.ended"
        if _lives(pid):
            found[pid] = int(path.read_text() or 0)
            continue
        if not ended.exists():
            ended.write_text(str(time.time()))
        if time.time() - float(ended.read_text()) < LINGER_S:
            found[pid] = int(path.read_text() or 0)
        else:
            path.unlink()
            ended.unlink()
    return found


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
