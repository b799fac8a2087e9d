"""The bytes that we ourselves say to a client: heads, whole small answers, errors. Pure.

Owns our response heads. Promises: every head carries the request id and frames its body in one way; what an engine said
goes in only through `walker.PASSED`; HTTP/1.0 is answered close-delimited.
"""

from __future__ import annotations

from gateway import errors
from gateway.errors import CallError

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

_CLOSE = b"connection: close\r\n"
_BODILESS = (204, 304)
PREFLIGHT = (
    b"access-control-allow-methods: GET, POST, OPTIONS\r\n"
    b"access-control-allow-headers: authorization, content-type, x-api-key, api-key, x-request-id, x-model, x-priority,"
    b" prefer, anthropic-version, anthropic-beta, openai-beta\r\naccess-control-max-age: 600\r\n"
)
"""What answers a preflight from an allowed origin, beside what every answer to it has."""


def _line(status: int) -> bytes:
    reason = errors.reason_phrase(status)
    return f"HTTP/1.1 {status} {'OK' if reason == 'Error' and status < 400 else reason}\r\n".encode()


_LINES = {status: _line(status) for status in range(200, 600)}


def render_head(
    status: int, fields: bytes, request_id: bytes, *, length: int | None, chunked: bool, close: bool, more: bytes = b""
) -> bytes:
    """A response head. `fields` and `more` are whole header lines; without length and chunks the end is the close."""
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
    """A whole small answer of our own."""
    fields = b"content-type: %b\r\n" % kind
    return render_head(status, fields, request_id, length=len(body), chunked=False, close=close, more=more) + body


def no_content(request_id: bytes, *, close: bool, more: bytes) -> bytes:
    """204, which has neither body nor length."""
    return render_head(204, b"", request_id, length=None, chunked=False, close=close, more=more)


def render_error(failure: CallError, request_id: bytes, dialect: str, *, close: bool, more: bytes = b"") -> bytes:
    """A whole error answer."""
    lines = [b"%b: %b\r\n" % line for line in errors.render_error_headers(failure)]
    if failure.status == 401:
        lines.append(b"www-authenticate: Bearer\r\n")
    body = errors.render_error_body(failure, dialect)
    return render_response(failure.status, body, request_id, close=close or failure.close, more=b"".join(lines) + more)


def early_head(request_id: bytes, *, chunked: bool, close: bool, more: bytes) -> bytes:
    """The head of a stream that is still parked."""
    fields = b"content-type: text/event-stream\r\ncache-control: no-cache\r\n"
    return render_head(200, fields, request_id, length=None, chunked=chunked, close=close, more=more)


def server_timing(queued_s: float, upstream_s: float, phases_ms: dict[str, float]) -> bytes:
    """W3C Server-Timing: what is known when the head is sent, in milliseconds.

    `ready` is told to a Call that waited for the whole start: what it waited after that.
    """
    if not phases_ms:
        queued, upstream = int(queued_s * 1e4), int(upstream_s * 1e4)  # tenths, since to print a float takes longer
        return b"queue;dur=%d.%d, upstream;dur=%d.%d" % (queued // 10, queued % 10, upstream // 10, upstream % 10)
    rest_ms = queued_s * 1e3 - sum(phases_ms.values())
    told = phases_ms | {"ready": rest_ms} if rest_ms >= 0.0 else phases_ms
    started = ", ".join(f"{name};dur={phase_ms:.1f}" for name, phase_ms in told.items())
    return b"queue;dur=%.1f, %b, upstream;dur=%.1f" % (queued_s * 1e3, started.encode(), upstream_s * 1e3)
