"""Nodes that serve their weight stores to each other, over real connections on loopback."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from artifacts.peers.servable_blobs import BlobOffers
from artifacts.peers.server import STREAMS_MAX, BlobServer
from artifacts.store.store import Store
from autoscaler.server.auth import ContractAuth

TOKEN = "t0ken-that-all-nodes-show-each-other"
"""A secret that must not appear anywhere."""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]
Judge = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


class Neighbour:
    """A node that serves its store. `judge` can answer before it does; `given` counts the bytes sent."""

    def __init__(self, store: Store, url: str = "") -> None:
        self.store, self.url = store, url
        self.judge: Judge | None = None
        self.seen: list[tuple[str, str, int]] = []
        """Method, path, status."""

    def asked(self, part: str, status: int | None = None) -> int:
        """Number of requests for paths that contain that part."""
        return sum(part in path and status in {None, reported} for _, path, reported in self.seen)


@contextlib.asynccontextmanager
async def serving(
    store: Store, *, private: bool = True, streams: int = STREAMS_MAX, token: str | None = TOKEN
) -> AsyncIterator[Neighbour]:
    """Serves its store to other nodes."""
    one = Neighbour(store)

    @web.middleware
    async def listen(request: web.Request, handler: Answer) -> web.StreamResponse:
        answer = None if one.judge is None else await one.judge(request)
        answer = await handler(request) if answer is None else answer
        one.seen.append((request.method, request.path, answer.status))
        return answer

    doors = [] if token is None else [ContractAuth(lambda: (token,)).check]
    app = BlobServer(BlobOffers(store.layout, private=private), streams).application([listen, *doors])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    one.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield one
    finally:
        await runner.cleanup()
