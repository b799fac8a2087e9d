"""An engine whose streams never end, run as a script: it sends as fast as the client reads, and stops when it does not.

Only for tests of clients that do not read: the fake engine ignores backpressure and would buffer what is not read. A
request that does not stream is answered at once. A stream has as many events as `max_tokens`, or no end. `/metrics`
reports the number of active streams under the fake engine's metric name.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

EVENT_BYTES = 16 << 10
PAUSE_S = 0.01
"""Pause between two events: a hundred concurrent streams must not occupy a whole core."""

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\n%b\r\n\r\n"
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % (b"x" * EVENT_BYTES)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)", re.IGNORECASE)


def command() -> list[str]:
    """The command that starts it as a Model's engine."""
    return [sys.executable, "-S", "-E", str(Path(__file__).resolve()), "{port}"]


class Engine:
    """Counts the active streams."""

    def __init__(self) -> None:
        self.streams = 0

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection until either side closes it."""
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = _LENGTH.search(head)
                await self.answer(head, await reader.readexactly(int(length[1]) if length else 0), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def answer(self, head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        """Answers one request."""
        if not head.startswith(b"POST"):
            document(writer, b"requests_processing %d\n" % self.streams)
            return
        asked = json.loads(body)
        if not asked.get("stream"):
            document(writer, b'{"choices":[]}')
            return
        writer.write(HEAD % (b"text/event-stream", b"Transfer-Encoding: chunked"))
        self.streams += 1
        try:
            left = asked.get("max_tokens", -1)
            while left:
                left -= 1
                writer.write(CHUNK)
                await writer.drain()
                await asyncio.sleep(PAUSE_S)
            writer.write(DONE)
        finally:
            self.streams -= 1


def document(writer: asyncio.StreamWriter, body: bytes) -> None:
    """Writes a complete response."""
    writer.write(HEAD % (b"application/json", b"Content-Length: %d" % len(body)) + body)


async def serve(port: int) -> None:
    """Serves until killed."""
    engine = Engine()
    server = await asyncio.start_server(engine.connected, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
