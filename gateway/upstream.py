"""Connections to engines: pooled per address, one response at a time, and never used again once something was odd.

Owns connecting, sending, reading heads and knowing where bodies end; what becomes of the bytes is the Sink's business.
Promises: a Sink hears exactly one end (`engine_end` or `engine_lost`) unless it let go first; a pooled connection found
closed is replaced once by a fresh one before anybody hears of it; who lets go has the connection to the engine
aborted at once, so that the engine stops. Engines that close after streams are learnt and not pooled there. Nothing
here queues: a connection is there, or is being made.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import Literal, Protocol, cast

from gateway.address import EngineAddress, parse
from gateway.walker import BodyWalker, FramingError, HeadReader, ResponseHead

CONNECT_S_MAX = 3.0
CONNECTING_MAX = 64
"""Connects at once to one engine; a connect takes more memory than the connection that it makes."""
IDLE_MAX = 256
"""Idle connections kept per engine; more are closed."""
IDLE_SWEEPS_MAX = 30
"""An idle connection older than so many sweeps is closed: engines and firewalls forget connections silently."""
UNUSED_SWEEPS_MAX = 60
"""A Pool without any connection for so many sweeps is forgotten."""
LEARN_SWEEPS_MAX = 2
"""An engine that closes an idle connection so soon after a stream closes after streams."""
STALE_S = 0.25
"""A pooled connection that is lost so soon after a request went out was closed before: the engine took nothing."""
JOIN_BYTES_MAX = 64 << 10
"""Up to here head and body go out joined, in one system call; a larger body is not copied."""

Loss = Literal["connect", "reset", "odd"]

log = logging.getLogger("pilotlight.gateway.upstream")


class Sink(Protocol):
    """Who a response is for."""

    engine: EngineConnection | None
    """Kept by the connection: the one that works for this Sink now."""
    sent_s: float
    """When the request was written, by `time.monotonic`."""

    def engine_sent(self) -> None:
        """The request is written to a connection."""

    def engine_head(self, head: ResponseHead, walker: BodyWalker) -> Callable[[bytes], None] | None:
        """The final head is here; returns who takes the body's bytes (through the walker), None if it has let go."""

    def engine_end(self) -> None:
        """The body has ended as its framing says."""

    def engine_whole(self, head: ResponseHead, body: bytes) -> None:
        """Head, body and end in one: nearly every answer that does not stream comes so."""

    def engine_lost(self, loss: Loss) -> None:
        """No connection, or it ended early, or what came is no HTTP."""


