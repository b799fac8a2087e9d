"""Clients that do not read, that announce large bodies, or that send much at once: their cost is bounded."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from gateway.http.body_buffers import LARGE_BYTES
from gateway.http.request_reader import AHEAD_BYTES_MAX
from gateway.limits import Limits
from gateway.server import connection as edge_module
from gateway.server.client_writer import WRITE_BUFFER_BYTES
from gateway.server.connection import ANSWERS_A_TURN
from tests.support.fakes.engines.scripted_engine import HOLD, OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import Rig, rig, rig_and_client
from tests.support.harness.gateway.memory_connection import heard
from tests.support.waiting import until

CORPUS = Path(__file__).parents[1] / "corpus"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
NOWHERE = b"POST /x HTTP/1.1\r\nhost: a\r\ncontent-length: 1\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
MIB = 1 << 20


async def poured(one: Rig, piece: bytes) -> tuple[int, int]:
    """Send pieces, each in its own segment, without reading, until the connection ends.
    Return the pieces sent, and the most that was buffered for the client.
    """
    loop, most, sent = asyncio.get_running_loop(), 0, 0
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", one.port))
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        async with asyncio.timeout(90):
            while not one.front._connections:
                await asyncio.sleep(0.001)
            while one.front._connections:
                try:
                    sent += client.send(piece) > 0
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except ConnectionError:
                    break
                await asyncio.sleep(0)
                most = max([most, *(connection.backlog() for connection in one.front._connections)])
            while one.front._connections:
                await asyncio.sleep(0.01)
    return sent, most


@pytest.mark.parametrize("piece", [b"X" + NOWHERE, HEALTH * 20], ids=["answered early", "pipelined"])
async def test_client_that_reads_no_response_is_disconnected(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edge_module, "LINGER_S", 60.0)  # the rest of a body that was answered early may be late
    async with rig(limits=Limits(write_stall_seconds_max=0.3)) as one:
        first = NOWHERE if piece.startswith(b"X") else b""
        sent, most = await poured(one, first + piece)
        assert sent > 100
        assert 0 < most < WRITE_BUFFER_BYTES + 64 * ANSWERS_A_TURN * 8


async def test_small_bodies_use_memory_budget_only_for_received_bytes() -> None:
    """Each connection announces 256 KiB and sends one byte."""
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=Limits(memory_bytes=64 * MIB)) as one:
        one.at_ease()
        many = one.front.room.size_bytes // LARGE_BYTES + 20
        for _ in range(many):
            client = await one.client()
            client.send(POST + b"content-length: %d\r\n\r\n{" % LARGE_BYTES)
        await until("the bodies arrive", lambda: one.front.room.held_bytes >= many)
        assert one.front.room.held_bytes == many
        client = await one.client()
        body = b'{"model":"m","messages":[]}'
        client.send(POST + b"content-length: %d\r\n\r\n" % len(body) + body[:5])
        await asyncio.sleep(0)
        client.send(body[5:])
        assert (await client.answer())[0] == 200


async def test_slow_small_bodies_get_408_when_new_requests_need_memory_budget() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=Limits(memory_bytes=8 * MIB)) as one:
        one.at_ease()
        slow = [await one.client() for _ in range(4 * MIB // LARGE_BYTES)]
        for client in slow:
            client.send(POST + b"content-length: %d\r\n\r\n" % LARGE_BYTES + bytes(LARGE_BYTES - 1))
        await until("the body arrives", lambda: one.front.room.held_bytes >= 4 * MIB - 100)
        heads = [asyncio.create_task(client.reader.readuntil(b"\r\n")) for client in slow]
        while not all(head.done() for head in heads):
            last = await one.client()
            last.send(POST + b"content-length: 1000\r\n\r\n" + bytes(500))
            if b" 503 " not in await last.reader.readuntil(b"\r\n"):
                break
            await asyncio.sleep(0.05)
        assert {await head for head in heads} == {b"HTTP/1.1 408 Request Timeout\r\n"}, "after the time of grace"


async def test_many_pipelined_requests_are_answered_over_several_loop_iterations() -> None:
    async with rig_and_client() as (one, client):
        client.send(HEALTH * 1000)
        for _ in range(1000):
            status, _, body = await client.answer()
            assert (status, body) == (200, b'{"status":"ok"}')
        assert heard(one.front, [HEALTH * (ANSWERS_A_TURN + 9)]) == ([200] * ANSWERS_A_TURN, False)


async def test_request_with_too_many_pipelined_bytes_is_rejected() -> None:
    body = b'{"model":"m","messages":[]}'
    call = POST + b"content-length: %d\r\n\r\n" % len(body) + body
    async with ScriptedEngine((HOLD,), (OK,)) as engine, rig(engine.address) as one:
        # Without a socket: if a read returned only a part, the gateway would forward the request before the rest.
        assert heard(one.front, [call + b"x" * (AHEAD_BYTES_MAX + 1)]) == ([400], True)
        await one.settled()
        assert (one.in_use(), engine.requests) == (0, [])


def cuts(data: bytes) -> list[list[bytes]]:
    """Return the data split byte by byte, and split after the head."""
    head = data.find(b"\r\n\r\n") + 4
    return [[data[at : at + 1] for at in range(len(data))], [data[:head], data[head:]] if head > 3 else [data]]


@pytest.mark.parametrize("path", [b"/v1/chat/completions", b"/nowhere", b"/v1/models"])
async def test_corpus_requests_split_across_reads_get_the_same_responses(path: bytes) -> None:
    """One exception: a rejection of the head precedes the detection of an invalid body and ends the connection."""
    async with rig(limits=Limits(body_bytes_max=MIB)) as one:
        compared = 0
        for file in sorted(CORPUS.glob("*.http")):
            data = file.read_bytes().replace(b"/v1/chat/completions", path)
            whole, _ = heard(one.front, [data])
            for pieces in cuts(data):
                statuses, ended = heard(one.front, pieces)
                compared += 1
                if statuses == whole:
                    continue
                assert ended, (file.name, whole, statuses)
                assert len(statuses) <= len(whole), (file.name, whole, statuses)
                *before, last = statuses
                assert before == whole[: len(before)], (file.name, whole, statuses)
                assert whole[len(before)] == last or (whole[len(before)], last) in {
                    (of_body, of_head) for of_body in (400, 413, 431) for of_head in (404, 405, 415)
                }, (file.name, whole, statuses)
        assert compared > 500
