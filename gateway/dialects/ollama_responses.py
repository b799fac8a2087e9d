"""Converts responses of OpenAI's API to those of Ollama's API: events to lines, documents to documents. Pure.

A stream is converted event by event. The last line, with `done`, is written when the engine's stream has ended, because
it contains the token counts, which engines send last. Tool calls arrive in pieces and are written whole.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.decoded_structs import (
    Choice,
    Completion,
    Delta,
    EmbeddingList,
    EmbeddingRow,
    ErrorMessage,
    ErrorReply,
    Usage,
)
from gateway.dialects.ollama_requests import ITEMS_MAX, Endpoint, Translated, count_items

EVENT_BYTES_MAX: Final = 1 << 20
"""Limit of one event, and of the arguments of all tool calls of a response. Some engines send these in one event."""
_EVENT_END = re.compile(rb"(?:\n|\r\n?+){2}")
_DONE_REASONS: Final = {"length": "length"}
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_REJECTED: Final = "the engine rejected the request; read the log of the engine"

_completion = msgspec.json.Decoder(Completion)
_embedding_list = msgspec.json.Decoder(EmbeddingList)
_error_reply = msgspec.json.Decoder(ErrorReply)
_error_value = msgspec.json.Decoder(ErrorMessage | str)
_text = msgspec.json.Decoder(str)
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


class ReplyConverter:
    """Converts one response. `timestamp` returns the current time in RFC 3339, `durations` the members of the last line
    in nanoseconds. After `broken`, the response is unusable.
    """

    __slots__ = (
        "_arguments_size", "_dimensions", "_durations", "_endpoint", "_finish_reason", "_held", "_model", "_timestamp",
        "_tools", "_usage", "broken", "ended", "stream",
    )  # fmt: skip

    def __init__(
        self, request: Translated, model: str, timestamp: Callable[[], str], durations: Callable[[], dict[str, int]]
    ) -> None:
        self._endpoint: Endpoint = request.endpoint
        self._dimensions = request.dimensions
        self._model = request.model or model
        self._timestamp = timestamp
        self._durations = durations
        self._held = bytearray()
        """The beginning of an event."""
        self._finish_reason = ""
        self._usage: Usage | None = None
        self._tools: dict[int, ToolPart] = {}
        self._arguments_size = 0
        self.stream = request.stream
        self.broken = False
        """Whether the engine sent something that is not an OpenAI response."""
        self.ended = False
        """Whether the last line was written."""

    # --- streams -----------------------------------------------------------------------------------------------

    def feed(self, content: bytes) -> bytes:
        """Take the next bytes of an event stream and return lines."""
        if self._is_over():
            return b""
        held = self._held
        seen = len(held)
        held += content
        out, begin = list[bytes](), 0
        for match in _EVENT_END.finditer(held, max(0, seen - 3)):
            out.append(self._event(bytes(held[begin : match.start()])))
            begin = match.end()
            if self._is_over():
                self._held = bytearray()
                return b"".join(out)
        self._held = held[begin:] if begin else held
        self.broken = len(self._held) > EVENT_BYTES_MAX
        return b"".join(out)

    def finish(self) -> bytes:
        """The engine's stream has ended properly: return the remaining lines."""
        if self._is_over():
            return b""
        held, self._held = bytes(self._held), bytearray()
        out = self._event(held) if held.strip() else b""
        return out if self._is_over() else out + self._last_line()

    def _is_over(self) -> bool:
        return self.ended or self.broken

    def _event(self, event: bytes) -> bytes:
        if len(event) > EVENT_BYTES_MAX:
            self.broken = True
            return b""
        lines = event.splitlines()
        payload = b"\n".join([line[5:].removeprefix(b" ") for line in lines if line.startswith(b"data:")])
        if not payload:
            return b""  # a comment
        if payload == b"[DONE]":
            return self._last_line()
        try:
            chunk = _completion.decode(payload)
        except _UNREADABLE:
            self.broken = True
            return b""
        if _is_error(chunk.error):
            self.ended = True
            return _encode_line({"error": _error_text(chunk.error)})
        if chunk.usage is not None:
            self._usage = chunk.usage
        try:
            return self._choice(chunk.choices[0]) if chunk.choices else b""
        except _UNREADABLE:  # the arguments of a tool call
            self.broken = True
            return b""

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

    def _last_line(self) -> bytes:
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
            if arguments.startswith(b'"'):
                tool.arguments += _text.decode(arguments)
            elif arguments.startswith(b"{"):
                tool.arguments = arguments.decode()

    def _tool_calls(self) -> list[Line] | None:
        """Return the collected tool calls, with arguments as objects; None if they are no objects.

        If the response ended at its token limit, the last call may be incomplete and is left out.
        """
        calls = list[Line]()
        for index, tool in sorted(self._tools.items()):
            try:
                _object.decode((tool.arguments or "{}").encode())
            except _UNREADABLE:
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

    def convert(self, status: int, body: bytes) -> bytes:
        """Return the document for an engine's whole response; empty and `broken` if the response is unusable."""
        if status >= 400:
            return msgspec.json.encode({"error": error_text(body)})
        is_list = self._endpoint in {"embed", "embeddings"}
        if (body.count(b"{") if is_list else count_items(body)) > ITEMS_MAX:
            self.broken = True
            return b""
        try:
            if is_list:
                return msgspec.json.encode(self._embeddings(_embedding_list.decode(body)))
            found = _completion.decode(body)
        except _UNREADABLE:
            self.broken = True
            return b""
        if _is_error(found.error):
            return msgspec.json.encode({"error": _error_text(found.error)})
        if not found.choices:
            self.broken = True
            return b""
        try:
            return self._whole(found, found.choices[0])
        except _UNREADABLE:  # the arguments of a tool call
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


def error_text(body: bytes) -> str:
    """Return the message of an engine's error document."""
    try:
        found = _error_reply.decode(body)
    except _UNREADABLE:
        return _REJECTED
    inner = found.error
    text = inner.message if isinstance(inner, ErrorMessage) else inner
    return text or found.message or (_error_text(found.detail) if found.detail else _REJECTED)


def _is_error(raw: Raw) -> bool:
    """Return whether the member `error` reports an error: engines may send it as null."""
    return bytes(raw) not in {b"", b"null"}


def _error_text(raw: Raw) -> str:
    try:
        found = _error_value.decode(raw)
    except _UNREADABLE:
        return _REJECTED
    return (found.message if isinstance(found, ErrorMessage) else found) or _REJECTED


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
