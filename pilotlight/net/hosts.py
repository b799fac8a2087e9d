"""The Host header of operations ports: keeps web pages away that reach one by a name of their own (DNS rebinding).

On a connection to a loopback address, Host must be `localhost` or a loopback address, with or without a port; any other
request gets 421. This is stricter than the check of the inference port (`gateway.http.host_check`), whose parser it
uses. Unix sockets are exempt, since no browser reaches them, and so are other addresses: whoever opened one to others
(`auth: none`) may give it any name.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from gateway.http.host_check import host_name, is_loopback, is_on_loopback

MISDIRECTED = 421
"""RFC 9110, 15.5.20: this is not the server that the name stands for."""
WRONG = "this port answers to localhost and loopback addresses only: send one of them as the Host header"

Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]


def guarded(app: web.Application) -> web.Application:
    """The same application, which looks at the Host of every request first."""
    app.middlewares.append(_own_names_only)
    return app


@web.middleware
async def _own_names_only(request: web.Request, handler: Answer) -> web.StreamResponse:
    at = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if well_named(at, request.headers.getall("Host", [])):
        return await handler(request)
    return web.json_response({"error": WRONG}, status=MISDIRECTED)


def well_named(at: object, hosts: Sequence[str]) -> bool:
    """Whether a request with these Host headers may come in at the socket address `at` (a path: a Unix socket).

    None at all is no browser: a probe that speaks HTTP/1.0. (Without one aiohttp answers HTTP/1.1 with 400.)
    """
    return not is_on_loopback(at) or all(map(ours, hosts))


def ours(host: str) -> bool:
    """Whether a Host header names the loopback of the machine that it was sent to."""
    name = host_name(host)
    return name is not None and is_loopback(name)
