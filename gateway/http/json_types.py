"""The JSON that a gateway reads and writes, as msgspec takes it: parts of bodies, chunks and errors; events of Calls.

Owns their Structs and nothing else, for a module with Structs is never compiled (pyproject.toml, `compiled`): msgspec
makes them of the class body as Python runs it.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class LargeMembers(msgspec.Struct):
    """The members of a body that may hold much JSON of their own."""

    messages: Raw = Raw()
    input: Raw = Raw()
    prompt: Raw = Raw()
    tools: Raw = Raw()
    documents: Raw = Raw()
    logit_bias: Raw = Raw()


class Chunk(msgspec.Struct):
    """What matters of one chat or completion chunk."""

    choices: list[Raw] | None = None
    usage: dict[str, Raw] | None = None


class ErrorDocument(msgspec.Struct):
    """An engine's error document."""

    error: dict[str, object]


class Ended(msgspec.Struct, frozen=True, tag_field="event", tag="call"):
    """The event of one Call. Times are whole microseconds; all of it is told as one JSON object on a line."""

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
    """The event of a request that did not become a Call."""

    id: str
    code: str
