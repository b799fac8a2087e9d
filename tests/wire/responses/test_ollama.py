"""Ollama's API on the wire: each endpoint, queued and broken streams, errors, limits and management requests."""

from __future__ import annotations

import asyncio
import json
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import pytest

from autoscaler.contract import CatalogueDelta, Clocks, FrontSettings, KeyEntry, ModelName, TenantEntry, TenantName
from gateway.control import fault_containment
from gateway.dialects import ollama_requests, translated_request
from gateway.http.body_buffers import LARGE_BYTES
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
)
from tests.support.harness.gateway.gateway_rig import Client, Rig, rig, rig_and_client
from tests.support.waiting import until

MESSAGES = [{"role": "user", "content": "Hello"}]
CHAT = document(
    b'{"choices":[{"message":{"content":"Hi"},"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":7,"completion_tokens":2}}'
)
VECTORS = document(b'{"data":[{"embedding":[0.5,1]}],"usage":{"prompt_tokens":3}}')


def post(client: Client, path: str, lines: str = "", **members: object) -> None:
    body = json.dumps({"model": "m", **members}).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: gw\r\n{lines}content-length: {len(body)}\r\n\r\n"
    client.send(head.encode() + body)


async def ask(one: Rig, path: str, lines: str = "", **members: object) -> tuple[int, dict[str, str], Any]:
    """Returns the response; the body is one JSON document, or a list of lines."""
    client = await one.client()
    post(client, path, lines, **members)
    status, fields, body = await client.answer()
    streams = fields["content-type"] == "application/x-ndjson"
    return status, fields, [json.loads(line) for line in body.splitlines()] if streams else json.loads(body)


async def get(one: Rig, path: str, *, method: str = "GET", lines: str = "") -> tuple[int, Any]:
    client = await one.client()
    client.send(f"{method} {path} HTTP/1.1\r\nhost: gw\r\n{lines}\r\n".encode())
    status, _, body = await client.answer()
    return status, json.loads(body)


def sent(engine: ScriptedEngine) -> tuple[str, dict[str, Any]]:
    """Path and body of the engine's last request."""
    head, _, body = engine.requests[-1].partition(b"\r\n\r\n")
    return head.split(b" ")[1].decode(), json.loads(body)


# --- the endpoints ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/api/chat", "/api/chat/", "//api/chat"])
async def test_chat_stream_is_converted_to_json_lines_and_tokens_are_counted(path: str) -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(engine.address) as one:
        status, fields, lines = await ask(one, path, messages=MESSAGES)
        assert (status, fields["cache-control"], fields["x-accel-buffering"]) == (200, "no-cache", "no")
        assert "server-timing" in fields
        assert [line["message"]["content"] for line in lines] == ["a", "b", "c", ""]
        assert [line["done"] for line in lines] == [False, False, False, True]
        assert (lines[-1]["prompt_eval_count"], lines[-1]["eval_count"]) == (7, 2)
        assert 0 < lines[-1]["prompt_eval_duration"] <= lines[-1]["total_duration"]
        assert one.totals() == (1, 7, 2)
        path, body = sent(engine)
        assert (path, body["model"], body["stream_options"]) == (
            "/v1/chat/completions", "served-m", {"include_usage": True}
        )  # fmt: skip
        assert b"\r\ncontent-type: application/json\r\n" in engine.requests[0]


@pytest.mark.parametrize("joined", [False, True])
async def test_tokens_of_an_engine_without_stream_options_are_counted(joined: bool) -> None:
    pieces = (STREAM_HEAD, delta("a"), delta("b"), DONE + END)
    script = (b"".join(pieces),) if joined else pieces
    async with ScriptedEngine(script) as engine, rig(engine.address) as one:
        entry = msgspec.structs.replace(one.front.directory.names._models[ModelName("m")], takes_stream_options=False)
        one.front.catalogue(CatalogueDelta(epoch=1, version=9, models=(entry,)))
        lines = (await ask(one, "/api/chat", messages=MESSAGES))[2]
        assert "stream_options" not in sent(engine)[1]
        assert (lines[-1]["eval_count"], "prompt_eval_count" in lines[-1]) == (2, False)
        await one.settled()
        assert one.totals() == (1, 0, 2)


