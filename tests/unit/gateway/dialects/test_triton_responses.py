"""Conversion of Triton's responses to those of OpenAI's API, and further to those of Anthropic and Ollama."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import pytest

from autoscaler.spec.engines import TRITON_BACKENDS
from gateway.dialects import translated_request, triton_responses
from gateway.dialects.chat_responses import EVENT_BYTES_MAX, ChainedConverter
from gateway.dialects.messages_requests import translate_messages
from gateway.dialects.messages_responses import MessagesConverter
from gateway.dialects.ollama_requests import COMPLETION, EMBEDDING, translate_request
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.dialects.triton_requests import COMPLETION_PATH, EMBEDDING_PATH
from gateway.dialects.triton_requests import translate_request as translate_for_triton
from gateway.dialects.triton_responses import TritonConverter
from gateway.request.api_routes import CHAT, find_operation

Json = dict[str, Any]


def converter(path: bytes = CHAT.engine_path, *, wants_usage: bool = False, **members: object) -> TritonConverter:
    least: Json = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": ["a", "b"], "max_tokens": 5}
    body = json.dumps({**least, **members}).encode()
    request = translate_for_triton(path, body, TRITON_BACKENDS["vllm"], "m", wants_usage=wants_usage)
    return TritonConverter(request, "asked-m", "id1", 7)


def event(**members: object) -> bytes:
    return b"data: %b\n\n" % json.dumps({"model_name": "m", "model_version": "1", **members}).encode()


def reported(text: str, tokens: int = 1, finish: str = "None") -> bytes:
    """An event with the outputs that the gateway requests."""
    return event(text_output=text, num_input_tokens=3, num_output_tokens=tokens, finish_reason=finish)


def events_of(body: bytes) -> list[Any]:
    """The data of the events of a stream, which ends properly."""
    *events, last = body.removesuffix(b"\n\n").split(b"\n\n")
    assert last == b"data: [DONE]"
    return [json.loads(one.removeprefix(b"data: ")) for one in events]


def stream(of: TritonConverter, *events: bytes) -> list[Any]:
    found = events_of(b"".join(map(of.feed, events)) + of.finish())
    assert (of.broken, of.ended) == (False, True)
    return found


# --- streams ---------------------------------------------------------------------------------------------------------


def test_stream_of_a_chat_has_the_role_first_and_the_reason_last() -> None:
    found = stream(converter(stream=True), reported("Hel"), reported("lo", finish="stop"))
    choices = [one["choices"][0] for one in found]
    assert [one["delta"] for one in choices] == [
        {"role": "assistant", "content": ""}, {"content": "Hel"}, {"content": "lo"}, {},
    ]  # fmt: skip
    assert [one["finish_reason"] for one in choices] == [None, None, None, "stop"]
    for one in found:
        assert (one["id"], one["object"], one["created"], one["model"]) == (
            "chatcmpl-id1", "chat.completion.chunk", 7, "asked-m",
        )  # fmt: skip


def test_stream_of_a_completion_has_texts() -> None:
    found = stream(converter(COMPLETION_PATH, stream=True), reported("Hel"), reported("lo"))
    assert [one["choices"][0]["text"] for one in found] == ["Hel", "lo", ""]
    assert {(one["id"], one["object"]) for one in found} == {("cmpl-id1", "text_completion")}
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


def test_stream_may_arrive_in_any_pieces() -> None:
    body = reported("Größe") + reported("", finish="length")
    for size in range(1, 40):
        of = converter(stream=True)
        parts = [body[at : at + size] for at in range(0, len(body), size)]
        assert stream(of, *parts) == stream(converter(stream=True), body)


def test_usage_is_sent_at_the_end_only_if_it_was_requested() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    found = stream(converter(stream=True, wants_usage=True), reported("a"), reported("b", tokens=2))
    assert (found[-1]["choices"], found[-1]["usage"]) == ([], usage)
    of = converter(stream=True)
    assert all("usage" not in one for one in stream(of, reported("a"), reported("b", tokens=2)))
    assert json.loads(b"{%b}" % of.token_counts()) == {"usage": usage}


def test_pieces_of_a_stream_are_counted_without_token_counts() -> None:
    found = stream(converter(stream=True, wants_usage=True), *(event(text_output=text) for text in ("a", "", "b")))
    assert found[-1]["usage"] == {"prompt_tokens": 0, "completion_tokens": 2, "total_tokens": 2}


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        ({"finish_reason": "length"}, "length"), ({"finish_reason": ["stop"], "num_output_tokens": 5}, "stop"),
        ({"num_output_tokens": 5}, "length"), ({"num_output_tokens": [4]}, "stop"), ({}, "stop"),
        ({"finish_reason": "abort", "num_output_tokens": 1}, "stop"),
    ],
)  # fmt: skip
def test_finish_reason_is_reported_or_follows_from_the_token_count(outputs: Json, expected: str) -> None:
    found = stream(converter(stream=True), event(text_output="a", **outputs))
    assert found[-1]["choices"][0]["finish_reason"] == expected
    document = converter().convert(200, json.dumps({"text_output": "a", **outputs}).encode())
    assert json.loads(document)["choices"][0]["finish_reason"] == expected


def test_stream_without_events_is_an_empty_answer() -> None:
    found = stream(converter(stream=True))
    assert [one["choices"][0]["delta"] for one in found] == [{"role": "assistant", "content": ""}, {}]


def test_error_event_ends_the_stream_without_done() -> None:
    of = converter(stream=True)
    out = of.feed(reported("a") + event(error="out of blocks") + reported("b")) + of.finish()
    assert (of.ended, of.broken, b"[DONE]" in out, out.count(b"\n\n")) == (True, False, False, 3)
    error = json.loads(out.split(b"\n\n")[-2].removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"]) == ("out of blocks", "upstream_error")


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"text_output":3}', b"\xff", b"x" * (EVENT_BYTES_MAX + 1)])
def test_event_that_is_no_response_of_generate_breaks_the_stream(data: bytes) -> None:
    of = converter(stream=True)
    of.feed(b"data: " + data + b"\n\n")
    assert (of.broken, of.finish()) == (True, b"")


# --- documents -------------------------------------------------------------------------------------------------------


def document(text: object = "Hi", **outputs: object) -> bytes:
    return json.dumps({"model_name": "m", "text_output": text, **outputs}).encode()


def test_response_to_a_chat_is_one_message() -> None:
    found = json.loads(converter().convert(200, document(num_input_tokens=3, num_output_tokens=2)))
    assert found == {
        "id": "chatcmpl-id1", "object": "chat.completion", "created": 7, "model": "asked-m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hi"}, "logprobs": None,
                     "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
    }  # fmt: skip


def test_response_to_a_completion_is_one_text() -> None:
    found = json.loads(converter(COMPLETION_PATH).convert(200, document(["Hi"])))
    assert (found["object"], found["choices"][0]["text"], "usage" in found) == ("text_completion", "Hi", False)


@pytest.mark.parametrize("body", [b"", b"{}", b"[]", b"{", b'{"text_output":null}', b'{"text_output":{}}', b"\xff"])
def test_response_without_a_text_is_broken(body: bytes) -> None:
    of = converter()
    assert (of.convert(200, body), of.broken) == (b"", True)


def test_document_for_a_stream_becomes_events() -> None:
    of = converter(stream=True)
    assert [one["choices"][0]["delta"].get("content") for one in events_of(of.convert(200, document()))] == [
        "",
        "Hi",
        None,
    ]


@pytest.mark.parametrize(
    ("status", "code", "type"),
    [(400, "invalid_request", "invalid_request_error"), (500, "upstream_error", "server_error")],
)
@pytest.mark.parametrize("body", [b'{"error":"too long"}', b'data: {"error":"too long"}\n\n'])
def test_error_of_triton_gets_the_form_of_openai(body: bytes, status: int, code: str, type: str) -> None:
    of = converter(stream=True)
    error = json.loads(of.convert(status, body))["error"]
    assert error == {"message": "too long", "type": type, "code": code, "param": None}
    assert of.status == 0
    late = converter(stream=True).convert(status, body, late=True)
    assert json.loads(late.removeprefix(b"data: ")) == {"error": error}


@pytest.mark.parametrize("path", [CHAT.engine_path, EMBEDDING_PATH])
def test_error_with_status_200_gets_500(path: bytes) -> None:
    of = converter(path)
    found = json.loads(of.convert(200, b'{"error":"generate expects model to produce exactly 1 response"}'))
    assert (of.status, found["error"]["message"][:16], of.broken) == (500, "generate expects", False)


# --- embeddings ------------------------------------------------------------------------------------------------------


def tensor(data: list[float], shape: list[int], datatype: str = "FP32") -> Json:
    return {"name": "embedding", "datatype": datatype, "shape": shape, "data": data}


def vectors(*outputs: Json, **members: Any) -> Json | None:
    """The converted response; None if it is broken."""
    of = converter(EMBEDDING_PATH, **members)
    body = of.convert(200, json.dumps({"outputs": list(outputs)}).encode())
    assert of.broken == (not body)
    found: Json | None = json.loads(body) if body else None
    return found


@pytest.mark.parametrize("shape", [[2, 3], [2, 1, 3]])
def test_rows_of_a_tensor_are_the_vectors(shape: list[int]) -> None:
    labels: Json = {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}
    found = vectors(labels, tensor([1, 2, 3, 4, 5, 6.5], shape))
    assert found == {
        "object": "list", "model": "asked-m", "usage": {"prompt_tokens": 0, "total_tokens": 0},
        "data": [
            {"object": "embedding", "index": 0, "embedding": [1.0, 2.0, 3.0]},
            {"object": "embedding", "index": 1, "embedding": [4.0, 5.0, 6.5]},
        ],
    }  # fmt: skip


def test_vectors_in_base64_are_little_endian_floats() -> None:
    found = vectors(tensor([0.5, 2, -1, 4], [2, 2]), encoding_format="base64")
    assert found is not None
    texts = [one["embedding"] for one in found["data"]]
    assert [struct.unpack("<2f", base64.b64decode(text)) for text in texts] == [(0.5, 2.0), (-1.0, 4.0)]


@pytest.mark.parametrize(
    "outputs",
    [
        (), (tensor([1], [1, 1]),), (tensor([1, 2, 3], [2, 2]),), (tensor([], [2, 0]),), (tensor([1, 2], [2]),),
        (tensor([1, 2], [2, 1], "INT32"),), ({"name": "a", "datatype": "FP32", "shape": [2, 1], "data": ["x", "y"]},),
        ({"name": "a", "datatype": "FP32", "shape": [2, 1]},), (tensor([1, 2], [-1, -2]),),
    ],
)  # fmt: skip
def test_response_without_a_vector_for_each_text_is_broken(outputs: tuple[Json, ...]) -> None:
    assert vectors(*outputs) is None


def test_response_with_too_many_numbers_or_items_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    output = tensor([1, 2, 3, 4], [2, 2])
    monkeypatch.setattr(triton_responses, "NUMBERS_MAX", json.dumps({"outputs": [output]}).count(",") + 1)
    assert vectors(output) is not None
    assert vectors(tensor([1, 2, 3, 4, 5, 6], [2, 3])) is None
    assert converter().convert(200, document(output_log_probs=[0] * (translated_request.ITEMS_MAX + 1))) == b""


def test_number_beyond_32_bits_cannot_be_sent_in_base64() -> None:
    large = tensor([1e300, 1], [2, 1], "FP64")
    assert vectors(large, encoding_format="base64") is None
    assert vectors(large) is not None


# --- two translations ------------------------------------------------------------------------------------------------


def to_messages(*, stream: bool) -> ChainedConverter:
    body = {"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "stream": stream}
    asked = translate_messages(json.dumps(body).encode())
    first = translate_for_triton(CHAT.engine_path, asked.body, TRITON_BACKENDS["auto"], "m", wants_usage=True)
    return ChainedConverter(TritonConverter(first, "m", "id1", 7), MessagesConverter(asked, "m", "msg_1"))


def to_ollama(path: bytes, **members: object) -> ChainedConverter:
    operation = find_operation(b"POST", path)
    assert operation is not None
    asked = translate_request(operation, json.dumps({"model": "m", **members}).encode())
    assert asked.target in (CHAT, COMPLETION, EMBEDDING)
    first = translate_for_triton(
        asked.target.engine_path, asked.body, TRITON_BACKENDS["auto"], "m", wants_usage=True
    )  # fmt: skip
    return ChainedConverter(TritonConverter(first, "m", "id1", 7), ReplyConverter(asked, "m", lambda: "now", dict))


def test_stream_becomes_one_of_anthropic() -> None:
    of = to_messages(stream=True)
    out = of.feed(reported("Hel")) + of.feed(reported("lo", finish="length")) + of.finish()
    assert (of.broken, of.ended) == (False, True)
    found = [json.loads(one.partition(b"data: ")[2]) for one in out.split(b"\n\n")[:-1]]
    assert [one["delta"]["text"] for one in found if one["type"] == "content_block_delta"] == ["Hel", "lo"]
    assert (found[-2]["delta"]["stop_reason"], found[-2]["usage"]) == (
        "max_tokens", {"input_tokens": 3, "output_tokens": 2},
    )  # fmt: skip
    assert of.token_counts() == b'"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}'


def test_stream_becomes_lines_of_ollama() -> None:
    of = to_ollama(b"/api/chat", messages=[{"role": "user", "content": "a"}])
    lines = list(map(json.loads, (of.feed(reported("Hi")) + of.finish()).splitlines()))
    assert [one["message"]["content"] for one in lines] == ["Hi", ""]
    assert (lines[-1]["done"], lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (True, 3, 1)


def test_document_becomes_one_of_the_other_api() -> None:
    body = document(num_input_tokens=3, num_output_tokens=2)
    found = json.loads(to_messages(stream=False).convert(200, body))
    assert (found["content"], found["usage"]["output_tokens"]) == ([{"type": "text", "text": "Hi"}], 2)
    raw = to_ollama(b"/api/generate", prompt="a", raw=True, stream=False)
    assert json.loads(raw.convert(200, body))["response"] == "Hi"
    embedded = to_ollama(b"/api/embed", input=["a", "b"])
    outputs = json.dumps({"outputs": [tensor([1, 2], [2, 1])]}).encode()
    assert json.loads(embedded.convert(200, outputs))["embeddings"] == [[1.0], [2.0]]


def test_document_for_a_stream_becomes_events_of_the_other_api() -> None:
    of = to_messages(stream=True)
    assert (of.convert(200, document()).count(b"event: message_stop"), of.broken) == (1, False)


def test_error_passes_both_translations() -> None:
    of = to_messages(stream=True)
    out = of.feed(reported("a") + event(error="no")) + of.finish()
    assert (b'"message":"no"' in out, b"message_stop" in out, of.ended) == (True, False, True)
    error = json.loads(to_messages(stream=True).convert(400, b'data: {"error":"no"}\n\n'))["error"]
    assert error == {"type": "invalid_request_error", "message": "no"}
    several = to_messages(stream=False)
    assert json.loads(several.convert(200, b'{"error":"no"}'))["error"]["type"] == "api_error"
    assert several.status == 500


def test_response_that_one_translation_cannot_read_is_broken() -> None:
    for body in (b"{", b"{}"):
        of = to_messages(stream=False)
        assert (of.convert(200, body), of.broken) == (b"", True)
    streaming = to_messages(stream=True)
    streaming.feed(b"data: {\n\n")
    assert (streaming.broken, streaming.finish()) == (True, b"")
