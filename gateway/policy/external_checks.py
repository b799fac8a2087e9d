"""External checks: the messages between a gateway and the server of a check. Pure.

A gateway posts a JSON object with the request or the answer, and the server returns `{"allow": true}` or
`{"allow": false, "reason": "..."}` with status 200. Everything else is a failed check.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Raw

from gateway.errors import invalid_request, translated_too_large
from gateway.http.body_buffers import Body, ChunkedBody
from gateway.http.response_reader import ResponseHead

CONTENT_BYTES_MAX = 4 << 20
"""Limit of a checked request or answer. A larger request is rejected, and a larger answer is an error."""
RESPONSE_BYTES_MAX = 64 << 10
"""Limit of the response of a check."""
_REASON_CHARS_MAX = 200
_TEMPORARY = (408, 429)
"""The client errors that a retry may cure."""


class CheckMessage(msgspec.Struct):
    """The body of the POST. `body` is JSON, a text if it is not JSON, or null for forms and binary answers."""

    check: str
    """`request` or `answer`."""
    model: str
    tenant: str
    request_id: str
    endpoint: str
    """The path of the engine's API, such as /v1/chat/completions."""
    body: Raw


class Verdict(msgspec.Struct):
    """The response of a check."""

    allow: bool
    reason: str = ""


class CheckFailedError(Exception):
    """A check has no usable response; the message is the reason, without addresses and content."""

    def __init__(self, message: str, *, should_retry: bool = False) -> None:
        super().__init__(message)
        self.should_retry = should_retry
        """Whether a retry may get another response."""


_encode = msgspec.json.Encoder().encode
_verdict = msgspec.json.Decoder(Verdict)
_raw = msgspec.json.Decoder(Raw)
_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F][0-9a-fA-F]{2}")


NO_BODY = Raw(b"null")
"""The body of a message for forms and binary answers."""


def read_request_body(body: Body) -> Raw:
    """Return the JSON body of a request for a check. Raises CallError 400; 413 if it is too large."""
    if len(body) > CONTENT_BYTES_MAX:
        raise translated_too_large(CONTENT_BYTES_MAX)
    content = b"".join(body.parts) if isinstance(body, ChunkedBody) else body
    if not isinstance(content, bytes) or not _is_json(
        content
    ):  # large bodies are not validated completely when they arrive
        raise invalid_request("the body is not valid JSON in UTF-8")
    return Raw(content)


def read_answer_body(head: ResponseHead, content: bytes) -> Raw:
    """Return the body of an answer for a check."""
    if b"content-encoding:" in head.fields.lower():
        return NO_BODY
    kind = head.content_type
    is_json = kind.startswith(b"application/json")
    if is_json and _is_json(content):
        return Raw(content)
    return Raw(_encode(content.decode("utf-8", "replace"))) if is_json or kind.startswith(b"text/") else NO_BODY


def _is_json(content: bytes) -> bool:
    try:
        if not content.isascii():
            content.decode()
        _raw.decode(_SURROGATE.sub(rb"\\ufffd", content))  # msgspec rejects lone surrogates, which JSON allows
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def render_check(message: CheckMessage) -> bytes:
    """Return the body of the POST."""
    return _encode(message)


def read_verdict(status: int, content: bytes) -> Verdict:
    """Read the response of a check. Raises CheckFailedError."""
    if status != 200:
        raise CheckFailedError(f"status {status}", should_retry=status >= 500 or status in _TEMPORARY)
    try:
        found = _verdict.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise CheckFailedError("the response is not an object with allow and reason") from None
    printable = "".join(one if one.isprintable() else " " for one in found.reason[:_REASON_CHARS_MAX])
    return Verdict(found.allow, printable.strip())
