"""The response side of HTTP/1.1: at once, byte by byte, split anywhere; and what is rejected."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.response_reader import (
    INTERIM_MAX,
    LAST_CHUNK,
    BodyWalker,
    FramingError,
    HeadReader,
    ResponseHead,
    parse_head,
)
from gateway.http.sse_relay import EventGate, encode_chunk, render_engine_error, whole_chunks
from gateway.upstream.token_usage import parse_token_usage
from tests.support.example_budget import examples

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"
EVENTS = [b'data: {"choices":[{"delta":{"content":"%d"}}]}\n\n' % number for number in range(5)]
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}}\n\n'
DONE = b"data: [DONE]\n\n"


def read(*pieces: bytes) -> tuple[ResponseHead, BodyWalker, bytes]:
    """Return the head, the walker and all bytes that may be forwarded."""
    reader, walker, head, out = HeadReader(), None, None, b""
    for piece in pieces:
        if walker is None:
            got = reader.feed(piece)
            if got is None:
                continue
            head, rest = got
            walker = BodyWalker(head)
            out += walker.walk(rest)
        else:
            out += walker.walk(piece)
    assert head is not None
    assert walker is not None
    return head, walker, out


def pieces(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_chunked_body_is_forwarded_unchanged_except_its_last_chunk(size: int) -> None:
    body = b"".join(map(encode_chunk, EVENTS))
    _, walker, out = read(*pieces(CHUNKED + body + LAST_CHUNK, size))
    assert (out, walker.ended, walker.excess) == (body, True, False)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_stripping_a_chunked_body_in_pieces_returns_its_content(size: int) -> None:
    head = parse_head(CHUNKED[:-4])
    assert head is not None
    walker = BodyWalker(head)
    data = b"".join(map(encode_chunk, EVENTS)) + LAST_CHUNK
    assert b"".join(walker.strip(piece) for piece in pieces(data, size)) == b"".join(EVENTS)
    assert walker.ended


def test_last_chunk_bytes_inside_a_chunk_do_not_end_the_body() -> None:
    lines = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nKeep-Alive: timeout=5, max=100\r\n\r\n"
    _, walker, out = read(lines)
    assert (walker.ended, out) == (False, b"")
    assert walker.walk(b"5\r\n0\r\n\r\n\r\n") == b"5\r\n0\r\n\r\n\r\n"
    assert not walker.ended


@pytest.mark.parametrize("size", [1, 5, 1000])
def test_body_ends_at_content_length_and_surplus_is_flagged(size: int) -> None:
    _, walker, out = read(*pieces(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhelloXX", size))
    assert (out, walker.ended, walker.excess) == (b"hello", True, True)


def test_body_without_length_ends_at_connection_close() -> None:
    head, walker, out = read(b"HTTP/1.0 200 OK\r\n\r\nabc")
    assert (head.keep_alive, walker.until_close, walker.ended, out) == (False, True, False, b"abc")


def test_trailers_of_a_chunked_body_are_dropped_and_surplus_is_flagged() -> None:
    _, walker, out = read(CHUNKED, encode_chunk(b"a") + b"0\r\nx-sum: 1\r\n\r\n")
    assert (out, walker.ended, walker.excess) == (encode_chunk(b"a"), True, False)
    _, walker, _ = read(CHUNKED, LAST_CHUNK + b"HTTP/1.1 200 OK")
    assert walker.excess


def test_body_walker_reports_a_boundary_only_between_complete_chunks() -> None:
    _, walker, _ = read(CHUNKED, b"3\r\nab")
    assert not walker.at_boundary
    walker.walk(b"c\r")
    assert not walker.at_boundary
    assert walker.walk(b"\n1") == b"\n"  # a partial chunk size is held back
    assert walker.at_boundary


@pytest.mark.parametrize(
    "body",
    [b"zz\r\n", b"0x5\r\nhello\r\n", b"+5\r\nhello\r\n", b"5_0\r\n", b" 5\r\nhello\r\n", b"5;x=y\r\nhello\r\n",
     b"5\nhello\n", b"5\r\nhelloX\r\n", b"5\r\nhello\rX", b"-1\r\n", b"123456789\r\n", b"\r\n",
     b"0\r\nnot a trailer\r\n\r\n"],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 1000])
def test_malformed_response_chunks_are_rejected(body: bytes, size: int) -> None:
    with pytest.raises(FramingError):
        read(CHUNKED, *pieces(body, size))


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/2.0 200 OK", b"HTTP/1.1 20 OK", b"HTTP/1.1 200 OK\nX: y", b"HTTP/1.1 200 OK\r\nX : y", b"ICY 200 OK",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 1", b"HTTP/1.1 200 OK\r\nContent-Length: +1",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked", b"HTTP/1.1 101 Switching Protocols",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked", b"HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked",
        b"HTTP/1.1 200 OK\r\nX: a\r\n folded", b"HTTP/1.1 200 OK\r\nX: a\0b", b"HTTP/1.1 204 None\r\nContent-Length: 3",
    ],
)  # fmt: skip
def test_malformed_or_unsupported_response_head_is_rejected(head: bytes) -> None:
    with pytest.raises(FramingError):
        HeadReader().feed(head + b"\r\n\r\n")


@pytest.mark.parametrize(
    "begun",
    [
        b"HTTP/1.1 200 OK\n", b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}", b"HTTP/1.1 200 OK\r\nX: y\n",
        b"HTTP/1.1 200 OK\rX", b"HTTP/1.1 200 OK\r\nX: a\0", b"HTTP/1.1 2000 OK\r\n", b"HTTP/2", b"\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\n", b"HTTP/1.1 200 OK\r\nX: " + b"y" * (64 << 10),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1, 2, 7, 100_000])
def test_invalid_head_is_rejected_before_the_head_is_complete(begun: bytes, size: int) -> None:
    """The engine may send nothing more."""
    with pytest.raises(FramingError):
        read(*pieces(begun, size))


@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_head_in_pieces_after_interim_responses_yields_status_and_body(size: int) -> None:
    interim = b"HTTP/1.1 103\r\nLink: \t<\xe9>\r\n\r\n"
    head, _, out = read(*pieces(interim * 2 + b"HTTP/1.1 200 \r\nX: \xff\r\nContent-Length: 4\r\n\r\n\n\0\r\n", size))
    assert (head.status, out) == (200, b"\n\0\r\n")


def test_head_after_split_interim_response_is_found() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    for at in range(1, len(interim)):
        assert read(interim[:at], interim[at:] + b"HTTP/1.1 204 \r\n\r\n")[0].status == 204


def test_205_response_with_content_is_rejected() -> None:
    """Required by RFC 9110, section 15.3.6."""
    head, walker, _ = read(b"HTTP/1.1 205 Reset Content\r\n\r\n")
    assert (head.length, walker.ended) == (0, True)
    for framing in (b"Content-Length: 2", b"Transfer-Encoding: chunked"):
        with pytest.raises(FramingError):
            read(b"HTTP/1.1 205 Reset Content\r\n" + framing + b"\r\n\r\n{}")


def test_interim_responses_are_skipped_up_to_a_limit() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\n"
    head, _, out = read(interim * INTERIM_MAX + b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx")
    assert (head.status, out) == (200, b"x")
    with pytest.raises(FramingError):
        read(interim * (INTERIM_MAX + 1))


def test_engine_response_headers_not_on_the_allow_list_are_dropped() -> None:
    head = parse_head(
        b"HTTP/1.1 200 OK\r\nServer: engine/1\r\nContent-Type: application/json\r\nConnection: x-a, Close\r\nX-A: b\r\n"
        b"Set-Cookie: c\r\nX-Request-Id: theirs\r\nContent-Length: 0\r\nRetry-After: 3"
    )
    assert head is not None
    assert head.fields == b"content-type: application/json\r\nretry-after: 3\r\n"
    assert not head.keep_alive


@pytest.mark.parametrize(
    ("status", "elsewhere"),
    [(200, False), (299, False), (300, True), (307, True), (399, True), (400, False), (404, False), (429, True),
     (500, False), (502, False), (503, True), (504, False)],
)  # fmt: skip
def test_redirect_429_or_503_of_an_engine_is_not_forwarded(status: int, elsewhere: bool) -> None:
    """An engine's own error is a response and is forwarded to the client."""
    assert ResponseHead(status, False, 0, True, b"", b"").elsewhere is elsewhere


