"""Large bodies on real sockets: read and sent in pieces, edited in place, without delaying other requests."""

from __future__ import annotations

import asyncio
import json

import pytest

from gateway.http.body_buffers import LARGE_BYTES
from gateway.limits import Limits
from tests.support.fakes.engines.scripted_engine import HOLD, OK, RESET, STREAM, WITHOUT_USAGE, ScriptedEngine, document
from tests.support.harness.gateway.gateway_rig import MODEL, rig, rig_and_client
from tests.support.net.large_requests import MIB, Dying, Refusing, address, body, post, post_in_chunks
from tests.support.waiting import until


def got(engine: ScriptedEngine, number: int = 0) -> bytes:
    """Return the body that the engine received; its length must match its head."""
    head, _, sent = engine.requests[number].partition(b"\r\n\r\n")
    assert b"content-length: %d\r\n" % len(sent) in head
    return sent


@pytest.mark.parametrize("size", [2 * MIB, 8 * MIB, Limits().body_bytes_max - 200])
async def test_large_body_is_forwarded_with_model_renamed_and_messages_kept(size: int) -> None:
    sent = body(size, stream=True, cache_salt="mine", stream_options={"include_obfuscation": False})
    async with ScriptedEngine((STREAM,)) as engine, rig_and_client(engine.address) as (one, client):
        post(client, sent)
        assert (await client.answer())[2] == WITHOUT_USAGE
        forwarded = got(engine)
        wanted = json.loads(sent) | {"model": "served-m"}
        wanted["stream_options"]["include_usage"] = True
        del wanted["cache_salt"]
        assert json.loads(forwarded) == wanted
        text = sent[sent.index(b'"messages"') :]
        assert forwarded.endswith(text), "byte for byte"
        await one.settled()
        assert one.totals()[0] == 1


async def test_large_chunked_body_is_forwarded_with_only_its_model_renamed() -> None:
    sent = body(2 * MIB)
    for size in (1000, 70_000, 3 * MIB):
        async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
            post_in_chunks(client, sent, size)
            assert (await client.answer())[0] == 200
            assert got(engine) == sent.replace(b"alias-m", b"served-m")


async def test_body_just_below_or_above_the_large_threshold_is_forwarded() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        for number, size in enumerate((LARGE_BYTES - 1, LARGE_BYTES, LARGE_BYTES + 1)):
            sent = b'{"model":"alias-m","prompt":"%b"}' % (b"x" * (size - 31))
            assert len(sent) == size
            post(client, sent, path="completions")
            assert (await client.answer())[0] == 200
            assert json.loads(got(engine, number)) == json.loads(sent) | {"model": "served-m"}
        assert engine.connections == 1


async def test_large_body_that_shrinks_when_edited_is_forwarded() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        post(client, b'{"cache_salt":"%b","model":"m"}' % (b"x" * MIB))
        assert (await client.answer())[0] == 200
        assert got(engine) == b'{"model":"served-m"}'


async def test_large_body_is_forwarded_byte_for_byte_except_its_model_name() -> None:
    sent = body(MIB).replace(b"alias-m", b"served-m")
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        post(client, sent, path=f"chat/completions?model={MODEL}")
        assert (await client.answer())[0] == 404, "the engine's model name is not a name at the gateway"
        post(client, sent.replace(b"served-m", MODEL.encode()))
        assert (await client.answer())[0] == 200
        assert got(engine) == sent


async def test_retried_request_sends_the_same_large_body_again() -> None:
    sent = body(8 * MIB, cache_salt="x")
    for read_bytes in (100, MIB, 8 * MIB):
        async with (
            Dying(read_bytes) as first,
            ScriptedEngine((OK,)) as second,
            rig_and_client(first.address, second.address) as (_, client),
        ):
            post(client, sent)
            assert (await client.answer())[0] == 200
            assert first.asked
            assert json.loads(got(second))["model"] == "served-m"
            assert got(second).endswith(sent[-7 * MIB :])


async def test_large_request_is_resent_whole_if_a_pooled_connection_is_reset() -> None:
    sent = body(2 * MIB)
    async with ScriptedEngine((OK,), (RESET,), (OK,)) as engine, rig_and_client(engine.address) as (_, client):
        for _ in range(2):
            post(client, sent)
            assert (await client.answer())[0] == 200
        assert got(engine, 1) == got(engine, 2) == sent.replace(b"alias-m", b"served-m")


