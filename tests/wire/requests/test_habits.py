"""What clients and people expect of an LLM server by habit: the page at `/`, near misses of paths, names of models."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any

import msgspec
import pytest

from autoscaler.contract import CatalogueDelta, FrontSettings, KeyEntry, ModelName, TenantEntry, TenantName
from gateway.http.body_buffers import LARGE_BYTES
from tests.support.fakes.engines.scripted_engine import OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import Rig, rig

HTML = "accept: text/html,application/xhtml+xml\r\n"


async def get(one: Rig, path: str, more: str = "", method: str = "GET") -> tuple[int, dict[str, str], bytes]:
    client = await one.client()
    client.send(f"{method} {path} HTTP/1.1\r\nhost: gw:8080\r\n{more}\r\n".encode())
    return await client.answer()


def catalogue(one: Rig, settings: FrontSettings | None = None, **changes: Any) -> None:
    """Changes the one Model, and the settings."""
    entry = msgspec.structs.replace(one.front.directory.names._models[ModelName("m")], **changes)
    key = KeyEntry(sha256=sha256(b"sk-other").hexdigest())
    tenants = (TenantEntry(name=TenantName("other"), keys=(key,), models=("none-*",)),)
    one.front.catalogue(
        CatalogueDelta(epoch=1, version=9, full=True, models=(entry,), tenants=tenants, settings=settings)
    )


async def test_landing_page_for_html_clients_lists_models_and_a_curl_command() -> None:
    async with rig("127.0.0.1:9", state="zero") as one:
        catalogue(one, name=ModelName("<m>&'"))
        status, fields, body = await get(one, "/", HTML)
        page = body.decode()
        assert (status, fields["content-type"], fields["vary"]) == (200, "text/html; charset=utf-8", "accept")
        assert "default-src 'none'" in fields["content-security-policy"]
        assert "<td>&lt;m&gt;&amp;&#x27;</td><td>zero</td><td>4096</td>" in page
        assert "curl http://gw:8080/v1/chat/completions" in page
        assert "<m>" not in page
        assert "127.0.0.1:9" not in page
        assert one.front.report().levels == ()


@pytest.mark.parametrize(
    ("target", "more", "url"),
    [
        ("/", "X-Forwarded-Proto: https\r\n", "https://gw:8080"),
        ("/", "X-Forwarded-Proto: HTTP\r\n", "http://gw:8080"),
        ("/", "X-Forwarded-Proto: javascript\r\n", "http://gw:8080"),
        ("/", "X-Forwarded-Proto: https\r\nX-Forwarded-Proto: http\r\n", "http://gw:8080"),
        ("http://llm.localhost:9000/", "", "http://llm.localhost:9000"),
        ("http://[::1]", "X-Forwarded-Proto: https\r\n", "https://[::1]"),
    ],
)
async def test_landing_page_shows_the_address_that_the_client_uses(target: str, more: str, url: str) -> None:
    async with rig() as one:
        body = (await get(one, target, HTML + more))[2]
        assert f"curl {url}/v1/chat/completions" in body.decode()


async def test_landing_page_is_json_unless_the_accept_header_names_html() -> None:
    async with rig(state="zero") as one:
        status, fields, body = await get(one, "/", "accept: */*\r\n")
        assert (status, fields["content-type"]) == (200, "application/json")
        found = json.loads(body)
        assert found["status"] == "ok"
        assert found["models"] == [{"id": "m", "state": "zero", "context_length": 4096}]


@pytest.mark.parametrize("more", ["", "authorization: Bearer sk-other\r\n", "authorization: Bearer sk-canary\r\n"])
@pytest.mark.parametrize("accept", ["", HTML])
@pytest.mark.parametrize("name", ["secret-model", "none-1"])
async def test_landing_page_shows_only_models_that_the_key_may_call(name: str, accept: str, more: str) -> None:
    async with rig() as one:
        catalogue(one, FrontSettings(keys_needed=True), name=ModelName(name))
        status, _, body = await get(one, "/", accept + more)
        assert status == 200
        assert (name.encode() in body) == (name == "none-1" and "other" in more)
        assert b"canary" not in body
        assert (b"an API key" in body) == ("other" not in more)


async def test_misspelled_api_path_gets_404_that_names_the_correct_path() -> None:
    async with rig() as one:
        status, _, body = await get(one, "/api/v1/chat/completions", method="POST", more="content-length: 0\r\n")
        error = json.loads(body)["error"]
        assert (status, error["code"]) == (404, "not_found")
        assert error["message"].endswith("use /v1/chat/completions")
        client = await one.client()  # rejected from its head, too
        client.send(b"POST /v1/Chat/Completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n{")
        assert b"use /v1/chat/completions" in (await client.answer())[2]


@pytest.mark.parametrize("path", ["//v1/chat/completions", "/v1/v1/chat/completions/", "/chat/completions"])
async def test_variants_of_the_chat_path_are_forwarded_to_the_canonical_path(path: str) -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        client = await one.client()
        assert (await client.ask(path=path))[0] == 200
        assert engine.requests[0].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


async def test_model_list_gives_context_length_in_vllm_and_llama_cpp_fields() -> None:
    async with rig() as one:
        (row,) = json.loads((await get(one, "/v1/models"))[2])["data"]
        assert (row["context_length"], row["max_model_len"], row["meta"]) == (4096, 4096, {"n_ctx": 4096})
        catalogue(one, context_tokens=None)
        (row,) = json.loads((await get(one, "/v1/models"))[2])["data"]
        assert not {"context_length", "max_model_len", "meta"} & row.keys()


@pytest.mark.parametrize("serves_aliases", [False, True])
async def test_aliases_are_listed_only_if_lists_aliases_is_set(serves_aliases: bool) -> None:
    async with rig() as one:
        names = [row["id"] for row in json.loads((await get(one, "/v1/models"))[2])["data"]]
        assert names == ["m"]
        assert json.loads((await get(one, "/v1/models/alias-m"))[2])["id"] == "m"
        catalogue(
            one, FrontSettings(lists_aliases=True), aliases=("alias-m", "My Model [Q4] (fast)"),
            serves_aliases=serves_aliases,
        )  # fmt: skip
        tags = [row["name"] for row in json.loads((await get(one, "/api/tags"))[2])["models"]]
        assert tags == ["m:latest", "alias-m:latest", "My Model [Q4] (fast):latest"]
        names = [row["id"] for row in json.loads((await get(one, "/v1/models"))[2])["data"]]
        assert names == ["m", "alias-m", "My Model [Q4] (fast)"]
        assert json.loads((await get(one, "/v1/models/My%20Model%20%5BQ4%5D%20(fast)"))[2])["id"] == names[2]


async def test_alias_with_spaces_and_brackets_becomes_the_served_model_name() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        catalogue(one, aliases=("My Model [Q4] (fast)",))
        for path, model in (
            ("/v1/chat/completions", "My Model [Q4] (fast)"),
            ("/openai/deployments/My%20Model%20%5bQ4%5d%20%28fast%29/chat/completions", "other"),
        ):
            client = await one.client()
            assert (await client.ask(path=path, model=model))[0] == 200
            assert b'"model":"served-m"' in engine.requests[-1]


FORM = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--b--\r\n'


async def test_default_model_is_used_only_if_the_request_names_no_model() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        client = await one.client()
        json_lines = "content-type: application/json\r\n"
        form_lines = "content-type: multipart/form-data; boundary=b\r\n"

        async def ask(path: str, body: bytes, lines: str) -> int:
            client.send(
                f"POST {path} HTTP/1.1\r\nhost: x\r\n{lines}content-length: {len(body)}\r\n\r\n".encode() + body
            )
            return (await client.answer())[0]

        assert await ask("/v1/chat/completions", b'{"messages":[]}', json_lines) == 400
        catalogue(one, FrontSettings(default_model="alias-m"))
        large = b'{"model":null,"messages":["%b"]}' % (b"x" * LARGE_BYTES)
        for body in (b'{"messages":[]}', b'{"messages":[],"model":""}', b'{"model": null,"messages":[]}', large):
            assert await ask("/v1/chat/completions", body, json_lines) == 200
            assert b'"model":"served-m"' in engine.requests[-1]
        assert await ask("/v1/audio/transcriptions", FORM, form_lines) == 200
        assert b"served-m" in engine.requests[-1]
        for lines in (json_lines, json_lines + "x-model: none\r\n"):
            assert await ask("/v1/chat/completions", b'{"model":"none"}', lines) == 404
        assert await ask("/v1/chat/completions", b"{}", json_lines + "x-model: none\r\n") == 404


async def test_default_model_that_the_tenant_may_not_call_is_not_found() -> None:
    async with rig() as one:
        catalogue(one, FrontSettings(default_model="m", keys_needed=True))
        client = await one.client()
        body = b'{"messages":[]}'
        client.send(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer sk-other\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        status, _, answer = await client.answer()
        assert (status, json.loads(answer)["error"]["code"]) == (404, "model_not_found")
