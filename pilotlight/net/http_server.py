"""HTTP servers of the health port, the operations port and the contract, using aiohttp.

* Health port: liveness, readiness and metrics for kubelets and Prometheus. It needs no key and may be open to other
  machines, because its metrics contain only names of documents and numbers. The operations port of a pod stays on
  loopback (reachable with `kubectl port-forward`).
* Operations port: the Host header is checked against DNS rebinding. On a loopback address it must be `localhost` or a
  loopback address, with or without a port; other requests get 421. This is stricter than the check of the inference
  port (`gateway.http.host_check`), whose parser it uses. Unix sockets are exempt, since browsers cannot reach them, and
  so are other addresses: an address with `auth: none` may have any name.
* Errors: aiohttp quotes an invalid request in its response and in the log, and a request may contain a key or a prompt.
  The server of this module responds with an error of its own; exceptions are logged with their traceback.
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
"""RFC 9110, 15.5.20: the request was sent to a server that is not responsible for its host name."""
WRONG = "this port accepts only localhost or a loopback address in the Host header: use one of these in the URL"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def add_host_check(app: web.Application) -> web.Application:
    """Add a check of the Host header to the application and return it."""
    app.middlewares.append(_own_names_only)
    return app


@web.middleware
async def _own_names_only(request: web.Request, handler: Answer) -> web.StreamResponse:
    at = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if is_host_allowed(at, request.headers.getall("Host", [])):
        return await handler(request)
    return web.json_response({"error": WRONG}, status=MISDIRECTED)


def is_host_allowed(at: object, hosts: Sequence[str]) -> bool:
    """Return whether the socket address `at` (a path for a Unix socket) accepts these Host headers.

    A request without one is accepted: it is an HTTP/1.0 probe, not a browser. (aiohttp rejects HTTP/1.1 without one.)
    """
    return not is_on_loopback(at) or all(map(is_loopback_host, hosts))


def is_loopback_host(host: str) -> bool:
    """Return whether a Host header names the loopback interface."""
    name = host_name(host)
    return name is not None and is_loopback(name)


SHUTDOWN_S = 0.5
"""How long open connections may take to finish at shutdown."""
MALFORMED = "the request is not well-formed HTTP/1.1"
_NO_ACCESS_LOG: dict[str, Any] = {"access_log": None}
"""Typed as Any because aiohttp accepts None here but does not declare it."""


class Runner(web.AppRunner):
    """Runs an application without an access log."""

    def __init__(self, application: web.Application) -> None:
        super().__init__(application, shutdown_timeout=SHUTDOWN_S)

    async def _make_server(self) -> web.Server:
        """Override a private method of aiohttp; tests/integration/process/security/test_secret_disclosure.py fails if
        aiohttp renames it.
        """
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
        """Respond as aiohttp does, except to requests that cannot be parsed."""
        if not isinstance(exc, HttpProcessingError):
            return super().handle_error(request, status, exc, message)
        response = web.json_response({"error": MALFORMED}, status=400)
        response.force_close()
        return response


async def open_port(address: Address | None, application: web.Application) -> Runner:
    """Serve `application` (GET /healthz, /readyz, /metrics) if there is an address; `cleanup` stops it."""
    runner = Runner(application)
    await runner.setup()
    if address is not None:
        await web.SockSite(runner, socket_of(None, address)).start()
    return runner
