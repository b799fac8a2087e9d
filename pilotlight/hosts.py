"""The Host header of operations ports: no page in a browser reaches one by a name of its own (DNS rebinding).

Owns the one rule. On a connection to a loopback address the Host must be `localhost` or a loopback address, with or
without a port; all else is 421, one clear error. Unix sockets are exempt, since no browser reaches them, and so are
other addresses: who opened one to others (`auth: none`) may give it any name.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from pilotlight.listen import Address

MISDIRECTED = 421
"""RFC 9110, 15.5.20: this is not the server that the name stands for."""
WRONG = "this port answers to localhost and loopback addresses only: send one of them as the Host header"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+)(?::[0-9]{0,5})?")
"""uri-host and port (RFC 9110, 7.2), no wider than what can be one of ours."""

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
    return not isinstance(at, tuple) or not Address(str(at[0]), 0).loopback or all(map(ours, hosts))


def ours(host: str) -> bool:
    """Whether a Host header names the loopback of the machine that it was sent to."""
    found = _HOST.fullmatch(host)
    return found is not None and Address(found[1].strip("[]").lower(), 0).loopback
