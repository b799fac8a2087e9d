"""Converts responses of OpenAI's API to those of Ollama's API: events to lines, documents to documents. Pure.

A stream is converted event by event. The last line, with `done`, is written when the engine's stream has ended, because
it contains the token counts, which engines send last. Tool calls arrive in pieces and are written whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.chat_responses import (
    EVENT_BYTES_MAX,
    ChatConverter,
    error_text,
    is_error,
    read_arguments,
    read_error,
)
from gateway.dialects.decoded_structs import Choice, Completion, Delta, EmbeddingList, EmbeddingRow
from gateway.dialects.ollama_requests import Endpoint, Translated
from gateway.dialects.translated_request import ITEMS_MAX, UNREADABLE

_DONE_REASONS: Final = {"length": "length"}

_embedding_list = msgspec.json.Decoder(EmbeddingList)
_object = msgspec.json.Decoder(dict[str, Raw])
_numbers = msgspec.json.Decoder(list[float])

Line = dict[str, object]


class ToolPart:
    """A tool call so far."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = ""
        self.name = ""
        self.arguments = ""


class ReplyConverter(ChatConverter):
    """Converts one response. `timestamp` returns the current time in RFC 3339, `durations` the members of the last line
    in nanoseconds.
    """

    __slots__ = ("_arguments_size", "_dimensions", "_durations", "_endpoint", "_model", "_timestamp", "_tools")

    def __init__(
        self, request: Translated, model: str, timestamp: Callable[[], str], durations: Callable[[], dict[str, int]]
    ) -> None:
        super().__init__(stream=request.stream)
        self._endpoint: Endpoint = request.endpoint
        self._dimensions = request.dimensions
        self._model = request.model or model
        self._timestamp = timestamp
        self._durations = durations
        self._tools: dict[int, ToolPart] = {}
        self._arguments_size = 0

    # --- streams -----------------------------------------------------------------------------------------------

    def _choice(self, choice: Choice) -> bytes:
        delta = choice.delta or choice.message
        self._finish_reason = choice.finish_reason or self._finish_reason
        if delta is not None and delta.tool_calls:
            self._add_tools(delta)
            if self.broken:
                return b""
        text = choice.text if delta is None else delta.content
        thinking = None if delta is None else delta.reasoning_content or delta.reasoning
        out = b""
        if text or thinking:
            out = _encode_line(self._line(text or "", thinking, choice, done=False))
        return out + self._tool_line() if choice.finish_reason and self._tools else out

    def _tool_line(self) -> bytes:
        calls = self._tool_calls()
        if calls is None:
            self.broken = True
            return b""
        if not calls:
            return b""
        line = self._line("", None, None, done=False)
        message = line["message"] if self._endpoint == "chat" else line
        if isinstance(message, dict):
            message["tool_calls"] = calls
        return _encode_line(line)

    def _error(self, error: Raw) -> bytes:
        return _encode_line({"error": read_error(error)})

    def _end(self) -> bytes:
        """Return the tool calls, if a finish reason is missing, and the line with `done`."""
        out = self._tool_line() if self._tools else b""
        if self.broken:
            return b""
        self.ended = True
        return out + _encode_line(self._last())

    def _add_tools(self, delta: Delta) -> None:
        for position, part in enumerate(delta.tool_calls or ()):
            index = position if part.index is None else part.index
            tool = self._tools.setdefault(index, ToolPart())
            tool.id = part.id or tool.id
            function = part.function
            arguments = b"" if function is None else bytes(function.arguments)
            self._arguments_size += len(arguments) + len(tool.id or "") + 64
            if self._arguments_size > EVENT_BYTES_MAX:
                self.broken = True
                return
            if function is None:
                continue
            tool.name = function.name or tool.name
            text = read_arguments(function.arguments)
            tool.arguments = text if arguments.startswith(b"{") else tool.arguments + text

    def _tool_calls(self) -> list[Line] | None:
        """Return the collected tool calls, with arguments as objects; None if they are no objects.

        If the response ended at its token limit, the last call may be incomplete and is left out.
        """
        calls = list[Line]()
        for index, tool in sorted(self._tools.items()):
            try:
                _object.decode((tool.arguments or "{}").encode())
            except UNREADABLE:
                if self._finish_reason != "length":
                    return None
                continue
            function: Line = {"index": index, "name": tool.name, "arguments": Raw((tool.arguments or "{}").encode())}
            calls.append({"id": tool.id, "function": function} if tool.id else {"function": function})
        self._tools = {}
        return calls

    # --- lines -----------------------------------------------------------------------------------------------

    def _line(self, text: str, thinking: str | None, choice: Choice | None, *, done: bool) -> Line:
        line: Line = {"model": self._model, "created_at": self._timestamp()}
        if self._endpoint == "chat":
            message: Line = {"role": "assistant", "content": text}
            line["message"] = message
        else:
            message = line
            line["response"] = text
        if thinking:
            message["thinking"] = thinking
        line["done"] = done
        if choice is not None and choice.logprobs is not None and choice.logprobs.content:
            line["logprobs"] = choice.logprobs.content
        return line

    def _last(self, text: str = "", thinking: str | None = None, choice: Choice | None = None) -> Line:
        line = self._line(text, thinking, choice, done=True)
        line["done_reason"] = _DONE_REASONS.get(self._finish_reason, "stop")
        return line | self._counts()

    def _counts(self) -> Line:
        counts: Line = {**self._durations()}
        usage = self._usage
        if usage is not None:
            counts["prompt_eval_count"] = usage.prompt_tokens or 0
            counts["eval_count"] = usage.completion_tokens or 0
        return counts

    # --- documents -----------------------------------------------------------------------------------------------

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:
        """Return the document for an engine's whole response, as a line if a stream was requested; empty and `broken`
        if it is unusable.
        """
        del late  # an error is a line like others
        document = msgspec.json.encode({"error": error_text(body)}) if status >= 400 else self._document(body)
        return document + b"\n" if self.stream else document

    def _document(self, body: bytes) -> bytes:
        try:
            if self._endpoint in {"embed", "embeddings"}:
                self.broken = body.count(b"{") > ITEMS_MAX
                return b"" if self.broken else msgspec.json.encode(self._embeddings(_embedding_list.decode(body)))
            found = self._decode_document(body)
            if found is None:
                return b""
            if is_error(found.error):
                return msgspec.json.encode({"error": read_error(found.error)})
            return self._whole(found, found.choices[0]) if found.choices else b""
        except UNREADABLE:  # vectors, or the arguments of a tool call
            self.broken = True
            return b""

    def _whole(self, found: Completion, choice: Choice) -> bytes:
        self._usage = found.usage
        self._finish_reason = choice.finish_reason or ""
        message = choice.message
        if message is None:
            return msgspec.json.encode(self._last(choice.text or ""))
        self._add_tools(message)
        calls = None if self.broken else self._tool_calls()
        if calls is None:
            self.broken = True
            return b""
        line = self._last(message.content or "", message.reasoning_content or message.reasoning, choice)
        target = line["message"] if self._endpoint == "chat" else line
        if calls and isinstance(target, dict):
            target["tool_calls"] = calls
        return msgspec.json.encode(line)

    def _embeddings(self, found: EmbeddingList) -> Line:
        vectors = [row.embedding for row in sorted(found.data, key=_index_of)]
        if self._endpoint == "embeddings":
            return {"embedding": vectors[0] if vectors else []}
        if self._dimensions:
            vectors = [_shorten(vector, self._dimensions) for vector in vectors]
        self._usage = found.usage
        counts = self._counts()
        kept = [name for name in ("total_duration", "load_duration", "prompt_eval_count") if name in counts]
        return {"model": self._model, "embeddings": vectors, **{name: counts[name] for name in kept}}

    def loaded(self, action: str) -> bytes:
        """Return the document for a request that only starts or stops the model."""
        if self._endpoint == "embeddings":
            return b'{"embedding":[]}'
        if self._endpoint == "embed":
            return msgspec.json.encode({"model": self._model, "embeddings": []})
        line = self._line("", None, None, done=True)
        line["done_reason"] = action
        return msgspec.json.encode(line)


def _shorten(vector: Raw, dimensions: int) -> Raw:
    """Return the first numbers of a vector, normalized again as in Ollama: llama.cpp ignores `dimensions`. A vector of
    more than ITEMS_MAX numbers stays as it is. Raises DecodeError.
    """
    if not dimensions <= bytes(vector).count(b",") < ITEMS_MAX:
        return vector
    kept = _numbers.decode(vector)[:dimensions]
    norm = math.hypot(*kept) or 1.0
    return Raw(msgspec.json.encode([number / norm for number in kept]))


def _index_of(row: EmbeddingRow) -> int:
    return row.index


def _encode_line(line: Line) -> bytes:
    return msgspec.json.encode(line) + b"\n"
