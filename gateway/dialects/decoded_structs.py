"""Structs of Ollama's, rerank and score requests, and of the responses that are converted for clients of other APIs.

They have a module of their own, because modules with Structs are never compiled (pyproject.toml, `compiled`). Unknown
members are ignored. No struct has an enumeration, whose errors would contain the client's value.
"""

from __future__ import annotations

import msgspec
from msgspec import Raw


class Options(msgspec.Struct):
    """The parameters of the sampler that have a counterpart in engines."""

    num_predict: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | str | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repeat_penalty: float | None = None


class CalledFunction(msgspec.Struct):
    """A function that the model called; `arguments` is an object."""

    name: str = ""
    arguments: Raw = Raw()


class ToolCall(msgspec.Struct):
    """A tool call in a message."""

    function: CalledFunction
    id: str | None = None


class Message(msgspec.Struct):
    """One message of a chat."""

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class ChatRequest(msgspec.Struct):
    """The body of /api/chat."""

    model: str | None = None
    messages: list[Message] | None = None
    stream: bool | None = None
    format: Raw = Raw()
    options: Options | None = None
    tools: list[Raw] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class GenerateRequest(msgspec.Struct):
    """The body of /api/generate."""

    model: str | None = None
    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    stream: bool | None = None
    raw: bool | None = None
    format: Raw = Raw()
    images: list[str] | None = None
    options: Options | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class EmbedRequest(msgspec.Struct):
    """The body of /api/embed."""

    model: str | None = None
    input: list[str] | str | None = None
    dimensions: int | None = None
    keep_alive: float | str | None = None


class EmbeddingsRequest(msgspec.Struct):
    """The body of /api/embeddings, which /api/embed replaced."""

    model: str | None = None
    prompt: str | None = None
    keep_alive: float | str | None = None


class ShowRequest(msgspec.Struct):
    """The body of /api/show; older clients send `name`."""

    model: str | None = None
    name: str | None = None


class FunctionDelta(msgspec.Struct):
    """A part of a function call; most engines send `arguments` as a string, in pieces."""

    name: str | None = None
    arguments: Raw = Raw()


class ToolDelta(msgspec.Struct):
    """A part of a tool call, or a whole one."""

    index: int | None = None
    id: str | None = None
    function: FunctionDelta | None = None


class Delta(msgspec.Struct):
    """A part of the assistant's message, or the whole one. Engines call the thinking by one of two names."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolDelta] | None = None


class Logprobs(msgspec.Struct):
    """The log probabilities of a chat; their entries have the same form in Ollama's API."""

    content: list[Raw] | None = None


class Choice(msgspec.Struct):
    """One choice of a chat or a completion."""

    delta: Delta | None = None
    message: Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: Logprobs | None = None
    index: int | None = None
    stop_reason: Raw = Raw()
    """The stop sequence that ended the answer (vLLM), or the number of a token."""
    matched_stop: Raw = Raw()
    """The same of SGLang."""


class PromptDetails(msgspec.Struct):
    """The part of the prompt that was in the engine's cache."""

    cached_tokens: int | None = None


class CompletionDetails(msgspec.Struct):
    """The part of the answer that was reasoning."""

    reasoning_tokens: int | None = None


class Usage(msgspec.Struct):
    """The counted tokens."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None
    completion_tokens_details: CompletionDetails | None = None


class Completion(msgspec.Struct):
    """A chunk of a stream, or a whole response."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Raw = Raw()


class EmbeddingRow(msgspec.Struct):
    """One vector. Its numbers are not decoded."""

    embedding: Raw
    index: int = 0


class EmbeddingList(msgspec.Struct):
    """The response of /v1/embeddings."""

    data: list[EmbeddingRow]
    usage: Usage | None = None


class ErrorMessage(msgspec.Struct):
    """An error with its message."""

    message: str = ""


class ErrorReply(msgspec.Struct):
    """An engine's error document, in the forms of OpenAI, older vLLM and FastAPI."""

    error: ErrorMessage | str | None = None
    message: str | None = None
    detail: Raw = Raw()


class RerankText(msgspec.Struct):
    """A document with a text (Jina, Cohere)."""

    text: str


class RerankRequest(msgspec.Struct):
    """The body of /v1/rerank and /v2/rerank."""

    query: str
    documents: list[str | RerankText]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None


class ScoreRequest(msgspec.Struct):
    """The body of /v1/score. vLLM knows several names of the two members."""

    model: str | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None
    items: str | list[str] | None = None
    data_1: str | list[str] | None = None
    data_2: str | list[str] | None = None


class Rank(msgspec.Struct):
    """The score of one document. Engines call it by one of two names."""

    index: int
    relevance_score: float | None = None
    score: float | None = None


class RerankUsage(msgspec.Struct):
    """The counted tokens."""

    prompt_tokens: int | None = None
    total_tokens: int | None = None


class RerankReply(msgspec.Struct):
    """The response of an engine with the form of Jina."""

    results: list[Rank]
    usage: RerankUsage | None = None
    error: Raw = Raw()
