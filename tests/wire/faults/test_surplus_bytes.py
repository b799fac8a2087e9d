"""Engines that send more than their responses: surplus bytes of one response do not reach the next request.

docs/reference/threat-model.md states the limit of detection: surplus that arrives after the next request was sent is
not detectable.
"""

from __future__ import annotations

import pytest

from tests.support.fakes.engines.scripted_engine import HOLD, OK, ScriptedEngine, document
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client
from tests.support.timing import PlainEngine, turns
from tests.support.waiting import until

POISON = document(b'{"poison":true}')


def idle(one: Rig) -> int:
    """Return the number of kept connections to engines."""
    return sum(len(pool._idle) for pool in one.front.upstreams._pools.values())


async def answered(client: Client) -> bytes:
    status, _, body = await client.ask()
    assert status == 200
    return body


async def test_bytes_on_an_idle_engine_connection_close_the_connection() -> None:
    """The next request uses a new connection and gets its own response."""
    async with PlainEngine() as engine, rig_and_client(engine.address) as (one, client):
        assert await answered(client) == b'{"ok":true}'
        assert idle(one) == 1
        engine.connections[0].transport.write(POISON)
        await until("it is not kept", lambda: not idle(one))
        assert await answered(client) == b'{"ok":true}'
        assert len(engine.connections) == 2


async def test_connection_with_surplus_bytes_is_not_used_for_the_next_request() -> None:
    """A request in the same loop iteration does not use a connection that is about to be closed."""
    async with PlainEngine() as engine, rig_and_client(engine.address) as (one, client):
        await answered(client)
        (pool,) = one.front.upstreams._pools.values()
        pool._idle[0].data_received(POISON)
        assert idle(one) == 0
        assert await answered(client) == b'{"ok":true}'


@pytest.mark.parametrize("stream", [False, True])
async def test_engine_that_sent_surplus_bytes_gets_a_connection_per_request(stream: bool) -> None:
    """The engine may do so again, too late to be detected."""
    async with ScriptedEngine((OK + POISON,), (OK,)) as engine, rig_and_client(engine.address) as (one, client):
        for number in range(1, 5):
            assert (await client.ask(stream=stream))[2] == b'{"ok":true}'
            assert idle(one) == 0
            assert (len(engine.requests), engine.connections) == (number, number)


async def test_idle_connections_close_after_their_engine_sends_surplus_bytes() -> None:
    async with ScriptedEngine((HOLD, OK), (HOLD, OK + POISON), (OK,)) as engine, rig(engine.address) as one:
        first, second = await one.client(), await one.client()
        first.call()
        second.call()
        await until("both are there", lambda: len(engine.requests) == 2)
        engine.release.set()
        for client in (first, second):
            assert (await client.answer())[2] == b'{"ok":true}'
        await turns(5)
        assert idle(one) == 0
        assert await answered(first) == b'{"ok":true}'
        assert engine.connections == 3


async def test_connection_to_an_engine_without_surplus_bytes_is_reused() -> None:
    async with ScriptedEngine((OK + POISON,), (OK,)) as odd, ScriptedEngine((OK,)) as well, rig(odd.address) as one:
        client = await one.client()
        await answered(client)
        one.routes(well.address)
        for _ in range(3):
            await answered(client)
        assert well.connections == 1
