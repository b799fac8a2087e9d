"""Fuzz target for responses as `pilotlight load` reads them: each one ends, and the report escapes its texts.

An input is one byte of options, and the bytes of a server until it closes the connection.
"""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Final

from loadtest.client import ClientConnection
from loadtest.report.report import as_json, build_report
from loadtest.result import Result
from tests.fuzz.inputs.byte_splits import cut

_JSON: Final = b"HTTP/1.1 500 E\r\nContent-Type: application/json\r\n"
_STREAM: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
_DELTA: Final = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
_ERROR: Final = b'{"error":{"code":"\\u009b31m","type":"\\u202e"}}'

SEEDS: Final = tuple(
    bytes((flags,)) + answer
    for flags in (0, 1, 6)
    for answer in (
        _JSON + b"\r\n" + _ERROR,
        _JSON + b'\r\n{"error":{"code":"\xff"}}',
        _JSON + b"\r\n" + b'{"a":' * 1500,
        _JSON + b"Content-Length: %d\r\n\r\n" % len(_ERROR) + _ERROR,
        _STREAM + b"\r\n" + _DELTA + b"data: [DONE]\n\n",
        _STREAM + b"\r\ndata: " + b"[" * 1500 + b"\n\n",
        _STREAM + b"\r\ndata: " + _ERROR + b"\n\n",
        _STREAM + b"Server-Timing: queue;dur=1e999, load;dur=nan\r\n\r\n: server-timing load;dur=1\n\n" + _DELTA,
        _STREAM + b'\r\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n',
        _STREAM + b"Transfer-Encoding: chunked\r\n\r\n5\r\ndata:\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 None\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    )
)
WORDS: Final = (
    b"\r\n", b"\n\n", b"\r\n\r\n", b"0\r\n\r\n", b"data: ", b"data: [DONE]\n\n", b": server-timing ", _DELTA, _ERROR,
    b'{"error":', b'"code":', b'"\\ud800"', b'"\\u009b"', b"[[[[", b"1e999", b"text/event-stream", b"application/json",
    b"Content-Type: ", b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 200 OK\r\n", b"\xff",
)  # fmt: skip


class _Transport(asyncio.Transport):
    """A transport that discards what is written."""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Discard the request."""

    def abort(self) -> None:
        """The connection reports its end itself."""


@cache
def loop() -> asyncio.AbstractEventLoop:
    """An event loop for futures; nothing waits."""
    return asyncio.new_event_loop()


def loads(data: bytes) -> None:
    """One response, whole and in pieces."""
    if not data:
        return
    flags, raw = data[0], data[1:]
    for pieces in ([raw], cut(raw, flags // 2 + 1)):
        loop().run_until_complete(_read(pieces, stream=bool(flags & 1)))


async def _read(pieces: list[bytes], *, stream: bool) -> None:
    connection = ClientConnection()
    connection.connection_made(_Transport())
    done = connection.begin(b"", stream=stream)
    for piece in pieces:
        if connection.open:
            connection.data_received(piece)
    connection.connection_lost(None)
    assert done.done(), "the request waits for its timeout"
    answer = connection.answer
    result = Result(
        model="ada", status=answer.status, code=answer.code, errors=answer.errors, broken=answer.broken,
        cold=answer.cold, server_timing=answer.phases, headers=answer.headers,
    )  # fmt: skip
    written = as_json(build_report("http://127.0.0.1:1", "a plan", 1, [result])).decode("ascii")
    assert all(line.isprintable() for line in written.split("\n")), "control characters"
    assert json.loads(written)["verdict"]["admitted"] == 1
