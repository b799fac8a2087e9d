"""Samples a device through NVML while the steps run: memory in use, and memory by process, including ended ones."""

from __future__ import annotations

import threading
import time
from math import inf
from pathlib import Path
from typing import NamedTuple

import pynvml

EVERY_S = 0.01
AFTER_S = 0.02
"""From a start to the sample that shows the memory then: the kernel rounds the time of a start, and a query takes time.
"""
GAP_S_MAX = 0.06
"""Maximum gap between the samples around a start; in a longer one, memory that was not free could go unnoticed."""


class Sample(NamedTuple):
    """One sample. `at_s`: Unix seconds, after NVML's response."""

    at_s: float
    used_bytes: int
    """Without the memory that the driver reserves."""
    by_pid: dict[int, int]
    ended: frozenset[int]
    """Those of the processes that are no longer alive."""


class Watch:
    """A thread that samples until `stop`. A failed sample is counted, and the last error kept."""

    def __init__(self, uuid: str) -> None:
        self.samples: list[Sample] = []
        self.failures, self.error = 0, ""
        self.mps = False
        """Whether an MPS daemon runs, whose clients NVML lists separately."""
        self._uuid = uuid
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether the thread still samples."""
        return self._thread.is_alive()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join(timeout=5)

    def look(self) -> Sample:
        """Take one sample now."""
        handle = pynvml.nvmlDeviceGetHandleByUUID(self._uuid)
        by_pid = held(handle, mps=self.mps)
        used = int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).used)
        return Sample(time.time(), used, by_pid, frozenset(pid for pid in by_pid if not lives(pid)))

    def since(self, began_s: float) -> list[Sample]:
        """The samples from that time on."""
        return [one for one in self.samples if one.at_s >= began_s]

    def peak(self, pid: int, began_s: float = 0.0) -> int:
        """The most memory that a process held in a sample; 0: NVML did not list it."""
        return max((one.by_pid.get(pid, 0) for one in self.since(began_s)), default=0)

    def peak_used(self, began_s: float) -> int:
        """The most memory in use since then."""
        return max((one.used_bytes for one in self.since(began_s)), default=0)

    def ended_s(self, pid: int) -> float | None:
        """When a process was first seen to have ended."""
        return next((one.at_s for one in self.samples if pid in one.ended), None)

    def freed_s(self, pid: int) -> float | None:
        """When NVML first no longer listed a process that it had listed before."""
        listed = [number for number, one in enumerate(self.samples) if pid in one.by_pid]
        after = listed[-1] + 1 if listed else len(self.samples)
        return self.samples[after].at_s if after < len(self.samples) else None

    def gap_s(self, at_s: float) -> float:
        """The time between the samples before `at_s` and after it (as in `first_after`); inf: there is none."""
        before = max((one.at_s for one in self.samples if one.at_s <= at_s), default=-inf)
        after = self.first_after(at_s)
        return inf if after is None else after.at_s - before

    def first_after(self, at_s: float) -> Sample | None:
        """The first sample after a start at that time; the kernel rounds the time of a start."""
        return next((one for one in self.samples if one.at_s > at_s + AFTER_S), None)

    def idle_bytes(self) -> int:
        """The least memory in use in any sample: that of other processes and of the driver."""
        return min((one.used_bytes for one in self.samples), default=0)

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:  # noqa: BLE001 - the run reports it as a failure
            self.error = f"{type(error).__name__}: {error}"

    def _sample(self) -> None:
        pynvml.nvmlInit()
        while not self._stopped.wait(EVERY_S):
            try:
                self.samples.append(self.look())
            except (pynvml.NVMLError, OSError) as error:
                self.failures, self.error = self.failures + 1, f"{type(error).__name__}: {error}"


def held(handle: object, *, mps: bool) -> dict[int, int]:
    """Bytes by pid, of ordinary processes and of those under MPS."""
    listed = [*pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
    try:
        listed += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(handle) if mps else []
    except pynvml.NVMLError as error:
        if error.value not in {pynvml.NVML_ERROR_NOT_SUPPORTED, pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}:
            raise
    by_pid: dict[int, int] = {}
    for one in listed:
        by_pid[int(one.pid)] = max(by_pid.get(int(one.pid), 0), int(one.usedGpuMemory or 0))
    return by_pid


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in {"Z", "X"}
