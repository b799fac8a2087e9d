"""Responses that need no engine: `/`, health, preflights, the model list, unsupported methods; and CORS headers.

The bodies are specified in interfaces, section 3. A model that the caller may not call is neither listed nor found.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING

import msgspec

from autoscaler.contract import ModelEntry
from gateway import errors
from gateway.errors import CallError
from gateway.http import responses
from gateway.http.request_head import TOKEN, Head
from gateway.request.api_routes import Kind, Operation
from gateway.server import landing_page, local_ollama_routes
from gateway.server.local_ollama_routes import listed_names

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
    gateway: GatewayContext, head: Head, operation: Operation, request_id: bytes, cors_fields: bytes,
    *, body: bytes = b"", secure: bool = False,
) -> bytes:  # fmt: skip
    """Return the complete response. `secure`: the client uses TLS. Raises CallError."""
    close = not head.keep_alive or gateway.closing
    if operation.kind is Kind.NOT_ALLOWED:
        raise errors.method_not_allowed(operation.allow)
    if operation.kind is Kind.PREFLIGHT:
        return responses.no_content(request_id, close=close, more=render_preflight(head, cors_fields))
    if operation.kind is Kind.LANDING:
        return _landing(gateway, head, request_id, cors_fields, secure=secure)
    if operation.dialect == "ollama":
        body = local_ollama_routes.handle_ollama_route(gateway, head, operation, body)
    elif operation.kind is Kind.HEALTH:
        body = b'{"status":"ok"}'
    elif operation.kind is Kind.LIST_MODELS:
        entries = gateway.directory.names.visible(gateway.tenant(head))
        rows = [_model(gateway, entry, name) for entry in entries for name in listed_names(gateway, entry)]
        body = msgspec.json.encode({"object": "list", "data": rows})
    else:
        name = operation.model or ""
        entry = gateway.directory.names.resolve(gateway.tenant(head), name)
        adapter = "" if name == entry.name or name in entry.aliases else name[name.rindex(":") :]
        listed = name in entry.aliases and gateway.directory.settings.lists_aliases
        body = msgspec.json.encode(_model(gateway, entry, name if listed else entry.name + adapter))
    return responses.render_response(200, body, request_id, close=close, more=cors_fields)


def _landing(gateway: GatewayContext, head: Head, request_id: bytes, cors_fields: bytes, *, secure: bool) -> bytes:
    """Return the page at `/`. Without a valid key it lists no models, because health checks send none."""
    try:
        entries, has_access = gateway.directory.names.visible(gateway.tenant(head)), True
    except CallError:
        entries, has_access = [], False
    rows = [(entry.name, gateway.dispatch.model_state(entry.name), entry.context_tokens) for entry in entries]
    if landing_page.accepts_html(head):
        host = head.headers.get(b"host", b"localhost").decode("latin-1")
        base_url = f"{'https' if secure else 'http'}://{host}"
        keys_needed = gateway.directory.settings.keys_needed
        page = landing_page.render_html(rows, base_url, has_access=has_access, keys_needed=keys_needed)
        kind, more = b"text/html; charset=utf-8", landing_page.HTML_HEADERS
    else:
        page = landing_page.render_json(rows, has_access=has_access)
        kind, more = b"application/json", landing_page.JSON_HEADERS
    close = not head.keep_alive or gateway.closing
    return responses.render_response(200, page, request_id, close=close, more=more + cors_fields, kind=kind)


def _model(gateway: GatewayContext, entry: ModelEntry, name: str) -> dict[str, object]:
    """Return a model or an adapter in OpenAI's format, with additional fields.

    Clients read the context length from the field of the server that they know: OpenRouter, vLLM or llama.cpp.
    """
    tokens = entry.context_tokens
    length = {} if tokens is None else {"context_length": tokens, "max_model_len": tokens, "meta": {"n_ctx": tokens}}
    return {
        "id": name,
        "object": "model",
        "created": entry.created_unix_s,
        "owned_by": "pilotlight",
        **length,
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
