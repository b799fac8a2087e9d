"""Reloads certificate and token files that are replaced while a process runs.

If a new file is invalid, the last valid one stays in force and one line is logged. A file is not read while it is still
being written.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import click

from pilotlight.net.certificates import FileError

LOOK_S = 1.0
"""Check interval. A changed file is read once two checks in a row see the same state."""

T = TypeVar("T")
Mark = tuple[int, int, int]

log = logging.getLogger("pilotlight.bounded_files")


class Renewed(Generic[T]):
    """The value that `read` makes of `files`; calling it returns the current one. The constructor raises FileError."""

    def __init__(self, read: Callable[[], T], files: Sequence[Path]) -> None:
        self._read = read
        self._files = tuple(files)
        self._marks = stat_files(self._files)  # before reading, so that later changes are noticed
        self._value = read()

    def __call__(self) -> T:
        """Return the current value."""
        return self._value

    async def follow(self) -> None:
        """Check the files until cancelled."""
        seen = self._marks
        while True:
            await asyncio.sleep(LOOK_S)
            before, seen = seen, await asyncio.to_thread(stat_files, self._files)
            if seen == self._marks or seen != before:
                continue
            self._marks = seen
            try:
                self._value = await asyncio.to_thread(self._read)
            except FileError as error:
                log.warning("event=file_reload_failed error=%s", error)
            else:
                log.warning("event=file_reloaded files=%r", ", ".join(map(str, self._files)))


class Files:
    """All files of a process that are reloaded; `follow` keeps them up to date."""

    def __init__(self) -> None:
        self._follow: list[Callable[[], Coroutine[None, None, None]]] = []

    def read(self, read: Callable[[], T], files: Sequence[Path]) -> Renewed[T]:
        """Read files and reload them from now on. Raises click's usage error if a file cannot be used."""
        try:
            one = Renewed(read, files)
        except FileError as error:
            raise click.UsageError(str(error)) from None
        self._follow.append(one.follow)
        return one

    async def follow(self) -> None:
        """Check all files until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for follow in self._follow:
                tasks.create_task(follow())


def stat_files(files: Sequence[Path]) -> tuple[Mark | None, ...]:
    """Return a value per file that changes with the file; None for a missing one. Symbolic links are followed."""
    return tuple(map(_mark, files))


def _mark(path: Path) -> Mark | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
