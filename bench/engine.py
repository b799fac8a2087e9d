"""The engine of the data plane benchmarks, with six behaviours, and the Models that use it.

`python -m bench.engine PORT FOLDER MANNER [MS]`. `paced`: one chunk every MS milliseconds per stream. `stamped`: the
same, and each chunk contains the time of its write. `blast`: chunks as fast as they are accepted, 256 in one piece.
`flood`: the same, but unread bytes stay on the receiver's side, as with an engine on another machine. `silent`: reads
the request and does not respond. `late`: a document after MS milliseconds. It records by request ID when a request
arrived and when its connection ended. A stream has as many chunks as its request's `max_tokens`. If usage is requested,
the last chunk contains it, as with vLLM. Paced streams are spread evenly over MS beats of one millisecond each.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import sys
import time
from itertools import count
from pathlib import Path

from bench import kit, upstream
from bench.documents import ROOT, Document, model
from pilotlight import process

MARK = b"@"
"""Occurs once in every counted chunk and nowhere else, so that chunks can be counted however the bytes are split."""
PACED = ("paced", "stamped")
BLOCK_CHUNKS = 256
FLOOD_SEND_BYTES = 32 << 10
"""The maximum of unsent bytes of a flood."""
BEAT_S = 0.001
HEAD_BYTES, ASK_BYTES = 4 << 10, 512
"""The ranges at both ends of a request in which its ID and its options are searched; prompts may be large."""
NOTES, PORT = "engine.notes", "engine.port"

_ID = re.compile(rb"x-request-id: *([^\r]+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_tokens": *(\d+)')
_EVENT = b'data: {"id":"chatcmpl-0123456789","object":"chat.completion.chunk","created":1700000000,"model":"t",%b}\n\n'
_SAID = b'"choices":[{"index":0,"delta":{"content":" a@word"},"finish_reason":null}]'
_STAMPED = b'"choices":[{"index":0,"delta":{"content":" a@%.6f"},"finish_reason":null}]'
_FINISH = b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]'
_USAGE = b'"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":64,"total_tokens":73}'


def framed(content: bytes) -> bytes:
    """Return one chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(content), content)


DONE = b"data: [DONE]\n\n"
CHUNK = framed(_EVENT % _SAID)
FINISH, USAGE = framed(_EVENT % _FINISH), framed(_EVENT % _USAGE)
END = framed(DONE) + b"0\r\n\r\n"
HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Thu, 20 Nov 2025 15:00:00 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)


def document(place: Path, *words: str, module: str = "bench.engine", name: str = "t", **spec: object) -> Document:
    """Return a Model of the engine `module` that always has a replica; the engine runs on the core of the load."""
    known = ("-X", "fake_engine")  # so that the gateway requests usage, as of vLLM (autoscaler.spec.engines)
    command = [*kit.on_core(kit.LOAD_CORE), sys.executable, *known, "-m", module, "{port}", str(place), *words]
    replicas = {"min": 1}
    return model(name, engine="command", command=command, readinessPath="/", replicas=replicas, idleSeconds=3600,
                 env={"PYTHONPATH": str(ROOT)}, **spec)  # fmt: skip


def address(place: Path) -> str:
    """Return `host:port` of the engine that was last started with this folder."""
    return f"{kit.HOST}:{(place / PORT).read_text()}"


class Engine:
    """The state that connections share: the behaviour, the records and the beats."""

    def __init__(self, place: Path, manner: str, every_ms: int) -> None:
        self.manner, self.every_ms = manner, every_ms
        self._notes = os.open(place / NOTES, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._beats: list[set[Connection]] = [set() for _ in range(every_ms)]
        self._turn = count()

    def note(self, what: str, id: str) -> None:
        """Write one line: the event, its time (the machine's monotonic seconds), the request ID."""
        os.write(self._notes, f"{what} {time.monotonic():.6f} {id}\n".encode())

    def join(self, connection: Connection) -> set[Connection]:
        """Add a stream to the next beat."""
        beat = self._beats[next(self._turn) % self.every_ms]
        beat.add(connection)
        return beat

    async def beat(self) -> None:
        """Run the beats until cancelled; catch up if one is late."""
        due_s = time.monotonic()
        for number in count():
            due_s += BEAT_S
            late_s = time.monotonic() - due_s
            if late_s < 0:
                await asyncio.sleep(-late_s)
            for connection in tuple(self._beats[number % self.every_ms]):
                connection.say()


class Connection(upstream.Connection):
    """One connection; `asked` starts the response of the engine's behaviour."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._id = ""
        self._left = 0
        self._usage = self._full = False
        self._beat: set[Connection] | None = None

    def asked(self, request: bytes) -> None:
        """Handle a complete request. GET is the probe."""
        if request.startswith(b"GET"):
            self.write(upstream.RESPONSE)
            return
        engine, ask = self._engine, request[-ASK_BYTES:]
        id, tokens = _ID.search(request, 0, HEAD_BYTES), _TOKENS.search(ask)
        self._id = id[1].decode() if id else ""
        self._left = int(tokens[1]) if tokens else 0
        self._usage = b'"include_usage":true' in ask
        if engine.manner == "late":
            asyncio.get_running_loop().call_later(engine.every_ms / 1000, self.write, upstream.RESPONSE)
            return
        if engine.manner != "blast":
            engine.note("asked", self._id)
        if engine.manner in PACED:
            self.write(HEAD)
            self._beat = engine.join(self)
        elif engine.manner == "blast":
            self.write(HEAD)
            self._pour()

    def say(self) -> None:
        """Send one chunk of a paced stream."""
        if self._left > 0:
            self._left -= 1
            stamped = self._engine.manner == "stamped"
            self.write(framed(_EVENT % (_STAMPED % time.monotonic())) if stamped else CHUNK)
        else:
            self._end()

    def _pour(self) -> None:
        while self._left > 0 and not self._full:
            chunks = min(BLOCK_CHUNKS, self._left)
            self._left -= chunks
            self.write(CHUNK * chunks)
        if not self._left and not self._full:
            self._left = -1
            self._end()

    def _end(self) -> None:
        self._leave_beat()
        self._id = ""
        self.write(FINISH + (USAGE if self._usage else b"") + END)

    def pause_writing(self) -> None:
        """The client reads no more."""
        self._full = True

    def resume_writing(self) -> None:
        """The client reads again."""
        self._full = False
        if self._engine.manner == "blast" and self._left >= 0:
            self._pour()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection ended; recorded if a response was incomplete."""
        del exc
        if self._id and self._engine.manner in (*PACED, "silent"):
            self._engine.note("ended", self._id)
        self.transport = None
        self._leave_beat()

    def _leave_beat(self) -> None:
        if self._beat is not None:
            self._beat.discard(self)
            self._beat = None


async def serve(port: int, place: Path, manner: str, every_ms: int) -> None:
    """Serve until killed."""
    engine = Engine(place, "blast" if manner == "flood" else manner, every_ms)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Connection(engine), kit.HOST, port, backlog=4096)
    if manner == "flood":
        for sock in server.sockets:  # accepted connections inherit the option
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, FLOOD_SEND_BYTES)
    (place / PORT).write_text(str(port))
    async with server:
        if manner in PACED:
            await engine.beat()
        await server.serve_forever()


if __name__ == "__main__":
    process.run(serve(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]) if sys.argv[4:] else 1))
