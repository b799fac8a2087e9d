"""A gateway in this process on a free port, with Routes that the test writes, and a raw client.

It is the real front with the real dispatch; only the autoscaler is simulated by the test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import AsyncIterator
from typing import Any

from autoscaler.contract import (
    CatalogueDelta,
    Clocks,
    FrontSettings,
    GatewayId,
    ModelEntry,
    ModelName,
    ModelRoute,
    ReplicaId,
    Route,
    RoutesDelta,
)
from gateway.gateway import Gateway
from gateway.limits import Limits
from gateway.server.tls_handshakes import Handshakes
from tests.support.net.certificates import Sides, default_sides, sides

MODEL = ModelName("m")
LIMITS = Limits(header_seconds_max=60.0, body_seconds_max=60.0)
"""Longer than a pause of this process, in which no part of a request is read."""


class Rig:
    """One gateway. `routes` sets the ready addresses; the engine knows the model as `served-m`."""

    def __init__(self, front: Gateway, port: int, tls: Sides | None = None) -> None:
        self.front = front
        self.tls = tls
        self.trust = (tls or sides()).client
        """The TLS context that verifies the engines."""
        self.port = port
        self.handshakes: Handshakes | None = None
        self.clients: list[Client] = []
        self._version = 1

    def routes(
        self, *addresses: str, slots: int = 4, state: str = "ready", phases_ms: dict[str, float] | None = None
    ) -> None:
        """Full Routes: one replica per address, all of its slots held."""
        self._version += 1
        replicas = tuple(
            Route(
                replica=ReplicaId(f"r{number}"),
                model=MODEL,
                state="ready",
                address=address,
                slots=slots,
                hold=slots,
                granted=self._version,
            )
            for number, address in enumerate(addresses, 1)
        )
        route = ModelRoute(model=MODEL, state=state, phases_ms=phases_ms or {})
        self.front.routes(RoutesDelta(epoch=1, version=self._version, full=True, replicas=replicas, models=(route,)))

    async def client(self, *, raw: bool = False) -> Client:
        """A new connection; a `raw` one does not use TLS."""
        trust = None if raw or self.tls is None else self.tls.client
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=trust)
        self.clients.append(Client(reader, writer))
        return self.clients[-1]

    def in_use(self) -> int:
        """Slots in use, as in the next report."""
        return sum(use.in_use for use in self.front.report().replicas)

    def totals(self) -> tuple[int, int, int]:
        """(finished, tokens in, tokens out) as in the next report."""
        rows = self.front.report().totals
        return sum(r.finished for r in rows), sum(r.tokens_in for r in rows), sum(r.tokens_out for r in rows)

    def at_ease(self) -> None:
        """Ignores the memory use of this process: there is no memory pressure."""
        self.front._scale.limit_bytes = None

    async def settled(self) -> None:
        """Waits until no request is in the gateway any more."""
        async with asyncio.timeout(60):
            while any(waiting or running for _, waiting, running in self.front.dispatch.counts()):
                await asyncio.sleep(0.001)


class Client:
    """A client that writes and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def call(
        self,
        *,
        stream: bool = False,
        minor: int = 1,
        path: str = "/v1/chat/completions",
        key: str = "none",
        **members: object,
    ) -> None:
        """Sends one chat completion."""
        body = json.dumps({"model": MODEL, "messages": [], **({"stream": True} if stream else {}), **members}).encode()
        self.send(
            f"POST {path} HTTP/1.{minor}\r\nhost: gateway\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {key}\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def send(self, data: bytes) -> None:
        """Sends bytes."""
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next response."""
        async with asyncio.timeout(60):
            lines = (await self.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        fields = dict(line.lower().split(": ", 1) for line in lines[1:] if line)
        return int(lines[0].split(" ")[1]), fields

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """A complete response; the body dechunked."""
        status, fields = await self.head()
        async with asyncio.timeout(60):
            if status == 204:
                return status, fields, b""
            if "content-length" in fields:
                return status, fields, await self.reader.readexactly(int(fields["content-length"]))
            if fields.get("transfer-encoding") != "chunked":
                return status, fields, await self.reader.read()
            return status, fields, await self.chunks()

    async def ask(self, **options: Any) -> tuple[int, dict[str, str], bytes]:
        """Sends one chat completion, as by `call`, and returns its response."""
        self.call(**options)
        return await self.answer()

    async def chunk(self) -> bytes:
        """The content of the next chunk; empty at the end."""
        async with asyncio.timeout(60):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def chunks(self) -> bytes:
        """The content of all chunks up to the end."""
        pieces = []
        while piece := await self.chunk():
            pieces.append(piece)
        return b"".join(pieces)

    async def rest(self) -> bytes:
        """Reads until the gateway closes."""
        async with asyncio.timeout(60):
            return await self.reader.read()

    def leave(self) -> None:
        """Disconnects at once."""
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def rig(
    *addresses: str,
    settings: FrontSettings | None = None,
    clocks: Clocks | None = None,
    limits: Limits | None = None,
    events: int | None = None,
    slots: int = 4,
    state: str = "ready",
    tls: Sides | None = None,
    host_check: bool = False,
    dialects: tuple[str, ...] = ("openai", "responses", "anthropic"),
) -> AsyncIterator[Rig]:
    """Runs a gateway with one Model; addresses are its ready Replicas. `tls`: its port and its engines use TLS.
    `dialects`: the APIs of its engine.

    With `host_check` the gateway knows that its listener is on loopback.
    """
    tls = tls or default_sides.get()
    front = Gateway(
        GatewayId("g"), os.urandom(3).hex(), limits=limits or LIMITS, events_fd=events, engine_tls=lambda: one.trust
    )
    entry = ModelEntry(name=MODEL, served_name="served-m", aliases=("alias-m",), slots=4, context_tokens=4096,
                       dialects=dialects, clocks=clocks or Clocks())  # fmt: skip
    front.catalogue(
        CatalogueDelta(epoch=1, version=1, full=True, models=(entry,), settings=settings or FrontSettings())
    )
    handshakes = None if tls is None else Handshakes(front, lambda: tls.server)
    factory = front.connection if handshakes is None else handshakes.client
    server = await asyncio.get_running_loop().create_server(factory, "127.0.0.1", 0)
    if host_check:
        front.listens_at(server.sockets[0].getsockname())
    sweeping = asyncio.create_task(front.run())
    one = Rig(front, server.sockets[0].getsockname()[1], tls)
    one.handshakes = handshakes
    one.routes(*addresses, slots=slots, state=state)
    try:
        yield one
    finally:
        server.close()
        if handshakes is not None:
            handshakes.close()
        await front.drain(0.05)
        for client in one.clients:
            client.leave()
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)
        for _ in range(10):  # closed transports finish in the next iterations, of which a pause must leave enough
            await asyncio.sleep(0.001)


@contextlib.asynccontextmanager
async def rig_and_client(*addresses: str, **options: Any) -> AsyncIterator[tuple[Rig, Client]]:
    """Runs a gateway as `rig` does and connects one client."""
    async with rig(*addresses, **options) as one:
        yield one, await one.client()
