"""Answers that need no engine: health, preflights, the list of Models, refused methods. And what CORS adds to any
answer.

Owns their bodies (interfaces, section 3). A Model that the caller may not call is in no list, and is not found.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from autoscaler.contract import ModelEntry
from gateway import errors
from gateway.http import responses
from gateway.http.request_head import Head
from gateway.request.api_routes import Kind, Operation

if TYPE_CHECKING:
    from gateway.gateway import Gateway

_EXPOSED = b"x-request-id, server-timing, retry-after, x-pilotlight-cold"


def handle_local_route(
    front: Gateway, head: Head, operation: Operation, request_id: bytes, cors_fields: bytes
) -> bytes:
    """The whole answer. Raises CallError."""
    close = not head.keep_alive or front.closing
    if operation.kind is Kind.NOT_ALLOWED:
        raise errors.method_not_allowed(operation.allow)
    if operation.kind is Kind.PREFLIGHT:
        return responses.no_content(request_id, close=close, more=cors_fields and cors_fields + responses.PREFLIGHT)
    if operation.kind is Kind.HEALTH:
        body: bytes = b'{"status":"ok"}'
    elif operation.kind is Kind.LIST_MODELS:
        entries = front.directory.visible(front.tenant(head))
        rows = [_model(front, entry, name) for entry in entries for name in _names(entry)]
        body = msgspec.json.encode({"object": "list", "data": rows})
    else:
        name = operation.model or ""
        entry = front.directory.resolve(front.tenant(head), name)
        adapter = "" if name == entry.name or name in entry.aliases else name[name.rindex(":") :]
        body = msgspec.json.encode(_model(front, entry, entry.name + adapter))
    return responses.render_response(200, body, request_id, close=close, more=cors_fields)


def _names(entry: ModelEntry) -> list[str]:
    """Of a Model and its adapters, which are listed like it."""
    return [entry.name, *(f"{entry.name}:{adapter.name}" for adapter in entry.adapters)]


def _model(front: Gateway, entry: ModelEntry, name: str) -> dict[str, object]:
    """A Model, or an adapter of it, as OpenAI lists it, and what we know beside."""
    return {
        "id": name,
        "object": "model",
        "created": entry.created_unix_s,
        "owned_by": "pilotlight",
        "pilotlight": {
            "state": front.dispatch.model_state(entry.name),
            "expected_wait_seconds": front.dispatch.expected_wait_s(entry.name, front.clock()),
            "context_tokens": entry.context_tokens,
        },
    }


def render_cors_headers(head: Head, allowed: Collection[str]) -> bytes:
    """The header lines for a browser, where any origin is allowed at all."""
    if not allowed:
        return b""
    origin = head.headers.get(b"origin")
    if origin is None or not ("*" in allowed or origin.decode("latin-1") in allowed):
        return b"vary: origin\r\n"
    out = b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: %b\r\n"
    return out % (origin, _EXPOSED)
