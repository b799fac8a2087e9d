"""The HTTP server behind operations ports and the contract: aiohttp's, with an error of ours for what is no HTTP.

aiohttp's own quotes the request in its answer and in the log, and a request may hold a key or a prompt. Everything else
is aiohttp's: an exception of our own is still logged with its traceback.
"""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

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
