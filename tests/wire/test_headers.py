"""What a header may not do: forge what is ours, travel further than one connection, or come back in an error."""

from __future__ import annotations

import asyncio
import random
import re

from tests.kit.engine import DONE, END, OK, STREAM_HEAD, ScriptedEngine, delta, document
from tests.kit.mutations import mutated
from tests.kit.rig import Client, rig
from tests.kit.wires import UNFINISHED, read

BODY = b'{"model":"m","messages":[]}'
HOP_BY_HOP = (
    "Keep-Alive: timeout=canary", "Proxy-Connection: canary", "Proxy-Authorization: Basic canary",
    "Proxy-Authenticate: canary",
    "TE: trailers, canary", "Trailer: canary", "Upgrade: canary", "Connection: x-canary, cache-control, accept",
    "X-Canary: canary",
)  # fmt: skip
"""RFC 9110, 7.6.1; the last two name what else must not travel."""
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


async def test_an_engine_sees_nothing_that_a_client_forged_or_meant_for_us_alone() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        client = await one.client()
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


DOWNWARDS = {"content-type", "content-length", "x-request-id", "server-timing", "retry-after", "date"}
ANSWERED = (
    *HOP_BY_HOP, *OURS, "Server: canary", "Set-Cookie: canary=1", "Location: /canary", "Alt-Svc: canary",
    "Via: 1.1 canary",
    "X-Request-Id: canary", "Access-Control-Allow-Origin: canary", "Strict-Transport-Security: canary",
    "Refresh: 0;url=canary",
    "Cache-Control: canary", "WWW-Authenticate: canary", "X-Accel-Redirect: /canary", "Retry-After: 1", "Date: now",
)  # fmt: skip


async def test_a_client_sees_nothing_of_the_engines_connection_or_in_our_name() -> None:
    """Whole, in pieces, and as an error."""
    whole = document(b"{}", "200 OK", *ANSWERED)
    pieces = (whole[:-1], whole[-1:])
    async with (
        ScriptedEngine((whole,), pieces, (document(b"{}", "400 Bad", *ANSWERED),)) as engine,
        rig(engine.address) as one,
    ):
        for status in (200, 200, 400):
            client = await one.client()
            client.call()
            assert await told(client) == (status, DOWNWARDS)


async def test_neither_does_the_reader_of_a_stream() -> None:
    head = STREAM_HEAD[:-2] + "\r\n".join([*ANSWERED, "", ""]).encode()
    async with ScriptedEngine((head + delta("a") + DONE + END,)) as engine, rig(engine.address) as one:
        client = await one.client()
        client.call(stream=True)
        assert await told(client) == (200, DOWNWARDS - {"content-length"} | {"transfer-encoding"})


async def told(client: Client) -> tuple[int, set[str]]:
    """Status and header names of an answer, in which an engine's word is not to be found."""
    status, fields = await client.head()
    assert "canary" not in str(fields)
    assert "upstream;dur=" in fields["server-timing"]
    return status, set(fields)


CONNECTIONS = 20
_ID = re.compile(rb"\r\nx-request-id: [a-z0-9._-]+(?=\r\n)")
"""The one thing of a request that is said again: an id of these letters alone."""


async def test_no_error_holds_what_was_sent() -> None:
    """Mutations of requests for a Model that does not exist, with a word in some place of each."""
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
