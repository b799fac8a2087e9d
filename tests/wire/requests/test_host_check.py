"""The host check of the inference port: what a loopback listener without keys rejects, byte by byte."""

from __future__ import annotations

import json

import pytest

from autoscaler.contract import CatalogueDelta, FrontSettings, GatewayId
from gateway.gateway import Gateway
from tests.support.fakes.engines.scripted_engine import OK, ScriptedEngine
from tests.support.harness.gateway.gateway_rig import Rig, rig, rig_and_client
from tests.support.net.certificates import sides

APP = "https://app.example"
CALL = b'{"model":"m","messages":[]}'
HOSTS, ORIGINS = "hosts in Settings", "cors.origins in Settings"


async def status_of(one: Rig, lines: str) -> tuple[int, bytes]:
    """Return status and body of the response to a head without a body, on a new connection."""
    client = await one.client()
    client.send(f"{lines}\r\n\r\n".encode())
    status, _, body = await client.answer()
    return status, body


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/m", "/health"])
@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("GET {} HTTP/1.1\r\nHost: localhost:8080", 200),
        ("GET {} HTTP/1.1\r\nHost: [::1]:8080", 200),
        ("GET {} HTTP/1.1\r\nHost: host.docker.internal", 200),
        ("GET {} HTTP/1.0", 200),
        ("GET {} HTTP/1.0\r\nHost: gateway", 200),
        ("GET {} HTTP/1.1", 400),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nHost: evil.example", 400),
        ("GET http://localhost{} HTTP/1.1\r\nHost: evil.example", 200),
        ("GET http://evil.example{} HTTP/1.1\r\nHost: localhost", 421),
        ("GET {} HTTP/1.1\r\nHost: evil.example", 421),
        ("GET {} HTTP/1.1\r\nhOsT:\tEVIL.example.:8080", 421),
        ("GET {} HTTP/1.0\r\nHost: evil.example", 421),
        ("GET {} HTTP/1.1\r\nHost: evil.example\r\nX-Forwarded-Host: localhost", 421),
        ("OPTIONS {} HTTP/1.1\r\nHost: evil.example\r\nAccess-Control-Request-Method: POST", 421),
        ("OPTIONS {} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example", 403),
        ("OPTIONS {} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://app.example\r\nSec-Fetch-Site: cross-site", 204),
        ("OPTIONS {} HTTP/1.1\r\nHost: localhost", 204),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://evil.example", 403),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nOrigin: null", 403),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: cross-site", 403),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: none\r\nSec-Fetch-Site: cross-site", 403),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nSec-Fetch-Site: none", 200),
        ("GET {} HTTP/1.1\r\nHost: localhost\r\nOrigin: https://app.example\r\nSec-Fetch-Site: cross-site", 200),
        ("GET {} HTTP/1.1\r\nHost: evil.example\r\nOrigin: https://app.example", 421),
    ],
)
async def test_only_requests_with_a_foreign_host_or_origin_get_421_or_403(lines: str, status: int, path: str) -> None:
    async with rig(settings=FrontSettings(cors_origins=(APP,)), host_check=True) as one:
        got, body = await status_of(one, lines.format(path))
    assert got == status
    if status in (403, 421):
        error = json.loads(body)["error"]
        kind, code, key = {
            403: ("permission_error", "origin_not_allowed", ORIGINS),
            421: ("invalid_request_error", "misdirected_request", HOSTS),
        }[status]
        assert (error["type"], error["code"]) == (kind, code)
        assert key in error["message"]
        assert "example" not in error["message"], "input is not repeated"


@pytest.mark.parametrize("path", ["/no-such-path", "/v1/chat/completions"])
async def test_host_header_that_is_not_local_gets_421_on_every_path(path: str) -> None:
    async with rig(host_check=True) as one:
        for method in ("GET", "DELETE", "POST"):
            assert (await status_of(one, f"{method} {path} HTTP/1.1\r\nHost: evil.example"))[0] == 421


@pytest.mark.parametrize(
    ("keys", "host_check", "lines", "status"),
    [
        (True, True, "Host: evil.example", 401),
        (True, True, "Host: localhost\r\nOrigin: https://evil.example\r\nSec-Fetch-Site: cross-site", 401),
        (False, False, "Host: evil.example", 200),
        (False, False, "Host: x\r\nOrigin: https://evil.example\r\nSec-Fetch-Site: cross-site", 200),
        (False, False, "Host: x\r\nSec-Fetch-Site: none\r\nSec-Fetch-Site: none", 200),
    ],
)
async def test_host_check_is_off_with_required_keys_or_non_loopback_listener(
    keys: bool, host_check: bool, lines: str, status: int
) -> None:
    async with rig(settings=FrontSettings(keys_needed=keys), host_check=host_check) as one:
        assert (await status_of(one, f"GET /v1/models HTTP/1.1\r\n{lines}"))[0] == status


