"""Parses one response as a client does and decides whether it is complete. Pure: no I/O.

A stream is complete if the engine finished it (a finish reason), the last event of its dialect arrived (`[DONE]`, or
Anthropic's message_stop) and HTTP ended cleanly; or if an error event was last, however HTTP ended afterwards. A
document is complete if HTTP ended cleanly and, if it was declared as JSON, it is valid JSON. `verdict.py` judges a
whole run.
"""

from __future__ import annotations

import msgspec

from loadtest.result import COLD_PHASES, server_timing

DOCUMENT_BYTES_MAX = 64 << 20
"""Limit of a document or an event; a longer one counts as broken."""
TIMING = b": server-timing "
"""Start of the SSE comment that contains the phases, in the format of the Server-Timing header."""
_KEPT = (
    "server-timing",
    "x-pilotlight-",
    "x-ratelimit-",
    "retry-after",
    "x-should-retry",
    "x-request-id",
    "content-type",
)


class _Error(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None


class _Said(msgspec.Struct):
    """A message, a delta or a content block of any dialect."""

    content: str | None = None
    text: str | None = None
    stop_reason: str | None = None


class _Choice(msgspec.Struct):
    delta: _Said | None = None
    message: _Said | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Document(msgspec.Struct):
    type: str | None = None
    error: _Error | str | None = None
    choices: list[_Choice] = []
    delta: _Said | None = None
    content: list[_Said] = []
    stop_reason: str | None = None


_decoder = msgspec.json.Decoder(_Document)


class AnswerReader:
    """One response. Call `head`, then `body` as bytes arrive, then `end` once; then read the fields."""

    def __init__(self, *, stream: bool = False) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.phases: dict[str, float] = {}
        self.bytes = 0
        self.errors = 0
        self.code = ""
        self.clear = True
        self.saw_done = False
        self.finish_reason = ""
        self.broken = ""
        self.has_content = False
        """Whether the body has begun. Comments of a stream, which keep a connection alive, do not count."""
        self._words: list[str] = []
        self._buffer = bytearray()
        self._events = False
        self._asked_for_events = stream

    @property
    def text(self) -> str:
        """The whole text that the model generated."""
        return "".join(self._words)

    @property
    def cold(self) -> bool:
        """Whether the server reports that the request waited for a start."""
        return self.headers.get("x-pilotlight-cold") == "1" or not COLD_PHASES.isdisjoint(self.phases)

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Process the final response head; names are in lower case. Only headers relevant to a load test are kept."""
        self.status = status
        self.headers = {name: value for name, value in headers.items() if name.startswith(_KEPT)}
        self.phases = server_timing(headers.get("server-timing", ""))
        self._events = headers.get("content-type", "").startswith("text/event-stream")

    def body(self, data: bytes) -> None:
        """Process bytes of the body, without transfer encoding."""
        self.bytes += len(data)
        if self.broken:
            return
        self._buffer += data
        if self._events:
            self._split()
        else:
            self.has_content = True
        if len(self._buffer) > DOCUMENT_BYTES_MAX:
            self._break("too long")

    def end(self, broken: str = "") -> None:
        """Process the end of the response. `broken`: why HTTP did not end cleanly; ignored after an error event."""
        if broken and not (self._events and self.errors and not self._buffer):
            self._break(broken)
        elif self._events:
            self._end_of_stream()
        elif self._asked_for_events and 200 <= self.status < 300:
            self._break("asked for a stream, got a document")
        elif self.status:
            self._end_of_document()
        if self.status >= 400 and not self.errors:
            self._fail(f"http_{self.status}")
            self.clear = False

    def _split(self) -> None:
        *lines, rest = bytes(self._buffer).split(b"\n")
        self._buffer = bytearray(rest)
        for line in lines:
            self.has_content |= bool(line.strip()) and not line.startswith(b":")
            if line.startswith(b"data:"):
                self._event(line[5:].strip())
            elif line.startswith(TIMING):  # after an early head the timing is in a comment
                self.phases.update(server_timing(line[len(TIMING) :].decode("latin-1")))

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self.saw_done = True
            return
        try:
            self._take(_decoder.decode(data))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._break("an event is not JSON of a known form")

    def _take(self, document: _Document) -> None:
        if document.error is not None:
            error = document.error if isinstance(document.error, _Error) else _Error()
            self._fail(str(error.code or error.type or "unnamed"))
        for choice in document.choices:
            said = choice.delta or choice.message or _Said()
            self._words.append(said.content or choice.text or "")
            self.finish_reason = choice.finish_reason or self.finish_reason
        self._words.extend(block.text or "" for block in document.content)
        if document.delta is not None:
            self._words.append(document.delta.text or "")
            self.finish_reason = document.delta.stop_reason or self.finish_reason
        self.finish_reason = document.stop_reason or self.finish_reason
        self.saw_done = self.saw_done or document.type == "message_stop"

    def _end_of_stream(self) -> None:
        if self._buffer:
            self._break("the stream ended inside an event")
        elif not self.errors and not (self.saw_done and self.finish_reason):
            self._break("the stream ended without " + ("its last event" if self.finish_reason else "a finish reason"))

    def _end_of_document(self) -> None:
        if "json" not in self.headers.get("content-type", ""):
            return
        try:
            self._take(_decoder.decode(self._buffer))
        except msgspec.ValidationError:
            return  # JSON of another form, such as embeddings with other members
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._break("the document is not JSON")

    def _fail(self, code: str) -> None:
        self.errors += 1
        self.code = self.code or code

    def _break(self, why: str) -> None:
        self.broken = self.broken or why
