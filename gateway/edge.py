"""The inference port: one asyncio.Protocol per client connection around `gateway.wire`.

Owns client connections: their clocks, their bounds, one request at a time in order, and answers that need no engine.
Promises: every answer carries the request id; a client that leaves (end of stream, reset, half-close) is noticed at
once, for reading goes on while its Call runs; one that does not read stops the engine's reading and is cut in the end;
what is refused before it was read whole is answered, and then the connection ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from gateway import admission, early, errors, local, render, rewrite
from gateway.body import LARGE_BYTES, Pieces
from gateway.dialects import Kind, Operation, lookup
from gateway.ends import LINGER_S, Ends
from gateway.errors import CallError
from gateway.exchange import admit
from gateway.head import Head, Request
from gateway.pressure import Pressure
from gateway.room import TLS_BYTES
from gateway.wire import RequestReader

if TYPE_CHECKING:
    from gateway.front import Front

PACE_BYTES_PER_S, PACE_GRACE_S = 1 << 20, 3.0
"""While others wait for room: a large body that comes more slowly, after so long, is refused."""
WRITE_BUFFER_BYTES = 64 << 10
"""What may wait for a client before its engine is paused."""


class Connection(Ends):
    """One client connection. `exchange` is its running Call; `paused`: the client does not read."""

    __slots__ = ("_continued", "_held", "_intake", "_reader", "_serving", "address", "cors", "id_bytes", "paused",
                 "request_id", "write")  # fmt: skip

    def __init__(self, front: Front) -> None:
        super().__init__(front)
        self._reader = RequestReader(front.body_bytes_max)
        self._serving = False
        """`_serve` is on the stack: it takes the next request itself."""
        self._continued = False
        """100 Continue was sent for the request that is being read."""
        self._intake: Pieces | None = None
        """The body that is being read, until a Call has it."""
        self._held: Request | None = None
        """Whole, but its large body is not read yet."""
        self.address = ""
        self.paused = False
        self.request_id = ""
        self.id_bytes = b""
        self.cors = b""
        self.write: Callable[[bytes], None] = _nowhere

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client is here; one too many from its address is closed unanswered."""
        self._transport = cast("asyncio.Transport", transport)
        self._since_s = self._front.clock()
        peer = self._transport.get_extra_info("peername")
        self.address = peer[0] if isinstance(peer, tuple) else ""
        if not self._front.opened(self):
            self._transport.abort()
            return
        self._transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        self.write = self._transport.write

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        if self._lingers:
            return
        try:
            request = self._reader.feed(data)
        except CallError as error:
            self._refuse_bytes(error)
            return
        if request is not None:
            if self._intake is not None and isinstance(request.body, bytes):
                self._drop_intake()
            self._serve(request)
        else:
            self._wait_for_more()

    def eof_received(self) -> None:
        """The client sends no more: it has left, also when it only half-closed."""
        self._left()
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        del exc
        self._left()
        self.write = _nowhere
        self._transport = None
        self._drop_intake()
        self._held, self._lingers = None, True  # a turn that is still to come finds nothing to do
        self._front.closed(self)

    def pause_writing(self) -> None:
        """The client does not keep up."""
        self.paused = True
        if self.exchange is not None:
            self.exchange.pause()
        else:
            self._run("stall")
        self._since_s = self._front.clock()

    def resume_writing(self) -> None:
        """The client has caught up."""
        self.paused = False
        if self.exchange is not None:
            self.exchange.resume()
        elif not self._serving:
            self._next()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _serve(self, request: Request | None) -> None:
        """Answers what has been read, in order, until a Call runs or nothing whole is left."""
        self._serving = True
        while request is not None:
            if isinstance(request.body, bytes):
                self._answer(request)
            else:
                self._answer_large(request, request.body)
            request = None if self._occupied() else self._take_next()
        self._serving = False

    def _answer(self, request: Request) -> None:
        front = self._front
        now_s = front.clock()
        self._clock, self._since_s = "busy", now_s
        self._continued = False
        head = request.head
        self.request_id = admission.request_id(head) or front.make_id()
        self.id_bytes = self.request_id.encode()
        self.cors = local.cors(head, front.directory.settings.cors_origins)
        operation = lookup(head.method, head.path)
        try:
            if operation is None:
                raise errors.path_not_found()
            if operation.kind is Kind.INFER:
                self.exchange = exchange = admit(front, self, request, operation, now_s)
                front.begin(exchange, now_s)
                return
            self.write(local.answer(front, head, operation, self.id_bytes, self.cors))
        except CallError as error:
            front.telemetry.turned_away(self.request_id, error.code)
            close = error.close or not head.keep_alive or head.method == b"HEAD"
            self.say_error(error, "openai" if operation is None else operation.dialect, head, close=close)
            self.answered(close=close)
        else:
            self.answered(close=not head.keep_alive)

    def _answer_large(self, request: Request, body: Pieces) -> None:
        """Not before all of it is read."""
        if not self._has_read(request.head, body):
            self._held = request
            asyncio.get_running_loop().call_soon(self._turn)
            return
        self._answer(request)
        if self.exchange is None:
            self._drop_intake()
        self._intake = None

    def _has_read(self, head: Head, body: Pieces) -> bool:
        """Reads a step of a large body, mostly while it arrives, so that nobody waits long; False: there is more."""
        if body.scan is None:
            operation = lookup(head.method, head.path)
            if operation is not None and operation.kind is Kind.INFER:
                rewrite.scan(operation, body, head.headers.get(b"content-type", b""))
        return body.scan is None or body.scan.step(body.size)

    def _turn(self) -> None:
        """The next turn, for a request that is held back, or for a body that arrives."""
        request, self._held = self._held, None
        if request is not None:
            self._serve(None if self._occupied() else request)
            return
        head, pieces = self._reader.pending, self._reader.pieces
        if head is None or pieces is None or self._lingers:
            self._resume_reading()
        elif not self._has_read(head, pieces):
            asyncio.get_running_loop().call_soon(self._turn)
        else:
            self._resume_reading()

    def answered(self, *, close: bool) -> None:
        """The answer is written: the next request, or the end."""
        self.exchange = None
        if close or self._front.closing:
            self._close()
        elif self.paused:
            self._run("stall")
        elif not self._serving:
            self._next()

    def broke_off(self, *, told: bool) -> None:
        """The answer ends before its end; where nothing in it says so, a reset does."""
        self.exchange = None
        if told:
            self._close()
        else:
            self._reset()

    def say_error(self, error: CallError, dialect: str, head: Head | None = None, *, close: bool = False) -> None:
        """Writes a whole error answer."""
        close = close or self._front.closing or (head is not None and not head.keep_alive)
        out = render.error(error, self.id_bytes, dialect, close=close, more=self.cors)
        if head is not None and head.method == b"HEAD":
            out = out[: out.index(b"\r\n\r\n") + 4]
        self.write(out)

    def _next(self) -> None:
        request = None if self._occupied() else self._take_next()
        if request is not None:
            self._serve(request)

    def _take_next(self) -> Request | None:
        """The next request if the client has sent all of it; else its clock begins."""
        self._run("idle")
        reader = self._reader
        ahead = reader.ahead
        try:
            request = reader.next()
        except CallError as error:
            self._refuse_bytes(error)
            return None
        if not self._reading:
            self._resume_reading()
        if request is None and ahead:
            self._wait_for_more()
        return request

    def _occupied(self) -> bool:
        return (
            self.exchange is not None
            or self._held is not None
            or self.paused
            or self._lingers
            or self._transport is None
            or self._transport.is_closing()
        )

    def _wait_for_more(self) -> None:
        """A request is not whole yet, or comes before its turn."""
        reader = self._reader
        if reader.waiting_for == "body":
            head, pieces = reader.pending, reader.pieces
            if head is not None and pieces is not None and self._may_come(head, pieces, reader.length):
                self._body_comes(head, pieces)
        elif reader.waiting_for == "head":
            if self._clock == "linger":  # what was dropped has ended
                self._run("idle")
            if self._clock == "idle" and reader.buffered:
                self._run("head")

    def _may_come(self, head: Head, pieces: Pieces, length: int | None) -> bool:
        """Whether more of this body may come now; if never, that has been answered."""
        room = self._front.room
        if self._clock != "body":
            operation = lookup(head.method, head.path)
            try:
                early.judge(self._front, head, operation, length)
            except CallError as error:
                self._answer_early(head, operation, error)
                return False
            self._run("body")
            self._continued = False
            self._intake = pieces
        elif self._front.dispatch.pressure is Pressure.NO_CALLS:
            self._refuse_bytes(errors.out_of_memory())
            return False
        elif length is not None:
            return True
        tls = 0 if self.unsent is None else TLS_BYTES if length is None else min(length, TLS_BYTES)
        if room.admit(pieces, length, tls):
            return True
        if length is not None and length > LARGE_BYTES and room.wait(self, pieces, length, tls):
            self._stop_reading()
        else:
            self._refuse_bytes(errors.out_of_memory())
        return False

    def let_in(self) -> None:
        """There is room for the body that waits: it comes now, and has all of its time."""
        self._run("body")
        head, pieces = self._reader.pending, self._reader.pieces
        if head is not None and pieces is not None:
            self._resume_reading()
            self._body_comes(head, pieces)

    def _body_comes(self, head: Head, pieces: Pieces) -> None:
        if pieces.size > LARGE_BYTES and self._reading:
            self._stop_reading()  # one piece in each turn of the loop, however many are here already
            self._has_read(head, pieces)
            asyncio.get_running_loop().call_soon(self._turn)
        if head.expects_continue and not self._continued:
            self._continued = True
            self.write(render.CONTINUE)

    def _answer_early(self, head: Head, operation: Operation | None, error: CallError) -> None:
        """The head was enough. A short rest of the body is dropped; else, or where it may never come, it is the end."""
        self._named(head)
        self._front.telemetry.turned_away(self.request_id, error.code)
        stays = head.keep_alive and not head.expects_continue and not error.close and not self._front.closing
        stays = stays and self._reader.drop(early.DROP_BYTES_MAX)
        self.say_error(error, "openai" if operation is None else operation.dialect, head, close=not stays)
        if stays:
            self._run("linger")
        else:
            self._linger()

    def _drop_intake(self) -> None:
        """The body is of no use, or is small and has been joined."""
        pieces, self._intake = self._intake, None
        if pieces is not None:
            self._front.room.forget(self)
            self._front.discard(pieces)

    def _refuse_bytes(self, error: CallError) -> None:
        """What came is no request; nothing after it can be read."""
        if self.exchange is not None:  # sent ahead of its turn: the answer to the request before it is not out yet
            self._left()
            if self._transport is not None:
                self._transport.abort()
            return
        head = self._reader.pending
        operation = None if head is None else lookup(head.method, head.path)
        self._named(head)
        self._front.telemetry.turned_away(self.request_id, error.code)
        dialect = "openai" if operation is None else operation.dialect
        self.write(render.error(error, self.id_bytes, dialect, close=True, more=self.cors))
        self._drop_intake()
        self._linger()

    def _named(self, head: Head | None) -> None:
        """Gives the request that is read its id, and its answer what a browser wants."""
        front = self._front
        self.request_id = (None if head is None else admission.request_id(head)) or front.make_id()
        self.id_bytes = self.request_id.encode()
        self.cors = b"" if head is None else local.cors(head, front.directory.settings.cors_origins)

    # --- clocks and ends ---------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """About twice a second: has the clock that runs run out?"""
        limits, past_s = self._front.limits, now_s - self._since_s
        if self.paused or self._clock == "stall":
            if past_s > LINGER_S and self._said_all():
                self._abort()
            elif not self._takes(now_s) and past_s > limits.write_stall_seconds_max:
                self._left()
                self._reset()
        elif self._clock == "idle":
            if past_s > limits.idle_seconds_max or (self._short() and past_s > LINGER_S):
                self._close()
        elif self._clock == "head":
            if past_s > limits.header_seconds_max:
                self._refuse_bytes(errors.request_timeout())
        elif self._clock == "body":
            if past_s > limits.body_seconds_max:
                waits = self._front.room.waits(self)
                self._refuse_bytes(errors.out_of_memory() if waits else errors.request_timeout())
            elif self._lags(past_s):
                self._refuse_bytes(errors.request_timeout())
        elif self._clock == "linger" and (past_s > LINGER_S or self._short()):
            self._abort()

    def close_if_idle(self) -> None:
        """The gateway stops."""
        if self.exchange is None and self._clock in ("idle", "head"):
            self._close()
        elif self.exchange is None and self._clock == "body":
            self._refuse_bytes(errors.shutting_down())  # it is no Call yet, and would hold up the stop until it is

    def _short(self) -> bool:
        """Memory is very short: connections that do nothing hold some of it, too."""
        return self._front.dispatch.pressure is Pressure.NO_CALLS

    def _lags(self, past_s: float) -> bool:
        """While others wait for room, a large body comes at some pace, or makes room."""
        room, pieces = self._front.room, self._intake
        if not room.wanted or pieces is None or pieces.reserved <= LARGE_BYTES or room.waits(self):
            return False
        return past_s > PACE_GRACE_S and pieces.size < past_s * PACE_BYTES_PER_S


def _nowhere(_: bytes) -> None:
    """The client is gone."""
