"""The parts that translations of requests of other APIs to OpenAI's API share: result, limits and errors. Pure."""

from __future__ import annotations

import re

import msgspec

from gateway.errors import CallError, invalid_request
from gateway.request.api_routes import Operation
from gateway.request.body_members import BYTE_ORDER_MARK, replace_lone_surrogates

BODY_BYTES_MAX = 16 << 20
"""A larger body is rejected, because a body is translated in one step."""
MESSAGES_MAX, IMAGES_MAX, TOOLS_MAX, CALLS_MAX = 10_000, 256, 1_000, 1_000
"""Of one request: each item becomes several objects in memory."""
ITEMS_MAX = 100_000
"""Maximum number of commas outside of texts. It is checked before a body is decoded into objects."""
_BLOCK_BYTES = 64 << 10
_TEXT = re.compile(rb'"[^"]*(?:"|\Z)')

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors of msgspec for JSON that is invalid, of another form, not UTF-8, or nested too deeply."""


class TranslatedRequest:
    """A translated request. `target` is the operation of the engine, `body` the body for it."""

    __slots__ = ("body", "model", "stream", "target")

    def __init__(self, model: str, stream: bool, target: Operation, members: dict[str, object]) -> None:
        self.model = model
        """The model as the client names it; empty if the body names none."""
        self.stream = stream
        self.target = target
        self.body = msgspec.json.encode({"model": model, **members} if model else members)


def plain_json(body: bytes) -> bytes:
    """Return a body without a byte order mark, and with U+FFFD for escaped lone surrogates, which msgspec rejects."""
    return replace_lone_surrogates(body.removeprefix(BYTE_ORDER_MARK))


def check_items(body: bytes) -> None:
    """Raise CallError 400 for a body with more than ITEMS_MAX members and items."""
    if count_items(body) > ITEMS_MAX:
        raise invalid_request(f"the body has more than {ITEMS_MAX:,} members and items; send fewer messages or inputs")


def count_items(body: bytes) -> int:
    """Return the number of commas outside of texts, or of all commas if these are few: at least the number of objects
    that decoding creates, apart from the first of each list. Above ITEMS_MAX it does not count on.
    """
    if (commas := body.count(b",")) <= ITEMS_MAX:
        return commas
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    commas, is_text = 0, False
    for at in range(0, len(plain), _BLOCK_BYTES):
        block = plain[at : at + _BLOCK_BYTES]
        commas += _TEXT.sub(b"", b'"' + block if is_text else block).count(b",")
        is_text ^= block.count(b'"') % 2 == 1
        if commas > ITEMS_MAX:
            break
    return commas


def check_count(what: str, count: int, maximum: int) -> None:
    """Raise CallError 400 if a request has more of something than allowed."""
    if count > maximum:
        raise invalid_request(f"the request has {count:,} {what}; at most {maximum:,} are allowed", param=what)


def join_parts(parts: list[dict[str, object]]) -> str | list[dict[str, object]]:
    """Return the text of a single part, which more engines accept than a list; otherwise the parts."""
    if not parts:
        return ""
    text = parts[0].get("text")
    return text if len(parts) == 1 and isinstance(text, str) else parts


def unreadable_body(error: Exception) -> CallError:
    """Return the 400 for an exception of UNREADABLE, which the body of a client caused."""
    if isinstance(error, msgspec.ValidationError):
        return invalid_request(f"the body does not have the form of this endpoint: {error}")
    if isinstance(error, RecursionError):
        return invalid_request("the body is nested too deeply; nest fewer lists and objects")
    return invalid_request("the body is not valid JSON in UTF-8")
