"""Converts responses of OpenAI's chat completions to those of Anthropic's Messages API. Pure.

A stream is converted event by event. The last events are written when the engine's stream has ended, because they
contain the token counts, which engines send last. If an engine sends none, the pieces of the answer are counted.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.chat_responses import BlockConverter, error_text, is_error, read_arguments, read_error
from gateway.dialects.decoded_structs import Choice, Delta, ToolDelta
from gateway.dialects.messages_requests import Json, TranslatedMessages
from gateway.dialects.translated_request import UNREADABLE

_STOP_REASONS: Final = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "function_call": "tool_use",
    "content_filter": "refusal",
}
_DELTAS: Final = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool": ("input_json_delta", "partial_json"),
}
"""The type and the member of a piece by the kind of its block."""
_ERROR_TYPES: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's types of errors by status; of other statuses: api_error."""

_object = msgspec.json.Decoder(dict[str, Raw])
_sequence = msgspec.json.Decoder(str)


class MessagesConverter(BlockConverter):
    """Converts one response. `id`: the id of the message. `model`: its name if the request names none."""

    __slots__ = ("_base", "_stop_sequence", "_stops")

    def __init__(self, request: TranslatedMessages, model: str, id: str) -> None:
        super().__init__(stream=request.stream)
        self._base: Json = {"id": id, "type": "message", "role": "assistant", "model": request.model or model}
        self._stops = request.stop_sequences
        self._stop_sequence: str | None = None

    # --- streams -----------------------------------------------------------------------------------------------------

    def _start(self) -> bytes:
        """Return the first event. The token counts are not known yet."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        message = {**self._base, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        return _event("message_start", message=message)

    def _begin_block(self, kind: str, id: str | None, name: str) -> bytes:
        if kind == "text":
            block: Json = {"type": "text", "text": ""}
        elif kind == "thinking":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        else:
            block = {"type": "tool_use", "id": id or self._call_id(self._blocks - 1), "name": name, "input": {}}
        return _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _end_block(self) -> bytes:
        return _event("content_block_stop", index=self._blocks - 1)

    def _piece(self, kind: str, text: str) -> bytes:
        type, member = _DELTAS[kind]
        return _event("content_block_delta", index=self._blocks - 1, delta={"type": type, member: text})

    def _call_id(self, number: int) -> str:
        """Return the id of a call for which the engine has none."""
        return f"toolu_{self._base['id']}_{number}"

    def _end(self) -> bytes:
        self.ended = True
        out = self._begin() + self._close()
        delta = {"stop_reason": self._stop_reason(), "stop_sequence": self._stop_sequence}
        return out + _event("message_delta", delta=delta, usage=self._counts()) + _event("message_stop")

    def _error(self, error: Raw) -> bytes:
        return _event("error", error={"type": "api_error", "message": read_error(error)})

    def _note(self, choice: Choice) -> None:
        super()._note(choice)
        for raw in (choice.stop_reason, choice.matched_stop):
            if bytes(raw).startswith(b'"') and (text := _sequence.decode(raw)) in self._stops:
                self._stop_sequence = text

    def _stop_reason(self) -> str:
        reason = _STOP_REASONS.get(self._finish_reason)
        if reason is None and self._tool >= 0:  # some engines report `stop` after a call
            return "tool_use"
        return reason or ("end_turn" if self._stop_sequence is None else "stop_sequence")

    def _counts(self) -> Json:
        """Return the usage. `input_tokens` does not include the tokens that were in the engine's cache."""
        usage = self._usage
        if usage is None:
            return {"input_tokens": 0, "output_tokens": max(0, self._pieces)}
        details = usage.prompt_tokens_details
        cached = 0 if details is None else details.cached_tokens or 0
        counts: Json = {"input_tokens": max(0, (usage.prompt_tokens or 0) - cached)}
        if details is not None:
            counts["cache_read_input_tokens"] = cached
        counts["output_tokens"] = usage.completion_tokens or 0
        return counts

    # --- documents ---------------------------------------------------------------------------------------------------

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:
        """Return the message for an engine's whole response, or its events if a stream was requested; empty and
        `broken` if it is unusable.
        """
        if status >= 400:
            error = {"type": _ERROR_TYPES.get(status, "api_error"), "message": error_text(body)}
            return _event("error", error=error) if late else msgspec.json.encode({"type": "error", "error": error})
        found = self._decode_document(body)
        if found is None or is_error(found.error) or not found.choices:
            self.broken = True
            return b""
        self._usage = found.usage
        try:
            if self.stream:
                out = self._choice(found.choices[0])
                return b"" if self.broken else out + self._end()
            return self._message(found.choices[0])
        except UNREADABLE:  # the arguments of a tool call
            self.broken = True
            return b""

    def _message(self, choice: Choice) -> bytes:
        self._note(choice)
        answer = choice.message or Delta()
        content: list[Json] = []
        if thinking := answer.reasoning_content or answer.reasoning:
            content.append({"type": "thinking", "thinking": thinking, "signature": ""})
        if answer.content:
            content.append({"type": "text", "text": answer.content})
        for number, call in enumerate(answer.tool_calls or ()):
            block = self._tool_block(number, call)
            if block is not None:
                content.append(block)
        message = {
            **self._base, "content": content, "stop_reason": self._stop_reason(),
            "stop_sequence": self._stop_sequence, "usage": self._counts(),
        }  # fmt: skip
        return b"" if self.broken else msgspec.json.encode(message)

    def _tool_block(self, number: int, call: ToolDelta) -> Json | None:
        """Return the block of a whole call. If its arguments are no object, the response is broken; None if the token
        limit cut them off.
        """
        function = call.function
        arguments = b"" if function is None else read_arguments(function.arguments).encode()
        try:
            _object.decode(arguments or b"{}")
        except UNREADABLE:
            self.broken = self.broken or self._finish_reason != "length"
            return None
        self._tool = number
        id = call.id or self._call_id(number)
        name = "" if function is None else function.name or ""
        return {"type": "tool_use", "id": id, "name": name, "input": Raw(arguments or b"{}")}


def _event(kind: str, **members: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), msgspec.json.encode({"type": kind, **members}))
