"""Case 40: client headers cannot forge Pilotlight's headers, travel further than one connection, or repeat."""

from __future__ import annotations

import asyncio
import random
import re
from hashlib import sha256

import pytest

from autoscaler.contract import CatalogueDelta, FrontSettings, KeyEntry, TenantEntry, TenantName
from gateway.http.request_head import FRAMING, HINTS, KEPT, LISTS
from tests.support.fakes.engines.scripted_engine import DONE, END, OK, STREAM_HEAD, ScriptedEngine, delta, document
from tests.support.harness.gateway.gateway_rig import Client, rig, rig_and_client
from tests.support.net.canary import request
from tests.support.net.request_mutations import mutated
from tests.support.net.request_splits import UNFINISHED, read

BODY = b'{"model":"m","messages":[]}'
HOP_BY_HOP = (
    "Keep-Alive: timeout=canary", "Proxy-Connection: canary", "Proxy-Authorization: Basic canary",
    "Proxy-Authenticate: canary",
    "TE: trailers, canary", "Trailer: canary", "Upgrade: canary", "Connection: x-canary, cache-control, accept",
    "X-Canary: canary",
)  # fmt: skip
"""RFC 9110, 7.6.1; the last two name further headers that must not be forwarded."""
OURS = (
    "X-Pilotlight-Cold: canary",
    "X-Pilotlight-Tenant: canary",
    "X-Pilotlight-Model: canary",
    "Server-Timing: canary;dur=1",
)
FORGED = (
    "Forwarded: for=canary", "X-Forwarded-For: canary", "X-Forwarded-Host: canary", "X-Real-IP: canary",
    "Via: 1.1 canary",
    "X-Original-URL: /canary", "X-HTTP-Method-Override: CANARY", "Cookie: canary=1", "Content_Length: 1",
    "Host_: canary",
)  # fmt: skip
UPWARDS = ["host", "content-length", "x-request-id", "content-type"]


@pytest.mark.case("40")
async def test_forged_and_hop_by_hop_headers_do_not_reach_the_engine() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (one, client):
        lines = (*HOP_BY_HOP, *OURS, *FORGED, "Authorization: Bearer canary", "Accept: canary")
        head = ["POST /v1/chat/completions?canary HTTP/1.1", "Host: canary", "Content-Type: application/json", *lines]
        client.send("\r\n".join([*head, f"Content-Length: {len(BODY)}", "", ""]).encode() + BODY)
        status, fields, _ = await client.answer()
        sent = engine.requests[0].split(b"\r\n\r\n")[0].decode()
        assert [line.partition(":")[0] for line in sent.split("\r\n")[1:]] == UPWARDS
        assert "canary" not in sent.lower()
        assert (status, "x-pilotlight-cold" in fields) == (200, False)
        await one.settled()
        (total,) = one.front.report().totals
        assert total.tenant == "default"


KEYS = {TenantName(name): f"canary-key-of-{name}" for name in ("ours", "theirs")}
IDENTITIES = (
    "X-Tenant: theirs", "X-Pilotlight-Tenant: theirs", "X-Forwarded-User: theirs", "X-Remote-User: theirs",
    "OpenAI-Organization: theirs", "OpenAI-Project: theirs", "X-Forwarded-For: 10.0.0.1", "Forwarded: for=theirs",
    "X-Authenticated-Userid: theirs", "X-Client-Cert: theirs", "Cookie: tenant=theirs", "From: theirs",
    f"Proxy-Authorization: Bearer {KEYS[TenantName('theirs')]}", "Connection: authorization, x-api-key, api-key, host",
)  # fmt: skip
KEYED = ("Authorization: Bearer {}", "authorization:   bearer  {}\t", "X-Api-Key: {}", "api-key: {}",
         "Authorization: Bearer {0}\r\nX-Api-Key: {0}\r\nApi-Key: {0}")  # fmt: skip


@pytest.mark.case("40")
@pytest.mark.parametrize("line", KEYED)
async def test_identity_headers_do_not_override_the_tenant_of_the_api_key(line: str) -> None:
    """Other identity headers are ignored, even if `Connection` names the header that carries the key."""
    hashed = {name: (KeyEntry(sha256=sha256(key.encode()).hexdigest()),) for name, key in KEYS.items()}
    tenants = tuple(TenantEntry(name=name, keys=keys) for name, keys in hashed.items())
    needed = FrontSettings(keys_needed=True)
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        one.front.catalogue(CatalogueDelta(epoch=1, version=2, tenants=tenants, settings=needed))
        client = await one.client()
        client.send(request("/v1/chat/completions", BODY, line.format(KEYS[TenantName("ours")]), *IDENTITIES))
        assert (await client.answer())[0] == 200
        await one.settled()
        (total,) = one.front.report().totals
        assert total.tenant == "ours"
        assert b"canary" not in engine.requests[0]
        assert b"theirs" not in engine.requests[0]


