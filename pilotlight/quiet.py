"""Writes a line for a person without ever waiting for one: a stopped terminal or an unread pipe must stop nothing.

Owns that one write. Who calls it counts what was not shown, where that matters.
"""

from __future__ import annotations

import os
import select
import sys

LINE_BYTES_MAX = 4096
"""PIPE_BUF: what a pipe that is ready takes without blocking (pipe(7))."""


def write_line(fd: int, line: str) -> bool:
    """Whether the whole line was taken; never blocks and never raises."""
    taken = " ".join(line.splitlines()).rstrip().encode()[: LINE_BYTES_MAX - 1] + b"\n"
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    try:
        return any(flags & select.POLLOUT for _, flags in ready.poll(0)) and os.write(fd, taken) == len(taken)
    except OSError:
        return False  # the terminal is gone, or nobody reads any more


def say(text: str) -> None:
    """A line on standard error, in the command's name."""
    write_line(sys.stderr.fileno(), f"pilotlight: {text}")