class EngineConnection(asyncio.Protocol):
    """One connection to one engine. `take` is what the Sink reads the body with; it may be replaced by the Sink."""

    __slots__ = (
        "_head", "_pool", "_reading", "_request", "_transport", "_walker", "after_stream", "connecting",
        "reused", "single", "sink", "sweeps", "take",
    )  # fmt: skip

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: asyncio.Transport | None = None
        self._head = HeadReader()
        self._walker: BodyWalker | None = None
        self._request: tuple[bytes, bytes] | None = None
        self._reading = True
        self.connecting: asyncio.Task[None] | None = None
        self.sink: Sink | None = None
        self.take: Callable[[bytes], None] = _nobody
        self.single = False
        """Not to be pooled after this response."""
        self.reused = False
        self.after_stream = False
        """The previous response was a stream."""
        self.sweeps = 0
        """How long it has been idle."""

    def start(self, sink: Sink, request: tuple[bytes, bytes], *, single: bool) -> None:
        """Sends a request on a connection that is there, or will be (`connection_made`)."""
        self.sink = sink
        self.single = single
        self._request = request
        sink.engine = self
        if self._transport is not None:
            self._send(sink, self._transport)

    def pause(self) -> None:
        """The client does not keep up."""
        if self._reading and self._transport is not None:
            self._reading = False
            self._transport.pause_reading()

    def resume(self) -> None:
        """The client has caught up."""
        if not self._reading and self._transport is not None:
            self._reading = True
            self._transport.resume_reading()

    def let_go(self) -> None:
        """The Sink wants no more: the engine's connection ends now."""
        sink, self.sink = self.sink, None
        self.take = _nobody
        if sink is not None:
            sink.engine = None
        if self._transport is not None:
            self._pool.leaving.add(self)
            self._transport.abort()
        elif self.connecting is not None:
            self.connecting.cancel()

    def close(self) -> None:
        """Ends an idle connection."""
        if self._transport is not None:
            self._transport.abort()

    def eof_received(self) -> None:
        """The engine sends no more: nothing can be asked on it from now on."""
        if self.sink is None:
            self._pool.lost_idle(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected: the request goes out in the same step."""
        self._transport = cast("asyncio.Transport", transport)
        self.connecting = None
        self._pool.connections += 1
        if self.sink is None:
            self._transport.abort()
        else:
            self._send(self.sink, self._transport)

    def _send(self, sink: Sink, transport: asyncio.Transport) -> None:
        head, body = self._request or (b"", b"")
        if not self.reused:
            self._request = None  # only a pooled connection's loss is answered by sending again
        if len(body) <= JOIN_BYTES_MAX:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        sink.engine_sent()

    def data_received(self, data: bytes) -> None:
        """The hot path: bytes go to whoever takes them."""
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
        if walker is not None and walker.ended and self.sink is not None:
            self._finish(self.sink, walker)

    def _read_head(self, data: bytes) -> None:
        sink, transport = self.sink, self._transport
        if sink is None:
            if transport is not None:
                transport.abort()  # nothing was asked
            return
        read = self._head.feed(data)
        if read is None:
            return
        self._request = None
        head, rest = read
        if head.length == len(rest) and not head.event_stream:
            self.after_stream = False
            self._freed(sink, keep=head.keep_alive)
            sink.engine_whole(head, rest)
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
        """The response is whole."""
        self._walker = None
        self.take = _nobody
        self._freed(sink, keep=not walker.excess)
        sink.engine_end()

    def _freed(self, sink: Sink, *, keep: bool) -> None:
        """The connection goes back before the Sink hears of the end: the next Call may want it."""
        self.sink = sink.engine = None
        self._head.reset()
        transport = self._transport
        if transport is not None:
            if not keep or self.single or transport.is_closing() or transport.get_write_buffer_size():
                transport.abort()
            else:
                self.resume()
                self._pool.give_back(self)

    def _lost(self, loss: Loss) -> None:
        sink, self.sink = self.sink, None
        self.take = _nobody
        if self._transport is not None:
            self._transport.abort()
        if sink is not None:
            sink.engine = None
            sink.engine_lost(loss)

    def connection_lost(self, exc: Exception | None) -> None:
        """The engine closed, or we did."""
        self._transport = None
        self._pool.connections -= 1
        self._pool.leaving.discard(self)
        sink, walker = self.sink, self._walker
        if sink is None:
            self._pool.lost_idle(self)
        elif walker is not None and walker.until_close and exc is None:
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


class Pool:
    """The connections to one engine."""

    def __init__(self, at: EngineAddress, context: Callable[[], ssl.SSLContext]) -> None:
        self._at = at
        self._context = context
        self._distrusted = ""
        """Why its certificate was last refused: said once."""
        self._idle: list[EngineConnection] = []
        """The one used last is used next: the surplus grows old and is closed."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._due: deque[EngineConnection] = deque()
        """They connect when others have."""
        self._closes_after_stream = False
        self._unused_sweeps = 0
        self.connections = 0
        self.authority = at.authority
        """What the Host header of its requests says."""
        self.leaving: set[EngineConnection] = set()
        """Let go of and closed in the loop's next round."""

    def send(self, sink: Sink, request: tuple[bytes, bytes], *, single: bool = False) -> None:
        """Sends head and body of a request on an idle connection, else on a new one.

        The Slot of a Call that was let go of may be granted before that Call's connection is closed. A new connection
        is made after that: no engine hears of the new Call before it hears that the old one has left.
        """
        if self._idle and not self.leaving:
            self._idle.pop().start(sink, request, single=single)
        else:
            self._connect(sink, request, single=single)

    def replace(self, lost: EngineConnection, sink: Sink, request: tuple[bytes, bytes]) -> None:
        """A pooled connection was already closed by the engine: once more, on a fresh one."""
        if lost.after_stream:
            self._closes_after_stream = True
        lost.sink = sink.engine = None
        self._connect(sink, request, single=lost.single)

    def give_back(self, connection: EngineConnection) -> None:
        """A connection is idle; it is kept when it may be of use."""
        if (connection.after_stream and self._closes_after_stream) or len(self._idle) >= IDLE_MAX:
            connection.close()
            return
        connection.reused = True
        connection.sweeps = 0
        self._idle.append(connection)

    def lost_idle(self, connection: EngineConnection) -> None:
        """The engine closed an idle connection; one that it closed right after a stream teaches."""
        if connection in self._idle:
            self._idle.remove(connection)
            if connection.after_stream and connection.sweeps < LEARN_SWEEPS_MAX:
                self._closes_after_stream = True

    def sweep(self) -> bool:
        """Once a second: closes what has been idle for too long. False when nothing needs this Pool any more."""
        idle = self._idle
        for connection in idle:
            connection.sweeps += 1
        while idle and idle[0].sweeps > IDLE_SWEEPS_MAX:
            idle.pop(0).close()
        self._unused_sweeps = 0 if self.connections or self._connecting else self._unused_sweeps + 1
        return self._unused_sweeps < UNUSED_SWEEPS_MAX

    def close(self) -> None:
        """Closes what is idle and stops connecting."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._due.clear()
        for task in self._connecting:
            task.cancel()

    def _connect(self, sink: Sink, request: tuple[bytes, bytes], *, single: bool) -> None:
        connection = EngineConnection(self)
        connection.start(sink, request, single=single)
        if len(self._connecting) < CONNECTING_MAX:
            self._begin(connection)
        else:
            self._due.append(connection)

    def _begin(self, connection: EngineConnection) -> None:
        task = asyncio.get_running_loop().create_task(self._open(connection))
        connection.connecting = task
        self._connecting.add(task)
        task.add_done_callback(self._began)

    def _began(self, task: asyncio.Task[None]) -> None:
        """One connect is over: the next ones begin."""
        self._connecting.discard(task)
        while self._due and len(self._connecting) < CONNECTING_MAX:
            connection = self._due.popleft()
            if connection.sink is not None:
                self._begin(connection)

    async def _open(self, connection: EngineConnection) -> None:
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                loop, at = asyncio.get_running_loop(), self._at
                tls = None if at.name is None else self._context()
                await loop.create_connection(lambda: connection, at.host, at.port, ssl=tls, server_hostname=at.name)
            self._distrusted = ""
        except (OSError, TimeoutError) as error:
            loss: Loss = "connect"
            if isinstance(error, ssl.SSLError):
                self._distrust(error)
                loss = "odd"  # trying again would not help: the Call moves once and then has its error
            due, self._due = self._due, deque()
            for one in (connection, *due):  # who waits for its turn need not find out by itself
                self._failed(one, loss)

    def _failed(self, connection: EngineConnection, loss: Loss) -> None:
        sink, connection.sink = connection.sink, None
        if sink is None:
            return
        sink.engine = None
        went_out = sink.sent_s > 0.0  # before, or to this one at the last moment: the engine may have it
        sink.engine_lost("reset" if loss == "connect" and went_out else loss)

    def _distrust(self, error: ssl.SSLError) -> None:
        """Nothing was sent, and nothing is sent in clear instead."""
        why = (
            error.verify_message.partition(",")[0] if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        )
        if self._distrusted != why:
            self._distrusted = why
            log.warning("event=engine_distrusted reason=%r", why or "no TLS")


class Upstreams:
    """All Pools, by address. Bounded: unused ones are forgotten after a minute. `context` is for engines with TLS."""

    def __init__(self, context: Callable[[], ssl.SSLContext]) -> None:
        self._context = context
        self._pools: dict[str, Pool] = {}

    def to(self, address: str) -> Pool:
        """The connections to the engine at an address as Routes say it."""
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = Pool(parse(address), self._context)
        return pool

    def sweep(self) -> None:
        """To be called about once a second."""
        for address in [address for address, pool in self._pools.items() if not pool.sweep()]:
            del self._pools[address]

    def close(self) -> None:
        """Closes everything idle."""
        for pool in self._pools.values():
            pool.close()


def _nobody(_: bytes) -> None:
    raise FramingError("bytes that nobody asked for")
