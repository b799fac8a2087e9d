"""Conversion of chat completions to responses of OpenAI's Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.dialects import responses_responses
from gateway.dialects.responses_requests import translate_responses
from gateway.dialects.responses_responses import ResponsesConverter

DONE = b"data: [DONE]\n\n"


def converter(*, stream: bool = True, **members: object) -> ResponsesConverter:
    body = {"model": "m", "input": "a", "stream": stream, **members}
    return ResponsesConverter(translate_responses(json.dumps(body).encode()), "served", "1", 7.9)


def event(**chunk: object) -> bytes:
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


def delta(finish: str | None = None, index: int = 0, logprobs: object = None, **members: object) -> bytes:
    return event(choices=[{"index": index, "delta": members, "finish_reason": finish, "logprobs": logprobs}])


def usage(**more: object) -> bytes:
    return event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 2, **more})


def tool(arguments: str, name: str | None = None, id: str | None = None, index: int = 0) -> dict[str, object]:
    return {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}


def events_of(data: bytes) -> list[dict[str, Any]]:
    """The events, which are numbered and have the name of their type."""
    found: list[dict[str, Any]] = []
    for one in data.split(b"\n\n")[:-1]:
        name, payload = one.split(b"\n")
        found.append(json.loads(payload.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
        assert found[-1]["sequence_number"] == len(found) - 1
    return found


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [one["type"].removeprefix("response.") for one in events]


def whole(message: object, finish: str = "stop", **more: object) -> bytes:
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": finish}], **more}).encode()


def document(message: object, finish: str = "stop", **more: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(converter(stream=False).convert(200, whole(message, finish, **more)))
    return found


def test_stream_of_text_has_the_events_of_one_message() -> None:
    one = converter()
    events = events_of(one.feed(delta(role="assistant", content="") + delta(content="a") + delta(content="b")))
    events = events_of(b"".join([converter_bytes(events), one.feed(delta("stop") + usage() + DONE)]))
    assert kinds(events) == [
        "created", "in_progress", "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done", "completed",
    ]  # fmt: skip
    assert [found["delta"] for found in events if found["type"] == "response.output_text.delta"] == ["a", "b"]
    created, completed = events[0]["response"], events[-1]["response"]
    assert (created["id"], created["status"], created["output"], created["usage"]) == (
        "resp_1",
        "in_progress",
        [],
        None,
    )
    assert (completed["status"], completed["model"], completed["created_at"]) == ("completed", "m", 7)
    assert completed["output"] == [events[-2]["item"]]
    assert completed["output"][0]["content"] == [
        {"type": "output_text", "text": "ab", "annotations": [], "logprobs": []}
    ]
    assert completed["usage"] == {
        "input_tokens": 7, "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0}, "output_tokens": 2,
        "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 9,
    }  # fmt: skip
    ids = {found["item_id"] for found in events if "item_id" in found}
    assert ids == {events[2]["item"]["id"]}


def converter_bytes(events: list[dict[str, Any]]) -> bytes:
    """The events as bytes again."""
    return b"".join(b"event: %b\ndata: %b\n\n" % (one["type"].encode(), json.dumps(one).encode()) for one in events)


def test_stream_of_reasoning_text_and_calls_has_one_item_for_each() -> None:
    one = converter()
    stream = delta(reasoning_content="h") + delta(content="a") + delta(tool_calls=[tool("", "f", "c1")])
    stream += delta(tool_calls=[tool('{"a"')]) + delta(tool_calls=[tool(":1}")])
    stream += delta(tool_calls=[tool("{}", "g", index=1)]) + delta("tool_calls") + DONE
    events = events_of(one.feed(stream))
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output] == ["completed"] * 4
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "h"}]
    calls = [(item["call_id"], item["name"], item["arguments"]) for item in output[2:]]
    assert calls == [("c1", "f", '{"a":1}'), ("call_1_3", "g", "{}")]
    done = [found for found in events if found["type"] == "response.function_call_arguments.done"]
    assert [(found["name"], found["arguments"], found["output_index"]) for found in done] == [
        ("f", '{"a":1}', 2), ("g", "{}", 3),
    ]  # fmt: skip
    reasoning = [name for name in kinds(events) if name.startswith("reasoning")]
    assert reasoning == ["reasoning_text.delta", "reasoning_text.done"]


@pytest.mark.parametrize(("finish", "reason"), [("length", "max_output_tokens"), ("content_filter", "content_filter")])
def test_answer_that_was_cut_off_is_incomplete(finish: str, reason: str) -> None:
    one = converter()
    events = events_of(one.feed(delta(reasoning="h") + delta(content="a") + delta(finish) + DONE))
    for response in (events[-1]["response"], document({"content": "a", "reasoning": "h"}, finish)):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": reason})
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
    assert events[-1]["type"] == "response.incomplete"


def test_engine_error_in_a_stream_becomes_a_failed_response() -> None:
    one = converter()
    events = events_of(one.feed(delta(reasoning="h") + delta(content="a") + event(error={"message": "no"})))
    assert (kinds(events)[-1], one.ended, one.broken) == ("failed", True, False)
    response = events[-1]["response"]
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "no"})
    assert [item["type"] for item in response["output"]] == ["reasoning"]


def test_cached_and_reasoning_tokens_are_reported() -> None:
    more = {"prompt_tokens_details": {"cached_tokens": 3}, "completion_tokens_details": {"reasoning_tokens": 1}}
    found = document({"content": "a"}, usage={"prompt_tokens": 7, "completion_tokens": 2, **more})["usage"]
    assert (found["input_tokens_details"], found["output_tokens_details"]) == (
        {"cached_tokens": 3, "cache_write_tokens": 0}, {"reasoning_tokens": 1},
    )  # fmt: skip


def test_pieces_are_counted_if_the_engine_sends_no_usage() -> None:
    one = converter()
    events = events_of(one.feed(delta(content="a") + delta(content="b")) + one.finish())
    assert events[-1]["response"]["usage"]["output_tokens"] == 2


def test_log_probabilities_are_in_the_deltas_and_in_the_text() -> None:
    def logprob(token: str) -> dict[str, Any]:
        return {"token": token, "logprob": -1, "bytes": [97], "top_logprobs": []}

    one = converter(include=["message.output_text.logprobs"])
    stream = b"".join(delta(content=token, logprobs={"content": [logprob(token)]}) for token in "ab")
    events = events_of(one.feed(stream + DONE))
    assert [found["logprobs"] for found in events if found["type"] == "response.output_text.delta"] == [
        [logprob("a")], [logprob("b")],
    ]  # fmt: skip
    (item,) = events[-1]["response"]["output"]
    assert item["content"][0]["logprobs"] == [logprob("a"), logprob("b")]


def test_document_is_the_response_of_the_last_event() -> None:
    message = {
        "content": "a",
        "reasoning": "h",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": {}}}],
    }
    found = document(message, "tool_calls")
    events = events_of(converter().convert(200, whole(message, "tool_calls")))
    assert found == events[-1]["response"]
    assert [item["type"] for item in found["output"]] == ["reasoning", "message", "function_call"]
    assert document({"content": None})["output"] == []


def test_line_ends_in_repeated_members_do_not_end_the_event() -> None:
    body = b'{"input":"a","stream":true,"tools":[\r\n{"type":"function",\n"name":"f"}\r\n]}'
    one = ResponsesConverter(translate_responses(body), "served", "1", 0)
    events = events_of(one.finish())
    assert events[0]["response"]["tools"] == [{"type": "function", "name": "f"}]
    assert events[0]["response"]["model"] == "served"


def test_further_choices_are_ignored() -> None:
    one = converter()
    events = events_of(one.feed(delta(content="a") + delta(content="x", index=1)) + one.finish())
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == "a"


@pytest.mark.parametrize(
    "stream",
    [
        delta(tool_calls=[tool("{}")]),
        delta(tool_calls=[tool("{", "f")]) + delta(content="a") + delta(tool_calls=[tool("}")]),
        b"data: {\n\n",
    ],
)
def test_unusable_stream_is_broken(stream: bytes) -> None:
    one = converter()
    one.feed(stream)
    assert one.broken
    assert one.finish() == b""


def test_answer_above_the_memory_limit_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_responses, "KEPT_BYTES_MAX", 2000)
    one = converter()
    one.feed(delta(content="a" * 900))
    assert not one.broken
    one.feed(delta(content="a" * 900))
    assert one.broken


@pytest.mark.parametrize("body", [b"x", b"{}", b'{"choices":[]}', b'{"error":{"message":"no"}}', b'{"choices":[1]}'])
def test_unusable_document_is_broken(body: bytes) -> None:
    for stream in (False, True):
        one = converter(stream=stream)
        assert (one.convert(200, body), one.broken) == (b"", True)


@pytest.mark.parametrize(
    ("status", "type"), [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error")]
)
def test_engine_error_gets_the_form_of_openai(status: int, type: str) -> None:
    body = b'{"error":{"message":"too long"}}'
    error = {"message": "too long", "type": type, "code": None, "param": None}
    assert json.loads(converter().convert(status, body)) == {"error": error}
    late = converter().convert(status, body, late=True)
    name, payload = late.split(b"\n")[:2]
    assert name == b"event: error"
    assert json.loads(payload.removeprefix(b"data: ")) == {**error, "type": "error", "error": error}
