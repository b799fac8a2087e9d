"""One connection to one engine: one response at a time, never reused after an irregularity.

Sends requests, reads heads and finds the ends of bodies; the Sink handles the bytes. A Sink gets exactly one final call
(`engine_end`, `engine_whole` or `engine_lost`) unless it called `let_go` first, which aborts the connection at once, so
that the engine stops.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Literal, cast

from gateway.exception_handling import reraise_memory_error
from gateway.http.body_buffers import Body, ChunkedBody, Part, StreamingBody
from gateway.http.response_reader import BodyWalker, FramingError, HeadReader, ResponseHead

if TYPE_CHECKING:
    from gateway.upstream.pool import Pool

STALE_S = 0.25
"""A pooled connection that is lost this soon after sending a request was closed before: the engine received nothing."""
TURN_BYTES: Final = 256 << 10
"""Maximum bytes of a large body sent per loop iteration."""
RECEIVE_BYTES: Final = 48 << 10
"""Kernel receive buffer for an engine's response, and so the size of one read (the kernel doubles the value).
This much of a response waits here for a client that reads nothing; by default the kernel keeps megabytes per stream.
"""
JOIN_BYTES_MAX: Final = 64 << 10
"""Up to this size, head and body are sent joined, in one system call; a longer body is not copied."""

Loss = Literal["connect", "reset", "odd", "distrusted"]


class Sink:
    """Receiver of a response: base class of `gateway.server.proxied_call.ProxiedCall`, which is in a layer above.

    Not a Protocol, because mypyc calls the methods of a class in a third of the time.
    """

    __slots__ = ("engine",)

    def __init__(self) -> None:
        self.engine: EngineConnection | None = None
        """The connection now used for this Sink; set by the connection."""

    @property
    def sent_s(self) -> float:
        """When the request was written, by `time.monotonic`."""
        raise NotImplementedError

    def engine_sent(self) -> None:
        """The request has been written to a connection."""
        raise NotImplementedError

    def engine_head(self, head: ResponseHead, walker: BodyWalker) -> Callable[[bytes], None] | None:
        """The final head has arrived; return the function that takes the body's bytes, or None after `let_go`."""
        raise NotImplementedError

    def engine_end(self) -> None:
        """The body has ended according to its framing."""
        raise NotImplementedError

    def engine_whole(self, head: ResponseHead, body: bytes) -> None:
        """Head, body and end arrived at once, like nearly every response that does not stream."""
        raise NotImplementedError

    def engine_failed(self, error: Exception) -> None:
        """One of these methods, or the function that takes the body's bytes, has raised an exception."""
        raise NotImplementedError

    def engine_lost(self, loss: Loss) -> None:
        """Connecting or TLS failed, the connection ended early, or the response is not valid HTTP."""
        raise NotImplementedError


