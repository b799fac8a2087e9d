"""The API client with a busy server: it waits slightly longer than the server asks, and not forever."""

from __future__ import annotations

import asyncio
import ssl
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autoscaler.kubernetes import api as client
from autoscaler.kubernetes.api import TRIES_MAX, Api, ApiError, FencedError
from autoscaler.kubernetes.kubeconfig import ApiAccess

pytestmark = pytest.mark.standard


class Way:
    """Access to a server without TLS and tokens."""

    def __init__(self, server: str) -> None:
        self.server = server.rstrip("/")

    def tls(self) -> ssl.SSLContext | bool:
        return False

    async def headers(self) -> dict[str, str]:
        return {}


class Busy:
    """Returns 429 a number of times, then echoes the request."""

    def __init__(self, times: int) -> None:
        self.left = times
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.headers['User-Agent']}")
        if self.left:
            self.left -= 1
            return web.json_response(
                {"code": 429, "reason": "TooManyRequests"}, status=429, headers={"Retry-After": "7"}
            )
        return web.json_response({"kind": "Pod"})


async def ask(busy: Busy, method: str, writes_s: float, monkeypatch: pytest.MonkeyPatch) -> tuple[object, list[float]]:
    """(the result of a request, its retry delays)."""
    waits: list[float] = []
    sleep = asyncio.sleep

    async def counted(delay_s: float) -> None:
        waits.append(delay_s)
        await sleep(0)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", busy.answer)
    async with (
        TestServer(app) as server,
        Api(cast("ApiAccess", Way(str(server.make_url("/")))), lambda: writes_s) as api,
    ):
        monkeypatch.setattr(asyncio, "sleep", counted)
        try:
            return (await api.create("/pods", {}) if method == "POST" else await api.get("/pods")), waits
        except (ApiError, FencedError) as error:
            return error, waits
        finally:
            monkeypatch.undo()


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_request_answered_429_is_retried_after_retry_after_with_jitter(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy = Busy(2)
    found, waits = await ask(busy, method, 60.0, monkeypatch)
    assert found == {"kind": "Pod"}
    assert len(waits) == 2
    assert all(7.0 <= wait_s <= 7.0 * client.LATER for wait_s in waits)
    assert waits[0] != waits[1]
    assert busy.asked == [f"{method} pilotlight"] * 3


async def test_persistent_429_is_returned_after_the_last_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(100)
    found, waits = await ask(busy, "POST", 60.0, monkeypatch)
    assert isinstance(found, ApiError)
    assert (found.status, len(busy.asked), len(waits)) == (429, TRIES_MAX, TRIES_MAX - 1)


async def test_write_without_leadership_is_rejected_before_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(0)
    found, _ = await ask(busy, "POST", 0.0, monkeypatch)
    assert isinstance(found, FencedError)
    assert busy.asked == []


@pytest.mark.parametrize(
    ("body", "said"),
    [({"error": "x"}, '{"error": "x"}'), ({"message": "x"}, "x"), ({"message": "x", "code": "none"}, "")],
    ids=["no-status", "no-code", "wrong-type"],
)
@pytest.mark.parametrize("status", [400, 403])
async def test_error_body_that_is_no_kubernetes_status_keeps_the_http_status(
    status: int, body: dict[str, str], said: str
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server, Api(cast("ApiAccess", Way(str(server.make_url("/"))))) as api:
        with pytest.raises(ApiError) as raised:
            await api.create("/pods", {})
    assert (raised.value.status, raised.value.message) == (status, said)
