"""Writes a line for a person without ever waiting for one: a stopped terminal or an unread pipe must stop nothing.

Owns that one write, which escapes control characters, and sends what libraries log the same way. Callers count the
lines that were not shown, where that matters.
"""

from __future__ import annotations

import os
import select
import sys

from pilotlight.cli.terminal import escaped

LINE_BYTES_MAX = 4096
"""PIPE_BUF: what a pipe that is ready takes without blocking (pipe(7))."""


def write_line(fd: int, line: str) -> bool:
    """Whether the whole line was taken; never blocks and never raises."""
    text = escaped(" ".join(line.splitlines()).rstrip()).encode()[: LINE_BYTES_MAX - 1]
    taken = text.decode(errors="ignore").encode() + b"\n"  # no half of a character
    ready = select.poll()
    ready.register(fd, select.POLLOUT)
    try:
        return any(flags & select.POLLOUT for _, flags in ready.poll(0)) and os.write(fd, taken) == len(taken)
    except OSError:
        return False  # the terminal is gone, or nobody reads any more


def say(text: str) -> None:
    """A line on standard error, in the command's name."""
    write_line(sys.stderr.fileno(), f"pilotlight: {text}")


def show(text: str) -> None:
    """Lines on standard output."""
    for line in text.splitlines():
        write_line(sys.stdout.fileno(), line)


class QuietStderr:
    """Standard error as a stream for `logging`, whose own would wait until somebody reads."""

    def write(self, text: str) -> None:
        """Line by line."""
        for line in text.splitlines():
            write_line(sys.stderr.fileno(), line)

    def flush(self) -> None:
        """Nothing is held back."""
