"""OpenAI's, Anthropic's and Ollama's APIs on the wire for an engine that has only Triton's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from aiohttp import web

from autoscaler.contract import CatalogueDelta, FrontSettings, ModelName, PolicyCheck, PolicyEntry, TritonEntry
from autoscaler.spec.engines import CHAT_TEMPLATES, TRITON_BACKENDS
from gateway.dialects import translated_request
from gateway.server import translated_call
from tests.support.fakes.engines.scripted_engine import (
    CLOSE,
    END,
    HOLD,
    STREAM_HEAD,
    Script,
    ScriptedEngine,
    chunk,
    document,
    event,
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig
from tests.support.waiting import until

ASK = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS, EMBEDDINGS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
TRITON = msgspec.structs.replace(TRITON_BACKENDS["auto"], chat_template=CHAT_TEMPLATES["plain"])
HEAD = STREAM_HEAD.replace(b"text/event-stream", b"text/event-stream; charset=utf-8")


def piece(text: str, **outputs: object) -> bytes:
    """One event of generate_stream."""
    return event(json.dumps({"model_name": "m", "text_output": text, **outputs}))


def whole(text: str = "Hi", **outputs: object) -> bytes:
    """A response of generate."""
    return document(json.dumps({"model_name": "m", "text_output": text, **outputs}).encode())


COUNTED: Any = {"num_input_tokens": 7, "num_output_tokens": 1}
STREAM = HEAD + piece("a", **COUNTED) + piece("b", **COUNTED, finish_reason="length") + END
VECTORS = document(
    b'{"model_name":"m","outputs":[{"name":"e","datatype":"FP32","shape":[2,2],"data":[1.0,2.0,3.0,4.0]}]}'
)


def change(one: Rig, **fields: object) -> None:
    """Change the entry of the Model."""
    entry = msgspec.structs.replace(one.front.directory.names._models[ModelName("m")], **fields)
    one.front.catalogue(CatalogueDelta(epoch=1, version=9, models=(entry,)))


@contextlib.asynccontextmanager
async def triton_rig(
    *scripts: Script, settings: FrontSettings | None = None, triton: TritonEntry = TRITON
) -> AsyncIterator[tuple[Rig, ScriptedEngine]]:
    """A gateway whose engine has only Triton's API."""
    async with ScriptedEngine(*scripts) as engine, rig(engine.address, settings=settings, dialects=()) as one:
        change(one, triton=triton)
        yield one, engine


def post(client: Client, path: str = CHAT, lines: str = "", minor: int = 1, **members: object) -> None:
    body = json.dumps({"model": "m", **({"messages": ASK} if path == CHAT else {}), **members}).encode()
    head = f"POST {path} HTTP/1.{minor}\r\nhost: gw\r\n{lines}content-length: {len(body)}\r\n\r\n"
    client.send(head.encode() + body)


def events_of(body: bytes) -> list[Any]:
    """The data of the events; that of the last one is a text."""
    found = [one.removeprefix(b"data: ") for one in body.split(b"\n\n")[:-1]]
    return [one.decode() if one == b"[DONE]" else json.loads(one) for one in found]


async def ask(one: Rig, path: str = CHAT, lines: str = "", **members: Any) -> tuple[int, dict[str, str], Any]:
    """The response; the body is one JSON document, or a list of events."""
    client = await one.client()
    post(client, path, lines, **members)
    status, fields, body = await client.answer()
    return status, fields, events_of(body) if fields["content-type"] == "text/event-stream" else json.loads(body)


def sent(engine: ScriptedEngine) -> tuple[str, dict[str, Any]]:
    """Path and body of the engine's last request."""
    head, _, body = engine.requests[-1].partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), json.loads(body)


# --- requests --------------------------------------------------------------------------------------------------------


async def test_stream_of_a_chat_is_translated_and_its_tokens_are_counted() -> None:
    async with triton_rig((STREAM,)) as (one, engine):
        lines = "accept: text/event-stream\r\ncontent-type: application/json\r\n"
        status, fields, events = await ask(one, lines=lines, stream=True, stop=["x"], temperature=0)
        assert (status, fields["cache-control"], "server-timing" in fields) == (200, "no-cache", True)
        assert [found["choices"][0]["delta"].get("content") for found in events[:-1]] == ["", "a", "b", None]
        assert (events[-2]["choices"][0]["finish_reason"], events[-1]) == ("length", "[DONE]")
        assert {(found["id"], found["model"]) for found in events[:-1]} == {(f"chatcmpl-{fields['x-request-id']}", "m")}
        assert one.totals() == (1, 7, 2)
        path, body = sent(engine)
        assert (path, body["text_input"]) == ("/v2/models/served-m/generate_stream", "User: Hello\nAssistant:")
        assert (body["stream"], body["stop_words"], body["max_tokens"], body["temperature"]) == (True, "x", 1024, 0)
        assert b"accept:" not in engine.requests[0]


