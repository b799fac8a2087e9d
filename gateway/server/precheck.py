"""What a request's head alone decides, before its body is read: nobody's memory goes into what is refused anyway.

Owns the order of these refusals, which is that of a whole request (`gateway.server.exchange.admit_call`), but for one
thing: what is wrong with the bytes of a body is not seen when its head was refused before they came.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoscaler.contract import TenantEntry
from gateway import errors
from gateway.dispatch.memory_pressure import Pressure
from gateway.http.request_head import Head
from gateway.request import body_edit
from gateway.request.api_routes import Kind, Operation
from gateway.request.headers import Asked, get_call_headers

if TYPE_CHECKING:
    from gateway.gateway import Gateway

DROP_BYTES_MAX = 64 << 10
"""Of a body that was answered early: so much is read and dropped, and the connection lives on. With more it ends. A
path that takes no body takes so much of one, too."""


def check_head(front: Gateway, head: Head, operation: Operation | None, size: int) -> None:
    """Raises CallError where no body of so many bytes, or more, could make it a Call."""
    check_sender(front, head)
    if operation is None:
        raise errors.path_not_found()
    if operation.kind is Kind.NOT_ALLOWED:
        raise errors.method_not_allowed(operation.allow)
    if operation.kind is not Kind.INFER:
        check_body_size(operation, size)
        return
    tenant, wish = front.tenant(head), get_call_headers(head)
    if wish.error is not None:
        raise wish.error.with_traceback(None)
    check_model(front, tenant, operation, wish)
    if front.closing:
        raise errors.shutting_down()
    if front.dispatch.pressure is Pressure.NO_CALLS:
        raise errors.out_of_memory()  # bodies are what memory goes into


def check_sender(front: Gateway, head: Head) -> None:
    """Raises 421 or 403 for a request that a web page may have sent, where the host check applies. A remembered head is
    checked once, until the settings change.
    """
    check = front.host_check
    if check is None or head.passed is check:
        return
    if not check.has_allowed_host(head.host):
        raise errors.misdirected_request()
    if not check.has_allowed_origin(head.headers):
        raise errors.origin_not_allowed()
    head.passed = check


def check_body_size(operation: Operation, size: int) -> None:
    """Raises 413 for more of a body than a path reads that takes none."""
    if operation.kind is not Kind.INFER and size > DROP_BYTES_MAX:
        raise errors.too_large(DROP_BYTES_MAX)


def check_model(front: Gateway, tenant: TenantEntry, operation: Operation, wish: Asked) -> None:
    """Where path or header name the Model. Raises CallError."""
    body_edit.check_media(operation, wish.content_type)
    name = operation.model or wish.model
    if name and operation.dialect not in front.directory.resolve(tenant, name).dialects:
        raise errors.unsupported_dialect()
