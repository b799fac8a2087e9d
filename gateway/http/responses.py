"""Renders the gateway's own responses: heads, small bodies, errors. Pure.

Every head carries the request id and frames its body in one way. Engine headers are passed on only if they are in
`gateway.http.response_reader.PASSED`. HTTP/1.0 responses end with the close of the connection.
"""

from __future__ import annotations

from typing import Final

from gateway.errors import CallError, reason_phrase, render_error_body, render_error_headers
from gateway.http.response_reader import STREAM_FIELDS

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

_CLOSE: Final = b"connection: close\r\n"
_BODILESS: Final = (204, 304)


def _line(status: int) -> bytes:
    reason = reason_phrase(status)
    return f"HTTP/1.1 {status} {'OK' if reason == 'Error' and status < 400 else reason}\r\n".encode()


_LINES: Final = {status: _line(status) for status in range(200, 600)}


def render_head(
    status: int, fields: bytes, request_id: bytes, *, length: int | None, chunked: bool, close: bool, more: bytes = b""
) -> bytes:
    """Render a response head. `fields` and `more` are complete header lines.
    Without length and chunks the body ends with the close.
    """
    if close:
        more += _CLOSE
    line = _LINES[status]
    if length is not None and status not in _BODILESS:
        return b"%b%bcontent-length: %d\r\nx-request-id: %b\r\n%b\r\n" % (line, fields, length, request_id, more)
    if chunked and status not in _BODILESS:
        more += b"transfer-encoding: chunked\r\n"
    return b"%b%bx-request-id: %b\r\n%b\r\n" % (line, fields, request_id, more)


def render_response(
    status: int, body: bytes, request_id: bytes, *, close: bool, more: bytes = b"", kind: bytes = b"application/json"
) -> bytes:
    """Render a complete small response."""
    fields = b"content-type: %b\r\n" % kind
    return render_head(status, fields, request_id, length=len(body), chunked=False, close=close, more=more) + body


def without_body(response: bytes) -> bytes:
    """Return only the head of a complete response, as for HEAD (RFC 9110, 9.3.2)."""
    return response[: response.index(b"\r\n\r\n") + 4]


def no_content(request_id: bytes, *, close: bool, more: bytes) -> bytes:
    """Render a 204, which has neither body nor length."""
    return render_head(204, b"", request_id, length=None, chunked=False, close=close, more=more)


def render_error(failure: CallError, request_id: bytes, dialect: str, *, close: bool, more: bytes = b"") -> bytes:
    """Render a complete error response."""
    lines = [b"%b: %b\r\n" % line for line in render_error_headers(failure)]
    if failure.status == 401:
        lines.append(b"www-authenticate: Bearer\r\n")
    body = render_error_body(failure, dialect)
    return render_response(failure.status, body, request_id, close=close or failure.close, more=b"".join(lines) + more)


def early_head(request_id: bytes, *, chunked: bool, close: bool, more: bytes) -> bytes:
    """Render the head of a stream that is still queued."""
    fields = b"content-type: text/event-stream\r\n" + STREAM_FIELDS
    return render_head(200, fields, request_id, length=None, chunked=chunked, close=close, more=more)


def server_timing(queued_s: float, upstream_s: float, phases_ms: dict[str, float]) -> bytes:
    """Render W3C Server-Timing: the times known when the head is sent, in milliseconds.

    For a request that waited for the whole start, `ready` is the wait after the start.
    """
    if not phases_ms:
        queued, upstream = int(queued_s * 1e4), int(upstream_s * 1e4)  # tenths: formatting a float is slower
        return b"queue;dur=%d.%d, upstream;dur=%d.%d" % (queued // 10, queued % 10, upstream // 10, upstream % 10)
    rest_ms = queued_s * 1e3 - sum(phases_ms.values())
    phases = phases_ms | {"ready": rest_ms} if rest_ms >= 0.0 else phases_ms
    started = ", ".join(f"{name};dur={phase_ms:.1f}" for name, phase_ms in phases.items())
    return b"queue;dur=%.1f, %b, upstream;dur=%.1f" % (queued_s * 1e3, started.encode(), upstream_s * 1e3)
