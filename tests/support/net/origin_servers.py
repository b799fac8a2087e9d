"""Independent HTTP servers on free ports, each responding with what it parsed.

`python -m tests.support.net.origin_servers NAME...` starts some in one process, prints their ports as one JSON line,
and runs until its input ends. Every response has the header `x-read`: JSON of (method, target, body, headers), texts as
Latin-1. A response without it is the server's rejection.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import logging
import os
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import hypercorn.asyncio
import hypercorn.config
import uvicorn
from aiohttp import web

Scope = MutableMapping[str, Any]  # Any: as ASGI and WSGI define it
Receive = Callable[[], Awaitable[Scope]]
Send = Callable[[Scope], Awaitable[None]]
ANSWERS_MAX = 1_000_000
"""Limit per connection; some servers would stop at a thousand."""


def read(method: str, target: bytes, body: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The value of `x-read`."""
    listed = sorted((name.lower().decode("latin-1"), value.decode("latin-1")) for name, value in headers)
    return json.dumps((method, target.decode("latin-1"), body.decode("latin-1"), listed)).encode()


async def asgi(scope: Scope, receive: Receive, send: Send) -> None:
    """The application of uvicorn and hypercorn."""
    if scope["type"] != "http":
        return
    body, more = b"", True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message.get("body", b"")
        more = message.get("more_body", False)
    target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
    text = read(scope["method"], target, body, scope["headers"])
    await send(
        {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0"), (b"x-read", text)]}
    )
    await send({"type": "http.response.body", "body": b""})


def wsgi(environ: dict[str, Any], start: Callable[[str, list[tuple[str, str]]], object]) -> list[bytes]:
    """The application of waitress."""
    named = {name[5:]: value for name, value in environ.items() if name.startswith("HTTP_")}
    named |= {name: environ[name] for name in ("CONTENT_TYPE", "CONTENT_LENGTH") if environ.get(name)}
    headers = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in named.items()]
    target, body = environ["REQUEST_URI"].encode("latin-1"), environ["wsgi.input"].read()
    text = read(environ["REQUEST_METHOD"], target, body, headers)
    start("200 OK", [("Content-Length", "0"), ("x-read", text.decode())])
    return []


async def aiohttp_answer(request: web.BaseRequest) -> web.StreamResponse:
    """The application of aiohttp."""
    target = request.raw_path.encode("utf-8", "surrogateescape")
    text = read(request.method, target, await request.read(), request.raw_headers)
    return web.Response(headers={"x-read": text.decode()})


async def serve_aiohttp(sock: socket.socket) -> None:
    """Uses the parser in C, or the one in Python if AIOHTTP_NO_EXTENSIONS is set."""
    runner = web.ServerRunner(web.Server(aiohttp_answer, access_log=None))
    await runner.setup()
    await web.SockSite(runner, sock).start()


async def serve_uvicorn(sock: socket.socket, http: str) -> None:
    """Uses h11 or httptools."""
    config = uvicorn.Config(asgi, http=http, lifespan="off", log_config=None, access_log=False, timeout_keep_alive=60)
    await uvicorn.Server(config).serve([sock])


async def serve_hypercorn(sock: socket.socket) -> None:
    """Uses h11."""
    config = hypercorn.config.Config()
    config.bind = [f"fd://{sock.fileno()}"]
    config.keep_alive_max_requests = ANSWERS_MAX
    config.keep_alive_timeout = 60.0  # the client may be paused for longer than the default of 5 s
    application: Any = asgi  # its own message types are narrower than ASGI's
    await hypercorn.asyncio.serve(application, config, shutdown_trigger=asyncio.Event().wait)


async def serve_waitress(sock: socket.socket) -> None:
    """Uses its own parser, in threads."""
    waitress = importlib.import_module("waitress")  # the package has no types
    server = waitress.create_server(wsgi, sockets=[sock], threads=4, channel_timeout=60)
    threading.Thread(target=server.run, daemon=True).start()


SERVERS: dict[str, Callable[[socket.socket], Awaitable[None]]] = {
    "aiohttp": serve_aiohttp,
    "aiohttp-python": serve_aiohttp,
    "uvicorn-h11": lambda sock: serve_uvicorn(sock, "h11"),
    "uvicorn-httptools": lambda sock: serve_uvicorn(sock, "httptools"),
    "hypercorn": serve_hypercorn,
    "waitress": serve_waitress,
}


async def main(names: list[str]) -> None:
    """Serves until stdin ends."""
    logging.disable()
    sockets = {name: socket.create_server(("127.0.0.1", 0), backlog=256) for name in names}
    for sock in sockets.values():
        sock.setblocking(False)
    serving = [asyncio.ensure_future(SERVERS[name](sock)) for name, sock in sockets.items()]
    print(json.dumps({name: sock.getsockname()[1] for name, sock in sockets.items()}), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(int(any(task.done() and task.exception() is not None for task in serving)))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
