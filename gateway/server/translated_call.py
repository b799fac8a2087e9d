"""Requests of other APIs whose engine gets a translated body: relays their converted responses.

They take the path of every request (`gateway.server.proxied_call`). A document is converted when it is complete. Until
then nothing is sent, so that a failure is still a proper error.

If the engine is a Triton without OpenAI's API, its responses are first converted to that API. Policies and external
checks always see OpenAI's API.

Ollama's API: a request without a prompt only starts its model. It is queued like others, and answered when a slot is
granted. The keep-alive of a stream is a space. It becomes part of the next line, where JSON allows it; clients parse
every line, so an empty line would be an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Raw

from autoscaler.contract import ModelEntry
from gateway.dialects.chat_responses import ChainedConverter, ChatConverter
from gateway.dialects.messages_requests import TranslatedMessages
from gateway.dialects.messages_responses import MessagesConverter
from gateway.dialects.ollama_requests import Translated
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.dialects.rerank import RerankConverter, TranslatedRerank
from gateway.dialects.responses_requests import TranslatedResponses
from gateway.dialects.responses_responses import ResponsesConverter
from gateway.dialects.triton_requests import TritonRequest
from gateway.dialects.triton_responses import TritonConverter
from gateway.dispatch.call import Call, Outcome
from gateway.errors import CallError, translated_answer_too_large, upstream_error
from gateway.http import responses
from gateway.http.body_buffers import Body
from gateway.http.request_head import Head
from gateway.http.response_reader import LAST_CHUNK, STREAM_FIELDS, BodyWalker, ResponseHead
from gateway.request.api_routes import Operation
from gateway.server.local_ollama_routes import format_time
from gateway.server.proxied_call import COLD, ENDED, RELAYING, SENT, ProxiedCall
from gateway.server.response_relay import Answer
from gateway.upstream import token_usage

if TYPE_CHECKING:
    from gateway.server.connection import Connection
    from gateway.server.context import GatewayContext

OLLAMA_JSON = b"application/json; charset=utf-8"
_LINES = b"application/x-ndjson"
_JSON, _EVENTS = b"application/json", b"text/event-stream"
_REPLACED = (b"content-type:", b"accept:", b"anthropic-")
"""Header lines that concern the client's API, not that of the engine."""

DOCUMENT_BYTES_MAX = 16 << 20
"""Limit of a response that is converted whole; above it 502."""


class TranslatedAnswer(Answer):
    """One response from its first body byte. `early`: the client already has the head of the stream."""

    __slots__ = ("_closed", "_converter", "_parts", "_size", "_status", "_streams", "_walked", "broken", "deferred")

    def __init__(
        self,
        head: ResponseHead,
        walker: BodyWalker,
        converter: ChatConverter,
        *,
        framed: bool,
        early: bool,
        dialect: str,
    ) -> None:
        super().__init__(head, walker, framed=framed, drop_usage=False, early=early, dialect=dialect)
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
        """Whether an error can be added now: always, because only whole lines and events are sent."""
        return not self.deferred

    @property
    def cut_off(self) -> bool:
        """Whether the engine closed the connection before the end of its stream. An incomplete document is found when
        it is converted.
        """
        return self._walked.until_close and self._streams and not self._converter.ended

    @property
    def status(self) -> int:
        """The status of the converted response."""
        return self._converter.status or self._status

    def token_counts(self) -> bytes:
        """Return the ends of the body, or what else has the token counts."""
        return self._converter.token_counts() or self._walked.tail()

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
            out = self._converter.convert(self._status, b"".join(self._parts), late=self.early)
            self._parts = []
        self.broken = self._converter.broken
        if self.broken:
            return b""
        if self.deferred:
            return out
        return self.frame(out) + (LAST_CHUNK if self.chunked else b"")


