"""Structs of the OpenAI requests that are translated for Triton, and of Triton's responses.

They have a module of their own, because modules with Structs are never compiled (pyproject.toml, `compiled`). Unknown
members are ignored.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""A number for an input of the type INT32. Triton cuts off the upper bits of larger ones."""
Seed = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class Sampling(msgspec.Struct):
    """The members that chats and completions share."""

    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    min_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    min_p: float | None = None
    seed: Seed | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: list[str] | str | None = None
    stream: bool | None = None


class ContentPart(msgspec.Struct):
    """A part of the content of a message."""

    type: str
    text: str | None = None


class ChatMessage(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: list[ContentPart] | str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class ChatBody(Sampling, kw_only=True):
    """The body of /v1/chat/completions."""

    messages: list[ChatMessage]


class CompletionBody(Sampling, kw_only=True):
    """The body of /v1/completions."""

    prompt: list[str] | str
    echo: bool | None = None


class EmbeddingBody(msgspec.Struct):
    """The body of /v1/embeddings."""

    input: list[str] | str
    encoding_format: str | None = None
    stream: bool | None = None


class GenerateReply(msgspec.Struct):
    """A response, or an event, of `generate`. A tensor with one element is its value, another one a list."""

    text_output: list[str] | str | None = None
    finish_reason: list[str] | str | None = None
    num_input_tokens: list[int] | int | None = None
    num_output_tokens: list[int] | int | None = None
    error: str | None = None


class OutputTensor(msgspec.Struct):
    """A tensor of a response of `infer`. `data` has its elements in row-major order."""

    datatype: str
    shape: list[int]
    data: msgspec.Raw = msgspec.Raw()


class InferReply(msgspec.Struct):
    """A response of `infer`."""

    outputs: list[OutputTensor] | None = None
    error: str | None = None
