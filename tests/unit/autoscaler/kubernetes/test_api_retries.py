"""The API client with a busy server: retries end, and a cancelled request leaves no open connection."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from autoscaler.kubernetes import api as client
from autoscaler.kubernetes.api import TRIES_MAX, Api, ApiError, FencedError
from autoscaler.kubernetes.kubeconfig import ApiAccess
from tests.support.net.certificates import sides

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

    def __init__(self, times: int, retry_after: str = "7") -> None:
        self.left, self.retry_after = times, retry_after
        self.asked: list[str] = []

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append(f"{request.method} {request.headers['User-Agent']}")
        if self.left:
            self.left -= 1
            return web.json_response(
                {"code": 429, "reason": "TooManyRequests"}, status=429, headers={"Retry-After": self.retry_after}
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


@pytest.mark.parametrize("retry_after", ["\u00b2", "-1", "1e9", "nan", "Fri, 27 Nov 2026 10:00:00 GMT", "9" * 5_000])
async def test_429_response_with_an_invalid_retry_after_is_not_retried(
    retry_after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, waits = await ask(Busy(100, retry_after), "POST", 60.0, monkeypatch)
    assert isinstance(found, ApiError)
    assert (found.status, found.retry_after_s, waits) == (429, None, [])


async def test_retry_after_above_its_maximum_is_reduced_to_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = await ask(Busy(100, "99999999"), "GET", 60.0, monkeypatch)
    assert isinstance(found, ApiError)
    assert found.retry_after_s == client.RETRY_AFTER_S_MAX


async def test_write_without_leadership_is_rejected_before_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Busy(0)
    found, _ = await ask(busy, "POST", 0.0, monkeypatch)
    assert isinstance(found, FencedError)
    assert busy.asked == []


@pytest.mark.parametrize(
    ("body", "message"),
    [({"error": "x"}, '{"error": "x"}'), ({"message": "x"}, "x"), ({"message": "x", "code": "none"}, "")],
    ids=["no-status", "no-code", "wrong-type"],
)
@pytest.mark.parametrize("status", [400, 403])
async def test_error_body_that_is_no_kubernetes_status_keeps_the_http_status(
    status: int, body: dict[str, str], message: str
) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server, Api(cast("ApiAccess", Way(str(server.make_url("/"))))) as api:
        with pytest.raises(ApiError) as raised:
            await api.create("/pods", {})
    assert (raised.value.status, raised.value.message) == (status, message)


WAIT_S_MAX = 10.0
BEGUN = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


class Hanging:
    """Accepts one TLS connection, reads a request, sends the begin of a response (possibly nothing), and hangs."""

    def __init__(self, begins: bytes) -> None:
        self._begins = begins
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked, self.left = threading.Event(), threading.Event()

    def tls(self) -> ssl.SSLContext:
        """The TLS context of the client."""
        return sides().client

    async def headers(self) -> dict[str, str]:
        return {}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._listener.close()
            thread.join(WAIT_S_MAX)

    def _run(self) -> None:
        plain, _ = self._listener.accept()
        with contextlib.closing(sides().server.wrap_socket(plain, server_side=True)) as connection:
            connection.recv(65_536)
            connection.send(self._begins)
            self.asked.set()
            bare = socket.socket(fileno=connection.detach())  # no response follows, not even a TLS close
        with bare, contextlib.suppress(ConnectionResetError):
            bare.settimeout(WAIT_S_MAX)
            while bare.recv(65_536):
                pass
        self.left.set()


async def listened(api: Api) -> None:
    async with contextlib.aclosing(api.watch("/pods", "1", {})) as events:
        async for _ in events:
            pass


@pytest.mark.parametrize(
    ("ask", "begins"), [(listened, BEGUN), (lambda api: api.get("/pods"), b"")], ids=["watch", "request"]
)
async def test_cancelled_request_or_watch_closes_its_connection_at_once(
    ask: Callable[[Api], Awaitable[object]], begins: bytes
) -> None:
    server = Hanging(begins)
    with server.running():
        async with Api(cast("ApiAccess", server)) as api:
            asking = asyncio.ensure_future(ask(api))
            assert await asyncio.to_thread(server.asked.wait, WAIT_S_MAX)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            assert await asyncio.to_thread(server.left.wait, WAIT_S_MAX), "the connection is still open"
