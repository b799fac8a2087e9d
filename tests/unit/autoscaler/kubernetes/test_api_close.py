"""The API client leaves no open connection, even if the server stops responding."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import threading
from collections.abc import Awaitable, Callable, Iterator
from typing import cast

import pytest

from autoscaler.kubernetes.api import Api
from autoscaler.kubernetes.kubeconfig import ApiAccess
from tests.support.net.certificates import sides

pytestmark = pytest.mark.standard

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
