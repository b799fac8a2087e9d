"""The door of the contract where it listens on TCP: who shows no token that is in force is sent away.

Owns that one check (RFC 6750), in constant time, before a body is read; a stream is checked when it is opened. Who is
sent away learns nothing; on this side it is said, at most once a minute. Unix sockets need no door: their file modes
are one. Which tokens are in force is the caller's to say, anew for each request: as a list of shared secrets, or by
looking at what is shown (`admits`), which may ask somebody.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import NamedTuple

from aiohttp import web
from aiohttp.typedefs import Middleware

SAY_EVERY_S = 60.0
REFUSED = b'{"error":"not allowed"}'
BOUND = web.RequestKey("bound", str)
"""Of a request: the node that its token is bound to."""
NODE_CHARS_MAX = 253
"""Of a node's name (RFC 1123)."""


class Admitted(NamedTuple):
    """Who shows a token that is in force."""

    node: str = ""
    """The node that it is bound to; empty: it is bound to none, or nobody says."""


Admits = Callable[[str], Awaitable[Admitted | None]]
"""Who shows a token that is no shared secret; None: it is not in force."""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("pilotlight.autoscaler.door")


class Door:
    """An aiohttp middleware (`check`). `tokens`: the shared secrets in force; `admits` looks at any other token."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[str]],
        clock: Callable[[], float] = time.monotonic,
        admits: Admits | None = None,
    ) -> None:
        self._tokens = tokens
        self._admits = admits
        self._clock = clock
        self._refused = 0
        self._said_s: float | None = None

    @property
    def check(self) -> Middleware:
        """The middleware."""

        @web.middleware
        async def check(request: web.Request, handler: Answer) -> web.StreamResponse:
            authorization = request.headers.get("authorization", "")
            if self.admits(authorization):
                return await handler(request)
            admitted = None if self._admits is None else await self._admits(_shown(authorization))
            if admitted is not None:
                request[BOUND] = admitted.node
                return await handler(request)
            self.refused()
            return web.Response(status=401, body=REFUSED, content_type="application/json")

        return check

    def admits(self, authorization: str) -> bool:
        """Whether the header shows a shared secret in force; takes as long for a wrong one as for a right one."""
        digest = _digest(_shown(authorization))
        return sum(hmac.compare_digest(digest, _digest(token)) for token in self._tokens()) > 0

    def refused(self) -> None:
        """Counts one that was sent away, and says so when it is time."""
        self._refused += 1
        now_s = self._clock()
        if self._said_s is None or now_s - self._said_s >= SAY_EVERY_S:
            log.warning("event=contract_refused reason='no token that is in force' times=%d", self._refused)
            self._said_s, self._refused = now_s, 0


def elsewhere(request: web.Request, node: str) -> web.Response | None:
    """What one is told who speaks for a node that its token is not of; None: it may, as far as anybody knows."""
    bound = request.get(BOUND, "")
    if not bound or bound == node:
        return None
    log.warning("event=contract_refused reason='a token of node %s, for node %r'", bound, node[:NODE_CHARS_MAX])
    return web.json_response({"error": "its token is of a pod on another node: --node is that of the pod"}, status=403)


def _shown(authorization: str) -> str:
    """The token that is shown, if any."""
    scheme, _, shown = authorization.partition(" ")
    return shown if scheme.lower() == "bearer" else ""


def _digest(token: str) -> bytes:
    """Equal lengths, whatever was sent."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
