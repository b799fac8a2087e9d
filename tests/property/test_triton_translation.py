"""Requests and answers of a model of Triton: nothing is lost by the translation, streamed or not."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion, CreateEmbeddingResponse
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from autoscaler.contract import TritonEntry
from autoscaler.spec.engines import CHAT_TEMPLATES, TRITON_BACKENDS
from gateway.dialects.triton_requests import COMPLETION_PATH, EMBEDDING_PATH, translate_request
from gateway.dialects.triton_responses import TritonConverter
from gateway.request.api_routes import CHAT
from tests.support.example_budget import examples

Json = dict[str, Any]

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PIECES = st.lists(TEXTS, max_size=6)
WORDS = st.text("abc 123", max_size=8)
"""Texts that contain no marker of a template."""
BACKENDS = st.sampled_from(sorted(TRITON_BACKENDS))
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "assistant"]), "content": WORDS}),
    min_size=1, max_size=6,
)  # fmt: skip
NUMBERS = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 99), "temperature": st.floats(0, 2), "top_p": st.floats(0, 1),
        "top_k": st.integers(0, 99), "seed": st.integers(0, 99), "presence_penalty": st.floats(-2, 2),
        "frequency_penalty": st.floats(-2, 2), "stop": st.lists(WORDS, min_size=1, max_size=1),
    },
)  # fmt: skip


def entry(backend: str, template: str = "chatml") -> TritonEntry:
    return msgspec.structs.replace(TRITON_BACKENDS[backend], chat_template=CHAT_TEMPLATES[template])


def converter(path: bytes, **members: object) -> TritonConverter:
    least: Json = {"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a"}
    body = json.dumps({**least, **members}).encode()
    return TritonConverter(translate_request(path, body, entry("vllm"), "m", wants_usage=True), "m", "id", 1)


@settings(max_examples=examples(500), deadline=None)
@given(BACKENDS, NUMBERS, TEXTS)
def test_each_member_can_be_read_from_the_inputs(backend: str, members: Json, prompt: str) -> None:
    of = entry(backend)
    body = json.dumps({"prompt": prompt, **members}).encode()
    found = json.loads(translate_request(COMPLETION_PATH, body, of, "m", wants_usage=False).body)
    assert found["text_input"] == prompt
    if of.json_input:
        assert members.items() <= json.loads(found[of.json_input]).items()
    for name, value in members.items():
        if name in of.inputs:
            text = value[0] if name == "stop" and of.one_stop else value
            assert found[of.inputs[name]] == text


def turns_of(prompt: str, template: str) -> list[tuple[str, str]]:
    """The messages of a prompt: the template read backwards."""
    form = CHAT_TEMPLATES[template]
    assert form is not None
    assert prompt.endswith(form.answer)
    rest, turns = prompt.removesuffix(form.answer), []
    while rest:
        role, frame = next(item for item in form.roles.items() if rest.startswith(item[1].before))
        content, _, rest = rest.removeprefix(frame.before).partition(frame.after)
        turns.append((role, content))
    return turns


@settings(max_examples=examples(500), deadline=None)
@given(st.sampled_from(["chatml", "llama3", "phi", "gemma"]), MESSAGES)
def test_messages_can_be_read_from_the_prompt(template: str, messages: list[Json]) -> None:
    body = json.dumps({"messages": messages}).encode()
    made = translate_request(CHAT.engine_path, body, entry("auto", template), "m", wants_usage=False)
    found = turns_of(json.loads(made.body)["text_input"], template)
    if template == "gemma":
        text = "\n\n".join(one["content"] for one in messages if one["role"] != "assistant")
        assert "\n\n".join(content for role, content in found if role == "user") == text
    else:
        assert found == [(one["role"], one["content"]) for one in messages]


def events_of(stream: bytes) -> list[bytes]:
    *events, done = [one.removeprefix(b"data: ") for one in stream.split(b"\n\n")[:-1]]
    assert done == b"[DONE]"
    return events


@settings(max_examples=examples(500), deadline=None)
@given(PIECES, st.sampled_from(["stop", "length"]), st.integers(0, 9), st.booleans(), st.data())
def test_stream_and_document_have_the_same_answer(
    pieces: list[str], finish: str, tokens_in: int, is_chat: bool, data: st.DataObject
) -> None:
    path = CHAT.engine_path if is_chat else COMPLETION_PATH
    outputs = {"model_name": "m", "num_input_tokens": tokens_in, "num_output_tokens": 1}
    events = [{**outputs, "text_output": text, "finish_reason": "None"} for text in [*pieces, ""]]
    events[-1]["finish_reason"] = finish
    stream = b"".join(b"data: %b\n\n" % json.dumps(one, ensure_ascii=False).encode() for one in events)
    one, at, out = converter(path, stream=True), 0, b""
    for place in [*sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5))), len(stream)]:
        out += one.feed(stream[at:place])
        at = place
    chunks = list(map(json.loads, events_of(out + one.finish())))
    whole = {**outputs, "text_output": "".join(pieces), "finish_reason": finish, "num_output_tokens": len(events)}
    document = json.loads(converter(path).convert(200, json.dumps(whole).encode()))
    assert chunks[-1]["usage"] == document["usage"]
    assert document["usage"]["completion_tokens"] == len(pieces) + 1
    assert chunks[-2]["choices"][0]["finish_reason"] == document["choices"][0]["finish_reason"] == finish
    if is_chat:
        read = [ChatCompletionChunk.model_validate(one) for one in chunks]
        streamed = "".join(one.choices[0].delta.content or "" for one in read if one.choices)
        answer = ChatCompletion.model_validate(document).choices[0].message.content
    else:
        streamed = "".join(one["choices"][0]["text"] for one in chunks if one["choices"])
        answer = Completion.model_validate(document).choices[0].text
    assert streamed == answer == "".join(pieces)


@settings(max_examples=examples(500), deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.booleans(), st.data())
def test_vectors_are_the_rows_of_the_tensor(rows: int, length: int, in_base64: bool, data: st.DataObject) -> None:
    size = rows * length
    numbers = data.draw(
        st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=size, max_size=size)
    )
    tensor = {"name": "e", "datatype": "FP32", "shape": [rows, length], "data": numbers}
    of = converter(EMBEDDING_PATH, input=["a"] * rows, encoding_format="base64" if in_base64 else "float")
    document = json.loads(of.convert(200, json.dumps({"outputs": [tensor]}).encode()))
    found: list[float] = []
    for row in document["data"]:
        vector = row["embedding"]
        found += struct.unpack(f"<{length}f", base64.b64decode(vector)) if in_base64 else vector
    assert found == numbers
    if not in_base64:
        assert len(CreateEmbeddingResponse.model_validate(document).data) == rows
