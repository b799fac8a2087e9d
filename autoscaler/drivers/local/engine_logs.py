"""Engines' output, one log file each, limited in size. I/O.

The engine itself has its file open for appending, without a pipe: it never blocks on us, and continues to log when
Pilotlight is killed. The driver trims the file to its newest part; a line written during a trim may be lost.
"""

from __future__ import annotations

import os
from pathlib import Path

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
