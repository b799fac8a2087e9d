"""Conversion of chat completions to responses of Anthropic's Messages API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects.chat_responses import EVENT_BYTES_MAX
from gateway.dialects.messages_requests import translate_messages
from gateway.dialects.messages_responses import MessagesConverter
from gateway.dialects.translated_request import ITEMS_MAX

DONE = b"data: [DONE]\n\n"


def converter(*, stream: bool = True, **members: object) -> MessagesConverter:
    body = {"model": "m", "max_tokens": 9, "messages": [], "stream": stream, **members}
    return MessagesConverter(translate_messages(json.dumps(body).encode()), "served", "msg_1")


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(finish: str | None = None, index: int = 0, **members: object) -> bytes:
    return event(choices=[{"index": index, "delta": members, "finish_reason": finish}])


def usage(**more: object) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2, **more})


def tool(index: int | None, arguments: object, name: str | None = None, id: str | None = None) -> dict[str, object]:
    return {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events; each has the name of its type."""
    found = []
    for one in data.split(b"\n\n")[:-1]:
        name, payload = one.split(b"\n")
        found.append(json.loads(payload.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


def blocks_of(data: bytes) -> list[dict[str, Any]]:
    """The blocks of a stream with their joined pieces, which must follow each other in the right order."""
    blocks: list[dict[str, Any]] = []
    is_open = False
    for one in events_of(data):
        if one["type"] == "content_block_start":
            assert (is_open, one["index"]) == (False, len(blocks))
            blocks.append(one["content_block"])
            is_open = True
        elif one["type"].startswith("content_block"):
            assert (is_open, one["index"]) == (True, len(blocks) - 1)
            if one["type"] == "content_block_stop":
                is_open = False
            else:
                (member,) = one["delta"].keys() - {"type"}
                blocks[-1][member] = blocks[-1].get(member, "") + one["delta"][member]
    assert not is_open
    return blocks


def last_of(data: bytes) -> tuple[str, str | None, dict[str, int]]:
    """Stop reason, stop sequence and usage."""
    *_, last, end = events_of(data)
    assert end == {"type": "message_stop"}
    return last["delta"]["stop_reason"], last["delta"]["stop_sequence"], last["usage"]


def test_stream_of_text_becomes_the_events_of_a_message() -> None:
    one = converter()
    opening = delta(role="assistant", content=None)
    data = one.feed(b": comment\n\n" + opening + delta(content="Hel") + delta(content="lo") + delta("stop"))
    data += one.feed(usage() + DONE)
    message: dict[str, object] = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 0, "output_tokens": 0},
    }  # fmt: skip
    assert events_of(data) == [
        {"type": "message_start", "message": message},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "content_block_stop", "index": 0},
        {
            "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
            "usage": {"input_tokens": 7, "output_tokens": 2},
        },
        {"type": "message_stop"},
    ]  # fmt: skip
    assert one.ended
    assert one.feed(delta(content="more")) == one.finish() == b""


def test_message_starts_with_the_first_chunk_of_the_engine() -> None:
    one = converter()
    assert [found["type"] for found in events_of(one.feed(delta(role="assistant")))] == ["message_start"]
    assert one.feed(delta(role="assistant")) == b""


def test_thinking_text_and_calls_become_blocks_in_their_order() -> None:
    one = converter()
    data = one.feed(
        delta(reasoning_content="h") + delta(reasoning="m", content="Well") + delta(content=".")
        + delta(tool_calls=[tool(0, "", "add", "c1")]) + delta(tool_calls=[tool(0, '{"a"')])
        + delta(tool_calls=[tool(0, ":1}"), tool(1, {"b": 2}, "sub", "c2")]) + delta("tool_calls", content="!") + DONE
    )  # fmt: skip
    assert blocks_of(data) == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "c1", "name": "add", "input": {}, "partial_json": '{"a":1}'},
        {"type": "tool_use", "id": "c2", "name": "sub", "input": {}, "partial_json": '{"b": 2}'},
        {"type": "text", "text": "!"},
    ]
    assert last_of(data)[0] == "tool_use"