async def test_usage_is_sent_to_clients_that_request_it() -> None:
    async with triton_rig((STREAM,)) as (one, _):
        events = (await ask(one, stream=True, stream_options={"include_usage": True}))[2]
        usage = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9}
        assert (events[-2]["choices"], events[-2]["usage"]) == ([], usage)


async def test_pieces_are_counted_if_the_model_reports_no_tokens() -> None:
    async with triton_rig((HEAD + piece("a") + piece("b") + piece("") + END,)) as (one, _):
        await ask(one, stream=True)
        assert one.totals() == (1, 0, 2)


@pytest.mark.parametrize("path", [COMPLETIONS, "/openai/deployments/m/completions"])
async def test_completion_is_one_document(path: str) -> None:
    async with triton_rig((whole(**COUNTED),)) as (one, engine):
        status, fields, found = await ask(one, path, prompt="Hello", max_tokens=3, model="alias-m")
        assert (status, fields["content-type"], found["choices"][0]["text"]) == (200, "application/json", "Hi")
        assert found["model"] == ("m" if "deployments" in path else "alias-m")
        assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8}
        assert one.totals() == (1, 7, 1)
        assert sent(engine)[0] == "/v2/models/served-m/generate"


async def test_embeddings_are_a_tensor() -> None:
    async with triton_rig((VECTORS,)) as (one, engine):
        found = (await ask(one, EMBEDDINGS, input=["x", "y"]))[2]
        assert [row["embedding"] for row in found["data"]] == [[1.0, 2.0], [3.0, 4.0]]
        tensor = {"name": "text_input", "shape": [2, 1], "datatype": "BYTES", "data": ["x", "y"]}
        assert sent(engine) == ("/v2/models/served-m/infer", {"inputs": [tensor]})


@pytest.mark.parametrize("path", ["/v1/rerank", "/v1/audio/speech", "/v1/messages/count_tokens", "/tokenize"])
async def test_path_that_cannot_be_translated_gets_400(path: str) -> None:
    async with triton_rig((whole(),)) as (one, engine):
        for lines in ("", "x-model: m\r\n"):
            status, _, found = await ask(one, path, lines)
            assert (status, "does not support this API" in found["error"]["message"]) == (400, True)
        assert engine.requests == []


@pytest.mark.parametrize("lines", ["", "x-model: m\r\n"])
@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "canary"}}]}, "tools"), ({"n": 2}, "n"),
        ({"stop": ["canary", "b"]}, "stop"), ({"api_base": "canary"}, "api_base"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "canary"}}]}]},
         "messages"),
    ],
)  # fmt: skip
async def test_rejected_member_is_named(lines: str, members: dict[str, Any], param: str) -> None:
    async with triton_rig((whole(),)) as (one, engine):
        status, _, found = await ask(one, lines=lines, **members)
        assert (status, found["error"]["type"], found["error"]["param"]) == (400, "invalid_request_error", param)
        assert "canary" not in json.dumps(found)
        assert engine.requests == []


async def test_policy_applies_to_members_of_openai() -> None:
    policy = PolicyEntry(
        caps={"max_tokens": 5.0}, removed=("tools",), forced={"temperature": "0.5"}, defaults={"stop": '["x"]'}
    )
    async with triton_rig((whole(),)) as (one, engine):
        change(one, policy=policy)
        tool = {"type": "function", "function": {"name": "f"}}
        assert (await ask(one, tools=[tool], max_tokens=99))[0] == 200
        body = sent(engine)[1]
        assert (body["max_tokens"], body["temperature"], body["stop_words"]) == (5, 0.5, "x")


