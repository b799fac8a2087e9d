"""Authenticates the clients of the contract on TCP, and permits each endpoint to one role: gateway or agent.

Tokens (RFC 6750) are compared in constant time, before a body is read; a stream is checked when it opens. A rejected
client gets no detail; the log has one line a minute. Unix sockets are protected by their file modes instead. The caller
supplies the valid tokens for each request: lists of shared secrets, or a function that reviews the token (`admits`),
possibly with the API server. The name in a client certificate determines its role (`read_certificate_roles`).
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple

from aiohttp import web
from aiohttp.typedefs import Middleware

SAY_EVERY_S = 60.0
REFUSED = b'{"error":"not allowed"}'
BOUND = web.RequestKey("bound", str)
"""The key at which a request stores the name of the node that its token is bound to."""
NODE_CHARS_MAX = 253
"""The maximum length of a node's name (RFC 1123)."""

Role = Literal["gateway", "agent"]
Roles = frozenset[Role]
GATEWAY: Final[Roles] = frozenset({"gateway"})
AGENT: Final[Roles] = frozenset({"agent"})
BOTH: Final[Roles] = GATEWAY | AGENT
ROLES = web.RequestKey("roles", frozenset)
"""The key of the roles of a request's token and certificate. Absent: the request arrived on a Unix socket."""


class Authenticated(NamedTuple):
    """A client whose token is valid."""

    node: str = ""
    """The node to which the token is bound. Empty: none, or the API server does not report it."""
    roles: Roles = BOTH


Admits = Callable[[str], Awaitable[Authenticated | None]]
"""Returns the client of a token that is not a shared secret. None: the token is invalid."""
Answer = Callable[[web.Request], Awaitable[web.StreamResponse]]

log = logging.getLogger("pilotlight.autoscaler.auth")


class ContractAuth:
    """An aiohttp middleware (`check`) that authenticates a request and records its roles."""

    def __init__(
        self,
        tokens: Callable[[], Sequence[str]] | None,
        clock: Callable[[], float] = time.monotonic,
        admits: Admits | None = None,
        *,
        agent_tokens: Callable[[], Sequence[str]] | None = None,
        agent_name: str = "",
    ) -> None:
        """`tokens`: the valid shared secrets, for both roles, or with `agent_tokens` for gateways only.

        `admits` reviews any other token. Without `tokens` and `admits`, no token is needed. `agent_name` is the name in
        agents' certificates; without it every certificate has both roles.
        """
        self._tokens = tokens
        self._agent_tokens = agent_tokens
        self._agent_name = agent_name
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
            roles = self.roles(authorization)
            if not roles and self._admits is not None:
                admitted = await self._admits(_shown(authorization))
                if admitted is not None:
                    request[BOUND], roles = admitted.node, admitted.roles
            if not roles:
                self.refused()
                return web.Response(status=401, body=REFUSED, content_type="application/json")
            if self._agent_name:
                roles &= read_certificate_roles(request.get_extra_info("peercert") or {}, self._agent_name)
            request[ROLES] = roles
            return await handler(request)

        return check

    def roles(self, authorization: str) -> Roles:
        """Return the roles of a shared secret, in constant time."""
        if self._tokens is None and self._agent_tokens is None and self._admits is None:
            return BOTH
        digest = _digest(_shown(authorization))
        first = _matches(digest, self._tokens)
        if self._agent_tokens is None:
            return BOTH if first else frozenset()
        second = _matches(digest, self._agent_tokens)
        return (GATEWAY if first else frozenset()) | (AGENT if second else frozenset())

    def refused(self) -> None:
        """Count a rejected request, and log the count once a minute."""
        self._refused += 1
        now_s = self._clock()
        if self._said_s is None or now_s - self._said_s >= SAY_EVERY_S:
            log.warning("event=contract_refused count=%d reason='requests without a valid token'", self._refused)
            self._said_s, self._refused = now_s, 0


def check_token_node(request: web.Request, node: str) -> web.Response | None:
    """Return an error response if a client reports for another node than that of its token; None: it is permitted."""
    bound = request.get(BOUND, "")
    if not bound or bound == node:
        return None
    log.warning(
        "event=contract_refused node=%r token_node=%s reason='the token belongs to another node'",
        node[:NODE_CHARS_MAX],
        bound,
    )
    return web.json_response(
        {"error": "the token belongs to a pod on another node: set --node to the node of the pod"}, status=403
    )


def require_roles(endpoints: Mapping[str, Role]) -> Middleware:
    """Return a middleware that permits each endpoint of the application, by path, to clients of one role only."""

    @web.middleware
    async def check(request: web.Request, handler: Answer) -> web.StreamResponse:
        resource = request.match_info.route.resource
        if resource is None:  # unknown path: the handler answers 404
            return await handler(request)
        path, roles = resource.canonical, request.get(ROLES, BOTH)
        needed = endpoints[path]
        if needed in roles:
            return await handler(request)
        shown = " or ".join(sorted(roles)) or "neither"
        log.warning("event=contract_refused path=%s role=%r required_role=%s reason='wrong role'", path, shown, needed)
        error = f"{path} requires the role {needed}; this token or certificate has the role {shown}"
        return web.json_response({"error": error}, status=403)

    return check


def read_certificate_roles(certificate: Mapping[str, Any], agent_name: str) -> Roles:
    """Return the roles of a client certificate, as `ssl.SSLSocket.getpeercert` describes it.
    Its DNS names decide, or its common name if there are none. A certificate with `agent_name` is an agent's.
    """
    names = {value for kind, value in certificate.get("subjectAltName", ()) if kind == "DNS"}
    if not names:
        subject = (pair for part in certificate.get("subject", ()) for pair in part)
        names = {value for kind, value in subject if kind == "commonName"}
    return AGENT if agent_name in names else GATEWAY


def _matches(digest: bytes, tokens: Callable[[], Sequence[str]] | None) -> bool:
    """Compare with every token, so that the time does not depend on the one that matches."""
    valid = () if tokens is None else tokens()
    return sum(hmac.compare_digest(digest, _digest(token)) for token in valid) > 0


def _shown(authorization: str) -> str:
    """Return the token of the header, if any."""
    scheme, _, shown = authorization.partition(" ")
    return shown if scheme.lower() == "bearer" else ""


def _digest(token: str) -> bytes:
    """Return a digest, so that all compared values have the same length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
