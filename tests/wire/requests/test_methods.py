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
        ("POST", "/v1/models", "get, head, options"),
        ("DELETE", "/v1/models/none?a=b", "get, head, options"),
        ("PATCH", "/health", "get, head, options"),
        ("POST", "/", "get, head, options"),
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


async def test_head_request_gets_the_headers_of_a_get_without_a_body() -> None:
    async with rig(state="zero") as one:
        for path in ("/", "/health", "/healthz", "/v1/health", "/v1/models", "/v1/models/m", "/models/"):
            client = await one.client()
            for _ in range(2):
                client.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\nGET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
                head = await client.head()
                status, fields, body = await client.answer()
                assert head[0] == status == 200
                assert head[1]["content-length"] == fields["content-length"] == str(len(body))
        assert one.front.report().levels == (), "no request waits, so nothing starts"


async def test_failed_head_request_gets_an_error_without_a_body() -> None:
    async with rig() as one:
        for path, status in (("/v1/messages", b"405"), ("/nowhere", b"404"), ("/v1/models/none", b"404")):
            client = await one.client()
            client.send(f"HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            answer = await client.rest()
            allowed = b"\r\nallow: POST, OPTIONS\r\n" in answer
            assert (answer[9:12], answer[-4:], allowed) == (status, b"\r\n\r\n", status == b"405")
        client = await one.client()
        for path, expected in (("/v1/messages", 204), ("/v1/models/none", 204), ("/nowhere", 404)):
            client.send(f"OPTIONS {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            methods, fields, _ = await client.answer()
            assert (methods, fields.get("allow")) == (expected, None)
