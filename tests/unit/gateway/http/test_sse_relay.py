"""Event streams in every form that SSE allows: where an event ends, and which one is the usage chunk.

Neither depends on how the bytes are split or on where chunks end. The fast paths of the gate are tested in
test_response_reader_walk.py.
"""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.http.response_reader import LAST_CHUNK, BodyWalker, ResponseHead
from gateway.http.sse_relay import EVENT_BYTES_MAX, EventGate, encode_chunk, is_usage
from tests.support.example_budget import examples

LINE_ENDS = (b"\n", b"\r", b"\r\n")
EVENT_ENDS = (
    b"\n\n", b"\r\n\r\n", b"\r\r", b"\n\r\n", b"\n\r", b"\r\n\r", b"\r\n\n", b"\r\r\n",
)  # fmt: skip
USAGE_JSON = b'{"id":"c","choices":[],"usage":{"prompt_tokens":7,"completion_tokens":9}}'
TOKEN = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'


def gate(*, drop_usage: bool = True) -> EventGate:
    return EventGate(BodyWalker(ResponseHead(200, True, None, True, b"text/event-stream", b"")), drop_usage=drop_usage)


def content(framed: bytes) -> bytes:
    """Return the content that a client decodes from the chunks."""
    return BodyWalker(ResponseHead(200, True, None, True, b"", b"")).strip(framed)


def dispatched(stream: bytes) -> list[bytes]:
    """Return the data of the events that a client sees, as defined in WHATWG HTML, section 9.2.6."""
    found, data = list[bytes](), list[bytes]()
    for line in re.split(rb"\r\n|\n|\r", stream):
        if not line and data:
            found.append(b"\n".join(data))
            data = []
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
    return found


USAGE: dict[str, bytes] = {
    "alone": b"data: " + USAGE_JSON,
    "no space": b"data:" + USAGE_JSON,
    "a comment": b": c\ndata: " + USAGE_JSON,
    "an id": b"id: 1\ndata: " + USAGE_JSON,
    "a name": b"event: message\ndata: " + USAGE_JSON,
    "a name after it": b"data: " + USAGE_JSON + b"\nevent: message",
    "a blank in the list": b"data: " + USAGE_JSON.replace(b"[]", b"[ ]"),
    "a tab in the list": b"data: " + USAGE_JSON.replace(b"[]", b"[\t]"),
    "blanks everywhere": b'data: { "choices" : [ ] , "usage" : { "prompt_tokens" : 7 } }',
    "usage first": b'data: {"usage":{"prompt_tokens":7},"choices":[]}',
    "two lines": b'data: {"choices":[],\ndata: "usage":{"prompt_tokens":7}}',
    "a list of two lines": b'data: {"usage":{"prompt_tokens":7},"choices":[\ndata: ]}',
    "a comment in the list": b'data: {"usage":{"prompt_tokens":7},"choices":[ \n: c\ndata: ]}',
    "a byte order mark": b"\xef\xbb\xbfdata: " + USAGE_JSON,
}
KEPT: dict[str, bytes] = {
    "no usage": b'data: {"choices":[]}',
    "usage is null": b'data: {"choices":[],"usage":null}',
    "a choice": b'data: {"choices":[{"delta":{"tool_calls":[]}}],"usage":{"prompt_tokens":7}}',
    "no choices": b'data: {"usage":{"prompt_tokens":7},"x":[]}',
    "in a comment": b": " + USAGE_JSON,
    "in a line of another name": b"datas: " + USAGE_JSON,
    "cut off": b'data: {"choices":[],"usage":{',
    "triggered by a token": b'data: {"choices":[{"delta":{"content":"\\"usage\\" []"}}]}',
}


@pytest.mark.parametrize("end", EVENT_ENDS)
@pytest.mark.parametrize("name", USAGE)
def test_usage_event_with_any_sse_line_end_is_removed_from_the_stream(name: str, end: bytes) -> None:
    """In its own chunk, between other chunks in one read, and as content without chunks."""
    line_end = end[:2] if end.startswith(b"\r\n") else end[:1]
    event = USAGE[name].replace(b"\n", line_end) + end
    assert is_usage(event)
    one = gate()
    out = [
        one.pass_chunks(piece) for piece in (encode_chunk(TOKEN), encode_chunk(event), encode_chunk(TOKEN) + LAST_CHUNK)
    ]
    assert content(b"".join(out)) == TOKEN * 2
    assert content(gate().pass_chunks(encode_chunk(TOKEN) + encode_chunk(event) + encode_chunk(TOKEN))) == TOKEN * 2
    assert gate().pass_content(TOKEN + event + TOKEN) == TOKEN * 2
    assert content(gate(drop_usage=False).pass_chunks(encode_chunk(TOKEN) + encode_chunk(event))) == TOKEN + event


