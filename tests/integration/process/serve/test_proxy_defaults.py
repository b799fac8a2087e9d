"""nginx, HAProxy and Caddy with their default buffering and timeouts, in front of a gateway with a scripted engine.

Each runs with the shortest configuration of its page. Where a test waits until the proxy would cut a silent connection,
the timeout is TIMEOUT_S instead of a minute; Caddy has none by default. The gateway sends comments ten times as often.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path
from typing import TypeVar

import pytest

from autoscaler.contract import FrontSettings
from tests.support.fakes.engines.scripted_engine import (
    DONE,
    END,
    HOLD,
    OK,
    RESET,
    STREAM_HEAD,
    Script,
    ScriptedEngine,
    delta,
    document,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.net.default_proxies import DEFAULTS, default_proxy
from tests.support.net.origin_client import program

pytestmark = [pytest.mark.standard, pytest.mark.parametrize("name", DEFAULTS)]

TIMEOUT_S = 3
KEEPALIVES = FrontSettings(keepalive_seconds=TIMEOUT_S / 10)
LONGER_S = 1.5 * TIMEOUT_S
KEPT_ALIVE = re.compile(rb"(: waiting, position \d+(, about \d+ s)?\n)*(: keepalive\n)*")
"""Comments of the gateway: each ends with one line end."""
RELEASED_S_MAX = 60.0
HELD_S = 0.15
"""The kernel holds data for 0.2 s if a proxy announces more (MSG_MORE), as HAProxy does without http-no-delay."""

T = TypeVar("T")


class TokenEngine(ScriptedEngine):
    """An engine whose every HOLD needs a release of its own."""

    async def _hold(self, reader: asyncio.StreamReader) -> None:
        await super()._hold(reader)
        self.release.clear()


async def soon(awaited: Awaitable[T]) -> T:
    async with asyncio.timeout(RELEASED_S_MAX):
        return await awaited


@contextlib.asynccontextmanager
async def behind(
    name: str, folder: Path, *scripts: Script, timeout_s: int | None = None, state: str = "ready"
) -> AsyncIterator[tuple[Rig, ScriptedEngine, Client]]:
    """A client of a proxy that is in front of a gateway; the Model has no replica unless its state is ready."""
    if program(name) is None:
        pytest.skip(f"{name} is not installed")
    async with (
        TokenEngine(*scripts) as engine,
        rig(*([engine.address] if state == "ready" else []), settings=KEEPALIVES, state=state) as one,
    ):
        with contextlib.ExitStack() as stack:
            starting = asyncio.to_thread(stack.enter_context, default_proxy(name, folder, one.port, timeout_s))
            client = Client(*await asyncio.open_connection("127.0.0.1", await starting))
            one.clients.append(client)
            yield one, engine, client


async def content(client: Client, end: bytes) -> bytes:
    """The content of a stream up to a text that must arrive."""
    found = b""
    while end not in found:
        piece = await client.chunk()
        assert piece, f"the stream ended without {end!r}: {found!r}"
        found += piece
    return found


async def silence(client: Client) -> bytes:
    """The content that arrives in LONGER_S, and after that with the next piece."""
    end_s, found = time.monotonic() + LONGER_S, b""
    while time.monotonic() < end_s:
        piece = await client.chunk()
        assert piece, f"the stream was cut: {found!r}"
        found += piece
    return found


async def test_each_token_passes_a_default_proxy_before_the_next_is_generated(tmp_path: Path, name: str) -> None:
    tokens = [delta(f"token{number}") for number in range(8)]
    script = (STREAM_HEAD, *(step for token in tokens for step in (HOLD, token)), HOLD, DONE, END)
    async with behind(name, tmp_path, script) as (_, engine, client):
        client.call(stream=True)
        engine.release.set()
        assert (await client.head())[0] == 200
        took_s, begun_s = list[float](), time.monotonic()
        for number in range(len(tokens)):
            await content(client, b"token%d" % number)
            took_s.append(time.monotonic() - begun_s)
            begun_s = time.monotonic()
            engine.release.set()
        assert min(took_s[1:]) < HELD_S, "no token waits for more data"
        assert (await client.chunks()).endswith(b"data: [DONE]\n\n")


async def test_stream_with_engine_pauses_beyond_the_proxy_timeout_completes(tmp_path: Path, name: str) -> None:
    """While the Model starts, while the engine prepares the first byte, and between two tokens."""
    script = (HOLD, STREAM_HEAD, delta("first"), HOLD, delta("second"), DONE, END)
    async with behind(name, tmp_path, script, timeout_s=TIMEOUT_S, state="starting") as (one, engine, client):
        client.call(stream=True)
        status, headers = await client.head()
        assert status == 200
        assert headers["cache-control"].startswith("no-cache")
        while_queued = await silence(client)
        assert b": waiting, position 1" in while_queued
        one.routes(engine.address)
        await soon(engine.asked.wait())
        before_first = await silence(client)
        engine.release.set()
        until_first = await content(client, b"first")
        comments = (while_queued + before_first + until_first).partition(b"data: ")[0]
        assert KEPT_ALIVE.fullmatch(comments), comments
        assert b": keepalive\n" in comments
        between = await silence(client)
        assert set(between.removeprefix(b'"}}]}\n\n').splitlines()) == {b": keepalive"}
        engine.release.set()
        rest = await client.chunks()
        assert b"second" in rest
        assert b"data: [DONE]\n\n" in rest


async def test_response_after_the_proxy_timeout_is_one_504_and_frees_the_engine(tmp_path: Path, name: str) -> None:
    async with behind(name, tmp_path, (HOLD, OK), timeout_s=TIMEOUT_S) as (one, engine, client):
        status, _, _ = await client.ask()
        assert status == 504
        await soon(engine.left.wait())
        await one.settled()
        assert len(engine.requests) == 1, "the request is not repeated"


async def test_error_event_of_the_gateway_passes_a_default_proxy(tmp_path: Path, name: str) -> None:
    async with behind(name, tmp_path, (STREAM_HEAD, delta("first"), HOLD, RESET)) as (_, engine, client):
        client.call(stream=True)
        assert (await client.head())[0] == 200
        await content(client, b"first")
        engine.release.set()
        assert b'"code":"upstream_error"' in await content(client, b"}\n\n")


async def test_error_after_keepalive_comments_reaches_the_client_as_an_event(tmp_path: Path, name: str) -> None:
    failed = document(b'{"error":{"message":"out of memory","code":"oom"}}', "500 Internal Server Error")
    async with behind(name, tmp_path, (HOLD, failed)) as (_, engine, client):
        client.call(stream=True)
        assert (await client.head())[0] == 200
        await content(client, b": keepalive\n")
        engine.release.set()
        assert b'data: {"error":{"message":"out of memory","code":"oom"}}\n\n' in await client.chunks()
