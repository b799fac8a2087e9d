"""Translation of requests of OpenAI's Responses API to chat completions."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from gateway.dialects import translated_request
from gateway.dialects.responses_requests import (
    ECHO_BYTES_MAX,
    TranslatedResponses,
    check_stateless,
    translate_responses,
)
from gateway.errors import CallError

ASK: dict[str, Any] = {"role": "user", "content": "Hello"}
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": True}
CHAT_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


def translated(**members: Any) -> TranslatedResponses:
    return translate_responses(json.dumps({"model": "m", "input": "Hello", **members}).encode())


def sent(**members: Any) -> dict[str, Any]:
    """The translated body without the model and the message."""
    body: dict[str, Any] = json.loads(translated(**members).body)
    assert body.pop("model") == "m"
    return {name: value for name, value in body.items() if name != "messages" or value != [ASK]}


def messages(items: list[Any], **members: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(translated(input=items, **members).body)["messages"]
    return found


def refused(**members: Any) -> CallError:
    with pytest.raises(CallError) as found:
        translated(**members)
    assert found.value.status == 400
    return found.value


def test_text_becomes_one_message_of_the_user() -> None:
    assert sent() == {}
    made = translated()
    assert (made.model, made.stream, made.target.engine_path) == ("m", False, b"/v1/chat/completions")
    assert json.loads(translate_responses(b'{"input":"Hello"}').body) == {"messages": [ASK]}


def test_sampling_limits_and_unknown_members_are_passed_to_the_engine() -> None:
    members = {"temperature": 0.5, "top_p": 0.9, "stream": True, "min_p": 0.1, "seed": 3, "user": "u"}
    assert sent(max_output_tokens=7, **members) == {**members, "max_tokens": 7}


def test_members_that_concern_only_openai_are_dropped() -> None:
    assert (
        sent(
            store=False, background=None, previous_response_id=None, conversation=None, metadata={"a": "b"},
            prompt_cache_key="k", safety_identifier="s", service_tier="auto", truncation="disabled", include=[],
            stream_options={"include_obfuscation": False}, max_tool_calls=3, prompt=None, context_management=[],
        ) == {}
    )  # fmt: skip


@pytest.mark.parametrize(
    ("members", "param", "fix"),
    [
        ({"previous_response_id": "resp_canary"}, "previous_response_id", "send the whole conversation in input"),
        ({"conversation": {"id": "canary"}}, "conversation", "send the whole conversation in input"),
        ({"store": True}, "store", "set it to false"),
        ({"background": True}, "background", "stream it"),
        ({"prompt": {"id": "canary"}}, "prompt", "remove it"),
        ({"moderation": {"model": "canary"}}, "moderation", "remove it"),
        ({"context_management": [{"type": "compaction"}]}, "context_management", "remove it"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"reasoning": {"effort": "canary"}}, "reasoning", "none, minimal, low"),
        ({"text": {"format": {"type": "canary"}}}, "text", "json_schema"),
        ({"text": {"format": {"type": "json_schema", "schema": []}}}, "text", "object schema"),
        ({"tools": [{"type": "web_search"}]}, "tools", "the tool web_search is not supported"),
        ({"tools": [{"type": "canary"}]}, "tools", "type function"),
        ({"tools": [{"type": "function", "parameters": {}}]}, "tools", "must have a name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 1}]}, "tools", "object as parameters"),
        ({"tool_choice": "canary", "tools": [TOOL]}, "tool_choice", "auto, none, required"),
        ({"tool_choice": {"type": "web_search"}, "tools": [TOOL]}, "tool_choice", "auto, none, required"),
        ({"tool_choice": "required"}, "tool_choice", "requires tools"),
        ({"tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "requires tools"),
        ({"Input": "a"}, "input", "write input"),
    ],
)
def test_unsupported_member_is_rejected_by_name_with_a_fix(members: dict[str, Any], param: str, fix: str) -> None:
    error = refused(**members)
    assert (error.param, fix in error.message) == (param, True), error.message
    assert "canary" not in error.message


@pytest.mark.parametrize(
    ("item", "fix"),
    [
        ({"type": "item_reference", "id": "canary"}, "send the whole conversation"),
        ({"type": "web_search_call", "id": "canary"}, "items of the type message"),
        ({"type": "message", "role": "canary", "content": "a"}, "user, assistant, system or developer"),
        ({"type": "message", "role": "user"}, "items of the type message"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "canary"}]}, "input_image with an image_url"),
        ({"role": "user", "content": [{"type": "input_image", "file_id": "canary"}]}, "input_image with an image_url"),
        ({"role": "system", "content": [{"type": "input_image", "image_url": "canary"}]}, "must be text"),
        ({"type": "function_call", "name": "f", "arguments": "{}"}, "call_id"),
        ({"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "namespace": "canary"}, "namespace"),
        ({"type": "function_call_output", "call_id": "c"}, "an output"),
        ({}, "items of the type message"),
    ],
)
def test_unsupported_input_item_is_rejected_without_repeating_it(item: dict[str, Any], fix: str) -> None:
    error = refused(input=[item])
    assert (error.param, fix in error.message) == ("input", True), error.message
    assert "canary" not in error.message


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"model":"m"}', b'{"input":3}', b"[" * 10_000, b'{"input":"\xff"}'])
def test_unreadable_body_is_rejected(body: bytes) -> None:
    with pytest.raises(CallError) as found:
        translate_responses(body)
    assert found.value.status == 400


def test_stateless_check_accepts_only_false_and_null() -> None:
    check_stateless({"store": Raw(b"false"), "background": Raw(b"null"), "input": Raw(b"1")})
    for value in (b"true", b'"a"', b"{}", b""):
        with pytest.raises(CallError, match="conversation is not supported"):
            check_stateless({"conversation": Raw(value)})


def test_instructions_and_first_system_messages_become_one_system_message() -> None:
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]},
        {"type": "message", "role": "system", "content": "d"},
        ASK,
        {"role": "system", "content": "e"},
    ]
    assert messages(items, instructions="a") == [
        {"role": "system", "content": "a\n\nb\n\nc\n\nd"}, ASK, {"role": "system", "content": "e"},
    ]  # fmt: skip


def test_consecutive_items_of_the_assistant_become_one_message() -> None:
    call = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": '{"a":1}'}
    items = [
        ASK,
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": []}]},
        call,
        {**call, "call_id": "c2", "arguments": ""},
        {"type": "function_call_output", "call_id": "c1", "output": "18"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "19"}]},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
    ]
    chat_call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}
    empty = {"id": "c2", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert messages(items) == [
        ASK,
        {"role": "assistant", "content": "a", "reasoning_content": "hm", "tool_calls": [chat_call, empty]},
        {"role": "tool", "tool_call_id": "c1", "content": "18"},
        {"role": "tool", "tool_call_id": "c2", "content": "19"},
        {"role": "assistant", "content": "b"},
        {"role": "assistant", "content": "no"},
    ]


def test_summary_of_reasoning_is_used_if_it_has_no_content() -> None:
    summary = [{"type": "summary_text", "text": "a"}, {"type": "summary_text", "text": "b"}]
    items = [{"type": "reasoning", "id": "r", "summary": summary}, {"role": "assistant", "content": "c"}]
    assert messages(items) == [{"role": "assistant", "content": "c", "reasoning_content": "ab"}]
    assert messages([{"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "x"}, ASK]) == [ASK]


def test_images_keep_their_url_and_detail() -> None:
    image = {"type": "input_image", "image_url": "https://images.example/a.png", "detail": "low"}
    content = [{"type": "input_text", "text": "a"}, image, {**image, "detail": "original"}]
    url = {"url": "https://images.example/a.png"}
    assert messages([{"role": "user", "content": content}])[0]["content"] == [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {**url, "detail": "low"}},
        {"type": "image_url", "image_url": url},
    ]


def test_images_of_results_follow_the_last_result_as_a_message_of_the_user() -> None:
    def output(id: str, *parts: object) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": id, "output": list(parts)}

    image = {"type": "input_image", "image_url": "u"}
    shown = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}
    results = [{"role": "tool", "tool_call_id": id, "content": ""} for id in ("a", "b")]
    assert messages([output("a", image), output("b"), ASK]) == [*results, shown, ASK]
    assert messages([output("a", image), output("b")]) == [*results, shown]


def test_tools_and_choices_get_the_form_of_chats() -> None:
    body = sent(tools=[TOOL, {"type": "function", "name": "g", "description": "d"}], parallel_tool_calls=False)
    assert body == {
        "tools": [CHAT_TOOL, {"type": "function", "function": {"name": "g", "description": "d"}}],
        "parallel_tool_calls": False,
    }
    for choice in ("auto", "none", "required"):
        assert sent(tools=[TOOL], tool_choice=choice)["tool_choice"] == choice
    chosen = sent(tools=[TOOL], tool_choice={"type": "function", "name": "f"})["tool_choice"]
    assert chosen == {"type": "function", "function": {"name": "f"}}
    assert sent(tool_choice="auto", tools=[], parallel_tool_calls=True) == {}


def test_allowed_tools_limit_the_tools_of_the_request() -> None:
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "f"}]}
    body = sent(tools=[TOOL, {"type": "function", "name": "g"}], tool_choice=allowed)
    assert body == {"tools": [CHAT_TOOL], "tool_choice": "required"}
    refused(tools=[TOOL], tool_choice={**allowed, "mode": "canary"})


def test_format_reasoning_and_log_probabilities_get_the_form_of_chats() -> None:
    form = {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"}
    schema = {"name": "n", "schema": {"type": "object"}, "strict": True, "description": "d"}
    assert sent(text={"format": form, "verbosity": "low"}) == {
        "response_format": {"type": "json_schema", "json_schema": schema}, "verbosity": "low",
    }  # fmt: skip
    assert sent(text={"format": {"type": "json_object"}}) == {"response_format": {"type": "json_object"}}
    assert sent(text={"format": {"type": "text"}}) == {}
    assert sent(reasoning={"effort": "xhigh", "summary": "auto"}) == {"reasoning_effort": "high"}
    assert sent(reasoning={"effort": "none"}) == {"chat_template_kwargs": {"enable_thinking": False}}
    assert sent(include=["message.output_text.logprobs"], top_logprobs=2) == {"logprobs": True, "top_logprobs": 2}


def test_response_repeats_members_of_the_request_up_to_a_size() -> None:
    echo = translated(instructions="a", tools=[TOOL], metadata={"a": "b"}, temperature=1, tool_choice="none").echo
    assert json.loads(bytes(echo["tools"])) == [TOOL]  # type: ignore[call-overload] # a Raw
    assert (echo["parallel_tool_calls"], echo["truncation"], echo["text"]) == (
        True, "disabled", {"format": {"type": "text"}},
    )  # fmt: skip
    long = translated(instructions="a" * ECHO_BYTES_MAX, tools=[{**TOOL, "description": "a" * ECHO_BYTES_MAX}]).echo
    assert (long["instructions"], long["tools"], long["tool_choice"]) == (None, [], "auto")


@pytest.mark.parametrize(
    ("limit", "members"),
    [
        ("MESSAGES_MAX", {"input": [ASK] * 3}),
        ("TOOLS_MAX", {"tools": [TOOL] * 3}),
        ("IMAGES_MAX", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "u"}] * 3}]}),
        (
            "CALLS_MAX",
            {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * 3},
        ),
    ],
)
def test_request_with_too_many_parts_is_rejected(
    limit: str, members: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"gateway.dialects.responses_requests.{limit}", 2)
    assert "at most 2 are allowed" in refused(**members).message


def test_request_with_too_many_members_and_items_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_request, "ITEMS_MAX", 3)
    assert "more than 3 members and items" in refused(input=[ASK] * 3).message
