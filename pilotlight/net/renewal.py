"""What files say, kept up to date: certificates and tokens are replaced under a running process.

Owns when a file is read again and what is said about it. Promises: a new file that is broken leaves the last good one
in force, and says so in one line; nothing is taken while it is still being written.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import click

from pilotlight.net.certificates import FileError
from pilotlight.output import write_stderr

LOOK_S = 1.0
"""How often files are looked at; what has changed is read when two looks in a row saw the same."""

T = TypeVar("T")
Mark = tuple[int, int, int]


class Renewed(Generic[T]):
    """The value that `read` makes of `files`; calling it gives the one in force. Raises FileError when it is made."""

    def __init__(self, read: Callable[[], T], files: Sequence[Path]) -> None:
        self._read = read
        self._files = tuple(files)
        self._marks = stat_files(self._files)  # before reading: what changes meanwhile is seen
        self._value = read()

    def __call__(self) -> T:
        """What is in force."""
        return self._value

    async def follow(self) -> None:
        """Looks at the files until cancelled."""
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
                write_stderr(f"{error}; what was read before stays in force")
            else:
                write_stderr(f"{', '.join(map(str, self._files))}: read again")


class Files:
    """All that one process reads so. `follow` keeps it up to date."""

    def __init__(self) -> None:
        self._follow: list[Callable[[], Coroutine[None, None, None]]] = []

    def read(self, read: Callable[[], T], files: Sequence[Path]) -> Renewed[T]:
        """Raises click's usage error on a file that cannot be used."""
        try:
            one = Renewed(read, files)
        except FileError as error:
            raise click.UsageError(str(error)) from None
        self._follow.append(one.follow)
        return one

    async def follow(self) -> None:
        """Looks at all of them until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for follow in self._follow:
                tasks.create_task(follow())


def stat_files(files: Sequence[Path]) -> tuple[Mark | None, ...]:
    """What changes when a file does; None for one that is not there. Links are followed."""
    return tuple(map(_mark, files))


def _mark(path: Path) -> Mark | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_size, stat.st_mtime_ns
