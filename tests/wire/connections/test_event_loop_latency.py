"""Large bodies and responses are processed in many short loop iterations, whatever they contain.
Other requests are not delayed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from contextvars import Context
from typing import TypeVar

import pytest

from gateway import gateway
from gateway.http.response_reader import STEP_BYTES
from gateway.upstream.connection import EngineConnection
from tests.support.fakes.engines.scripted_engine import (
    END,
    OK,
    STREAM_HEAD,
    USAGE_EVENT,
    WITHOUT_USAGE,
    ScriptedEngine,
    chunk,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.net.large_requests import HOSTILE, post

T = TypeVar("T")

CALLBACK_S_MAX = 0.05
"""CPU time; the target is a tenth of it (bench/stalls.py), but other load on the machine costs CPU, too."""


class Clock:
    """Measures the CPU time of the longest call."""

    def __init__(self) -> None:
        self.longest_s = 0.0

    def timed(self, call: Callable[..., T], *arguments: object, **more: object) -> T:
        begun_s = time.thread_time()
        try:
            return call(*arguments, **more)
        finally:
            self.longest_s = max(self.longest_s, time.thread_time() - begun_s)


class Timed(asyncio.Protocol):
    """A protocol that measures each callback."""

    def __init__(self, inner: asyncio.Protocol, clock: Clock) -> None:
        self._inner, self._timed = inner, clock.timed

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._timed(self._inner.connection_made, transport)

    def data_received(self, data: bytes) -> None:
        self._timed(self._inner.data_received, data)

    def eof_received(self) -> bool | None:
        return self._timed(self._inner.eof_received)

    def connection_lost(self, exc: Exception | None) -> None:
        self._timed(self._inner.connection_lost, exc)

    def pause_writing(self) -> None:
        self._timed(self._inner.pause_writing)

    def resume_writing(self) -> None:
        self._timed(self._inner.resume_writing)


class Counted(asyncio.Protocol):
    """An engine's connection, which counts what was read from it."""

    def __init__(self, inner: asyncio.Protocol, reads: list[int]) -> None:
        self._inner, self._reads = inner, reads

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        self._reads.append(len(data))
        self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self._inner.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        self._inner.connection_lost(exc)


CRUMBS = b"".join([chunk(WITHOUT_USAGE[at : at + 1]) for at in range(len(WITHOUT_USAGE))])
USAGE = USAGE_EVENT.split(b"\r\n")[1]


