"""Relays an engine's OpenAI response to a client of Ollama's API: lines for a stream, otherwise one document.

A document is converted when it is complete. Until then nothing is sent, so that a failure is still a proper error.
"""

from __future__ import annotations

from gateway.dialects.ollama_responses import ReplyConverter
from gateway.errors import CallError, translated_answer_too_large, upstream_error
from gateway.http.response_reader import LAST_CHUNK, BodyWalker, ResponseHead
from gateway.server.response_relay import Answer

DOCUMENT_BYTES_MAX = 16 << 20
"""Limit of a response that is converted whole; above it 502."""


class TranslatedAnswer(Answer):
    """One response from its first body byte. `early`: the client already has the head of the stream."""

    __slots__ = ("_closed", "_converter", "_parts", "_size", "_status", "_streams", "_walked", "broken", "deferred")

    def __init__(
        self, head: ResponseHead, walker: BodyWalker, converter: ReplyConverter, *, framed: bool, early: bool
    ) -> None:
        super().__init__(head, walker, framed=framed, drop_usage=False, early=early, dialect="ollama")
        self._walked = walker
        self._converter = converter
        self._status = head.status
        self._streams = head.event_stream and head.status < 300 and converter.stream
        self._parts: list[bytes] = []
        self._size = 0
        self._closed = False
        self.length = None
        self.chunked = framed
        self.broken = False
        """Whether the engine's response cannot be converted."""
        self.deferred = not self._streams and not early
        """Whether head and body are sent together at the end."""

    @property
    def whole(self) -> bool:
        """Whether an error can be added now: always, because only whole lines are sent."""
        return not self.deferred

    @property
    def cut_off(self) -> bool:
        """Whether the engine closed the connection before the end of its stream. An incomplete document is found when
        it is converted.
        """
        return self._walked.until_close and self._streams and not self._converter.ended

    def error(self) -> CallError:
        """Return the error for a response that cannot be converted."""
        return translated_answer_too_large(DOCUMENT_BYTES_MAX) if self._size > DOCUMENT_BYTES_MAX else upstream_error()

    def shape(self, data: bytes) -> bytes:
        """Convert the next bytes of the body, without the ending."""
        content = self._walked.strip(data)
        if self._streams:
            out = self.frame(self._converter.feed(content))
            self.broken = self._converter.broken
            return out
        self._size += len(content)
        self.broken = self._size > DOCUMENT_BYTES_MAX
        if not self.broken:
            self._parts.append(content)
        return b""

    def ending(self) -> bytes:
        """Return the bytes that follow the last piece, or the whole document; empty on the second call."""
        if self._closed or self.broken:
            return b""
        self._closed = True
        if self._streams:
            out = self._converter.finish()
        else:
            out = self._converter.convert(self._status, b"".join(self._parts))
            self._parts = []
            if self.early or self._converter.stream:
                out += b"\n"
        self.broken = self._converter.broken
        if self.broken:
            return b""
        if self.deferred:
            return out
        return self.frame(out) + (LAST_CHUNK if self.chunked else b"")
