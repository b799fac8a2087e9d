"""Anthropic Messages on the wire for an engine that has only OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest

from autoscaler.contract import CatalogueDelta, Clocks, FrontSettings, ModelName, PolicyEntry
from gateway.dialects import translated_request
from gateway.limits import Limits
from gateway.server import translated_call
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    DONE,
    END,
    HOLD,
    STREAM,
    STREAM_HEAD,
    ScriptedEngine,
    chunk,
    delta,
    document,
    event,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.waiting import until

ASK = [{"role": "user", "content": "Hello"}]
CHAT_ONLY = ("openai",)
CHAT = document(
    b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":2}}'
)


def post(client: Client, lines: str = "", path: str = "/v1/messages", minor: int = 1, **members: object) -> None:
    body = json.dumps({"model": "m", "max_tokens": 9, "messages": ASK, **members}).encode()
    head = f"POST {path} HTTP/1.{minor}\r\nhost: gw\r\n{lines}content-length: {len(body)}\r\n\r\n"
    client.send(head.encode() + body)


def events_of(body: bytes) -> list[Any]:
    found = []
    for one in body.split(b"\n\n")[:-1]:
        name, payload = one.split(b"\n")
        found.append(json.loads(payload.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
    return found


async def ask(one: Rig, lines: str = "", **members: Any) -> tuple[int, dict[str, str], Any]:
    """The response; the body is one JSON document, or a list of events."""
    client = await one.client()
    post(client, lines, **members)
    status, fields, body = await client.answer()
    return status, fields, events_of(body) if fields["content-type"] == "text/event-stream" else json.loads(body)


def error_of(found: Any) -> tuple[str, str]:
    """Type and message of an error in Anthropic's form."""
    assert found["type"] == "error"
    return found["error"]["type"], found["error"]["message"]


def sent(engine: ScriptedEngine) -> tuple[str, dict[str, Any]]:
    """Path and body of the engine's last request."""
    head, _, body = engine.requests[-1].partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), json.loads(body)


def change(one: Rig, **fields: object) -> None:
    """Change the entry of the Model."""
    entry = msgspec.structs.replace(one.front.directory.names._models[ModelName("m")], **fields)
    one.front.catalogue(CatalogueDelta(epoch=1, version=9, models=(entry,)))


# --- requests --------------------------------------------------------------------------------------------------------


async def test_stream_is_translated_and_its_tokens_are_counted() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        lines = "anthropic-version: 2023-06-01\r\nanthropic-beta: x\r\naccept: text/event-stream\r\n"
        status, fields, events = await ask(one, lines, stream=True, stop_sequences=["x"])
        assert (status, fields["cache-control"], "server-timing" in fields) == (200, "no-cache", True)
        assert [found["delta"]["text"] for found in events if found["type"] == "content_block_delta"] == ["a", "b", "c"]
        assert events[0]["message"]["id"] == f"msg_{fields['x-request-id']}"
        assert events[0]["message"]["model"] == "m"
        assert events[-2]["usage"] == {"input_tokens": 7, "output_tokens": 2}
        assert events[-1] == {"type": "message_stop"}
        assert one.totals() == (1, 7, 2)
        assert sent(engine) == (
            "/v1/chat/completions",
            {
                "model": "served-m", "messages": ASK, "max_tokens": 9, "stream": True, "stop": ["x"],
                "stream_options": {"include_usage": True},
            },
        )  # fmt: skip
        assert b"anthropic" not in engine.requests[0]
        assert b"\r\ncontent-type: application/json\r\n" in engine.requests[0]


@pytest.mark.parametrize("path", ["/v1/messages", "/messages", "//v1/messages/"])
async def test_response_without_streaming_is_one_message(path: str) -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        status, fields, found = await ask(one, path=path, system="Be brief.")
        assert (status, fields["content-type"]) == (200, "application/json")
        assert (found["content"], found["stop_reason"]) == ([{"type": "text", "text": "Hi"}], "end_turn")
        assert found["usage"] == {"input_tokens": 7, "output_tokens": 2}
        messages = [{"role": "system", "content": "Be brief."}, *ASK]
        assert sent(engine) == ("/v1/chat/completions", {"model": "served-m", "messages": messages, "max_tokens": 9})
        assert one.totals() == (1, 7, 2)


async def test_engine_with_the_messages_api_gets_the_request_unchanged() -> None:
    async with ScriptedEngine((document(b'{"type":"message"}'),)) as engine, rig(engine.address) as one:
        assert (await ask(one, "anthropic-version: 2023-06-01\r\n", top_k=3))[2] == {"type": "message"}
        assert sent(engine) == (
            "/v1/messages", {"model": "served-m", "max_tokens": 9, "messages": ASK, "top_k": 3},
        )  # fmt: skip
        assert b"anthropic-version" in engine.requests[0]


