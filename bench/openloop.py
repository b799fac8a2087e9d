"""Requests at a fixed rate, regardless of their results: a lean client for responses with a Content-Length.

It sends thousands of requests a second at little cost, so that it can share a core with an engine; `loadtest.client`
checks responses better and costs ten times as much. Times count from the write of the request. The delay of the write
after its planned time is reported separately. Requests are never repeated.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

from bench import kit
from loadtest.client import target_of

CONNECTIONS_MAX = 1500
"""Further concurrent requests are not sent, and count as unsent."""
END_S_MAX = 30.0
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Answer(NamedTuple):
    """The result of one request. `status` 0: the connection broke."""

    sent_s: float
    took_s: float
    status: int


class Line(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._got = b""
        self._sent_s: float | None = None
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self.transport = cast("asyncio.Transport", transport)

    def send(self, request: bytes) -> None:
        """Write a request."""
        self._got, self._sent_s = b"", time.monotonic()
        if self.transport is not None:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        """Process bytes of a response."""
        got_s = time.monotonic()
        self._got += data
        end = self._got.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._got, 0, end) if end > 3 else None
        if length is None or len(self._got) < end + int(length[1]) or self._sent_s is None:
            return
        sent_s, self._sent_s = self._sent_s, None
        self._sender.answers.append(Answer(sent_s, got_s - sent_s, int(self._got[9:12])))
        if b"connection: close" in self._got[:end].lower():
            self.close()
        else:
            self._sender.idle.append(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection closed; a request on it has no response."""
        del exc
        self.transport = None
        if self._sent_s is not None:
            self._sender.answers.append(Answer(self._sent_s, time.monotonic() - self._sent_s, 0))
        self._sender.lines.discard(self)

    def close(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()


class Sender:
    """Sends one request repeatedly to one URL."""

    def __init__(self, url: str, request: bytes) -> None:
        self._request = request
        self._target = target_of(url)
        self._opening = 0
        self.idle: list[Line] = []
        self.lines: set[Line] = set()
        self.answers: list[Answer] = []
        self.late_s: list[float] = []
        """The delay of each request after its planned time."""
        self.unsent = 0

    async def open(self, count: int) -> None:
        """Open connections before the first request."""
        for _ in range(count):
            self.idle.append(await self._connect())

    async def run(self, per_s: float, span_s: float, offset_s: float = 0.0) -> list[Answer]:
        """Send requests for `span_s` seconds, wait for the responses, and close all connections.

        Responses are sorted by the time of their end.
        """
        begun_s = time.monotonic() + offset_s
        async with asyncio.TaskGroup() as opening:
            for number in range(int(per_s * span_s)):
                planned_s = begun_s + number / per_s
                while (wait_s := planned_s - time.monotonic()) > 0:
                    await asyncio.sleep(wait_s)
                self._fire(planned_s, opening)
                if number % 64 == 0:
                    await asyncio.sleep(0)  # a late sender must still read
        await self._settle()
        return self.answers

    def _fire(self, planned_s: float, opening: asyncio.TaskGroup) -> None:
        while self.idle:
            line = self.idle.pop()
            if line.transport is not None and not line.transport.is_closing():
                self._send(line, planned_s)
                return
        if len(self.lines) + self._opening < CONNECTIONS_MAX:
            self._opening += 1
            opening.create_task(self._open_and_send(planned_s))
        else:
            self.unsent += 1

    async def _open_and_send(self, planned_s: float) -> None:
        try:
            self._send(await self._connect(), planned_s)
        finally:
            self._opening -= 1

    def _send(self, line: Line, planned_s: float) -> None:
        self.late_s.append(time.monotonic() - planned_s)
        line.send(self._request)

    async def _connect(self) -> Line:
        loop = asyncio.get_running_loop()
        _, line = await loop.create_connection(lambda: Line(self), self._target.host, self._target.port)
        self.lines.add(line)
        return line

    async def _settle(self) -> None:
        try:
            async with asyncio.timeout(END_S_MAX):
                while len(self.answers) < len(self.late_s):
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise kit.BenchError(f"{len(self.late_s) - len(self.answers)} requests have no response") from None
        finally:
            for line in tuple(self.lines):
                line.close()


def took_ms(answers: Sequence[Answer]) -> list[float]:
    """Return the duration of each request."""
    return [answer.took_s * 1e3 for answer in answers]


def all_good(answers: Sequence[Answer]) -> None:
    """Raise BenchError if a status is not 200."""
    bad = [answer.status for answer in answers if answer.status != 200]
    if bad:
        raise kit.BenchError(f"{len(bad)} of {len(answers)} requests did not get 200 but {sorted(set(bad))}")
