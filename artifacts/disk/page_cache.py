"""Weights into the page cache, ahead of the engine that will read them: begun when a Model's first Call is parked. I/O.

Owns the pace. Promises: no more than `bytes_max`, and no faster than `bytes_per_s`, so that engines that run are not
starved of their disk or their memory; it ends between two steps when it is cancelled. What cannot be read is passed by:
this is only ever about time.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

STEP_BYTES = 16 << 20
"""Asked for at once; cancelling waits for no more."""
BYTES_PER_S = 4 << 30
BYTES_MAX = 1 << 40

Advise = Callable[[int, int, int], None]


def advise_willneed(fd: int, first: int, size: int) -> None:
    """The kernel reads it ahead (posix_fadvise(2))."""
    os.posix_fadvise(fd, first, size, os.POSIX_FADV_WILLNEED)


async def warm_page_cache(
    files: Sequence[Path],
    *,
    bytes_max: int = BYTES_MAX,
    bytes_per_s: float = BYTES_PER_S,
    advise: Advise = advise_willneed,
) -> int:
    """Asks for the files' bytes in their order; how many it asked for."""
    stopped = threading.Event()
    work = asyncio.ensure_future(asyncio.to_thread(lambda: _warmed(files, bytes_max, bytes_per_s, advise, stopped)))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        stopped.set()
        await asyncio.wait({work})
        raise


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
