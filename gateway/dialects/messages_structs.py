"""Structs of requests of Anthropic's Messages API.

Unknown members inside of the listed ones are ignored. No struct has an enumeration, whose errors would contain the
client's value.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class Source(msgspec.Struct):
    """Where an image is."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class Block(msgspec.Struct):
    """One block of content; `type` determines which members it has."""

    type: str
    text: str | None = None
    source: Source | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Raw = Raw()
    tool_use_id: str | None = None
    content: Raw = Raw()
    """The content of a result of a tool: text, or blocks."""


class Turn(msgspec.Struct):
    """One message."""

    role: str
    content: str | list[Block]


class Tool(msgspec.Struct):
    """A tool. Those with a type other than `custom` are run by Anthropic, or defined there."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: Raw = Raw()
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    """Which tools the model may or must use."""

    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct):
    """Whether the model thinks before it answers."""

    type: str


class Metadata(msgspec.Struct):
    """Properties of the user."""

    user_id: str | None = None


class OutputFormat(msgspec.Struct):
    """A JSON schema of the answer."""

    type: str
    schema: Raw = Raw()


class OutputConfig(msgspec.Struct):
    """The form of the answer."""

    effort: str | None = None
    format: OutputFormat | None = None


class MessagesRequest(msgspec.Struct):
    """The body of /v1/messages."""

    messages: list[Turn]
    max_tokens: int
    model: str | None = None
    system: str | list[Block] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    metadata: Metadata | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """An older name of `output_config.format`."""
