"""Responses that need no engine: `/`, health, preflights, the model list, unsupported methods.

The bodies are specified in interfaces, section 3. A model that the caller may not call is neither listed nor found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from autoscaler.contract import ModelEntry
from gateway import errors
from gateway.errors import CallError
from gateway.http import responses
from gateway.http.request_head import Head
from gateway.request.api_routes import Kind, Operation
from gateway.server import landing_page, local_ollama_routes
from gateway.server.cors import render_preflight
from gateway.server.local_ollama_routes import listed_names

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext


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
        scheme = head.headers.get(b"x-forwarded-proto", b"").lower()
        if scheme not in {b"http", b"https"}:
            scheme = b"https" if secure else b"http"
        base_url = f"{scheme.decode()}://{host}"
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