def test_response_headers_named_in_connection_are_not_forwarded() -> None:
    head = parse_head(
        b"HTTP/1.1 200 OK\r\nDate: a\r\nConnection: keep-alive,\tDATE\r\nCache-Control: b\r\nRetry-After: 3\r\n"
        b"Connection: Cache-Control\r\nContent-Length: 0"
    )
    assert head is not None
    assert (head.fields, head.keep_alive) == (b"retry-after: 3\r\n", True)


@pytest.mark.parametrize("size", [1, 5, 63, 64, 1000])
def test_retained_body_tail_ends_with_the_last_event_for_any_read_size(size: int) -> None:
    body = b"data: begun\n\n" + b"".join(EVENTS) + DONE
    walker = BodyWalker(ResponseHead(200, False, None, False, b"text/event-stream", b""))
    for piece in pieces(body, size):
        walker.walk(piece)
    assert walker.tail().endswith(DONE)
    assert walker.tail().startswith(b"data: begun"[:size])
    assert len(walker.tail()) <= len(body)


def gate_through(data: list[bytes], *, drop_usage: bool) -> bytes:
    """Return the content that a client decodes from a stream that passed the gate."""
    walker = BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b""))
    gate = EventGate(walker, drop_usage=drop_usage)
    client = BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b""))
    out = b"".join(client.strip(gate.pass_chunks(piece)) for piece in data)
    assert walker.ended
    assert client.at_boundary
    return out + gate.rest()