async def test_disconnect_during_a_large_body_sends_nothing_to_the_engine() -> None:
    sent = body(4 * MIB)
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        for share in (0.1, 0.5, 0.99):
            client = await one.client()
            client.send(f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(sent)}\r\n".encode())
            client.send(b"content-type: application/json\r\n\r\n" + sent[: int(len(sent) * share)])
            await client.writer.drain()
            client.leave()
        await until("the connections are closed", lambda: not one.front._connections)
        client = await one.client()
        assert (await client.ask())[0] == 200
        assert len(engine.requests) == 1
        assert one.totals()[0] == 1


async def test_engine_that_does_not_read_is_released_when_the_client_disconnects() -> None:
    left = asyncio.Event()
    came = asyncio.Event()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader._transport.pause_reading()  # type: ignore[attr-defined]  # there is no public way to pause a reader
        came.set()
        await left.wait()
        writer.transport.abort()

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    async with rig_and_client(address(server)) as (one, client):
        post(client, body(16 * MIB))
        async with asyncio.timeout(60):
            await came.wait()
            while not one.in_use():
                await asyncio.sleep(0.001)
            client.leave()
        await one.settled()
        assert one.in_use() == 0
        left.set()
    server.close()


async def test_engine_error_before_it_reads_the_whole_body_is_relayed() -> None:
    refused = document(b'{"error":{"message":"too long"}}', "400 Bad Request")
    async with Refusing(refused) as engine, rig_and_client(engine.address) as (_, client):
        for _ in range(2):
            post(client, body(32 * MIB))
            assert (await client.answer())[::2] == (400, b'{"error":{"message":"too long"}}')
        assert engine.connections == 2, "what was cut off is not used again"


async def test_body_above_the_limit_gets_413_and_reaches_no_engine() -> None:
    sent = body(2 * MIB)
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=Limits(body_bytes_max=MIB)) as one:
        client = await one.client()
        post(client, sent)
        assert (await client.answer())[0] == 413
        client = await one.client()
        post_in_chunks(client, sent, 100_000)
        assert (await client.answer())[0] == 413
        assert engine.requests == []


async def test_invalid_large_body_is_rejected_and_the_next_request_is_served() -> None:
    sent = body(2 * MIB)
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        wrong = [
            (sent[:-1] + b"]", "application/json", 400),
            (sent[:-1] + b',"model":"m"}', "application/json", 400),
            (sent.replace(b'"alias-m"', b'"alias-m", "a": /**/1'), "application/json", 400),
            (b"[" * MIB, "application/json", 400),
            (sent.replace(b"alias-m", b"nobody"), "application/json", 404),
        ]
        for data, kind, status in wrong:
            post(client, data, kind=kind)
            assert (await client.answer())[0] == status
        post(client, sent)
        assert (await client.answer())[0] == 200
        assert len(engine.requests) == 1


async def test_requests_pipelined_after_a_large_body_are_answered_in_order() -> None:
    sent = b'{"model":"alias-m","input":[' + b"[],{}," * (MIB // 2) + b"0]}"
    async with ScriptedEngine((HOLD, document(b"1")), (document(b"2"),)) as engine, rig(engine.address) as one:
        client = await one.client()
        small = b'{"model":"alias-m","input":[[]]}'
        post(client, sent, path="embeddings")
        post(client, small, path="embeddings")
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await engine.asked.wait()
        assert one.in_use() == 1
        engine.release.set()
        assert [(await client.answer())[2] for _ in range(3)] == [b"1", b"2", b'{"status":"ok"}']


async def test_large_form_is_forwarded_with_its_model_renamed() -> None:
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    sound = part % (b"file", b'; filename="a.wav"\r\nContent-Type: audio/wav', b"\0\r\n-\r\n--\xff" * (MIB // 4))
    for sent in (part % (b"model", b"", b"alias-m") + sound, sound + part % (b"model", b"", b"alias-m")):
        async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
            post(client, sent + b"--b--\r\n", kind="multipart/form-data; boundary=b", path="audio/transcriptions")
            assert (await client.answer())[0] == 200
            assert got(engine) == sent.replace(b"alias-m", b"served-m") + b"--b--\r\n"
            post(client, sent + sent + b"--b--", kind="multipart/form-data; boundary=b", path="audio/transcriptions")
            assert (await client.answer())[0] == 400
