"""Request policies on the wire: what an engine receives of each API, and the errors that clients receive."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, cast

import msgspec
import pytest

from autoscaler.contract import (
    CatalogueDelta,
    FrontSettings,
    KeyEntry,
    ModelEntry,
    PolicyEntry,
    TenantEntry,
    TenantName,
)
from gateway.control import fault_containment
from tests.support.fakes.engines.scripted_engine import OK, STREAM, ScriptedEngine, document
from tests.support.harness.gateway.gateway_rig import MODEL, Client, Rig, rig

POLICY = PolicyEntry(
    defaults={"top_k": "3"}, forced={"temperature": "0"}, caps={"max_tokens": 100, "n": 1}, removed=("tools",)
)
MESSAGES = [{"role": "user", "content": "Hello"}]
MODEL_ENTRY = ModelEntry(
    name=MODEL, served_name="served-m", aliases=("alias-m",), slots=4, dialects=("openai", "responses", "anthropic"),
    policy=POLICY,
)  # fmt: skip


def catalogue(one: Rig, model: ModelEntry, *tenants: TenantEntry, version: int = 2) -> None:
    settings = FrontSettings(keys_needed=bool(tenants))
    one.front.catalogue(
        CatalogueDelta(epoch=1, version=version, full=True, models=(model,), tenants=tenants, settings=settings)
    )


def post(client: Client, path: str, body: bytes, *, kind: str = "application/json", key: str = "none") -> None:
    head = f"POST {path} HTTP/1.1\r\nhost: gw\r\ncontent-type: {kind}\r\nauthorization: Bearer {key}\r\n"
    client.send(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


def received(engine: ScriptedEngine) -> bytes:
    return engine.requests[-1].partition(b"\r\n\r\n")[2]


@pytest.mark.parametrize(
    ("path", "sent", "expected"),
    [
        ("/v1/chat/completions", {"max_completion_tokens": 5000, "n": 8, "tools": [{}], "temperature": 2},
         {"max_completion_tokens": 100, "n": 1, "temperature": 0, "top_k": 3}),
        ("/v1/completions", {"best_of": 8, "top_k": 1}, {"best_of": 1, "temperature": 0, "top_k": 1}),
        ("/v1/responses", {"max_output_tokens": 5000}, {"max_output_tokens": 100, "temperature": 0, "top_k": 3}),
        ("/v1/messages", {"max_tokens": 99, "tools": []}, {"max_tokens": 99, "temperature": 0, "top_k": 3}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("padding", [0, 300_000])
async def test_policy_defaults_caps_and_forced_values_are_applied_to_the_body(
    path: str, sent: dict[str, Any], expected: dict[str, Any], padding: int
) -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        catalogue(one, MODEL_ENTRY)
        client = await one.client()
        post(client, path, json.dumps({"padding": "x" * padding, "model": "m", **sent}).encode())
        assert (await client.answer())[0] == 200
        found = json.loads(received(engine))
        assert len(found.pop("padding")) == padding
        assert found == {"model": "served-m", **expected}


async def test_requests_of_a_model_whose_policy_raises_an_exception_get_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reported: list[tuple[str | None, str]] = []
    monkeypatch.setattr(fault_containment, "report_fault", lambda model, what, _: reported.append((model, what)))
    faulty = PolicyEntry(removed=cast("tuple[str, ...]", (None,)))
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        catalogue(one, msgspec.structs.replace(MODEL_ENTRY, policy=faulty))
        for path in ("/v1/chat/completions", "/api/chat"):
            client = await one.client()
            post(client, path, b'{"model":"m","messages":[]}')
            status, _, body = await client.answer()
            assert (status, b"event=model_faulty" in body) == (503, True)
        assert reported == [("m", "policy")]
        assert engine.requests == []


async def test_policy_applies_to_requests_of_the_ollama_api() -> None:
    async with ScriptedEngine((STREAM,)) as engine, rig(engine.address) as one:
        catalogue(one, MODEL_ENTRY)
        client = await one.client()
        options = {"num_predict": 5000, "temperature": 2, "top_k": 1}
        sent = {"model": "m:latest", "messages": MESSAGES, "options": options, "tools": [{"type": "function"}]}
        post(client, "/api/chat", json.dumps(sent).encode())
        assert (await client.answer())[0] == 200
        found = json.loads(received(engine))
        assert (found["max_tokens"], found["temperature"], found["top_k"], "tools" in found) == (100, 0, 1, False)


async def test_policy_fields_are_applied_to_a_large_form() -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        catalogue(one, MODEL_ENTRY)
        client = await one.client()
        field = '--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n'
        parts = field % ("model", "m") + field % ("file", "x" * 600_000) + field % ("temperature", "1")
        post(client, "/v1/audio/transcriptions", f"{parts}--b--\r\n".encode(), kind="multipart/form-data; boundary=b")
        assert (await client.answer())[0] == 200
        expected = field % ("temperature", "0") + field % ("top_k", "3") + field % ("model", "served-m")
        assert received(engine) == f"{expected}{field % ('file', 'x' * 600_000)}--b--\r\n".encode()


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b'{"model":"m","N":8}', "n"),
        (b'{"model":"m","Temperature":2}', "temperature"),
        (b'{"model":"m","TOOL\xc5\xbf":[]}', "tools"),
        (b'{"model":"m","max_tokens":"5000"}', "max_tokens"),
        (b'{"model":"m","n":1,"\\u006e":8}', None),
    ],
)
async def test_body_that_could_bypass_the_policy_by_spelling_or_type_gets_400(body: bytes, param: str | None) -> None:
    async with ScriptedEngine((OK,)) as engine, rig(engine.address) as one:
        catalogue(one, MODEL_ENTRY)
        client = await one.client()
        for padded in (body, body[:-1] + b',"padding":"%b"}' % (b"x" * 300_000)):
            post(client, "/v1/chat/completions", padded)
            status, _, answer = await client.answer()
            error = json.loads(answer)["error"]
            assert (status, error["code"], error["param"]) == (400, "invalid_request", param)
        assert not engine.requests


async def test_policies_of_the_tenant_and_of_the_requested_alias_are_applied() -> None:
    tenants = [
        TenantEntry(
            name=TenantName(name), keys=(KeyEntry(sha256=sha256(name.encode()).hexdigest()),), policy=policy
        )
        for name, policy in (("plain", None), ("strict", PolicyEntry(caps={"max_tokens": 7})))
    ]  # fmt: skip
    by_name = {"alias-m": {"reasoning_effort": '"high"'}}
    model = msgspec.structs.replace(MODEL_ENTRY, policy=PolicyEntry(forced_by_name=by_name))
    async with ScriptedEngine((OK,), (OK,), (OK,)) as engine, rig(engine.address) as one:
        catalogue(one, model, *tenants)
        client = await one.client()
        for key, name, expected in (
            ("plain", "m", {"max_tokens": 50}),
            ("strict", "m", {"max_tokens": 7}),
            ("strict", "alias-m", {"max_tokens": 7, "reasoning_effort": "high"}),
        ):
            post(client, "/v1/chat/completions", json.dumps({"model": name, "max_tokens": 50}).encode(), key=key)
            assert (await client.answer())[0] == 200
            assert json.loads(received(engine)) == {"model": "served-m", **expected}


async def test_policy_that_is_removed_no_longer_applies() -> None:
    async with ScriptedEngine((document(),), (document(),)) as engine, rig(engine.address) as one:
        catalogue(one, MODEL_ENTRY)
        client = await one.client()
        catalogue(one, msgspec.structs.replace(MODEL_ENTRY, policy=None), version=3)
        body = b'{"model":"served-m","messages":[],"N":8,"tools":[]}'
        post(client, "/v1/chat/completions", body.replace(b"served-m", b"m"))
        assert (await client.answer())[0] == 200
        assert received(engine) == body
        assert one.front.directory.policies is None