STREAM = b"".join(map(encode_chunk, [*EVENTS, USAGE, DONE])) + LAST_CHUNK


@pytest.mark.parametrize("size", [1, 2, 3, 11, 64, 10_000])
def test_usage_chunk_is_removed_only_on_request_for_any_split_of_a_stream(size: int) -> None:
    assert gate_through(pieces(STREAM, size), drop_usage=True) == b"".join([*EVENTS, DONE])
    assert gate_through(pieces(STREAM, size), drop_usage=False) == b"".join([*EVENTS, USAGE, DONE])


@pytest.mark.parametrize("drop_usage", [True, False])
def test_token_usage_is_read_from_a_body_tail_without_earlier_token_events(drop_usage: bool) -> None:
    """Each event is a chunk of its own, as engines send them; Anthropic's first event reports part of the usage."""
    began = b'event: message_start\ndata: {"message":{"usage":{"input_tokens":9,"output_tokens":1}}}\n\n'
    ended = b'event: message_delta\ndata: {"usage":{"output_tokens":64}}\n\n'
    walker = BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b""))
    gate = EventGate(walker, drop_usage=drop_usage)
    for event in (began, *EVENTS * 50, ended, DONE):
        gate.pass_chunks(encode_chunk(event))
    assert parse_token_usage(walker.tail()) == (9, 64)
    assert EVENTS[0] not in walker.tail()
    gate.pass_chunks(encode_chunk(USAGE))
    gate.pass_chunks(LAST_CHUNK)
    assert (parse_token_usage(walker.tail()), walker.ended) == (parse_token_usage(USAGE), True)


def test_read_of_complete_events_is_forwarded_without_a_copy() -> None:
    walker = BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b""))
    gate = EventGate(walker, drop_usage=True)
    piece = encode_chunk(EVENTS[0]) + encode_chunk(EVENTS[1])
    assert gate.pass_chunks(piece) is piece


def test_whole_chunks_are_forwarded_and_a_partial_next_one_is_held_back() -> None:
    gate = EventGate(BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b"")), drop_usage=True)
    run = encode_chunk(EVENTS[0]) * 50 + encode_chunk(EVENTS[1])
    ended = len(encode_chunk(EVENTS[0])) - 2
    for at in range(1, ended):
        assert gate.pass_chunks(run + run[:at]) == run
        assert gate.pass_chunks(run[at:]) == run
    assert gate.pass_chunks(run + run[:ended]) == run + encode_chunk(EVENTS[0]), "an event is whole before its chunk is"


