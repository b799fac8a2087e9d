"""The HTTP link: reads streams of lines, posts reports, and raises LinkError for every failure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from aiohttp import web
from pytest_aiohttp import AiohttpServer

from autoscaler.contract import GatewayId, Report, ReportAnswer, RoutesDelta
from gateway.control import client
from gateway.control.client import HttpLink
from gateway.control.sync import LinkError, MessageTooLargeError

pytestmark = pytest.mark.standard

G = GatewayId("g1")
ROUTES = RoutesDelta(epoch=1, version=1, full=True)


@contextlib.asynccontextmanager
async def closing(one: HttpLink) -> AsyncIterator[HttpLink]:
    try:
        yield one
    finally:
        await one.close()


async def test_http_link_decodes_routes_and_report_answer_and_raises_on_404(aiohttp_server: AiohttpServer) -> None:
    taken: list[Report] = []

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write((msgspec.json.encode(ROUTES) + b"\n") * 2)
        return response

    async def report(request: web.Request) -> web.Response:
        taken.append(msgspec.json.decode(await request.read(), type=Report))
        return web.Response(body=msgspec.json.encode(ReportAnswer(epoch=7, resend=True)))

    app = web.Application()
    app.router.add_get("/v1/routes", stream)
    app.router.add_post("/v1/report", report)
    async with closing(HttpLink(str((await aiohttp_server(app)).make_url("/")))) as one:
        read = [line async for line in one.lines("/v1/routes")]
        assert [msgspec.json.decode(line, type=RoutesDelta).epoch for line in read] == [1, 1]
        sent = Report(gateway=G, boot="b", sequence=3)
        assert await one.report(sent) == ReportAnswer(epoch=7, resend=True)
        assert taken == [sent]
        with pytest.raises(LinkError):
            [line async for line in one.lines("/v1/nothing")]


async def test_stream_without_data_until_the_timeout_raises_link_error(
    aiohttp_server: AiohttpServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "STREAM_SILENT_S", 0.05)
    end = asyncio.Event()

    async def stream(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"{}\n")
        await end.wait()
        return response

    app = web.Application()
    app.router.add_get("/v1/routes", stream)
    one = HttpLink(str((await aiohttp_server(app)).make_url("/")))
    read: list[bytes] = []

    async def follow() -> None:
        async for line in one.lines("/v1/routes"):
            read.append(line)  # noqa: PERF401  lines before the error count

    async with asyncio.timeout(60):
        with pytest.raises(LinkError):
            await follow()
    assert read == [b"{}\n"]
    end.set()
    await one.close()


async def test_report_answered_with_an_oversized_body_raises_link_error(aiohttp_server: AiohttpServer) -> None:
    sizes = iter((client.ANSWER_BYTES_MAX, client.ANSWER_BYTES_MAX - 1))

    async def report(_: web.Request) -> web.Response:
        return web.Response(body=msgspec.json.encode(ReportAnswer(epoch=7)).ljust(next(sizes)))

    app = web.Application()
    app.router.add_post("/v1/report", report)
    async with closing(HttpLink(str((await aiohttp_server(app)).make_url("/")))) as one:
        with pytest.raises(MessageTooLargeError):
            await one.report(Report(gateway=G, boot="b", sequence=1))
        assert await one.report(Report(gateway=G, boot="b", sequence=2)) == ReportAnswer(epoch=7)


async def test_report_to_missing_socket_raises_link_error(tmp_path: Path) -> None:
    one = HttpLink(f"unix:{tmp_path}/nobody.sock")
    with pytest.raises(LinkError):
        await one.report(Report(gateway=G, boot="b", sequence=1))
    await one.close()
