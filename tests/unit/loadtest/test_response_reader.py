"""Responses as a client reads them: complete, failed, or broken, however the bytes are split."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadtest.response_reader import AnswerReader
from tests.support.example_budget import examples

SSE = {"content-type": "text/event-stream"}
JSON = {"content-type": "application/json"}
WORDS = [b'data: {"choices":[{"delta":{"content":"%s"}}]}\n\n' % word for word in (b"one", b" two", b" three")]
FINISH = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n'
DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error":{"message":"x","type":"server_error","code":"upstream_error"}}\n\n'
ANTHROPIC = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"type":"text_delta","text":"one"}}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)


def read(body: bytes, *, status: int = 200, headers: dict[str, str] | None = None, broken: str = "") -> AnswerReader:
    answer = AnswerReader()
    answer.head(status, SSE if headers is None else headers)
    answer.body(body)
    answer.end(broken)
    return answer


@pytest.mark.parametrize(
    ("body", "text", "reason"),
    [(b"".join([*WORDS, FINISH, DONE]), "one two three", "stop"), (ANTHROPIC, "one", "end_turn")],
    ids=["OpenAI", "Anthropic"],
)
def test_complete_openai_or_anthropic_stream_yields_its_text(body: bytes, text: str, reason: str) -> None:
    answer = read(body)
    assert (answer.text, answer.finish_reason, answer.saw_done, answer.broken) == (text, reason, True, "")


@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(st.sets(st.integers(1, 200), max_size=12))
def test_stream_text_is_independent_of_chunk_boundaries(cuts: set[int]) -> None:
    body = b": about 12 s\r\n\r\n" + b"".join([*WORDS, FINISH, DONE])
    edges = [0, *sorted(cut for cut in cuts if cut < len(body)), len(body)]
    answer = AnswerReader()
    answer.head(200, SSE)
    for begin, end in pairwise(edges):
        answer.body(body[begin:end])
    answer.end()
    assert (answer.text, answer.broken) == ("one two three", "")


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"".join([*WORDS, DONE]), "without a finish reason"),
        (b"".join([*WORDS, FINISH]), "without its last event"),
        (b"".join(WORDS), "without a finish reason"),
        (b"", "without a finish reason"),
        (WORDS[0] + WORDS[1][:20], "inside an event"),
        (b"data: {nonsense\n\n" + FINISH + DONE, "not JSON"),
    ],
)
def test_incomplete_or_malformed_stream_is_reported_as_broken(body: bytes, why: str) -> None:
    assert why in read(body).broken


@pytest.mark.parametrize(
    "document", [b'{"error":{"code":"\xff"}}', b'{"a":' * 3000 + b"1" + b"}" * 3000], ids=["not UTF-8", "deep"]
)
def test_response_that_cannot_be_decoded_is_reported_as_broken(document: bytes) -> None:
    assert read(document, status=500, headers=JSON).broken == "the document is not JSON"
    assert "not JSON" in read(b"data: " + document + b"\n\n" + FINISH + DONE).broken


def test_stream_with_error_events_reports_their_number_and_is_not_broken() -> None:
    answer = read(WORDS[0] + ERROR)
    assert (answer.errors, answer.code, answer.broken, answer.saw_done) == (1, "upstream_error", "", False)
    assert read(ERROR + ERROR).errors == 2


def test_close_after_an_error_event_is_not_a_broken_stream() -> None:
    answer = read(WORDS[0] + ERROR, broken="the connection was closed")
    assert (answer.errors, answer.broken) == (1, "")
    assert read(WORDS[0] + ERROR + WORDS[1][:20], broken="the connection was closed").broken


def test_broken_connection_marks_a_complete_stream_as_broken() -> None:
    assert (
        read(b"".join([*WORDS, FINISH, DONE]), broken="the connection was reset").broken == "the connection was reset"
    )


def test_chat_completion_and_message_json_responses_yield_their_text() -> None:
    chat = b'{"choices":[{"message":{"role":"assistant","content":"hi"},"finish_reason":"stop"}]}'
    completion = b'{"choices":[{"text":"hi","finish_reason":"stop"}]}'
    message = b'{"type":"message","content":[{"type":"text","text":"hi"}],"stop_reason":"end_turn"}'
    assert [read(body, headers=JSON).text for body in (chat, completion, message)] == ["hi", "hi", "hi"]
    assert read(chat[:-5], headers=JSON).broken == "the document is not JSON"


def test_error_response_without_an_error_object_is_marked_as_unclear() -> None:
    named = read(b'{"error":{"message":"x","type":"server_error","code":"model_starting"}}', status=503, headers=JSON)
    assert (named.errors, named.code, named.clear) == (1, "model_starting", True)
    empty = read(b"", status=502, headers={})
    assert (empty.errors, empty.code, empty.clear) == (1, "http_502", False)


def test_json_document_in_place_of_a_stream_is_a_broken_response() -> None:
    answer = AnswerReader(stream=True)
    answer.head(200, JSON)
    answer.body(b"{}")
    answer.end()
    assert answer.broken == "asked for a stream, got a document"


def test_server_timing_is_read_from_header_or_trailing_sse_comment() -> None:
    early = read(b"".join([*WORDS, FINISH, DONE]) + b": server-timing queue;dur=20, load;dur=5\n\n")
    assert (early.phases, early.cold) == ({"queue": 20.0, "load": 5.0}, True)
    warm = read(FINISH + DONE, headers={**SSE, "server-timing": "queue;dur=0.1, upstream;dur=3"})
    assert (warm.phases, warm.cold) == ({"queue": 0.1, "upstream": 3.0}, False)
    assert read(FINISH + DONE, headers={**SSE, "x-pilotlight-cold": "1"}).cold


def test_stream_comments_before_the_first_event_are_not_content() -> None:
    answer = AnswerReader(stream=True)
    answer.head(200, {"content-type": "text/event-stream"})
    for chunk in (b": waiting\n\n", b": server-timing queue;dur=20", b"000\n\n"):
        answer.body(chunk)
        assert not answer.has_content
    answer.body(b"data: {}\n\n")
    assert answer.has_content
