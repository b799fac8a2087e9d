"""HTTP servers of the health port, the operations port and the contract between processes, by aiohttp.

* Health port: liveness, readiness and metrics for kubelets and Prometheus. It needs no key and may be open to other
  machines, because its metrics contain only names of documents and numbers. The operations port of a pod stays on
  loopback (`kubectl port-forward` reaches it).
* Operations port: the Host header is checked against DNS rebinding. On a loopback address it must be `localhost` or a
  loopback address, with or without a port; other requests get 421. This is stricter than the check of the inference
  port (`gateway.http.host_check`), whose parser it uses. Unix sockets are exempt, since no browser reaches them, and so
  are other addresses: an address with `auth: none` may have any name.
* Errors: aiohttp quotes an invalid request in its answer and in the log, and a request may contain a key or a prompt.
  The server of this module answers with an error of its own; exceptions are logged with their traceback.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from gateway.http.host_check import host_name, is_loopback, is_on_loopback
from pilotlight.net.listen import Address, socket_of

MISDIRECTED = 421
"""RFC 9110, 15.5.20: this is not the server that the name stands for."""
WRONG = "this port answers to localhost and loopback addresses only: send one of them as the Host header"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_host_check(app: web.Application) -> web.Application:
    """The same application, which looks at the Host of every request first."""
    app.middlewares.append(_own_names_only)
    return app


@web.middleware
async def _own_names_only(request: web.Request, handler: Answer) -> web.StreamResponse:
    at = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if is_host_allowed(at, request.headers.getall("Host", [])):
        return await handler(request)
    return web.json_response({"error": WRONG}, status=MISDIRECTED)


def is_host_allowed(at: object, hosts: Sequence[str]) -> bool:
    """Whether a request with these Host headers may come in at the socket address `at` (a path: a Unix socket).

    None at all is no browser: a probe that speaks HTTP/1.0. (Without one aiohttp answers HTTP/1.1 with 400.)
    """
    return not is_on_loopback(at) or all(map(is_loopback_host, hosts))


def is_loopback_host(host: str) -> bool:
    """Whether a Host header names the loopback of the machine that it was sent to."""
    name = host_name(host)
    return name is not None and is_loopback(name)


SHUTDOWN_S = 0.5
"""How long open connections may take to end when it does."""
MALFORMED = "the request is not well-formed HTTP/1.1"
_NO_ACCESS_LOG: dict[str, Any] = {"access_log": None}
"""Any: aiohttp takes None here, and its types do not say so."""


class Runner(web.AppRunner):
    """Runs an application without an access log."""

    def __init__(self, application: web.Application) -> None:
        super().__init__(application, shutdown_timeout=SHUTDOWN_S)

    async def _make_server(self) -> web.Server:
        """Should aiohttp ever rename this, tests/process/test_faults_telling.py tells."""
        plain = await super()._make_server()
        return _Server(plain.request_handler, request_factory=plain.request_factory)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=asyncio.get_running_loop(), **_NO_ACCESS_LOG)


class _Connection(web.RequestHandler):
    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """As aiohttp's, but for what could not be read."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = web.json_response({"error": MALFORMED}, status=400)
        response.force_close()
        return response


async def open_port(address: Address | None, application: web.Application) -> Runner:
    """Serves `application` (GET /healthz, /readyz, /metrics); `cleanup` ends it. Without an address nothing listens."""
    runner = Runner(application)
    await runner.setup()
    if address is not None:
        await web.SockSite(runner, socket_of(None, address)).start()
    return runner
