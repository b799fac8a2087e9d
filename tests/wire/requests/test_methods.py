"""Methods that a path does not support: 405 with `Allow`. HEAD and preflights are tested separately."""

from __future__ import annotations

import json
import re

import pytest

from autoscaler.contract import FrontSettings
from tests.support.harness.gateway.gateway_rig import rig, rig_and_client


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("GET", "/v1/chat/completions", "post, options"),
        ("DELETE", "/openai/deployments/m/embeddings", "post, options"),
        ("PUT", "/v1/messages", "post, options"),
        ("POST", "/v1/models", "get, options"),
        ("DELETE", "/v1/models/none?a=b", "get, options"),
        ("PATCH", "/health", "get, options"),
        ("CANARY", "/v1/embeddings", "post, options"),
    ],
)
async def test_unsupported_method_gets_405_and_keeps_the_connection(method: str, path: str, allow: str) -> None:
    """The response lists the methods of the path in the format of its API, with or without a key (RFC 9110, 15.5.6)."""
    settings = FrontSettings(keys_needed=True, cors_origins=("*",))
    async with rig_and_client(settings=settings) as (one, client):
        for body in (b"", b"{}"):
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\norigin: o\r\ncontent-length: {len(body)}\r\n\r\n"
            client.send(head.encode() + body + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            status, fields, text = await client.answer()
            error = json.loads(text)
            assert (status, fields["allow"], fields["access-control-allow-origin"]) == (405, allow, "o")
            assert (error["error"]["code"], error["error"]["type"]) == ("method_not_allowed", "invalid_request_error")
            assert error.get("type") == ("error" if "messages" in path else None)
            assert b"CANARY" not in text
            assert (await client.answer())[0] == 200
        assert re.findall(rb'code="(\w*)".*} (\d)', one.front.metrics()) == [(b"method_not_allowed", b"2")]


async def test_head_request_gets_404_without_a_body() -> None:
    async with rig() as one:
        for path, status in (("/health", b"404"), ("/v1/messages", b"404"), ("/nowhere", b"404")):
            client = await one.client()
            client.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            answer = await client.rest()
            assert (answer[9:12], answer[-4:], b"\r\nallow:" in answer) == (status, b"\r\n\r\n", False)
        client = await one.client()
        for path, allowed in (("/v1/messages", 204), ("/v1/models/none", 204), ("/nowhere", 404)):
            client.send(f"OPTIONS {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            methods, fields, _ = await client.answer()
            assert (methods, fields.get("allow")) == (allowed, None)
