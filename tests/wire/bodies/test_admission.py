"""Requests that the head alone decides are answered before the body; bodies wait for memory budget or are rejected."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.contract import FrontSettings
from gateway.http.request_reader import AHEAD_BYTES_MAX
from gateway.limits import Limits
from gateway.server import body_intake
from gateway.server import connection as edge_module
from gateway.server.precheck import DROP_BYTES_MAX
from tests.support.fakes.engines.scripted_engine import HOLD, OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client
from tests.support.net.large_requests import MIB, body, post
from tests.support.waiting import until

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"


def begin(
    client: Client, length: int, *lines: str, path: str = "chat/completions", kind: str = "application/json"
) -> None:
    """Send a head and one byte of its body."""
    head = [f"POST /v1/{path} HTTP/1.1", "host: x", f"content-type: {kind}", *lines]
    client.send("\r\n".join([*head, f"content-length: {length}", "", ""]).encode())


JSON = "application/json"
WRONG = [
    (404, ("x-request-id: a",), "nowhere", JSON),
    (405, (), "models", JSON),
    (415, (), "chat/completions", "multipart/form-data; boundary=b"),
    (415, ("origin: https://evil.example",), "chat/completions", "text/plain"),
    (404, ("x-model: unknown",), "chat/completions", JSON),
    (400, ("x-priority: high",), "chat/completions", JSON),
    (404, (), "../openai/deployments/unknown/chat/completions", JSON),
]


@pytest.mark.parametrize(("status", "lines", "path", "kind"), WRONG)
async def test_invalid_head_is_rejected_before_a_large_body(
    status: int, lines: tuple[str, ...], path: str, kind: str
) -> None:
    async with rig_and_client() as (one, client):
        begin(client, 10 * MIB, *lines, path=path, kind=kind)
        received, fields, _ = await client.answer()
        assert (received, fields["connection"]) == (status, "close")
        assert await client.rest() == b""
        assert one.front.room.held_bytes == 0


async def test_wrong_key_is_rejected_before_the_body() -> None:
    async with rig_and_client(settings=FrontSettings(keys_needed=True)) as (_, client):
        begin(client, 10 * MIB, "authorization: Bearer wrong")
        status, fields, _ = await client.answer()
        assert (status, fields["connection"]) == (401, "close")


async def test_short_body_of_rejected_request_is_dropped_and_connection_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_module, "LINGER_S", 60.0)  # the body may come late
    async with rig_and_client() as (_, client):
        for pieces in ((b"x" * 500, b"x" * 500), (b"x" * 1000 + HEALTH,), (b"x" * 999, b"x" + HEALTH[:9], HEALTH[9:])):
            begin(client, 1000, path="nowhere")
            status, fields, _ = await client.answer()
            assert (status, "connection" in fields) == (404, False)
            for piece in pieces:
                client.send(piece)
                await asyncio.sleep(0.01)
            if len(pieces[0]) == 500:
                client.send(HEALTH)
            assert (await client.answer())[2] == b'{"status":"ok"}'
        begin(client, DROP_BYTES_MAX + 1, path="nowhere")
        assert (await client.answer())[1]["connection"] == "close"


async def test_rejected_expect_request_gets_no_100_continue() -> None:
    async with rig_and_client() as (_, client):
        begin(client, 100, "expect: 100-continue", path="nowhere")
        rest = await client.rest()
        assert rest.startswith(b"HTTP/1.1 404 ")
        assert rest.count(b"HTTP/1.1") == 1


async def test_get_request_with_a_large_body_gets_413() -> None:
    async with rig_and_client() as (_, client):
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n")
        await asyncio.sleep(0.01)
        client.send(b"hello")
        assert (await client.answer())[0] == 200
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\ncontent-length: 500000\r\n\r\n")
        status, fields, _ = await client.answer()
        assert (status, fields["connection"]) == (413, "close")


# --- memory budget ---------------------------------------------------------------------------------------------------

TIGHT = Limits(memory_bytes=16 * MIB, body_seconds_max=60.0)
"""6 MiB for large bodies. Memory pressure is disabled, because the test process is far above the limit."""


async def empty(one: Rig) -> None:
    await until("the memory budget is free", lambda: not one.front.room.held_bytes)


async def test_large_bodies_wait_for_memory_budget_and_are_all_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_intake, "PACE_GRACE_S", 60.0)  # no body is too slow, also after a pause
    sent = body(4 * MIB)
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=TIGHT) as one:
        one.at_ease()
        clients = [await one.client() for _ in range(5)]
        for client in clients:
            post(client, sent)
        most = 0
        answers = [asyncio.create_task(client.answer()) for client in clients]
        while not all(answer.done() for answer in answers):
            most = max(most, one.front.room.held_bytes)
            await asyncio.sleep(0)
        assert [answer.result()[0] for answer in answers] == [200] * 5
        assert len(sent) <= most <= one.front.room.size_bytes
        await empty(one)


async def test_large_body_gets_503_if_no_memory_budget_becomes_free_in_time() -> None:
    async with ScriptedEngine((HOLD, OK), (OK,)) as engine, rig(engine.address, limits=TIGHT) as one:
        one.at_ease()
        first, second, third = await one.client(), await one.client(), await one.client()
        post(first, body(4 * MIB))
        await engine.asked.wait()
        begin(second, 4 * MIB, "expect: 100-continue")
        third.call()
        assert (await third.answer())[0] == 200
        await until("the second waits", lambda: one.front.room.wanted)
        one.front.limits = Limits(body_seconds_max=0.5)
        status, fields, text = await second.answer()
        assert (status, fields["retry-after"], fields["connection"]) == (503, "2", "close"), "and no 100 before"
        assert b'"overloaded"' in text
        engine.release.set()
        assert (await first.answer())[0] == 200
        await empty(one)


async def test_100_continue_is_sent_once_memory_for_the_body_is_free() -> None:
    async with ScriptedEngine((HOLD, OK), (OK,)) as engine, rig(engine.address, limits=TIGHT) as one:
        one.at_ease()
        first, second = await one.client(), await one.client()
        post(first, body(4 * MIB))
        await engine.asked.wait()
        sent = body(4 * MIB)
        begin(second, len(sent), "expect: 100-continue")
        await until("a body waits for memory budget", lambda: one.front.room.wanted)
        engine.release.set()
        assert await second.reader.readexactly(25) == b"HTTP/1.1 100 Continue\r\n\r\n"
        second.send(sent)
        assert (await second.answer())[0] == 200


async def test_body_larger_than_the_whole_memory_budget_gets_413() -> None:
    async with rig(limits=TIGHT) as one:
        one.at_ease()
        client = await one.client()
        begin(client, 7 * MIB)
        assert (await client.answer())[0] == 413
        taken = [await one.client(), await one.client()]
        begin(taken[0], 4 * MIB)
        begin(taken[1], 2 * MIB)
        await until("both have their room", lambda: one.front.room.held_bytes == 6 * MIB)
        client = await one.client()
        client.send(b"POST /v1/embeddings HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n")
        client.send(b"transfer-encoding: chunked\r\n\r\n300000\r\n" + b"x" * (3 * MIB))
        status, fields, _ = await client.answer()
        assert (status, fields["connection"]) == (503, "close")
        for each in taken:
            each.leave()
        await empty(one)


async def test_slow_body_gets_408_when_another_body_waits_for_memory() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=TIGHT) as one:
        one.at_ease()
        slow, second = await one.client(), await one.client()
        begin(slow, 5 * MIB)
        await until("it has its room", lambda: one.front.room.held_bytes == 5 * MIB)
        post(second, body(4 * MIB))
        await until("a body waits for memory budget", lambda: one.front.room.wanted)
        for connection in tuple(one.front._connections):
            connection.sweep(one.front.clock() + 4)
        assert (await slow.answer())[0] == 408
        assert (await second.answer())[0] == 200


async def test_disconnect_during_a_body_releases_its_memory_budget() -> None:
    async with rig(limits=TIGHT) as one:
        one.at_ease()
        for _ in range(3):
            clients = [await one.client() for _ in range(4)]
            for client in clients:
                begin(client, 4 * MIB)
                client.send(b"{" * 1000)
            await asyncio.sleep(0.02)
            for client in clients:
                client.leave()
            await empty(one)


# --- pipelined bytes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ahead", [0, AHEAD_BYTES_MAX - 100, AHEAD_BYTES_MAX + 10_000])
async def test_disconnect_is_detected_after_pipelined_bytes(ahead: int) -> None:
    """Case 34, for any bytes after the request: reading never stops while the request runs."""
    async with ScriptedEngine((HOLD,)) as engine, rig_and_client(engine.address) as (one, client):
        client.call()
        await engine.asked.wait()
        (connection,) = one.front._connections
        if ahead:
            client.send(b"GET /health HTTP/1.1\r\nx: ")
            client.send(b"a" * (ahead - 25))
        if ahead > AHEAD_BYTES_MAX:
            await one.settled()
        else:
            await until("all of it is read", lambda: connection._reader.ahead == ahead)
        assert one.in_use() == (ahead <= AHEAD_BYTES_MAX)
        client.leave()
        await one.settled()
        assert one.in_use() == 0
