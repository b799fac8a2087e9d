"""What a request's headers say about its Call, and the head that goes to the engine in their place. Pure.

Owns deadline, priority, request id, key and the allow-list upwards (interfaces, section 3). Promises: an engine sees
a head that is entirely our own serialisation: no key, no `Connection`-named header, no header of ours forged from
outside, one length, one host. A key is taken from headers only, never from the query.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

from gateway.dialects.operation import Operation
from gateway.errors import header_too_large, invalid_request
from gateway.head import Request, connection_names

READ_TIMEOUT_SHARE = 0.9
"""Of the client's own read timeout we use this much, so that it sees our answer and not its timeout (540 of 600 s)."""
PRIORITY_ABSOLUTE_MAX = 100
"""X-Priority beyond it is refused: every priority is a row in reports."""
UPSTREAM_HEAD_BYTES_MAX = 8 << 10
"""Engines take this much; above it 431."""

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
    b"content-type", b"accept", b"accept-language", b"user-agent", b"tracestate",
    b"anthropic-version", b"anthropic-beta", b"openai-beta",
)  # fmt: skip
"""All that travels to an engine from the client's head, beside what the arguments of `upstream_head` say."""


class Preferences(NamedTuple):
    """How long a Call may wait for its first byte. `wait_zero`: it must not queue at all."""

    deadline_s: float
    wait_zero: bool


def preferences(request: Request, now_s: float, wait_seconds_max: float) -> Preferences:
    """The soonest of the Model's limit, `Prefer: wait=N` (RFC 7240, 4.3) and the SDK's own read timeout.

    Both headers are hints: a value that cannot be read is ignored, as RFC 7240, 2 asks.
    """
    wait_s = wait_seconds_max
    headers = request.headers
    timeout = headers.get(b"x-stainless-read-timeout")
    if timeout is not None and _SECONDS.fullmatch(timeout):
        read_s = float(timeout) * READ_TIMEOUT_SHARE
        wait_s = min(wait_s, read_s) if read_s > 0 else wait_s
    prefer = headers.get(b"prefer")
    asked_s = None if prefer is None else _preferred_wait_s(prefer)
    if asked_s is not None:
        wait_s = min(wait_s, asked_s)
    return Preferences(now_s + wait_s, asked_s == 0)


def _preferred_wait_s(prefer: bytes) -> int | None:
    """The first `wait` of the list counts (RFC 7240, 2); None when there is none that can be read."""
    at = 0
    while (match := _PREFERENCE.match(prefer, at)) is not None:
        if match[1].lower() == b"wait":
            wait = _WAIT.fullmatch(match[2] or b"")
            return None if wait is None else int(wait[1])
        at = match.end()
    return None


def priority(request: Request, priority_max: int) -> int:
    """`X-Priority`, at most what the Tenant may ask for; 0 when absent. Raises 400 for what is not a small integer."""
    value = request.headers.get(b"x-priority")
    if value is None:
        return min(0, priority_max)
    if not _PRIORITY.fullmatch(value) or abs(int(value)) > PRIORITY_ABSOLUTE_MAX:
        raise invalid_request(
            f"header x-priority must be a whole number from -{PRIORITY_ABSOLUTE_MAX} to {PRIORITY_ABSOLUTE_MAX}"
        )
    return min(int(value), priority_max)


def request_id(request: Request, make: Callable[[], str]) -> str:
    """The client's own id when it is 1 to 128 of [A-Za-z0-9._-], else one that `make` gives."""
    value = request.headers.get(b"x-request-id")
    return value.decode("ascii") if value is not None and _ID.fullmatch(value) else make()


def header_model(request: Request) -> str | None:
    """`X-Model`, or None. Raises 400 when it is not UTF-8 text."""
    value = request.headers.get(b"x-model")
    try:
        return value.decode() if value else None
    except UnicodeDecodeError:
        raise invalid_request("header x-model is not UTF-8", param="model") from None


def traceparent(request: Request) -> bytes | None:
    """The client's trace context (W3C, version 00) when it is valid, else None."""
    value = request.headers.get(b"traceparent")
    return value if value is not None and _TRACEPARENT.fullmatch(value) else None


def api_key(request: Request) -> bytes | None:
    """The key the client sent: `Authorization: Bearer`, `x-api-key` or `api-key`. None without one.

    Raises 400 when two differ. Other schemes of Authorization are no key.
    """
    headers = request.headers
    found = None
    bearer = headers.get(b"authorization")
    if bearer is not None and (match := _BEARER.fullmatch(bearer)) is not None:
        found = match[1]
    for name in (b"x-api-key", b"api-key"):
        key = headers.get(name)
        if key:
            if found is not None and key != found:
                raise invalid_request("two different API keys were sent; send one")
            found = key
    return found


def upstream_head(
    request: Request,
    operation: Operation,
    address: str,
    body_bytes: int,
    request_id: str,
    *,
    traceparent: bytes | None = None,
) -> bytes:
    """The whole head for the engine at `address` (host:port), its closing empty line included. The body follows as it
    is.
    """
    headers = request.headers
    dropped: list[bytes] | tuple[()] = ()
    connection = headers.get(b"connection")
    if connection is not None and connection not in (b"keep-alive", b"close"):
        dropped = connection_names(connection)
    lines = [
        b"POST %b HTTP/1.1\r\nhost: %b\r\ncontent-length: %d\r\nx-request-id: %b"
        % (operation.engine_path, address.encode("ascii"), body_bytes, request_id.encode("ascii"))
    ]
    lines += [name + b": " + headers[name] for name in _FORWARDED if name in headers and name not in dropped]
    if traceparent is not None:
        lines.append(b"traceparent: " + traceparent)
    head = b"\r\n".join(lines) + b"\r\n\r\n"
    if len(head) > UPSTREAM_HEAD_BYTES_MAX:
        raise header_too_large()
    return head