def test_usage_event_between_many_token_events_is_removed() -> None:
    run = [encode_chunk(EVENTS[0])] * 200
    data = b"".join([*run, encode_chunk(USAGE), *run, LAST_CHUNK])
    assert gate_through([data[:9_000], data[9_000:]], drop_usage=True) == EVENTS[0] * 400


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", (0, True)), (b"3\r\na\n\n\r\n", (8, True)), (b"3\r\na\n\n\r\n3\r\nb\n\n\r\n", (16, True)),
        (b"3\r\na\n\n\r\n3\r\nb\n\n\r", (8, True)), (b"3\r\na\n\n\r\n4\r\nbc\n\n\r\n3\r\nd\n\n\r\n", (25, True)),
        (b"3\r\na\n\n\r\n0\r\n\r\n", (8, False)), (b"0\r\n\r\n", (0, False)), (b"a", (0, True)), (b"3\r", (0, True)),
        (b"3\r\na\n\n\r\n03\r\nb\n\n\r\n", (17, True)), (b"5\r\na\r\n\r\n\r\n", (10, True)),
        (b"2\r\n\n\n\r\n", (7, True)),
        # Chunks that do not end with an event, although their bytes look like it.
        (b"1\r\n\n\r\n1\r\n\n\r\n", (0, False)), (b"2\r\na\n\r\n3\r\nb\n\n\r\n", (0, False)),
        (b"2\r\n\r\n\r\n", (0, False)), (b"3\r\na\n\n\r\n2\r\nb\n\r\n3\r\nc\n\n\r\n", (8, False)),
        # Malformed chunks: the walker reports them.
        (b"2\r\na\n\n\r\n", (0, False)), (b"3\r\na\n\n\r\n3\r\nbc\n\n\r\n", (8, False)), (b"x\r\n", (0, False)),
        (b"3;x\r\na\n\n\r\n", (0, False)), (b"+3\r\na\n\n\r\n", (0, False)), (b"x", (0, False)), (b"\r\n", (0, False)),
    ],
)  # fmt: skip
def test_data_is_split_after_the_last_chunk_that_completes_an_event(data: bytes, expected: tuple[int, bool]) -> None:
    assert whole_chunks(data, len(data)) == expected


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    st.lists(st.sampled_from([b"a\n\n", b"bc\n\n", b"d\r\n\r\n", b"x" * 17 + b"\n\n", b"y\n", b"z"]), max_size=30),
    st.integers(0, 400),
)
def test_split_of_random_chunks_equals_a_parse_chunk_by_chunk(contents: list[bytes], stop: int) -> None:
    data, ends, whole = b"", [0], True
    for content in contents:
        data += encode_chunk(content)
        whole = whole and content.endswith((b"\n\n", b"\r\n\r\n"))
        if whole:
            ends.append(len(data))
    stop = min(stop, len(data))
    assert whole_chunks(data, stop)[0] == max(end for end in ends if end <= stop)


def test_partial_event_of_a_stream_is_held_back_until_complete() -> None:
    walker = BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b""))
    gate = EventGate(walker, drop_usage=False)
    assert gate.pass_chunks(encode_chunk(b"data: a\n")) == b""
    assert gate.pass_chunks(encode_chunk(b"\n")) == encode_chunk(b"data: a\n\n")


@pytest.mark.parametrize("value", [b'1,"\xff":1', b"[" * 5000 + b"]" * 5000, b'"\\ud800"', b"1e999"])
def test_undecodable_json_from_the_engine_raises_no_exception(value: bytes) -> None:
    whole = b'data: {"choices":[],"usage":{"a":%b}}\n\n' % value
    assert gate_through([encode_chunk(whole) + LAST_CHUNK], drop_usage=True) in (whole, b"")
    event = render_engine_error(b'{"error":{"a":%b}}' % value, "openai")
    assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "upstream_error"


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(st.lists(st.binary(min_size=1, max_size=40), max_size=8), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_stripped_content_does_not_depend_on_read_sizes(contents: list[bytes], sizes: list[int]) -> None:
    data = b"".join(map(encode_chunk, contents)) + LAST_CHUNK
    walker, at, out = BodyWalker(ResponseHead(200, True, None, True, b"", b"")), 0, b""
    for number in range(len(data)):
        size = sizes[number % len(sizes)]
        out += walker.strip(data[at : at + size])
        at += size
    assert (out, walker.ended, walker.excess) == (b"".join(contents), True, False)


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(st.binary(max_size=200))
def test_random_engine_bytes_raise_no_error_other_than_framing_error(data: bytes) -> None:
    try:
        read(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + data)
        HeadReader().feed(data)
    except FramingError:
        pass
