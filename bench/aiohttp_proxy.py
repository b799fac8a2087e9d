"""The peer of the throughput benchmark: a plain proxy with aiohttp's server and client, on uvloop.

It reads the model in the body, selects the engine and forwards the response. No keys, limits, queues or metrics.
"""

from __future__ import annotations

import asyncio
import json
import sys

import aiohttp
from aiohttp import web

from pilotlight import process

HOP = frozenset(
    {"connection", "keep-alive", "te", "trailers", "transfer-encoding", "upgrade", "host", "content-length"}
)


def application(engines: dict[str, str]) -> web.Application:
    """Build a proxy. `engines`: model -> base URL."""
    app = web.Application(client_max_size=64 << 20)
    session: list[aiohttp.ClientSession] = []

    async def chat(request: web.Request) -> web.Response:
        body = await request.read()
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        url = engines[json.loads(body)["model"]] + request.path
        async with session[0].post(url, data=body, headers=headers) as answer:
            kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP}
            return web.Response(status=answer.status, headers=kept, body=await answer.read())

    async def begin(_: web.Application) -> None:
        session.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

    app.on_startup.append(begin)
    app.router.add_post("/v1/chat/completions", chat)
    return app


async def serve(port: int, engine: str) -> None:
    """Serve until killed."""
    runner = web.AppRunner(application({"t": engine}), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    process.run(serve(int(sys.argv[1]), sys.argv[2]))
