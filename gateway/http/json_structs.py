"""Structs of the JSON that a gateway reads and writes: parts of bodies, chunks and errors; request events.

They have a module of their own, because modules with Structs are never compiled (pyproject.toml, `compiled`): msgspec
needs a class body that Python executes.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class LargeMembers(msgspec.Struct):
    """Members of a body that may contain much nested JSON."""

    messages: Raw = Raw()
    input: Raw = Raw()
    prompt: Raw = Raw()
    tools: Raw = Raw()
    documents: Raw = Raw()
    logit_bias: Raw = Raw()


class Chunk(msgspec.Struct):
    """The relevant fields of a chat or completion chunk."""

    choices: list[Raw] | None = None
    usage: dict[str, Raw] | None = None


class ErrorDocument(msgspec.Struct):
    """An engine's error document."""

    error: dict[str, object]


class Ended(msgspec.Struct, frozen=True, tag_field="event", tag="call"):
    """The event of one request. Times are in whole microseconds; written as one JSON object per line."""

    id: str
    model: str
    tenant: str
    outcome: str
    code: str
    stream: bool
    cold: bool
    moves: int
    replica: str | None
    queued_us: int
    start_us: int
    first_byte_us: int
    total_us: int
    tokens_in: int
    tokens_out: int


class TurnedAway(msgspec.Struct, frozen=True, tag_field="event", tag="turned_away"):
    """The event of a request that was rejected before admission."""

    id: str
    code: str