async def test_external_checks_see_requests_and_answers_of_openai() -> None:
    messages: list[Any] = []

    async def guard(request: web.Request) -> web.Response:
        messages.append(await request.json())
        return web.json_response({"allow": len(messages) < 4, "reason": "no"})

    app = web.Application()
    app.router.add_post("/", guard)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    check = PolicyCheck(url=f"http://127.0.0.1:{port}/", timeout_s=60)
    settings = FrontSettings(check_hosts=("127.0.0.1",))
    try:
        async with triton_rig((whole("secret", **COUNTED),), settings=settings) as (one, _):
            change(one, policy=PolicyEntry(request_check=check, answer_check=check))
            status, _, found = await ask(one)
            assert (status, found["choices"][0]["message"]["content"]) == (200, "secret")
            assert [(found["check"], found["endpoint"]) for found in messages] == [("request", CHAT), ("answer", CHAT)]
            assert messages[0]["body"]["messages"] == ASK
            assert messages[1]["body"]["choices"] == found["choices"]
            assert one.totals() == (1, 7, 1)
            assert (await ask(one))[0] == 403
    finally:
        await runner.cleanup()


async def test_large_body_is_translated_and_its_memory_is_released() -> None:
    async with triton_rig((whole(),)) as (one, engine):
        for _ in range(2):
            assert (await ask(one, messages=[{"role": "user", "content": "A" * 700_000}]))[0] == 200
        assert sent(engine)[1]["text_input"] == f"User: {'A' * 700_000}\nAssistant:"
        await until("the room is free", lambda: one.front.room.held_bytes == 0)
        assert (await ask(one, messages=[{"role": "user", "content": "A" * 700_000}], n=2))[0] == 400
        await until("the room is free", lambda: one.front.room.held_bytes == 0)


async def test_body_above_the_limit_of_translations_gets_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_request, "BODY_BYTES_MAX", 500_000)
    async with triton_rig((whole(),)) as (one, _):
        status, _, found = await ask(one, messages=[{"role": "user", "content": "a" * 500_000}])
        assert (status, "500000 bytes" in found["error"]["message"]) == (413, True)


# --- other APIs ------------------------------------------------------------------------------------------------------


async def test_messages_of_anthropic_are_translated_twice() -> None:
    async with triton_rig((STREAM,)) as (one, engine):
        client = await one.client()
        post(client, "/v1/messages", max_tokens=9, system="Be brief.", messages=ASK, stream=True)
        body = (await client.answer())[2]
        found = [json.loads(part.partition(b"data: ")[2]) for part in body.split(b"\n\n")[:-1]]
        assert [part["delta"]["text"] for part in found if part["type"] == "content_block_delta"] == ["a", "b"]
        assert found[-2]["usage"] == {"input_tokens": 7, "output_tokens": 2}
        assert sent(engine)[1]["text_input"] == "Be brief.\n\nUser: Hello\nAssistant:"
        assert one.totals() == (1, 7, 2)
        status, _, error = await ask(one, "/v1/messages", max_tokens=9, messages=ASK, tools=[
            {"name": "f", "input_schema": {}}
        ])  # fmt: skip
        assert (status, error["type"], "tools is not supported" in error["error"]["message"]) == (400, "error", True)


async def test_responses_api_is_translated_twice() -> None:
    async with triton_rig((whole(),)) as (one, engine):
        status, _, found = await ask(one, "/v1/responses", input="x")
        assert (status, found["object"], found["status"]) == (200, "response", "completed")
        assert found["output"][0]["content"][0]["text"]
        assert sent(engine)[0] == "/v2/models/served-m/generate"


