"""Reads weights into the page cache ahead of the engine; starts when the first request for a Model is queued. I/O.

Reads at most `bytes_max` bytes at no more than `bytes_per_s`, so that running engines keep their disk bandwidth and
memory. Cancellation takes effect between two steps. Unreadable files are skipped, since this only saves time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from artifacts.disk.thread_wait import run_in_thread

STEP_BYTES = 16 << 20
"""Bytes per request to the kernel; cancellation waits for at most one such request."""
BYTES_PER_S = 4 << 30
BYTES_MAX = 1 << 40

Advise = Callable[[int, int, int], None]


def advise_willneed(fd: int, first: int, size: int) -> None:
    """Ask the kernel to read ahead (posix_fadvise(2))."""
    os.posix_fadvise(fd, first, size, os.POSIX_FADV_WILLNEED)


async def warm_page_cache(
    files: Sequence[Path],
    *,
    bytes_max: int = BYTES_MAX,
    bytes_per_s: float = BYTES_PER_S,
    advise: Advise = advise_willneed,
) -> int:
    """Request readahead of the files in order; return the number of bytes requested."""
    stopped = threading.Event()
    work = partial(_warmed, files, bytes_max, bytes_per_s, advise, stopped)
    return await run_in_thread(work, interrupt=stopped.set)


def _warmed(files: Sequence[Path], bytes_max: int, bytes_per_s: float, advise: Advise, stopped: threading.Event) -> int:
    asked, began_s = 0, time.monotonic()
    for path in files:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            at, size = 0, os.fstat(fd).st_size
            while at < size and asked < bytes_max:
                step = min(STEP_BYTES, size - at, bytes_max - asked)
                advise(fd, at, step)
                at, asked = at + step, asked + step
                if stopped.wait(max(asked / bytes_per_s - (time.monotonic() - began_s), 0.0)):
                    return asked
        except OSError:
            continue
        finally:
            os.close(fd)
    return asked
