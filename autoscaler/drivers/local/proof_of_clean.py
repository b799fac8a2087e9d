"""Ensures that no process and no GPU memory of a replica is left, and returns the proof of CLEAN. I/O.

Kills and scans until a complete scan of /proc finds none of its processes. For a replica that was observed on a GPU, it
then waits until NVML shows none of them there. It has no time limit, so that a slice is never reused while a process
holds it. Once a minute it reports the remaining processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from autoscaler.drivers.local.devices import Devices
from autoscaler.drivers.local.nvml import NvmlError
from autoscaler.drivers.local.replica_processes import (
    ProcessSelector,
    Reaper,
    find_processes,
    read_process,
    send_signal,
)
from autoscaler.drivers.resilient_tasks import retry_on_shortage
from autoscaler.state.world import SliceId

FIRST_PAUSE_S, PAUSE_S_MAX = 0.002, 1.0
PAUSE_SHARE = 0.1
"""The pause between two checks of a device's memory is at most this share of the time already spent, because the device
is idle during the pause. Usually its memory is free within tenths of a second after the end of a process."""
ALARM_S = 60.0
LOOKS_MAX = 3
"""This many consecutive scans without a match count as a complete one: other processes start and end constantly."""

EXITED, MEASURED = "exited", "measured"

Alarm = Callable[[str], None]
"""Receives a description of the remaining processes or memory, once per `ALARM_S`."""


class _Patience:
    """Growing pauses between checks, with an alarm every `ALARM_S`.
    `share`: maximum pause as a share of the time since the first check.
    """

    def __init__(self, clock: Callable[[], float], alarm: Alarm, share: float = inf) -> None:
        self._clock, self._alarm = clock, alarm
        self._share, self._began_s = share, clock()
        self._pause_s = FIRST_PAUSE_S
        self._alarm_s = clock() + ALARM_S

    async def wait(self, what: str) -> None:
        if self._clock() >= self._alarm_s:
            self._alarm_s += ALARM_S
            self._alarm(what)
        await asyncio.sleep(self._pause_s)
        within_s = max(FIRST_PAUSE_S, self._share * (self._clock() - self._began_s))
        self._pause_s = min(2 * self._pause_s, within_s, PAUSE_S_MAX)


async def kill_all(claim: ProcessSelector, reaper: Reaper, clock: Callable[[], float], alarm: Alarm) -> frozenset[int]:
    """Kill until no living process of the claim is left. Return those outside of the main process' group."""
    patience, looks, outlived = _Patience(clock, alarm), 0, set[int]()
    while True:
        if claim.held:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(claim.main_pid, signal.SIGKILL)  # the whole group at once, so that no fork is missed
        left, complete = await find_processes(claim, reaper)
        if not left:
            looks += 1
            if complete or looks == LOOKS_MAX:
                return frozenset(outlived)
            await asyncio.sleep(FIRST_PAUSE_S)
            continue
        looks = 0
        outlived |= {one.pid for one in left if _group(one.pid) not in {0, claim.main_pid}}
        await retry_on_shortage(partial(send_signal, left, signal.SIGKILL))
        await patience.wait(f"processes {', '.join(str(one.pid) for one in left)} do not end after SIGKILL")


def _group(pid: int) -> int:
    """Return the process group; 0: the process has ended."""
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


async def prove_clean(
    devices: Devices, slices: Iterable[SliceId], gpu_pids: Iterable[int], clock: Callable[[], float], alarm: Alarm
) -> str:
    """Return the proof; call it after `kill_all`. MEASURED: NVML reported its processes earlier and no longer does."""
    slices, pids = tuple(slices), [pid for pid in gpu_pids if await retry_on_shortage(partial(_ended, pid))]
    if not pids or not devices.measured:
        return EXITED
    patience = _Patience(clock, alarm, PAUSE_SHARE)
    while True:
        try:
            left = await devices.holding(slices, pids)
            what = f"processes {', '.join(map(str, left))} ended and still hold GPU memory"
        except NvmlError as error:
            left, what = {0: 0}, f"NVML does not report whether its GPU memory is free ({error})"
        if not left:
            return MEASURED
        await patience.wait(what)


def _ended(pid: int) -> bool:
    """Return whether the process has ended. Its processes were killed, so a running one would be a reuse of the pid."""
    one = read_process(pid)
    return one is None or one.gone
