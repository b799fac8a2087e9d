"""A body from a plain connection into a file without passing through this process (splice). I/O.

Owns the moving, in a thread. Whom the connection leads to, and what was sent there, `transport` judged before it was
given away. Promises: never more bytes than were asked for; an end to every wait; a file system or kernel without splice
gets copies. Bytes are in the file, and told to `wrote`, before the next are read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from artifacts.http.transport import Limits
from artifacts.registry.blobs import Moved

PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ, _NONBLOCK = 1031, 2
"""Of <fcntl.h>: the second is SPLICE_F_NONBLOCK; Python has no names for them yet."""
_NOT_HERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class Goal(NamedTuple):
    """Where bytes go."""

    file: int
    wrote: Callable[[int, int], None]
    """`wrote(at, count)`; may take a while."""


def splice_body(rest: socket.socket, count: int, goal: Goal, at: int, limits: Limits) -> Moved:
    """`count` bytes from the connection into the file from `at` on. Raises OSError where the file cannot take them."""
    patience = Patience(rest, limits)
    with _pipe() as (out, into):
        moved, splices = 0, True
        while moved < count:
            try:
                got = os.splice(rest.fileno(), into, min(count - moved, PIPE_BYTES), flags=_NONBLOCK)
            except BlockingIOError:
                if broken := patience.wait():
                    return Moved(moved, broken)
                continue
            except OSError as error:
                return Moved(moved, f"the connection broke while it answered ({error.strerror})")
            if not got:
                return Moved(moved, "the connection broke while it answered (its end came too early)")
            splices = _into_file(out, goal.file, at + moved, got, splices=splices)
            goal.wrote(at + moved, got)
            moved += got
            patience.came(got)
        return Moved(moved)


def interrupt_transfer(rest: socket.socket) -> None:
    """From another thread: what waits for it finds its end."""
    with contextlib.suppress(OSError):
        rest.shutdown(socket.SHUT_RDWR)


class Patience:
    """How long one connection may take; only the time counts in which we wait for it."""

    def __init__(self, rest: socket.socket, limits: Limits) -> None:
        self._poll = select.poll()
        self._poll.register(rest, select.POLLIN | select.POLLRDHUP)
        self._limits = limits
        self._waited_s = 0.0
        self._came = 0

    def wait(self) -> str:
        """Until there is something; else what is wrong."""
        limits = self._limits
        asked_s = time.monotonic()
        if not self._poll.poll(limits.read_s * 1000):
            return "the connection broke while it answered (too slow)"
        self._waited_s += time.monotonic() - asked_s
        if self._waited_s >= limits.pace_s:
            if self._came < limits.pace_bytes:
                return f"gives only {self._came} bytes in {self._waited_s:.0f} s"
            self._waited_s, self._came = 0.0, 0
        return ""

    def came(self, count: int) -> None:
        """So many bytes more."""
        self._came += count


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    out, into = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # where the user has many already: it stays small
            fcntl.fcntl(into, _F_SETPIPE_SZ, PIPE_BYTES)
        yield out, into
    finally:
        os.close(out)
        os.close(into)


def _into_file(out: int, file: int, at: int, count: int, *, splices: bool) -> bool:
    """All of what is in the pipe; says whether splice is of use here."""
    while count:
        if splices:
            try:
                done = os.splice(out, file, count, offset_dst=at)
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                splices = False
                continue
        else:
            piece = os.read(out, count)
            done = os.pwrite(file, piece, at)
            while done < len(piece):
                done += os.pwrite(file, piece[done:], at + done)
        at, count = at + done, count - done
    return splices
