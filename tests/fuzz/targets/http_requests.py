"""Fuzz target for requests: the same result however the bytes are split, equal to h11's, and unambiguous upstream."""

from __future__ import annotations

import re
from pathlib import Path

import h11

from gateway.errors import CallError
from gateway.http.request_head import Request, parse_head
from tests.fuzz.inputs.byte_splits import cut
from tests.support.net.request_mutations import LINES, ODD
from tests.support.net.request_mutations import SEEDS as VALID
from tests.support.net.request_splits import plain, read
from tests.support.net.upstream_requests import forwarded

CORPUS = Path(__file__).parents[2] / "wire" / "corpus"
BODY_BYTES_MAX = 4096
SEEDS = (*VALID, *(path.read_bytes() for path in sorted(CORPUS.glob("*.http")) if path.stat().st_size < 2048))
WORDS = (*ODD, *LINES, b"0\r\n\r\n", b"5\r\nhello\r\n", b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\n")


def requests(data: bytes) -> None:
    """Bytes of one client connection."""
    seen = read([data], BODY_BYTES_MAX)
    expected = [plain(item) for item in seen]
    for pieces in (cut(data, 1), cut(data, 7), cut(data, len(data) // 2 + 1)):
        assert [plain(item) for item in read(pieces, BODY_BYTES_MAX)] == expected, "the cut matters"
    found = [item for item in seen if isinstance(item, Request)]
    if not found:
        return
    assert parse_head(data[: data.index(b"\r\n\r\n")])[0].headers == found[0].head.headers, (
        "a known head is another one"
    )
    refused = bool(seen) and isinstance(seen[-1], CallError)
    assert all(error.close for error in seen if isinstance(error, CallError))
    foreign = as_h11(data)
    own = [(item.head.method, target(item), item.body) for item in found]
    assert foreign[: len(own)] == own[: len(foreign)], "h11 reads another request"
    assert refused or len(foreign) <= len(own), "h11 reads one more"
    if len(found) == len(seen) and found[-1].head.keep_alive:
        assert [plain(item) for item in read([data, data], BODY_BYTES_MAX)] == expected * 2, (
            "the second time is another"
        )
    for request in found:
        one_way(request)


def target(request: Request) -> bytes:
    """Path and query, without a trailing `?` of an empty query."""
    return (request.head.path + b"?" + request.head.query).removesuffix(b"?")


def one_way(request: Request) -> None:
    """The engine gets one request: that body, an API path of the engine, and only headers on our list."""
    sent = forwarded(request)
    if sent is None:
        return
    head, body = sent
    names = [line.partition(b": ")[0] for line in head.split(b"\r\n")[1:-2]]
    assert len(set(names)) == len(names), "a header twice"
    assert not {b"authorization", b"api-key", b"x-api-key", b"connection", b"transfer-encoding", b"expect"} & set(names)
    path = head.split(b" ")[1]
    assert as_h11(head + body) == [(b"POST", path, body)]


def in_origin_form(method: bytes, at: bytes) -> bytes:
    """A target without scheme and authority."""
    match = re.fullmatch(rb"https?://[^/?]*(.*)", at, re.IGNORECASE | re.DOTALL)
    if match is None or match[1].startswith(b"/"):
        return at if match is None else match[1]
    return b"*" if method == b"OPTIONS" and not match[1] else b"/" + match[1]


def as_h11(data: bytes) -> list[tuple[bytes, bytes, bytes]]:
    """(method, target, body) of all requests that h11 reads before it rejects or waits."""
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    connection.receive_data(data)
    found: list[tuple[bytes, bytes, bytes]] = []
    method, at, body = b"", b"", b""
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return found
        if isinstance(event, h11.Request):
            method, at, body = event.method, in_origin_form(event.method, event.target).removesuffix(b"?"), b""
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            found.append((method, at, body))
            connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
            connection.send(h11.EndOfMessage())
            if connection.our_state is h11.MUST_CLOSE:
                return found
            connection.start_next_cycle()
        else:
            return found
