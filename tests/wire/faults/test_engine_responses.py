"""Case 41: engines with responses that no client should see. Each is relayed unchanged, or ends in one error.

For every script: a client with another HTTP library sees an end only where the engine's own end came (I2), the faulty
connection is never reused, no exception reaches the event loop, and the next request is served.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator

import pytest

from tests.fuzz.targets.engine_responses import SEEDS, client
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    DELTAS,
    DONE,
    END,
    ERROR,
    HOLD,
    OK,
    RESET,
    STREAM,
    STREAM_HEAD,
    WITHOUT_USAGE,
    Script,
    ScriptedEngine,
    Word,
    chunk,
    delta,
    document,
    event,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client

PAGE = b"<html><h1>500 Internal Server Error</h1></html>"
MANY = 4000


@pytest.fixture(autouse=True)
async def _no_unhandled_exception() -> AsyncIterator[None]:
    """Fail the test on exceptions that the loop would only log."""
    seen: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: seen.append(context))
    yield
    assert seen == []


# --- responses that cannot be parsed: one 502 ------------------------------------------------------------------------


def head(*lines: str, status: str = "HTTP/1.1 200 OK", body: bytes = b'{"a":1}') -> bytes:
    """Return a response head with exactly these lines, then a body."""
    return "\r\n".join([status, "Content-Type: application/json", *lines, "", ""]).encode() + body


ODD: dict[str, bytes] = {
    "1xx flood": b"HTTP/1.1 100 Continue\r\n\r\n" * MANY + OK,
    "1xx flood with headers": b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n" * MANY + OK,
    "switches protocols": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n",
    "endless headers": b"HTTP/1.1 200 OK\r\n" + b"X-A: b\r\n" * 5 * MANY,
    "endless header line": b"HTTP/1.1 200 OK\r\nX-A: " + b"a" * 30 * MANY,
    "endless status line": b"HTTP/1.1 200 " + b"a" * 30 * MANY,
    "lengths that differ": head("Content-Length: 7", "Content-Length: 9"),
    "lengths that agree": head("Content-Length: 7", "Content-Length: 7"),
    "a list of lengths": head("Content-Length: 7, 7"),
    "a length and chunks": head("Content-Length: 7", "Transfer-Encoding: chunked", body=chunk(b'{"a":1}') + END),
    "a negative length": head("Content-Length: -7"),
    "a length in hex": head("Content-Length: 0x7"),
    "a length with a sign": head("Content-Length: +7"),
    "a length without end": head("Content-Length: " + "9" * 400),
    "no length after all": head("Content-Length:"),
    "chunked twice": head("Transfer-Encoding: chunked, chunked", body=END),
    "chunked in two lines": head("Transfer-Encoding: chunked", "Transfer-Encoding: chunked", body=END),
    "a coding before chunked": head("Transfer-Encoding: gzip, chunked", body=END),
    "a coding that is none": head("Transfer-Encoding: identity"),
    "chunks on HTTP/1.0": head("Transfer-Encoding: chunked", status="HTTP/1.0 200 OK", body=END),
    "a folded header": head("X-A: b", " c", "Content-Length: 7"),
    "a space before the colon": head("Content-Length : 7"),
    "no colon": head("Content-Length 7"),
    "NUL": head("X-A: \0", "Content-Length: 7"),
    "bare line feeds": b"HTTP/1.1 200 OK\nContent-Length: 7\n\n{}\r\n\r\n",
    "bare line feeds and no more": b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
    "a bare CR": head("X-A: b\rContent-Length: 9", "Content-Length: 7"),
    "status 099": head("Content-Length: 7", status="HTTP/1.1 099 Odd"),
    "status 600": head("Content-Length: 7", status="HTTP/1.1 600 Odd"),
    "status 2000": head("Content-Length: 7", status="HTTP/1.1 2000 OK"),
    "no status": head("Content-Length: 7", status="HTTP/1.1"),
    "HTTP/2": head("Content-Length: 7", status="HTTP/2 200 OK"),
    "HTTP/0.9": b"hello, I am an engine\r\n",
    "the preface of HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "a TLS alert": b"\x15\x03\x01\x00\x02\x02\x46",
    "no content, but content": head("Content-Length: 7", status="HTTP/1.1 204 No Content"),
    "a reset with content": head("Content-Length: 7", status="HTTP/1.1 205 Reset Content"),
    "a chunk that is none": STREAM_HEAD + b"zz\r\n",
    "a chunk with an extension": STREAM_HEAD + b"5;a=b\r\nhello\r\n" + END,
    "a chunk of 0x5": STREAM_HEAD + b"0x5\r\nhello\r\n" + END,
    "a chunk of -5": STREAM_HEAD + b"-5\r\nhello\r\n" + END,
    "a chunk of 2^64": STREAM_HEAD + b"10000000000000000\r\nhello\r\n",
    "a chunk after a bare line feed": STREAM_HEAD + b"5\nhello\r\n" + END,
    "a last chunk with a bad trailer": STREAM_HEAD + b"0\r\nX A: b\r\n\r\n",
    "endless trailers": STREAM_HEAD + b"0\r\n" + b"X-A: b\r\n" * MANY,
}
"""Responses that fail before any byte of a body could be relayed."""


@pytest.mark.case("41")
@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize("name", ODD)
async def test_malformed_engine_response_is_retried_once_and_then_gives_502(name: str, stream: bool) -> None:
    """The request is retried once; then one clear error, which discloses nothing about the engine."""
    async with ScriptedEngine((ODD[name],), (ODD[name],), (OK,)) as engine, rig(engine.address) as one:
        client = await one.client()
        status, fields, body = await client.ask(stream=stream)
        assert (status, json.loads(body)["error"]["code"]) == (502, "upstream_error")
        assert {"content-type", "content-length", "x-request-id"} == set(fields)
        assert (len(engine.requests), engine.connections) == (2, 2), "an odd connection is used once"
        await serves_on(one, client)


@pytest.mark.case("41")
@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize("status", [300, 301, 302, 303, 304, 305, 307, 308])
async def test_redirect_of_an_engine_gives_502_and_is_not_followed(status: int, stream: bool) -> None:
    body = b"" if status == 304 else b"moved"
    async with ScriptedEngine((OK,)) as elsewhere:
        there = document(body, f"{status} There", f"Location: http://{elsewhere.address}/v1/chat/completions")
        async with ScriptedEngine((there,), (there,), (OK,)) as engine, rig_and_client(engine.address) as (one, client):
            got, fields, body_text = await client.ask(stream=stream)
            assert (got, ERROR in body_text, "location" in fields) == (502, True, False)
            assert (elsewhere.connections, len(engine.requests)) == (0, 2)
            await serves_on(one, client)


async def serves_on(one: Rig, client: Client) -> None:
    """Assert that slots are free, and that the same client gets the next response."""
    await one.settled()
    assert one.in_use() == 0
    assert (await client.ask())[::2] == (200, b'{"ok":true}')


# --- responses that can be parsed: relayed unchanged -----------------------------------------------------------------

FRAME = b"data: " + b"0123456789abcdef" * 655_360 + b"\n\n"
"""10 MiB."""
UMLAUTS = 'data: {"a":"ä€😀"}\n\n'.encode()
INVALID = b'data: {"a":"\xff\xfe\xc3("}\n\ndata: \xed\xa0\x80\n\n'


MIXED = (b"data: a\n\r\n", b"data: b\r\n\r", b"data: c\n\r", b"data: d\r\r\n", b"data: e\r\n\n")


def bytewise(content: bytes) -> Script:
    """Send each byte in its own chunk and write."""
    return (STREAM_HEAD, *(chunk(content[at : at + 1]) for at in range(len(content))), END)


def in_pieces(content: bytes, size: int) -> bytes:
    """Split into chunks of this many bytes."""
    return STREAM_HEAD + b"".join(chunk(content[at : at + size]) for at in range(0, len(content), size)) + END


FAITHFUL: dict[str, tuple[Script, bytes]] = {
    "UTF-8 split into bytes": (bytewise(UMLAUTS + b"data: [DONE]\n\n"), UMLAUTS + b"data: [DONE]\n\n"),
    "invalid UTF-8": ((STREAM_HEAD + chunk(INVALID) + END,), INVALID),
    "invalid UTF-8 split into bytes": (bytewise(INVALID), INVALID),
    "a frame of 10 MiB in one chunk": ((STREAM_HEAD + chunk(FRAME) + DONE + END,), FRAME + b"data: [DONE]\n\n"),
    "a frame of 10 MiB in many": ((in_pieces(FRAME, 30_000),), FRAME),
    "lines that end in CR": ((STREAM_HEAD + chunk(b"data: a\r\rdata: b\r\r") + END,), b"data: a\r\rdata: b\r\r"),
    "lines of all ends": ((STREAM_HEAD, *(chunk(event) for event in MIXED), END), b"".join(MIXED)),
    "no event at all": ((STREAM_HEAD + chunk(b"hello") + END,), b"hello"),
    "an event without its end": ((STREAM_HEAD + chunk(b"data: a\n\ndata: b") + END,), b"data: a\n\ndata: b"),
    "no finish": ((STREAM_HEAD + b"".join(map(delta, "abc")) + END,), DELTAS),
    "nothing": ((STREAM_HEAD + END,), b""),
    "trailers": ((STREAM_HEAD + b"".join(map(delta, "abc")) + b"0\r\nX-A: b\r\n\r\n",), DELTAS),
    "interim heads": ((b"HTTP/1.1 103 Early Hints\r\nX-A: b\r\n\r\n" * 8 + STREAM,), WITHOUT_USAGE),
    "more than its end": ((STREAM + STREAM,), WITHOUT_USAGE),
}  # fmt: skip


@pytest.mark.case("41")
@pytest.mark.parametrize("name", FAITHFUL)
async def test_correctly_framed_engine_stream_is_relayed_unchanged(name: str) -> None:
    """Nothing is added to it, least of all `[DONE]`, and it ends because the engine ended it."""
    script, content = FAITHFUL[name]
    async with ScriptedEngine(script, (OK,)) as engine, rig_and_client(engine.address) as (one, client):
        status, _, body = await client.ask(stream=True)
        assert (status, len(body), body == content) == (200, len(content), True)
        await serves_on(one, client)


DOCUMENTS: dict[str, tuple[Script, int, bytes]] = {
    "an error": ((document(b'{"error":{"message":"too long"}}', "400 Bad"),), 400, b'{"error":{"message":"too long"}}'),
    "a page as an error": ((document(PAGE, "500 Internal Server Error", kind="text/html"),), 500, PAGE),
    "an error that is none": ((document(b"\xff\0not JSON", "418 Odd"),), 418, b"\xff\0not JSON"),
    "a page as an answer": ((document(PAGE, kind="text/html; charset=latin-1"),), 200, PAGE),
    "no type": ((b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi",), 200, b"hi"),
    "no reason": ((b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nhi",), 200, b"hi"),
    "no phrase": ((b"HTTP/1.1 200\r\ncontent-length: 2\r\n\r\nhi",), 200, b"hi"),
    "a document of 10 MiB": ((document(FRAME),), 200, FRAME),
    "one with more bytes than its length": ((document(b"{}") + b"and more",), 200, b"{}"),
    "no content": ((b"HTTP/1.1 204 No Content\r\n\r\n",), 204, b""),
}  # fmt: skip


@pytest.mark.case("41")
@pytest.mark.parametrize("stream", [False, True], ids=["document", "stream"])
@pytest.mark.parametrize("name", DOCUMENTS)
async def test_non_streaming_engine_response_is_relayed_unchanged(name: str, stream: bool) -> None:
    """It applies also if a stream was requested."""
    script, status, content = DOCUMENTS[name]
    async with ScriptedEngine(script, (OK,)) as engine, rig_and_client(engine.address) as (one, client):
        got, _, body = await client.ask(stream=stream)
        assert (got, len(body), body == content) == (status, len(content), True)
        await serves_on(one, client)


# --- responses that fail after their first byte: one error, and never an end -----------------------------------------

BROKEN: dict[str, Script] = {
    "closes": (CLOSE,), "resets": (RESET,), "a chunk that is none": (b"zz\r\n",),
    "a chunk longer than its size": (b"3\r\nhello\r\n",), "an event cut in half": (chunk(b'data: {"choices"'), CLOSE),
    "a chunk cut in half": (b"40\r\ndata: {", CLOSE), "a size cut in half": (b"4", CLOSE),
    "a frame of 10 MiB cut in half": (chunk(FRAME)[: len(FRAME) // 2], RESET),
    "a last chunk cut in half": (DONE + b"0\r\n", CLOSE), "endless trailers": (DONE + b"0\r\n" + b"X-A: b\r\n" * MANY,),
    "a bad trailer": (DONE + b"0\r\nX A: b\r\n\r\n",), "an answer in an answer": (OK,), "NUL": (b"\0" * 100,),
}  # fmt: skip


SAID_DONE = ("a last chunk cut in half", "endless trailers", "a bad trailer")


@pytest.mark.case("41")
@pytest.mark.parametrize("dialect", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("name", BROKEN)
async def test_broken_stream_ends_with_an_error_if_one_fits_and_no_last_chunk(name: str, dialect: str) -> None:
    script = (STREAM_HEAD + delta("a"), HOLD, *BROKEN[name])
    async with ScriptedEngine(script, (OK,)) as engine, rig_and_client(engine.address) as (one, client):
        client.call(stream=True, path=dialect)
        assert (await client.head())[0] == 200
        assert b'"a"' in await client.chunk()
        engine.release.set()
        rest = await client.rest()
        assert not rest.endswith(END)
        huge = name.startswith("a frame")  # no error fits inside an event: the connection breaks
        assert rest.count(ERROR) == (0 if huge else 1)
        assert b"[DONE]" not in rest or name in SAID_DONE
        if not huge:
            last = rest[rest.rindex(b"data: ") :]
            assert json.loads(last[6 : last.index(b"\n")])["error"]["code"] == "upstream_error"
        await serves_on(one, await one.client())
        assert engine.connections == 2


@pytest.mark.case("41")
@pytest.mark.parametrize("ending", [CLOSE, RESET])
@pytest.mark.parametrize("framing", ["length", "chunks", "close"])
async def test_truncated_non_streaming_response_is_incomplete_for_the_client(framing: str, ending: Word) -> None:
    """No error fits into a document that has begun: the client does not receive the promised end."""
    body = b'{"choices": [{"mess'
    begun = {
        "length": document(body + b" " * 10)[:-10],
        "chunks": head("Transfer-Encoding: chunked", body=chunk(body)),
        "close": head(body=body),
    }
    async with ScriptedEngine((begun[framing], HOLD, ending), (OK,)) as engine, rig(engine.address) as one:
        client = await one.client()
        client.call()
        status, fields = await client.head()
        engine.release.set()
        rest = await client.rest()
        assert (status, body in rest, rest.endswith(END)) == (200, True, False)
        assert int(fields["content-length"]) > len(rest) if framing == "length" else "chunked" in fields.values()
        await serves_on(one, await one.client())


@pytest.mark.case("41")
async def test_close_delimited_stream_without_done_gets_an_error_event() -> None:
    cut = (b"HTTP/1.0 200 OK\r\ncontent-type: text/event-stream\r\n\r\n" + DELTAS, CLOSE)
    async with ScriptedEngine(cut) as engine, rig_and_client(engine.address) as (_, client):
        client.call(stream=True)
        rest = await client.rest()
        assert ERROR in rest
        assert not rest.endswith(END)


# --- random responses ------------------------------------------------------------------------------------------------

TRIES, AT_ONCE = 300, 8
WORDS = (
    b"\r\n", b"\r\n\r\n", b"0\r\n\r\n", b"zz\r\n", b"\0", b"\xff", DONE, END, delta("x"), event("[]"), b"HTTP/1.1 ",
    b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n", b"HTTP/1.1 100 Continue\r\n\r\n",
)  # fmt: skip


class Babbling(ScriptedEngine):
    """Answers each request with something similar to a response, cut anywhere; then closes the connection or not."""

    def __init__(self, die: random.Random) -> None:
        super().__init__((OK,))
        self._die = die
        self.well = False
        """Give valid responses from now on."""

    def script(self, request: bytes) -> Script:
        """Return the next script."""
        if self.well:
            return (OK,)
        die, data = self._die, self._die.choice(SEEDS)[1:]
        for _ in range(die.choice((0, 1, 1, 2, 5))):
            at, word = die.randrange(len(data) + 1), die.choice((*WORDS, b""))
            data = data[:at] + word + data[at + die.choice((0, 0, 1, len(word))) :]
        cuts = sorted(die.randrange(len(data) + 1) for _ in range(die.randrange(4)))
        pieces = [data[at:end] for at, end in zip((0, *cuts), (*cuts, len(data)), strict=True)]
        return (*pieces, die.choice((CLOSE, RESET)))


@pytest.mark.case("41")
async def test_random_engine_output_gives_the_client_only_valid_http_responses() -> None:
    """Runs a few hundred on sockets; `make fuzz` runs millions through the same code
    (tests/fuzz/targets/engine_responses.py).
    """
    die = random.Random(41)
    engine = Babbling(die)
    async with engine, rig(engine.address, slots=AT_ONCE) as one:
        gate = asyncio.Semaphore(AT_ONCE)

        async def response() -> bytes:
            async with gate:
                client = await one.client()
                client.call(stream=bool(die.randrange(2)), minor=die.randrange(2))
                client.send(b"GET /nothing HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
                try:
                    return await client.rest()
                except ConnectionResetError:
                    return b""

        answers = await asyncio.gather(*(response() for _ in range(TRIES)))
        for answer in answers:
            assert answer.startswith(b"HTTP/1.1 ") or not answer
            assert client(answer) is not None or not answer
            assert answer.count(ERROR) <= 1
        statuses = {answer[9:12] for answer in answers}
        assert statuses >= {b"200", b"502", b"400"}, "else it was not much of a babble"
        engine.well = True
        await serves_on(one, await one.client())
