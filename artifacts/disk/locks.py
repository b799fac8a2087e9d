"""Locks between processes, by `flock` on a file: let go by the kernel when a process ends, however it ends. I/O.

Owns taking and letting go. Promises: who holds a lock holds that of the file that lies under the name now, not of one
that was removed or moved away meanwhile; waiting blocks no loop and can be cancelled. Process ids prove nothing here.
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
    """One that is held. Use as `with`, or `close` it."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        """Given to a child (`pass_fds`), the lock is held until the child has ended, too."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Lets go, unless a child has it."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def try_lock(path: Path, *, shared: bool = False, make: bool = False) -> Flock | None:
    """The lock, where it is free. None: somebody holds it. Raises OSError; FileNotFoundError unless `make`."""
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
        os.close(fd)  # removed or moved between the two: whatever lies there now is asked


def wait_for_lock(path: Path, within_s: float, *, shared: bool = False, make: bool = False) -> Flock:
    """The same for locks that are held for moments; blocks. Raises TimeoutError."""
    end_s, wait_s = time.monotonic() + within_s, FIRST_WAIT_S
    while (found := try_lock(path, shared=shared, make=make)) is None:
        if time.monotonic() > end_s:
            raise TimeoutError(f"{path} is held by another process for longer than {within_s:.0f} s")
        time.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_S_MAX)
    return found


@contextlib.asynccontextmanager
async def hold_lock(path: Path) -> AsyncIterator[None]:
    """The lock of a file that is there only for it, waited for as long as it takes, and removed at the end."""
    wait_s = FIRST_WAIT_S
    while (found := try_lock(path, make=True)) is None:
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, WAIT_S_MAX)
    try:
        yield
    finally:
        remove_lock(found, path)


def remove_lock(found: Flock, path: Path) -> None:
    """Lets go of a lock, whose file goes with it: others see that theirs does not lie there any more."""
    with found, contextlib.suppress(FileNotFoundError):
        path.unlink()


def _lies_there(fd: int, path: Path) -> bool:
    own = os.fstat(fd)
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)