async def test_api_of_ollama_is_translated_twice() -> None:
    async with triton_rig((STREAM,), (whole(),), (VECTORS,)) as (one, engine):
        client = await one.client()
        post(client, "/api/chat", messages=ASK)
        lines = [json.loads(line) for line in (await client.answer())[2].splitlines()]
        assert [line["message"]["content"] for line in lines] == ["a", "b", ""]
        assert (lines[-1]["done_reason"], lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == ("length", 7, 2)
        post(client, "/api/generate", prompt="Hello", raw=True, stream=False)
        assert json.loads((await client.answer())[2])["response"] == "Hi"
        assert sent(engine)[1]["text_input"] == "Hello"
        post(client, "/api/embed", input=["x", "y"])
        assert json.loads((await client.answer())[2])["embeddings"] == [[1.0, 2.0], [3.0, 4.0]]
        requests = len(engine.requests)
        for path in ("/api/chat", "/api/generate"):
            for keep_alive, reason in ((0, "unload"), (5, "load")):
                post(client, path, keep_alive=keep_alive)
                assert json.loads((await client.answer())[2])["done_reason"] == reason
        assert len(engine.requests) == requests


# --- failures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_error_of_triton_keeps_its_status_and_gets_the_form_of_openai(*, stream: bool) -> None:
    replies = [
        document(b'{"error":"too long"}', "400 Bad Request"),
        document(b'data: {"error":"too long"}\n\n', "400 Bad Request", kind="text/event-stream; charset=utf-8"),
    ]
    for reply in replies:
        async with triton_rig((reply,)) as (one, _):
            status, fields, found = await ask(one, stream=stream)
            assert (status, fields["content-type"], found["error"]["message"]) == (400, "application/json", "too long")
            assert one.totals()[1:] == (0, 0)


async def test_error_with_status_200_gets_500() -> None:
    async with triton_rig((document(b'{"error":"expects exactly 1 response"}'),)) as (one, _):
        status, _, found = await ask(one)
        assert (status, found["error"]["message"]) == (500, "expects exactly 1 response")


async def test_error_in_a_stream_is_its_last_event() -> None:
    script = (HEAD + piece("a") + event('{"error":"out of memory"}') + END,)
    async with triton_rig(script) as (one, _):
        status, _, events = await ask(one, stream=True)
        assert (status, events[-1]["error"]["message"]) == (200, "out of memory")


@pytest.mark.parametrize("script", [(HEAD + piece("a"), CLOSE), (HEAD + piece("a") + event("{"), HOLD)])
async def test_broken_stream_ends_with_an_error_event_without_the_last_chunk(script: Any) -> None:
    async with triton_rig(script) as (one, _):
        client = await one.client()
        post(client, stream=True)
        await client.head()
        body = b""
        while b'"error"' not in body:
            body += await client.chunk()
        assert events_of(body)[-1]["error"]["code"] == "upstream_error"
        assert (b"[DONE]" in body, await client.rest()) == (False, b"")


@pytest.mark.parametrize("reply", [document(b"{"), document(b"{}"), document(b'{"text_output":{}}')])
async def test_malformed_document_gets_502(reply: bytes) -> None:
    async with triton_rig((reply,)) as (one, _):
        for stream in (True, False):
            status, _, found = await ask(one, stream=stream)
            assert (status, found["error"]["code"]) == (502, "upstream_error")


async def test_document_above_the_size_limit_gets_502(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(translated_call, "DOCUMENT_BYTES_MAX", 1000)
    reply = STREAM_HEAD.replace(b"text/event-stream", b"application/json") + chunk(b"[" * 600) * 2
    async with triton_rig((reply, HOLD)) as (one, engine):
        status, _, found = await ask(one, EMBEDDINGS, input=["x"])
        assert (status, "1000 bytes" in found["error"]["message"]) == (502, True)
        await asyncio.wait_for(engine.left.wait(), 60)
        assert one.in_use() == 0


async def test_queued_stream_gets_keepalives_and_then_an_error_as_an_event() -> None:
    reply = document(b'{"error":"too long"}', "400 Bad Request")
    async with (
        ScriptedEngine((reply,)) as engine,
        rig(settings=FrontSettings(keepalive_seconds=0.1), dialects=()) as one,
    ):
        change(one, triton=TRITON)
        client = await one.client()
        post(client, stream=True)
        status, fields = await client.head()
        assert (status, fields["content-type"], fields["x-pilotlight-cold"]) == (200, "text/event-stream", "1")
        assert (await client.chunk()).startswith(b": waiting")
        one.routes(engine.address)
        body = b""
        while b'"error"' not in body:
            body += await client.chunk()
        assert b'"message":"too long"' in body


async def test_http_1_0_stream_ends_with_the_connection() -> None:
    async with triton_rig((STREAM,)) as (one, _):
        client = await one.client()
        post(client, minor=0, stream=True)
        assert "transfer-encoding" not in (await client.head())[1]
        assert events_of(await client.rest())[-1] == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
async def test_client_disconnect_closes_the_connection_of_triton(*, stream: bool) -> None:
    script = (HEAD + piece("a"), HOLD) if stream else (HOLD,)
    async with triton_rig(script) as (one, engine):
        client = await one.client()
        post(client, stream=stream)
        await (client.chunk() if stream and await client.head() else engine.asked.wait())
        client.leave()
        await asyncio.wait_for(engine.left.wait(), 60)
        await one.settled()
        assert one.in_use() == 0