@pytest.mark.parametrize("asked", [False, True])
async def test_response_in_tiny_chunks_is_relayed_over_several_loop_iterations(
    *, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a MiB of the smallest possible chunks, with the usage chunk in the middle."""
    crumbs = CRUMBS * 200
    loop, reads, turns = asyncio.get_running_loop(), list[int](), list[str]()
    soon = loop.call_soon
    connect: Callable[..., Awaitable[tuple[asyncio.Transport, Counted]]] = loop.create_connection

    def call_soon(call: Callable[..., object], *arguments: object, context: Context | None = None) -> asyncio.Handle:
        if isinstance(getattr(call, "__self__", None), EngineConnection):
            turns.append(call.__name__)
        return soon(call, *arguments, context=context)

    async def create_connection(
        factory: Callable[[], asyncio.Protocol], *arguments: object, **more: object
    ) -> tuple[asyncio.Transport, Counted]:
        return await connect(lambda: Counted(factory(), reads), *arguments, **more)

    usage = b"".join([chunk(USAGE[at : at + 1]) for at in range(len(USAGE))])
    async with ScriptedEngine((STREAM_HEAD + crumbs + usage + crumbs + END,)) as engine, rig(engine.address) as one:
        client = await one.client()
        with monkeypatch.context() as patched:
            patched.setattr(loop, "call_soon", call_soon)
            patched.setattr(loop, "create_connection", create_connection)
            got = (await client.ask(stream=True, stream_options={"include_usage": asked}))[2]
    assert got == WITHOUT_USAGE * 200 + (USAGE if asked else b"") + WITHOUT_USAGE * 200
    assert sum(reads) == len(STREAM_HEAD + crumbs + usage + crumbs + END)
    steps = sum(max(0, size - len(STREAM_HEAD) - 1) // STEP_BYTES for size in reads)
    assert steps <= len(turns) <= steps + len(reads), "some bytes of a read may wait for the next"


async def test_abort_of_a_connection_during_body_parsing_raises_no_exception() -> None:
    wrong: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: wrong.append(context))
    async with rig() as one:
        for turns in (5, 50, 200):
            client = await one.client()
            post(client, HOSTILE["deep"])
            for _ in range(turns):
                await asyncio.sleep(0)
            for connection in tuple(one.front._connections):
                connection._abort()
            async with asyncio.timeout(60):
                while one.front._connections or one.front._waste:
                    await asyncio.sleep(0)
    assert wrong == []


@pytest.mark.parametrize("name", HOSTILE)
async def test_no_event_loop_callback_for_a_hostile_body_exceeds_its_time_limit(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checked in every callback of the gateway: client bytes, later loop iterations, and writes to the engine."""
    clock, loop = Clock(), asyncio.get_running_loop()
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        server = await loop.create_server(lambda: Timed(one.front.connection(), clock), "127.0.0.1", 0)
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        client = Client(reader, writer)
        real = loop.call_soon

        def call_soon(
            call: Callable[..., object], *arguments: object, context: Context | None = None
        ) -> asyncio.Handle:
            if type(getattr(call, "__self__", None)).__module__.startswith("gateway."):
                return real(clock.timed, call, *arguments, context=context)
            return real(call, *arguments, context=context)

        monkeypatch.setattr(loop, "call_soon", call_soon)
        post(client, HOSTILE[name])
        assert (await client.answer())[0] == (400 if name == "names" else 200)
        monkeypatch.undo()
        client.leave()
        server.close()
    print(f"{name}: {clock.longest_s * 1e3:.2f} ms")
    assert 0 < clock.longest_s < CALLBACK_S_MAX


async def longest_step(one: Rig) -> int:
    """The most connections that the gateway closed in one loop iteration, until all are closed."""
    longest, before = 0, len(one.front._connections)
    async with asyncio.timeout(60):
        while before:
            await asyncio.sleep(0)
            longest, before = max(longest, before - len(one.front._connections)), len(one.front._connections)
    return longest


async def test_connections_of_many_disconnecting_clients_are_closed_in_batches() -> None:
    async with rig() as one:
        clients = [await one.client() for _ in range(5 * gateway.CLOSED_A_TURN)]
        async with asyncio.timeout(60):
            while len(one.front._connections) < len(clients):
                await asyncio.sleep(0)
        for client in clients:
            client.leave()
        assert 0 < await longest_step(one) <= gateway.CLOSED_A_TURN


@pytest.mark.parametrize(("connections", "seconds", "steps"), [(2, 60.0, (7, 5, 3, 1, 0)), (256, -1.0, (8, 7, 6))])
async def test_timeout_checks_of_connections_are_batched_by_count_and_time(
    connections: int, seconds: float, steps: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step is limited by the number of connections, and by its time."""
    monkeypatch.setattr(gateway, "SWEPT_A_TURN", connections)
    monkeypatch.setattr(gateway, "SWEEP_S_A_TURN", seconds)
    async with rig() as one:
        one.front._swept_connections_s = math.inf
        for _ in range(9):
            await one.client()
        async with asyncio.timeout(60):
            while len(one.front._connections) < 9:
                await asyncio.sleep(0)
        one.front._swept_connections_s = 0.0
        one.front.sweep(one.front.clock())
        one.front._swept_connections_s = math.inf
        for left in steps:
            assert len(one.front._unswept) == left
            await asyncio.sleep(0)
