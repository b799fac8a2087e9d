"""The Host header on operations ports: only loopback names of this machine are accepted, on any path."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient
from pytest_aiohttp import AiohttpClient

from autoscaler.contract import GatewayId
from autoscaler.explain.decision_log import Log
from autoscaler.server.ops import OperationsServer
from gateway.gateway import Gateway
from gateway.ops import build_ops_application
from pilotlight.net import http_server
from tests.support.builders.worlds import world
from tests.support.harness.manual_loop import SteppedLoop

pytestmark = pytest.mark.standard

Client = TestClient[web.Request, web.Application]
Opened = Callable[[AiohttpClient], Awaitable[Client]]
OURS = [
    "localhost",
    "LocalHost:8081",
    "127.0.0.1",
    "127.0.0.1:8081",
    "127.9.9.9:1",
    "[::1]",
    "[::1]:8081",
    "127.0.0.1:",
]
FOREIGN = [
    "", "evil.example", "evil.example:8081", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "0.0.0.0",
    "::1", "[::2]", "[::1", "localhost:80:80", "localhost:http", "localhost:808080", "user@localhost", "localhost/",
    "127.1", "2130706433", "gateway", "local host", "\u0131.example",
]  # fmt: skip


@pytest.mark.parametrize("host", OURS)
def test_loopback_host_name_is_classified_as_loopback(host: str) -> None:
    assert http_server.is_loopback_host(host)


@pytest.mark.parametrize("host", FOREIGN)
def test_remote_or_malformed_host_header_is_not_loopback(host: str) -> None:
    assert not http_server.is_loopback_host(host)


async def autoscaler(aiohttp_client: AiohttpClient) -> Client:
    port = OperationsServer(SteppedLoop(world()).loop, Log(), lambda: b"", lambda: ())
    return await aiohttp_client(http_server.add_host_check(port.application()))


async def gateway(aiohttp_client: AiohttpClient) -> Client:
    return await aiohttp_client(http_server.add_host_check(build_ops_application(Gateway(GatewayId("g"), "boot"))))


@pytest.mark.parametrize("port", [autoscaler, gateway])
@pytest.mark.parametrize("path", ["/healthz", "/metrics", "/no-such-path"])
async def test_operations_port_rejects_foreign_host_header_with_421(
    aiohttp_client: AiohttpClient, port: Opened, path: str
) -> None:
    client = await port(aiohttp_client)
    assert (await client.get(path)).status in {200, 404}
    for host in ("localhost", "[::1]:1"):
        assert (await client.get(path, headers={"Host": host})).status in {200, 404}
    for method in ("GET", "POST", "OPTIONS"):
        response = await client.request(method, path, headers={"Host": "evil.example"})
        assert (response.status, await response.json()) == (421, {"error": http_server.WRONG})


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        ("GET /healthz HTTP/1.0\r\n", 200),
        ("GET /healthz HTTP/1.0\r\nHost: evil.example\r\n", 421),
        ("GET /healthz HTTP/1.1\r\n", 400),
        ("GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n", 400),
        ("GET http://evil.example/healthz HTTP/1.1\r\nHost: evil.example\r\n", 421),
    ],
)
async def test_missing_host_header_is_accepted_only_for_http_1_0(
    aiohttp_client: AiohttpClient, lines: str, status: int
) -> None:
    client = await gateway(aiohttp_client)
    reader, writer = await asyncio.open_connection("127.0.0.1", client.port)
    writer.write(f"{lines}Connection: close\r\n\r\n".encode())
    first = await reader.readline()
    writer.close()
    await writer.wait_closed()
    assert first.split()[1] == str(status).encode()


async def test_unix_socket_accepts_any_host_header(tmp_path: Path) -> None:
    runner = web.AppRunner(http_server.add_host_check(build_ops_application(Gateway(GatewayId("g"), "boot"))))
    await runner.setup()
    await web.UnixSite(runner, str(tmp_path / "g.sock")).start()
    try:
        connector = aiohttp.UnixConnector(str(tmp_path / "g.sock"))
        async with aiohttp.ClientSession(connector=connector) as session, session.get("http://any/healthz") as response:
            assert response.status == 200
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("at", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
def test_loopback_listener_rejects_any_non_loopback_host_header(at: str) -> None:
    assert http_server.is_host_allowed((at, 8081), ["localhost:8081"])
    assert not http_server.is_host_allowed((at, 8081), ["ops.example"])
    assert not http_server.is_host_allowed((at, 8081), ["localhost", "ops.example"])


@pytest.mark.parametrize("at", [("10.0.0.1", 8081), ("fd00::1", 8081, 0, 0), "/run/g.sock", "", None])
def test_non_loopback_and_unix_listeners_accept_any_host(at: object) -> None:
    assert http_server.is_host_allowed(at, ["ops.example"])
    assert http_server.is_host_allowed(at, [])
