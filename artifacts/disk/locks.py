"""Inter-process locks with `flock` on a file; the kernel releases them when a process ends for any reason. I/O.

A held lock always belongs to the file that currently has the name, not to one that was removed or renamed meanwhile.
Asynchronous waiting does not block the event loop and can be cancelled. Process ids are not used to decide whether a
lock is held.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Self

FIRST_WAIT_S = 0.002
WAIT_S_MAX = 0.1


class Flock:
    """A held lock. Use as a context manager, or call `close`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """If passed to a child process (`pass_fds`), the lock is held until the child has ended too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock. It stays held while a child process has a copy of the descriptor."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def try_lock(path: Path, *, shared: bool = False, make: bool = False) -> Flock | None:
    """Take the lock if it is free; None if it is held. Raises OSError; FileNotFoundError unless `make`."""
    flags = os.O_RDONLY | (os.O_CREAT if make else 0)
    while True:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            if _lies_there(fd, path):
                return Flock(fd)
        except BlockingIOError:
            os.close(fd)
            return None
        except OSError:
            os.close(fd)
            raise
        os.close(fd)  # the file was removed or renamed in between: try the file that has the name now


def wait_for_lock(path: Path, within_s: float, *, shared: bool = False, make: bool = False) -> Flock:
    """As `try_lock`, but block until the lock is free; for locks held only briefly. Raises TimeoutError."""
    end_s, wait_s = time.monotonic() + within_s, FIRST_WAIT_S
    while (found := try_lock(path, shared=shared, make=make)) is None:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{path} is locked by another process for more than {within_s:.0f} s")
        time.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_S_MAX)
    return found


@contextlib.asynccontextmanager
async def hold_lock(path: Path) -> AsyncIterator[None]:
    """Hold the lock of a dedicated lock file, which is removed at the end; waits without a limit."""
    wait_s = FIRST_WAIT_S
    while (found := try_lock(path, make=True)) is None:
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_S_MAX)
    try:
        yield
    finally:
        remove_lock(found, path)


def remove_lock(found: Flock, path: Path) -> None:
    """Release a lock and remove its file; waiters detect that the file they opened no longer has the name."""
    with found, contextlib.suppress(FileNotFoundError):
        path.unlink()


def _lies_there(fd: int, path: Path) -> bool:
    own = os.fstat(fd)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
