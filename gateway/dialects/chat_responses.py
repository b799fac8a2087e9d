"""Reads responses of OpenAI's API, which are converted for clients of other APIs. Pure.

Splits an event stream into events, decodes them, and finds errors. Each API has a subclass of `ChatConverter`, or of
`BlockConverter` if its streams consist of blocks with a beginning and an end.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec
from msgspec import Raw

from gateway.dialects.decoded_structs import Choice, Completion, ErrorMessage, ErrorReply, ToolDelta, Usage
from gateway.dialects.translated_request import ITEMS_MAX, UNREADABLE, count_items

EVENT_BYTES_MAX: Final = 1 << 20
"""Limit of one event, and of the arguments of all tool calls of a response. Some engines send these in one event."""
_EVENT_END = re.compile(rb"(?:\n|\r\n?+){2}")
_REJECTED: Final = "the engine rejected the request; read the log of the engine"
_ERROR_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error",
}  # fmt: skip

_completion = msgspec.json.Decoder(Completion)
_error_reply = msgspec.json.Decoder(ErrorReply)
_error_value = msgspec.json.Decoder(ErrorMessage | str)
_text = msgspec.json.Decoder(str)


class ChatConverter:
    """Converts one response. After `broken`, the response is unusable."""

    __slots__ = ("_finish_reason", "_held", "_usage", "broken", "ended", "status", "stream")

    def __init__(self, *, stream: bool) -> None:
        self._held = bytearray()
        """The beginning of an event."""
        self._finish_reason = ""
        self._usage: Usage | None = None
        self.stream = stream
        """Whether the client requested a stream."""
        self.broken = False
        """Whether the engine sent something that is not an OpenAI response."""
        self.ended = False
        """Whether the end of the stream was written."""
        self.status = 0
        """The status of a response that is converted whole; 0: that of the engine."""

    # --- implemented for each API ------------------------------------------------------------------------------------

    def _choice(self, choice: Choice) -> bytes:
        """Convert one chunk. Sets `broken`, or raises an exception of UNREADABLE, if it is unusable."""
        raise NotImplementedError

    def _end(self) -> bytes:
        """Return the end of a complete stream, and set `ended`."""
        raise NotImplementedError

    def _error(self, error: Raw) -> bytes:
        """Return the end of a stream in which the engine sent an error."""
        raise NotImplementedError

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:
        """Convert an engine's whole response; empty and `broken` if it is unusable. `late`: the client already has the
        head of a stream.
        """
        raise NotImplementedError

    def token_counts(self) -> bytes:
        """Return the usage as OpenAI's API has it, if the engine's response has it in another form; empty otherwise."""
        return b""

    # --- streams -----------------------------------------------------------------------------------------------------

    def feed(self, content: bytes) -> bytes:
        """Take the next bytes of an event stream and return the converted ones."""
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
        """The engine's stream has ended properly: return the rest."""
        if self._is_over():
            return b""
        held, self._held = bytes(self._held), bytearray()
        out = self._event(held) if held.strip() else b""
        return out if self._is_over() else out + self._end()

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
        return self._end() if payload == b"[DONE]" else self._payload(payload)

    def _payload(self, payload: bytes) -> bytes:
        """Convert the data of one event."""
        try:
            chunk = _completion.decode(payload)
        except UNREADABLE:
            self.broken = True
            return b""
        if is_error(chunk.error):
            self.ended = True
            return self._error(chunk.error)
        if chunk.usage is not None:
            self._usage = chunk.usage
        try:
            return self._choice(chunk.choices[0]) if chunk.choices else b""
        except UNREADABLE:  # the arguments of a tool call
            self.broken = True
            return b""

    # --- documents ---------------------------------------------------------------------------------------------------

    def _decode_document(self, body: bytes) -> Completion | None:
        """Decode a whole response with choices or an error; None and `broken` if it is something else."""
        found = None
        if count_items(body) <= ITEMS_MAX:
            try:
                found = _completion.decode(body)
            except UNREADABLE:
                found = None
        if found is None or not (found.choices or is_error(found.error)):
            self.broken = True
            return None
        return found


class ChainedConverter(ChatConverter):
    """Converts a response with one converter, and the result with a second one."""

    __slots__ = ("_first", "_second")

    def __init__(self, first: ChatConverter, second: ChatConverter) -> None:
        super().__init__(stream=second.stream)
        self._first = first
        self._second = second

    def feed(self, content: bytes) -> bytes:
        """See ChatConverter."""
        return self._note(self._second.feed(self._first.feed(content)))

    def finish(self) -> bytes:
        """See ChatConverter."""
        out = self._second.feed(self._first.finish())
        return self._note(out if self._first.broken else out + self._second.finish())

    def convert(self, status: int, body: bytes, *, late: bool = False) -> bytes:
        """See ChatConverter."""
        first, second = self._first, self._second
        middle = first.convert(status, body)
        self.status = first.status
        if first.broken:
            return self._note(b"")
        if first.ended:  # a document that became a stream
            return self._note(second.feed(middle) + second.finish())
        return self._note(second.convert(self.status or status, middle, late=late))

    def token_counts(self) -> bytes:
        """See ChatConverter."""
        return self._first.token_counts()

    def _note(self, out: bytes) -> bytes:
        self.broken = self._first.broken or self._second.broken
        self.ended = self._second.ended
        return out


