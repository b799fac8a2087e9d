"""A clock that is as slow as the observed processes: for time limits on machines whose cores are busy.

A lap is a pause of PAUSE_S, followed by one response of each process, one after the other. Within a lap each process
has run and has read every message that had arrived. So a limit that depends on a time and on a number of messages
between these processes is a number of laps, however slow they are. On idle cores a lap takes little more than its
pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from loadtest.client import ClientConnection, request_bytes, target_of

PAUSE_S = 0.010


class Visit(NamedTuple):
    """One process: a connection to it, and the path of the request."""

    connection: ClientConnection
    request: bytes


class Laps:
    """The number of laps so far."""

    def __init__(self, visits: Sequence[Visit]) -> None:
        self._visits = visits
        self._began_s: list[float] = []
        self._ended_s: list[float] = []
        self._turned = asyncio.Event()

    async def run(self) -> None:
        """Runs laps until cancelled."""
        while True:
            began_s = time.monotonic()
            await asyncio.sleep(PAUSE_S)
            for connection, request in self._visits:
                await connection.begin(request, stream=False)
                assert connection.answer.status == 200, "a process that was to be visited does not answer"
            self._began_s.append(began_s)
            self._ended_s.append(time.monotonic())
            self._turned.set()

    async def wait(self, laps: int) -> None:
        """Waits until that many complete laps have passed."""
        from_s = time.monotonic()
        while self.between(from_s, time.monotonic()) < laps:
            self._turned.clear()
            await self._turned.wait()

    def between(self, from_s: float, to_s: float) -> int:
        """Complete laps between two moments (monotonic)."""
        pairs = zip(self._began_s, self._ended_s, strict=True)
        return sum(from_s <= began_s and ended_s <= to_s for began_s, ended_s in pairs)


@contextlib.asynccontextmanager
async def laps(visits: Sequence[Visit]) -> AsyncIterator[Laps]:
    """Runs the clock; the visits' connections are closed at the end."""
    clock = Laps(visits)
    task = asyncio.create_task(clock.run())
    try:
        yield clock
    finally:
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        for visit in visits:
            visit.connection.close()
    assert isinstance(ended, asyncio.CancelledError), ended


async def visit(url: str, path: str) -> Visit:
    """A process that answers GETs on a port of its own."""
    target = target_of(url)
    _, connection = await asyncio.get_running_loop().create_connection(ClientConnection, target.host, target.port)
    return Visit(connection, request_bytes(target, "GET", path, (), b""))


def visit_by(connection: ClientConnection, path: str) -> Visit:
    """A process to which a connection exists."""
    return Visit(connection, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
