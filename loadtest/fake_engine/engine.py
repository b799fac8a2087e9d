"""A fake engine: a process that responds like llama-server or vLLM and fails on demand (`arguments.FAULTS`).

It simulates slow starts, slots with a first-come, first-served queue, and a fixed token rate. Only its arguments
control it, never its clients, except that they may make a fake vLLM sleep and load adapters. It writes one transcript
line per request, also for requests that its own faults cut off; only a SIGKILL from outside loses lines. It needs only
the standard library and its folder, so that `python -S -E loadtest/fake_engine` listens within 60 ms.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections import deque
from typing import NoReturn, cast

from loadtest.fake_engine.api_dialects import (
    DIALECTS,
    Answer,
    BadRequestError,
    Head,
    Json,
    parse_head,
    read_ask,
    tokens_of,
)
from loadtest.fake_engine.arguments import CHILD_S_MAX, Knobs, parse_arguments
from loadtest.fake_engine.vllm import WAITING_FOR_CONNECTIONS, WAKE_PATH, Vllm, unknown_model

HEAD_BYTES_MAX = 64 << 10
BODY_BYTES_MAX = 64 << 20

REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 500: "Internal Server Error", 503: "Service Unavailable"}
TYPES = {400: "invalid_request_error", 404: "not_found_error", 503: "unavailable_error"}


class Call:
    """A request in the engine: waits for a slot, then writes tokens at the engine's rate."""

    def __init__(self, engine: Engine, connection: Connection, head: Head, answer: Answer) -> None:
        self.engine, self.connection, self.head, self.answer = engine, connection, head, answer
        self.arrived_unix_s, self.arrived_s = time.time(), time.monotonic()
        self.granted_s: float | None = None
        self.sent_tokens = self.sent_bytes = 0
        self.at_once = 0
        """Number of requests in the engine when it arrived, including itself."""
        self.timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start generating after a slot was granted."""
        self.granted_s = time.monotonic()
        if self.engine.strikes("dies-before-first-byte"):
            self.engine.die(1)
        if not self.engine.strikes("hangs-before-first-byte"):
            self._wait_for(1 if self.answer.ask.stream else len(self.answer.tokens))

    def _wait_for(self, tokens: int) -> None:
        """Continue when `tokens` tokens are due; the clock runs from the grant, so lateness does not accumulate."""
        rate, since_s = self.engine.knobs.tokens_per_s, self.granted_s or 0.0
        due_s = since_s + (tokens / rate if rate else 0.0)
        self.timer = asyncio.get_running_loop().call_at(due_s, self._stream if self.answer.ask.stream else self._whole)

    def _whole(self) -> None:
        """Write the response as one document."""
        body = json.dumps(self.answer.document()).encode()
        short = self.engine.strikes("cl-mismatch")
        missing = int(self.engine.faults["cl-mismatch"]) if short else 0
        self._head(f"Content-Length: {len(body) + missing}")
        if self.engine.strikes("hangs-after-first-byte"):
            self._write(body[: len(body) // 2])
        else:
            self.engine.finish(self, body, close=short)

    def _stream(self) -> None:
        """Write the next step of a stream: head and opening before the first token, the closing after the last."""
        engine, tokens = self.engine, self.answer.tokens
        if not self.sent_bytes:
            self._head("Transfer-Encoding: chunked", kind="text/event-stream")
            self._chunk(self.answer.opening())
        if self.sent_tokens < len(tokens):
            self._chunk(self.answer.token(tokens[self.sent_tokens]))
            self.sent_tokens += 1
            if self.sent_tokens >= engine.faults.get("dies-mid-stream", float("inf")) and engine.strikes(
                "dies-mid-stream"
            ):
                engine.die(1)
            if self.sent_tokens == 1 and engine.strikes("hangs-after-first-byte"):
                return
            if self.sent_tokens == 1 and engine.strikes("bad-chunk"):
                engine.finish(self, b"zz\r\nnot a chunk\r\n", close=True)
                return
        if self.sent_tokens < len(tokens):
            self._wait_for(self.sent_tokens + 1)
            return
        for event in self.answer.closing():
            self._chunk(event)
        engine.finish(self, b"0\r\n\r\n", close=engine.strikes("closes-keepalive-after-stream"))

    def _head(self, *lines: str, kind: str = "application/json") -> None:
        if self.engine.strikes("flood-1xx"):
            self._write(b"HTTP/1.1 100 Continue\r\n\r\n" * int(self.engine.faults["flood-1xx"]))
        self._write(self.connection.head(200, *lines, kind=kind))

    def _chunk(self, data: bytes) -> None:
        if data:
            self._write(b"%x\r\n%s\r\n" % (len(data), data))

    def _write(self, data: bytes) -> None:
        self.sent_bytes += len(data)
        self.connection.transport.write(data)


class Engine:
    """Slots, their queue, counters, faults and the transcript."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.faults: dict[str, float] = dict(knobs.fail)
        self.ready = False
        self.answered_unix_s = 0.0
        """When /health first responded 200; before, no client can know that it is ready."""
        self.waiting: deque[Call] = deque()
        self.running: list[Call] = []
        self.calls = self.prompt_tokens = self.predicted_tokens = 0
        self.vllm = Vllm(knobs.name, os.path.isdir) if knobs.engine == "vllm" else None
        self.is_stopping = False
        """Whether it got SIGTERM and waits for connections to close."""
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        self._transcript = os.open(knobs.transcript, flags, 0o600) if knobs.transcript else -1

    def strikes(self, fault: str) -> bool:
        """Return whether the fault occurs now. With --once only the first occurrence in all processes counts."""
        if fault not in self.faults:
            return False
        if self.knobs.once:
            try:
                os.close(os.open(self.knobs.once, os.O_CREAT | os.O_EXCL, 0o600))
            except FileExistsError:
                return False
        return True

    def every(self, fault: str) -> bool:
        """Return whether a fault that affects every n-th request affects this one."""
        return fault in self.faults and self.calls % int(self.faults[fault]) == 0 and self.strikes(fault)

    def submit(self, call: Call) -> None:
        """Queue a request. The queue is limited by the number of connections that the process may have open."""
        self.waiting.append(call)
        call.at_once = len(self.waiting) + len(self.running)
        self._pump()

    def finish(self, call: Call, last: bytes, *, close: bool) -> None:
        """Write the last bytes of a response. It is logged first, so that a client that has it finds the entry."""
        self.prompt_tokens += call.answer.ask.prompt_tokens
        self.predicted_tokens += len(call.answer.tokens)
        call.sent_bytes += len(last)
        self._note(call, finished=True)
        call.connection.transport.write(last)
        self.running.remove(call)
        call.connection.done(close=close)
        self._pump()

    def leave(self, call: Call) -> None:
        """Remove the request of a client that disconnected, and free its slot."""
        if call.timer:
            call.timer.cancel()
        if call.granted_s is None:
            self.waiting.remove(call)
        else:
            self.running.remove(call)
        self._note(call, aborted=True)
        if self.is_stopping and not self.running:
            self.die(0)
        self._pump()

    def terminate(self) -> None:
        """Exit at once, as llama-server does, or stop tokens and hold open connections, as vLLM does."""
        if self.vllm is None or not self.running:
            self.die(0)
        self.is_stopping = True
        for call in self.running:
            if call.timer:
                call.timer.cancel()
        sys.stderr.write(f"{WAITING_FOR_CONNECTIONS}\n")
        sys.stderr.flush()

    def die(self, code: int) -> NoReturn:
        """Exit at once; interrupted requests are logged as neither finished nor aborted."""
        for call in (*self.running, *self.waiting):
            self._note(call)
        os._exit(code)

    def metrics(self) -> str:
        """Return metrics with the names of the imitated engine; for llama-server also the total number of requests."""
        if self.vllm:
            return self.vllm.metrics(len(self.running), len(self.waiting))
        values = {
            "prompt_tokens_total": self.prompt_tokens,
            "tokens_predicted_total": self.predicted_tokens,
            "requests_processing": len(self.running),
            "requests_deferred": len(self.waiting),
            "requests_total": self.calls,
            "kv_cache_usage_ratio": "nan" if self.strikes("nan-metrics") else len(self.running) / self.knobs.slots,
        }
        return "".join(f"llamacpp:{name} {value}\n" for name, value in values.items())

    def wake(self) -> Json:
        """Wake up and continue with the queue."""
        document = self.vllm.wake() if self.vllm else {}
        self._pump()
        return document

    def _pump(self) -> None:
        if self.is_stopping or (self.vllm and self.vllm.level is not None):
            return
        while self.waiting and len(self.running) < self.knobs.slots:
            self.running.append(self.waiting.popleft())
            self.running[-1].begin()

    def _note(self, call: Call, *, finished: bool = False, aborted: bool = False) -> None:
        """Write one transcript line in one write, so that engines may share a file."""
        if self._transcript < 0:
            return
        now_s = time.monotonic()
        line = {
            "time": call.arrived_unix_s,
            "ready_time": self.answered_unix_s,
            "id": call.head.headers.get("x-request-id", ""),
            "engine": self.knobs.name,
            "pid": os.getpid(),
            "path": call.head.path,
            "model": call.answer.ask.model,
            "bytes": call.sent_bytes,
            "finished": finished,
            "aborted": aborted,
            "after_s": now_s - call.arrived_s,
            "at_once": call.at_once,
            "queued_s": (now_s if call.granted_s is None else call.granted_s) - call.arrived_s,
            "headers": call.head.headers,
        }
        os.write(self._transcript, json.dumps(line).encode() + b"\n")


