"""A scripted engine on a real socket: replays byte scripts, one per request, and records the requests.

A script is a sequence of bytes (written as they are) and of the words HOLD (wait until `release` is set), CLOSE, RESET
and DIE (exits the process: only for an engine that has its own). The last script is repeated for every further request.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import ssl
import struct
from enum import Enum
from types import TracebackType

from tests.support.net import certificates


class Word(Enum):
    HOLD = "hold"
    CLOSE = "close"
    RESET = "reset"
    DIE = "die"


HOLD, CLOSE, RESET, DIE = Word.HOLD, Word.CLOSE, Word.RESET, Word.DIE
Script = tuple[bytes | Word, ...]

_LENGTH = re.compile(rb"\r\ncontent-length: (\d+)")


def document(
    body: bytes = b'{"ok":true}', status: str = "200 OK", *lines: str, kind: str = "application/json"
) -> bytes:
    """A complete response with a length."""
    head = "\r\n".join([f"HTTP/1.1 {status}", f"Content-Type: {kind}", f"Content-Length: {len(body)}", *lines, "", ""])
    return head.encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(content: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


def event(text: str) -> bytes:
    """One SSE event in a chunk of its own."""
    return chunk(b"data: " + text.encode() + b"\n\n")


def delta(text: str) -> bytes:
    """One token in the streaming format of OpenAI-compatible engines."""
    return event('{"choices":[{"index":0,"delta":{"content":"' + text + '"}}]}')


USAGE_EVENT = event('{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2}}')
DONE = event("[DONE]")
END = b"0\r\n\r\n"

OK = document()
STREAM = STREAM_HEAD + b"".join(map(delta, "abc")) + USAGE_EVENT + DONE + END
DELTAS = b"".join(
    b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % token for token in (b"a", b"b", b"c")
)
WITHOUT_USAGE = DELTAS + b"data: [DONE]\n\n"
"""What the client receives of STREAM if it did not request usage."""
ERROR = b'"code":"upstream_error"'


class ScriptedEngine:
    """Use as `async with ScriptedEngine(script, ...) as engine`."""

    def __init__(
        self, *scripts: Script, port: int = 0, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1"
    ) -> None:
        self.scripts = list(scripts)
        default = certificates.default_sides.get()
        self._tls = default.server if tls is None and default is not None else tls
        self._host, self._port = host, port
        self.requests: list[bytes] = []
        self.connections = 0
        self.release = asyncio.Event()
        self.asked = asyncio.Event()
        """A request has arrived."""
        self.left = asyncio.Event()
        """The gateway closed a connection."""
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> ScriptedEngine:
        self._server = await asyncio.start_server(self._connected, self._host, self._port, ssl=self._tls)
        host, port = self._server.sockets[0].getsockname()[:2]
        at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.address = at if self._tls is None else f"https://{at}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def script(self, request: bytes) -> Script:
        """Returns the script for a request."""
        del request
        return self.scripts.pop(0) if len(self.scripts) > 1 else self.scripts[0]

    def stop(self) -> None:
        """Simulates a crash: stops listening and drops every connection."""
        if self._server is not None:
            self._server.close()
        for writer in tuple(self._writers):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self.connections += 1
        self._writers.add(writer)
        try:
            while await self._serve(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            self._writers.discard(writer)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = await reader.readuntil(b"\r\n\r\n")
        length = _LENGTH.search(head)
        self.requests.append(head + await reader.readexactly(int(length[1]) if length else 0))
        self.asked.set()
        for step in self.script(self.requests[-1]):
            if isinstance(step, bytes):
                writer.write(step)
                await writer.drain()
            elif step is HOLD:
                await self._hold(reader)
            elif step is DIE:
                os._exit(1)
            else:
                if step is RESET:
                    sock = writer.get_extra_info("socket")
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return False
        return True

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        """Waits, and detects if the gateway disconnects meanwhile."""
        removed = asyncio.ensure_future(reader.read(1))
        released = asyncio.ensure_future(self.release.wait())
        done, pending = await asyncio.wait((removed, released), return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if removed in done:
            raise ConnectionResetError
