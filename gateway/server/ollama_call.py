"""Requests of Ollama's API: admission, and the relay of their translated responses.

They take the path of every request (`gateway.server.proxied_call`), with a translated body for the engine. A request
without a prompt only starts its model: it is queued like others, and answered when a slot is granted. A request that
asks to stop a model is answered at once and changes nothing, because the Model's settings decide when it stops.

The keep-alive of a stream is a space. It becomes part of the next line, where JSON allows it; clients parse every line,
so an empty line would be an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from autoscaler.contract import ModelEntry
from gateway.dialects import ollama_requests
from gateway.dialects.ollama_responses import ReplyConverter
from gateway.dispatch.call import Call, Outcome
from gateway.errors import (
    CallError,
    out_of_memory,
    too_large,
    translated_too_large,
    unsupported_dialect,
    upstream_error,
)
from gateway.http import responses
from gateway.http.body_buffers import LARGE_BYTES, Body, ChunkedBody
from gateway.http.request_head import Head, Request
from gateway.http.response_reader import LAST_CHUNK, STREAM_FIELDS, BodyWalker, ResponseHead
from gateway.request import body_members
from gateway.request.api_routes import Operation
from gateway.request.auth import cache_salt
from gateway.request.headers import get_call_headers
from gateway.server import precheck
from gateway.server.local_ollama_routes import format_time
from gateway.server.ollama_response_relay import TranslatedAnswer
from gateway.server.proxied_call import COLD, ENDED, RELAYING, SENT, ProxiedCall
from gateway.upstream import token_usage

if TYPE_CHECKING:
    from gateway.server.connection import Connection
    from gateway.server.context import GatewayContext

_JSON = b"content-type: application/json; charset=utf-8\r\n"
_LINES = b"content-type: application/x-ndjson\r\n" + STREAM_FIELDS
_REPLACED = (b"content-type:", b"accept:")


def admit_ollama_call(
    gateway: GatewayContext, client: Connection, request: Request, operation: Operation, now_s: float
) -> OllamaCall | None:
    """Build the Call for a Request, not yet known to dispatch; None if it has been answered. Raises CallError."""
    head = request.head
    tenant, headers = gateway.tenant(head), get_call_headers(head)
    if headers.error is not None:
        raise headers.error.with_traceback(None)  # the cached error would otherwise keep every traceback
    precheck.check_media(gateway, head, operation, headers)
    translated = ollama_requests.translate_request(operation, _whole_body(request))
    if len(translated.body) > gateway.body_bytes_max:
        raise too_large(gateway.body_bytes_max)
    target, default = translated.target, gateway.directory.settings.default_model
    peek = body_members.read_body(target, translated.body, b"application/json", headers.model, default)
    entry = gateway.directory.names.resolve_tagged(tenant, peek.model)
    if target.dialect not in entry.dialects:
        raise unsupported_dialect()
    if translated.action == "unload":
        _reply(gateway, client, head, ReplyConverter(translated, entry.name, _timestamp, dict).loaded("unload"))
        return None
    salt = cache_salt(tenant.name) if entry.takes_cache_salt else None
    asks_usage = entry.takes_stream_options
    policies = gateway.directory.policies
    policy = None if policies is None else policies.find(tenant, entry, peek.model)
    edited = body_members.edit_body(
        target, peek, entry.served_name, salt, entry.lora, include_usage=asks_usage, policy=policy
    )
    body = _counted(gateway, request.body, edited)
    deadline_s = now_s + min(entry.queue.wait_seconds_max, headers.wait_s)
    priority, stream = min(tenant.priority_max, headers.priority), translated.stream
    call = Call(client.request_id, tenant.name, entry.name, now_s, deadline_s, priority, len(body), stream, "ollama")
    ollama_call = OllamaCall(call, gateway, client, head, target, entry, body, translated)
    if policy is not None:
        ollama_call.apply_checks(policy)
    ollama_call.counts_tokens = stream and target.usage and not asks_usage
    return ollama_call


def _whole_body(request: Request) -> bytes:
    body = request.body
    if len(body) > ollama_requests.BODY_BYTES_MAX:
        raise translated_too_large(ollama_requests.BODY_BYTES_MAX)
    if isinstance(body, bytes):
        return body
    if not isinstance(body, ChunkedBody):
        raise TypeError("only forms are forwarded while they arrive")
    return body.join()


def _counted(gateway: GatewayContext, received: Body, edited: Body) -> Body:
    """Return a translated body that is counted with its own size: a large one in the budget, as it is here, a small one
    by dispatch while it is queued. The received body is dropped. Raises CallError 503 if there is no room for it.
    """
    body = edited if isinstance(edited, bytes) else b"".join(edited.parts)
    before = received if isinstance(received, ChunkedBody) else None
    if len(body) <= LARGE_BYTES:
        gateway.discard(before)
        return body
    out = ChunkedBody()
    out.parts.append(body)
    out.size = len(body)
    if not gateway.room.exchange(before, out):
        raise out_of_memory()
    gateway.discard(before)
    return out


def _reply(gateway: GatewayContext, client: Connection, head: Head, document: bytes) -> None:
    """Answer a request that needs no engine."""
    close = not head.keep_alive or gateway.closing
    client.write(
        responses.render_response(200, document, client.id_bytes, close=close, more=client.cors, kind=_JSON[14:-2])
    )
    client.answered(close=close)


def _timestamp() -> str:
    return format_time(time.time())


def _nanoseconds(begin_s: float, end_s: float) -> int:
    return max(0, int((end_s - begin_s) * 1e9))


class OllamaCall(ProxiedCall):
    """A Call of a client of Ollama's API."""

    __slots__ = ("_relayed", "_translated")

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, operation: Operation,
        entry: ModelEntry, body: Body, translated: ollama_requests.Translated,
    ) -> None:  # fmt: skip
        super().__init__(call, gateway, client, head, operation, entry, body)
        self._translated = translated
        self._relayed: TranslatedAnswer | None = None
        """The relayed response, once committed."""
        lines = [line for line in self._upwards.splitlines(keepends=True) if not line.startswith(_REPLACED)]
        self._upwards = b"content-type: application/json\r\n" + b"".join(lines)

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
            self._client.write(self._translated_head(_JSON, len(document)) + document)
        self._end(Outcome.COMPLETED, "200")
        self._client.answered(close=self._close)

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
        if relayed.deferred:
            kind = _LINES if self.call.stream and self._response.status < 300 else _JSON
            rest = self._translated_head(kind, len(rest)) + rest
        self._client.write(rest)
        self._finish(self._response.status, self._walker.tail())

    def _commit(self, data: bytes) -> None:
        """The first body byte, or an empty body: from here on the response is this engine's."""
        engine = self.engine
        self.call.first_byte_s = self._gateway.clock()
        relayed = TranslatedAnswer(
            self._response, self._walker, self._converter(), framed=self._framed, early=self._early
        )
        self._answer = self._relayed = relayed
        self._close = self._close or self._gateway.closing or not (relayed.deferred or self._framed)
        if self.counts_tokens:
            self.call.tokens_out = token_usage.count_tokens(data)
        out = relayed.shape(data)
        if not relayed.deferred and not self._early:
            out = self._translated_head(_LINES, None) + out
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
                200, _LINES, self._client.id_bytes, length=None, chunked=self._framed, close=self._close, more=more
            )
        self._client.write(out + self._frame(content))

    def _translated_head(self, fields: bytes, length: int | None) -> bytes:
        more = b"server-timing: %b\r\n%b" % (self._timing(), self._client.cors)
        if self.call.cold:
            more += COLD
        status = self._response.status or 200
        chunked = length is None and self._framed
        return responses.render_head(
            status, fields, self._client.id_bytes, length=length, chunked=chunked, close=self._close, more=more
        )

    def _converter(self) -> ReplyConverter:
        durations: Callable[[], dict[str, int]] = self._durations
        return ReplyConverter(self._translated, self.call.model, _timestamp, durations)

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
