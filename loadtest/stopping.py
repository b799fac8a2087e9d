"""Ctrl-C and SIGTERM during a load test: waits end, nothing more is sent, and what was done is still judged.

Owns one flag and the waits that end when it is set. The first signal is taken; with the second the process ends as any
other. It must not decide what an interrupted run means: that is the verdict's.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_STATUS = 130
"""Of an interrupted run whose verdict holds: 128 + SIGINT, as shells say it."""


class Stop:
    """Told once, for good."""

    def __init__(self) -> None:
        self.told = False
        self._waits: set[asyncio.Timeout] = set()

    def tell(self) -> None:
        """Ends every wait that stands in `within`, and those that come."""
        self.told = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)

    @asynccontextmanager
    async def within(self, wait_s: float | None) -> AsyncIterator[None]:
        """Raises TimeoutError after `wait_s`, or when it is told."""
        async with asyncio.timeout(0.0 if self.told else wait_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """The first SIGINT or SIGTERM to this process tells `stop`; only the main thread is told of signals."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def tell() -> None:
        restore()
        stop.tell()

    for number in SIGNALS:
        loop.add_signal_handler(number, tell)
    try:
        yield
    finally:
        restore()
