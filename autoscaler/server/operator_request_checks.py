"""Checks and errors of the requests that operators POST. I/O."""

from __future__ import annotations

import hashlib

import msgspec
from aiohttp import web

from autoscaler.queries.response_types import Problem
from autoscaler.routing.catalogue import front_settings
from autoscaler.state.world import World
from autoscaler.text import unix_seconds

ROLE = "operator"


JSON = "application/json"


NAMES_MAX = 20


FOREIGN = "orders from pages of another origin are rejected: send them from a program or from this port's own page"


NOT_LEADING = "this autoscaler does not lead: send the order to the leader, which may change at any time"


def check_leads(world: World) -> None:
    """Raise OrderError if this process cannot execute orders."""
    if not world.leadership.leads:
        raise OrderError(503, NOT_LEADING)
    if not world.leadership.synced:
        raise OrderError(503, "the running replicas are still being listed: try again in a second")


def is_same_origin(origin: str | None, site: str | None, host: str | None) -> bool:
    """Return whether the request cannot come from a page of another origin (`Origin`, `Sec-Fetch-Site` and `Host`).

    Programs send neither of the first two. (https://www.w3.org/TR/fetch-metadata/)
    """
    if site is not None and site not in ("same-origin", "none"):
        return False
    return origin is None or (host is not None and origin.partition("://")[2] == host)


async def read_order_body(request: web.Request, bytes_max: int) -> bytes:
    """Read a body that a program or a page of this port sent. Raises OrderError."""
    headers = request.headers
    if not is_same_origin(headers.get("origin"), headers.get("sec-fetch-site"), headers.get("host")):
        raise OrderError(403, FOREIGN)
    if request.content_type != JSON:  # a form of a page of another origin cannot have this type
        raise OrderError(415, "send the order as content-type application/json; the body may be {}")
    body = await request.content.read(bytes_max + 1)
    while len(body) <= bytes_max and (more := await request.content.read(bytes_max + 1 - len(body))):
        body += more
    if len(body) > bytes_max:
        raise OrderError(413, f"the body is too large: at most {bytes_max} bytes are allowed")
    return body


def format_names(names: object) -> str:
    """Format names for an error message, up to NAMES_MAX."""
    known = sorted(str(name) for name in names) if isinstance(names, dict) else []
    return ", ".join(known[:NAMES_MAX]) or "none"


def order_error_response(error: OrderError) -> web.Response:
    """Return an error response."""
    headers = {"WWW-Authenticate": "Bearer"} if error.status == web.HTTPUnauthorized.status_code else {}
    body = msgspec.json.encode(Problem(error=error.message))
    return web.Response(status=error.status, body=body, content_type=JSON, headers=headers)


class OrderError(Exception):
    """An order that cannot be executed: an HTTP status, and a sentence with the problem and the fix."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def authenticate_operator(world: World, authorization: str, now_unix_s: float, what: str = "an order") -> str:
    """Return the operator's name for the log.

    Raises OrderError 401 without a required key, 403 for a key with another role. `what` is the operation, in words. A
    key is required if requests need one. With `auth: none`, or without a Tenant, every client of the port is permitted.
    """
    if not front_settings(world.settings, tuple(world.tenants.values())).keys_needed:
        return "local"
    scheme, _, shown = authorization.partition(" ")
    digest = hashlib.sha256(shown.strip().encode("utf-8", "surrogateescape")).hexdigest()
    for tenant in world.tenants.values() if scheme.lower() == "bearer" else ():
        for key in tenant.spec.keys:
            if key.sha256 != digest or (key.expires_at and unix_seconds(key.expires_at) <= now_unix_s):
                continue
            if key.role != ROLE:
                raise OrderError(
                    403, f"this API key has the role {key.role}: {what} requires a key with the role {ROLE}"
                )
            return f"{tenant.name}/{key.name}"
    raise OrderError(
        401, f"{what} requires an API key with the role {ROLE}: `pilotlight key new --tenant NAME --role {ROLE}`"
    )
