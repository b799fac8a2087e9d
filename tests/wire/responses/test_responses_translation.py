"""OpenAI's Responses API on the wire: translated for engines without it, otherwise forwarded without state."""

from __future__ import annotations

import json
from typing import Any

import pytest

from autoscaler.contract import Clocks, FrontSettings, PolicyEntry
from gateway.http.body_buffers import LARGE_BYTES
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    DONE,
    HOLD,
    STREAM,
    STREAM_HEAD,
    ScriptedEngine,
    delta,
    document,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.waiting import until
from tests.wire.responses.test_messages_translation import CHAT, CHAT_ONLY, change, events_of, sent

ASK = [{"role": "user", "content": "Hello"}]
RESPONSE = document(b'{"object":"response"}')
EARLY = FrontSettings(keepalive_seconds=0.1)


def post(client: Client, lines: str = "", path: str = "/v1/responses", **members: object) -> None:
    body = json.dumps({"model": "m", "input": "Hello", **members}).encode()
    client.send(f"POST {path} HTTP/1.1\r\nhost: gw\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body)


async def ask(one: Rig, lines: str = "", **members: Any) -> tuple[int, dict[str, str], Any]:
    """The response; the body is one JSON document, or a list of events."""
    client = await one.client()
    post(client, lines, **members)
    status, fields, body = await client.answer()
    return status, fields, events_of(body) if fields["content-type"] == "text/event-stream" else json.loads(body)


async def test_stream_is_translated_and_its_tokens_are_counted() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        status, fields, events = await ask(one, stream=True, instructions="Be brief.", max_output_tokens=9)
        assert (status, fields["cache-control"]) == (200, "no-cache")
        assert [found["sequence_number"] for found in events] == list(range(len(events)))
        assert [found["delta"] for found in events if found["type"] == "response.output_text.delta"] == ["a", "b", "c"]
        response = events[-1]["response"]
        assert (events[-1]["type"], response["id"]) == ("response.completed", f"resp_{fields['x-request-id']}")
        assert (response["usage"]["input_tokens"], response["usage"]["output_tokens"]) == (7, 2)
        assert one.totals() == (1, 7, 2)
        assert sent(engine) == (
            "/v1/chat/completions",
            {
                "model": "served-m", "messages": [{"role": "system", "content": "Be brief."}, *ASK], "max_tokens": 9,
                "stream": True, "stream_options": {"include_usage": True},
            },
        )  # fmt: skip


@pytest.mark.parametrize(
    "path", ["/v1/responses", "/responses", "/openai/v1/responses", "/openai/deployments/m/responses"]
)
async def test_response_without_streaming_is_one_document(path: str) -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        status, fields, found = await ask(one, path=path, model="m" if "deployments" not in path else "other")
        assert (status, fields["content-type"], found["object"]) == (200, "application/json", "response")
        assert found["output"][0]["content"][0]["text"] == "Hi"
        assert sent(engine) == ("/v1/chat/completions", {"model": "served-m", "messages": ASK})
        assert one.totals() == (1, 7, 2)


async def test_engine_with_the_responses_api_gets_the_request_unchanged() -> None:
    async with ScriptedEngine((RESPONSE,)) as engine, rig(engine.address) as one:
        members: dict[str, Any] = {"store": False, "background": None, "previous_response_id": None, "top_k": 3}
        assert (await ask(one, **members))[2] == {"object": "response"}
        assert sent(engine) == ("/v1/responses", {"model": "served-m", "input": "Hello", **members})


@pytest.mark.parametrize(
    "members",
    [
        {"previous_response_id": "canary"},
        {"conversation": {"id": "canary"}},
        {"conversation": "canary" * 1000},
        {"store": True},
        {"background": True},
    ],
)
@pytest.mark.parametrize("dialects", [CHAT_ONLY, ("openai", "responses")])
@pytest.mark.parametrize("size", [1, LARGE_BYTES])
async def test_member_that_needs_stored_responses_is_rejected_by_name(
    members: dict[str, Any], dialects: tuple[str, ...], size: int
) -> None:
    async with ScriptedEngine((RESPONSE,)) as engine, rig(engine.address, dialects=dialects) as one:
        status, _, found = await ask(one, input="a" * size, **members)
        assert (status, found["error"]["param"]) == (400, next(iter(members)))
        assert "not stored: " in found["error"]["message"]
        assert "canary" not in json.dumps(found)
        assert engine.requests == []
        await until("the room is free", lambda: one.front.room.held_bytes == 0)


async def test_large_request_without_state_is_forwarded() -> None:
    async with ScriptedEngine((RESPONSE,)) as engine, rig(engine.address) as one:
        members: dict[str, Any] = {"store": False, "input": "a" * LARGE_BYTES, "previous_response_id": None}
        assert (await ask(one, **members))[0] == 200
        assert sent(engine)[1] == {"model": "served-m", **members}


async def test_members_of_these_names_are_forwarded_on_other_paths() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address) as one:
        members: dict[str, Any] = {"store": True, "background": "transparent", "conversation": "a"}
        assert (await ask(one, path="/v1/images/generations", **members))[0] == 200
        assert sent(engine)[1] == {"model": "served-m", "input": "Hello", **members}


