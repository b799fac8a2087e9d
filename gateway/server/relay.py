"""An engine's answer on its way to one client: which framing it gets, which events it loses, how it ends. Pure.

Owns the choice between passing bytes as they came (nearly always) and framing them anew (HTTP/1.0 clients, engines that
end a body by closing, event streams with a length). Promises: what was given out so far ends between two chunks,
and for an event stream between two events unless `whole` is false; the end is given out only when the engine's came.
"""

from __future__ import annotations

from typing import Final

from gateway.http import sse
from gateway.http.response_reader import LAST_CHUNK, BodyWalker, ResponseHead
from gateway.http.sse import EventGate

ERROR_BODY_BYTES_MAX = 16 << 10
"""Of an engine's error that becomes an event; what is longer is not read as one."""
_STREAM_ENDS = (b"[DONE]", b'"message_stop"', b'"response.completed"', b'"response.incomplete"', b'"response.failed"')
"""How the dialects say that a stream is whole; asked only where the end of the connection is the end of the body."""

_EVENTS: Final = 0
"""Whole events go on, in the engine's chunks."""
_AS_IT_COMES: Final = 1
_ANEW: Final = 2
"""Framed by us."""
_KEPT: Final = 3
"""Kept for one event at the end."""
_OVER: Final = 4


class Answer:
    """One response from its first body byte. `early`: the client already has a head, of an event stream.

    `framed`: the client takes chunks (HTTP/1.1). `note`: what an early stream is told at its end (a whole event).
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
            self._manner = _ANEW
        self.length = head.length if raw else None
        """For the head; with neither length nor chunks the end is the close."""
        self.chunked = framed and (head.chunked or not raw)

    @property
    def whole(self) -> bool:
        """Whether an event can be added now."""
        return self.early if self._gate is None else self._gate.whole

    @property
    def cut_off(self) -> bool:
        """The engine closed the connection in place of an end, and what it said by then was not whole.

        Of a stream its own last event tells, of a JSON object its last brace; of anything else nothing can.
        """
        if not self._walker.until_close:
            return False
        tail = self._walker.tail()
        if self._gate is not None:
            return not any(end in tail for end in _STREAM_ENDS)
        return self._json and not tail.rstrip().endswith(b"}")

    def shape(self, data: bytes) -> bytes:
        """The next bytes of the body -> what the client gets for them, but for the ending."""
        if self._manner == _EVENTS and self._gate is not None:  # one call of a method whose place is known
            return self._gate.pass_chunks(data)
        if self._manner == _AS_IT_COMES:
            return self._walker.walk(data)
        if self._manner == _KEPT:
            return self._keep(data)
        return self._content(data) if self._manner == _ANEW else b""

    def take(self, data: bytes) -> bytes:
        """As `shape`, with the ending where it has come."""
        out = self.shape(data)
        if self._walker.ended and not self.cut_off:
            out += self.ending()
        return out

    def ending(self) -> bytes:
        """What follows the last piece; nothing the second time."""
        if self._ended:
            return b""
        self._ended = True
        self._manner = _OVER
        out = b""
        if self._gate is not None:
            out = self.frame(self._gate.rest())
        elif self.early:
            kept = self._kept if len(self._kept) <= ERROR_BODY_BYTES_MAX else b""
            out = self.frame(sse.render_engine_error(kept, self._dialect))
        if self.early:
            out += self.frame(self._note)
        return out + LAST_CHUNK if self.chunked else out

    def frame(self, content: bytes) -> bytes:
        """Content of our own, as this client takes it."""
        return sse.encode_chunk(content) if self._framed else content

    def _content(self, data: bytes) -> bytes:
        """What needs our own framing."""
        content = self._walker.strip(data)
        return self.frame(content if self._gate is None else self._gate.pass_content(content))

    def _keep(self, data: bytes) -> bytes:
        """An answer that is no event stream, after an early head: it becomes one event, at the end."""
        content = self._walker.strip(data)
        self._kept += content[: ERROR_BODY_BYTES_MAX + 1 - len(self._kept)]
        return b""
