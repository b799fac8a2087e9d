"""Ctrl-C and SIGTERM during a load test: waits end, nothing more is sent, and the requests so far are still judged.

Provides a flag, and waits that end when it is set. The first signal sets it; a second one ends the process as usual.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_STATUS = 130
"""Exit status of an interrupted run whose verdict holds: 128 + SIGINT, as in shells."""


class Stop:
    """A flag that can be set once."""

    def __init__(self) -> None:
        self.requested = False
        self._waits: set[asyncio.Timeout] = set()

    def request(self) -> None:
        """Set the flag, and end all current and future waits in `within`."""
        self.requested = True
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(0.0)

    @asynccontextmanager
    async def within(self, wait_s: float | None) -> AsyncIterator[None]:
        """Raise TimeoutError after `wait_s`, or when the flag is set."""
        async with asyncio.timeout(0.0 if self.requested else wait_s) as wait:
            self._waits.add(wait)
            try:
                yield
            finally:
                self._waits.discard(wait)


@contextmanager
def stopped_by_signals(stop: Stop) -> Iterator[None]:
    """Set `stop` at the first SIGINT or SIGTERM; has no effect outside of the main thread."""
    loop = asyncio.get_running_loop()
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def restore() -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)

    def request() -> None:
        restore()
        stop.request()

    for number in SIGNALS:
        loop.add_signal_handler(number, request)
    try:
        yield
    finally:
        restore()
