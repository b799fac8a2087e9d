"""Converts responses of OpenAI's chat completions to those of its Responses API. Pure.

The answer is collected in items while it is converted, because the last events of a stream repeat all of it. A document
is the response that the last event of such a stream contains.
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.chat_responses import BlockConverter, is_error, openai_error, read_error
from gateway.dialects.decoded_structs import Choice
from gateway.dialects.responses_requests import Json, TranslatedResponses
from gateway.dialects.translated_request import UNREADABLE
from gateway.errors import render_responses_error

KEPT_BYTES_MAX = 16 << 20
"""Limit of the memory of an answer, which is kept until its end."""
_ITEM_BYTES, _LOGPROB_BYTES = 1024, 64
"""Memory of an item and of a log probability in addition to their text."""
_REASONS: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Why a response is incomplete, by the reason of the engine."""
_ONE_LINE: Final = bytes.maketrans(b"\r\n", b"  ")
"""For the repeated members of a request: line ends between their values would end the event."""
_IDS: Final = {"thinking": "rs", "text": "msg", "tool": "fc"}
_PARTS: Final = {"thinking": ("reasoning_text", "reasoning_text"), "text": ("output_text", "output_text")}
"""The type of a part and the name of its events, by the kind of its block."""


class ResponsesConverter(BlockConverter):
    """Converts one response. `id` is that of the request, `model` its name if the request names none, `created_s` the
    Unix time of the response.
    """

    __slots__ = ("_base", "_id", "_items", "_kept_bytes", "_latest", "_logprobs", "_name", "_number", "_text")

    def __init__(self, request: TranslatedResponses, model: str, id: str, created_s: float) -> None:
        super().__init__(stream=request.stream)
        self._id = id
        self._base: Json = {
            "id": f"resp_{id}", "object": "response", "created_at": int(created_s), "model": request.model or model,
            "background": False, "store": False, "previous_response_id": None, **request.echo,
        }  # fmt: skip
        self._number = 0
        """Events so far."""
        self._items: list[Json] = []
        self._text = bytearray()
        """The text of the open item."""
        self._logprobs: list[Raw] = []
        """Those of the open item."""
        self._latest: list[Raw] = []
        """Log probabilities of which the text has not been converted yet."""
        self._name = ""
        """The name of the called function."""
        self._kept_bytes = 0

    # --- streams -----------------------------------------------------------------------------------------------------

    def _render(self, kind: str, **members: object) -> bytes:
        """Return one event; empty for a document."""
        if not self.stream:
            return b""
        event = {"type": kind, "sequence_number": self._number, **members}
        self._number += 1
        data = msgspec.json.encode(event).translate(_ONE_LINE)
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)

    def _start(self) -> bytes:
        response = self._response("in_progress", output=[]) if self.stream else None
        return self._render("response.created", response=response) + self._render(
            "response.in_progress", response=response
        )

    def _note(self, choice: Choice) -> None:
        super()._note(choice)
        for one in (None if choice.logprobs is None else choice.logprobs.content) or ():
            self._latest.append(Raw(bytes(one)))
            self._keep(len(bytes(one)) + _LOGPROB_BYTES)

    def _begin_block(self, kind: str, id: str | None, name: str) -> bytes:
        number = self._blocks - 1
        item: Json = {"id": f"{_IDS[kind]}_{self._id}_{number}", "status": "in_progress"}
        if kind == "tool":
            call_id = id or f"call_{self._id}_{number}"
            item |= {"type": "function_call", "call_id": call_id, "name": name, "arguments": ""}
        elif kind == "text":
            item |= {"type": "message", "role": "assistant", "content": []}
        else:
            item |= {"type": "reasoning", "summary": [], "content": []}
        self._items.append(item)
        self._text, self._logprobs, self._name = bytearray(), [], name
        self._keep(_ITEM_BYTES)
        out = self._render("response.output_item.added", output_index=number, item=item)
        if kind == "tool":
            return out
        return out + self._part_event("response.content_part.added", part=self._part(kind, ""))

    def _piece(self, kind: str, text: str) -> bytes:
        piece = text.encode()
        self._text += piece
        self._keep(len(piece))
        if kind == "tool":
            return self._item_event("response.function_call_arguments.delta", delta=text)
        if kind == "thinking":
            return self._part_event("response.reasoning_text.delta", delta=text)
        logprobs, self._latest = self._latest, []
        self._logprobs += logprobs
        return self._part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _keep(self, size: int) -> None:
        self._kept_bytes += size
        self.broken = self.broken or self._kept_bytes > KEPT_BYTES_MAX

    def _end_block(self) -> bytes:
        kind = self._block
        text, item = self._text.decode(), self._items[-1]
        item["status"] = self._status() if self.ended else "completed"
        if kind == "tool":
            item["arguments"] = text
            out = self._item_event("response.function_call_arguments.done", name=self._name, arguments=text)
        else:
            part = self._part(kind, text)
            item["content"] = [part]
            members: Json = {"text": text} if kind == "thinking" else {"text": text, "logprobs": self._logprobs}
            out = self._part_event(f"response.{_PARTS[kind][1]}.done", **members)
            out += self._part_event("response.content_part.done", part=part)
        return out + self._render("response.output_item.done", output_index=self._blocks - 1, item=item)

    def _part(self, kind: str, text: str) -> Json:
        part: Json = {"type": _PARTS[kind][0], "text": text}
        return part if kind == "thinking" else {**part, "annotations": [], "logprobs": self._logprobs}

    def _item_event(self, kind: str, **members: object) -> bytes:
        return self._render(kind, item_id=self._items[-1]["id"], output_index=self._blocks - 1, **members)

    def _part_event(self, kind: str, **members: object) -> bytes:
        return self._item_event(kind, content_index=0, **members)

    def _end(self) -> bytes:
        self.ended = True
        out = self._begin() + self._close()
        status = self._status()
        return out + self._render(f"response.{status}", response=self._response(status, self._items))

    def _error(self, error: Raw) -> bytes:
        out = self._begin()
        failed = self._response("failed", [item for item in self._items if item["status"] != "in_progress"])
        failed["error"] = {"code": "server_error", "message": read_error(error)}
        return out + self._render("response.failed", response=failed)

    def _status(self) -> str:
        return "incomplete" if self._finish_reason in _REASONS else "completed"

    def _response(self, status: str, output: list[Json]) -> Json:
        reason = _REASONS.get(self._finish_reason) if status == "incomplete" else None
        return {
            **self._base, "status": status, "error": None, "output": output,
            "incomplete_details": None if reason is None else {"reason": reason},
            "usage": None if status == "in_progress" else self._counts(),
        }  # fmt: skip

    def _counts(self) -> Json:
        """Return the usage. If the engine sends none, the pieces of the answer are counted."""
        usage, cached, reasoning = self._usage, 0, 0
        read, written = 0, max(0, self._pieces)
        if usage is not None:
            read, written = usage.prompt_tokens or 0, usage.completion_tokens or 0
            if usage.prompt_tokens_details is not None:
                cached = usage.prompt_tokens_details.cached_tokens or 0
            if usage.completion_tokens_details is not None:
                reasoning = usage.completion_tokens_details.reasoning_tokens or 0
        return {
            "input_tokens": read, "output_tokens": written, "total_tokens": read + written,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": reasoning},
        }  # fmt: skip

    # --- documents ---------------------------------------------------------------------------------------------------

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:
        """Return the response for an engine's whole response, or its events if a stream was requested; empty and
        `broken` if it is unusable.
        """
        if status >= 400:
            error = openai_error(status, body)
            return render_responses_error(error) if late else msgspec.json.encode({"error": error})
        found = self._decode_document(body)
        if found is None or is_error(found.error) or not found.choices:
            self.broken = True
            return b""
        self._usage = found.usage
        try:
            events = self._choice(found.choices[0])
        except UNREADABLE:  # the arguments of a tool call
            self.broken = True
        if self.broken:
            return b""
        events += self._end()
        return events if self.stream else msgspec.json.encode(self._response(self._status(), self._items))
