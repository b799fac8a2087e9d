"""Connections to engines, pooled by address, and the grammar of an address.

If a pooled connection turns out to be closed, the pool replaces it once with a new one before the caller notices.
Engines that close after streams are remembered and their connections are not pooled; neither are those that send more
than their response. A request waits only while the maximum number of connections is being opened.

An address (`autoscaler.contract`) is `host:port`, `https://host:port` or `https://name@host:port`; an IPv6 host is in
brackets.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gateway.http.body import Body
from gateway.upstream.connection import EngineConnection, Loss, Sink

TLS = "https://"
PORT_MAX = 65_535


class EngineAddress(NamedTuple):
    """`name`: what the engine's certificate must be for. None: the engine speaks plain HTTP."""

    host: str
    port: int
    name: str | None
    authority: bytes
    """What the Host header says (RFC 9112, 3.2)."""


def parse_address(address: str) -> EngineAddress:
    """Raises ValueError on what is no address."""
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
"""Connects at once to one engine; a connect takes more memory than the connection that it makes."""
IDLE_MAX = 256
"""Idle connections kept per engine; more are closed."""
IDLE_SWEEPS_MAX = 30
"""An idle connection older than so many sweeps is closed: engines and firewalls forget connections silently."""
UNUSED_SWEEPS_MAX = 60
"""A Pool without any connection for so many sweeps is forgotten."""
LEARN_SWEEPS_MAX = 2
"""An engine that closes an idle connection so soon after a stream closes after streams."""

log = logging.getLogger("pilotlight.gateway.upstream")


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
        self._says_more = False
        """It sent more than an answer once: none of its connections is used twice from then on."""
        self._unused_sweeps = 0
        self.connections = 0
        self.authority = at.authority
        """What the Host header of its requests says."""
        self.leaving: set[EngineConnection] = set()
        """Let go of and closed in the loop's next round."""

    def send(self, sink: Sink, request: tuple[bytes, Body], *, single: bool = False) -> None:
        """Sends head and body of a request on an idle connection, else on a new one.

        The Slot of a Call that was let go of may be granted before that Call's connection is closed. A new connection
        is made after that: no engine hears of the new Call before it hears that the old one has left.
        """
        if self._idle and not self.leaving:
            self._idle.pop().start(sink, request, single=single)
        else:
            self._connect(sink, request, single=single)

    def replace(self, lost: EngineConnection, sink: Sink, request: tuple[bytes, Body]) -> None:
        """A pooled connection was already closed by the engine: once more, on a fresh one."""
        if lost.after_stream:
            self._closes_after_stream = True
        lost.sink = sink.engine = None
        self._connect(sink, request, single=lost.single)

    def give_back(self, connection: EngineConnection) -> None:
        """A connection is idle; it is kept when it may be of use."""
        if self._says_more or (connection.after_stream and self._closes_after_stream) or len(self._idle) >= IDLE_MAX:
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

    def surplus(self) -> None:
        """The engine sent more than an answer. The next Call must not take the like for its own."""
        self._says_more = True
        for connection in self._idle:
            connection.close()
        self._idle.clear()

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
            pool = self._pools[address] = Pool(parse_address(address), self._context)
        return pool

    def sweep(self) -> None:
        """To be called about once a second."""
        for address in [address for address, pool in self._pools.items() if not pool.sweep()]:
            del self._pools[address]

    def close(self) -> None:
        """Closes everything idle."""
        for pool in self._pools.values():
            pool.close()
