"""Hostile bodies on real sockets: case 38 of reliability, F.

Each gets one clear error, before it is fully buffered if possible; no engine is called; memory is released; and all
other requests are served meanwhile. bench/ measures how many milliseconds the loop is blocked.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import sys
import time

import pytest

from gateway.http.request_body import CHUNKS_MAX
from gateway.limits import Limits
from gateway.memory import process_memory
from tests.support.fakes.engines.scripted_engine import OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client

MIB, GIB = 1 << 20, 1 << 30
MILLION = 1_000_000
LIMIT_BYTES = MIB
SOCKETS_BYTES = 16 * MIB
"""The most that the kernel may buffer between the two ends of a connection."""
SLACK_BYTES = 16 * MIB
HELD_S_MAX = 1.0
"""CPU time for one hostile body of up to 14 MB.
The case allows 20 ms for the loop, which bench/ checks; work that is not linear in the body takes minutes.
"""
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\nContent-Type: application/json\r\n"


def posted(body: bytes, *lines: bytes) -> bytes:
    """Return one chat request with this body."""
    return b"".join([HEAD, *(line + b"\r\n" for line in lines), b"Content-Length: %d\r\n\r\n" % len(body), body])


def keys(count: int) -> bytes:
    """Return this many small members."""
    return b",".join(b'"k%d":0' % number for number in range(count))


def deep(count: int, opened: bytes, closed: bytes) -> bytes:
    return opened * count + b"1" + closed * count


MODEL = b'{"model":"m",'
WRONG: dict[str, tuple[bytes, str]] = {
    "10^6 lists deep, in a message": (MODEL + b'"messages":' + deep(MILLION, b"[", b"]") + b"}", "invalid_request"),
    "10^6 objects deep, beside": (MODEL + b'"x":' + deep(MILLION, b'{"a":', b"}") + b"}", "invalid_request"),
    "10^6 lists deep, unclosed": (MODEL + b'"messages":' + b"[" * MILLION, "invalid_request"),
    "10^6 keys": (MODEL + keys(MILLION) + b"}", "invalid_request"),
    "10^6 keys, the same one": (MODEL + b",".join([b'"k":0'] * MILLION) + b"}", "invalid_request"),
    "invalid UTF-8 in a text": (MODEL + b'"prompt":"\xff\xfe"}', "invalid_request"),
    "invalid UTF-8 in a name": (MODEL + b'"\xc3\x28":1}', "invalid_request"),
    "overlong UTF-8": (MODEL + b'"prompt":"\xc0\xaf"}', "invalid_request"),
    "a surrogate as UTF-8": (MODEL + b'"prompt":"\xed\xa0\x80"}', "invalid_request"),
    "invalid UTF-8 at the end of 3 MiB": (MODEL + b'"prompt":"' + b"a" * (3 * MIB) + b'\xff"}', "invalid_request"),
    "NaN": (MODEL + b'"temperature":NaN}', "invalid_request"),
    "Infinity": (MODEL + b'"temperature":-Infinity}', "invalid_request"),
    "NaN in a message": (MODEL + b'"messages":[{"content":NaN}]}', "invalid_request"),
    "model twice": (b'{"model":"m","model":"n"}', "invalid_request"),
    "model twice, the same": (b'{"model":"m","model":"m"}', "invalid_request"),
    "model twice, once escaped": (b'{"model":"m","mod\\u0065l":"n"}', "invalid_request"),
    "model twice, far apart": (MODEL + keys(900) + b',"model":"n"}', "invalid_request"),
    "gzip without saying so": (gzip.compress(MODEL + b'"messages":[]}'), "invalid_request"),
    "nothing": (b"", "invalid_request"),
}


def code_of(answer: bytes) -> str:
    """Return the error code of a response, as clients read it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 4"), head
    return str(json.loads(body)["error"]["code"])


async def served(one: Rig) -> None:
    """Assert that another client is served."""
    other = await one.client()
    assert (await other.ask())[0] == 200
    other.leave()


@pytest.mark.case("38")
@pytest.mark.parametrize("what", WRONG)
async def test_invalid_body_gets_400_and_the_connection_stays_usable(what: str) -> None:
    """Each gets a cheap 400, and the connection is usable for the next request."""
    body, code = WRONG[what]
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        client.send(posted(body))
        began_s = time.process_time()
        status, _, answer = await client.answer()
        assert time.process_time() - began_s < HELD_S_MAX
        assert (status, json.loads(answer)["error"]["code"]) == (400, code)
        assert not engine.requests
        assert (await client.ask())[0] == 200, "the next Call on the same connection"
        assert len(engine.requests) == 1
        assert one.in_use() == 0


@pytest.mark.case("38")
async def test_body_with_a_million_nested_keys_is_forwarded_unchanged() -> None:
    """The body is scanned incrementally without building its members: the engine receives it unchanged."""
    body = MODEL + b'"metadata":{' + keys(MILLION) + b"}}"
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        client.send(posted(body))
        assert (await client.answer())[0] == 200
        assert engine.requests[0].endswith(body.removeprefix(MODEL))


