"""Case 39 on real sockets: ambiguous input is rejected and ends the connection; all else is one request each.

test_parser.py covers how the parser reads the corpus at any split, test_differential.py how independent servers read
what we accept and forward. Here the same bytes pass through the whole gateway, with an engine behind it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from gateway.errors import CallError
from gateway.http.request_head import Request
from gateway.http.request_reader import AHEAD_BYTES_MAX
from gateway.limits import Limits
from tests.support.fakes.engines.scripted_engine import OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.net.canary import request
from tests.support.net.request_mutations import mutated
from tests.support.net.request_splits import UNFINISHED, Seen, read
from tests.support.net.upstream_requests import ENGINE, forwarded

CORPUS = Path(__file__).parents[1] / "corpus"
SEED, MUTATIONS = 39, 500
LIMITS = Limits(body_bytes_max=1 << 20)
"""The limit that `tests.support.net.request_splits` uses."""
SENTINEL = b"GET /sentinel HTTP/1.1\r\nHost: gw\r\nConnection: close\r\n\r\n"
OURS = re.compile(
    rb"POST (?:/[a-z0-9_]+)+ HTTP/1\.1\r\nhost: [0-9.:]+\r\ncontent-length: [0-9]+\r\nx-request-id: [A-Za-z0-9._-]+\r\n"
    rb"(?:(?:content-type|accept|accept-language|user-agent|anthropic-version|anthropic-beta|openai-beta|traceparent"
    rb"|tracestate): [\t\x20-\x7e\x80-\xff]*\r\n)*\r\n"
)
"""A head written entirely by us: one host, one length, no other framing, and no other client header than these."""
REFUSED = {"message", "type", "code", "param"}


class Heard(NamedTuple):
    """The responses on one connection."""

    statuses: list[int]
    bodies: list[bytes]
    closed: bool


async def hear(client: Client, seen: list[Seen], data: bytes) -> Heard:
    """Return a response for every expected request and rejection, and whether the connection has ended then."""
    heard = Heard([], [], closed=False)
    for item in seen:
        if item == UNFINISHED:
            return heard
        if isinstance(item, Request) and item.head.method == b"HEAD":
            heard.statuses.append((await client.head())[0])
            heard.bodies.append(b"")
            if heard.statuses[-1] != 200:  # it is the connection's last
                break
            continue
        if isinstance(item, CallError) and b"HEAD " in data:  # it may be a HEAD request, whose response has no body
            heard.statuses.append((await client.head())[0])
            heard.bodies.extend(body for body in [await client.rest()] if body)
            return heard._replace(closed=True)
        status, _, body = await client.answer()
        heard.statuses.append(status)
        heard.bodies.append(body)
    return heard._replace(closed=await client.rest() == b"")


async def played(one: Rig, engine: ScriptedEngine, data: bytes) -> list[bytes]:
    """Send the bytes and check all results; return what the engine received."""
    seen = read([data + SENTINEL]) if read([data])[-1:] != [UNFINISHED] else read([data])
    before = len(engine.requests)
    client = await one.client()
    client.send(data if seen[-1:] == [UNFINISHED] else data + SENTINEL)
    heard = await hear(client, seen, data)
    client.leave()
    await one.settled()
    assert heard.closed or seen[-1:] == [UNFINISHED], data
    for item, status, body in zip(seen, heard.statuses, heard.bodies, strict=False):
        if isinstance(item, CallError):
            assert (status, set(json.loads(body)["error"])) == (item.status, REFUSED), data
    sent = engine.requests[before:]
    wanted = [forwarded(item) for item in seen if isinstance(item, Request)]
    calls = [want for want, status in zip(wanted, heard.statuses, strict=False) if want is not None and status == 200]
    assert [normalized(head + body) for head, body in calls] == list(map(normalized, sent)), data
    return sent


def normalized(request: bytes) -> tuple[bytes, bytes]:
    """Split what an engine received into head and body, without variable headers; both must be valid and consistent."""
    head, _, body = request.partition(b"\r\n\r\n")
    assert OURS.fullmatch(head + b"\r\n\r\n"), head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    return re.sub(rb"\r\n(?:host|x-request-id): [^\r]*", b"", head), body


@pytest.mark.case("39")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "with a Call before it"])
async def test_corpus_input_never_becomes_a_smuggled_request(whole: bool) -> None:
    """Corpus bodies are not JSON: anything that reaches the engine, except the request before it, was smuggled."""
    call = request("/v1/chat/completions", b'{"model":"m","messages":[]}')
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=LIMITS) as one:
        for path in sorted(CORPUS.glob("*.http")):
            data = path.read_bytes()
            if not whole and len(data) > AHEAD_BYTES_MAX:
                continue  # this many bytes after a request reject it (connections/test_resource_limits)
            sent = await played(one, engine, data if whole else call + data)
            assert len(sent) == (not whole), path.name


@pytest.mark.case("39")
async def test_mutated_request_reaches_the_engine_only_as_the_gateway_writes_it() -> None:
    """Mutations of valid requests: most are rejected or are no engine requests; the others arrive as intended."""
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=LIMITS) as one:
        for data in mutated(SEED, MUTATIONS):
            await played(one, engine, data)
        assert len(engine.requests) > MUTATIONS / 20, "else nothing is compared"
        assert ENGINE not in engine.requests[0].decode("latin-1"), "the engine has an address of its own"
