"""Structs of requests of OpenAI's Responses API.

Unknown members inside of the listed ones are ignored. No struct has an enumeration, whose errors would contain the
client's value.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class Part(msgspec.Struct):
    """A part of a message, of a result of a function, or of reasoning; `type` determines which members it has."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None


class Item(msgspec.Struct):
    """One item of the input; `type` determines which members it has. A message may omit its type."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    """The content of a message, or the text of reasoning."""
    summary: list[Part] | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: str | list[Part] | None = None


class FunctionTool(msgspec.Struct):
    """A tool. Those with a type other than `function` are run by OpenAI, or have no counterpart in chats."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: Raw = Raw()
    strict: bool | None = None


class ToolName(msgspec.Struct):
    """A tool that is allowed."""

    type: str
    name: str | None = None


class FunctionChoice(msgspec.Struct):
    """Which tools the model may or must use, other than by a word."""

    type: str
    name: str | None = None
    mode: str | None = None
    tools: list[ToolName] | None = None


class TextFormat(msgspec.Struct):
    """The form of the answer."""

    type: str
    name: str | None = None
    schema: Raw = Raw()
    strict: bool | None = None
    description: str | None = None


class TextConfig(msgspec.Struct):
    """How the answer is written."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct):
    """How much the model thinks before it answers."""

    effort: str | None = None


class ResponsesRequest(msgspec.Struct):
    """The body of /v1/responses."""

    input: str | list[Item]
    model: str | None = None
    instructions: str | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: str | FunctionChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None
