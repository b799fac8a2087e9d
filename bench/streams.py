"""Many streams at once through one proxy: a client that takes what comes, counts it, and says which ended whole.

Owns its connections. A chunk is counted by a mark that each carries once (`bench.engine`), so a proxy may cut and frame
bytes as it likes. Whole: status 200, as many chunks as were asked for, the last event, the end of the framing, and
nothing that only the proxy asked the engine for.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from typing import cast

import numpy as np

from bench import kit
from bench.engine import DONE, MARK
from bench.peers import AUTHORIZATION
from loadtest.client import request_bytes, target_of

CONNECT_AT_ONCE = 200
END = DONE + b"\r\n0\r\n\r\n"
HEAD_BYTES, TAIL_BYTES = 64, 1 << 10
"""Kept of a stream's begin and of its end."""
SMALL_BYTES = 4 << 10
"""Up to here bytes count themselves; in more numpy counts eight times as fast."""
ACCEPT_S = 0.2
"""A connection is there before the proxy has accepted it."""
END_S_MAX = 60.0
"""How long streams may take to end."""


def request(url: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """The POST of a Call with the key of Tenant `a`."""
    return request_bytes(target_of(url), "POST", "/v1/chat/completions", (AUTHORIZATION, *headers), body)


class Stream(asyncio.Protocol):
    """One connection and one stream on it."""

    def __init__(self, chunks: int) -> None:
        self._expected = chunks
        self._head = self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.chunks = 0
        """So far."""
        self.broken = ""
        """Why it is not whole."""
        self.running = False
        self.closed_s = 0.0
        """When the connection was over, by the machine's monotonic clock."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> None:
        """Begins the stream."""
        if self._transport is not None:
            self.running = True
            self._transport.write(request)

    def leave(self) -> None:
        """Closes the connection, as a client that has enough."""
        self.running = False
        if self._transport is not None:
            self._transport.abort()

    def half_close(self) -> None:
        """Says that it sends no more, and waits for the end of the connection."""
        self.running = False
        if self._transport is not None:
            self._transport.write_eof()

    def data_received(self, data: bytes) -> None:
        """Bytes of a stream."""
        if len(self._head) < HEAD_BYTES:
            self._head += data[:HEAD_BYTES]
        if len(data) < SMALL_BYTES:
            self.chunks += data.count(MARK)
            self._tail = (self._tail + data)[-TAIL_BYTES:]
        else:
            self.chunks += int(np.count_nonzero(np.frombuffer(data, np.uint8) == MARK[0]))
            self._tail = data[-TAIL_BYTES:]
        if self._tail.endswith(END):
            self._ended()

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed, by either side."""
        self._transport, self.closed_s = None, time.monotonic()
        if self.running:
            how = "closed" if exc is None else "reset"
            self.running, self.broken = False, f"{how} after {self.chunks} chunks: {self._tail[-400:]!r}"

    def _ended(self) -> None:
        self.running = False
        good = self.chunks == self._expected and self._head.startswith(b"HTTP/1.1 200") and b'"usage"' not in self._tail
        if not good:
            self.broken = f"{self.chunks} chunks of {self._expected}: {self._tail[-400:]!r}"


async def connect(url: str, count: int, chunks: int = 0) -> list[Stream]:
    """So many connections, all accepted."""
    loop, where = asyncio.get_running_loop(), target_of(url)
    made: list[Stream] = []
    while len(made) < count:
        some = range(min(CONNECT_AT_ONCE, count - len(made)))
        pairs = await asyncio.gather(
            *(loop.create_connection(lambda: Stream(chunks), where.host, where.port) for _ in some)
        )
        made += [stream for _, stream in pairs]
    await asyncio.sleep(ACCEPT_S)
    return made


async def ended(streams: Sequence[Stream], name: str) -> int:
    """Waits until all have ended and closes them; how many there were. BenchError where one is not whole.

    `name`: whose they are.
    """
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(END_S_MAX):
            while any(stream.running for stream in streams):
                await asyncio.sleep(0.01)
    unended = sum(stream.running for stream in streams)
    for stream in streams:
        stream.leave()
    broken = [stream.broken for stream in streams if stream.broken]
    if broken or unended:
        raise kit.BenchError(f"{name}: {len(broken)} streams are not whole, {unended} have no end; {broken[:1]}")
    return len(streams)