@pytest.mark.parametrize(
    ("path", "dialects"),
    [("/v1/messages/count_tokens", CHAT_ONLY), ("/v1/messages", ("jina",)), ("/v1/rerank", CHAT_ONLY)],
)
async def test_request_that_cannot_be_translated_gets_400(path: str, dialects: tuple[str, ...]) -> None:
    async with rig(dialects=dialects) as one:
        for lines in ("", "x-model: m\r\n"):
            status, _, found = await ask(one, lines, path=path)
            assert (status, "does not support this API" in found["error"]["message"]) == (400, True)


@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"api_base": "canary"}, "api_base"),
        ({"id_slot": 1}, "id_slot"),
        ({"Max_Tokens": 1}, "max_tokens"),
        ({"container": "canary"}, "container"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "messages"),
    ],
)
async def test_rejected_member_is_named_in_an_error_of_anthropic(members: dict[str, Any], param: str) -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        status, _, found = await ask(one, **members)
        assert (status, error_of(found)[0], found["error"]["param"]) == (400, "invalid_request_error", param)
        assert "canary" not in json.dumps(found)
        assert engine.requests == []


async def test_policy_applies_to_the_translated_request() -> None:
    policy = PolicyEntry(caps={"max_tokens": 5.0}, removed=("tools",), forced={"temperature": "0"}, defaults={"x": "1"})
    tool = {"name": "a", "input_schema": {}}
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        change(one, policy=policy)
        await ask(one, tools=[tool], tool_choice={"type": "any"}, temperature=1)
        body = sent(engine)[1]
        assert body == {"model": "served-m", "messages": ASK, "max_tokens": 5, "temperature": 0, "x": 1}


async def test_cache_salt_and_adapter_of_the_model_are_added() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        change(one, takes_cache_salt=True, lora='[{"id":0,"scale":1}]')
        await ask(one, cache_salt="canary")
        body = sent(engine)[1]
        assert (len(body["cache_salt"]), body["lora"]) == (32, [{"id": 0, "scale": 1}])


async def test_tokens_are_counted_if_the_engine_knows_no_stream_options() -> None:
    stream = STREAM_HEAD + delta("a") + delta("b") + DONE + END
    async with ScriptedEngine((stream,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        change(one, takes_stream_options=False)
        assert (await ask(one, stream=True))[2][-2]["usage"] == {"input_tokens": 0, "output_tokens": 2}
        assert "stream_options" not in sent(engine)[1]
        assert one.totals() == (1, 0, 2)


async def test_default_model_or_model_header_replaces_a_missing_model() -> None:
    settings = FrontSettings(default_model="m")
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, settings=settings, dialects=CHAT_ONLY) as one:
        for lines in ("", "x-model: m\r\n"):
            client = await one.client()
            body = json.dumps({"max_tokens": 9, "messages": ASK}).encode()
            head = f"POST /v1/messages HTTP/1.1\r\nhost: gw\r\n{lines}content-length: {len(body)}\r\n\r\n"
            client.send(head.encode() + body)
            assert (await client.answer())[0] == 200
            assert sent(engine)[1]["model"] == "served-m"


async def test_large_body_with_images_is_translated_and_its_memory_is_released() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 700_000}}
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        for _ in range(2):
            assert (await ask(one, messages=[{"role": "user", "content": [image]}]))[0] == 200
        (part,) = sent(engine)[1]["messages"][0]["content"]
        assert part["image_url"]["url"] == f"data:image/png;base64,{'A' * 700_000}"
        await until("the room is free", lambda: one.front.room.held_bytes == 0)
        assert (await ask(one, messages=[{"role": "user", "content": [image, {"type": "x"}]}]))[0] == 400
        await until("the room is free", lambda: one.front.room.held_bytes == 0)


async def test_body_above_the_limit_of_translations_gets_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_request, "BODY_BYTES_MAX", 500)
    async with rig(dialects=CHAT_ONLY) as one:
        status, _, found = await ask(one, messages=[{"role": "user", "content": "a" * 500}])
        assert (status, "500 bytes" in error_of(found)[1]) == (413, True)
    quotes = {"type": "tool_use", "id": "a", "name": "b", "input": {"a": '"' * 300}}  # sent as text in text
    async with rig(limits=Limits(body_bytes_max=1000), dialects=CHAT_ONLY) as one:
        monkeypatch.setattr(translated_request, "BODY_BYTES_MAX", 5000)
        status, _, found = await ask(one, messages=[{"role": "assistant", "content": [quotes]}])
        assert (status, "1000 bytes" in error_of(found)[1]) == (413, True)


# --- streams ---------------------------------------------------------------------------------------------------------

EARLY = FrontSettings(keepalive_seconds=0.1)
PING = b'event: ping\ndata: {"type": "ping"}\n\n'


async def test_queued_stream_gets_pings_before_its_message() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(settings=EARLY, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, stream=True)
        status, fields = await client.head()
        assert (status, fields["content-type"], fields["x-pilotlight-cold"]) == (200, "text/event-stream", "1")
        assert [await client.chunk(), await client.chunk()] == [PING, PING]
        one.routes(engine.address)
        events = events_of(await client.chunks())
        kinds = [found["type"] for found in events if found["type"] != "ping"]
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")


