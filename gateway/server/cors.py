"""The CORS headers of all responses, and the answer to a preflight request (Fetch Standard, 3.2). Pure."""

from __future__ import annotations

import re
from collections.abc import Collection

from gateway.http.request_head import TOKEN, Head

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
