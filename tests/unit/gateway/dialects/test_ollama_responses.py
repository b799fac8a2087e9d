"""Conversion of OpenAI responses to those of Ollama's API."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.dialects.chat_responses import EVENT_BYTES_MAX, error_text
from gateway.dialects.ollama_requests import translate_request
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.request.api_routes import find_operation
from gateway.server.translated_call import DOCUMENT_BYTES_MAX

DURATIONS = {"total_duration": 5, "load_duration": 1, "prompt_eval_duration": 2, "eval_duration": 3}
BODIES: dict[str, dict[str, object]] = {
    "chat": {"messages": [{"role": "user", "content": "a"}]},
    "generate": {"prompt": "a"},
    "embed": {"input": "a"},
    "embeddings": {"prompt": "a"},
}


def converter(endpoint: str = "chat", *, stream: bool = True, **members: object) -> ReplyConverter:
    operation = find_operation(b"POST", f"/api/{endpoint}".encode())
    assert operation is not None
    body = json.dumps({"model": "m", "stream": stream, **BODIES[endpoint], **members}).encode()
    return ReplyConverter(translate_request(operation, body), "m", lambda: "now", lambda: DURATIONS)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(finish: str | None = None, **members: object) -> bytes:
    return event(choices=[{"index": 0, "delta": members, "finish_reason": finish}])


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2})


def lines_of(data: bytes) -> list[dict[str, Any]]:
    assert not data or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def message(content: str, **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


def test_chat_stream_becomes_json_lines_that_end_with_token_counts() -> None:
    one = converter()
    opening = delta(role="assistant", content=None)
    data = one.feed(
        b": comment\n\n" + opening + delta(content="Hel") + delta(content="lo") + delta("stop") + USAGE + DONE
    )
    base = {"model": "m", "created_at": "now"}
    assert lines_of(data) == [
        {**base, "message": message("Hel"), "done": False},
        {**base, "message": message("lo"), "done": False},
        {
            **base, "message": message(""), "done": True, "done_reason": "stop", **DURATIONS, "prompt_eval_count": 7,
            "eval_count": 2,
        },
    ]  # fmt: skip
    assert one.ended
    assert one.feed(delta(content="more")) == one.finish() == b""


def test_generate_stream_lines_contain_response_instead_of_message() -> None:
    for chunk in (delta("length", content="a"), event(choices=[{"text": "a", "finish_reason": "length"}])):
        first, last = lines_of(converter("generate").feed(chunk + DONE))
        assert first == {"model": "m", "created_at": "now", "response": "a", "done": False}
        assert (last["response"], last["done_reason"]) == ("", "length")
        assert "eval_count" not in last, "the engine sent no usage"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_delta_is_returned_in_the_thinking_member(name: str) -> None:
    assert lines_of(converter().feed(delta(**{name: "hm"})))[0]["message"] == message("", thinking="hm")
    assert lines_of(converter("generate").feed(delta(**{name: "hm"})))[0]["thinking"] == "hm"


def tool(index: int, arguments: object, name: str | None = None, id: str | None = None) -> dict[str, object]:
    return {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}


def test_tool_call_deltas_are_merged_into_one_line_with_object_arguments() -> None:
    one = converter()
    assert (
        one.feed(delta(tool_calls=[tool(0, '{"a"', "add", "c1")]) + delta(tool_calls=[tool(0, ': "\\u00e9"}')])) == b""
    )
    assert one.feed(delta(tool_calls=[tool(1, "", "now", "c2"), tool(2, {"b": 1}, "sub")])) == b""
    called, last = lines_of(one.feed(delta("tool_calls") + USAGE + DONE))
    assert called["message"]["tool_calls"] == [
        {"id": "c1", "function": {"index": 0, "name": "add", "arguments": {"a": "é"}}},
        {"id": "c2", "function": {"index": 1, "name": "now", "arguments": {}}},
        {"function": {"index": 2, "name": "sub", "arguments": {"b": 1}}},
    ]
    assert (called["done"], last["done"], last["done_reason"]) == (False, True, "stop")


def test_incomplete_tool_call_is_dropped_at_token_limit_else_breaks_stream() -> None:
    half = delta(tool_calls=[tool(0, '{"a', "add")])
    (last,) = lines_of(converter().feed(half + delta("length") + DONE))
    assert last["done_reason"] == "length"
    one = converter()
    assert one.feed(half + delta("tool_calls") + DONE) == b""
    assert one.broken


def test_error_event_of_the_engine_ends_the_stream_with_an_error_line() -> None:
    one = converter()
    data = one.feed(delta(content="a") + event(error={"message": "out of memory", "code": 500}) + DONE)
    assert lines_of(data)[1:] == [{"error": "out of memory"}]
    assert one.ended
    assert one.finish() == b""


def test_stream_without_done_marker_ends_with_a_line_marked_done() -> None:
    one = converter()
    assert len(lines_of(one.feed(delta("stop", content="a")[:-1]))) == 0
    assert [line["done"] for line in lines_of(one.finish())] == [False, True]


@pytest.mark.parametrize("bad", [b"data: {\n\n", b'data: {"choices": 5}\n\n', b"data: \xff\n\n", b"data: []\n\n"])
def test_event_that_is_not_a_valid_chunk_marks_the_stream_as_broken(bad: bytes) -> None:
    one = converter()
    assert len(lines_of(one.feed(delta(content="a") + bad + delta(content="b")))) == 1
    assert one.broken
    assert one.feed(DONE) == one.finish() == b""


def test_stream_is_broken_if_an_event_or_its_tool_calls_exceed_the_limit() -> None:
    one = converter()
    piece = b"data: " + b"x" * (EVENT_BYTES_MAX // 8)
    fed = sum(1 for _ in range(20) if not one.broken and one.feed(piece) == b"" and not one.broken)
    assert one.broken
    assert fed < 9
    one = converter()
    part = delta(tool_calls=[tool(0, "x" * 1000)])
    for _ in range(EVENT_BYTES_MAX // 1000 + 1):
        one.feed(part)
    assert one.broken
    many = converter()
    for number in range(EVENT_BYTES_MAX // 64 + 1):
        many.feed(delta(tool_calls=[tool(number, "")]))
    assert many.broken, "empty tool calls count too"


STREAM = b"".join(
    (
        b": hello\n\n",
        delta(content="a\u2028\r\n"),
        b"id: 1\r\n" + delta(content="b").replace(b"\n", b"\r\n"),
        delta(content="c").replace(b"\n", b"\r"),
        b'data: {"choices":\ndata: [{"delta":{"content":"d"}}]}\n\n\n',
        USAGE,
        DONE,
    )
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_converted_lines_are_equal_for_any_split_of_the_stream(cuts: list[int]) -> None:
    one, at, out = converter(), 0, b""
    for cut in [*sorted(cuts), len(STREAM)]:
        out += one.feed(STREAM[at:cut])
        at = cut
    texts = [line["message"]["content"] for line in lines_of(out + one.finish())]
    assert texts == ["a\u2028\r\n", "b", "c", "d", ""]


def whole(endpoint: str, status: int = 200, **document: object) -> dict[str, Any]:
    one = converter(endpoint, stream=False)
    found = json.loads(one.convert(status, json.dumps(document).encode()))
    assert isinstance(found, dict)
    return found


COUNTED = {"prompt_tokens": 7, "completion_tokens": 2}


def test_unstreamed_chat_response_has_thinking_tool_calls_and_counts() -> None:
    said = {
        "content": None,
        "reasoning": "hm",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}],
    }
    found = whole("chat", choices=[{"message": said, "finish_reason": "tool_calls"}], usage=COUNTED)
    calls = [{"id": "c", "function": {"index": 0, "name": "f", "arguments": {"a": 1}}}]
    assert found["message"] == message("", thinking="hm", tool_calls=calls)
    assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "stop", 2)
    assert found["total_duration"] == 5


def test_log_probabilities_of_a_chat_response_are_returned_unchanged() -> None:
    rows = [{"token": "a", "logprob": -0.5, "bytes": [97], "top_logprobs": []}]
    assert whole("chat", choices=[{"message": {"content": "a"}, "logprobs": {"content": rows}}])["logprobs"] == rows


def test_completion_text_becomes_the_response_member_of_generate() -> None:
    assert whole("generate", choices=[{"text": "a", "finish_reason": "length"}])["response"] == "a"
    assert whole("generate", choices=[{"message": {"content": "a"}}])["response"] == "a"


def test_embeddings_are_sorted_by_input_index_with_unchanged_numbers() -> None:
    rows = [{"index": 1, "embedding": [1, 2.50]}, {"index": 0, "embedding": [1e-7]}]
    found = whole("embed", data=rows, usage={"prompt_tokens": 3})
    assert found == {
        "model": "m", "embeddings": [[1e-7], [1, 2.5]], "total_duration": 5, "load_duration": 1, "prompt_eval_count": 3,
    }  # fmt: skip
    assert whole("embeddings", data=rows[1:]) == {"embedding": [1e-7]}


@pytest.mark.parametrize(
    ("dimensions", "given", "expected"),
    [
        (2, [3, 4, 5], [0.6, 0.8]), (2, [0, 0, 1], [0, 0]), (3, [3, 4, 5], [3, 4, 5]), (9, [3, 4, 5], [3, 4, 5]),
        (-1, [3, 4, 5], [3, 4, 5]),
    ],
)  # fmt: skip
def test_vectors_longer_than_dimensions_are_cut_and_normalized(
    dimensions: int, given: list[float], expected: list[float]
) -> None:
    body = json.dumps({"data": [{"index": 0, "embedding": given}]}).encode()
    assert json.loads(converter("embed", dimensions=dimensions).convert(200, body))["embeddings"] == [expected]


@pytest.mark.parametrize("vector", ['"AAAA,AAAA"', "[1,{}]", "[[1,2],3]"])
def test_vector_to_be_cut_that_is_no_list_of_numbers_breaks_the_response(vector: str) -> None:
    one = converter("embed", dimensions=1)
    assert one.convert(200, b'{"data":[{"embedding":%b}]}' % vector.encode()) == b""
    assert one.broken


@pytest.mark.parametrize("endpoint", BODIES)
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b"{}", b'{"choices":[]}', b'{"choices":5}', b"[" * 100_000]
)
def test_engine_body_that_is_not_a_valid_response_is_marked_broken(endpoint: str, body: bytes) -> None:
    one = converter(endpoint, stream=False)
    assert one.convert(200, body) == b""
    assert one.broken


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"error":{"message":"too long","code":400}}', "too long"),
        (b'{"error":"too long"}', "too long"),
        (b'{"object":"error","message":"too long"}', "too long"),
        (b'{"detail":"too long"}', "too long"),
        (b'{"detail":[{"loc":["body"]}]}', "rejected"),
        (b"<html>", "rejected"),
        (b"", "rejected"),
        (b'{"error":null}', "rejected"),
    ],
)
def test_engine_error_is_returned_as_an_ollama_error_with_a_message(body: bytes, text: str) -> None:
    assert text in error_text(body)
    assert json.loads(converter().convert(400, body)) == {"error": error_text(body)}


def test_load_or_unload_response_has_the_format_of_its_endpoint() -> None:
    assert json.loads(converter("generate").loaded("load"))["done_reason"] == "load"
    assert json.loads(converter("chat").loaded("unload"))["message"] == message("")
    assert json.loads(converter("embed").loaded("load")) == {"model": "m", "embeddings": []}
    assert json.loads(converter("embeddings").loaded("load")) == {"embedding": []}


def test_response_with_a_null_error_member_is_converted_as_a_success() -> None:
    choice = {"index": 0, "message": {"content": "a"}, "finish_reason": "stop"}
    made = json.loads(converter(stream=False).convert(200, json.dumps({"error": None, "choices": [choice]}).encode()))
    assert made["message"] == message("a")


@pytest.mark.parametrize("stream", [True, False])
def test_tool_arguments_that_are_not_utf8_break_the_response(stream: bool) -> None:
    tool = b'{"tool_calls":[{"index":0,"function":{"name":"f","arguments":{"a":"\xff"}}}]}'
    made = converter(stream=stream)
    if stream:
        assert made.feed(b'data: {"choices":[{"index":0,"delta":' + tool + b"}]}\n\n") == b""
    else:
        assert made.convert(200, b'{"choices":[{"index":0,"message":' + tool + b"}]}") == b""
    assert made.broken


@pytest.mark.parametrize(
    ("endpoint", "begin", "item"),
    [("chat", b'{"choices":[{}', b",{}"), ("embed", b'{"data":[{"embedding":0}', b',{"embedding":0}')],
)
def test_invalid_response_of_maximum_size_needs_at_most_4_times_its_size(
    endpoint: str, begin: bytes, item: bytes
) -> None:
    body = begin + item * ((DOCUMENT_BYTES_MAX - len(begin) - 2) // len(item)) + b"]}"
    made = converter(endpoint, stream=False)
    tracemalloc.start()
    try:
        assert (made.convert(200, body), made.broken) == (b"", True)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * DOCUMENT_BYTES_MAX


def test_embedding_of_the_maximum_response_size_is_converted() -> None:
    vector = b"[" + b"0.125," * (DOCUMENT_BYTES_MAX // 6 - 100) + b"0]"
    made = converter("embed", stream=False)
    assert vector in made.convert(200, b'{"data":[{"embedding":%b}]}' % vector)


def test_event_in_tiny_pieces_is_not_copied_for_each_piece() -> None:
    made, size = converter(), EVENT_BYTES_MAX // 2
    made.feed(b"data: ")
    held = made._held
    for _ in range(1000):
        made.feed(b" " * (size // 1000))
    assert made._held is held
    assert size - 1000 < len(held) <= size + 6
