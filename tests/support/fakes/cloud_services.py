"""Fake cloud services on loopback: each path returns JSON, and every request is recorded with its body."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import NamedTuple

from aiohttp import web


class Asked(NamedTuple):
    """One recorded request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    """Keyed by lower-case name."""
    body: str


class Services:
    """`replies[path]` is the response: a status and a document or bytes; 404 if there is none."""

    def __init__(self) -> None:
        self.replies: dict[str, tuple[int, object]] = {}
        self.headers: dict[str, str] = {}
        self.asked: list[Asked] = []
        self.host = ""

    @property
    def url(self) -> str:
        return f"http://{self.host}"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Services]:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.host = f"127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        query = dict(request.query)
        self.asked.append(Asked(request.method, request.path, query, headers, await request.text()))
        status, body = self.replies.get(request.path, (404, b""))
        if isinstance(body, bytes):
            return web.Response(status=status, body=body, headers=self.headers)
        return web.json_response(body, status=status, headers=self.headers)