async def test_request_for_an_engine_without_chat_gets_400() -> None:
    async with rig(dialects=("jina",)) as one:
        for lines in ("", "x-model: m\r\n"):
            status, _, found = await ask(one, lines)
            assert (status, "does not support this API" in found["error"]["message"]) == (400, True)


async def test_policy_applies_to_the_translated_request() -> None:
    policy = PolicyEntry(caps={"max_tokens": 5.0}, removed=("tools",), forced={"temperature": "0"})
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        change(one, policy=policy)
        await ask(one, tools=[{"type": "function", "name": "f"}], temperature=1, max_output_tokens=9)
        assert sent(engine)[1] == {"model": "served-m", "messages": ASK, "max_tokens": 5, "temperature": 0}


async def test_refused_members_of_all_paths_are_rejected() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        for name in ("api_base", "lora_path"):
            status, _, found = await ask(one, **{name: "canary"})
            assert (status, found["error"]["param"]) == (400, name)
        assert engine.requests == []


async def test_engine_error_keeps_its_status_and_the_form_of_openai() -> None:
    reply = document(b'{"detail":"context too long"}', "400 Bad Request")
    async with ScriptedEngine((reply,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        for stream in (True, False):
            status, fields, found = await ask(one, stream=stream)
            assert (status, found["error"]["message"]) == (400, "context too long")
            assert fields["content-type"] == "application/json"


async def test_malformed_engine_document_gets_502() -> None:
    async with ScriptedEngine((document(b'{"choices":'),)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        for stream in (True, False):
            status, _, found = await ask(one, stream=stream)
            assert (status, found["error"]["code"]) == (502, "upstream_error")


async def last_event(client: Client) -> Any:
    """The error event at the end of a stream."""
    body = b""
    while b"event: error" not in body:
        body += await client.chunk()
    return events_of(b"event: error" + body.partition(b"event: error")[2])[0]


@pytest.mark.parametrize("dialects", [CHAT_ONLY, ("openai", "responses")])
@pytest.mark.parametrize("script", [(STREAM_HEAD + delta("a"), CLOSE), (STREAM_HEAD + delta("a"), HOLD)])
async def test_broken_stream_ends_with_an_error_event_of_the_responses_api(
    dialects: tuple[str, ...], script: Any
) -> None:
    clocks = Clocks(stall_seconds_max=0.1)
    async with ScriptedEngine(script) as engine, rig(engine.address, clocks=clocks, dialects=dialects) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        found = await last_event(client)
        assert (found["type"], found["code"], found["error"]["code"]) == (
            "error",
            found["error"]["code"],
            found["code"],
        )
        assert found["message"] == found["error"]["message"]


@pytest.mark.parametrize("dialects", [CHAT_ONLY, ("openai", "responses")])
async def test_queued_stream_gets_comments_and_then_an_engine_error_as_an_event(dialects: tuple[str, ...]) -> None:
    reply = document(b'{"error":{"message":"too long"}}', "400 Bad")
    async with ScriptedEngine((reply,)) as engine, rig(settings=EARLY, dialects=dialects) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        assert (await client.chunk()).startswith(b": ")
        one.routes(engine.address)
        assert (await last_event(client))["error"]["message"] == "too long"


async def test_queued_stream_is_translated_after_its_comments() -> None:
    async with (
        ScriptedEngine((STREAM_HEAD + delta("a") + DONE, CLOSE)) as engine,
        rig(settings=EARLY, dialects=CHAT_ONLY) as one,
    ):
        client = await one.client()
        post(client, stream=True)
        await client.head()
        await client.chunk()
        one.routes(engine.address)
        body = b""
        while b"response.completed" not in body:
            body += await client.chunk()
        assert b"event: response.created" in body
