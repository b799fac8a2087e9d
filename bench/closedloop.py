"""A load for machines without wrk: 64 connections, each of which sends its next request after a response.

    python -m bench.closedloop URL SECONDS REQUEST_FILE

Prints wrk's three lines, so that one parser reads both. It uses several times the CPU time of wrk: on a core that it
shares with an engine, it may limit a fast proxy, whose ratio is then too low.
"""

from __future__ import annotations

import asyncio
import re
import sys
import time
from pathlib import Path
from typing import cast

from loadtest.client import target_of
from pilotlight import process

CONNECTIONS = 64
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Tally:
    """The counts until the end of the measurement."""

    def __init__(self) -> None:
        self.running = True
        self.calls = self.bad = 0


class Caller(asyncio.Protocol):
    """One connection with one request at a time. A broken connection counts as a bad response and is not reopened."""

    _transport: asyncio.Transport

    def __init__(self, request: bytes, tally: Tally) -> None:
        self._request, self._tally = request, tally
        self._got = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the first request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Count a complete response and send the next request."""
        self._got = self._got + data if self._got else data
        end = self._got.find(b"\r\n\r\n") + 4
        length = _LENGTH.search(self._got, 0, end) if end > 3 else None
        if length is None or len(self._got) < end + int(length[1]):
            return
        good, self._got = self._got.startswith(b"HTTP/1.1 2"), b""
        if self._tally.running:
            self._tally.calls += 1
            self._tally.bad += not good
            self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        """The connection broke, or the measurement is over."""
        del error
        if self._tally.running:
            self._tally.calls += 1
            self._tally.bad += 1


async def load(url: str, span_s: float, request: bytes) -> None:
    """Send for this time and print the counts."""
    target, tally = target_of(url), Tally()
    request = request.replace(b"\r\n", b"\r\nHost: %b:%d\r\n" % (target.host.encode(), target.port), 1)
    loop, begun_s = asyncio.get_running_loop(), time.monotonic()
    made = [await loop.create_connection(lambda: Caller(request, tally), target.host, target.port)
            for _ in range(CONNECTIONS)]  # fmt: skip
    await asyncio.sleep(span_s)
    tally.running, took_s = False, time.monotonic() - begun_s
    for transport, _ in made:
        transport.abort()
    print(f"{tally.calls} requests in {took_s:.2f}s\nRequests/sec: {tally.calls / took_s:.2f}")
    print(f"Non-2xx or 3xx responses: {tally.bad}")


if __name__ == "__main__":
    process.run(load(sys.argv[1], float(sys.argv[2]), Path(sys.argv[3]).read_bytes()))