class Connection(asyncio.Protocol):
    """A client connection with one request at a time; pipelined requests wait."""

    transport: asyncio.WriteTransport

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._buffer = bytearray()
        self._busy = False
        self._call: Call | None = None
        self._keep_alive = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self.transport = cast("asyncio.WriteTransport", transport)

    def connection_lost(self, _error: Exception | None) -> None:
        """Remove the current request after the client disconnected or the connection was closed."""
        if self._call:
            self._engine.leave(self._call)

    def data_received(self, data: bytes) -> None:
        """Buffer bytes of this request or of a pipelined one."""
        self._buffer += data
        if len(self._buffer) > HEAD_BYTES_MAX + BODY_BYTES_MAX:
            self.transport.abort()
        elif not self._busy:
            # If another connection ended before these bytes arrived, the loop reports this only in its next round. This
            # waits for that round, so that requests are counted in the order in which they came and went.
            asyncio.get_running_loop().call_soon(self._next)

    def head(self, status: int, *lines: str, kind: str = "application/json") -> bytes:
        """Return a response head. It announces keep-alive even where closes-keepalive-after-stream breaks it."""
        keep = "Keep-Alive: timeout=5, max=100" if self._keep_alive else "Connection: close"
        rows = [f"HTTP/1.1 {status} {REASONS[status]}", "Server: fake-engine", f"Content-Type: {kind}", keep, *lines]
        return "\r\n".join([*rows, "", ""]).encode()

    def done(self, *, close: bool = False) -> None:
        """Complete a response: close the connection, or continue with buffered requests."""
        self._call, self._busy = None, False
        if close or not self._keep_alive:
            self.transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        """Take the next request from the buffer if it is complete."""
        end = self._buffer.find(b"\r\n\r\n", 0, HEAD_BYTES_MAX)
        if self._busy or self.transport.is_closing() or (end < 0 and len(self._buffer) < HEAD_BYTES_MAX):
            return
        try:
            head = parse_head(bytes(self._buffer[: max(end, 0)]))
            if len(self._buffer) < end + 4 + head.body_bytes:
                return
            body = bytes(self._buffer[end + 4 : end + 4 + head.body_bytes])
            del self._buffer[: end + 4 + head.body_bytes]
            self._busy, self._keep_alive = True, head.keep_alive
            self._take(head, body)
        except BadRequestError as error:
            self._keep_alive = False
            self._error(400, str(error))

    def _take(self, head: Head, body: bytes) -> None:
        engine = self._engine
        if head.path == "/health":
            delay_s = engine.faults["slow-health"] if engine.strikes("slow-health") else 0.0
            asyncio.get_running_loop().call_later(delay_s, self._health)
        elif not engine.ready:
            self._error(503, "Loading model")
        elif head.method == "POST" and head.path in DIALECTS:
            self._infer(head, body)
        elif head.path == "/metrics" and engine.strikes("hangs-metrics"):
            pass  # until the client closes the connection
        elif head.path == "/metrics":
            self._reply(200, engine.metrics().encode(), "text/plain; version=0.0.4")
        elif head.path == "/slots":
            busy = len(engine.running)
            self._json(200, [{"id": i, "is_processing": i < busy} for i in range(engine.knobs.slots)])
        elif engine.vllm and head.path in engine.vllm.paths:
            status, document = engine.vllm.respond(head, body)
            if isinstance(document, str):
                self._reply(status, document.encode(), "text/plain; charset=utf-8")
            else:
                self._json(status, document)
        elif engine.vllm and head.path == WAKE_PATH:
            asyncio.get_running_loop().call_later(engine.knobs.wake_delay, lambda: self._json(200, engine.wake()))
        elif head.path == "/v1/models":
            names = engine.vllm.models if engine.vllm else [engine.knobs.name]
            self._json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in names]})
        else:
            self._error(404, "File Not Found")

    def _infer(self, head: Head, body: bytes) -> None:
        engine, ask = self._engine, read_ask(body, head.headers.get("content-type", ""))
        engine.calls += 1
        if engine.every("busy-503"):
            self._error(503, "Loading model")
        elif engine.every("error-500"):
            self._reply(500, b"<html><h1>500 Internal Server Error</h1></html>", "text/html")
        elif engine.vllm and ask.model not in engine.vllm.models:
            self._json(404, unknown_model(ask.model))
        else:
            tokens, finish = tokens_of(engine.knobs.sentence, engine.knobs.tokens, ask)
            self._call = Call(engine, self, head, DIALECTS[head.path](ask, engine.calls, tokens, finish))
            engine.submit(self._call)

    def _health(self) -> None:
        if self._engine.ready:
            self._engine.answered_unix_s = self._engine.answered_unix_s or time.time()
            self._json(200, {"status": "ok"})
        else:
            self._json(503, {"status": "loading"})

    def _reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        """Write a whole response outside of inference."""
        self.transport.write(self.head(status, f"Content-Length: {len(body)}", kind=kind) + body)
        self.done()

    def _json(self, status: int, document: object) -> None:
        self._reply(status, json.dumps(document).encode())

    def _error(self, status: int, message: str) -> None:
        self._json(status, {"error": {"code": status, "message": message, "type": TYPES[status]}})


