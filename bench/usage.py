"""Resource usage of processes: CPU time in microseconds, and their memory.

Reads /proc. CPU time is from `schedstat` of every thread: nanoseconds on a core (sched-stats.txt), because the ticks of
`stat` are 10 ms. Threads that have ended since the last sample are missing; the peers keep their threads.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import psutil


def ran_us(processes: Sequence[psutil.Process]) -> float:
    """Return the microseconds for which these processes have run so far."""
    return sum(_ran_ns(process.pid) for process in processes) / 1e3


def family(pid: int) -> list[psutil.Process]:
    """Return a process and all its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def rss_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return their resident memory."""
    return sum(process.memory_info().rss for process in processes)


def _ran_ns(pid: int) -> int:
    total = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            total += int((thread / "schedstat").read_bytes().split()[0])
    return total
