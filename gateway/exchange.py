"""One Call in the shell: from a Request to its Outcome, between one client connection and one engine at a time.

Owns what the client has been told so far, and the Call's clocks. Promises: the client gets one answer or one error; the
first body byte of an engine's answer is the commit point: before it the Call may move, after it never; a stream
that breaks is told so between two events and then ends without its last chunk, never with `[DONE]`; whoever leaves, the
engine is let go of at once. It decides nothing about queues and Slots: dispatch does, and is told everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from autoscaler.contract import ModelEntry
from gateway import admission, errors, render, rewrite, sse, usage
from gateway.answer import Answer
from gateway.call import Call, Outcome
from gateway.dialects import Operation
from gateway.errors import CallError
from gateway.head import Request
from gateway.upstream import EngineConnection, Loss
from gateway.walker import LAST_CHUNK, BodyWalker, ResponseHead

if TYPE_CHECKING:
    from gateway.edge import Connection
    from gateway.front import Front

PARKED, SENT, RELAYING, ENDED = range(4)
"""Waits for a grant; is with an engine that has answered nothing; is being answered (committed); has its Outcome."""

BREATH_S = 0.05
"""Before a Call moves off an engine that broke its connection. A process that is killed may end connections before it
stops listening: the one move would be lost on it. By now it refuses, or Routes have told."""

Reason = Literal["connect", "reset", "busy", "timeout"]

_NO_HEAD = ResponseHead(0, False, 0, False, b"", b"")
_NO_BODY = BodyWalker(_NO_HEAD)
_NO_ANSWER = Answer(_NO_HEAD, _NO_BODY, framed=False, drop_usage=False)


def admit(front: Front, client: Connection, request: Request, operation: Operation, now_s: float) -> Exchange:
    """The Call that a Request asks for, not yet known to dispatch. Raises CallError."""
    tenant = front.tenant(request)
    headers = request.headers
    peek = rewrite.read(operation, request.body, headers.get(b"content-type", b""), admission.header_model(request))
    entry = front.directory.resolve(tenant, peek.model)
    if operation.dialect not in entry.dialects:
        raise errors.invalid_request("this model does not speak the dialect of this path", param="model")
    body = rewrite.edit(operation, peek, entry.served_name)
    call = Call(
        id=client.request_id,
        tenant=tenant.name,
        model=entry.name,
        arrived_s=now_s,
        deadline_s=admission.preferences(request, now_s, entry.queue.wait_seconds_max).deadline_s,
        priority=admission.priority(request, tenant.priority_max),
        body_bytes=len(body),
        stream=peek.stream,
        dialect=operation.dialect,
    )
    drop_usage = operation.usage and peek.stream and not peek.wants_usage
    return Exchange(front, client, request, call, operation=operation, entry=entry, body=body, drop_usage=drop_usage)


class Exchange:
    """The Sink of its engine's response (`gateway.upstream`)."""

    __slots__ = (
        "_alive_s", "_answer", "_body", "_breath", "_client", "_close", "_drop_usage", "_early", "_entry",
        "_first_byte_s", "_framed", "_front", "_head", "_moved", "_operation", "_request", "_sent_s", "_state",
        "_told_s", "_walker", "_write", "call", "engine",
    )  # fmt: skip

    def __init__(
        self, front: Front, client: Connection, request: Request, call: Call,
        *, operation: Operation, entry: ModelEntry, body: bytes, drop_usage: bool,
    ) -> None:  # fmt: skip
        self._front = front
        self._client = client
        self._write = client.write
        self._request = request
        request.body = b""  # the edited one is what is kept
        self._operation = operation
        self._entry = entry
        self._body = body
        self._drop_usage = drop_usage
        self.call = call
        call.exchange = self
        self.engine: EngineConnection | None = None
        self._breath: asyncio.TimerHandle | None = None
        """The Call is about to move."""
        self._state = PARKED
        self._framed = request.minor == 1
        """What we frame ourselves goes out in chunks; else (HTTP/1.0) bare, and the end is the close."""
        self._close = not request.keep_alive or front.closing
        self._early = False
        """The head went out while the Call was parked."""
        self._told_s = call.arrived_s
        """When a parked stream last heard something."""
        self._head = _NO_HEAD
        self._walker = _NO_BODY
        self._answer = _NO_ANSWER
        """What the engine's bytes become, once committed."""
        self._moved = False
        """Bytes came since the last sweep."""
        self._alive_s = self._sent_s = self._first_byte_s = 0.0

    # --- what dispatch says ----------------------------------------------------------------------------------------

    def granted(self, address: str) -> None:
        """A Slot is ours: the request goes out."""
        self._state = SENT
        self._sent_s = 0.0
        request, call = self._request, self.call
        trace = admission.traceparent(request)
        try:
            head = admission.upstream_head(
                request, self._operation, address, len(self._body), call.id, traceparent=trace
            )
        except CallError as error:
            self._refuse(error)
            return
        single = call.stream and self._entry.closes_after_stream
        self._front.upstreams.send(address, self, (head, self._body), single=single)

    def refused(self, error: CallError) -> None:
        """Dispatch has ended the Call with an error."""
        self._end(Outcome.FAILED, error.code)
        self._say(error)

    # --- what the engine says (Sink) -------------------------------------------------------------------------------

    def engine_sent(self) -> None:
        """The request is on its way."""
        self._sent_s = self._alive_s = self._front.clock()

    def engine_head(self, head: ResponseHead, walker: BodyWalker) -> Callable[[bytes], None] | None:
        """A head does not commit us yet; one that says `not now` or `elsewhere` never will."""
        if head.status in (429, 503) or 300 <= head.status < 400:
            self._bounce("busy" if head.status >= 400 else "reset")
            return None
        self._head = head
        self._walker = walker
        return self._commit

    def engine_end(self) -> None:
        """The engine's answer is whole."""
        if self._state == SENT:
            self._commit(b"")
        head, walker = self._head, self._walker
        if self._answer.cut_off:
            self._break(errors.upstream_error())
            return
        rest = self._answer.ending()
        if rest:
            self._write(rest)
        failed = head.status >= 400
        tokens_in, tokens_out = (0, 0) if failed else usage.tokens(walker.tail())
        outcome = Outcome.FAILED if failed else Outcome.COMPLETED
        now_s = self._end(outcome, str(head.status), tokens_in, tokens_out)
        effects = self._front.dispatch.finish(self.call, now_s, outcome, tokens_in, tokens_out)
        self._front.perform(effects)
        self._client.answered(close=self._close)

    def engine_lost(self, loss: Loss) -> None:
        """Before the commit point the Call may move; after it the client is told as well as its protocol allows."""
        if self._state != SENT:
            self._break(errors.upstream_error())
        elif loss == "connect":
            self._bounce("connect")
        else:
            self._breath = asyncio.get_running_loop().call_later(BREATH_S, self._bounce, "reset")

    # --- what the client does --------------------------------------------------------------------------------------

    def client_left(self) -> None:
        """Nobody waits for the answer any more."""
        self._let_go()
        now_s = self._end(Outcome.ABANDONED, "client_closed")
        self._front.perform(self._front.dispatch.leave(self.call, now_s))

    def pause(self) -> None:
        """The client does not keep up: neither shall the engine."""
        if self.engine is not None:
            self.engine.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.engine is not None:
            self.engine.resume()

    # --- the clocks ------------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Every 100 ms or so: has one of the Call's clocks run out?"""
        state, clocks, stream = self._state, self._entry.clocks, self.call.stream
        if state == PARKED:
            self._sweep_parked(now_s)
        elif state == SENT:
            limit_s = clocks.first_byte_seconds_max if stream else clocks.response_seconds_max
            if self._sent_s and now_s - self._sent_s > limit_s:
                self._bounce("timeout")
        elif state == RELAYING:
            if stream and (self._moved or self._client.paused):
                self._moved = False
                self._alive_s = now_s
            elif now_s - self._alive_s > (clocks.stall_seconds_max if stream else clocks.response_seconds_max):
                self._break(errors.upstream_timeout())

    def cut(self) -> None:
        """The gateway stops and the grace is over."""
        if self._state == RELAYING:
            self._break(errors.shutting_down())
        elif self._state != ENDED:
            self._refuse(errors.shutting_down())

    def _sweep_parked(self, now_s: float) -> None:
        settings = self._front.directory.settings
        if self.call.stream:
            if 0 < settings.keepalive_seconds <= now_s - self._told_s:
                self._told_s = now_s
                self._say_waiting(now_s)
        elif 0 < settings.silent_seconds_max <= now_s - self.call.arrived_s:
            expected_s = self._front.dispatch.wait_note(self.call, now_s)[1]
            self._refuse(errors.model_starting(expected_s, expected_s or 1.0))

    def _say_waiting(self, now_s: float) -> None:
        """The early head, then a comment each time (interfaces, section 3, Cold Calls)."""
        client, out = self._client, b""
        if not self._early:
            self._early = True
            self._close = self._close or not self._framed
            out = render.early_head(client.id_bytes, chunked=self._framed, close=self._close, more=client.cors)
        position, expected_s = self._front.dispatch.wait_note(self.call, now_s)
        self._write(out + self._frame(sse.waiting(position, expected_s, self.call.dialect)))

    # --- the body --------------------------------------------------------------------------------------------------

    def _commit(self, data: bytes) -> None:
        """The first body byte, or an empty body: from here on the answer is this engine's."""
        head, engine, early = self._head, self.engine, self._early
        self._first_byte_s = self._front.clock()
        self._answer = answer = Answer(
            head,
            self._walker,
            framed=self._framed,
            drop_usage=self._drop_usage,
            early=early,
            note=b": server-timing %b\n\n" % self._timing() if early else b"",
            dialect=self.call.dialect,
        )
        if self._front.closing or (answer.length is None and not answer.chunked):
            self._close = True
        out = answer.take(data)
        if not early:
            out = self._relayed_head(head, answer) + out
        self._state = RELAYING  # not before: an odd first byte still lets the Call move
        self._moved = True
        self._body = b""
        if engine is not None:
            engine.take = self._relay
            if self._client.paused:
                engine.pause()
        self._write(out)

    def _relay(self, data: bytes) -> None:
        """The hot path: one piece of the body, straight into the client's transport."""
        self._moved = True
        answer = self._answer
        out = answer.shape(data)
        if self._walker.ended:
            out += answer.ending()
        if out:
            self._write(out)

    def _frame(self, content: bytes) -> bytes:
        return sse.chunk(content) if self._framed else content

    def _relayed_head(self, head: ResponseHead, answer: Answer) -> bytes:
        more = self._client.cors
        if self.call.cold:
            more += b"x-pilotlight-cold: 1\r\n"
        return render.relayed_head(
            head,
            self._client.id_bytes,
            self._timing(),
            length=answer.length,
            chunked=answer.chunked,
            close=self._close,
            more=more,
        )

    def _timing(self) -> bytes:
        call = self.call
        phases_ms = self._front.dispatch.phases_ms(call.model) if call.cold else {}
        queued_s = (call.granted_s or call.arrived_s) - call.arrived_s
        return render.server_timing(queued_s, self._first_byte_s - self._sent_s, phases_ms)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        if self.engine is not None:
            self.engine.let_go()
        if self._breath is not None:
            self._breath.cancel()
            self._breath = None

    def _bounce(self, reason: Reason) -> None:
        """Nothing of an answer came through: dispatch says where to, or that it was enough."""
        self._let_go()
        self._state = PARKED
        front = self._front
        front.telemetry.retried(self.call.model, reason)
        front.perform(front.dispatch.bounce(self.call, front.clock(), reason))

    def _refuse(self, error: CallError) -> None:
        """We ourselves end a Call that nothing was answered to."""
        self._let_go()
        now_s = self._end(Outcome.FAILED, error.code)
        effects = self._front.dispatch.finish(self.call, now_s, Outcome.FAILED)
        self._front.perform(effects)
        self._say(error)

    def _break(self, error: CallError) -> None:
        """The answer breaks off after the commit point. No client may take it for whole."""
        self._let_go()
        told = self._answer.whole
        if told:
            self._write(self._frame(errors.event(error, self.call.dialect)))
        now_s = self._end(Outcome.FAILED, error.code)
        effects = self._front.dispatch.finish(self.call, now_s, Outcome.FAILED)
        self._front.perform(effects)
        self._client.broke_off(told=told or self._framed)

    def _say(self, error: CallError) -> None:
        """The one error of a Call, as an answer or, after an early head, as the last event of the stream."""
        if self._early:
            event = self._frame(errors.event(error, self.call.dialect))
            self._write(event + LAST_CHUNK if self._framed else event)
        else:
            self._client.say_error(error, self.call.dialect)
        self._client.answered(close=self._close or error.close)

    def _end(self, outcome: Outcome, code: str, tokens_in: int = 0, tokens_out: int = 0) -> float:
        """The Call has its Outcome; told once. Gives the time."""
        front, call = self._front, self.call
        self._state = ENDED
        call.exchange = None  # a ring of objects would wait for the garbage collector
        now_s = front.clock()
        start_s = sum(front.dispatch.phases_ms(call.model).values()) / 1e3 if call.cold else 0.0
        front.telemetry.ended(
            call,
            outcome,
            code,
            now_s,
            sent_s=self._sent_s,
            first_byte_s=self._first_byte_s,
            start_s=start_s,
            tokens_in=tokens_in,
            tokens_out=tokens_out,
        )
        front.forget(self)
        return now_s
