"""Engines' output: one file each, bounded, written by the engine itself. I/O; owns how the files are kept small.

The engine has the file open for appending, with no pipe and no thread of ours between: it never blocks on us, and lives
and logs on when Pilotlight is killed. Who looks after it trims the file, keeping its newest part; a line that is
written in the very moment of a trim may be lost.
"""

from __future__ import annotations

import os
from pathlib import Path

from autoscaler.text import one_line

BYTES_MAX = 4 << 20
"""A file may grow over it between two visits of `prune_logs`."""
KEPT_BYTES = 1 << 20
"""What a trim leaves: the newest."""
FILES_MAX = 100
"""Logs of Replicas that ended are kept for people, the newest ones."""
LINE_CHARACTERS_MAX = 300


def open_for_engine(path: Path) -> int:
    """A file descriptor to give to an engine as its output. Raises OSError."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)


def trim_log(path: Path) -> None:
    """Keeps the newest part of a log that has grown over its bound. A log that does not exist is fine."""
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
    """The last line that says something, printable and bounded; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 8192))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    said = map(one_line, reversed(lines))
    return next((line[:LINE_CHARACTERS_MAX] for line in said if line), "")


def prune_logs(folder: Path, in_use: frozenset[Path]) -> None:
    """Trims the logs in use, and removes the oldest of the others over FILES_MAX. Raises OSError."""
    for path in in_use:
        trim_log(path)
    logs = [path for path in folder.glob("*.log") if path not in in_use]
    if len(logs) > FILES_MAX:
        for path in sorted(logs, key=lambda path: path.stat().st_mtime)[:-FILES_MAX]:
            path.unlink(missing_ok=True)
