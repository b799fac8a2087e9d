"""The request side of HTTP/1.1: strict, and independent of how the bytes are split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.errors import CallError
from gateway.http.request_head import HEAD_BYTES_MAX, Request
from gateway.http.request_reader import AHEAD_BYTES_MAX, RequestReader
from tests.support.example_budget import examples
from tests.support.net.request_splits import UNFINISHED, brief, plain, read, read_every_way

CORPUS = Path(__file__).parents[1] / "corpus"
INDEX: list[dict[str, object]] = json.loads((CORPUS / "index.json").read_text())
HEALTH = b"GET /health HTTP/1.1\r\nHost: gw\r\n\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gw\r\n"


def one(data: bytes) -> Request:
    """Return the only request in the bytes."""
    seen = read_every_way(data)
    assert len(seen) == 1, seen
    assert isinstance(seen[0], Request), seen
    return seen[0]


def refused(data: bytes) -> CallError:
    """Return the error that the bytes end in."""
    seen = read_every_way(data)[-1]
    assert isinstance(seen, CallError), seen
    return seen


@pytest.mark.case("39")
@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_corpus_request_is_parsed_the_same_at_any_read_boundaries(entry: dict[str, object]) -> None:
    data = (CORPUS / str(entry["file"])).read_bytes()
    assert [brief(item) for item in read_every_way(data)] == entry["verdict"], entry["why"]


@pytest.mark.parametrize("entry", INDEX, ids=lambda entry: entry["file"])
def test_data_after_a_request_does_not_change_how_it_is_parsed(entry: dict[str, object]) -> None:
    data = (CORPUS / str(entry["file"])).read_bytes()
    seen = read([data])
    if seen[-1] != UNFINISHED:
        after = read([data + HEALTH])
        assert [plain(item) for item in after[: len(seen)]] == [plain(item) for item in seen]
        last = seen[-1]
        kept = isinstance(last, Request) and last.head.keep_alive
        assert [brief(item) for item in after[len(seen) :]] == (["GET /health "] if kept else [])


def test_request_corpus_index_lists_every_corpus_file_once() -> None:
    assert sorted(str(entry["file"]) for entry in INDEX) == sorted(path.name for path in CORPUS.glob("*.http"))


def test_parsed_request_contains_only_supported_headers() -> None:
    request = one(
        b"POST /v1/audio/speech?api-version=1&a=%20 HTTP/1.1\r\nHOST: gw:8080\r\nX-Unknown: a\r\n"
        b"Authorization:\t Bearer k \t\r\nAccept: a/b\r\naccept: c/d\r\nContent-Length: 2\r\n\r\nhi"
    )
    head = request.head
    assert (head.method, head.path, head.query) == (b"POST", b"/v1/audio/speech", b"api-version=1&a=%20")
    assert (head.minor, head.keep_alive, head.expects_continue, request.body) == (1, True, False, b"hi")
    assert head.headers == {
        b"host": b"gw:8080", b"authorization": b"Bearer k", b"accept": b"a/b, c/d",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "kept"),
    [(b"", True), (b"Connection: keep-alive\r\n", True), (b"Connection: Close\r\n", False),
     (b"Connection: x-a, close\r\n", False), (b"Connection: x-a\r\nConnection: close\r\n", False),
     (b"Connection: closed\r\n", True)],
)  # fmt: skip
def test_request_with_connection_close_is_not_kept_alive(line: bytes, kept: bool) -> None:
    assert one(b"GET /health HTTP/1.1\r\nHost: gw\r\n" + line + b"\r\n").head.keep_alive is kept


def test_http_1_0_request_is_not_kept_alive() -> None:
    assert one(b"GET /health HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").head.keep_alive is False


def test_expect_continue_is_reported_before_the_body_arrives() -> None:
    reader = RequestReader(100)
    assert reader.feed(POST + b"Expect: 100-Continue\r\nContent-Length: 2\r\n\r\n") is None
    assert (reader.waiting_for, reader.buffered) == ("body", 0)
    assert reader.pending is not None
    assert reader.pending.expects_continue
    assert reader.feed(b"hi") is not None
    assert reader.pending is None


def test_method_and_path_of_an_incomplete_request_head_are_available() -> None:
    reader, data = RequestReader(100), POST + b"Content-Length: 1\r\n\r\n"
    line = POST.index(b"\r\n") + 2
    for at in range(len(data)):
        head = reader.partial_head()
        assert (head is not None) == (at >= line)
        if head is not None:
            assert (head.method, head.path, head.headers) == (b"POST", b"/v1/chat/completions", {})
        assert reader.feed(data[at : at + 1]) is None
    head = reader.partial_head()
    assert head is not None
    assert head.headers == {b"host": b"gw"}
    assert reader.feed(b"x") is not None
    assert reader.partial_head() is None


def test_expect_is_ignored_on_http_1_0() -> None:
    data = b"POST /v1/embeddings HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\nhi"
    assert one(data).head.expects_continue is False


def test_request_reader_reports_if_the_head_or_the_body_is_incomplete() -> None:
    reader = RequestReader(100)
    assert (reader.waiting_for, reader.buffered) == ("head", 0)
    reader.feed(POST[:10])
    assert (reader.waiting_for, reader.buffered) == ("head", 10)
    reader.feed(POST[10:] + b"Content-Length: 5\r\n\r\nhe")
    assert (reader.waiting_for, reader.buffered) == ("body", 2)
    request = reader.feed(b"llo" + HEALTH)
    assert request is not None
    assert (request.body, reader.waiting_for, reader.buffered) == (b"hello", "nothing", len(HEALTH))


def test_pipelined_request_is_returned_only_after_the_previous_request() -> None:
    reader = RequestReader(100)
    first = reader.feed(HEALTH)
    assert first is not None
    assert reader.feed(HEALTH[:20]) is None
    assert reader.feed(HEALTH[20:] + HEALTH) is None
    assert reader.ahead == 2 * len(HEALTH)
    assert [reader.next() is not None for _ in range(3)] == [True, True, False]
    assert reader.waiting_for == "head"
    assert reader.next() is None


def test_invalid_pipelined_request_fails_after_the_previous_request() -> None:
    reader = RequestReader(100)
    assert reader.feed(HEALTH + b"nonsense\r\n\r\n") is not None
    with pytest.raises(CallError):
        reader.next()
    assert reader.next() is None


def test_pipelined_bytes_above_the_limit_raise_an_error() -> None:
    reader = RequestReader(100)
    assert reader.feed(HEALTH) is not None
    reader.feed(bytes(AHEAD_BYTES_MAX))
    with pytest.raises(CallError, match="too many pipelined bytes"):
        reader.feed(b"x")


def test_reader_rejects_all_data_after_an_error() -> None:
    reader = RequestReader(100)
    for data in (b"\0", HEALTH):
        with pytest.raises(CallError):
            reader.feed(data)
    assert reader.waiting_for == "nothing"


def test_head_at_the_size_limit_is_accepted_and_larger_is_rejected() -> None:
    fill = HEAD_BYTES_MAX - len(b"GET /health HTTP/1.1\r\nHost: gw\r\nX: \r\n\r\n")
    for extra, expected in ((0, "GET /health "), (1, 431)):
        data = b"GET /health HTTP/1.1\r\nHost: gw\r\nX: " + b"a" * (fill + extra) + b"\r\n\r\n"
        for pieces in ([data], [data[:-1], data[-1:]], [data[:40], data[40:]]):
            assert [brief(item) for item in read(pieces)] == [expected]


def test_body_at_the_size_limit_is_accepted_and_larger_is_rejected() -> None:
    for length, expected in ((8, f"POST /v1/chat/completions {'a' * 8}"), (9, 413)):
        body = b"a" * length
        for data in (
            POST + b"Content-Length: %d\r\n\r\n%b" % (length, body),
            POST + b"Transfer-Encoding: chunked\r\n\r\n4\r\naaaa\r\n%x\r\n%b\r\n0\r\n\r\n" % (length - 4, body[4:]),
        ):
            assert [brief(item) for item in read_every_way(data, 8)] == [expected]


def test_oversized_content_length_is_rejected_before_the_body_arrives() -> None:
    reader = RequestReader(1000)
    with pytest.raises(CallError) as caught:
        reader.feed(POST + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n")
    assert (caught.value.status, caught.value.code) == (413, "too_large")


def test_body_is_assembled_from_reads_of_any_size() -> None:
    body = bytes(range(256)) * 400
    head = POST + b"Content-Length: %d\r\n\r\n" % len(body)
    sizes, pieces, at = [1, 5000, 10, 20, 70000, 3], [head], 0
    for size in sizes:
        pieces.append(body[at : at + size])
        at += size
    (seen,) = read([*pieces, body[at:]])
    assert isinstance(seen, Request)
    assert seen.body == body


@pytest.mark.parametrize(
    ("name", "values"),
    [("Host", "11"), ("Content-Length", "11"), ("Transfer-Encoding", "11"), ("Expect", "11"),
     ("Content-Encoding", "11"),
     ("Content-Type", "12"), ("X-API-Key", "12"), ("Authorization", "12"), ("X-Model", "12"), ("X-Priority", "12")],
)  # fmt: skip
def test_header_that_frames_the_request_or_differs_is_rejected_if_repeated(name: str, values: str) -> None:
    lines = "".join(f"{name}: {value}\r\n" for value in values)
    error = refused(f"GET /health HTTP/1.0\r\n{lines}\r\n".encode())
    assert (error.status, error.code) == (400, "invalid_request")
    assert name.lower() in error.message


@pytest.mark.parametrize("name", ["traceparent", "User-Agent", "X-Request-Id", "X-Stainless-Read-Timeout", "Baggage"])
def test_repeated_informational_header_is_dropped(name: str) -> None:
    for values in ("11", "12", "111"):
        lines = "".join(f"{name}: {value}\r\n" for value in values)
        head = one(f"GET /health HTTP/1.1\r\nHost: gw\r\n{lines}tracestate: a=1\r\n\r\n".encode()).head
        assert head.headers == {b"host": b"gw", b"tracestate": b"a=1"}


def test_header_repeated_with_equal_values_is_parsed_as_one_value() -> None:
    for name in (b"authorization", b"x-api-key", b"content-type", b"x-model", b"origin"):
        head = one(b"GET /health HTTP/1.1\r\nHost: gw\r\n" + 3 * (name + b": a\r\n") + b"\r\n").head
        assert head.headers[name] == b"a"
    head = one(b"GET /health HTTP/1.1\r\nHost: gw\r\nOrigin: a\r\nOrigin: b\r\n\r\n").head
    assert head.headers[b"origin"] == b"a, b", "which is no allowed origin"


@pytest.mark.parametrize(
    ("line", "host", "path", "query"),
    [
        ("GET http://Other.example:81/a?b=c", "other.example", b"/a", b"b=c"),
        ("GET HTTPS://other.example/a", "other.example", b"/a", b""),
        ("GET http://[::1]", "::1", b"/", b""),
        ("GET http://other.example?b", "other.example", b"/", b"b"),
        ("OPTIONS http://other.example", "other.example", b"*", b""),
        ("OPTIONS http://other.example/", "other.example", b"/", b""),
        ("OPTIONS *", "gw", b"*", b""),
    ],
)
def test_target_in_absolute_form_replaces_the_host_header(line: str, host: str, path: bytes, query: bytes) -> None:
    head = one(f"{line} HTTP/1.1\r\nHost: gw\r\n\r\n".encode()).head
    assert (head.host, head.path, head.query) == (host, path, query)


@pytest.mark.parametrize(
    "line",
    [
        "GET ftp://gw/a", "GET http:///a", "GET http://u@gw/a", "GET http://gw:port/a", "GET http://gw:1:2/a",
        "GET gw:80", "GET http:/a", "GET http://gw/a#b", "GET *", "OPTIONS *?a", "OPTIONS **", "XOPTIONS *", "CONNECT http://gw/",
        "GET http://[::1/a", "GET http://gw\\evil/a",
    ],
)  # fmt: skip
def test_malformed_or_unsupported_request_target_is_rejected(line: str) -> None:
    assert refused(f"{line} HTTP/1.1\r\nHost: gw\r\n\r\n".encode()).status == 400


def test_host_header_is_required_with_a_target_in_absolute_form() -> None:
    assert refused(b"GET http://gw/ HTTP/1.1\r\n\r\n").status == 400


def test_every_rejected_corpus_request_closes_its_connection() -> None:
    for entry in INDEX:
        last = read([(CORPUS / str(entry["file"])).read_bytes()])[-1]
        assert not isinstance(last, CallError) or last.close, entry["file"]


def test_parse_error_of_a_rejected_request_does_not_echo_the_request() -> None:
    error = refused(POST + b"Authorization : Bearer sk-SECRET\r\n\r\n")
    assert "SECRET" not in error.message


FRAGMENTS = st.sampled_from(
    [POST, HEALTH, b"\r\n", b"\r\n\r\n", b"\n", b"\r", b"\0", b" ", b"Content-Length: 5\r\n",
     b"Content-Length: 3\r\n",
     b"Transfer-Encoding: chunked\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", b"0\r\n", b"hello", b"X: y\r\n", b";a=b",
     b"Connection: close\r\n", b"Expect: 100-continue\r\n", b"GET / HTTP/1.0\r\n",
     b"a\r\n0123456789\r\n", b":", b"\xff"]
)  # fmt: skip


@settings(derandomize=True, deadline=None, max_examples=examples(400))
@given(parts=st.lists(FRAGMENTS | st.binary(max_size=6), max_size=9), sizes=st.lists(st.integers(1, 40), min_size=1))
@example(parts=[POST, b"Transfer-Encoding: chunked\r\n", b"\r\n", b"5\r\nhello\r\n", b"0\r\n\r\n", HEALTH], sizes=[1])
def test_random_bytes_are_parsed_the_same_at_any_read_boundaries(parts: list[bytes], sizes: list[int]) -> None:
    data, at = b"".join(parts), 0
    pieces: list[bytes] = []
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    assert [plain(item) for item in read(pieces)] == [plain(item) for item in read([data])]
