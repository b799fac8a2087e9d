"""Helpers for tests that control timing: iterations of the event loop, an engine without delays, slow connects."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from tests.support.fakes.engines.scripted_engine import OK


async def turns(number: int) -> None:
    """Runs that many iterations of the event loop."""
    for _ in range(number):
        await asyncio.sleep(0)


class Plain(asyncio.Protocol):
    """One connection of an engine without delays; it records what is received and sent, in order."""

    def __init__(self, engine: PlainEngine) -> None:
        self.engine = engine
        self.number = len(engine.connections)
        engine.connections.append(self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.engine.notes.append(f"asked on {self.number}")
        if b"/v1/chat" in data:
            self.transport.write(OK)

    def eof_received(self) -> None:
        self.engine.notes.append(f"left {self.number}")


class PlainEngine:
    """Answers chat completions at once; supports nothing else."""

    def __init__(self) -> None:
        self.connections: list[Plain] = []
        self.notes: list[str] = []
        self.address = ""

    async def __aenter__(self) -> PlainEngine:
        self._server = await asyncio.get_running_loop().create_server(lambda: Plain(self), "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for connection in self.connections:
            connection.transport.abort()
        await turns(3)


class Connects:
    """Connections to one port wait until `go` is set; then they are established or, with `error`, fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
        self.begun = 0
        self.go = asyncio.Event()
        self.error: OSError | None = None
        self.late = False
        """Whether established connections are reported as timed out."""
        self._port = int(address.rpartition(":")[2])
        loop = asyncio.get_running_loop()
        self._real = loop.create_connection
        monkeypatch.setattr(loop, "create_connection", self._connect)

    async def _connect(
        self, factory: Callable[[], asyncio.Protocol], host: str, port: int, **more: object
    ) -> tuple[asyncio.BaseTransport, asyncio.BaseProtocol]:
        if port != self._port:
            return await self._real(factory, host, port)
        self.begun += 1
        await self.go.wait()
        if self.error is not None:
            raise self.error
        made = await self._real(factory, host, port)
        if self.late:
            self.late = False
            made[0].close()  # as create_connection does when it is cancelled
            raise TimeoutError
        return made
