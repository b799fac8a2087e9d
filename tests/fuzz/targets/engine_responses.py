"""Fuzz targets for responses: an engine's bytes on their way to a client, processed as the exchange does it; metrics.

The client is h11. It must never take a truncated response for a complete one. A complete response must hold what h11
reads of the engine's bytes, without the usage events that we requested, and must not depend on how they are split.
"""

from __future__ import annotations

import json
import re
from math import isfinite
from typing import Final, NamedTuple

import h11

from autoscaler.signals.metric_responses import read_metric, read_query_result, read_queue_seconds
from autoscaler.spec.engines import COMMAND
from gateway import errors
from gateway.http import responses
from gateway.http.response_reader import BodyWalker, FramingError, HeadReader, ResponseHead
from gateway.http.sse_relay import is_usage
from gateway.server.response_relay import Answer
from gateway.upstream import token_usage
from tests.fuzz.inputs.byte_splits import cut
from tests.support.fakes.engines.scripted_engine import (
    DONE,
    END,
    OK,
    STREAM,
    STREAM_HEAD,
    USAGE_EVENT,
    chunk,
    delta,
    event,
)

BREAK = errors.render_error_event(errors.upstream_error())
NOTE = b": note\n\n"
_LINE = re.compile(rb"([^\r\n]*)(\r\n|\r|\n|\Z)")
_EVENT_END = re.compile(rb"(\r\n|\n|\r(?!\n))(\r\n|\n|\r)\Z")
_CLOSING = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
_PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"

SEEDS = tuple(
    bytes((flags,)) + answer
    for flags in (0, 1, 3, 5, 7, 0x43, 0x87)
    for answer in (
        OK,
        STREAM,
        b"HTTP/1.1 100 Continue\r\n\r\n" + STREAM[:-5] + b"0\r\nX: y\r\n\r\n",
        STREAM_HEAD + delta("a") + chunk(b"data: ") + chunk(b"b\r\n") + chunk(b"\r\n") + USAGE_EVENT + END,
        STREAM_HEAD + event('{"choices": [], "usage": {"prompt_tokens": 1}}')[:-7],
        _CLOSING + b'data: {"type":"message_stop"}\n\n',
        _CLOSING.replace(b"\r\n\r\n", b"\r\nContent-Length: 22\r\n\r\n") + b"data: a\r\r\r\ndata: [DONE]",
        _PLAIN + chunk(b'{"a":') + chunk(b"1}") + END,
        b'HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n{"a":1}',
        b'HTTP/1.1 400 Bad\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"error":"a"}',
        b"HTTP/1.1 204 None\r\n\r\n",
        STREAM_HEAD + chunk(b"data: " + b"[" * 1500 + b"]\n\n") + END,
        STREAM_HEAD + chunk(b'data: {"choices":[],"us') + chunk(b'age":{"a":1}}\r\n\r') + chunk(b"\n") + DONE + END,
        STREAM_HEAD + chunk(b'data: {"usage":{},"choices":[') + chunk(b"]}\n") + chunk(b"\n\n") + delta("a") + END,
    )
)
WORDS = (
    b"\r\n", b"\n\n", b"\r\r", b"\r\n\r\n", b"0\r\n\r\n", b"1\r\n", b"a\r\n", DONE, USAGE_EVENT, delta("x"),
    b"data: ", b"[]", chunk(b"\n"), chunk(b"\r"), chunk(b"\r\n\r"),
    chunk(b'data: {"choices":[],"us'), chunk(b'age":{}}\n\n'),
    b'{"choices":[],"usage":{}}', b"Transfer-Encoding: chunked\r\n", b"Content-Length: 5\r\n", b"Connection: close\r\n",
    b"text/event-stream", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0 ", b"\xff", b"\0",
)  # fmt: skip


class Wishes(NamedTuple):
    """Options of the client: the first three bits of an input. The rest of its first byte defines the split."""

    framed: bool
    drop_usage: bool
    early: bool


class Played(NamedTuple):
    """The result of an engine's bytes."""

    out: bytes
    """All bytes that the client got."""
    end: str
    """`none` (no response yet), `whole`, `failed` (broken off with an error event) or `broken`."""
    head: ResponseHead | None
    odd: bool = False
    """The bytes are no HTTP. The split determines when that is detected: the sooner, the fewer bytes were forwarded."""