async def test_stream_of_a_silent_engine_gets_pings_between_its_events() -> None:
    script = (STREAM_HEAD + delta("a"), HOLD, delta("b") + DONE + END)
    async with ScriptedEngine(script) as engine, rig(engine.address, settings=EARLY, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        body = b""
        while not body.endswith(PING):
            body += await client.chunk()
        engine.release.set()
        events = [found for found in events_of(body + await client.chunks()) if found["type"] != "ping"]
        assert [found["delta"]["text"] for found in events if found["type"] == "content_block_delta"] == ["a", "b"]


async def test_http_1_0_stream_ends_with_the_connection() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, minor=0, stream=True)
        fields = (await client.head())[1]
        assert "transfer-encoding" not in fields
        assert events_of(await client.rest())[-1] == {"type": "message_stop"}


async def test_document_of_an_engine_that_ignores_stream_becomes_events() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        status, fields, events = await ask(one, stream=True)
        assert (status, fields["content-type"], len(events)) == (200, "text/event-stream", 6)
        assert events[2]["delta"] == {"type": "text_delta", "text": "Hi"}


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (document(b'{"error":{"message":"too long"}}', "400 Bad"), ("invalid_request_error", "too long")),
        (document(b"x"), ("server_error", "the engine ended the response early")),
    ],
)
async def test_engine_error_after_the_head_of_a_stream_is_an_error_event(
    reply: bytes, expected: tuple[str, str]
) -> None:
    async with ScriptedEngine((reply,)) as engine, rig(settings=EARLY, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        one.routes(engine.address)
        body = b""
        while b"event: error" not in body:
            body += await client.chunk()
        type, message = error_of(events_of(body)[-1])
        assert (type, message.startswith(expected[1])) == (expected[0], True)


async def test_engine_error_keeps_its_status_and_gets_the_form_of_anthropic() -> None:
    reply = document(b'{"error":{"message":"context too long","type":"x"}}', "400 Bad Request")
    async with ScriptedEngine((reply,)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        for stream in (True, False):
            status, fields, found = await ask(one, stream=stream)
            assert (status, error_of(found)) == (400, ("invalid_request_error", "context too long"))
            assert fields["content-type"] == "application/json"


@pytest.mark.parametrize("script", [(STREAM_HEAD + delta("a"), CLOSE), (STREAM_HEAD + delta("a") + event("{"), HOLD)])
async def test_broken_stream_ends_with_an_error_event_without_the_last_chunk(script: Any) -> None:
    async with ScriptedEngine(script) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        body = b""
        while b"event: error" not in body:
            body += await client.chunk()
        assert error_of(events_of(body)[-1])[1].startswith("the engine ended the response early")
        assert b"message_stop" not in body
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "reply", [(document(b'{"choices":'),), (document(b"[]"),), (document(b'{"error":{"message":"canary"}}'),)]
)
async def test_malformed_engine_document_gets_502(reply: Any) -> None:
    async with ScriptedEngine(reply) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        for stream in (True, False):
            status, _, found = await ask(one, stream=stream)
            assert (status, found["error"]["code"], found["type"]) == (502, "upstream_error", "error")


async def test_engine_document_above_the_size_limit_gets_502(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_call, "DOCUMENT_BYTES_MAX", 1000)
    reply = STREAM_HEAD.replace(b"text/event-stream", b"application/json") + chunk(b"[" * 600) * 2
    async with ScriptedEngine((reply, HOLD)) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        assert (await ask(one))[0] == 502
        await asyncio.wait_for(engine.left.wait(), 60)
        assert one.in_use() == 0


async def test_request_to_a_busy_engine_is_retried_on_another_replica() -> None:
    async with (
        ScriptedEngine((document(b"{}", "503 Busy"),)) as first,
        ScriptedEngine((STREAM,)) as second,
        rig(first.address, second.address, dialects=CHAT_ONLY) as one,
    ):
        for _ in range(4):
            status, _, events = await ask(one, stream=True)
            assert (status, events[-1]["type"]) == (200, "message_stop")
        assert first.requests


async def test_stalled_stream_gets_an_error_event() -> None:
    clocks = Clocks(stall_seconds_max=0.1)
    script = (STREAM_HEAD + delta("a"), HOLD)
    async with ScriptedEngine(script) as engine, rig(engine.address, clocks=clocks, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        body = b""
        while b"event: error" not in body:
            body += await client.chunk()
        assert "in time" in error_of(events_of(body)[-1])[1]


async def test_client_disconnect_during_a_stream_releases_the_engine() -> None:
    script = (STREAM_HEAD + delta("a"), HOLD)
    async with ScriptedEngine(script) as engine, rig(engine.address, dialects=CHAT_ONLY) as one:
        client = await one.client()
        post(client, stream=True)
        await client.head()
        await client.chunk()
        client.leave()
        await asyncio.wait_for(engine.left.wait(), 60)
        await one.settled()
        assert one.in_use() == 0
