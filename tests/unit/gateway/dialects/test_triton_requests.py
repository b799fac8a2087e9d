"""Translation of requests of OpenAI's API to Triton's."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from autoscaler.contract import TritonEntry
from autoscaler.spec.engines import CHAT_TEMPLATES, TRITON_BACKENDS
from gateway.dialects import translated_request, triton_requests
from gateway.dialects.triton_requests import (
    COMPLETION_PATH,
    EMBEDDING_PATH,
    TritonRequest,
    translate_request,
)
from gateway.errors import CallError
from gateway.request.api_routes import CHAT

ASK = {"role": "user", "content": "Hello"}
REPORTS = {"return_num_input_tokens": True, "return_num_output_tokens": True, "return_finish_reason": True}


def entry(backend: str = "vllm", template: str = "plain") -> TritonEntry:
    return msgspec.structs.replace(TRITON_BACKENDS[backend], chat_template=CHAT_TEMPLATES[template])


def translated(path: bytes, body: object, of: TritonEntry | None = None, name: str = "served-m") -> TritonRequest:
    return translate_request(path, json.dumps(body).encode(), of or entry(), name, wants_usage=True)


def completion(backend: str = "vllm", **members: object) -> dict[str, Any]:
    """The body for Triton of a completion."""
    found = json.loads(translated(COMPLETION_PATH, {"model": "m", "prompt": "Hi", **members}, entry(backend)).body)
    assert isinstance(found, dict)
    return found


def sampling(**members: Any) -> dict[str, Any]:
    """The sampling parameters of a completion for vLLM."""
    found = json.loads(completion(**members)["sampling_parameters"])
    assert isinstance(found, dict)
    return found


def prompt(*messages: object, template: str = "plain") -> str:
    """The prompt of a chat."""
    body = translated(CHAT.engine_path, {"messages": messages or (ASK,)}, entry(template=template)).body
    text = json.loads(body)["text_input"]
    assert isinstance(text, str)
    return text


def rejected(path: bytes, of: TritonEntry | None = None, **members: Any) -> CallError:
    least: dict[bytes, dict[str, Any]] = {
        CHAT.engine_path: {"messages": [ASK]},
        COMPLETION_PATH: {"prompt": "Hi"},
        EMBEDDING_PATH: {"input": "a"},
    }
    with pytest.raises(CallError) as found:
        translated(path, {**least[path], **members}, of)
    assert found.value.status == 400
    assert "canary" not in found.value.message
    return found.value


# --- paths and inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "members", "expected"),
    [
        (CHAT.engine_path, {"messages": [ASK]}, b"/v2/models/served-m/generate"),
        (CHAT.engine_path, {"messages": [ASK], "stream": True}, b"/v2/models/served-m/generate_stream"),
        (COMPLETION_PATH, {"prompt": "Hi", "stream": None}, b"/v2/models/served-m/generate"),
        (COMPLETION_PATH, {"prompt": "Hi", "stream": True}, b"/v2/models/served-m/generate_stream"),
        (EMBEDDING_PATH, {"input": "Hi"}, b"/v2/models/served-m/infer"),
    ],
)
def test_request_goes_to_the_path_of_its_kind(path: bytes, members: dict[str, object], expected: bytes) -> None:
    made = translated(path, members)
    assert (made.target.engine_path, made.path, made.stream) == (expected, path, members.get("stream") is True)


@pytest.mark.parametrize("name", ["ns/m", "a b", "", "a%2fb", "a?b"])
def test_served_name_that_is_no_segment_of_a_path_gets_400(name: str) -> None:
    with pytest.raises(CallError) as found:
        translated(COMPLETION_PATH, {"prompt": "Hi"}, name=name)
    assert found.value.param == "model"


ALL = {
    "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 1.0, "top_k": 3, "seed": 7, "presence_penalty": 0.1,
    "frequency_penalty": 0.2, "repetition_penalty": 1.5, "stop": ["x"],
}  # fmt: skip


def test_vllm_gets_the_sampling_parameters_as_one_text() -> None:
    body = completion("vllm", **ALL, min_p=0.25)
    assert json.loads(body.pop("sampling_parameters")) == {**ALL, "min_p": 0.25}
    assert body == {"text_input": "Hi", **REPORTS, "stream": False, "exclude_input_in_output": True}


def test_tensorrt_llm_gets_an_input_for_each_member() -> None:
    renamed = {name: value for name, value in ALL.items() if name != "stop"} | {"stop_words": ["x"]}
    found = completion("tensorrt-llm", **ALL)
    assert found == {"text_input": "Hi", **REPORTS, "stream": False, "exclude_input_in_output": True, **renamed}


def test_llm_api_of_tensorrt_llm_gets_its_own_names() -> None:
    supported = {name: value for name, value in ALL.items() if name not in {"min_tokens", "repetition_penalty"}}
    assert completion("tensorrt-llm-api", **supported) == {
        "text_input": "Hi", **REPORTS, "streaming": False, "sampling_param_exclude_input_from_output": True,
        **{f"sampling_param_{name}": value for name, value in supported.items()},
    }  # fmt: skip


def test_unknown_backend_gets_the_inputs_of_both_and_one_stop_text() -> None:
    body = completion("auto", **ALL)
    assert json.loads(body.pop("sampling_parameters")) == ALL
    assert body == completion("tensorrt-llm", **ALL) | {"stop_words": "x"}


def test_unknown_backend_rejects_several_stop_sequences() -> None:
    error = rejected(COMPLETION_PATH, entry("auto"), stop=["canary", "b"])
    assert (error.param, "spec.triton.backend" in error.message) == ("stop", True)
    assert completion("tensorrt-llm", stop=["a", "b"])["stop_words"] == ["a", "b"]
    assert sampling(stop=["a", "b"])["stop"] == ["a", "b"]


@pytest.mark.parametrize(
    ("backend", "member"),
    [("tensorrt-llm", "min_p"), ("tensorrt-llm-api", "min_tokens"), ("tensorrt-llm-api", "repetition_penalty")],
)
def test_member_without_an_input_of_the_backend_is_rejected(backend: str, member: str) -> None:
    error = rejected(COMPLETION_PATH, entry(backend), **{member: 1})
    assert (error.param, member in error.message) == (member, True)


def test_stop_may_be_one_text_or_empty() -> None:
    assert sampling(stop="x")["stop"] == ["x"]
    assert "stop" not in sampling(stop=[]) | sampling(stop=None)


def test_missing_maximum_of_tokens_gets_the_default_of_the_path() -> None:
    assert sampling()["max_tokens"] == triton_requests.COMPLETION_TOKENS
    chat = json.loads(translated(CHAT.engine_path, {"messages": [ASK]}).body)
    assert json.loads(chat["sampling_parameters"])["max_tokens"] == triton_requests.CHAT_TOKENS


def test_max_completion_tokens_is_the_maximum_of_tokens() -> None:
    made = translated(CHAT.engine_path, {"messages": [ASK], "max_completion_tokens": 3, "max_tokens": 5})
    assert (json.loads(json.loads(made.body)["sampling_parameters"]), made.tokens_max) == ({"max_tokens": 3}, 3)


@pytest.mark.parametrize(("member", "value"), [("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1 << 31),
                                               ("top_k", -1), ("seed", -1), ("seed", 1 << 64), ("stop", [1]),
                                               ("temperature", "canary"), ("max_tokens", True)])  # fmt: skip
def test_number_that_an_input_cannot_hold_is_rejected(member: str, value: Any) -> None:
    assert member in rejected(COMPLETION_PATH, **{member: value}).message


def test_echo_includes_the_prompt_but_not_in_streams() -> None:
    assert completion(echo=True)["exclude_input_in_output"] is False
    assert rejected(COMPLETION_PATH, echo=True, stream=True).param == "echo"


def test_unknown_member_does_not_reach_the_model() -> None:
    found = completion("auto", lora_path_x="canary", image_url="canary", end_id=3, user="canary", metadata={"a": 1})
    assert found == completion("auto")


# --- members that cannot be translated -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("n", 2), ("best_of", 2), ("tools", [{"type": "function"}]), ("functions", [{}]), ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}), ("function_call", {"name": "canary"}), ("logprobs", True),
        ("logprobs", 0), ("logprobs", 5), ("top_logprobs", 3), ("logit_bias", {"1": 2}),
        ("response_format", {"type": "json_object"}), ("modalities", ["text", "audio"]), ("suffix", "canary"),
        ("audio", {}), ("dimensions", 3), ("guided_json", {}), ("structured_outputs", {}), ("prompt_logprobs", 1),
        ("web_search_options", {}), ("use_beam_search", True),
    ],
)  # fmt: skip
def test_member_that_cannot_be_translated_is_rejected_by_name(member: str, value: Any) -> None:
    error = rejected(CHAT.engine_path, **{member: value})
    assert (error.param, member in error.message) == (member, True)
    assert "send 1" in error.message if member in {"n", "best_of"} else "remove it" in error.message


@pytest.mark.parametrize(
    "members",
    [
        {"n": 1, "tools": [], "tool_choice": "none", "logprobs": False, "top_logprobs": 0, "logit_bias": {}},
        {"n": None, "tools": None, "tool_choice": "auto", "logprobs": None, "suffix": None, "dimensions": None},
        {"response_format": {"type": "text"}, "modalities": ["text"], "parallel_tool_calls": True},
    ],
)
def test_value_that_means_the_default_is_accepted(members: dict[str, object]) -> None:
    assert b'"text_input"' in translated(CHAT.engine_path, {"messages": [ASK], **members}).body


@pytest.mark.parametrize("value", [["a", "b"], [], [1, 2], [[1]], None, 3])
def test_completion_takes_only_one_text_as_its_prompt(value: object) -> None:
    assert "prompt" in rejected(COMPLETION_PATH, prompt=value).message


def test_list_with_one_prompt_is_that_prompt() -> None:
    assert completion(prompt=["Hallo"])["text_input"] == "Hallo"


# --- chats -----------------------------------------------------------------------------------------------------------

CONVERSATION = (
    {"role": "system", "content": "S"}, {"role": "user", "content": "A"}, {"role": "assistant", "content": "B"},
    {"role": "user", "content": "C"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            "chatml",
            (
                "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB<|im_end|>\n"
                "<|im_start|>user\nC<|im_end|>\n<|im_start|>assistant\n"
            ),
        ),
        (
            "gemma",
            (
                "<start_of_turn>user\nS\n\nA<end_of_turn>\n<start_of_turn>model\nB<end_of_turn>\n"
                "<start_of_turn>user\nC<end_of_turn>\n<start_of_turn>model\n"
            ),
        ),
        (
            "llama3",
            (
                "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
                "A<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nB<|eot_id|>"
                "<|start_header_id|>user<|end_header_id|>\n\nC<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            ),
        ),
        ("mistral", "[INST] S\n\nA [/INST] B</s>[INST] C [/INST]"),
        (
            "phi",
            "<|system|>\nS<|end|>\n<|user|>\nA<|end|>\n<|assistant|>\nB<|end|>\n<|user|>\nC<|end|>\n<|assistant|>\n",
        ),
        ("plain", "S\n\nUser: A\nAssistant: B\nUser: C\nAssistant:"),
    ],
)
def test_chat_becomes_the_prompt_of_its_template(template: str, expected: str) -> None:
    assert prompt(*CONVERSATION, template=template) == expected


def test_template_messages_sends_the_messages_as_json() -> None:
    assert json.loads(prompt(*CONVERSATION, template="messages")) == list(CONVERSATION)


def test_system_message_without_a_later_user_message_becomes_one() -> None:
    assert prompt({"role": "system", "content": "S"}, template="mistral") == "[INST] S [/INST]"


def test_parts_of_text_are_joined_and_a_developer_is_the_system() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}]}
    assert prompt({"role": "developer", "content": "S"}, parts) == "S\n\nUser: A\nB\nAssistant:"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "canary"}}]},
        {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
        {"role": "tool", "content": "canary", "tool_call_id": "a"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "canary"}]},
        {"role": "canary", "content": "a"},
    ],
)
def test_message_without_a_place_in_a_prompt_is_rejected(message: object) -> None:
    assert rejected(CHAT.engine_path, messages=[ASK, message]).param == "messages"


def test_chat_without_messages_or_with_too_many_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert rejected(CHAT.engine_path, messages=[]).param == "messages"
    too_many = [ASK] * (translated_request.MESSAGES_MAX + 1)
    assert rejected(CHAT.engine_path, messages=too_many).param == "messages"


def test_escaped_lone_surrogate_becomes_the_replacement_character() -> None:
    made = translate_request(COMPLETION_PATH, b'{"prompt":"a\\ud83d"}', entry(), "m", wants_usage=False)
    assert json.loads(made.body)["text_input"] == "a\ufffd"


# --- embeddings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "texts"), [("a", ["a"]), (["a", "b"], ["a", "b"])])
def test_texts_become_a_tensor_with_one_row_each(given: object, texts: list[str]) -> None:
    of = msgspec.structs.replace(entry(), embedding_input="TEXT")
    made = translated(EMBEDDING_PATH, {"model": "m", "input": given, "encoding_format": "base64"}, of)
    tensor = {"name": "TEXT", "shape": [len(texts), 1], "datatype": "BYTES", "data": texts}
    assert (json.loads(made.body), made.texts, made.in_base64) == ({"inputs": [tensor]}, len(texts), True)


@pytest.mark.parametrize(
    ("members", "word"),
    [
        ({"input": []}, "input"), ({"input": [1, 2]}, "input"), ({"input": None}, "input"),
        ({"input": ["a"] * (triton_requests.INPUTS_MAX + 1)}, "2,048"), ({"encoding_format": "canary"}, "base64"),
        ({"dimensions": 3}, "dimensions"), ({"stream": True}, "stream"),
    ],
)  # fmt: skip
def test_invalid_request_for_embeddings_is_rejected(members: dict[str, Any], word: str) -> None:
    assert word in rejected(EMBEDDING_PATH, **members).message


@pytest.mark.parametrize("body", [b"[]", b"{", b"\xff", b"[" * 5000, b'{"n":' + b"[" * 5000])
def test_body_that_is_not_a_json_object_is_rejected(body: bytes) -> None:
    with pytest.raises(CallError) as found:
        translate_request(COMPLETION_PATH, body, entry(), "m", wants_usage=False)
    assert found.value.status == 400


def test_body_with_too_many_items_is_rejected() -> None:
    too_many: dict[str, Any] = {"x": [0] * (translated_request.ITEMS_MAX + 2)}
    assert "members and items" in rejected(COMPLETION_PATH, **too_many).message
