"""The inference port: one asyncio.Protocol per client connection around `gateway.http.request_reader`.

Handles a connection's timeouts and limits, one request at a time in order, and responses that need no engine. Every
response carries the request id. A disconnect (end of stream, reset, half-close) is noticed at once, because reading
continues while a request runs. A client that does not read pauses its engine and is disconnected after a timeout. A
request rejected before it was read completely gets a response; then the connection ends.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from gateway import errors
from gateway.dialects.ollama_requests import refuse_management
from gateway.dispatch.memory_pressure import Pressure
from gateway.errors import CallError
from gateway.http import responses
from gateway.http.body_buffers import ChunkedBody
from gateway.http.request_head import Head, Request
from gateway.http.request_reader import AHEAD_BYTES_MAX
from gateway.request import headers
from gateway.request.api_routes import Kind, Operation, find_operation
from gateway.server import cors, local_routes, precheck
from gateway.server.admission import admit_call, admit_ollama_call
from gateway.server.body_intake import BodyIntake
from gateway.server.client_transport import LINGER_S

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext

ANSWERS_A_TURN: Final = 32
"""Pipelined requests answered per loop iteration: about a millisecond."""


class Connection(BodyIntake):
    """One client connection. `proxied_call` is its running request."""

    __slots__ = ("_serving", "address", "cors", "id_bytes", "request_id")

    def __init__(self, gateway: GatewayContext) -> None:
        super().__init__(gateway)
        self._serving = False
        """`_serve` is on the stack and takes the next request itself."""
        self.address = ""
        self.request_id = ""
        self.id_bytes = b""
        self.cors = b""

    # --- asyncio -----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Register a client; one above a limit of connections is disconnected without a response."""
        peer = self._made(transport).get_extra_info("peername")
        self._since_s = self._gateway.clock()
        self.address = peer[0] if isinstance(peer, tuple) else ""
        if not self._gateway.opened(self):
            self._abort()

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request."""
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

    def eof_received(self) -> bool:
        """The client disconnected; a half-close counts as well. True: the transport stays open until `hang_up`."""
        if self.proxied_call is None and self.unsent is None:
            self._gateway.close_soon(self)
            return True
        self.hang_up()
        return False

    def hang_up(self) -> None:
        """Close after the client has disconnected; its request is abandoned."""
        self._on_disconnect()
        self._close()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        del exc
        self.let_go()
        self._on_disconnect()
        self._transport = None
        self._drop_intake()
        self._held, self._lingers = None, True  # a scheduled `_turn` then does nothing
        self._gateway.closed(self)

    def _fell_behind(self) -> None:
        self._since_s = self._gateway.clock()
        self._gateway.paused.add(self)
        if self.proxied_call is not None:
            self.proxied_call.pause()
        else:
            self._run("stall")
            self._stop_reading()  # read no further requests until it reads its responses

    def _caught_up(self) -> None:
        self._gateway.paused.discard(self)
        if self.proxied_call is not None:
            self.proxied_call.resume()
        elif not self._lingers and not self._serving:
            asyncio.get_running_loop().call_soon(self._read_on)  # the transport must not be closed in this callback

    def _read_on(self) -> None:
        """Continue where the client stopped reading."""
        if self._held is not None:
            self._turn()
        elif self._occupied():
            return
        elif self._reader.waiting_for == "nothing":
            self._next()
        else:
            self._run({"body": "body", "drop": "linger"}.get(self._reader.waiting_for, "idle"))
            self._resume_reading()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _serve(self, request: Request | None) -> None:
        """Answer the requests read, in order, until one is in dispatch or all are done; a few per loop iteration."""
        self._serving = True
        for _ in range(ANSWERS_A_TURN):
            if request is None:
                break
            if isinstance(request.body, ChunkedBody):
                self._answer_large(request, request.body)
            else:
                self._answer(request)
            request = None if self._occupied() else self._take_next()
        if request is not None:
            self._hold(request)
        self._serving = False

    def _answer(self, request: Request) -> None:
        gateway = self._gateway
        now_s = gateway.clock()
        self._clock, self._since_s = "busy", now_s
        self._continued = False
        head = request.head
        self.request_id = headers.request_id(head) or gateway.make_id()
        self.id_bytes = self.request_id.encode()
        self.cors = cors.render_cors_headers(head, gateway.directory.settings.cors_origins)
        operation = find_operation(head.method, head.path)
        try:
            precheck.check_sender(gateway, head)
            if operation is None:
                operation = precheck.find_server_operation(head)
            if operation.kind is not Kind.INFER:
                precheck.check_body_size(operation, len(request.body))
            elif self._reader.ahead > AHEAD_BYTES_MAX:
                raise errors.pipelining_limit_exceeded()
            elif operation.dialect == "ollama":
                self.proxied_call = ollama_call = admit_ollama_call(gateway, self, request, operation, now_s)
                if ollama_call is not None:
                    gateway.begin(ollama_call, now_s)
                return
            else:
                self.proxied_call = proxied_call = admit_call(gateway, self, request, operation, now_s)
                gateway.begin(proxied_call, now_s)
                return
            secure, body = self.unsent is not None, request.body if isinstance(request.body, bytes) else b""
            out = local_routes.handle_local_route(
                gateway, head, operation, self.id_bytes, self.cors, body=body, secure=secure
            )
            self.write(responses.without_body(out) if head.method == b"HEAD" else out)
        except CallError as error:
            gateway.telemetry.turned_away(self.request_id, error.code)
            close = error.close or not head.keep_alive or head.method == b"HEAD"
            self.say_error(error, "openai" if operation is None else operation.dialect, head, close=close)
            if error.close:
                self._linger()
            else:
                self.answered(close=close)
        else:
            self.answered(close=not head.keep_alive)

    def _call(self, request: Request, operation: Operation) -> None:
        self._named(request.head)
        now_s = self._gateway.clock()
        self.proxied_call = proxied_call = admit_call(self._gateway, self, request, operation, now_s)
        self._gateway.begin(proxied_call, now_s)

    def answered(self, *, close: bool) -> None:
        """The response is written: continue with the next request, or close."""
        self.proxied_call = None
        if self._growing is not None:
            self._end_intake()
        elif close or self._gateway.closing:
            self._close()
        elif self.paused:
            self._run("stall")
        elif not self._serving:
            self._next()

    def broke_off(self, *, is_reported: bool) -> None:
        """The response ends early. Unless its content reports that (`is_reported`), reset the connection."""
        self.proxied_call = None
        if is_reported and self._growing is not None:
            self._end_intake()
        elif is_reported:
            self._close()
        else:
            self._reset()

    def say_error(self, error: CallError, dialect: str, head: Head | None = None, *, close: bool = False) -> None:
        """Write a complete error response."""
        close = close or self._gateway.closing or (head is not None and not head.keep_alive)
        out = responses.render_error(error, self.id_bytes, dialect, close=close, more=self.cors)
        self.write(responses.without_body(out) if head is not None and head.method == b"HEAD" else out)

    def _next(self) -> None:
        request = None if self._occupied() else self._take_next()
        if request is not None:
            self._serve(request)

    def _take_next(self) -> Request | None:
        """Return the next request if all of it has arrived; else start its timeout."""
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
            self.proxied_call is not None
            or self._held is not None
            or self.paused
            or self._lingers
            or self._transport is None
            or self._transport.is_closing()
        )

    def _answer_early(self, head: Head, operation: Operation | None, error: CallError) -> None:
        """Answer a request from its head. A short rest of the body is dropped; otherwise the connection ends."""
        self._named(head)
        self._drop_intake()
        self._gateway.telemetry.turned_away(self.request_id, error.code)
        stays = head.keep_alive and not head.expects_continue and not error.close
        stays = stays and not self.paused and not self._gateway.closing
        stays = stays and self._reader.drop(precheck.DROP_BYTES_MAX)
        self.say_error(error, "openai" if operation is None else operation.dialect, head, close=not stays)
        if stays:
            self._run("linger")
        else:
            self._linger()

    def _refuse_bytes(self, error: CallError) -> None:
        """Reject bytes that are no valid request; nothing after them can be read."""
        if self.proxied_call is not None and self._growing is not None:
            self.proxied_call.fail(error)
            return
        if self.proxied_call is not None:  # pipelined: the response to the previous request is not sent yet
            self._abort()
            return
        head = self._reader.partial_head()
        operation = None if head is None else find_operation(head.method, head.path)
        if error.status == 413 and operation is not None and operation.kind is Kind.OLLAMA_MANAGE:
            error = refuse_management(operation.advice)
        self._named(head)
        self._gateway.telemetry.turned_away(self.request_id, error.code)
        self.say_error(error, "openai" if operation is None else operation.dialect, head, close=True)
        self._drop_intake()
        self._linger()

    def _named(self, head: Head | None) -> None:
        """Set the request's id, and the CORS headers of its response."""
        gateway = self._gateway
        self.request_id = (None if head is None else headers.request_id(head)) or gateway.make_id()
        self.id_bytes = self.request_id.encode()
        self.cors = b"" if head is None else cors.render_cors_headers(head, gateway.directory.settings.cors_origins)

    # --- clocks and ends ---------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Check the running timeout; called about twice per second."""
        limits, past_s = self._gateway.limits, now_s - self._since_s
        if self.paused or self._clock == "stall":
            if past_s > LINGER_S and self._said_all():
                self._abort()
            elif not self._takes(now_s) and past_s > limits.write_stall_seconds_max:
                self._on_disconnect()
                self._reset()
        elif self._clock == "idle":
            if past_s > limits.idle_seconds_max or (self._short() and past_s > LINGER_S):
                self._close()
        elif self._clock == "head":
            if past_s > limits.header_seconds_max:
                self._refuse_bytes(errors.head_timeout())
        elif self._clock == "body":
            if self._gateway.room.waits(self):
                if past_s > limits.body_seconds_max:
                    self._refuse_bytes(errors.out_of_memory())
            elif (error := self._slowness(now_s)) is not None:
                self._refuse_bytes(error)
        elif self._clock == "linger" and past_s > LINGER_S:
            self._abort()

    def close_if_idle(self) -> None:
        """The gateway stops: close if no request runs."""
        if self.proxied_call is None and self._clock in ("idle", "head"):
            self._close()
        elif self.proxied_call is None and self._clock == "body":
            self._refuse_bytes(errors.shutting_down())  # not admitted yet, and would delay the shutdown

    def _short(self) -> bool:
        """Whether memory is very short: idle connections use some of it, too."""
        return self._gateway.dispatch.pressure is Pressure.NO_CALLS
