"""The bytes that an engine receives of an accepted request, assembled as the edge and the exchange do it."""

from __future__ import annotations

import json

from gateway.errors import CallError
from gateway.http.body_buffers import Body
from gateway.http.request_head import Request
from gateway.request import body_members
from gateway.request.api_routes import Kind, find_operation
from gateway.request.headers import get_call_headers, request_id, upstream_head

ENGINE = "127.0.0.1:9000"
SERVED = "served-m"


def in_one(body: Body) -> bytes:
    """A body as one piece, whatever its size."""
    return body if isinstance(body, bytes) else b"".join(body.parts)


def forwarded(request: Request) -> tuple[bytes, bytes] | None:
    """Head and body for the engine; None if nothing is forwarded.

    A body that the rewriter rejects is forwarded unchanged here, which the gateway never does: framing must be correct
    for any bytes.
    """
    operation = find_operation(request.head.method, request.head.path)
    if operation is None or operation.kind is not Kind.INFER:
        return None
    try:
        wish = get_call_headers(request.head)
    except CallError:
        return None
    try:
        peek = body_members.read_body(operation, request.body, wish.content_type, wish.model)
        edited = body_members.edit_body(operation, peek, SERVED)
    except CallError:
        edited = request.body
    body = in_one(edited)
    id_bytes = (request_id(request.head) or "id-1").encode()
    try:
        return upstream_head(wish.upwards, operation, ENGINE.encode(), len(body), id_bytes), body
    except CallError:
        return None


def json_members(body: bytes) -> list[tuple[str, object]]:
    """The top-level members as the standard library reads them, repeated ones included."""
    found: list[tuple[str, object]] = []

    def keep(members: list[tuple[str, object]]) -> dict[str, object]:
        found[:] = members
        return dict(members)

    json.loads(body, object_pairs_hook=keep)
    return found
