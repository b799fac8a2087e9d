"""The engine of the throughput benchmark: it responds to every request at once with the same document of 650 bytes.

It does the minimum of an engine, so that the proxies are the bottleneck. Pilotlight starts it as a command.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

from pilotlight import process

LENGTH = re.compile(rb"content-length: *(\d+)", re.IGNORECASE)
ANSWER = (
    b'{"id":"c","object":"chat.completion","created":1,"model":"t","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"' + b"awake " * 75 + b'"},"finish_reason":"stop"}],"usage":{"prompt_tokens":9,"completion_tokens":64,'
    b'"total_tokens":73}}'
)
RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(ANSWER), ANSWER)


class Connection(asyncio.Protocol):
    """One connection with one request at a time."""

    def __init__(self) -> None:
        self._buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register the connection."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Respond to every complete request."""
        self._buffer = self._buffer + data if self._buffer else data
        while (end := self._buffer.find(b"\r\n\r\n") + 4) > 3:
            length = LENGTH.search(self._buffer, 0, end)
            end += int(length[1]) if length else 0
            if len(self._buffer) < end:
                return
            request, self._buffer = self._buffer[:end], self._buffer[end:]
            self.asked(request)

    def asked(self, request: bytes) -> None:
        """Handle a complete request."""
        del request
        self.write(RESPONSE)

    def write(self, data: bytes) -> None:
        """Send the bytes if the client is connected."""
        if self.transport is not None:
            self.transport.write(data)


async def serve(port: int) -> None:
    """Serve until killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    process.run(serve(int(sys.argv[1])))
