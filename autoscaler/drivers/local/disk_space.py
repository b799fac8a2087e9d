"""Free space on the disk of the state directory, which holds the logs of engines. I/O.

Many engines exit when a write fails. A full disk is a fault of the machine and not a failed start: starts wait for
space.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import NamedTuple

FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
BYTES_MIN = 64 << 10
"""Enough for the record of a replica and the first lines of its log."""
LOOK_S = 1.0
REASON = "the disk of the state directory is full; free space on it"


class Space(NamedTuple):
    """Free space for this user. `files` None: the file system has no limit on the number of files."""

    bytes: int
    files: int | None = None


def is_full(space: Space) -> bool:
    """Return whether the disk has too little space for the log of an engine."""
    return space.bytes < BYTES_MIN or space.files == 0


def measure_free_space(folder: Path) -> Space:
    """Measure the file system of `folder` with statvfs(3). If that fails, return unlimited space."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return Space(sys.maxsize)
    return Space(found.f_bavail * found.f_frsize, found.f_favail if found.f_files else None)


def is_out_of_space(error: BaseException) -> bool:
    """Return whether a write failed for lack of space or quota, which `measure_free_space` does not measure."""
    return isinstance(error, OSError) and error.errno in FULL


async def wait_for_space(folder: Path, stop: asyncio.Event) -> bool:
    """Wait until there is space; False if `stop` is set first."""
    while not stop.is_set():
        try:
            async with asyncio.timeout(LOOK_S):
                await stop.wait()
        except TimeoutError:
            if not is_full(measure_free_space(folder)):
                return True
    return False
