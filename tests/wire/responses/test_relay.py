"""The data plane on real sockets: a raw client, the real front end and dispatch, an engine that runs scripts."""

from __future__ import annotations

import json
from hashlib import sha256

import pytest

from autoscaler.contract import CatalogueDelta, FrontSettings, KeyEntry, ModelEntry, TenantEntry, TenantName
from gateway.request.auth import cache_salt
from tests.support.fakes.engines.scripted_engine import CLOSE, HOLD, OK, STREAM, WITHOUT_USAGE, ScriptedEngine, document
from tests.support.harness.gateway.gateway_rig import MODEL, rig, rig_and_client


async def test_request_is_rewritten_for_the_engine_and_response_is_relayed() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        client.send(
            b"POST /openai/v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer sk-canary\r\n"
            b"X-Request-Id: id-1\r\nContent-Type: application/json\r\nX-Secret: canary\r\nContent-Length: 33\r\n\r\n"
            b'{"model":"alias-m","messages":[]}'
        )
        status, fields, body = await client.answer()
        assert (status, body, fields["x-request-id"]) == (200, b'{"ok":true}', "id-1")
        assert "upstream;dur=" in fields["server-timing"]
        head, _, sent = engine.requests[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")
        assert json.loads(sent) == {"model": "served-m", "messages": []}
        assert b"canary" not in head
        await one.settled()
        assert one.totals()[0] == 1


async def test_request_to_an_engine_with_an_ipv6_address_is_forwarded() -> None:
    async with ScriptedEngine((OK,), host="::1") as engine, rig_and_client(engine.address) as (_, client):
        assert (await client.ask())[0] == 200
        authority = engine.address.removeprefix("https://")
        assert authority.startswith("[::1]:")
        assert f"\r\nhost: {authority}\r\n".encode() in engine.requests[0]


async def test_three_sequential_requests_reuse_one_connection_to_the_engine() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        for _ in range(3):
            assert (await client.ask())[0] == 200
        assert (engine.connections, len(engine.requests)) == (1, 3)


async def test_pipelined_requests_are_answered_in_order_one_at_a_time() -> None:
    scripts = [(HOLD, document(b"1")), (document(b"2"),), (document(b"3"),)]
    async with ScriptedEngine(*scripts) as engine, rig_and_client(engine.address) as (one, client):
        for _ in range(3):
            client.call()
        client.send(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await engine.asked.wait()
        assert (len(engine.requests), one.in_use()) == (1, 1)
        engine.release.set()
        assert [(await client.answer())[2] for _ in range(4)] == [b"1", b"2", b"3", b'{"status":"ok"}']


async def test_usage_requested_by_the_gateway_is_removed_from_the_stream() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig_and_client(engine.address) as (one, client):
        status, fields, body = await client.ask(stream=True)
        assert (status, fields["content-type"], body) == (200, "text/event-stream", WITHOUT_USAGE)
        assert json.loads(engine.requests[0].partition(b"\r\n\r\n")[2])["stream_options"] == {"include_usage": True}
        await one.settled()
        assert one.totals() == (1, 7, 2)


async def test_usage_requested_by_the_client_is_kept_in_the_stream() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig_and_client(engine.address) as (_, client):
        assert b'"usage"' in (await client.ask(stream=True, stream_options={"include_usage": True}))[2]


async def test_stream_received_in_single_bytes_is_relayed_without_usage_event() -> None:
    pieces = tuple(STREAM[at : at + 1] for at in range(len(STREAM)))
    async with ScriptedEngine(pieces) as engine, rig_and_client(engine.address) as (_, client):
        assert (await client.ask(stream=True))[2] == WITHOUT_USAGE


@pytest.mark.parametrize("minor", [0, 1])
async def test_stream_that_ends_at_connection_close_is_relayed(minor: int) -> None:
    whole = (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + WITHOUT_USAGE, CLOSE)
    async with ScriptedEngine(whole) as engine, rig_and_client(engine.address) as (_, client):
        assert (await client.ask(stream=True, minor=minor))[2] == WITHOUT_USAGE


async def test_request_is_retried_if_engine_closes_after_the_response_head() -> None:
    """Only the close would mark the body as complete, and there is no body: this is not an empty response."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"
    async with ScriptedEngine((head, CLOSE), (OK,)) as engine, rig_and_client(engine.address) as (_, client):
        assert (await client.ask())[::2] == (200, b'{"ok":true}')
        assert len(engine.requests) == 2
    async with ScriptedEngine((head, CLOSE)) as engine, rig_and_client(engine.address) as (_, client):
        assert (await client.ask())[0] == 502, "once is enough"


async def test_http_1_0_client_gets_close_delimited_response() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig_and_client(engine.address) as (_, client):
        client.call(stream=True, minor=0)
        head, _, body = (await client.rest()).partition(b"\r\n\r\n")
        assert b"chunked" not in head
        assert body == WITHOUT_USAGE


async def test_forwarded_request_has_the_cache_salt_of_its_tenant() -> None:
    """Each Tenant has its own salt, whatever it sends, and only for engines that separate caches by it."""
    keys = {name: f"key-of-{name}" for name in ("acme", "lab")}
    tenants = tuple(
        TenantEntry(name=TenantName(name), keys=(KeyEntry(sha256=sha256(key.encode()).hexdigest()),))
        for name, key in keys.items()
    )
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, settings=FrontSettings(keys_needed=True)) as one:
        entry = ModelEntry(name=MODEL, served_name="m", slots=4, takes_cache_salt=True)
        one.front.catalogue(CatalogueDelta(epoch=1, version=2, models=(entry,), tenants=tenants))
        client = await one.client()
        for name in ("acme", "lab", "acme"):
            body = b'{"model":"m","messages":[],"cache_salt":"%b"}' % cache_salt(TenantName("lab")).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            client.send(
                f"{head}Authorization: Bearer {keys[name]}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
            )
            assert (await client.answer())[0] == 200
    salts = [json.loads(sent.partition(b"\r\n\r\n")[2])["cache_salt"] for sent in engine.requests]
    assert salts == [cache_salt(TenantName(name)) for name in ("acme", "lab", "acme")]
    assert salts[0] != salts[1]