@pytest.mark.parametrize("name", KEPT)
def test_event_that_resembles_a_usage_event_is_kept_in_the_stream(name: str) -> None:
    event = KEPT[name] + b"\n\n"
    assert not is_usage(event)
    assert content(gate().pass_chunks(encode_chunk(event))) == event
    assert (
        content(gate().pass_chunks(encode_chunk(TOKEN) + encode_chunk(event) + encode_chunk(TOKEN)))
        == TOKEN + event + TOKEN
    )


def test_token_chunks_with_a_usage_field_are_forwarded_without_a_copy() -> None:
    """Some engines send the usage so far, or null, with every token."""
    content = b'data: {"choices":[{"delta":{"content":"a"}}],"usage":{"prompt_tokens":7}}\n\n'
    one, piece, run = gate(), encode_chunk(content), encode_chunk(content) * 3
    assert one.pass_chunks(piece) is piece
    assert one.pass_chunks(run) is run


@pytest.mark.parametrize("end", EVENT_ENDS)
@pytest.mark.parametrize("name", ["alone", "two lines", "a list of two lines"])
def test_usage_event_split_across_chunks_is_removed(name: str, end: bytes) -> None:
    """Both chunks in one read, each in its own read, and byte by byte."""
    line_end = end[:2] if end.startswith(b"\r\n") else end[:1]
    event = USAGE[name].replace(b"\n", line_end) + end
    for at in range(1, len(event)):
        stream = (
            encode_chunk(TOKEN) + encode_chunk(event[:at]) + encode_chunk(event[at:]) + encode_chunk(TOKEN) + LAST_CHUNK
        )
        for size in (len(stream), len(encode_chunk(TOKEN) + encode_chunk(event[:at])), 1):
            one = gate()
            out = b"".join([one.pass_chunks(stream[begin : begin + size]) for begin in range(0, len(stream), size)])
            assert content(out) + one.rest() == TOKEN * 2


def test_split_line_end_is_removed_with_the_usage_event() -> None:
    for pieces in ((b"\r\n\r", b"\n"), (b"\r\n", b"\r", b"\n"), (b"\n\r", b"", b"\n"), (b"\r\r", b"\n")):
        one = gate()
        assert [one.pass_chunks(encode_chunk(piece)) for piece in (USAGE["alone"], *pieces)] == [b""] * (
            len(pieces) + 1
        )
        assert one.pass_chunks(encode_chunk(TOKEN)) == encode_chunk(TOKEN)


def test_blank_lines_between_events_are_kept() -> None:
    """They are forwarded whether they arrive with an event or alone, and even if the event is removed."""
    usage = USAGE["alone"] + b"\n\n"
    for stream, expected in (
        (TOKEN + b"\n" + usage + TOKEN, TOKEN + b"\n" + TOKEN),
        (usage + b"\r\n" + TOKEN, b"\r\n" + TOKEN),
        (b"\n\n\n" + usage, b"\n\n\n"),
    ):
        assert gate().pass_content(stream) == expected
        one = gate()
        assert b"".join([one.pass_content(byte) for byte in one_by_one(stream)]) == expected
        assert content(gate().pass_chunks(encode_chunk(stream))) == expected


def test_unterminated_usage_event_at_end_of_stream_is_removed() -> None:
    """SSE requires the client to discard it, but not every client does."""
    for end in (b"", b"\n", b"\r\n", b"\r"):
        one = gate()
        assert content(one.pass_chunks(encode_chunk(TOKEN) + encode_chunk(USAGE["alone"] + end) + LAST_CHUNK)) == TOKEN
        assert one.rest() == b""
    one = gate(drop_usage=False)
    one.pass_chunks(encode_chunk(USAGE["alone"]))
    assert one.rest() == USAGE["alone"]