def post(host: str, body: bytes = CALL, more: str = "", path: str = "/v1/chat/completions") -> bytes:
    """Return the bytes of one request."""
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


async def test_request_rejected_by_the_host_check_reaches_no_engine() -> None:
    async with ScriptedEngine((OK,)) as engine, rig_and_client(engine.address, host_check=True) as (one, client):
        for _ in range(2):
            client.send(post("evil.example") + post("localhost", more="Origin: https://evil.example\r\n"))
            assert [(await client.answer())[0] for _ in range(2)] == [421, 403]
        assert one.totals() == (0, 0, 0)
        client.send(post("localhost"))
        assert (await client.answer())[0] == 200


async def test_host_error_on_the_anthropic_path_has_the_anthropic_format() -> None:
    async with rig_and_client(host_check=True) as (_, client):
        client.send(post("evil.example", path="/v1/messages"))
        status, _, body = await client.answer()
        assert (status, json.loads(body)["type"]) == (421, "error")


@pytest.mark.parametrize(
    "rest",
    [
        "Content-Length: 30000000\r\n\r\n",
        "Content-Length: 100\r\nExpect: 100-continue\r\n\r\n",
        "Transfer-Encoding: chunked\r\n\r\n5\r\n",
    ],
)
async def test_head_with_foreign_host_is_rejected_before_its_body(rest: str) -> None:
    async with rig(host_check=True) as one:
        for lines, status in (("Host: evil.example", 421), ("Host: x\r\nSec-Fetch-Site: cross-site", 403)):
            client = await one.client()
            kind = "multipart/form-data; boundary=b"
            client.send(f"POST /v1/audio/transcriptions HTTP/1.1\r\n{lines}\r\nContent-Type: {kind}\r\n{rest}".encode())
            assert (await client.answer())[0] == status
            assert one.front.room.held_bytes == 0
            assert one.totals() == (0, 0, 0), "no request that wakes a Model"


async def test_changed_host_settings_apply_to_a_repeated_request_on_a_connection() -> None:
    """It holds also on the same connection, where the same bytes are not parsed again."""
    version = 1
    async with ScriptedEngine(*[(OK,)] * 4) as engine, rig_and_client(engine.address, host_check=True) as (one, client):
        page = {"origin": f"Origin: {APP}\r\n", "none": ""}

        async def statuses(settings: FrontSettings) -> list[int]:
            nonlocal version
            version += 1
            one.front.catalogue(CatalogueDelta(epoch=1, version=version, settings=settings))
            found = []
            for more in page.values():
                client.send(post("llm.example", more=more))
                found.append((await client.answer())[0])
            return found

        assert await statuses(FrontSettings()) == [421, 421]
        assert await statuses(FrontSettings(hosts=("LLM.example",))) == [403, 200]
        assert await statuses(FrontSettings(hosts=("llm.example",), cors_origins=(APP,))) == [200, 200]
        assert await statuses(FrontSettings(cors_origins=(APP,))) == [421, 421]
        assert await statuses(FrontSettings(keys_needed=True)) == [401, 401]
        assert await statuses(FrontSettings()) == [421, 421]


async def test_host_error_has_cors_header_for_an_allowed_origin() -> None:
    async with rig(settings=FrontSettings(cors_origins=(APP,)), host_check=True) as one:
        client = await one.client()
        client.send(f"GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nOrigin: {APP}\r\n\r\n".encode())
        status, fields, _ = await client.answer()
        assert (status, fields["access-control-allow-origin"]) == (421, APP)


async def test_request_with_foreign_host_over_tls_gets_421() -> None:
    async with rig(tls=sides(), host_check=True) as one:
        assert (await status_of(one, "GET /health HTTP/1.1\r\nHost: evil.example"))[0] == 421
        assert (await status_of(one, "GET /health HTTP/1.1\r\nHost: localhost"))[0] == 200


def test_host_check_is_off_until_settings_are_received() -> None:
    front = Gateway(GatewayId("g"), "boot")
    front.listens_at(("127.0.0.1", 8080))
    assert front.host_check is None
    front.catalogue(CatalogueDelta(epoch=1, version=1, full=True))
    assert front.host_check is not None
