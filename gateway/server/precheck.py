"""Checks that need only a request's head: rejects requests before their bodies are read, to save memory.

The checks have the same order as those of a whole request (`gateway.server.admission`), with one
exception: errors in the bytes of a body are not found if its head was rejected before they arrived.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoscaler.contract import ModelEntry, TenantEntry
from gateway import errors
from gateway.dialects import ollama_requests, rerank, translated_request, triton_requests
from gateway.dispatch.memory_pressure import Pressure
from gateway.http.host_check import is_from_foreign_page
from gateway.http.request_head import Head
from gateway.request import media_types
from gateway.request.api_routes import CHAT, MESSAGES, Kind, Operation, suggest_path
from gateway.request.headers import Asked, get_call_headers

if TYPE_CHECKING:
    from gateway.server.context import GatewayContext

DROP_BYTES_MAX = 64 << 10
"""Rest of a body that is read and dropped after an early response; with a longer rest the connection ends.
Also the maximum body of a path that accepts none.
"""
_PREFLIGHT = Operation(Kind.PREFLIGHT)


def check_head(gateway: GatewayContext, head: Head, operation: Operation | None, size: int) -> None:
    """Raise CallError if the head alone rules out a request with this many body bytes, or more."""
    check_sender(gateway, head)
    if operation is None:
        operation = find_server_operation(head)
    if operation.kind is Kind.NOT_ALLOWED:
        raise errors.method_not_allowed(operation.allow)
    if operation.kind is not Kind.INFER:
        check_body_size(operation, size)
        return
    if operation.dialect == "ollama" and size > translated_request.BODY_BYTES_MAX:
        raise errors.translated_too_large(translated_request.BODY_BYTES_MAX)
    tenant, headers = gateway.tenant(head), get_call_headers(head)
    if headers.error is not None:
        raise headers.error.with_traceback(None)
    check_media(gateway, head, operation, headers)
    check_model(gateway, tenant, operation, headers)
    if gateway.closing:
        raise errors.shutting_down()
    if gateway.dispatch.pressure is Pressure.NO_CALLS:
        raise errors.out_of_memory()  # bodies use most of the memory


def find_server_operation(head: Head) -> Operation:
    """Return the operation of `OPTIONS *`, which concerns the whole server (RFC 9110, 9.3.7); else raise 404."""
    if head.path != b"*":
        raise errors.path_not_found(suggest_path(head.path))
    return _PREFLIGHT


def check_sender(gateway: GatewayContext, head: Head) -> None:
    """Raise 421 or 403 for a request that a web page may have sent, if the host check applies.
    A cached head is checked once, until the settings change.
    """
    check = gateway.host_check
    if check is None or head.passed is check:
        return
    if not check.has_allowed_host(head.host):
        raise errors.misdirected_request()
    if not check.has_allowed_origin(head.headers):
        raise errors.origin_not_allowed()
    head.passed = check


def check_body_size(operation: Operation, size: int) -> None:
    """Raise 413 if the body is too long for a path that accepts none; 400 for a file of `ollama create`."""
    if operation.kind is not Kind.INFER and size > DROP_BYTES_MAX:
        if operation.kind is Kind.OLLAMA_MANAGE:
            raise ollama_requests.refuse_management(operation.advice)
        raise errors.too_large(DROP_BYTES_MAX)


def check_media(gateway: GatewayContext, head: Head, operation: Operation, headers: Asked) -> None:
    """Raise 415 for a form on a path that accepts none, and for JSON of another content type from a foreign page. Raise
    403 for a form from a foreign page if no key is needed.

    Otherwise JSON is accepted whatever its content type is. A page must send application/json, so that its browser
    sends a preflight first. It sends none for a form.
    """
    content_type = headers.content_type
    if content_type == b"application/json":
        return
    settings = gateway.directory.settings
    if media_types.is_form(content_type):
        if not operation.multipart:
            raise errors.unsupported_media_type()
        if not settings.keys_needed and is_from_foreign_page(head.headers, settings.cors_origins):
            raise errors.origin_not_allowed()
    elif not media_types.is_json(content_type) and is_from_foreign_page(head.headers, settings.cors_origins):
        raise errors.unsupported_media_type()


def check_model(gateway: GatewayContext, tenant: TenantEntry, operation: Operation, headers: Asked) -> None:
    """Check the dialect if the path or a header names the model. Raises CallError.
    Requests of Ollama's API are checked when they are translated.
    """
    if operation.dialect == "ollama":
        return
    if name := operation.model or headers.model:
        check_dialect(operation, gateway.directory.names.resolve(tenant, name))


def check_dialect(operation: Operation, entry: ModelEntry) -> None:
    """Raise 400 unless the engine supports the API of this path, or the request is translated for it."""
    if operation.dialect not in entry.dialects and not can_translate(operation, entry):
        raise errors.unsupported_dialect()


def can_translate(operation: Operation, entry: ModelEntry) -> bool:
    """Return whether requests of this path are translated to an API of the engine."""
    target = CHAT if operation is MESSAGES or operation.dialect == "responses" else operation
    if entry.triton is not None:
        return target.engine_path in triton_requests.PATHS
    if target is not operation:
        return target.dialect in entry.dialects
    return operation.dialect in rerank.TRANSLATED and rerank.find_target(entry.dialects) is not None
