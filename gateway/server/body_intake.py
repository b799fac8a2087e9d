"""Receives bodies that do not arrive at once: base class of `gateway.server.connection`.

Holds the body that is being read, from its head until a request takes it. A body is not read if its head alone rules
it out, or if memory is short. A large body is read one step per loop iteration, while it arrives. A form is forwarded
while it arrives, once its model is known, but no engine gets all of it before all of it has been checked.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from gateway.dispatch.memory_pressure import Pressure
from gateway.errors import (
    CallError,
    body_hinders_others,
    body_stalled,
    body_too_slow,
    out_of_memory,
    pipelining_limit_exceeded,
)
from gateway.http import responses
from gateway.http.body_buffers import LARGE_BYTES, ChunkedBody, StreamingBody
from gateway.http.request_head import Head, Request
from gateway.http.request_reader import AHEAD_BYTES_MAX, RequestReader
from gateway.memory.body_budget import TLS_BYTES
from gateway.request import body_members
from gateway.request.api_routes import Kind, Operation, find_operation
from gateway.request.multipart import names_model
from gateway.server import precheck
from gateway.server.client_transport import ClientTransport

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext

PACE_BYTES_PER_S, PACE_GRACE_S = 1 << 20, 3.0
"""While other bodies need memory, a body that is slower than this after the grace period is rejected."""
REST_S_MAX = 1.0
"""A form is forwarded while it arrives if its rest is expected within this time."""


class BodyIntake(ClientTransport):
    """The part of a client connection that receives bodies."""

    __slots__ = ("_came_s", "_continued", "_growing", "_held", "_intake", "_reader", "_received")

    def __init__(self, gateway: GatewayContext) -> None:
        super().__init__(gateway)
        self._reader = RequestReader(gateway.body_bytes_max)
        self._continued = False
        """Whether 100 Continue was sent for the request that is being read."""
        self._intake: ChunkedBody | None = None
        """The body that is being read, until a request takes it."""
        self._growing: StreamingBody | None = None
        """The same body while it is forwarded as it arrives; `proxied_call` is its request."""
        self._received = 0
        """Bytes of the body at the last sweep."""
        self._came_s = 0.0
        """When the last sweep saw new bytes."""
        self._held: Request | None = None
        """A complete request whose large body has not been read yet."""

    # --- implemented by Connection -----------------------------------------------------------------------------------

    def _serve(self, request: Request | None) -> None:
        """Answer a complete request and the complete ones after it."""
        raise NotImplementedError

    def _answer(self, request: Request) -> None:
        """Answer one request, or pass it to dispatch."""
        raise NotImplementedError

    def _call(self, request: Request, operation: Operation) -> None:
        """Pass a request to dispatch. Raises CallError."""
        raise NotImplementedError

    def _answer_early(self, head: Head, operation: Operation | None, error: CallError) -> None:
        """Reject a request whose body is still arriving."""
        raise NotImplementedError

    def _refuse_bytes(self, error: CallError) -> None:
        """Reject the received bytes; nothing after them can be read."""
        raise NotImplementedError

    def _occupied(self) -> bool:
        """Return whether the next request must wait."""
        raise NotImplementedError

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _wait_for_more(self) -> None:
        """Called if bytes arrived, but no request can be served yet: it is incomplete, or the previous one is not
        answered. Starts the timeout of an incomplete head or body.
        """
        reader = self._reader
        if reader.waiting_for == "body":
            head, pieces = reader.pending, reader.pieces
            if head is not None and pieces is not None and self._may_come(head, pieces, reader.length):
                self._body_comes(head, pieces)
        elif reader.waiting_for == "head":
            if self._clock == "linger":  # the dropped body has ended
                self._run("idle")
            if self._clock == "idle" and reader.buffered:
                self._run("head")

    def _may_come(self, head: Head, pieces: ChunkedBody, length: int | None) -> bool:
        """Return whether more of this body may arrive now; if never, an error has been sent."""
        room = self._gateway.room
        if self._growing is not None:
            return True  # its request runs
        if self._clock != "body" or (length is None and pieces.size > precheck.DROP_BYTES_MAX):
            operation = find_operation(head.method, head.path)
            try:
                precheck.check_head(self._gateway, head, operation, length or pieces.size)
            except CallError as error:
                self._answer_early(head, operation, error)
                return False
        if self._clock != "body":
            self._run("body")
            self._received, self._came_s = 0, self._since_s
            self._continued = False
            self._intake = pieces
        elif self._gateway.dispatch.pressure is Pressure.NO_CALLS:
            self._refuse_bytes(out_of_memory())
            return False
        elif length is not None and length > LARGE_BYTES:
            return True
        large = length is not None and length > LARGE_BYTES
        tls = 0 if self.unsent is None else min(TLS_BYTES, length if length is not None and large else pieces.size)
        if room.admit(pieces, length, tls):
            return True
        if length is not None and large and room.wait(self, pieces, length, tls):
            self._stop_reading()
        else:
            self._refuse_bytes(out_of_memory())
        return False

    def let_in(self) -> None:
        """Memory for the waiting body was reserved: read it now, with its full timeout."""
        self._run("body")
        self._came_s = self._since_s
        head, pieces = self._reader.pending, self._reader.pieces
        if head is not None and pieces is not None:
            self._resume_reading()
            self._body_comes(head, pieces)

    def _body_comes(self, head: Head, pieces: ChunkedBody) -> None:
        if pieces.size > LARGE_BYTES and self._reading:
            self._stop_reading()  # one piece per loop iteration, even if more have arrived
            self._has_read(head, pieces)
            asyncio.get_running_loop().call_soon(self._turn)
        if head.expects_continue and not self._continued:
            self._continued = True
            self.write(responses.CONTINUE)

    def _has_read(self, head: Head, body: ChunkedBody) -> bool:
        """Read a step of a large body, mostly while it arrives, to keep pauses short; False if there is more."""
        if body.scan is None:
            operation = find_operation(head.method, head.path)
            if operation is not None and operation.kind is Kind.INFER and operation.dialect != "ollama":
                content_type, watched = head.headers.get(b"content-type", b""), self._gateway.directory.watched
                body_members.start_scan(operation, body, content_type, watched)
        return body.scan is None or body.scan.step(body.size)

    def _turn(self) -> None:
        """Called in the next loop iteration: continue with a held request or an arriving body."""
        request = self._held
        if self._lingers:  # no further responses
            self._held = None
            self._resume_reading()
            return
        if request is not None:
            if self._growing is not None or not self.paused:  # else it continues when the client reads
                self._held = None
                self._resume_reading()
                self._serve(request)
            return
        head, pieces = self._reader.pending, self._reader.pieces
        if head is None or pieces is None:
            self._resume_reading()
            return
        read = self._has_read(head, pieces)
        self._pass_on(head, pieces)
        if read:
            self._resume_reading()
        else:
            asyncio.get_running_loop().call_soon(self._turn)

    def _answer_large(self, request: Request, body: ChunkedBody) -> None:
        """Answer a request only after its large body has been read."""
        if not self._has_read(request.head, body):
            self._hold(request)
        elif self._growing is not None:
            self._is_whole(request, self._growing)
        else:
            self._answer(request)
            if self.proxied_call is None:
                self._drop_intake()
            self._intake = None

    def _hold(self, request: Request) -> None:
        """Continue with the request in the next loop iteration."""
        self._held = request
        self._stop_reading()
        asyncio.get_running_loop().call_soon(self._turn)

    # --- forms that are forwarded while they arrive ------------------------------------------------------------------

    def _pass_on(self, head: Head, pieces: ChunkedBody) -> None:
        """Forward the bytes read; the request starts once its model is known."""
        growing, scan, length = self._growing, pieces.scan, self._reader.length
        if scan is None or length is None:
            return
        if growing is None:
            if self._gateway.directory.policies is not None:
                return  # a policy may change any part, so the form is read first
            operation = find_operation(head.method, head.path)
            if operation is not None and names_model(pieces) and self._is_soon_whole(pieces.size, length):
                self._growing = StreamingBody(pieces, length, scan.offset)
                self._begin(Request(head, self._growing), operation)
            return
        proxied_call = self.proxied_call
        if scan.error is not None:
            self._refuse_bytes(scan.error)
        elif proxied_call is not None:
            growing.ready = scan.offset
            proxied_call.more()

    def _is_soon_whole(self, size: int, length: int) -> bool:
        """Return whether the rest arrives soon, at the pace so far, so that a slot is not occupied by waiting."""
        return (self._gateway.clock() - self._since_s) * (length - size) <= REST_S_MAX * size

    def _begin(self, request: Request, operation: Operation) -> None:
        try:
            self._call(request, operation)
        except CallError as error:
            self._answer_early(request.head, operation, error)

    def _is_whole(self, request: Request, growing: StreamingBody) -> None:
        """The body of a running request is complete."""
        proxied_call = self.proxied_call
        self._clock, self._since_s = "busy", self._gateway.clock()
        if proxied_call is None:
            return
        try:
            if self._reader.ahead > AHEAD_BYTES_MAX:
                raise pipelining_limit_exceeded()
            taken = proxied_call.whole(request, growing)
        except CallError as error:
            self._refuse_bytes(error)
            return
        self._growing = None
        if not taken:
            self._drop_intake()
        self._intake = None
        proxied_call.arrive_again()

    # --- ends --------------------------------------------------------------------------------------------------------

    def _drop_intake(self) -> None:
        """Drop a body that is no longer needed, or a small one whose pieces have been joined."""
        pieces, self._intake, self._growing = self._intake, None, None
        if pieces is not None:
            self._gateway.room.forget(self)
            self._gateway.discard(pieces)

    def _end_intake(self) -> None:
        """The response was sent before the whole body arrived: drop the rest, then close."""
        self._drop_intake()
        self._linger()

    def _slowness(self, now_s: float) -> CallError | None:
        """Return the error for a body of which no byte has arrived for too long, or too few on average, if so."""
        limits, pieces, past_s = self._gateway.limits, self._intake, now_s - self._since_s
        received = 0 if pieces is None else pieces.size
        if received > self._received or not self._reading:  # what the gateway does not read, it does not wait for
            self._received, self._came_s = received, now_s
        if now_s - self._came_s > limits.body_seconds_max:
            return body_stalled()
        if past_s > limits.body_seconds_max and received < past_s * limits.body_bytes_per_second_min:
            return body_too_slow()
        is_slow = past_s > PACE_GRACE_S and received < past_s * PACE_BYTES_PER_S
        return body_hinders_others() if is_slow and pieces is not None and self._gateway.room.wanted else None