ONCE = sorted(name.decode() for name in FRAMING)
DIFFERENT = sorted(name.decode() for name in KEPT - LISTS - HINTS - FRAMING - {b"origin"})
REFUSED = (
    *(f"{name}: 1\r\n{name.title()}: 1" for name in ONCE),
    *(f"{name}: 1\r\n{name}: 2" for name in DIFFERENT),
    "Host: gw", "X-A: b\rc", "X-A: b\nc", "X-A: b\r\n c",
    "X-A: \0",
    "X-A: b\x7f", "X-A: b\r\n\tX-Api-Key: c", "X-A\r\n: b", "X-A: b\r\r\nX-B: c", "Authorization: Bearer a\rb",
    "Authorization: Bearer a\n", "X-Request-Id: a\rb", "Content-Length: 1", "Host : gw", " Host: gw",
)  # fmt: skip


@pytest.mark.case("40")
@pytest.mark.parametrize("line", REFUSED)
async def test_repeated_or_malformed_request_header_is_rejected_with_400(line: str) -> None:
    """The connection is closed, because the bytes that follow are ambiguous."""
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        client.send(request("/v1/chat/completions", BODY, line) + request("/health", method="GET"))
        status, fields, body = await client.answer()
        assert (status, fields["connection"], b'"invalid_request"' in body) == (400, "close", True)
        assert await client.rest() == b""
        assert engine.requests == []


@pytest.mark.case("40")
@pytest.mark.parametrize("name", ["X-A", "Cookie", "Authorization", "X-Request-Id", "Prefer", "User-Agent", "Accept"])
async def test_large_header_gets_431_only_if_the_engine_would_receive_it(name: str) -> None:
    """Headers that engines receive must fit into a head that they accept; otherwise one clear error and no request."""
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address) as (_, client):
        client.send(request("/v1/chat/completions", BODY, f"{name}: {'a' * 8192}"))
        status, fields, body = await client.answer()
        if name in {"User-Agent", "Accept"}:
            assert (status, b'"header_too_large"' in body, engine.requests) == (431, True, [])
        else:
            assert (status, fields["x-request-id"].startswith("g-")) == (200, True)
            assert b"aaaa" not in engine.requests[0]


DOWNWARDS = {"content-type", "content-length", "x-request-id", "server-timing", "retry-after", "date"}
STREAMED = {"transfer-encoding", "cache-control", "x-accel-buffering"}
ANSWERED = (
    *HOP_BY_HOP, *OURS, "Server: canary", "Set-Cookie: canary=1", "Location: /canary", "Alt-Svc: canary",
    "Via: 1.1 canary",
    "X-Request-Id: canary", "Access-Control-Allow-Origin: canary", "Strict-Transport-Security: canary",
    "Refresh: 0;url=canary",
    "Cache-Control: canary", "WWW-Authenticate: canary", "X-Accel-Redirect: /canary", "Retry-After: 1", "Date: now",
)  # fmt: skip


@pytest.mark.case("40")
async def test_whole_or_error_response_has_no_headers_forged_by_the_engine() -> None:
    """Checked for whole, streamed and error responses."""
    whole = document(b"{}", "200 OK", *ANSWERED)
    pieces = (whole[:-1], whole[-1:])
    async with (
        ScriptedEngine((whole,), pieces, (document(b"{}", "400 Bad", *ANSWERED),)) as engine,
        rig(engine.address) as one,
    ):
        for status in (200, 200, 400):
            client = await one.client()
            client.call()
            assert await status_and_headers(client) == (status, DOWNWARDS)


@pytest.mark.case("40")
async def test_streamed_response_has_no_forged_headers_of_the_engine() -> None:
    head = STREAM_HEAD[:-2] + "\r\n".join([*ANSWERED, "", ""]).encode()
    async with ScriptedEngine((head + delta("a") + DONE + END,)) as engine, rig(engine.address) as one:
        client = await one.client()
        client.call(stream=True)
        assert await status_and_headers(client) == (200, DOWNWARDS - {"content-length"} | STREAMED)


async def status_and_headers(client: Client) -> tuple[int, set[str]]:
    """Return status and header names of a response, which must contain no text of the engine."""
    status, fields = await client.head()
    assert "canary" not in str(fields)
    assert "upstream;dur=" in fields["server-timing"]
    return status, set(fields)


CONNECTIONS = 20
_ID = re.compile(rb"\r\nx-request-id: [a-z0-9._-]+(?=\r\n)")
"""The only part of a request that is echoed: an id of these characters alone."""


@pytest.mark.case("39")
async def test_error_response_to_an_invalid_request_does_not_echo_it() -> None:
    """Mutations of requests for a Model that does not exist, each with a marker word somewhere."""
    die, inputs = random.Random(5), []
    for data in mutated(5, 600):
        named = data.replace(b"alias-m", b"canary").replace(b'"m"', b'"canary"').replace(b"/m/", b"/canary/")
        at = die.randrange(len(named) + 1)
        inputs.append(named[:at] + b"canary" + named[at:])
    gate = asyncio.Semaphore(CONNECTIONS)
    async with rig() as one:

        async def answered(data: bytes) -> bytes:
            async with gate:
                client = await one.client()
                client.send(data + b"GET /v1/canary HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                return await client.rest()

        answers = await asyncio.gather(*(answered(data) for data in inputs if read([data])[-1:] != [UNFINISHED]))
    errors = [answer for answer in answers if b'"error":{"message":' in answer]
    assert len(errors) > 250
    assert not [answer for answer in answers if b"canary" in _ID.sub(b"", answer.lower())]
    assert {answer[9:12] for answer in errors} >= {b"400", b"404"}
