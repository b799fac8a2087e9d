"""Translation of requests of Ollama's API to OpenAI's API."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from gateway.dialects import ollama_requests, translated_request
from gateway.dialects.ollama_requests import Translated, translate_request
from gateway.errors import CallError
from gateway.request.api_routes import CHAT, Operation, find_operation


def translated(endpoint: str, **members: object) -> Translated:
    operation = find_operation(b"POST", f"/api/{endpoint}".encode())
    assert operation is not None
    return translate_request(operation, json.dumps({"model": "m", **members}).encode())


def body_of(endpoint: str, **members: object) -> dict[str, Any]:
    body = json.loads(translated(endpoint, **members).body)
    assert isinstance(body, dict)
    return body


ASK = [{"role": "user", "content": "Hello"}]


def test_chat_request_without_a_stream_member_becomes_a_stream_request() -> None:
    made = translated("chat", messages=ASK)
    assert (made.target, made.stream, made.action, made.model) == (CHAT, True, "", "m")
    assert json.loads(made.body) == {
        "model": "m",
        "messages": ASK,
        "stream": True,
    }
    whole = translated("chat", messages=ASK, stream=False)
    assert not whole.stream
    assert json.loads(whole.body) == {"model": "m", "messages": ASK}


@pytest.mark.parametrize(("endpoint", "given"), [("chat", {"messages": ASK}), ("generate", {"prompt": "Hello"})])
def test_logprobs_of_chats_and_prompts_are_requested_of_the_engine(endpoint: str, given: dict[str, object]) -> None:
    made = body_of(endpoint, **given, logprobs=True, top_logprobs=20)
    assert (made["logprobs"], made["top_logprobs"]) == (True, 20)
    assert "top_logprobs" not in body_of(endpoint, **given, top_logprobs=2), "engines reject it without logprobs"
    for outside in (-1, 21):
        with pytest.raises(CallError, match="top_logprobs must be between 0 and 20"):
            translated(endpoint, **given, top_logprobs=outside)


@pytest.mark.parametrize(
    ("endpoint", "name", "known"),
    [("chat", "Model", "model"), ("generate", "Prompt", "prompt"), ("embed", "\u212aeep_alive", "keep_alive")],
)
def test_member_that_differs_from_a_known_name_only_in_case_is_rejected(endpoint: str, name: str, known: str) -> None:
    with pytest.raises(CallError, match=f"differs from {known} only in the case"):
        translated(endpoint, **{name: "x"})


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_lone_surrogates_become_u_fffd_and_a_byte_order_mark_is_dropped(mark: bytes) -> None:
    body = rb'{"model":"m","messages":[{"role":"user","content":"\ud83d \uDE00 \ud83d\ude00 \\ud83d \\\ud83d"}]}'
    assert CHAT_OPERATION is not None
    (message,) = json.loads(translate_request(CHAT_OPERATION, mark + body).body)["messages"]
    assert message["content"] == "\ufffd \ufffd \U0001f600 \\ud83d \\\ufffd"
    assert ollama_requests.read_shown_model(mark + rb'{"model":"m","system":"\ud83d"}') == "m"


def test_show_request_member_that_differs_only_in_case_is_rejected() -> None:
    with pytest.raises(CallError, match="differs from name only in the case"):
        ollama_requests.read_shown_model(b'{"model": "m", "Name": "other"}')


def test_ollama_options_are_translated_and_unknown_members_are_dropped() -> None:
    body = body_of(
        "chat",
        messages=ASK,
        stream=False,
        lora_path="/etc/passwd",
        options={
            "num_predict": 7, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "seed": 1, "stop": ["a"],
            "presence_penalty": 0.1, "frequency_penalty": 0.2, "repeat_penalty": 1.1, "num_ctx": 8192, "numa": True,
        },
    )  # fmt: skip
    assert body == {
        "model": "m", "messages": ASK, "max_tokens": 7, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
        "seed": 1, "stop": ["a"], "presence_penalty": 0.1, "frequency_penalty": 0.2, "repeat_penalty": 1.1,
        "repetition_penalty": 1.1,
    }  # fmt: skip


@pytest.mark.parametrize("limit", [0, -1, -2])
def test_num_predict_of_zero_or_less_sets_no_max_tokens(limit: int) -> None:
    assert "max_tokens" not in body_of("chat", messages=ASK, options={"num_predict": limit})


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("json", {"type": "json_object"}),
        (SCHEMA, {"type": "json_schema", "json_schema": {"name": "format", "schema": SCHEMA}}),
        ("", None),
        (None, None),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat", "generate"])
def test_ollama_format_is_translated_to_openai_response_format(endpoint: str, form: object, expected: object) -> None:
    ask: dict[str, object] = {"messages": ASK} if endpoint == "chat" else {"prompt": "Hello"}
    assert body_of(endpoint, format=form, **ask).get("response_format") == expected


def test_think_is_translated_to_enable_thinking_or_reasoning_effort() -> None:
    assert body_of("chat", messages=ASK, think=False)["chat_template_kwargs"] == {"enable_thinking": False}
    assert body_of("generate", prompt="a", think=True)["chat_template_kwargs"] == {"enable_thinking": True}
    assert body_of("chat", messages=ASK, think="high")["reasoning_effort"] == "high"


@pytest.mark.parametrize(
    ("image", "url"),
    [
        ("/9j/AAA", "data:image/jpeg;base64,/9j/AAA"),
        ("iVBORw0KGgo", "data:image/png;base64,iVBORw0KGgo"),
        ("R0lGODdh", "data:image/gif;base64,R0lGODdh"),
        ("UklGRg", "data:image/webp;base64,UklGRg"),
        ("data:image/png;base64,iVBORw", "data:image/png;base64,iVBORw"),
    ],
)
def test_base64_or_data_url_image_becomes_an_image_url_part(image: str, url: str) -> None:
    content = [{"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": url}}]
    asked = body_of("chat", messages=[{"role": "user", "content": "What?", "images": [image]}])
    assert asked["messages"] == [{"role": "user", "content": content}]
    assert body_of("generate", prompt="What?", images=[image])["messages"] == [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    "image",
    ["http://10.0.0.1/", "file:///etc/passwd", "HTTPS://a", "data:text/html,a", "data:image/svg+xml,<svg/>", ""],
)
def test_image_url_or_unsupported_image_data_is_rejected(image: str) -> None:
    with pytest.raises(CallError, match="base64"):
        translated("chat", messages=[{"role": "user", "content": "", "images": [image]}])


def test_tool_results_get_the_ids_of_their_tool_calls() -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": SCHEMA}}]
    calls = [
        {"function": {"name": "add", "arguments": {"a": 1, "text": "é\n"}}},
        {"function": {"name": "sub", "arguments": {}}},
        {"id": "own", "function": {"name": "add"}},
    ]
    messages = [
        *ASK,
        {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls},
        {"role": "tool", "content": "2", "tool_name": "sub"},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4", "tool_call_id": "own"},
    ]
    body = body_of("chat", messages=messages, tools=tools)
    assert body["tools"] == tools
    assistant, *results = body["messages"][1:]
    assert assistant["reasoning_content"] == "hm"
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1_0", "call_1_1", "own"]
    assert json.loads(assistant["tool_calls"][0]["function"]["arguments"]) == {"a": 1, "text": "é\n"}
    assert [call["function"]["arguments"] for call in assistant["tool_calls"][1:]] == ["{}", "{}"]
    assert [result["tool_call_id"] for result in results] == ["call_1_1", "call_1_0", "own"]


def test_generate_is_translated_to_chat_and_raw_generate_to_completion() -> None:
    made = translated("generate", prompt="Hello", system="Be brief", stream=False)
    assert made.target == CHAT
    assert json.loads(made.body)["messages"] == [{"role": "system", "content": "Be brief"}, *ASK]
    raw = translated("generate", prompt="<s>Hello", raw=True, stream=False, options={"num_predict": 2})
    assert raw.target == ollama_requests.COMPLETION
    assert json.loads(raw.body) == {"model": "m", "prompt": "<s>Hello", "max_tokens": 2}
    assert json.loads(translated("generate", prompt="a", suffix="b").body)["suffix"] == "b"


@pytest.mark.parametrize("text", ["a", ["a", "b"]])
def test_embed_request_is_translated_to_openai_with_float_encoding(text: object) -> None:
    made = translated("embed", input=text, truncate=True, dimensions=8, stream=True)
    assert (made.target, made.stream) == (ollama_requests.EMBEDDING, False)
    expected = {"model": "m", "input": text, "encoding_format": "float", "dimensions": 8}
    assert json.loads(made.body) == expected
    assert json.loads(translated("embeddings", prompt="a").body)["input"] == "a"


@pytest.mark.parametrize(
    ("keep_alive", "action"),
    [
        (None, "load"), (0, "unload"), (0.0, "unload"), ("0", "unload"), ("0s", "unload"), ("0m0s", "unload"),
        (-1, "load"), ("-1", "load"), ("5m", "load"), ("1h30m", "load"), (300, "load"), ("", "load"), ("10ms", "load"),
    ],
)  # fmt: skip
def test_request_without_prompt_loads_or_at_keep_alive_0_unloads_the_model(keep_alive: object, action: str) -> None:
    for endpoint, empty in (("chat", "messages"), ("generate", "prompt"), ("embed", "input"), ("embeddings", "prompt")):
        assert translated(endpoint, keep_alive=keep_alive).action == action
        assert (
            translated(endpoint, keep_alive=keep_alive, **{empty: [] if empty == "messages" else ""}).action == action
        )
        given: object = ASK if endpoint == "chat" else "a"
        assert translated(endpoint, keep_alive=keep_alive, **{empty: given}).action == ""


@pytest.mark.parametrize(
    ("endpoint", "members", "message"),
    [
        ("chat", {"messages": 5}, "messages"),
        ("chat", {"messages": [{"content": "a"}]}, "role"),
        ("chat", {"messages": [{"role": "canary", "content": "a"}]}, "role"),
        ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}]}, "object"),
        ("chat", {"messages": ASK, "options": {"temperature": "canary"}}, "temperature"),
        ("chat", {"messages": ASK, "format": "xml"}, "format"),
        ("chat", {"messages": ASK, "format": 1}, "format"),
        ("chat", {"messages": ASK, "think": "canary"}, "think"),
        ("chat", {"messages": ASK, "stream": "canary"}, "stream"),
        ("chat", {"keep_alive": "canary"}, "keep_alive"),
        ("chat", {"keep_alive": "5 minutes"}, "keep_alive"),
        ("chat", {"keep_alive": "1m" * 100}, "keep_alive"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "a", "raw": True, "images": ["iVBORw"]}, "images"),
        ("embed", {"input": [1, 2]}, "input"),
        ("embed", {"model": 1}, "model"),
    ],
)
def test_error_for_an_invalid_member_names_it_without_its_value(
    endpoint: str, members: dict[str, object], message: str
) -> None:
    with pytest.raises(CallError, match=message) as caught:
        translated(endpoint, **members)
    assert (caught.value.status, "canary" in caught.value.message) == (400, False)


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'"a"', b'{"model":"\xff"}', b"[" * 100_000])
def test_body_that_is_not_a_valid_json_object_is_rejected(body: bytes) -> None:
    operation = find_operation(b"POST", b"/api/chat")
    assert operation is not None
    with pytest.raises(CallError) as caught:
        translate_request(operation, body)
    assert caught.value.status == 400
    with pytest.raises(CallError):
        ollama_requests.read_shown_model(body)


def test_show_request_reads_the_model_from_model_or_name_member() -> None:
    assert (
        ollama_requests.read_shown_model(b'{"model":"a","verbose":true}')
        == ollama_requests.read_shown_model(b'{"name":"a"}')
        == "a"
    )
    with pytest.raises(CallError, match="model"):
        ollama_requests.read_shown_model(b"{}")


@pytest.mark.parametrize(
    ("members", "name"),
    [
        ({"messages": [{"role": "user", "images": ["a"] * 200}] * 2}, "images"),
        ({"messages": [{"role": "user"}] * 10_001}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {}}] * 1_001}]}, "tool_calls"),
        ({"messages": [], "tools": [1] * 1_001}, "tools"),
    ],
)
def test_request_with_too_many_items_is_rejected_before_it_is_translated(members: dict[str, object], name: str) -> None:
    with pytest.raises(CallError, match=f"{name}; at most") as caught:
        translated("chat", **members)
    assert caught.value.param == name


CHAT_OPERATION, EMBED_OPERATION = (find_operation(b"POST", f"/api/{name}".encode()) for name in ("chat", "embed"))


def fill(begin: bytes, item: bytes, end: bytes) -> bytes:
    """A body of the maximum size with as many items as fit."""
    return begin + item * ((translated_request.BODY_BYTES_MAX - len(begin) - len(end)) // len(item)) + end


LARGEST = {
    "tools": fill(b'{"tools":[', b"0,", b"0]}"),
    "messages": fill(b'{"messages":[', b'{"role":""},', b'{"role":""}]}'),
    "images": fill(b'{"messages":[{"role":"user","images":[', b'"ab",', b'""]}]}'),
    "texts with escapes": fill(b'{"tools":[', b'"\\\\\\"",', b"0]}"),
    "stop": fill(b'{"messages":[],"options":{"stop":[', b'"ab",', b'""]}}'),
    "one text": fill(b'{"messages":[{"role":"user","content":"', b",", b'"}]}'),
    "wide text": fill('{"messages":[{"role":"user","content":"😀'.encode(), b",", b'"}]}'),
    "arguments": fill(b'{"messages":[{"role":"tool","tool_calls":[{"function":{"arguments":{"":"', b'\\"', b'"}}}]}]}'),
    "open text": fill(b'{"messages":[{"role":"user","content":"', b'\\",', b""),
    "unknown member": fill(b'{"x":[', b"0,", b"0]}"),
    "embed": fill(b'{"input":[', b'"ab",', b'""]}'),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGEST)
def test_body_of_maximum_size_needs_at_most_ten_times_its_size_in_memory(name: str) -> None:
    operation = EMBED_OPERATION if name == "embed" else CHAT_OPERATION
    assert operation is not None
    body = LARGEST[name]
    assert translated_request.BODY_BYTES_MAX - 64 < len(body) <= translated_request.BODY_BYTES_MAX
    tracemalloc.start()
    try:
        if name in {"one text", "wide text", "arguments"}:
            assert len(translate_request(operation, body).body) < 2 * len(body) + 100
        else:
            with pytest.raises(CallError, match="body"):
                translate_request(operation, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10 * translated_request.BODY_BYTES_MAX


def test_commas_inside_json_strings_are_not_counted_as_items() -> None:
    text = 'a,"\\' * translated_request.ITEMS_MAX
    (message,) = body_of("chat", messages=[{"role": "user", "content": text}])["messages"]
    assert message["content"] == text
    body = json.dumps([text, *range(translated_request.ITEMS_MAX), text]).encode()
    assert translated_request.count_items(body) == translated_request.ITEMS_MAX + 1


def count_operations(act: Callable[[], object]) -> int:
    """The bytecode instructions of Python functions that run."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return count


def test_translation_steps_grow_linearly_with_the_number_of_tool_calls() -> None:
    def build(calls: int) -> tuple[Operation, bytes]:
        asks = [{"function": {"name": f"f{number}"}, "id": f"id-{number}"} for number in range(calls)]
        results = [{"role": "tool", "tool_name": f"f{number}", "tool_call_id": "x"} for number in range(9 * calls)]
        assert CHAT_OPERATION is not None
        return CHAT_OPERATION, json.dumps({"messages": [{"role": "assistant", "tool_calls": asks}, *results]}).encode()

    small, large = build(translated_request.CALLS_MAX // 10), build(translated_request.CALLS_MAX)
    few, many = count_operations(lambda: translate_request(*small)), count_operations(lambda: translate_request(*large))
    assert few * 9 < many < few * 11