@pytest.mark.parametrize(
    ("path", "members", "text"),
    [
        ("/api/chat", {"messages": MESSAGES}, ("message", "content")),
        ("/api/generate", {"prompt": "Hello"}, ("response",)),
    ],
)
async def test_response_without_streaming_is_one_json_document(
    path: str, members: dict[str, object], text: tuple[str, ...]
) -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address) as one:
        status, fields, found = await ask(one, path, "", stream=False, **members)
        assert (status, fields["content-type"]) == (200, "application/json; charset=utf-8")
        assert (found["done"], found["done_reason"], found["eval_count"]) == (True, "stop", 2)
        for name in text:
            found = found[name]
        assert found == "Hi"
        assert sent(engine) == ("/v1/chat/completions", {"model": "served-m", "messages": MESSAGES})
        assert one.totals() == (1, 7, 2)


async def test_raw_prompt_is_sent_to_the_completions_endpoint() -> None:
    async with ScriptedEngine((document(b'{"choices":[{"text":"Hi"}]}'),)) as engine, rig(engine.address) as one:
        found = await ask(one, "/api/generate", prompt="<s>", raw=True, stream=False)
        assert found[2]["response"] == "Hi"
        assert sent(engine) == ("/v1/completions", {"model": "served-m", "prompt": "<s>"})


async def test_embed_returns_the_vectors_of_the_engine() -> None:
    async with ScriptedEngine((VECTORS,)) as engine, rig(engine.address) as one:
        found = (await ask(one, "/api/embed", input=["a"]))[2]
        assert (found["model"], found["embeddings"], found["prompt_eval_count"]) == ("m", [[0.5, 1]], 3)
        assert sent(engine)[0] == "/v1/embeddings"
        assert (await ask(one, "/api/embeddings", prompt="a"))[2] == {"embedding": [0.5, 1]}


