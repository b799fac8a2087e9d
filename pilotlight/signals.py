"""Signals of this process, one after the other, whichever of its threads the kernel gives them to.

To block them and wait for them (sigwait) would be enough if all threads were ours: those of libraries (OpenBLAS starts
some when numpy is imported) block nothing, and a SIGTERM that one of them is given would end the process at once.
"""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager


class Signals:
    """Of these numbers, from now on; made in the main thread, once."""

    def __init__(self, numbers: Collection[signal.Signals]) -> None:
        self._numbers = numbers
        self._come, there = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in numbers:
            signal.signal(number, _noted)
        signal.set_wakeup_fd(there, warn_on_full_buffer=False)

    def wait(self, timeout_s: float) -> int | None:
        """The next one; None: none came in that time."""
        if not select.select([self._come], [], [], timeout_s)[0]:
            return None
        return os.read(self._come, 1)[0]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Who is started meanwhile has them blocked, until it is ready for them (`process.unblock_signals`)."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _noted(_number: int, _frame: object) -> None:
    """Its number is in the pipe already (signal.set_wakeup_fd)."""
