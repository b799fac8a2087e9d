"""Responses that need no engine: health, preflights, the model list, unsupported methods; and CORS headers.

The bodies are specified in interfaces, section 3. A model that the caller may not call is neither listed nor found.
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
    from gateway.server.context import GatewayContext

_EXPOSED = b"x-request-id, server-timing, retry-after, retry-after-ms, x-should-retry, x-pilotlight-cold"


def handle_local_route(
    gateway: GatewayContext, head: Head, operation: Operation, request_id: bytes, cors_fields: bytes
) -> bytes:
    """Return the complete response. Raises CallError."""
    close = not head.keep_alive or gateway.closing
    if operation.kind is Kind.NOT_ALLOWED:
        raise errors.method_not_allowed(operation.allow)
    if operation.kind is Kind.PREFLIGHT:
        return responses.no_content(request_id, close=close, more=cors_fields and cors_fields + responses.PREFLIGHT)
    if operation.kind is Kind.HEALTH:
        body: bytes = b'{"status":"ok"}'
    elif operation.kind is Kind.LIST_MODELS:
        entries = gateway.directory.names.visible(gateway.tenant(head))
        rows = [_model(gateway, entry, name) for entry in entries for name in _names(entry)]
        body = msgspec.json.encode({"object": "list", "data": rows})
    else:
        name = operation.model or ""
        entry = gateway.directory.names.resolve(gateway.tenant(head), name)
        adapter = "" if name == entry.name or name in entry.aliases else name[name.rindex(":") :]
        body = msgspec.json.encode(_model(gateway, entry, entry.name + adapter))
    return responses.render_response(200, body, request_id, close=close, more=cors_fields)


def _names(entry: ModelEntry) -> list[str]:
    """Return the names of a model and its adapters, which are listed like models."""
    return [entry.name, *(f"{entry.name}:{adapter.name}" for adapter in entry.adapters)]


def _model(gateway: GatewayContext, entry: ModelEntry, name: str) -> dict[str, object]:
    """Return a model or an adapter in OpenAI's format, with Pilotlight's additional fields."""
    return {
        "id": name,
        "object": "model",
        "created": entry.created_unix_s,
        "owned_by": "pilotlight",
        "pilotlight": {
            "state": gateway.dispatch.model_state(entry.name),
            "expected_wait_seconds": gateway.dispatch.expected_wait_s(entry.name, gateway.clock()),
            "context_tokens": entry.context_tokens,
        },
    }


def render_cors_headers(head: Head, allowed: Collection[str]) -> bytes:
    """Render the CORS header lines; empty if no origin is allowed at all."""
    if not allowed:
        return b""
    origin = head.headers.get(b"origin")
    if origin is None or not ("*" in allowed or origin.decode("latin-1") in allowed):
        return b"vary: origin\r\n"
    out = b"access-control-allow-origin: %b\r\nvary: origin\r\naccess-control-expose-headers: %b\r\n"
    return out % (origin, _EXPOSED)
