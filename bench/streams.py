"""Many concurrent streams through one proxy: a client that counts chunks, and checks that streams are complete.

A chunk is counted by a mark that each contains once (`bench.engine`), so a proxy may split and frame the bytes freely.
Complete: status 200, the requested number of chunks, the last event, the end of the framing, and no usage chunk that
only the proxy requested.
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
"""The kept bytes of a stream's start and of its end."""
SMALL_BYTES = 4 << 10
"""Up to this size bytes.count is used; above it numpy counts eight times as fast."""
ACCEPT_S = 0.2
"""The time for a proxy to accept a connection that the kernel has established."""
END_S_MAX = 60.0
"""The maximum time for streams to end."""


def request(url: str, body: bytes, *headers: tuple[str, str]) -> bytes:
    """Return the POST of a request with the key of tenant `a`."""
    return request_bytes(target_of(url), "POST", "/v1/chat/completions", (AUTHORIZATION, *headers), body)


class Stream(asyncio.Protocol):
    """One connection with one stream."""

    def __init__(self, chunks: int) -> None:
        self._expected = chunks
        self._head = self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.chunks = 0
        """The number of chunks so far."""
        self.broken = ""
        """The reason why it is incomplete."""
        self.running = False
        self.closed_s = 0.0
        """When the connection ended, by the machine's monotonic clock."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> None:
        """Start the stream."""
        if self._transport is not None:
            self.running = True
            self._transport.write(request)

    def leave(self) -> None:
        """Close the connection, as a client that cancels."""
        self.running = False
        if self._transport is not None:
            self._transport.abort()

    def half_close(self) -> None:
        """Half-close the connection and wait for its end."""
        self.running = False
        if self._transport is not None:
            self._transport.write_eof()

    def data_received(self, data: bytes) -> None:
        """Process bytes of a stream."""
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
        """The connection was closed by either side."""
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
    """Open connections and wait until all are accepted."""
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
    """Wait until all have ended and close them; return their number. Raises BenchError if one is incomplete.

    `name`: the side, for the message.
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
        raise kit.BenchError(f"{name}: {len(broken)} streams are incomplete, {unended} have no end; {broken[:1]}")
    return len(streams)
