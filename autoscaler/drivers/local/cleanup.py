"""Making sure that nothing of a Replica is left, and saying how that is known: the proof of clean. I/O.

Kills and looks again until a complete look through /proc finds none of its processes, however long that takes; then,
for a Replica that was seen on a GPU, until NVML shows none of them there. It never gives up, so that a Slice is never
given to another while something holds it; it says so once a minute.
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
from autoscaler.drivers.local.processes import ProcessSelector, Reaper, find_processes, read_process, send_signal
from autoscaler.drivers.resource_shortage import retry_on_shortage
from autoscaler.state.world import SliceId

FIRST_PAUSE_S, PAUSE_S_MAX = 0.002, 1.0
PAUSE_SHARE = 0.1
"""A look at the memory of a device waits at most for this part of the time that it has already taken: the device is
idle meanwhile, and its memory is free within tenths of a second of the end of a process, as a rule."""
ALARM_S = 60.0
LOOKS_MAX = 3
"""So many looks in a row without a find count as a complete one: elsewhere processes come and go all the time."""

EXITED, MEASURED = "exited", "measured"

Alarm = Callable[[str], None]
"""Told once in ALARM_S what is still there."""


class _Patience:
    """Ever longer pauses between looks, and an alarm at every full minute. `share`: a pause is at most so much of the
    time since the first look.
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


async def kill_all(claim: ProcessSelector, reaper: Reaper, clock: Callable[[], float], alarm: Alarm) -> None:
    """Returns when no living process of the claim is left."""
    patience, looks = _Patience(clock, alarm), 0
    while looks < LOOKS_MAX:
        if claim.held:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(claim.main_pid, signal.SIGKILL)  # the whole group at once: no fork slips through
        left, complete = await find_processes(claim, reaper)
        if not left:
            if complete:
                return
            looks += 1
            await asyncio.sleep(FIRST_PAUSE_S)
            continue
        looks = 0
        await retry_on_shortage(partial(send_signal, left, signal.SIGKILL))
        await patience.wait(f"processes {', '.join(str(one.pid) for one in left)} do not end after SIGKILL")


async def prove_clean(
    devices: Devices, slices: Iterable[SliceId], gpu_pids: Iterable[int], clock: Callable[[], float], alarm: Alarm
) -> str:
    """Returns the proof, once `kill_all` has: MEASURED when NVML saw its processes before and does not now."""
    slices, pids = tuple(slices), [pid for pid in gpu_pids if await retry_on_shortage(partial(_ended, pid))]
    if not pids or not devices.measured:
        return EXITED
    patience = _Patience(clock, alarm, PAUSE_SHARE)
    while True:
        try:
            left = await devices.holding(slices, pids)
            what = f"processes {', '.join(map(str, left))} ended and still hold GPU memory"
        except NvmlError as error:
            left, what = {0: 0}, f"NVML does not tell whether its GPU memory is free ({error})"
        if not left:
            return MEASURED
        await patience.wait(what)


def _ended(pid: int) -> bool:
    """None of its processes lives any more, so that a living one with this pid is somebody else."""
    one = read_process(pid)
    return one is None or one.gone
