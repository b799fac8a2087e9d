"""GPUs of this machine as NVIDIA's management library (NVML) reports them. I/O; calls may block for a long time.

The rest of the product uses the Protocol `Nvml`, so that a fake can replace it. `open_nvml` returns None on a machine
without a driver, which is not an error.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import pynvml


class NvmlGpu(NamedTuple):
    """One GPU. `healthy` False: NVML could not read it."""

    uuid: str
    product: str
    memory_bytes: int
    healthy: bool = True
    used_bytes: int = 0
    """Memory used by all processes."""


class NvmlError(Exception):
    """An NVML call failed. `str()` is NVML's message."""


class Nvml(Protocol):
    """The queries of the local driver. All calls may block and raise `NvmlError`."""

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """Return all GPUs, in the driver's order; a GPU that is lost stays in the list, unhealthy."""

    def memory_by_pid(self, uuid: str) -> dict[int, int]:
        """Return pid -> bytes of a GPU's memory, for each process that has any; 0 if the amount is unknown."""


class PyNvml:
    """NVML through NVIDIA's own bindings (`nvidia-ml-py`)."""

    def __init__(self) -> None:
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        self._seen: dict[int, NvmlGpu] = {}

    def gpus(self) -> tuple[NvmlGpu, ...]:
        """Return all GPUs, in the driver's order."""
        try:
            count = int(pynvml.nvmlDeviceGetCount())
        except pynvml.NVMLError as error:
            raise NvmlError(str(error)) from error
        for index in range(count):
            try:
                handle = pynvml.nvmlDeviceGetHandleByIndex(index)
                total_bytes, used_bytes = _memory(handle)
                self._seen[index] = NvmlGpu(
                    uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
                    product=_text(pynvml.nvmlDeviceGetName(handle)),
                    memory_bytes=total_bytes,
                    used_bytes=used_bytes,
                )
            except pynvml.NVMLError as error:
                if index not in self._seen:
                    raise NvmlError(f"GPU {index}: {error}") from error
                self._seen[index] = self._seen[index]._replace(healthy=False)
        return tuple(gpu if index < count else gpu._replace(healthy=False) for index, gpu in self._seen.items())

    def memory_by_pid(self, uuid: str) -> dict[int, int]:
        """Return pid -> bytes of a GPU's memory, for processes with compute or graphics contexts on it."""
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(uuid)
            holders = [
                *pynvml.nvmlDeviceGetComputeRunningProcesses(handle),
                *pynvml.nvmlDeviceGetGraphicsRunningProcesses(handle),
                *_mps_clients(handle),
            ]
        except pynvml.NVMLError as error:
            raise NvmlError(f"GPU {uuid}: {error}") from error
        found: dict[int, int] = {}
        for holder in holders:
            found[int(holder.pid)] = max(found.get(int(holder.pid), 0), int(holder.usedGpuMemory or 0))
        return found


def _mps_clients(handle: object) -> list[Any]:
    """Return the clients of the MPS daemon, which some drivers list only in this call."""
    try:
        return list(pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle))
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return []


def open_nvml() -> Nvml | None:
    """Return NVML if it initializes and reports a GPU, else None."""
    try:
        nvml = PyNvml()
        return nvml if nvml.gpus() else None
    except NvmlError:
        return None


def _memory(handle: object) -> tuple[int, int]:
    """Return (bytes usable by processes, bytes in use), both without the driver's reserve, if it reports that."""
    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(memory.total) - int(memory.reserved), int(memory.used)
    except pynvml.NVMLError_FunctionNotFound:  # drivers before 510
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return int(memory.total), int(memory.used)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