class TranslatedCall(ProxiedCall):
    """A Call whose response is converted. `document` and `stream` are the content types of its responses. `triton`: the
    request for an engine with Triton's API; its body is `body`.
    """

    __slots__ = ("_document_fields", "_model", "_relayed", "_stream_fields", "_triton")

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, operation: Operation,
        entry: ModelEntry, body: Body, triton: TritonRequest | None, model: str, *, document: bytes, stream: bytes,
    ) -> None:  # fmt: skip
        super().__init__(call, gateway, client, head, operation if triton is None else triton.target, entry, body)
        self._triton = triton
        self._model = model
        """The name of the model in the request."""
        self._document_fields = b"content-type: %b\r\n" % document
        self._stream_fields = b"content-type: %b\r\n%b" % (stream, STREAM_FIELDS)
        self._relayed: TranslatedAnswer | None = None
        """The relayed response, once committed."""
        lines = [line for line in self._upwards.splitlines(keepends=True) if not line.startswith(_REPLACED)]
        self._upwards = b"content-type: application/json\r\n" + b"".join(lines)

    def _converter(self) -> ChatConverter:
        """Return a new converter for one response in OpenAI's API."""
        raise NotImplementedError

    def _conversion(self) -> ChatConverter:
        """Return a new converter for one response of the engine."""
        triton = self._triton
        return (
            self._converter() if triton is None else ChainedConverter(self._triton_converter(triton), self._converter())
        )

    def _triton_converter(self, triton: TritonRequest) -> TritonConverter:
        return TritonConverter(triton, self._model, self.call.id, int(time.time()))

    def _message(self, kind: str, body: Raw) -> bytes:
        """See ProxiedCall. The check of an answer gets it as OpenAI's API has it."""
        triton = self._triton
        if triton is None:
            return super()._message(kind, body)
        if kind == "answer":
            body = Raw(self._triton_converter(triton).convert(200, bytes(body)) or b"null")
        return self._render_check(kind, triton.path, body)

    def engine_whole(self, head: ResponseHead, body: bytes) -> None:
        """Convert a response that arrived in one piece."""
        if self._held is not None and not head.elsewhere:
            super().engine_whole(head, body)
            return
        walker = BodyWalker(head)
        if self.engine_head(head, walker) is not None:
            self._commit(body)
            if self._stage != ENDED:
                self.engine_end()

    def engine_end(self) -> None:
        """The engine's response is complete."""
        if self._held is not None:
            super().engine_end()
            return
        if self._stage == SENT:
            if self._walker.until_close:  # close-delimited body without a byte: broken
                self.engine_lost("reset")
                return
            self._commit(b"")
        relayed = self._relayed
        if relayed is None or relayed.cut_off:
            self._break(upstream_error())
            return
        rest = relayed.ending()
        if relayed.broken:
            self._break(upstream_error())
            return
        status = relayed.status
        if relayed.deferred:
            is_stream = self.call.stream and status < 300
            fields = self._stream_fields if is_stream else self._document_fields
            rest = self._translated_head(fields, len(rest), status) + rest
        self._client.write(rest)
        self._finish(status, relayed.token_counts())

    def _commit(self, data: bytes) -> None:
        """The first body byte, or an empty body: from here on the response is this engine's."""
        engine = self.engine
        self.call.first_byte_s = self._gateway.clock()
        relayed = TranslatedAnswer(
            self._response,
            self._walker,
            self._conversion(),
            framed=self._framed,
            early=self._early,
            dialect=self.call.dialect,
        )
        self._answer = self._relayed = relayed
        self._close = self._close or self._gateway.closing or not (relayed.deferred or self._framed)
        if self.counts_tokens:
            self.call.tokens_out = token_usage.count_tokens(data)
        out = relayed.shape(data)
        if not relayed.deferred and not self._early:
            out = self._translated_head(self._stream_fields, None) + out
        self._stage = RELAYING
        self._moved = True
        self._drop_body()
        if engine is not None:
            engine.take = self._relay_and_count if self.counts_tokens else self._relay
            if self._client.paused:
                engine.pause()
        self._pass_on(relayed, out)

    def _relay(self, data: bytes) -> None:
        """Convert one piece of the body."""
        self._moved = True
        relayed = self._relayed
        if relayed is not None:
            self._pass_on(relayed, relayed.shape(data))

    def _pass_on(self, relayed: TranslatedAnswer, out: bytes) -> None:
        if out:
            self._client.write(out)
        if relayed.broken:
            self._break(relayed.error())

    def _break(self, error: CallError) -> None:
        """Abort the response after the commit point; if nothing has been sent yet, send the error instead."""
        if self._relayed is not None and self._relayed.deferred:
            self._refuse(error)
        else:
            super()._break(error)

    def _keep_alive(self, now_s: float, content: bytes) -> None:
        """Send a keep-alive before the response, the first time after the early head."""
        self._stream_event_s = now_s
        out = b""
        if not self._early:
            self._early = True
            self._close = self._close or not self._framed
            more = self._client.cors + (COLD if self.call.cold else b"")
            out = responses.render_head(
                200,
                self._stream_fields,
                self._client.id_bytes,
                length=None,
                chunked=self._framed,
                close=self._close,
                more=more,
            )
        self._client.write(out + self._frame(content))

    def _translated_head(self, fields: bytes, length: int | None, status: int = 200) -> bytes:
        more = b"server-timing: %b\r\n%b" % (self._timing(), self._client.cors)
        if self.call.cold:
            more += COLD
        chunked = length is None and self._framed
        return responses.render_head(
            status, fields, self._client.id_bytes, length=length, chunked=chunked, close=self._close, more=more
        )


