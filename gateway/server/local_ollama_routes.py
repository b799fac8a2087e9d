"""Responses of Ollama's API that need no engine: the lists of models, one model, the version, rejected management.

A model that the caller may not call is neither listed nor found. Nothing here starts a model. Ollama's details of the
weights (size, family, quantization) are not known to a gateway and are empty.
"""

from __future__ import annotations

from datetime import UTC, datetime
from hashlib import sha256
from typing import TYPE_CHECKING

import msgspec

from autoscaler.contract import ModelEntry
from gateway.dialects import ollama_requests
from gateway.http.request_head import Head
from gateway.request.api_routes import Kind, Operation

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext

CAPABILITIES = ("completion", "tools")
"""Reported for every model, because some clients offer only models with these. The engine decides."""


def handle_ollama_route(gateway: GatewayContext, head: Head, operation: Operation, body: bytes) -> bytes:
    """Return the JSON document. Raises CallError."""
    if operation.kind is Kind.OLLAMA_VERSION:
        return msgspec.json.encode({"version": ollama_requests.API_VERSION})
    tenant, names = gateway.tenant(head), gateway.directory.names
    if operation.kind is Kind.OLLAMA_MANAGE:
        raise ollama_requests.refuse_management(operation.advice)
    if operation.kind is Kind.OLLAMA_SHOW:
        return msgspec.json.encode(_shown(names.resolve_tagged(tenant, ollama_requests.read_shown_model(body))))
    entries = names.visible(tenant)
    if operation.kind is Kind.OLLAMA_PS:
        running = [entry for entry in entries if gateway.dispatch.model_state(entry.name) == "ready"]
        rows = [_running(entry, names.with_tag(entry.name)) for entry in running]
    else:
        rows = [_listed(entry, names.with_tag(name)) for entry in entries for name in listed_names(gateway, entry)]
    return msgspec.json.encode({"models": rows})


def listed_names(gateway: GatewayContext, entry: ModelEntry) -> list[str]:
    """Return the listed names of a model: its own, those of its adapters, and its aliases if they are listed."""
    names = [entry.name, *(f"{entry.name}:{adapter.name}" for adapter in entry.adapters)]
    if gateway.directory.settings.lists_aliases:
        names += gateway.directory.names.own_aliases(entry)
    return names


def format_time(unix_s: float) -> str:
    """Return a time in RFC 3339, as Ollama writes it."""
    return datetime.fromtimestamp(unix_s, UTC).isoformat().replace("+00:00", "Z")


def _identity(entry: ModelEntry, name: str) -> dict[str, object]:
    """Return the members that all lists have. The digest identifies the name, not the weights: clients cut it to 12
    characters.
    """
    return {
        "name": name,
        "model": name,
        "size": 0,
        "digest": sha256(f"pilotlight/model/{name}/{entry.created_unix_s}".encode()).hexdigest(),
        "details": _details(),
    }


def _details() -> dict[str, object]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _listed(entry: ModelEntry, name: str) -> dict[str, object]:
    return _identity(entry, name) | {"modified_at": format_time(entry.created_unix_s)}


def _running(entry: ModelEntry, name: str) -> dict[str, object]:
    length = {} if entry.context_tokens is None else {"context_length": entry.context_tokens}
    return _identity(entry, name) | {"size_vram": 0} | length


def _shown(entry: ModelEntry) -> dict[str, object]:
    info: dict[str, object] = {"general.architecture": "pilotlight", "general.basename": entry.name}
    if entry.context_tokens is not None:
        info["pilotlight.context_length"] = entry.context_tokens
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _details(),
        "model_info": info,
        "capabilities": CAPABILITIES,
        "modified_at": format_time(entry.created_unix_s),
    }
