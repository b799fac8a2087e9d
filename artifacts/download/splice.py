"""Moves a response body from a plaintext connection into a file with splice(2), without copying to user space. I/O.

Runs in a thread. The transport has checked the peer and sent the request before handing over the connection. Never
reads more bytes than requested; every wait has a timeout; without splice support it copies. Bytes are in the file and
reported to `wrote` before more are read.
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
"""Constants of <fcntl.h> (the second is SPLICE_F_NONBLOCK) that Python does not define."""
_NOT_HERE = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})


class Goal(NamedTuple):
    """Destination of the bytes."""

    file: int
    wrote: Callable[[int, int], None]
    """`wrote(at, count)`; may block for a while."""


def splice_body(rest: socket.socket, count: int, goal: Goal, at: int, limits: Limits) -> Moved:
    """Move `count` bytes from the connection into the file at offset `at`. Raises OSError if the file fails."""
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
                return Moved(moved, f"the connection broke during the response ({error.strerror})")
            if not got:
                return Moved(moved, "the connection broke during the response (it ended too early)")
            splices = _into_file(out, goal.file, at + moved, got, splices=splices)
            goal.wrote(at + moved, got)
            moved += got
            patience.came(got)
        return Moved(moved)


def interrupt_transfer(rest: socket.socket) -> None:
    """Shut the connection down from another thread, which ends its reads."""
    with contextlib.suppress(OSError):
        rest.shutdown(socket.SHUT_RDWR)


class Patience:
    """Timeouts of one connection; only time spent waiting for the peer counts."""

    def __init__(self, rest: socket.socket, limits: Limits) -> None:
        self._poll = select.poll()
        self._poll.register(rest, select.POLLIN | select.POLLRDHUP)
        self._limits = limits
        self._waited_s = 0.0
        self._came = 0

    def wait(self) -> str:
        """Wait for data; return an error text on timeout, else an empty string."""
        limits = self._limits
        asked_s = time.monotonic()
        if not self._poll.poll(limits.read_s * 1000):
            return "the connection broke during the response (too slow)"
        self._waited_s += time.monotonic() - asked_s
        if self._waited_s >= limits.pace_s:
            if self._came < limits.pace_bytes:
                return f"sent only {self._came} bytes in {self._waited_s:.0f} s"
            self._waited_s, self._came = 0.0, 0
        return ""

    def came(self, count: int) -> None:
        """Record received bytes."""
        self._came += count


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    out, into = os.pipe2(os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # over the user's pipe limit the pipe stays small
            fcntl.fcntl(into, _F_SETPIPE_SZ, PIPE_BYTES)
        yield out, into
    finally:
        os.close(out)
        os.close(into)


def _into_file(out: int, file: int, at: int, count: int, *, splices: bool) -> bool:
    """Move all bytes from the pipe into the file; return whether splice works here."""
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