def test_calls_with_one_number_but_different_ids_are_separate_blocks() -> None:
    calls = delta(tool_calls=[tool(0, "{}", "a", "c1")]) + delta(tool_calls=[tool(0, "{}", "b", "c2")])
    blocks = blocks_of(converter().feed(calls + delta("stop") + DONE))
    assert [(block["id"], block["name"]) for block in blocks] == [("c1", "a"), ("c2", "b")]


def test_call_that_repeats_its_id_and_name_stays_one_block() -> None:
    data = converter().feed(2 * delta(tool_calls=[tool(0, "1", "a", "c1")]) + DONE)
    assert [block["partial_json"] for block in blocks_of(data)] == ["11"]


def test_calls_without_ids_get_different_ones() -> None:
    calls = [tool(None, "{}", "a"), tool(None, "{}", "b")]
    first, second = blocks_of(converter().feed(delta(tool_calls=calls) + DONE))
    assert first["id"] != second["id"]
    document = {"choices": [{"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}]}
    found = json.loads(converter(stream=False).convert(200, json.dumps(document).encode()))
    assert [block["id"] for block in found["content"]] == [first["id"], second["id"]]


@pytest.mark.parametrize(
    "calls",
    [
        [tool(0, "{}")],
        [tool(0, "{", "a"), tool(1, "{}", "b"), tool(0, "}")],
        [tool(1, "{}", "a"), tool(0, "x")],
    ],
    ids=["without a name", "continued after the next one", "of a lower number"],
)  # fmt: skip
def test_call_that_no_block_can_contain_breaks_the_stream(calls: list[object]) -> None:
    one = converter()
    one.feed(delta(tool_calls=calls))
    assert one.broken
    assert one.finish() == b""


@pytest.mark.parametrize(
    ("finish", "expected"),
    [
        ("stop", "end_turn"), ("length", "max_tokens"), ("content_filter", "refusal"), ("tool_calls", "tool_use"),
        ("function_call", "tool_use"), ("abort", "end_turn"), (None, "end_turn"),
    ],
)  # fmt: skip
def test_finish_reason_becomes_the_stop_reason(finish: str | None, expected: str) -> None:
    assert last_of(converter().feed(delta(finish, content="a") + DONE))[:2] == (expected, None)
    document = {"choices": [{"message": {"content": "a"}, "finish_reason": finish}]}
    found = json.loads(converter(stream=False).convert(200, json.dumps(document).encode()))
    assert (found["stop_reason"], found["stop_sequence"]) == (expected, None)


@pytest.mark.parametrize("finish", ["stop", "tool_calls"])
def test_answer_with_a_call_has_the_stop_reason_tool_use(finish: str) -> None:
    calls = [tool(0, "{}", "a", "c")]
    assert last_of(converter().feed(delta(finish, tool_calls=calls) + DONE))[0] == "tool_use"
    document = {"choices": [{"message": {"tool_calls": calls}, "finish_reason": finish}]}
    assert json.loads(converter(stream=False).convert(200, json.dumps(document).encode()))["stop_reason"] == "tool_use"


@pytest.mark.parametrize("member", ["stop_reason", "matched_stop"])
@pytest.mark.parametrize(("value", "reason"), [("END", "stop_sequence"), ("other", "end_turn"), (7, "end_turn")])
def test_reported_stop_sequence_of_the_request_is_the_stop_reason(member: str, value: object, reason: str) -> None:
    choice = {"index": 0, "delta": {}, "finish_reason": "stop", member: value}
    found = last_of(converter(stop_sequences=["END"]).feed(event(choices=[choice]) + DONE))
    assert found[:2] == (reason, "END" if reason == "stop_sequence" else None)


def test_cached_tokens_are_not_counted_as_input() -> None:
    one = converter()
    data = one.feed(delta("stop", content="a") + usage(prompt_tokens_details={"cached_tokens": 5}) + DONE)
    assert last_of(data)[2] == {"input_tokens": 2, "cache_read_input_tokens": 5, "output_tokens": 2}


def test_pieces_are_counted_if_the_engine_sends_no_usage() -> None:
    data = converter().feed(delta(content="a") + delta(content="b") + delta("stop") + DONE)
    assert last_of(data)[2] == {"input_tokens": 0, "output_tokens": 2}


def test_choices_other_than_the_first_are_ignored() -> None:
    data = converter().feed(delta(content="a") + delta("length", 1, content="x") + delta("stop") + DONE)
    assert (blocks_of(data), last_of(data)[0]) == ([{"type": "text", "text": "a"}], "end_turn")


def test_error_event_of_the_engine_ends_the_stream_with_an_error_event() -> None:
    one = converter()
    data = one.feed(delta(content="a") + event(error={"message": "out of memory", "code": 500}) + DONE)
    error = {"type": "api_error", "message": "out of memory"}
    assert events_of(data)[-1] == {"type": "error", "error": error}
    assert one.ended
    assert one.finish() == b""


@pytest.mark.parametrize(
    "data",
    [
        b"data: {\n\n", b"data: []\n\n", b"data: \xff\n\n", b"data: " + b"[" * 100_000 + b"\n\n",
        b"data: " + b"x" * (EVENT_BYTES_MAX + 1), delta(tool_calls=[tool(0, "{}", "a") | {"id": 7}]),
    ],
)  # fmt: skip
def test_malformed_event_breaks_the_stream(data: bytes) -> None:
    one = converter()
    assert one.feed(delta(content="a"))
    one.feed(data)
    assert one.broken
    assert one.feed(DONE) == one.finish() == b""


def test_stream_without_done_marker_ends_when_the_engine_ends_it() -> None:
    one = converter()
    data = one.feed(delta("stop", content="a")[:-2])
    assert data == b""
    assert last_of(one.finish())[0] == "end_turn"
    assert last_of(converter().finish())[0] == "end_turn"


# --- documents -------------------------------------------------------------------------------------------------------

ANSWER: dict[str, object] = {
    "choices": [
        {
            "message": {
                "reasoning_content": "hm", "content": "Well.", "tool_calls": [tool(0, '{"a": "é"}', "add", "c1")],
            },
            "finish_reason": "tool_calls",
        }
    ],
    "usage": {"prompt_tokens": 7, "completion_tokens": 2},
}  # fmt: skip


def test_document_becomes_a_message() -> None:
    assert json.loads(converter(stream=False).convert(200, json.dumps(ANSWER).encode())) == {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "m",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "Well."},
            {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": "é"}},
        ],
        "stop_reason": "tool_use", "stop_sequence": None, "usage": {"input_tokens": 7, "output_tokens": 2},
    }  # fmt: skip


def test_document_for_a_stream_becomes_events() -> None:
    data = converter().convert(200, json.dumps(ANSWER).encode(), late=True)
    assert [block["type"] for block in blocks_of(data)] == ["thinking", "text", "tool_use"]
    assert last_of(data) == ("tool_use", None, {"input_tokens": 7, "output_tokens": 2})


def test_call_that_the_token_limit_cut_off_is_left_out() -> None:
    calls = [tool(0, "{}", "a", "c1"), tool(1, '{"b', "b", "c2")]
    document = {"choices": [{"message": {"content": None, "tool_calls": calls}, "finish_reason": "length"}]}
    found = json.loads(converter(stream=False).convert(200, json.dumps(document).encode()))
    assert ([block["name"] for block in found["content"]], found["stop_reason"]) == (["a"], "max_tokens")


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"{}", b'{"choices":[]}', b"[" * 100_000, b'{"error":{"message":"no"}}',
        b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"a","arguments":"[1]"}}]}}]}',
        b'{"choices":[{"message":{"tool_calls":[{"function":{"name":"a","arguments":"\\ud800"}}]}}]}',
        b'{"choices":[{"message":{}}],"x":[' + b"0," * ITEMS_MAX + b"0,0]}",
    ],
)  # fmt: skip
def test_malformed_document_breaks_the_response(body: bytes) -> None:
    one = converter(stream=False)
    assert one.convert(200, body) == b""
    assert one.broken


@pytest.mark.parametrize(
    ("status", "type"),
    [(400, "invalid_request_error"), (404, "not_found_error"), (429, "rate_limit_error"), (500, "api_error")],
)
def test_error_document_of_the_engine_gets_the_form_of_anthropic(status: int, type: str) -> None:
    error = {"type": type, "message": "too long"}
    for body in (b'{"error":{"message":"too long","type":"x"}}', b'{"message":"too long"}', b'{"detail":"too long"}'):
        assert json.loads(converter().convert(status, body)) == {"type": "error", "error": error}
        assert events_of(converter().convert(status, body, late=True)) == [{"type": "error", "error": error}]
