"""Translation of requests of Anthropic's Messages API to chat completions."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from gateway.dialects import translated_request
from gateway.dialects.messages_requests import TranslatedMessages, translate_messages
from gateway.errors import CallError
from gateway.request.api_routes import CHAT

ASK = {"role": "user", "content": "Hello"}


def translated(*messages: object, **members: object) -> TranslatedMessages:
    body = {"model": "m", "max_tokens": 9, "messages": list(messages or (ASK,)), **members}
    return translate_messages(json.dumps(body).encode())


def body_of(*messages: object, **members: object) -> dict[str, Any]:
    body = json.loads(translated(*messages, **members).body)
    assert isinstance(body, dict)
    return body


def messages_of(*messages: object, **members: object) -> list[dict[str, Any]]:
    found = body_of(*messages, **members)["messages"]
    assert isinstance(found, list)
    return found


def user(*blocks: object) -> dict[str, object]:
    return {"role": "user", "content": list(blocks)}


def assistant(*blocks: object) -> dict[str, object]:
    return {"role": "assistant", "content": list(blocks)}


def text(content: str, **more: object) -> dict[str, object]:
    return {"type": "text", "text": content, **more}


PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}
PNG_PART = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw=="}}
TOOL = {"name": "add", "description": "Adds.", "input_schema": {"type": "object", "properties": {}}}


def rejected(*messages: object, **members: object) -> CallError:
    with pytest.raises(CallError) as found:
        translated(*messages, **members)
    assert found.value.status == 400
    assert "canary" not in found.value.message
    return found.value


def test_plain_request_becomes_a_chat_completion() -> None:
    made = translated(ASK, {"role": "assistant", "content": "Hi"}, ASK)
    assert (made.model, made.stream, made.target, made.stop_sequences) == ("m", False, CHAT, frozenset())
    assert json.loads(made.body) == {
        "model": "m", "max_tokens": 9, "messages": [ASK, {"role": "assistant", "content": "Hi"}, ASK],
    }  # fmt: skip


def test_parameters_of_the_sampler_and_of_the_stream_are_translated() -> None:
    made = translated(
        temperature=0.5, top_p=0.9, top_k=40, stream=True, stop_sequences=["a", "b"], metadata={"user_id": "u"}
    )
    body = json.loads(made.body)
    assert (made.stream, made.stop_sequences) == (True, frozenset({"a", "b"}))
    assert {name: body[name] for name in ("temperature", "top_p", "top_k", "stream", "stop", "user")} == {
        "temperature": 0.5, "top_p": 0.9, "top_k": 40, "stream": True, "stop": ["a", "b"], "user": "u",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("system", "content"),
    [
        ("Be brief.", "Be brief."),
        ([text("Be brief.", cache_control={"type": "ephemeral"})], "Be brief."),
        ([text("a"), text("b")], [text("a"), text("b")]),
    ],
)
def test_system_prompt_becomes_the_first_message(system: object, content: object) -> None:
    assert messages_of(system=system) == [{"role": "system", "content": content}, ASK]
    assert messages_of({"role": "system", "content": system}, ASK)[0]["content"] == content


@pytest.mark.parametrize("system", [None, "", []])
def test_empty_system_prompt_adds_no_message(system: object) -> None:
    assert messages_of(system=system) == [ASK]


def test_consecutive_messages_of_one_role_are_combined() -> None:
    call = {"type": "tool_use", "id": "c", "name": "now", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "5"}
    found = messages_of(ASK, ASK, {"role": "assistant", "content": "a"}, assistant(call), ASK, user(result), ASK)
    assert [message["role"] for message in found] == ["user", "assistant", "tool", "user"]
    assert (found[0]["content"], found[3]["content"]) == ([text("Hello")] * 2, [text("Hello")] * 2)
    assert (found[1]["content"], len(found[1]["tool_calls"])) == ("a", 1)


def test_images_in_base64_and_by_url_become_image_urls() -> None:
    link = {"type": "image", "source": {"type": "url", "url": "https://images.example/a.png"}}
    (message,) = messages_of(user(text("Which?"), PNG, link))
    assert message["content"] == [
        text("Which?"), PNG_PART, {"type": "image_url", "image_url": {"url": "https://images.example/a.png"}},
    ]  # fmt: skip


def test_calls_of_tools_and_their_results_become_tool_messages() -> None:
    call = {"type": "tool_use", "id": "c1", "name": "add", "input": {"a": 1}}
    results = [
        {"type": "tool_result", "tool_use_id": "c1", "content": "2"},
        {"type": "tool_result", "tool_use_id": "c2", "content": [text("x"), PNG], "is_error": True},
        {"type": "tool_result", "tool_use_id": "c3"},
    ]
    found = messages_of(ASK, assistant(text("Well."), call, {**call, "id": "c2"}), user(*results, text("Go on.")))
    assert found[1] == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [
            {"id": id, "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}} for id in ("c1", "c2")
        ],
    }
    assert found[2:] == [
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": "x"},
        {"role": "tool", "tool_call_id": "c3", "content": ""},
        {"role": "user", "content": [PNG_PART, text("Go on.")]},
    ]


def test_call_without_text_has_no_content() -> None:
    (message,) = messages_of(assistant({"type": "tool_use", "id": "c", "name": "now", "input": {}}))
    assert (message["content"], message["tool_calls"][0]["function"]["arguments"]) == (None, "{}")


def test_earlier_thinking_is_sent_as_reasoning_unless_it_is_redacted() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "redacted_thinking", "data": "canary"},
        text("Hi"),
    ]  # fmt: skip
    (message,) = messages_of(assistant(*blocks))
    assert message == {"role": "assistant", "content": "Hi", "reasoning_content": "hm"}


def test_tools_become_functions_with_their_schemas() -> None:
    strict = {**TOOL, "type": "custom", "strict": True, "cache_control": {"type": "ephemeral"}}
    plain = {"name": "now", "input_schema": {}}
    body = body_of(tools=[strict, plain])
    function = {"name": "add", "description": "Adds.", "parameters": TOOL["input_schema"], "strict": True}
    assert body["tools"] == [
        {"type": "function", "function": function}, {"type": "function", "function": {"name": "now", "parameters": {}}},
    ]  # fmt: skip
    assert "tool_choice" not in body


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"type": "auto"}, "auto"), ({"type": "any"}, "required"), ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)  # fmt: skip
def test_tool_choice_is_translated(choice: dict[str, object], expected: object) -> None:
    body = body_of(tools=[TOOL], tool_choice=choice)
    assert (body["tool_choice"], "parallel_tool_calls" in body) == (expected, False)
    single = body_of(tools=[TOOL], tool_choice={**choice, "disable_parallel_tool_use": True})
    assert single["parallel_tool_calls"] is False


def test_tool_choice_without_tools_is_dropped_only_if_it_has_no_effect() -> None:
    assert "tool_choice" not in body_of(tool_choice={"type": "auto"})
    assert rejected(tool_choice={"type": "any"}).param == "tool_choice"


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [({"type": "enabled", "budget_tokens": 1024}, True), ({"type": "adaptive"}, True), ({"type": "disabled"}, False)],
)
def test_thinking_sets_the_argument_of_the_chat_template(thinking: object, enabled: bool) -> None:
    assert body_of(thinking=thinking)["chat_template_kwargs"] == {"enable_thinking": enabled}


def test_effort_and_schema_of_the_output_are_translated() -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    expected = {"type": "json_schema", "json_schema": {"name": "output", "schema": {"type": "object"}}}
    body = body_of(output_config={"effort": "max", "format": form})
    assert (body["response_format"], body["reasoning_effort"]) == (expected, "high")
    assert body_of(output_format=form)["response_format"] == expected
    assert "response_format" not in body_of(output_config={"effort": "low"})


def test_members_that_only_concern_anthropic_are_ignored() -> None:
    ignored: dict[str, object] = {
        "service_tier": "auto", "inference_geo": "eu", "cache_control": {}, "speed": "fast",
        "context_management": {"edits": []}, "mcp_servers": [], "container": None, "diagnostics": {}, "fallbacks": [],
        "billing_policy": "x", "fallback_credit_token": "x",
    }  # fmt: skip
    assert body_of(**ignored) == body_of()


def test_unknown_members_reach_the_engine_but_override_no_other() -> None:
    body = body_of(min_p=0.1, chat_template_kwargs={"a": 1}, stop=["x"], max_completion_tokens=3)
    assert (body["min_p"], body["chat_template_kwargs"], body["stop"]) == (0.1, {"a": 1}, ["x"])
    both = body_of(stop=["x"], stop_sequences=["y"], user="a", metadata={"user_id": "b"})
    assert (both["stop"], both["user"]) == (["y"], "b")


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"container": "canary"}, "container"),
        ({"mcp_servers": [{"url": "canary"}]}, "mcp_servers"),
        ({"thread": {"id": "canary"}}, "thread"),
        ({"compaction": {"type": "canary"}}, "compaction"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"thinking": {"type": "canary"}}, "thinking"),
        ({"tools": [{"type": "web_search_20250305", "name": "canary"}]}, "tools"),
        ({"tools": [{"name": "canary"}]}, "tools"),
        ({"tools": [TOOL], "tool_choice": {"type": "canary"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"output_config": {"effort": "canary"}}, "output_config"),
        ({"output_config": {"format": {"type": "canary"}}}, "output_config"),
        ({"system": [PNG]}, "system"),
        ({"Messages": []}, "messages"),
        ({"tools": [TOOL] * (translated_request.TOOLS_MAX + 1)}, "tools"),
    ],
)
def test_unsupported_member_is_rejected_by_name(members: dict[str, object], param: str) -> None:
    assert rejected(**members).param == param


@pytest.mark.parametrize(
    "message",
    [
        {"role": "canary", "content": "a"},
        user({"type": "document", "source": {"type": "text", "data": "canary"}}),
        user({"type": "image", "source": {"type": "file", "file_id": "canary"}}),
        user({"type": "image", "source": {"type": "base64", "media_type": "canary;", "data": "a"}}),
        user({"type": "image", "source": {"type": "base64", "media_type": "image/png"}}),
        user({"type": "tool_use", "id": "a", "name": "b", "input": {}}),
        user({"type": "tool_result", "content": "canary"}),
        user({"type": "tool_result", "tool_use_id": "a", "content": [{"type": "search_result"}]}),
        user({"type": "text"}),
        assistant({"type": "tool_use", "id": "a", "name": "b", "input": "canary"}),
        assistant({"type": "tool_use", "name": "b", "input": {}}),
        assistant({"type": "server_tool_use", "id": "a", "name": "b", "input": {}}),
        assistant({"type": "tool_result", "tool_use_id": "a"}),
        user(*[PNG] * (translated_request.IMAGES_MAX + 1)),
        assistant(*[{"type": "tool_use", "id": "a", "name": "b", "input": {}}] * (translated_request.CALLS_MAX + 1)),
    ],
)
def test_unsupported_content_is_rejected(message: object) -> None:
    assert rejected(message).param in {"messages", "images", "tool_calls"}


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"[]", b'"a"', b"{}", b'{"messages":[]}', b'{"messages":{},"max_tokens":1}', b'{"max_tokens":1}',
        b'{"messages":[{"role":"user","content":7}],"max_tokens":1}', b'{"messages":[],"max_tokens":1,"stream":"a"}',
        b'{"messages":[],"max_tokens":true}', b"\xff", b'{"messages":' + b"[" * 100_000,
        b'{"messages":[],"max_tokens":1,"x":[' + b"0," * 100_001 + b"0]}",
        b'{"max_tokens":1,"messages":[{"role":"user","content":[{"type":"tool_result","tool_use_id":"a","content":7}]}]}',
    ],
)  # fmt: skip
def test_malformed_body_gets_400(body: bytes) -> None:
    with pytest.raises(CallError) as found:
        translate_messages(body)
    assert found.value.status == 400


def test_byte_order_mark_and_lone_surrogates_are_accepted() -> None:
    body = b'\xef\xbb\xbf{"max_tokens":1,"messages":[{"role":"user","content":"a\\ud83d"}]}'
    (message,) = json.loads(translate_messages(body).body)["messages"]
    assert message["content"] == "a\ufffd"


def fill(begin: bytes, item: bytes, end: bytes) -> bytes:
    return begin + item * ((translated_request.BODY_BYTES_MAX - len(begin) - len(end)) // len(item)) + end


BEGIN = b'{"max_tokens":1,"messages":[{"role":"assistant","content":['
LARGEST = {
    "one text": fill(b'{"max_tokens":1,"messages":[{"role":"user","content":"', b"a", b'"}]}'),
    "many blocks": fill(BEGIN, b'{"type":"text","text":""},', b'{"type":"text","text":""}]}]}'),
    "many short blocks": fill(BEGIN, b'{"type":"thinking"},', b'{"type":"thinking"}]}]}'),
    "many members": fill(b'{"max_tokens":1,', b'"a":0,', b'"messages":[]}'),
    "arguments": fill(BEGIN + b'{"type":"tool_use","id":"a","name":"b","input":{"a":"', b"a", b'"}}]}]}'),
}


@pytest.mark.parametrize("name", LARGEST)
def test_largest_body_needs_at_most_ten_times_its_size_in_memory(name: str) -> None:
    tracemalloc.start()
    try:
        if name in {"one text", "arguments"}:
            assert len(translate_messages(LARGEST[name]).body) < len(LARGEST[name]) + 200
        else:
            with pytest.raises(CallError, match="members and items"):
                translate_messages(LARGEST[name])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * translated_request.BODY_BYTES_MAX