async def test_tags_show_ps_and_version_requests_start_no_model() -> None:
    async with rig(state="zero") as one:
        status, tags = await get(one, "/api/tags")
        assert (status, [(row["name"], row["model"]) for row in tags["models"]]) == (200, [("m:latest", "m:latest")])
        assert len(tags["models"][0]["digest"]) == 64
        assert await get(one, "/api/ps") == (200, {"models": []})
        assert await get(one, "/api/version") == (200, {"version": ollama_requests.API_VERSION})
        for name in ("m", "m:latest", "alias-m:latest"):
            client = await one.client()
            body = json.dumps({"model": name}).encode()
            client.send(b"POST /api/show HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
            status, _, shown = await client.answer()
            assert (status, json.loads(shown)["model_info"]["pilotlight.context_length"]) == (200, 4096)
        assert one.front.report().levels == ()
    async with rig("127.0.0.1:9") as one:
        (running,) = (await get(one, "/api/ps"))[1]["models"]
        assert (running["model"], running["context_length"]) == ("m:latest", 4096)
        assert "127.0.0.1:9" not in json.dumps(running)


@pytest.mark.parametrize(
    ("method", "path", "command"),
    [
        ("POST", "/api/pull", "pilotlight weights pull"),
        ("POST", "/api/push", "pilotlight weights push"),
        ("POST", "/api/create", "pilotlight serve -c"),
        ("POST", "/api/copy", "spec.aliases"),
        ("POST", "/api/blobs/sha256:0000", "pilotlight serve -c"),
        ("DELETE", "/api/delete", "kubectl delete models.pilotlight.dev"),
    ],
)
async def test_management_request_gets_400_that_names_the_equivalent_command(
    method: str, path: str, command: str
) -> None:
    async with rig() as one:
        status, found = await get(one, path, method=method, lines="content-length: 0\r\n")
        assert (status, command in found["error"]) == (400, True)
        assert (await get(one, path, method="PUT"))[0] == 405


@pytest.mark.parametrize("framing", ["content-length: 5000000000", "transfer-encoding: chunked"])
async def test_file_of_ollama_create_gets_400_with_the_command_before_its_upload(framing: str) -> None:
    async with rig() as one:
        client = await one.client()
        client.send(f"POST /api/blobs/sha256:0000 HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
        client.send(b"20000\r\n" + b"x" * 0x20000)
        status, _, body = await client.answer()
        assert (status, "pilotlight serve -c" in json.loads(body)["error"]) == (400, True)
        client = await one.client()
        client.send(b"HEAD /api/blobs/sha256:0000 HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await client.head())[0] == 400


@pytest.mark.parametrize("name", ["m:latest", "alias-m", "alias-m:latest"])
async def test_latest_tag_resolves_to_the_model_without_the_tag(name: str) -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address) as one:
        found = (await ask(one, "/api/chat", model=name, messages=MESSAGES, stream=False))[2]
        assert (found["model"], sent(engine)[1]["model"]) == (name, "served-m")


# --- starting and stopping a model -----------------------------------------------------------------------------------


async def test_request_without_a_prompt_starts_the_model_and_reaches_no_engine() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig() as one:
        client = await one.client()
        post(client, "/api/generate", keep_alive="10m")
        await until("it waits for a start", lambda: bool(one.front.report().levels))
        one.routes(engine.address)
        status, fields, body = await client.answer()
        assert (status, fields["x-pilotlight-cold"], json.loads(body)["done_reason"]) == (200, "1", "load")
        assert engine.requests == []
        assert one.in_use() == 0
        assert (await ask(one, "/api/chat"))[2]["message"] == {"role": "assistant", "content": ""}
        assert (await ask(one, "/api/embed", input=[]))[2]["embeddings"] == []


async def test_unload_request_gets_200_and_starts_no_model() -> None:
    async with rig() as one:
        for path in ("/api/generate", "/api/chat"):
            found = await ask(one, path, keep_alive=0)
            assert (found[0], found[2]["done_reason"]) == (200, "unload")
        assert one.front.report().levels == ()
        assert (await ask(one, "/api/generate", model="none", keep_alive=0))[0] == 404


EARLY = FrontSettings(keepalive_seconds=0.1)


async def test_queued_stream_gets_keepalive_spaces_and_stays_valid_json_lines() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(settings=EARLY) as one:
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        status, fields = await client.head()
        assert (status, fields["content-type"], fields["x-pilotlight-cold"]) == (200, "application/x-ndjson", "1")
        assert [await client.chunk(), await client.chunk()] == [b" ", b" "]
        one.routes(engine.address)
        body = b"  " + await client.chunks()
        lines = [json.loads(line) for line in body.split(b"\n")[:-1]]
        assert [line["done"] for line in lines] == [False, False, False, True]


async def test_stream_of_a_silent_engine_gets_keepalive_spaces() -> None:
    scripts = [(STREAM_HEAD + delta("a"), HOLD, DONE + END), (HOLD, STREAM)]
    async with ScriptedEngine(*scripts) as engine, rig(engine.address, settings=EARLY) as one:
        for _ in scripts:
            client = await one.client()
            engine.release.clear()
            post(client, "/api/chat", messages=MESSAGES)
            assert (await client.head())[1]["content-type"] == "application/x-ndjson"
            body = b""
            while not body.endswith(b" "):
                body += await client.chunk()
            engine.release.set()
            body += await client.chunks()
            lines = [json.loads(line) for line in body.splitlines()]
            assert lines[0]["message"]["content"] == "a"
            assert lines[-1]["done"] is True


async def test_queued_http_1_0_stream_ends_with_the_connection() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(settings=EARLY) as one:
        client = await one.client()
        body = json.dumps({"model": "m", "messages": MESSAGES}).encode()
        client.send(b"POST /api/chat HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await client.head()
        one.routes(engine.address)
        assert json.loads((await client.rest()).splitlines()[-1])["done"] is True


@pytest.mark.parametrize(
    ("reply", "text"),
    [(document(b'{"error":{"message":"too long"}}', "400 Bad"), "too long"), (document(b"x"), "the engine ended")],
)
async def test_engine_error_after_the_response_head_was_sent_is_a_json_line(reply: bytes, text: str) -> None:
    async with ScriptedEngine((reply,)) as engine, rig(settings=EARLY) as one:
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        await client.head()
        one.routes(engine.address)
        pieces = b""
        while b"\n" not in pieces:
            pieces += await client.chunk()
        assert text in json.loads(pieces)["error"]


async def test_shutdown_rejects_a_queued_stream_with_an_error_line() -> None:
    async with rig(settings=EARLY) as one:
        client = await one.client()
        post(client, "/api/generate", prompt="a")
        await client.head()
        one.front.perform(one.front.dispatch.shutdown(one.front.clock()))
        assert json.loads(await client.chunks()) == {"error": "the gateway is stopping; try again"}


# --- failures --------------------------------------------------------------------------------------------------------


async def test_broken_stream_ends_with_an_error_line_without_the_last_chunk() -> None:
    async with ScriptedEngine((STREAM_HEAD + delta("a"), CLOSE)) as engine, rig(engine.address) as one:
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        await client.head()
        assert json.loads(await client.chunk())["message"]["content"] == "a"
        assert "error" in json.loads(await client.chunk())
        assert await client.rest() == b""


@pytest.mark.parametrize(
    "reply",
    [
        (document(b'{"choices":'),), (document(b"[]"),), (document(b'{"choices":[]}'),), (document(b"", "204 No"),),
        (b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{", CLOSE),
        (b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n{"choices":[', CLOSE),
    ],
)  # fmt: skip
async def test_malformed_engine_document_gets_502_and_connection_stays_open(reply: Any) -> None:
    async with ScriptedEngine(reply) as engine, rig_and_client(engine.address) as (_, client):
        for _ in range(2):
            post(client, "/api/chat", messages=MESSAGES, stream=False)
            status, _, body = await client.answer()
            assert (status, list(json.loads(body))) == (502, ["error"])


async def test_engine_document_above_the_size_limit_gets_502_that_names_the_fix(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(translated_call, "DOCUMENT_BYTES_MAX", 1000)
    reply = STREAM_HEAD.replace(b"text/event-stream", b"application/json") + chunk(b"[" * 600) * 2
    async with ScriptedEngine((reply, HOLD)) as engine, rig(engine.address) as one:
        status, fields, found = await ask(one, "/api/embed", input="a")
        assert (status, fields["x-should-retry"]) == (502, "false")
        assert "larger than 1000 bytes" in found["error"]
        assert "send fewer inputs" in found["error"]
        await asyncio.wait_for(engine.left.wait(), 60)
        assert one.in_use() == 0


async def test_engine_event_without_an_end_ends_the_stream_with_an_error() -> None:
    piece = chunk(b"data: " + b"x" * 65536)
    async with ScriptedEngine((STREAM_HEAD + delta("a") + piece * 20, HOLD)) as engine, rig(engine.address) as one:
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        await client.head()
        assert b'"error"' in await client.rest()
        await asyncio.wait_for(engine.left.wait(), 60)


async def test_engine_error_keeps_its_status_and_gets_the_ollama_error_format() -> None:
    reply = document(b'{"error":{"message":"context too long","type":"x"}}', "400 Bad Request")
    async with ScriptedEngine((reply,)) as engine, rig(engine.address) as one:
        for stream in (True, False):
            status, fields, found = await ask(one, "/api/chat", messages=MESSAGES, stream=stream)
            assert (status, found) == (400, {"error": "context too long"})
            assert fields["content-type"].startswith("application/json")


async def test_request_to_a_busy_engine_is_retried_on_another_replica() -> None:
    busy = document(b"{}", "503 Busy")
    async with (
        ScriptedEngine((busy,)) as first,
        ScriptedEngine((STREAM,)) as second,
        rig(first.address, second.address) as one,
    ):
        for _ in range(4):
            status, _, lines = await ask(one, "/api/chat", messages=MESSAGES)
            assert (status, lines[-1]["done"]) == (200, True)
        assert first.requests


async def test_stalled_stream_gets_an_error_line() -> None:
    clocks = Clocks(stall_seconds_max=0.1)
    async with ScriptedEngine((STREAM_HEAD + delta("a"), HOLD)) as engine, rig(engine.address, clocks=clocks) as one:
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        await client.head()
        await client.chunk()
        assert "in time" in json.loads(await client.chunk())["error"]


async def test_client_disconnect_during_a_stream_releases_the_engine() -> None:
    async with ScriptedEngine((STREAM_HEAD + delta("a"), HOLD)) as engine, rig(engine.address) as one:
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        await client.head()
        await client.chunk()
        client.leave()
        await asyncio.wait_for(engine.left.wait(), 60)
        await one.settled()
        assert one.in_use() == 0


async def test_stream_needs_a_done_marker_or_a_last_chunk_to_be_complete() -> None:
    closing = STREAM_HEAD.replace(b"Transfer-Encoding: chunked\r\n", b"")
    text = b'data: {"choices":[{"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
    scripts = [
        (STREAM_HEAD + chunk(text) + END,),
        (closing + text + b"data: [DONE]\n\n", CLOSE),
        (closing + text, CLOSE),
    ]
    async with ScriptedEngine(*scripts) as engine, rig(engine.address) as one:
        for _ in range(2):
            assert (await ask(one, "/api/chat", messages=MESSAGES))[2][-1]["done"] is True
        client = await one.client()
        post(client, "/api/chat", messages=MESSAGES)
        await client.head()
        assert (await client.rest()).endswith(b'try again, or read the log of the engine"}\n\r\n')


# --- requests --------------------------------------------------------------------------------------------------------


async def test_large_body_with_images_is_translated_and_its_memory_is_released() -> None:
    image = "iVBORw0K" + "A" * 700_000
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address) as one:
        client = await one.client()
        for _ in range(3):
            post(client, "/api/chat", messages=[{"role": "user", "content": "a", "images": [image]}], stream=False)
            assert (await client.answer())[0] == 200
        (part,) = sent(engine)[1]["messages"][0]["content"][1:]
        assert part["image_url"]["url"] == f"data:image/png;base64,{image}"
        await until("the room is free", lambda: one.front.room.held_bytes == 0)
        post(client, "/api/chat", messages=[{"role": "user", "content": "a" * 700_000}], format="canary")
        assert (await client.answer())[0] == 400
        await until("the room is free", lambda: one.front.room.held_bytes == 0)


async def test_request_body_above_a_size_limit_gets_413(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(limits=Limits(body_bytes_max=1000)) as one:
        assert (await ask(one, "/api/chat", messages=[{"role": "user", "content": "a" * 1000}]))[0] == 413
    monkeypatch.setattr(translated_request, "BODY_BYTES_MAX", 500)
    async with rig() as one:
        found = await ask(one, "/api/chat", messages=[{"role": "user", "content": "a" * 500}])
        assert (found[0], "500 bytes" in found[2]["error"]) == (413, True)
        client = await one.client()
        client.send(b"POST /api/chat HTTP/1.1\r\nhost: x\r\ncontent-length: 5000\r\n\r\n{")
        assert (await client.answer())[0] == 413


async def test_translated_body_above_the_limit_is_rejected() -> None:
    async with rig(limits=Limits(body_bytes_max=1000)) as one:
        images = ["iVBORw"] * 40
        found = await ask(one, "/api/chat", messages=[{"role": "user", "content": "", "images": images}])
        assert (found[0], "1000 bytes" in found[2]["error"]) == (413, True)


@pytest.mark.parametrize(
    ("path", "members"),
    [
        ("chat", rb'"stream":false,"messages":[{"role":"user","content":"a\ud83d"}]'),
        ("generate", rb'"stream":false,"prompt":"a\ud83d"'),
        ("embed", rb'"input":["a\ud83d"]'),
        ("embeddings", rb'"prompt":"a\ud83d"'),
        ("show", rb'"system":"a\ud83d"'),
    ],
)
async def test_request_with_a_byte_order_mark_and_a_lone_surrogate_is_served(path: str, members: bytes) -> None:
    reply = VECTORS if path.startswith("embed") else CHAT
    async with ScriptedEngine((reply,)) as engine, rig_and_client(engine.address) as (_, client):
        body = b'\xef\xbb\xbf{"model":"m",%b}' % members
        client.send(
            b"POST /api/%b HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % (path.encode(), len(body)) + body
        )
        assert (await client.answer())[0] == 200
        assert path == "show" or "a\ufffd" in json.dumps(sent(engine)[1], ensure_ascii=False)


@pytest.mark.parametrize(
    "lines", ["", "content-type: application/x-www-form-urlencoded\r\n", "content-type: text/a\r\n"]
)
async def test_request_of_any_content_type_is_served_unless_of_foreign_origin(lines: str) -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address) as one:
        assert (await ask(one, "/api/chat", lines, messages=MESSAGES, stream=False))[0] == 200
        for page in ("origin: https://evil.example\r\n", "sec-fetch-site: cross-site\r\n"):
            status, _, found = await ask(one, "/api/chat", lines + page, messages=MESSAGES)
            assert (status, list(found)) == (415, ["error"])


async def test_missing_key_gets_401_and_forbidden_model_is_not_found(tmp_path: Path) -> None:
    key = KeyEntry(sha256=sha256(b"sk-canary").hexdigest())
    tenant = TenantEntry(name=TenantName("other"), keys=(key,), models=("none-*",))
    sink = os.open(tmp_path / "events", os.O_RDWR | os.O_CREAT)
    async with rig(settings=FrontSettings(keys_needed=True), events=sink) as one:
        one.front.catalogue(CatalogueDelta(epoch=1, version=9, tenants=(tenant,)))
        for path in ("/api/tags", "/api/ps"):
            assert (await get(one, path))[0] == 401
            assert await get(one, path, lines="authorization: Bearer sk-canary\r\n") == (200, {"models": []})
        for path in ("/api/chat", "/api/show", "/api/pull"):
            status, _, found = await ask(one, path, messages=[{"role": "user", "content": "canary-prompt"}])
            assert (status, list(found)) == (401, ["error"])
        lines = "authorization: Bearer sk-canary\r\n"
        status, _, found = await ask(one, "/api/chat", lines, messages=[{"role": "user", "content": "canary-prompt"}])
        assert (status, "no such model" in found["error"]) == (404, True)
        metrics = one.front.metrics()
    assert b"canary" not in metrics + os.pread(sink, 1 << 20, 0)
    os.close(sink)


async def test_default_model_or_model_header_replaces_an_empty_model_name() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address, settings=FrontSettings(default_model="m")) as one:
        assert (await ask(one, "/api/chat", model="", messages=MESSAGES, stream=False))[0] == 200
        assert (await ask(one, "/api/chat", "x-model: m\r\n", model="", messages=MESSAGES, stream=False))[0] == 200
        assert (await ask(one, "/api/chat", "x-model: n\r\n", messages=MESSAGES))[0] == 400


async def test_cache_salt_and_adapter_of_the_model_are_added_to_the_request() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig(engine.address) as one:
        entry = msgspec.structs.replace(
            one.front.directory.names._models[ModelName("m")], takes_cache_salt=True, lora='[{"id":0,"scale":1}]'
        )
        one.front.catalogue(CatalogueDelta(epoch=1, version=9, models=(entry,)))
        await ask(one, "/api/chat", messages=MESSAGES, stream=False, cache_salt="canary")
        body = sent(engine)[1]
        assert (len(body["cache_salt"]), body["lora"]) == (32, [{"id": 0, "scale": 1}])
        assert (await ask(one, "/api/embed", input="a"))[0] == 400


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with ScriptedEngine((CHAT,)) as engine, rig_and_client(engine.address) as (_, client):
        post(client, "/api/generate", keep_alive=0)
        post(client, "/api/generate", prompt="a", stream=False)
        post(client, "/api/show")
        bodies = [json.loads((await client.answer())[2]) for _ in range(3)]
        assert [body.get("done_reason") for body in bodies] == ["unload", "stop", None]


@pytest.mark.parametrize(
    ("reply", "stream"), [(STREAM, True), (CHAT, True), (CHAT, False)], ids=["events", "early", "whole"]
)
async def test_exception_while_a_response_is_converted_ends_only_its_request(
    reply: bytes, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reported: list[tuple[str | None, str]] = []
    monkeypatch.setattr(fault_containment, "report_fault", lambda model, what, _: reported.append((model, what)))
    real = time.time
    async with ScriptedEngine((reply, reply)) as engine, rig_and_client(engine.address) as (one, client):

        def fail() -> float:
            if engine.requests:
                raise LookupError("injected")
            return real()

        with monkeypatch.context() as patch:
            patch.setattr(time, "time", fail)
            post(client, "/api/chat", messages=MESSAGES, stream=stream)
            await until("the exception was contained", lambda: reported)
            await until("the slot is free", lambda: one.in_use() == 0)
        assert reported == [("m", "request")]
        status, _, body = await client.answer()
        assert (status, b"error" in body) == (503, True)
        assert (await ask(one, "/api/chat", messages=MESSAGES, stream=stream))[0] == 200


async def test_memory_budget_counts_the_size_of_the_translated_body() -> None:
    quotes = '"' * LARGE_BYTES
    calls = [{"function": {"name": "f", "arguments": {"a": quotes}}}]  # sent as text in text: twice as long
    received = len(json.dumps(calls))
    async with rig() as one:
        clients = [await one.client() for _ in range(2)]
        post(clients[0], "/api/chat", messages=[{"role": "assistant", "tool_calls": calls}])
        await until("it is queued", lambda: one.front.room.held_bytes > received * 3 // 2)
        assert one.front.dispatch.parked.bytes == 0
        post(clients[1], "/api/chat", messages=MESSAGES, ignored="x" * 2 * LARGE_BYTES)
        await until("it is queued", lambda: one.front.dispatch.parked.bytes > 0)
        await until("the received body is released", lambda: one.front.room.held_bytes < received * 5 // 2)
        for client in clients:
            client.leave()
        await until("all is released", lambda: one.front.room.held_bytes + one.front.dispatch.parked.bytes == 0)