async def pour(client: Client, piece: bytes) -> tuple[int, bytes]:
    """Send the piece until the gateway responds; return the number of bytes sent, and the response."""
    sent, answer = 0, asyncio.ensure_future(client.rest())
    while not answer.done():
        client.send(piece)
        sent += len(piece)
        with contextlib.suppress(ConnectionError):
            await client.writer.drain()
        await asyncio.sleep(0)
    return sent, await answer


@pytest.mark.case("38")
@pytest.mark.parametrize(
    ("lines", "piece"),
    [
        (b"Content-Length: %d" % GIB, b"a" * 65_536),
        (b"Content-Length: %d" % (LIMIT_BYTES + 1), b"a" * 65_536),
        (b"Transfer-Encoding: chunked", b"10000\r\n" + b"a" * 65_536 + b"\r\n"),
        (b"Transfer-Encoding: chunked", (b"40\r\n" + b"a" * 64 + b"\r\n") * 1000),
    ],
    ids=["1 GiB", "one byte too many", "chunks without an end", "small chunks without an end"],
)
async def test_oversized_or_endless_body_is_rejected_without_buffering(lines: bytes, piece: bytes) -> None:
    """413 as early as possible: from the head alone, or once the limit (1 MiB here) is exceeded; no buffering."""
    limits = Limits(body_bytes_max=LIMIT_BYTES)
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=limits) as one:
        await served(one)
        before_bytes = process_memory.resident_bytes() or 0
        client = await one.client()
        client.send(HEAD + lines + b"\r\n\r\n")
        sent, answer = await pour(client, piece)
        assert sent < LIMIT_BYTES * 70 // 64 + SOCKETS_BYTES
        assert (answer[:12], code_of(answer)) == (b"HTTP/1.1 413", "too_large")
        gc.collect()
        assert (process_memory.resident_bytes() or 0) - before_bytes < LIMIT_BYTES + SLACK_BYTES
        assert len(engine.requests) == 1
        await served(one)


@pytest.mark.case("38")
async def test_body_in_too_many_tiny_chunks_gets_400() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        sent, answer = await pour(client, b"1\r\na\r\n" * 1000)
        assert sent < 6 * CHUNKS_MAX * 2 + SOCKETS_BYTES
        assert (answer[:12], b"too many small chunks" in answer) == (b"HTTP/1.1 400", True)
        second = await one.client()
        second.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        body = b'{"model":"m","messages":[]}' + b" " * CHUNKS_MAX
        second.send(b"".join(b"1\r\n%c\r\n" % byte for byte in body[: CHUNKS_MAX - 1]) + b"0\r\n\r\n")
        assert (await second.answer())[0] == 200
        assert len(engine.requests) == 1


@pytest.mark.case("38")
async def test_oversized_chunk_gets_413_before_its_data_arrives() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        for size in (b"40000000", b"FFFFFFFFFFFFFFFF"):
            client = await one.client()
            client.send(HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + size + b"\r\n")
            answer = await client.rest()
            assert (answer[:12], code_of(answer)) == (b"HTTP/1.1 413", "too_large")
        assert not engine.requests


BOMB = gzip.compress(b"a" * (64 * MIB))


@pytest.mark.case("38")
@pytest.mark.parametrize("coding", [b"gzip", b"GZIP", b"deflate", b"br", b"zstd", b"gzip, gzip"])
async def test_compressed_body_gets_415_without_being_decompressed(coding: bytes) -> None:
    """415 after the head alone; also with the body, memory does not grow, since the gateway never decompresses."""
    head = HEAD + b"Content-Encoding: " + coding + b"\r\n"
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        await served(one)
        before_bytes = process_memory.resident_bytes() or 0
        for body in (b"", BOMB):
            client = await one.client()
            client.send(head + b"Content-Length: %d\r\n\r\n" % len(BOMB) + body)
            answer = await client.rest()
            assert (answer[:12], code_of(answer)) == (b"HTTP/1.1 415", "unsupported_media_type")
        assert (process_memory.resident_bytes() or 0) - before_bytes < SLACK_BYTES
        assert len(engine.requests) == 1
        await served(one)


@pytest.mark.case("38")
async def test_compressed_transfer_encoding_is_rejected() -> None:
    async with rig_and_client() as (_, client):
        client.send(HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + BOMB)
        assert code_of(await client.rest()) == "invalid_request"


@pytest.mark.case("38")
async def test_other_requests_are_served_while_hostile_bodies_arrive() -> None:
    """Four hostile bodies arrive in pieces, with another client's request after each round of pieces."""
    body = posted(WRONG["10^6 keys"][0])
    step = len(body) // 8 + 1
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        hostile = [await one.client() for _ in range(4)]
        for at in range(0, len(body), step):
            for client in hostile:
                client.send(body[at : at + step])
            await served(one)
        for client in hostile:
            assert (await client.answer())[0] == 400
        assert len(engine.requests) == 8


@pytest.mark.case("38")
def test_hostile_test_bodies_have_at_least_their_stated_sizes() -> None:
    """The cases above have the sizes that they claim."""
    big = [body for what, (body, _) in WRONG.items() if what.startswith("10^6")]
    assert min(map(len, big)) >= MILLION
    assert len(BOMB) < 100_000
    assert sys.getrecursionlimit() < MILLION