class OllamaCall(TranslatedCall):
    """A Call of a client of Ollama's API."""

    __slots__ = ("_translated",)

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, entry: ModelEntry, body: Body,
        triton: TritonRequest | None, translated: Translated,
    ) -> None:  # fmt: skip
        super().__init__(
            call, gateway, client, head, translated.target, entry, body, triton, translated.model,
            document=OLLAMA_JSON, stream=_LINES,
        )  # fmt: skip
        self._translated = translated

    def granted(self, address: str) -> None:
        """A slot was granted: send the request, or answer one that only starts its model."""
        if self._translated.action != "load":
            super().granted(address)
            return
        self.call.sent_s = self.call.first_byte_s = self._gateway.clock()
        document = self._converter().loaded("load")
        if self._early:
            self._client.write(self._frame(document + b"\n") + (LAST_CHUNK if self._framed else b""))
        else:
            self._client.write(self._translated_head(self._document_fields, len(document)) + document)
        self._end(Outcome.COMPLETED, "200")
        self._client.answered(close=self._close)

    def _converter(self) -> ReplyConverter:
        durations: Callable[[], dict[str, int]] = self._durations
        return ReplyConverter(self._translated, self.call.model, timestamp, durations)

    def _durations(self) -> dict[str, int]:
        """Return the durations of Ollama's last line: the wait counts as loading, the first byte ends the prompt.
        Also the count of tokens, if they are counted.
        """
        call, now_s = self.call, self._gateway.clock()
        granted_s = call.granted_s or call.arrived_s
        counted = {"eval_count": call.tokens_out} if self.counts_tokens else {}
        return {
            "total_duration": _nanoseconds(call.arrived_s, now_s),
            "load_duration": _nanoseconds(call.arrived_s, granted_s),
            "prompt_eval_duration": _nanoseconds(granted_s, call.first_byte_s),
            "eval_duration": _nanoseconds(call.first_byte_s, now_s),
            **counted,
        }


class MessagesCall(TranslatedCall):
    """A Call of a client of Anthropic's Messages API, for an engine without that API."""

    __slots__ = ("_translated",)

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, entry: ModelEntry, body: Body,
        triton: TritonRequest | None, translated: TranslatedMessages,
    ) -> None:  # fmt: skip
        super().__init__(
            call, gateway, client, head, translated.target, entry, body, triton, translated.model,
            document=_JSON, stream=_EVENTS,
        )  # fmt: skip
        self._translated = translated

    def _converter(self) -> MessagesConverter:
        return MessagesConverter(self._translated, self.call.model, f"msg_{self.call.id}")


class TritonCall(TranslatedCall):
    """A Call of a client of OpenAI's API, for an engine with Triton's API."""

    __slots__ = ()

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, operation: Operation,
        entry: ModelEntry, body: Body, triton: TritonRequest | None, model: str,
    ) -> None:  # fmt: skip
        super().__init__(
            call, gateway, client, head, operation, entry, body, triton, model, document=_JSON, stream=_EVENTS
        )

    def _conversion(self) -> ChatConverter:
        triton = self._triton
        return super()._conversion() if triton is None else self._triton_converter(triton)


class ResponsesCall(TranslatedCall):
    """A Call of a client of OpenAI's Responses API, for an engine without that API."""

    __slots__ = ("_translated",)

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, entry: ModelEntry, body: Body,
        triton: TritonRequest | None, translated: TranslatedResponses,
    ) -> None:  # fmt: skip
        super().__init__(
            call, gateway, client, head, translated.target, entry, body, triton, translated.model,
            document=_JSON, stream=_EVENTS,
        )  # fmt: skip
        self._translated = translated

    def _converter(self) -> ResponsesConverter:
        return ResponsesConverter(self._translated, self.call.model, self.call.id, time.time())


class RerankCall(TranslatedCall):
    """A Call of rerank or score, for an engine with another form of rerank."""

    __slots__ = ("_translated",)

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, entry: ModelEntry, body: Body,
        translated: TranslatedRerank,
    ) -> None:  # fmt: skip
        super().__init__(
            call, gateway, client, head, translated.target, entry, body, None, translated.model,
            document=_JSON, stream=_EVENTS,
        )  # fmt: skip
        self._translated = translated

    def _converter(self) -> RerankConverter:
        return RerankConverter(self._translated, self.call.model, self.call.id, time.time())


def timestamp() -> str:
    """Return the current time in RFC 3339."""
    return format_time(time.time())


def _nanoseconds(begin_s: float, end_s: float) -> int:
    return max(0, int((end_s - begin_s) * 1e9))