def leave_child(seconds: float) -> None:
    """Start a grandchild in a session of its own that outlives this process, as an engine's child might."""
    if os.fork():
        os.wait()
        return
    os.setsid()
    if os.fork() == 0:
        time.sleep(min(seconds, CHILD_S_MAX))
    os._exit(0)


def format_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def serve_engine(engine: Engine) -> None:
    """Listen when ready (at once with --loading-503) and run until killed."""
    knobs, faults, loop = engine.knobs, engine.faults, asyncio.get_running_loop()
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_IGN:  # handled between callbacks, never mid-write
        loop.add_signal_handler(signal.SIGTERM, engine.terminate)

    async def listen() -> asyncio.Server:
        server = await loop.create_server(lambda: Connection(engine), knobs.host, knobs.port, backlog=4096)
        host, port = server.sockets[0].getsockname()[:2]
        sys.stdout.write(f"{knobs.name}: listening on http://{format_host_port(host, port)}\n")
        sys.stdout.flush()
        return server

    server = await listen() if knobs.loading_503 else None
    if "dies-after" in faults:
        loop.call_later(faults["dies-after"], lambda: engine.strikes("dies-after") and engine.die(1))
    if knobs.start_delay:
        await asyncio.sleep(knobs.start_delay)
    if engine.strikes("dies-on-start"):
        sys.stderr.write(f"{knobs.name}: error: failed to load model\n")
        sys.stderr.flush()
        engine.die(int(faults["dies-on-start"]))
    if not engine.strikes("never-ready"):
        engine.ready = True
        server = server or await listen()
    await asyncio.Event().wait()


def main(argv: list[str]) -> None:
    """Run until killed."""
    engine = Engine(parse_arguments(argv))
    ignores = engine.strikes("ignores-sigterm")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignores else signal.SIG_DFL)
    if engine.strikes("leaves-child"):
        leave_child(engine.faults["leaves-child"])
    try:
        asyncio.run(serve_engine(engine))
    except OSError as error:
        knobs = engine.knobs
        sys.exit(f"{knobs.name}: cannot listen on {format_host_port(knobs.host, knobs.port)}: {error.strerror}")
    except KeyboardInterrupt:
        engine.die(130)
