"""Engines' output, one log file each, limited in size, and the free space on the disk of these files. I/O.

The engine itself has its file open for appending, without a pipe: it never blocks on us, and continues to log when
Pilotlight is killed. The driver trims the file to its newest part; a line written during a trim may be lost. Many
engines exit when a write fails. A full disk is a fault of the machine and not a failed start: starts wait for space.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
from pathlib import Path
from typing import NamedTuple

from autoscaler.text import one_line

BYTES_MAX = 4 << 20
"""A file may exceed this between two calls of `prune_logs`."""
KEPT_BYTES = 1 << 20
"""The newest part that a trim keeps."""
FILES_MAX = 100
"""Number of logs of ended replicas that are kept, newest first."""
LINE_CHARACTERS_MAX = 300


def open_for_engine(path: Path) -> int:
    """Open a file as an engine's output and return its descriptor. Raises `OSError`."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def trim_log(path: Path) -> None:
    """Trim a log that exceeds its limit to its newest part. A missing log is no error."""
    try:
        if path.stat().st_size <= BYTES_MAX:
            return
        fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        newest = os.pread(fd, KEPT_BYTES, os.fstat(fd).st_size - KEPT_BYTES)
        os.ftruncate(fd, 0)
        os.write(fd, newest[newest.find(b"\n") + 1 :])
    finally:
        os.close(fd)


def last_line(path: Path) -> str:
    """Return the last non-empty line, printable and limited in length; empty if there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = map(one_line, reversed(lines))
    return next((line[:LINE_CHARACTERS_MAX] for line in said if line), "")


def prune_logs(folder: Path, in_use: frozenset[Path]) -> None:
    """Trim the logs in use, and remove the oldest of the others beyond `FILES_MAX`. Raises `OSError`."""
    for path in in_use:
        trim_log(path)
    logs = [path for path in folder.glob("*.log") if path not in in_use]
    if len(logs) > FILES_MAX:
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[:-FILES_MAX]:
            path.unlink(missing_ok=True)


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
