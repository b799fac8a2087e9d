"""Case 39 on real sockets: what can be read in two ways is refused and ends the connection; all else is one Call each.

What the reader makes of the corpus however it is cut is in test_wire.py, what independent servers make of what we
accept and forward in test_differential.py. Here the same bytes go through the whole gateway, with an engine behind it.
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
from tests.kit.canary import request
from tests.kit.engine import OK, ScriptedEngine
from tests.kit.forwarding import ENGINE, forwarded
from tests.kit.mutations import mutated
from tests.kit.rig import Client, Rig, rig
from tests.kit.wires import UNFINISHED, Seen, read

CORPUS = Path(__file__).parent / "corpus"
SEED, MUTATIONS = 39, 500
LIMITS = Limits(body_bytes_max=1 << 20)
"""As `tests.kit.wires` has it."""
SENTINEL = b"GET /sentinel HTTP/1.1\r\nHost: gw\r\nConnection: close\r\n\r\n"
OURS = re.compile(
    rb"POST (?:/[a-z0-9_]+)+ HTTP/1\.1\r\nhost: [0-9.:]+\r\ncontent-length: [0-9]+\r\nx-request-id: [A-Za-z0-9._-]+\r\n"
    rb"(?:(?:content-type|accept|accept-language|user-agent|anthropic-version|anthropic-beta|openai-beta|traceparent"
    rb"|tracestate): [\t\x20-\x7e\x80-\xff]*\r\n)*\r\n"
)
"""A head that is entirely ours: one host, one length, no framing but that, and nothing of a client but these."""
REFUSED = {"message", "type", "code", "param"}


class Heard(NamedTuple):
    """What came back on one connection."""

    statuses: list[int]
    bodies: list[bytes]
    closed: bool


async def hear(client: Client, seen: list[Seen], data: bytes) -> Heard:
    """An answer to every request and refusal that there should be; and whether the connection has ended then."""
    heard = Heard([], [], closed=False)
    for item in seen:
        if item == UNFINISHED:
            return heard
        if isinstance(item, Request) and item.head.method == b"HEAD":  # its answer is the connection's last
            heard.statuses.append((await client.head())[0])
            break
        if isinstance(item, CallError) and b"HEAD " in data:  # perhaps it is one, and then the answer has no body
            heard.statuses.append((await client.head())[0])
            heard.bodies.extend(body for body in [await client.rest()] if body)
            return heard._replace(closed=True)
        status, _, body = await client.answer()
        heard.statuses.append(status)
        heard.bodies.append(body)
    return heard._replace(closed=await client.rest() == b"")


async def played(one: Rig, engine: ScriptedEngine, data: bytes) -> list[bytes]:
    """Sends bytes and judges all that becomes of them; what the engine got."""
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
    assert [ours(head + body) for head, body in calls] == list(map(ours, sent)), data
    return sent


def ours(request: bytes) -> tuple[bytes, bytes]:
    """Head and body of what an engine got, without what differs each time; both must be ours and agree."""
    head, _, body = request.partition(b"\r\n\r\n")
    assert OURS.fullmatch(head + b"\r\n\r\n"), head
    assert b"\r\ncontent-length: %d\r\n" % len(body) in head
    return re.sub(rb"\r\n(?:host|x-request-id): [^\r]*", b"", head), body


@pytest.mark.case("39")
@pytest.mark.parametrize("whole", [True, False], ids=["whole", "with a Call before it"])
async def test_corpus_input_never_becomes_a_smuggled_request(whole: bool) -> None:
    """Bodies of the corpus are no JSON: whatever reaches the engine but the Call before it was smuggled."""
    call = request("/v1/chat/completions", b'{"model":"m","messages":[]}')
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=LIMITS) as one:
        for path in sorted(CORPUS.glob("*.http")):
            data = path.read_bytes()
            if not whole and len(data) > AHEAD_BYTES_MAX:
                continue  # so much behind a Call refuses the Call (test_unread)
            sent = await played(one, engine, data if whole else call + data)
            assert len(sent) == (not whole), path.name


@pytest.mark.case("39")
async def test_mutated_request_reaches_the_engine_only_as_the_gateway_writes_it() -> None:
    """Mutations of good requests: most are refused or no Calls any more, and the others arrive as they were meant."""
    async with ScriptedEngine((OK,)) as engine, rig(engine.address, limits=LIMITS) as one:
        for data in mutated(SEED, MUTATIONS):
            await played(one, engine, data)
        assert len(engine.requests) > MUTATIONS / 20, "else nothing is compared"
        assert ENGINE not in engine.requests[0].decode("latin-1"), "the engine has an address of its own"