def answers(data: bytes) -> None:
    """One byte of options, and an engine's response until it closes."""
    if not data:
        return
    flags, raw = data[0], data[1:]
    wishes = Wishes(framed=bool(flags & 1), drop_usage=bool(flags & 2), early=bool(flags & 4))
    whole = play([raw], wishes)
    judge(raw, wishes, whole)
    for size in (flags // 8 + 1, flags + 60):
        pieces = play(cut(raw, size), wishes)
        judge(raw, wishes, pieces)
        same(whole, pieces)
    is_usage(raw)
    token_usage.parse_token_usage(raw)


def same(whole: Played, pieces: Played) -> None:
    """The split changes nothing but how many bytes of an invalid response are forwarded."""
    assert (pieces.end == "whole", pieces.odd) == (whole.end == "whole", whole.odd), "the cut matters for the end"
    if whole.odd and "none" in (whole.end, pieces.end):
        return
    contents = [(client(played.out) or (b"", False))[0].removesuffix(BREAK) for played in (whole, pieces)]
    assert contents[0] == contents[1] or (whole.odd and contents[1].startswith(contents[0])), "the cut matters"
    assert whole.odd or whole.end == pieces.end, "the split changes the outcome"


def play(pieces: list[bytes], wishes: Wishes) -> Played:
    """Process pieces as `gateway.upstream.connection` and `gateway.server.proxied_call` do.
    From the first byte until the engine has closed.
    """
    reader, out = HeadReader(), b""
    head: ResponseHead | None = None
    answer: Answer | None = None
    walker: BodyWalker | None = None
    odd = False
    try:
        for piece in pieces:
            if head is None or walker is None:
                read = reader.feed(piece)
                if read is None:
                    continue
                head, piece = read  # noqa: PLW2901  the rest of it
                walker = BodyWalker(head)
                if head.elsewhere:
                    return Played(b"", "none", head)
            if answer is None and piece:
                answer = made(head, walker, wishes)
                out = start(head, answer, wishes)
            if answer is not None and piece:
                out += answer.take(piece)
            while answer is not None and walker.unread and not walker.ended:
                out += answer.take(b"")
            if walker.ended:
                break
        if head is None or walker is None:
            return Played(b"", "none", None)
        walker.ended = walker.ended or walker.until_close
        if walker.ended:
            if answer is None:
                answer = made(head, walker, wishes)
                out = start(head, answer, wishes) + answer.take(b"")
            if not answer.cut_off:
                return Played(out + answer.ending(), "whole", head)
    except FramingError:
        odd = True
    if answer is None:
        return Played(b"", "none", head, odd)
    if answer.whole:
        return Played(out + answer.release() + answer.frame(BREAK), "failed", head, odd)
    return Played(out, "broken", head, odd)


def made(head: ResponseHead, walker: BodyWalker, wishes: Wishes) -> Answer:
    """The Answer of this response."""
    note = NOTE if wishes.early else b""
    return Answer(head, walker, framed=wishes.framed, drop_usage=wishes.drop_usage, early=wishes.early, note=note)


def start(head: ResponseHead, answer: Answer, wishes: Wishes) -> bytes:
    """The head that the client gets."""
    if wishes.early:
        return responses.early_head(b"id", chunked=wishes.framed, close=not wishes.framed, more=b"")
    close = answer.length is None and not answer.chunked
    return responses.render_head(
        head.status, head.fields, b"id", length=answer.length, chunked=answer.chunked, close=close
    )


def judge(raw: bytes, wishes: Wishes, played: Played) -> None:
    """Check the response that the client reads."""
    if played.end == "none" or played.head is None:
        return
    framed = wishes.framed or (not wishes.early and played.head.length is not None and b"content-length" in played.out)
    got = client(played.out)
    assert got is not None, "the client cannot read it"
    content, ended = got
    stream = played.head.event_stream and played.head.status < 300
    if played.end == "whole":
        assert ended, "the end was not given out"
        compare(raw, wishes, content, stream=stream)
    elif played.end == "failed":
        assert content.endswith(BREAK), "the error is not an event of its own"
        before = content.removesuffix(BREAK)
        between = not before.strip(b"\r\n") or _EVENT_END.search(before) is not None
        assert between, "the error is sent inside an event"
        assert not (wishes.framed and ended), "an end that did not come"
    else:
        assert not (framed and ended), "an end that did not come"


def compare(raw: bytes, wishes: Wishes, content: bytes, *, stream: bool) -> None:
    """A complete response holds the engine's content."""
    read = client(raw)
    if wishes.early:
        assert content.endswith(NOTE)
        content = content.removesuffix(NOTE)
    if read is None or (wishes.early and not stream):
        return
    message = read[0]
    if stream and wishes.drop_usage:
        message = without_usage(message)
    assert content == message, "content differs from the engine's response"


def without_usage(content: bytes) -> bytes:
    """A stream without the events that `include_usage` adds, line by line."""
    out = event = b""
    for line in _LINE.finditer(content):
        event += line[0]
        if not line[1]:
            out += b"" if added(event) else event
            event = b""
    return out + event


def added(event: bytes) -> bool:
    """Whether an event is the chunk that `include_usage` adds, decoded with the standard library."""
    lines = [line[1] for line in _LINE.finditer(event.removeprefix(b"\xef\xbb\xbf"))]
    try:
        read = json.loads(b"\n".join(line[5:] for line in lines if line.startswith(b"data:")).decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(read, dict) and read.get("choices") == [] and isinstance(read.get("usage"), dict)


def client(data: bytes) -> tuple[bytes, bool] | None:
    """(content, whether it is complete) of one response as h11 reads it before the connection closes.
    None: not a response.
    """
    reader = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
    reader.send(h11.Request(method="GET", target="/", headers=[("host", "gw")]))
    reader.send(h11.EndOfMessage())
    reader.receive_data(data)
    content, begun = b"", False
    try:
        while True:
            event = reader.next_event()
            if isinstance(event, h11.Data):
                content += event.data
            elif isinstance(event, h11.EndOfMessage):
                return content, True
            elif isinstance(event, h11.Response):
                begun = True
            elif event is h11.NEED_DATA:
                reader.receive_data(b"")
            elif not isinstance(event, h11.InformationalResponse):
                return None
    except h11.RemoteProtocolError:
        return (content, False) if begun else None


# --- metrics ----------------------------------------------------------------------------------------------------------

_METRIC: Final = b"vllm:kv_cache_usage_perc"
_STATISTICS: Final = {"model_stats": [{"name": "m", "inference_stats": {"queue": {"count": 1, "ns": 5}}}]}
_RESULT: Final = {"data": {"resultType": "vector", "result": [{"metric": {"a": "b"}, "value": [1.5, "2"]}]}}
METRIC_SEEDS: Final = (
    _METRIC + b'{engine="0",model_name="a b"} 0.5 1700000000000\n' + _METRIC + b'{engine="1"} NaN\n',
    b"# TYPE x gauge\n" + _METRIC + b" +Inf\n",
    _METRIC + b" " + b"9" * 1500 + b"\n",
    _METRIC + b'{a="' + b'\\"' * 900 + b'"} 1\n',
    _METRIC + b"{" + b'a="b",' * 300 + b"} 1 # {} 1\n",
    json.dumps(_STATISTICS).encode(),
    json.dumps(_RESULT).encode(),
    b'{"data":{"resultType":"scalar","result":[1,"1e999"]}}',
)
METRIC_WORDS: Final = (
    _METRIC, b"{", b"}", b'="', b'\\"', b"\n", b" NaN", b" -Inf", b" 1e999", b" 1_0", b"__name__", b" # ", b"\xff",
    b'"ns":', b'"queue":', b'"value":', b'"scalar"', b'"vector"', b"[[[[", b"null", b"-1",
)  # fmt: skip


def metrics(data: bytes) -> None:
    """Read the bytes as each kind of response."""
    known = COMMAND.behavior.metrics
    assert known is not None
    read = [read_metric(data, known.cache_use, mean=True), read_metric(data, known.tokens)]
    for reading in (*read, read_queue_seconds(data), read_query_result(data)):
        if reading.value is None:
            assert reading.problem
        else:
            assert isfinite(reading.value)
            assert reading.value >= 0
