"""The engine of the throughput benchmark: it answers every Call at once with the same document of 650 bytes.

Owns the least that an engine can do, so that the proxies are what is measured. Started by Pilotlight as a command.
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
    """One connection; requests one after the other."""

    def __init__(self) -> None:
        self._buffer = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answers every whole request."""
        self._buffer = self._buffer + data if self._buffer else data
        while (end := self._buffer.find(b"\r\n\r\n") + 4) > 3:
            length = LENGTH.search(self._buffer, 0, end)
            end += int(length[1]) if length else 0
            if len(self._buffer) < end:
                return
            request, self._buffer = self._buffer[:end], self._buffer[end:]
            self.asked(request)

    def asked(self, request: bytes) -> None:
        """A whole request is here."""
        del request
        self.write(RESPONSE)

    def write(self, data: bytes) -> None:
        """Sends it, if anybody is there."""
        if self.transport is not None:
            self.transport.write(data)


async def serve(port: int) -> None:
    """Until killed."""
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


if __name__ == "__main__":
    process.run(serve(int(sys.argv[1])))
