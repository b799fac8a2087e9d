"""Large request bodies for tests: how to create and send them, including bodies that are slow to parse."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Self

from tests.support.harness.gateway.gateway_rig import Client

MIB = 1 << 20


def address(server: asyncio.Server) -> str:
    """The address on which the server listens."""
    return f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def body(size: int, **members: object) -> bytes:
    """A chat completion of that many bytes (or a few more)."""
    fixed = {"model": "alias-m", **members}
    text = "wake up, das Städtchen schläft \\ \n" * (size // 38 + 1)
    made = json.dumps({**fixed, "messages": [{"role": "user", "content": text}]}, ensure_ascii=False).encode()
    return made[:-4] + b" " * max(0, size - len(made)) + made[-4:]


def post(
    client: Client, data: bytes, *lines: str, kind: str = "application/json", path: str = "chat/completions"
) -> None:
    """Sends it with its length."""
    head = [f"POST /v1/{path} HTTP/1.1", "host: x", f"content-type: {kind}", f"content-length: {len(data)}", *lines]
    client.send("\r\n".join([*head, "", ""]).encode())
    client.send(data)


def post_in_chunks(client: Client, data: bytes, size: int, path: str = "chat/completions") -> None:
    """Sends it in chunks of `size` bytes."""
    head = ["host: x", "content-type: application/json", "transfer-encoding: chunked", "", ""]
    client.send(f"POST /v1/{path} HTTP/1.1\r\n".encode() + "\r\n".join(head).encode())
    for at in range(0, len(data), size):
        piece = data[at : at + size]
        client.send(b"%x\r\n%b\r\n" % (len(piece), piece))
    client.send(b"0\r\n\r\n")


HOSTILE = {
    "text": body(8 * MIB),
    "messages": json.dumps({"model": "alias-m", "messages": [{"role": "user", "content": "hi"}] * 200_000}).encode(),
    "numbers": json.dumps({"model": "alias-m", "input": list(range(MIB))}).encode(),
    "brackets": b'{"model":"alias-m","a":[' + b"[]," * MIB + b"1]}",
    "deep": b'{"model":"alias-m","a":[' + (b"[" * 190 + b"]" * 190 + b",") * 8000 + b"1]}",
    "tiny strings": b'{"model":"alias-m","a":[' + b'"",' * MIB + b"1]}",
    "escapes": b'{"model":"alias-m","a":["' + b'\\n\\"' * MIB + b'"]}',
    "names": b'{"model":"alias-m",' + b",".join(b'"%d":1' % number for number in range(MIB // 2)) + b"}",
    "white space": b'{"model":"alias-m"' + b" " * 4 * MIB + b"}",
}
"""All but `names` are accepted, although most are expensive to parse."""


class Played:
    """A fake engine; a subclass defines the handling of each connection."""

    def __init__(self) -> None:
        self.address = ""
        self.connections = 0

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.address = address(self._server)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        await self.connected(reader, writer)

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles one connection."""
        raise NotImplementedError


class Refusing(Played):
    """Answers each head at once, reads on, and closes when its peer does."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._answer = answer

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers one request per connection and only reads what follows."""
        await reader.readuntil(b"\r\n\r\n")
        writer.write(self._answer)
        await reader.read()
        writer.close()


class Reading(Played):
    """An engine that answers each request once it is complete, and exposes how much of it has arrived."""

    def __init__(self, answer: bytes) -> None:
        super().__init__()
        self._answer = answer
        self._news = asyncio.Event()
        self.came = b""
        """The bytes of the current request, or of the last one."""
        self.whole = list[bytes]()
        self.lost = 0
        """Number of requests that were aborted."""

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves requests until the peer disconnects."""
        self.came = b""
        try:
            while piece := await reader.read(MIB):
                self.came += piece
                head, _, body = self.came.partition(b"\r\n\r\n")
                if len(body) == int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or -1):
                    self.whole.append(self.came)
                    self.came = b""
                    writer.write(self._answer)
                self._news.set()
        except ConnectionError:
            self.lost += 1
        self.lost += bool(self.came)
        self._news.set()
        writer.close()

    async def until(self, condition: Callable[[], object]) -> None:
        """Waits until the condition holds."""
        async with asyncio.timeout(60):
            while not condition():
                self._news.clear()
                await self._news.wait()


class Dying(Played):
    """An engine that exits after reading part of its first request, and no longer listens."""

    def __init__(self, read_bytes: int) -> None:
        super().__init__()
        self._read_bytes = read_bytes
        self.asked = False

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles the first connection."""
        await reader.readexactly(self._read_bytes)
        self.asked = True
        self._server.close()
        writer.transport.abort()
