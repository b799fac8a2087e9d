"""Responses that need no engine: health, preflights, the model list, unsupported methods; and CORS headers.

The bodies are specified in interfaces, section 3. A model that the caller may not call is neither listed nor found.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from autoscaler.contract import ModelEntry
from gateway import errors
from gateway.http import responses
from gateway.http.request_head import TOKEN, Head
from gateway.request.api_routes import Kind, Operation

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext

_EXPOSED = (
    b"x-request-id, server-timing, retry-after, retry-after-ms, x-should-retry, x-pilotlight-cold, allow, "
    b"www-authenticate, content-disposition, content-encoding, date"
)
"""All documented response headers that a page cannot read by default."""
_ALLOWED = (
    b"authorization", b"content-type", b"x-api-key", b"api-key", b"x-request-id", b"x-model", b"x-priority", b"prefer",
    b"anthropic-version", b"anthropic-beta", b"openai-beta", b"traceparent", b"tracestate", b"x-stainless-read-timeout",
)  # fmt: skip
"""Request headers that a page may send: these, and all others that its preflight names."""
_REQUESTED_MAX, _REQUESTED_BYTES_MAX = 100, 4 << 10
"""Limits of the headers that a preflight names; above them only _ALLOWED."""
_NAME = re.compile(TOKEN + rb"{1,128}+")
_VARY = b"vary: origin\r\n"


def handle_local_route(
    gateway: GatewayContext, head: Head, operation: Operation, request_id: bytes, cors_fields: bytes
) -> bytes:
    """Return the complete response. Raises CallError."""
    close = not head.keep_alive or gateway.closing
    if operation.kind is Kind.NOT_ALLOWED:
        raise errors.method_not_allowed(operation.allow)
    if operation.kind is Kind.PREFLIGHT:
        return responses.no_content(request_id, close=close, more=render_preflight(head, cors_fields))
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
        return _VARY
    out = b"access-control-allow-origin: %b\r\n%baccess-control-expose-headers: %b\r\n"
    return out % (origin, _VARY, _EXPOSED)


def render_preflight(head: Head, cors_fields: bytes) -> bytes:
    """Render the header lines of a preflight's response; `cors_fields` as `render_cors_headers` returns them."""
    if cors_fields in (b"", _VARY):
        return cors_fields
    requested = head.headers.get(b"access-control-request-headers", b"").lower()
    names = [*_ALLOWED]
    if len(requested) <= _REQUESTED_BYTES_MAX and requested.count(b",") < _REQUESTED_MAX:
        stripped = [name.strip(b" \t") for name in requested.split(b",")]
        names += [name for name in stripped if name not in _ALLOWED and _NAME.fullmatch(name) is not None]
    fields = cors_fields.replace(_VARY, b"vary: origin, access-control-request-headers\r\n")
    return b"%baccess-control-allow-methods: GET, POST, OPTIONS\r\naccess-control-allow-headers: %b\r\n%b" % (
        fields,
        b", ".join(dict.fromkeys(names)),
        b"access-control-max-age: 600\r\n",
    )
