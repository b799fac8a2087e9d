"""The meaning of a request's headers, and the head that is sent to the engine. Pure.

Reads deadline, priority, request id and key, and applies the allow-list of forwarded headers (interfaces, section 3).
The head sent to an engine is entirely serialized by the gateway: no key, no header named by `Connection`, no forged
gateway header, one length, one host. A key is read from headers only, never from the query.
"""

from __future__ import annotations

import math
import re
from hashlib import sha256
from typing import Final, NamedTuple

from gateway.errors import CallError, header_too_large, invalid_request
from gateway.http.request_head import Head, connection_names
from gateway.request import media_types
from gateway.request.api_routes import Operation

READ_TIMEOUT_SHARE = 0.9
"""Share of the client's read timeout to use, so that the client gets a response before its timeout (540 of 600 s)."""
PRIORITY_ABSOLUTE_MAX = 100
"""X-Priority beyond this is rejected: every priority is a row in reports."""
UPSTREAM_HEAD_BYTES_MAX: Final = 8 << 10
"""Engines accept this much; above it 431."""
_OUR_LINES_BYTES: Final = 1 << 10
"""The part of UPSTREAM_HEAD_BYTES_MAX that is reserved for the gateway's own lines, so that a head that is too large is
rejected before the request is queued.
"""

