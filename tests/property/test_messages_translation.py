"""Answers of an engine, translated to the Messages API and back: nothing is lost, streamed or not."""

from __future__ import annotations

import json
from typing import Any, cast

from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from gateway.dialects.messages_requests import translate_messages
from gateway.dialects.messages_responses import MessagesConverter
from tests.support.example_budget import examples

Json = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | TEXTS, lambda inner: st.lists(inner, max_size=3))
CALLS = st.lists(
    st.tuples(st.text("abc_", min_size=1, max_size=5), st.dictionaries(TEXTS, VALUES, max_size=3)), max_size=3
)


@st.composite
def answers(draw: st.DrawFn) -> Json:
    """A message of an engine, as in a document."""
    message: Json = {"role": "assistant", "content": draw(TEXTS) or None}
    if thoughts := draw(TEXTS):
        message["reasoning_content"] = thoughts
    calls = [
        {"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for number, (name, arguments) in enumerate(draw(CALLS))
    ]
    if calls:
        message["tool_calls"] = calls
    return message


def converter(*, stream: bool) -> MessagesConverter:
    body = {"model": "m", "max_tokens": 9, "messages": [], "stream": stream}
    return MessagesConverter(translate_messages(json.dumps(body).encode()), "m", "msg_1")


def cut(text: str, data: st.DataObject) -> list[str]:
    """The text in pieces."""
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=3)))
    return [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]


def stream_of(message: Json, finish: str, usage: Json, data: st.DataObject) -> bytes:
    """The answer as an engine streams it, in pieces of any size."""
    deltas: list[Json] = [{"role": "assistant", "content": None}]
    deltas += [{"reasoning_content": piece} for piece in cut(message.get("reasoning_content", ""), data)]
    deltas += [{"content": piece} for piece in cut(message["content"] or "", data)]
    for index, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        begin = {"index": index, "id": call["id"], "function": {"name": function["name"], "arguments": ""}}
        pieces = [{"index": index, "function": {"arguments": piece}} for piece in cut(function["arguments"], data)]
        deltas += [{"tool_calls": [part]} for part in [begin, *pieces]]
    chunks: list[Json] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    chunks += [{"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]}, {"choices": [], "usage": usage}]
    return b"".join(b"data: %b\n\n" % json.dumps(chunk).encode() for chunk in chunks) + b"data: [DONE]\n\n"


def accumulated(events: bytes) -> Json:
    """The message that the official client for Python builds of a stream."""
    message: Any = None
    buffers: dict[int, bytes] = {}
    for event in events.split(b"\n\n")[:-1]:
        payload = json.loads(event.partition(b"data: ")[2])
        message = accumulate_event(
            event=EVENTS.validate_python(payload), current_snapshot=message, json_bufs=buffers
        )  # fmt: skip
    return cast("Json", message.to_dict(mode="json"))


@settings(max_examples=examples(500), deadline=None)
@given(answers(), st.sampled_from(["stop", "length", "content_filter"]), st.data())
def test_client_reads_the_same_message_from_a_stream_and_a_document(
    message: Json, finish: str, data: st.DataObject
) -> None:
    usage = {"prompt_tokens": 7, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": finish}], "usage": usage}
    document = json.loads(converter(stream=False).convert(200, json.dumps(answer).encode()))
    stream = stream_of(message, finish, usage, data)
    one, at, events = converter(stream=True), 0, b""
    for place in [*sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=5))), len(stream)]:
        events += one.feed(stream[at:place])
        at = place
    streamed = accumulated(events + one.finish())
    assert {name: streamed[name] for name in document} == document


@settings(max_examples=examples(500), deadline=None)
@given(answers())
def test_answer_that_is_sent_back_as_history_is_the_message_of_the_engine(message: Json) -> None:
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    document = json.loads(converter(stream=False).convert(200, json.dumps(answer).encode()))
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "assistant", "content": document["content"]}]}
    (found,) = json.loads(translate_messages(json.dumps(body).encode()).body)["messages"]
    for one in (found, message):
        one["content"] = one["content"] or None
        for call in one.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    assert found == message


BLOCKS = st.one_of(
    TEXTS.map(lambda text: {"type": "text", "text": text}),
    st.just({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw=="}}),
    st.just({"type": "image", "source": {"type": "url", "url": "https://images.example/a.png"}}),
)


def restored(part: Json) -> Json:
    """The block of a part of a chat message."""
    if part["type"] == "text":
        return part
    url = part["image_url"]["url"]
    if url.startswith("data:"):
        media_type, _, data = url.removeprefix("data:").partition(";base64,")
        return {"type": "image", "source": {"type": "base64", "media_type": media_type, "data": data}}
    return {"type": "image", "source": {"type": "url", "url": url}}


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.lists(BLOCKS, min_size=1, max_size=4), max_size=4))
def test_content_of_messages_can_be_restored_from_the_translated_request(turns: list[list[Json]]) -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": blocks} for at, blocks in enumerate(turns)]
    body = {"model": "m", "max_tokens": 9, "messages": messages}
    found = json.loads(translate_messages(json.dumps(body).encode()).body)["messages"]
    assert [message["role"] for message in found] == [message["role"] for message in messages]
    for message, blocks in zip(found, turns, strict=True):
        parts = message["content"]
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        assert [restored(part) for part in parts] == blocks