@pytest.mark.parametrize("end", EVENT_ENDS)
@pytest.mark.parametrize("missing", [0, 1])
def test_usage_event_above_size_limit_is_kept_for_any_split(end: bytes, missing: int) -> None:
    """At the size limit, and one byte above it."""
    event = USAGE["alone"] + b" " * (EVENT_BYTES_MAX + missing - len(USAGE["alone"])) + end
    stream = TOKEN + event + TOKEN
    for sizes in ([len(stream)], [EVENT_BYTES_MAX + len(TOKEN) + 2, 1, 1, 1], [1000], [60_000, 1]):
        one, out, at, number = gate(), b"", 0, 0
        while at < len(stream):
            size = sizes[number % len(sizes)]
            out += one.pass_content(stream[at : at + size])
            at, number = at + size, number + 1
        assert out == (stream if missing else TOKEN * 2)


def test_rest_of_oversized_event_is_not_treated_as_usage() -> None:
    long = b"data: " + b"x" * EVENT_BYTES_MAX
    one = gate()
    out = one.pass_content(long) + one.pass_content(b"\n" + USAGE["alone"]) + one.pass_content(b"\n\n" + TOKEN)
    assert out == long + b"\n" + USAGE["alone"] + b"\n\n" + TOKEN


def test_oversized_event_is_forwarded_unchanged_for_any_split() -> None:
    """Nothing is forwarded up to the limit; above it, everything except its last line ends."""
    long = b"data: " + b"x" * EVENT_BYTES_MAX
    for sizes in ([len(long)], [EVENT_BYTES_MAX, 6], [EVENT_BYTES_MAX + 1, 5], [40_000, 30_000], [4097] * 17):
        one, out, at = gate(), b"", 0
        for size in sizes:
            out += one.pass_content(long[at : at + size])
            at += size
        assert (out, one.whole) == (long, False)
        assert one.pass_content(b"\n") == b""


@pytest.mark.parametrize("end", EVENT_ENDS)
def test_event_is_forwarded_as_soon_as_it_is_complete(end: bytes) -> None:
    one = gate()
    for number in range(3):
        event = b"data: %d" % number + end
        assert content(one.pass_chunks(encode_chunk(event))) == event
        assert one.whole


@pytest.mark.parametrize("end", EVENT_ENDS)
def test_event_sent_byte_by_byte_is_forwarded_at_its_first_possible_end(end: bytes) -> None:
    """A CR may be half of a line end: the other half is forwarded when it arrives and does not start an event."""
    one, chunks = gate(), one_by_one(b"data: a" + end)
    first = next(at for at in range(len(end)) if len(re.findall(rb"\r\n|\n|\r", end[: at + 1])) == 2)
    for at, byte in enumerate(chunks):
        out = one.pass_content(byte)
        assert out == (b"" if at < 7 + first else b"data: a" + end[: first + 1] if at == 7 + first else byte)
    assert one.rest() == b""
    event = b"data: b" + end
    assert one.pass_content(event) == event


def one_by_one(data: bytes) -> list[bytes]:
    return [data[at : at + 1] for at in range(len(data))]


def test_line_end_split_between_two_reads_is_not_taken_as_an_empty_line() -> None:
    one = gate()
    assert one.pass_content(b"data: a\r") == b""
    assert one.pass_content(b"\ndata: b\r") == b""
    assert one.pass_content(b"\n\r\n") == b"data: a\r\ndata: b\r\n\r\n"


@pytest.mark.parametrize("end", EVENT_ENDS)
def test_usage_after_an_oversized_event_is_removed(end: bytes) -> None:
    """An event too long to hold is forwarded unfinished; a usage event after it is still recognized."""
    long, usage = b"data: " + b"x" * EVENT_BYTES_MAX, USAGE["alone"] + b"\n\n"
    for at in range(len(end) + 1):
        one = gate()
        out = one.pass_content(long + end[:at])
        out += one.pass_content(end[at:] + usage + TOKEN)
        assert dispatched(out) == dispatched(long + b"\n\n" + TOKEN)
        assert one.whole


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(
    st.lists(
        st.tuples(
            st.lists(st.sampled_from([TOKEN.strip(), USAGE["alone"], b": c", b"id: 1", b"", b"x" * 9]), max_size=3),
            st.sampled_from(LINE_ENDS),
        ),
        max_size=6,
    ),
    st.lists(st.integers(1, 90), min_size=1, max_size=9),
    st.lists(st.integers(1, 300), min_size=1, max_size=9),
    st.booleans(),
)
def test_client_sees_the_same_events_for_any_line_ends_and_splits(
    blocks: list[tuple[list[bytes], bytes]], chunks: list[int], reads: list[int], drop_usage: bool
) -> None:
    """Chunks and reads have any size; after each read, the client has the same bytes as with single-byte reads."""
    stream = b"".join(b"".join(line + end for line in lines) + end for lines, end in blocks)
    encoded = b"".join(map(encode_chunk, cut(stream, chunks)))
    one, single, out, expected = gate(drop_usage=drop_usage), gate(drop_usage=drop_usage), b"", b""
    for read in cut(encoded, reads):
        out += content(one.pass_chunks(read))
        expected += b"".join([content(single.pass_chunks(byte)) for byte in one_by_one(read)])
        assert out == expected
    out += one.rest()
    if drop_usage:
        assert dispatched(out) == [data for data in dispatched(stream) if data != USAGE_JSON]
    else:
        assert out == stream


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """Split the data into pieces of these sizes, repeatedly."""
    pieces, at = list[bytes](), 0
    while at < len(data):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(data[at : at + size])
        at += size
    return pieces