class BlockConverter(ChatConverter):
    """Converts a response to blocks that follow each other: text, thinking or a call of a tool, in the order of the
    engine.
    """

    __slots__ = ("_block", "_blocks", "_pieces", "_tool", "_tool_id")

    def __init__(self, *, stream: bool) -> None:
        super().__init__(stream=stream)
        self._pieces = -1
        """Pieces of the answer so far; -1 before the first event."""
        self._blocks = 0
        """Blocks that have begun."""
        self._block = ""
        """The kind of the open block: thinking, text or tool; empty if none is open."""
        self._tool = -1
        """The engine's number of the latest call of a tool."""
        self._tool_id = ""

    # --- implemented for each API ------------------------------------------------------------------------------------

    def _start(self) -> bytes:
        """Return the first event."""
        raise NotImplementedError

    def _begin_block(self, kind: str, id: str | None, name: str) -> bytes:
        """Return the beginning of the block number `_blocks`. `id` and `name` are those of a call of a tool."""
        raise NotImplementedError

    def _piece(self, kind: str, text: str) -> bytes:
        """Return a piece of the open block."""
        raise NotImplementedError

    def _end_block(self) -> bytes:
        """Return the end of the open block."""
        raise NotImplementedError

    def _note(self, choice: Choice) -> None:
        """Read the members of a choice that are not pieces of the answer. Raises an exception of UNREADABLE."""
        self._finish_reason = choice.finish_reason or self._finish_reason

    # --- common parts ------------------------------------------------------------------------------------------------

    def _choice(self, choice: Choice) -> bytes:
        out = [self._begin()]
        delta = choice.delta or choice.message
        if choice.index:  # a further answer, for which the API has no place
            return out[0]
        self._note(choice)
        if delta is None:
            return out[0]
        if thinking := delta.reasoning_content or delta.reasoning:
            out.append(self._continue("thinking", thinking))
        if delta.content:
            out.append(self._continue("text", delta.content))
        for position, part in enumerate(delta.tool_calls or ()):
            out.append(self._tool_part(position if part.index is None else part.index, part))
        return b"".join(out)

    def _begin(self) -> bytes:
        """Return the first event, once."""
        if self._pieces >= 0:
            return b""
        self._pieces = 0
        return self._start()

    def _open(self, kind: str, id: str | None = None, name: str = "") -> bytes:
        out = self._close()
        self._block = kind
        self._blocks += 1
        return out + self._begin_block(kind, id, name)

    def _close(self) -> bytes:
        """End the open block, if any."""
        out = self._end_block() if self._block else b""
        self._block = ""
        return out

    def _continue(self, kind: str, text: str) -> bytes:
        """Add a piece to the open block of this kind, or to a new one."""
        out = b"" if self._block == kind else self._open(kind)
        self._pieces += 1
        return out + self._piece(kind, text)

    def _tool_part(self, index: int, part: ToolDelta) -> bytes:
        """Convert a part of a call. Its first part contains the name. Some engines number all calls with 0."""
        function = part.function
        name = None if function is None else function.name
        text = "" if function is None else read_arguments(function.arguments)
        out = b""
        if index > self._tool or (part.id and name and part.id != self._tool_id):
            if not name:
                self.broken = True
                return b""
            self._tool, self._tool_id = index, part.id or ""
            out = self._open("tool", part.id, name)
        elif text and (self._block != "tool" or index != self._tool):  # the block has ended
            self.broken = True
            return b""
        return out + self._continue("tool", text) if text else out


def read_arguments(arguments: Raw) -> str:
    """Return the arguments of a tool call as text, or a piece of them; empty if they have another form. Raises an
    exception of UNREADABLE.
    """
    value = bytes(arguments)
    if value.startswith(b'"'):
        return _text.decode(value)
    return value.decode() if value.startswith(b"{") else ""


def error_text(body: bytes) -> str:
    """Return the message of an engine's error document."""
    try:
        found = _error_reply.decode(body)
    except UNREADABLE:
        return _REJECTED
    inner = found.error
    text = inner.message if isinstance(inner, ErrorMessage) else inner
    return text or found.message or (read_error(found.detail) if found.detail else _REJECTED)


def openai_error(status: int, body: bytes) -> dict[str, str | None]:
    """Return the error of an engine's error document in the form of OpenAI."""
    type = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"message": error_text(body), "type": type, "code": None, "param": None}


def is_error(raw: Raw) -> bool:
    """Return whether the member `error` reports an error: engines may send it as null."""
    return bytes(raw) not in {b"", b"null"}


def read_error(raw: Raw) -> str:
    """Return the message of a member `error`."""
    try:
        found = _error_value.decode(raw)
    except UNREADABLE:
        return _REJECTED
    return (found.message if isinstance(found, ErrorMessage) else found) or _REJECTED