_ID = re.compile(rb"[A-Za-z0-9._-]{1,128}")
_PRIORITY = re.compile(rb"-?[0-9]{1,3}")
_SECONDS = re.compile(rb"[0-9]{1,7}(?:\.[0-9]{1,9})?")
_BEARER = re.compile(rb"bearer[ ]+([!-~]+)", re.IGNORECASE)
_TRACEPARENT = re.compile(rb"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_WORD = rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++|\"(?:[^\"\\]|\\.)*+\")"
_PREFERENCE = re.compile(
    rb"[ \t,]*+([!#$%&'*+\-.^_`|~0-9A-Za-z]++)(?:[ \t]*=[ \t]*(" + _WORD + rb"))?"
    rb"(?:[ \t]*;[ \t]*(?:" + _WORD + rb"(?:[ \t]*=[ \t]*" + _WORD + rb")?)?)*+[ \t]*(?:,|\Z)"
)
_WAIT = re.compile(rb'"?([0-9]{1,9})"?')
_FORWARDED = (
    b"accept", b"accept-language", b"user-agent",
    b"anthropic-version", b"anthropic-beta", b"openai-beta",
)  # fmt: skip
"""All client headers that are forwarded to an engine, in addition to the content type and a valid trace context (W3C).
"""
_TRACE = (b"traceparent", b"tracestate")


class Asked(NamedTuple):
    """The properties of a request that its head states."""

    keys_sha256: tuple[str, ...]
    """The different API keys as lower-case hex hashes: mostly none or one."""
    error: CallError | None
    """Error in the other headers; disclosed only if the key is valid."""
    model: str | None
    """`X-Model`."""
    wait_s: float
    """How long the client waits for the first byte; infinite if not given."""
    priority: int
    """`X-Priority`; 0 when absent."""
    content_type: bytes
    upwards: bytes
    """The header lines for an engine, each ending in CRLF."""


def get_call_headers(head: Head) -> Asked:
    """Return the parsed headers, cached in the head."""
    known = head.derived
    if isinstance(known, Asked):
        return known
    head.derived = derived = read_call_headers(head.headers)
    return derived


def read_call_headers(headers: dict[bytes, bytes]) -> Asked:
    """Parse the headers."""
    error, model, priority = None, None, 0
    try:
        model, priority = _model(headers), _priority(headers)
    except CallError as found:
        error = found.with_traceback(None)
    upwards = _upwards(headers)
    if len(upwards) > UPSTREAM_HEAD_BYTES_MAX - _OUR_LINES_BYTES:
        error = error or header_too_large()
    return Asked(
        keys_sha256=tuple([sha256(key).hexdigest() for key in api_keys(headers)]),
        error=error,
        model=model,
        wait_s=_wait_s(headers),
        priority=priority,
        content_type=headers.get(b"content-type", b""),
        upwards=upwards,
    )


def _wait_s(headers: dict[bytes, bytes]) -> float:
    """Return the lower of `Prefer: wait=N` (RFC 7240, 4.3) and the SDK's own read timeout.

    Both headers are hints: malformed values are ignored, as RFC 7240, 2 requires.
    """
    wait_s = math.inf
    timeout = headers.get(b"x-stainless-read-timeout")
    if timeout is not None and _SECONDS.fullmatch(timeout):
        wait_s = float(timeout) * READ_TIMEOUT_SHARE or math.inf
    prefer = headers.get(b"prefer")
    asked_s = None if prefer is None else _preferred_wait_s(prefer)
    return wait_s if asked_s is None else min(wait_s, asked_s)


def _preferred_wait_s(prefer: bytes) -> int | None:
    """Return the first `wait` of the list (RFC 7240, 2); None if there is none or it is malformed."""
    at = 0
    while (match := _PREFERENCE.match(prefer, at)) is not None:
        if match[1].lower() == b"wait":
            wait = _WAIT.fullmatch(match[2] or b"")
            return None if wait is None else int(wait[1])
        at = match.end()
    return None


def _priority(headers: dict[bytes, bytes]) -> int:
    value = headers.get(b"x-priority")
    if value is None:
        return 0
    if not _PRIORITY.fullmatch(value) or abs(int(value)) > PRIORITY_ABSOLUTE_MAX:
        raise invalid_request(
            f"header x-priority must be a whole number from -{PRIORITY_ABSOLUTE_MAX} to {PRIORITY_ABSOLUTE_MAX}"
        )
    return int(value)


def _model(headers: dict[bytes, bytes]) -> str | None:
    value = headers.get(b"x-model")
    try:
        return value.decode() if value else None
    except UnicodeDecodeError:
        raise invalid_request("header x-model is not UTF-8", param="model") from None


def api_keys(headers: dict[bytes, bytes]) -> list[bytes]:
    """Return the client's different keys from `Authorization: Bearer`, `x-api-key` and `api-key`.

    Other Authorization schemes are ignored. `gateway.request.auth` decides which key counts.
    """
    found: list[bytes] = []
    bearer = headers.get(b"authorization")
    if bearer is not None and (match := _BEARER.fullmatch(bearer)) is not None:
        found.append(match[1])
    for name in (b"x-api-key", b"api-key"):
        key = headers.get(name)
        if key and key not in found:
            found.append(key)
    return found


def _upwards(headers: dict[bytes, bytes]) -> bytes:
    """Return the header lines for an engine, without headers named by the client's Connection (RFC 9110, 7.6.1)."""
    named = connection_names(headers.get(b"connection", b""))
    traced = _TRACEPARENT.fullmatch(headers.get(b"traceparent", b"")) is not None
    names = _FORWARDED + (_TRACE if traced else ())
    lines = [b"%b: %b\r\n" % (name, headers[name]) for name in names if name in headers and name not in named]
    return b"content-type: %b\r\n" % media_types.for_engine(headers.get(b"content-type", b"")) + b"".join(lines)


def request_id(head: Head) -> str | None:
    """Return the client's own id if it is 1 to 128 of [A-Za-z0-9._-], else None."""
    value = head.headers.get(b"x-request-id")
    return value.decode("ascii") if value is not None and _ID.fullmatch(value) else None


def upstream_head(upwards: bytes, operation: Operation, authority: bytes, body_bytes: int, request_id: bytes) -> bytes:
    """Return the complete head for an engine (`authority`: its Host), including the final empty line."""
    head = b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n%b\r\n" % (
        operation.engine_path,
        authority,
        body_bytes,
        request_id,
        upwards,
    )
    if len(head) > UPSTREAM_HEAD_BYTES_MAX:
        raise header_too_large()
    return head