def test_chunks_after_a_split_inside_a_chunk_end_are_forwarded_unchanged() -> None:
    """A split between the end of an event and the end of its chunk: only that chunk is framed again."""
    one = encode_chunk(TOKEN)
    for at in (len(one) - 2, len(one) - 1):
        each = gate()
        first = each.pass_chunks(one + one[:at])
        second = each.pass_chunks(one[at:] + one * 5 + one[:7])
        third = each.pass_chunks(one[7:] + one * 3)
        assert (first, second, third) == (one * 2, one * 5, one * 4)


FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
TIMED = b'data: {"id":"c","choices":[],"usage":{"prompt_tokens":7},"timings":{"x":1},"y":null}\n\n'
TIMED_FINISH = FINISH[:-3] + b',"timings":{"x":1}}\n\n'
LEFT_OVER = b'data: {"id":"c","choices":[],"timings":{"x":1},"y":null}\n\n'


@pytest.mark.parametrize(
    ("events", "wanted"),
    [
        ((TOKEN, FINISH, TIMED, DONE), (TOKEN, TIMED_FINISH, DONE)),
        ((TOKEN, FINISH, TIMED), (TOKEN, TIMED_FINISH)),
        ((TOKEN, FINISH, b"data: " + USAGE_JSON + b"\n\n", DONE), (TOKEN, FINISH, DONE)),
        ((FINISH, FINISH, TIMED), (FINISH, TIMED_FINISH)),
        ((TOKEN, FINISH, DONE), (TOKEN, FINISH, DONE)),
        ((FINISH,), (FINISH,)),
        ((TOKEN, TIMED, DONE), (TOKEN, LEFT_OVER, DONE)),
        ((FINISH, TOKEN, TIMED, DONE), (FINISH, TOKEN, LEFT_OVER, DONE)),
        ((FINISH, b": keep-alive\n\n", TIMED), (FINISH, b": keep-alive\n\n", LEFT_OVER)),
    ],
)
def test_timings_of_a_removed_usage_event_move_to_adjacent_finish_chunk(
    events: tuple[bytes, ...], wanted: tuple[bytes, ...]
) -> None:
    chunks = b"".join(map(encode_chunk, events)) + LAST_CHUNK
    text = b"".join(events)
    uneven = b"".join(encode_chunk(text[at : at + 50]) for at in range(0, len(text), 50)) + LAST_CHUNK
    for framed in (chunks, uneven):
        for size in (1, 7, 60, len(encode_chunk(FINISH)), len(framed)):
            one, out = gate(), b""
            for at in range(0, len(framed), size):
                out += one.pass_chunks(framed[at : at + size])
            assert content(out + encode_chunk(one.rest())) == b"".join(wanted), size
    one, out = gate(), b""
    for event in events:
        out += one.pass_chunks(encode_chunk(event))
    assert content(out + one.pass_chunks(LAST_CHUNK) + encode_chunk(one.rest())) == b"".join(wanted)


def test_held_finish_chunk_is_forwarded_if_the_stream_breaks() -> None:
    for events in ((FINISH,), (TOKEN, FINISH), (TOKEN, FINISH, b"data: {")):
        wanted = b"".join(event for event in events if event.endswith(b"\n\n"))
        for framed in (b"".join(map(encode_chunk, events)), encode_chunk(b"".join(events))):
            for size in (1, 10, len(framed)):
                one, out = gate(), b""
                for at in range(0, len(framed), size):
                    out += one.pass_chunks(framed[at : at + size])
                chunks, last = one.release()
                assert content(out + chunks + encode_chunk(last)) == wanted
                assert one.release() == (b"", b"")
