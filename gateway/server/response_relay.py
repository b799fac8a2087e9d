"""Relays an engine's response to one client: selects the framing, removes events, and ends the response. Pure.

Forwards bytes unchanged (nearly always) or frames them again (HTTP/1.0 clients, engines that end a body by closing,
event streams with a length). The bytes returned so far end between two chunks, and for an event stream between two
events unless `whole` is false. The end is returned only when the engine's end has arrived.
"""

from __future__ import annotations

from typing import Final

from gateway.http.response_reader import LAST_CHUNK, BodyWalker, ResponseHead
from gateway.http.sse_relay import EventGate, encode_chunk, render_engine_error

ERROR_BODY_BYTES_MAX = 16 << 10
"""Maximum size of an engine's error that is converted to an event; a longer one is not parsed."""
_STREAM_ENDS = (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
"""Markers of a complete stream; checked only if the end of the connection is the end of the body."""

_EVENTS: Final = 0
"""Forward whole events, in the engine's chunks."""
_AS_IT_COMES: Final = 1
_REFRAMED: Final = 2
"""Framed by the gateway."""
_KEPT: Final = 3
"""Kept for one event at the end."""
_OVER: Final = 4


class Answer:
    """One response from its first body byte. `early`: the client already has the head of an event stream.

    `framed`: the client accepts chunks (HTTP/1.1). `note`: a whole event, added at the end of an early stream.
    """

    __slots__ = (
        "_dialect", "_ended", "_framed", "_gate", "_json", "_kept", "_manner", "_note", "_walker",
        "chunked", "early", "length",
    )  # fmt: skip

    def __init__(
        self, head: ResponseHead, walker: BodyWalker,
        *, framed: bool, drop_usage: bool, early: bool = False, note: bytes = b"", dialect: str = "openai",
    ) -> None:  # fmt: skip
        self._walker = walker
        self._framed = framed
        self.early = early
        self._note = note
        self._dialect = dialect
        self._kept = b""
        self._ended = False
        stream = head.event_stream and head.status < 300
        self._json = head.content_type.startswith(b"application/json")
        self._gate = gate = EventGate(walker, drop_usage=drop_usage) if stream else None
        raw = (
            (head.chunked and framed)
            if stream
            else not early and (head.length is not None or (head.chunked and framed))
        )
        if early and not stream:
            self._manner = _KEPT
        elif raw:
            self._manner = _AS_IT_COMES if gate is None else _EVENTS
        else:
            self._manner = _REFRAMED
        self.length = head.length if raw else None
        """Content-Length of the head. If this is None and `chunked` is false, closing the connection ends the body."""
        self.chunked = framed and (head.chunked or not raw)

    @property
    def whole(self) -> bool:
        """Whether an event can be added now."""
        return self.early if self._gate is None else self._gate.whole

    @property
    def cut_off(self) -> bool:
        """Whether the engine closed the connection instead of ending the body, and the body is incomplete.

        A stream is complete after its own last event, a JSON object after its last brace; other bodies cannot be
        checked.
        """
        if not self._walker.until_close:
            return False
        tail = self._walker.tail()
        if self._gate is not None:
            return not any(end in tail for end in _STREAM_ENDS)
        return self._json and not tail.rstrip().endswith(b"}")

    def shape(self, data: bytes) -> bytes:
        """Convert the next bytes of the body for the client, without the ending."""
        if self._manner == _EVENTS and self._gate is not None:  # checked first: the hot path
            return self._gate.pass_chunks(data)
        if self._manner == _AS_IT_COMES:
            return self._walker.walk(data)
        if self._manner == _KEPT:
            return self._keep(data)
        return self._content(data) if self._manner == _REFRAMED else b""

    def take(self, data: bytes) -> bytes:
        """Like `shape`, with the ending if it has arrived."""
        out = self.shape(data)
        if self._walker.ended and not self.cut_off:
            out += self.ending()
        return out

    def ending(self) -> bytes:
        """Return the bytes that follow the last piece; empty on the second call."""
        if self._ended:
            return b""
        self._ended = True
        self._manner = _OVER
        out = b""
        if self._gate is not None:
            out = self.frame(self._gate.rest())
        elif self.early:
            kept = self._kept if len(self._kept) <= ERROR_BODY_BYTES_MAX else b""
            out = self.frame(render_engine_error(kept, self._dialect))
        if self.early:
            out += self.frame(self._note)
        return out + LAST_CHUNK if self.chunked else out

    def release(self) -> bytes:
        """Return the events that are held back for a usage chunk, which does not come because the response breaks."""
        if self._gate is None:
            return b""
        chunks, content = self._gate.release()
        return chunks + self.frame(content)

    def frame(self, content: bytes) -> bytes:
        """Frame the gateway's own content for this client."""
        return encode_chunk(content) if self._framed else content

    def _content(self, data: bytes) -> bytes:
        """Frame the engine's content again."""
        content = self._walker.strip(data)
        return self.frame(content if self._gate is None else self._gate.pass_content(content))

    def _keep(self, data: bytes) -> bytes:
        """Collect a response that is no event stream, after an early head: it becomes one event at the end."""
        content = self._walker.strip(data)
        self._kept += content[: ERROR_BODY_BYTES_MAX + 1 - len(self._kept)]
        return b""
