"""Answers of an engine, translated to the Responses API and back: nothing is lost, streamed or not."""

from __future__ import annotations

import json
from typing import Any, cast

from hypothesis import given, settings
from hypothesis import strategies as st
from openai import Omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.dialects.rerank import RerankConverter, find_target, translate_rerank
from gateway.dialects.responses_requests import translate_responses
from gateway.dialects.responses_responses import ResponsesConverter
from gateway.request.api_routes import RERANK
from tests.property.test_messages_translation import TEXTS, answers, stream_of
from tests.support.example_budget import examples

Json = dict[str, Any]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def converter(*, stream: bool) -> ResponsesConverter:
    body = {"model": "m", "input": "a", "stream": stream}
    return ResponsesConverter(translate_responses(json.dumps(body).encode()), "m", "1", 7)


def accumulated(events: bytes) -> Json:
    """The response that the official client for Python builds of a stream."""
    state: ResponseStreamState[Any] = ResponseStreamState(input_tools=Omit(), text_format=Omit())
    for event in events.split(b"\n\n")[:-1]:
        parsed = EVENTS.validate_python(json.loads(event.partition(b"data: ")[2]), strict=True)
        built: list[Any] = list(state.handle_event(parsed))
    (last,) = built
    response = cast("Json", last.response.to_dict(mode="json"))
    for item in response["output"]:
        for one in (item, *(item.get("content") or ())):  # the client adds what it parsed
            assert (one.pop("parsed", None), one.pop("parsed_arguments", None)) == (None, None)
    return response


@settings(max_examples=examples(500), deadline=None)
@given(answers(), st.sampled_from(["stop", "length", "content_filter"]), st.data())
def test_client_reads_the_same_response_from_a_stream_and_a_document(
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
    events += one.finish()
    last = json.loads(events.split(b"\n\n")[-2].partition(b"data: ")[2])
    assert last["response"] == document
    assert accumulated(events) == Response.model_validate(document).to_dict(mode="json")


@settings(max_examples=examples(500), deadline=None)
@given(answers())
def test_output_that_is_sent_back_as_input_is_the_message_of_the_engine(message: Json) -> None:
    answer = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    document = json.loads(converter(stream=False).convert(200, json.dumps(answer).encode()))
    body = {"model": "m", "input": document["output"]}
    found = json.loads(translate_responses(json.dumps(body).encode()).body)["messages"]
    if not document["output"]:
        assert found == []
        return
    (restored,) = found
    for one in (restored, message):
        one["content"] = one["content"] or None
    assert restored == message


PARTS = st.one_of(
    TEXTS.map(lambda text: {"type": "input_text", "text": text}),
    st.just({"type": "input_image", "image_url": "data:image/png;base64,iVBORw=="}),
    st.just({"type": "input_image", "image_url": "https://images.example/a.png", "detail": "low"}),
)


def restored(part: Json) -> Json:
    """The part of a part of a chat message."""
    if part["type"] == "text":
        return {"type": "input_text", "text": part["text"]}
    image = part["image_url"]
    return {"type": "input_image", "image_url": image.pop("url"), **image}


@settings(max_examples=examples(500), deadline=None)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=4), max_size=4))
def test_content_of_messages_can_be_restored_from_the_translated_request(turns: list[list[Json]]) -> None:
    body = {"model": "m", "input": [{"role": "user", "content": parts} for parts in turns]}
    found = json.loads(translate_responses(json.dumps(body).encode()).body)["messages"]
    for message, parts in zip(found, turns, strict=True):
        content = message["content"]
        content = [{"type": "text", "text": content}] if isinstance(content, str) else content
        assert [restored(part) for part in content] == parts


@settings(max_examples=examples(500), deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=6),
    st.sampled_from(["jina", "tei", "sglang"]),
    st.randoms(use_true_random=False),
)
def test_scores_of_every_form_are_those_of_the_engine_in_any_order(scores: list[float], form: str, random: Any) -> None:
    target = find_target((form,))
    assert target is not None
    body = {"model": "m", "query": "q", "documents": ["a"] * len(scores)}
    request = translate_rerank(RERANK, json.dumps(body).encode(), target)
    rows = [{"index": at, ("relevance_score" if form == "jina" else "score"): one} for at, one in enumerate(scores)]
    random.shuffle(rows)
    reply = json.dumps({"results": rows} if form == "jina" else rows).encode()
    results = json.loads(RerankConverter(request, "m", "1", 7).convert(200, reply))["results"]
    assert {row["index"]: row["relevance_score"] for row in results} == dict(enumerate(scores))
    assert [row["relevance_score"] for row in results] == sorted(scores, reverse=True)
