"""Connections to engines, pooled by address, and the grammar of an address.

If a pooled connection turns out to be closed, the pool replaces it once with a new one before the caller notices.
Engines that close after streams, or that send more than their response, are remembered, and their connections are not
reused. A request waits only while CONNECTING_MAX connection attempts are in progress.

An address (`autoscaler.contract`) is `host:port`, `https://host:port` or `https://name@host:port`; an IPv6 host is in
brackets.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from gateway.http.body_buffers import Body
from gateway.upstream.connection import EngineConnection, Loss, Sink

TLS = "https://"
PORT_MAX = 65_535


class EngineAddress(NamedTuple):
    """A parsed address. `name`: name in the engine's certificate; None for plain HTTP."""

    host: str
    port: int
    name: str | None
    authority: bytes
    """Value of the Host header (RFC 9112, 3.2)."""


def parse_address(address: str) -> EngineAddress:
    """Parse an address. Raises ValueError if it is invalid."""
    rest = address.removeprefix(TLS)
    name, _, at = rest.rpartition("@")
    bracketed, _, port = at.rpartition(":")
    host, number = bracketed.strip("[]"), int(port)
    if not host or not 0 < number <= PORT_MAX:
        raise ValueError("no host and port")
    if not address.startswith(TLS):
        return EngineAddress(host, number, None, address.encode())
    return EngineAddress(host, number, name or host, (f"{name}:{port}" if name else at).encode())


CONNECT_S_MAX = 3.0
CONNECTING_MAX = 64
"""Concurrent connection attempts per engine; an attempt takes more memory than the connection."""
IDLE_MAX: Final = 256
"""Idle connections kept per engine; more are closed."""
IDLE_SWEEPS_MAX = 30
"""An idle connection is closed after this many sweeps: engines and firewalls drop connections silently."""
UNUSED_SWEEPS_MAX = 60
"""A Pool without any connection is dropped after this many sweeps."""
LEARN_SWEEPS_MAX = 2
"""If an engine closes an idle connection this soon after a stream, it closes after every stream."""

log = logging.getLogger("pilotlight.gateway.upstream")


class Pool:
    """The connections to one engine."""

    def __init__(self, at: EngineAddress, context: Callable[[], ssl.SSLContext]) -> None:
        self._at = at
        self._context = context
        self._distrusted = ""
        """Why its certificate was last rejected; logged once."""
        self._idle: list[EngineConnection] = []
        """A stack: the last used is reused first, so that surplus connections age and are closed."""
        self._connecting: set[asyncio.Task[None]] = set()
        self._due: deque[EngineConnection] = deque()
        """Waiting for a connection attempt."""
        self._closes_after_stream = False
        self._says_more = False
        """Whether it once sent more than a response: its connections are not reused afterwards."""
        self._unused_sweeps = 0
        self.connections = 0
        self.authority = at.authority
        """Value of the Host header of its requests."""
        self.leaving: set[EngineConnection] = set()
        """Aborted, and closed in the next loop iteration."""

    def send(self, sink: Sink, request: tuple[bytes, Body], *, single: bool = False) -> None:
        """Send head and body of a request on an idle connection, else on a new one.

        The slot of an aborted request may be granted before its connection is closed. Until then a new connection is
        opened, so that an engine never receives the new request before it notices the disconnect.
        """
        if self._idle and not self.leaving:
            self._idle.pop().start(sink, request, single=single)
        else:
            self._connect(sink, request, single=single)

    def replace(self, lost: EngineConnection, sink: Sink, request: tuple[bytes, Body]) -> None:
        """A pooled connection was already closed by the engine: send again on a new one."""
        if lost.after_stream:
            self._closes_after_stream = True
        lost.sink = sink.engine = None
        self._connect(sink, request, single=lost.single)

    def give_back(self, connection: EngineConnection) -> None:
        """Keep an idle connection if it can be reused, else close it."""
        if self._says_more or (connection.after_stream and self._closes_after_stream) or len(self._idle) >= IDLE_MAX:
            connection.close()
            return
        connection.reused = True
        connection.sweeps = 0
        self._idle.append(connection)

    def lost_idle(self, connection: EngineConnection) -> None:
        """Remove an idle connection that the engine closed; record whether it closed it right after a stream."""
        if connection in self._idle:
            self._idle.remove(connection)
            if connection.after_stream and connection.sweeps < LEARN_SWEEPS_MAX:
                self._closes_after_stream = True

    def surplus(self) -> None:
        """The engine sent more than a response. The next request must not take such bytes for its own response."""
        self._says_more = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    def sweep(self) -> bool:
        """Close connections that were idle for too long; call it once per second. False if the Pool can be dropped."""
        idle = self._idle
        for connection in idle:
            connection.sweeps += 1
        while idle and idle[0].sweeps > IDLE_SWEEPS_MAX:
            idle.pop(0).close()
        self._unused_sweeps = 0 if self.connections or self._connecting else self._unused_sweeps + 1
        return self._unused_sweeps < UNUSED_SWEEPS_MAX

    def close(self) -> None:
        """Close idle connections and stop connecting."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        self._due.clear()
        for task in self._connecting:
            task.cancel()

    def _connect(self, sink: Sink, request: tuple[bytes, Body], *, single: bool) -> None:
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
        """A connection attempt has ended: start waiting ones."""
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
                loss = "distrusted"
            due, self._due = self._due, deque()
            for one in (connection, *due):  # those waiting for an attempt fail too
                self._failed(one, loss)

    def _failed(self, connection: EngineConnection, loss: Loss) -> None:
        sink, connection.sink = connection.sink, None
        if sink is None:
            return
        sink.engine = None
        went_out = sink.sent_s > 0.0  # now or on an earlier connection: an engine may have received it
        sink.engine_lost("reset" if loss == "connect" and went_out else loss)

    def _distrust(self, error: ssl.SSLError) -> None:
        """Log the TLS error once. Nothing was sent, and there is no fallback to plain text."""
        why = (
            error.verify_message.partition(",")[0] if isinstance(error, ssl.SSLCertVerificationError) else error.reason
        )
        if self._distrusted != why:
            self._distrusted = why
            log.warning("event=engine_distrusted reason=%r", why or "no TLS")


class Upstreams:
    """All Pools, by address. Bounded: unused ones are dropped after a minute. `context` is for engines with TLS."""

    def __init__(self, context: Callable[[], ssl.SSLContext]) -> None:
        self._context = context
        self._pools: dict[str, Pool] = {}

    def to(self, address: str) -> Pool:
        """Return the pool of an address from Routes."""
        pool = self._pools.get(address)
        if pool is None:
            pool = self._pools[address] = Pool(parse_address(address), self._context)
        return pool

    def sweep(self) -> None:
        """Sweep all pools; call it about once per second."""
        for address in [address for address, pool in self._pools.items() if not pool.sweep()]:
            del self._pools[address]

    def close(self) -> None:
        """Close all idle connections."""
        for pool in self._pools.values():
            pool.close()