class EngineConnection(asyncio.Protocol):
    """One connection to one engine. `take` receives the body's bytes; the Sink may replace it."""

    __slots__ = (
        "_behind", "_cause", "_full", "_growing", "_head", "_paused", "_pool", "_reading", "_request", "_sent",
        "_transport", "_unsent", "_walker", "after_stream", "connecting", "reused", "single", "sink", "sweeps", "take",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._head = HeadReader()
        self._walker: BodyWalker | None = None
        self._request: tuple[bytes, Body] | None = None
        self._unsent: list[Part] = []
        """Unsent parts of a large body, in reverse order."""
        self._growing: StreamingBody | None = None
        """A body that is forwarded while it arrives."""
        self._sent = 0
        """Bytes of it that were sent."""
        self._full = False
        """The engine does not keep up with the request."""
        self._reading = True
        self._paused = False
        """The client does not keep up."""
        self._behind = False
        """Some received bytes wait for a later loop iteration."""
        self._cause: Exception | None = None
        """The error if the connection was lost in the meantime."""
        self.connecting: asyncio.Task[None] | None = None
        self.sink: Sink | None = None
        self.take: Callable[[bytes], None] = _reject_bytes
        self.single = False
        """Not pooled after this response."""
        self.reused = False
        self.after_stream = False
        """The previous response was a stream."""
        self.sweeps = 0
        """Number of sweeps for which it has been idle."""

    def start(self, sink: Sink, request: tuple[bytes, Body], *, single: bool) -> None:
        """Send a request on an existing connection, or once it is made (`connection_made`)."""
        self.sink = sink
        self.single = single
        self._request = request
        sink.engine = self
        if self._transport is not None:
            self._send(sink, self._transport)

    def pause(self) -> None:
        """Stop reading: the client does not keep up."""
        self._paused = True
        self._read_on()

    def resume(self) -> None:
        """Continue reading: the client has caught up."""
        self._paused = False
        self._read_on()

    def _read_on(self) -> None:
        """Read only if the client keeps up and all received bytes have been processed."""
        transport, reading = self._transport, not (self._paused or self._behind)
        if transport is None or transport.is_closing() or reading is self._reading:
            return
        self._reading = reading
        if reading:
            transport.resume_reading()
        else:
            transport.pause_reading()

    def let_go(self) -> None:
        """The Sink wants no more: abort the connection to the engine now."""
        sink, self.sink = self.sink, None
        self.take = _reject_bytes
        if sink is not None:
            sink.engine = None
        if self._transport is not None:
            self._pool.leaving.add(self)
            self._transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def close(self) -> None:
        """Close an idle connection."""
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> None:
        """The engine sends no more: an idle connection can no longer be used."""
        if self.sink is None:
            self._pool.lost_idle(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected: send the request in the same step."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BYTES)
        self.connecting = None
        self._pool.connections += 1
        if self.sink is None:
            self._transport.abort()
        else:
            self._send(self.sink, self._transport)

    def _send(self, sink: Sink, transport: asyncio.Transport) -> None:
        head, body = self._request or (b"", b"")
        if not self.reused:
            self._request = None  # only a lost pooled connection leads to a resend
        if isinstance(body, (ChunkedBody, StreamingBody)):
            if isinstance(body, ChunkedBody):
                self._unsent = body.parts[::-1]
            else:
                self._growing, self._sent = body, 0
            transport.write(head)
            self.send_more()
        elif len(body) <= JOIN_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        sink.engine_sent()

    def send_more(self) -> None:
        """Send a part of a large body; the rest follows in later loop iterations, after other connections."""
        transport = self._transport
        if transport is None or self._full or transport.is_closing():
            return
        parts = self._next() if self._growing is None else self._next_grown(self._growing)
        if parts:
            transport.writelines(parts)
            if not self._full:
                asyncio.get_running_loop().call_soon(self.send_more)

    def _next_grown(self, body: StreamingBody) -> list[Part]:
        parts = body.take(self._sent, TURN_BYTES)
        self._sent += sum(map(len, parts))
        return parts

    def _next(self) -> list[Part]:
        unsent = self._unsent
        size, parts = 0, list[Part]()
        while unsent and size < TURN_BYTES:
            part = unsent.pop()
            if len(part) > TURN_BYTES:
                view = memoryview(part)
                unsent.append(view[TURN_BYTES:])
                part = view[:TURN_BYTES]
            parts.append(part)
            size += len(part)
        return parts

    def pause_writing(self) -> None:
        """The engine does not keep up."""
        self._full = True

    def resume_writing(self) -> None:
        """The engine has caught up."""
        self._full = False
        self.send_more()

    def data_received(self, data: bytes) -> None:
        """Pass received bytes on (hot path)."""
        walker = self._walker
        try:
            if walker is None:
                self._read_head(data)
                walker = self._walker
            else:
                self.take(data)
        except FramingError:
            self._lost("odd")
            return
        except Exception as error:  # noqa: BLE001 - a fault of any kind ends only this request
            self._failed(self.sink, error)
            return
        if walker is not None and (walker.ended or walker.unread) and self.sink is not None:
            self._walked(self.sink, walker)

    def _walked(self, sink: Sink, walker: BodyWalker) -> None:
        """The response is complete, or the rest of the received bytes is processed in later loop iterations."""
        if walker.ended:
            self._finish(sink, walker)
        elif not self._behind:
            self._behind = True
            self._read_on()
            asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        """Process the next part. If the connection was lost in between, handle that after the last part."""
        self._behind = False
        if self._walker is not None and self.sink is not None:
            self.data_received(b"")
        if self._behind:
            return
        self._read_on()
        if self._transport is None and self.sink is not None:
            self._gone(self.sink, self._cause)

    def _read_head(self, data: bytes) -> None:
        sink, transport = self.sink, self._transport
        if sink is None:
            if transport is not None and not transport.is_closing():
                self._pool.surplus()  # no request was sent
                transport.abort()
            return
        read = self._head.feed(data)
        if read is None:
            return
        self._request = None
        head, rest = read
        if head.length == len(rest) and not head.event_stream:
            self.after_stream = False
            self._freed(sink, keep=head.keep_alive)
            try:
                sink.engine_whole(head, rest)
            except Exception as error:  # noqa: BLE001 - a fault of any kind ends only this request
                self._failed(sink, error)
            return
        walker = BodyWalker(head)
        take = sink.engine_head(head, walker)
        if take is None:
            return
        if not head.keep_alive:
            self.single = True
        self.after_stream = head.event_stream
        self._walker = walker
        self.take = take
        if rest:
            take(rest)

    def _finish(self, sink: Sink, walker: BodyWalker) -> None:
        """The response is complete."""
        self._walker = None
        self.take = _reject_bytes
        if walker.excess:
            self._pool.surplus()
        self._freed(sink, keep=not walker.excess)
        try:
            sink.engine_end()
        except Exception as error:  # noqa: BLE001 - a fault of any kind ends only this request
            self._failed(sink, error)

    def _freed(self, sink: Sink, *, keep: bool) -> None:
        """Return the connection to the pool before the Sink learns of the end, because the next request may need it."""
        self.sink = sink.engine = None
        self._head.reset()
        transport = self._transport
        if transport is not None:
            unsent = bool(self._unsent) or (self._growing is not None and self._sent < len(self._growing))
            self._growing = None
            if not keep or self.single or transport.is_closing() or transport.get_write_buffer_size() or unsent:
                transport.abort()
            else:
                self.resume()
                self._pool.give_back(self)

    def _lost(self, loss: Loss) -> None:
        sink, self.sink = self.sink, None
        self.take = _reject_bytes
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.engine = None
            try:
                sink.engine_lost(loss)
            except Exception as error:  # noqa: BLE001 - a fault of any kind ends only this request
                self._failed(sink, error)

    def _failed(self, sink: Sink | None, error: Exception) -> None:
        """An exception was raised while the response of `sink` was handled."""
        reraise_memory_error(error)
        if sink is None:
            raise error
        sink.engine_failed(error)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine or the gateway closed the connection."""
        self._transport = None
        self._unsent, self._growing = [], None
        self._pool.connections -= 1
        self._pool.leaving.discard(self)
        if self.sink is None:
            self._pool.lost_idle(self)
        elif self._behind:
            self._cause = exc
        else:
            self._gone(self.sink, exc)

    def _gone(self, sink: Sink, exc: Exception | None) -> None:
        """The response ends where the connection did."""
        walker = self._walker
        if walker is not None and walker.until_close and exc is None:
            walker.ended = True
            self._finish(sink, walker)
        elif (
            self.reused
            and self._request is not None
            and not self._head.begun
            and time.monotonic() - sink.sent_s <= STALE_S
        ):
            self._pool.replace(self, sink, self._request)
        else:
            self._lost("reset")


def _reject_bytes(_: bytes) -> None:
    raise FramingError("bytes without a request")
