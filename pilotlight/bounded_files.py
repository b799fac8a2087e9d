"""Reads a file by path with bounded size; reading a FIFO or a device also ends."""

from __future__ import annotations

import errno
import os
import select
import stat
import time
from pathlib import Path

PIPE_WAIT_S = 10.0
"""Total time that a pipe (`<(command)`) may be silent."""
CHUNK_BYTES = 1 << 20


class TooLargeError(ValueError):
    """The file is larger than the limit."""


def read_bytes(path: Path, bytes_max: int) -> bytes:
    """Return a file's content; a FIFO without a writer is empty. Raises OSError, ValueError (NUL, too large)."""
    number = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        regular = stat.S_ISREG(os.fstat(number).st_mode)
        end_s, found, size = time.monotonic() + PIPE_WAIT_S, list[bytes](), 0
        while chunk := _chunk(number, end_s, regular=regular):
            found.append(chunk)
            size += len(chunk)
            if size > bytes_max:
                raise TooLargeError(f"more than {bytes_max >> 20} MiB")
        return b"".join(found)
    finally:
        os.close(number)


def _chunk(number: int, end_s: float, *, regular: bool) -> bytes:
    """Return the next bytes, or empty bytes at the end."""
    while True:
        try:
            return os.read(number, CHUNK_BYTES)
        except BlockingIOError:
            if regular:
                raise
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        ready = select.poll()
        ready.register(number, select.POLLIN)
        ready.poll(left_s * 1000)


def read_text(path: Path, bytes_max: int) -> str:
    """Return a file's content as text. Raises OSError, ValueError."""
    return decode_text(read_bytes(path, bytes_max), bytes_max)


def decode_text(data: bytes, bytes_max: int) -> str:
    """Return `data` as text. Raises ValueError (TooLargeError, UnicodeDecodeError)."""
    if len(data) > bytes_max:
        raise TooLargeError(f"more than {bytes_max >> 20} MiB")
    return data.decode()


def describe_error(error: OSError | ValueError) -> str:
    """Return why a file cannot be read."""
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    return "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
