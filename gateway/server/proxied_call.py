"""A request in progress, from admission to its outcome: relays between one client connection and one engine at a time.

Tracks what has been sent to the client, and the request's timeouts. The client gets one response or one error. The
first body byte of an engine's response is the commit point: only before it may the request move to another engine. If
a stream breaks between two events, the client gets an error event. A broken stream ends without its last chunk, never
with `[DONE]`. If the client disconnects, the engine's connection is aborted at once. Dispatch decides about queues and
slots and gets every event.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

from msgspec import Raw

from autoscaler.contract import ModelEntry, PolicyCheck
from gateway.dispatch.call import Call, Outcome
from gateway.dispatch.model_dispatcher import RETRY_AFTER_S
from gateway.errors import (
    CallError,
    deadline_reached,
    render_error_event,
    too_many_checks,
    unchecked_answer,
    unchecked_stream,
    upstream_error,
    upstream_timeout,
)
from gateway.http import responses, sse_relay
from gateway.http.body_buffers import Body, StreamingBody
from gateway.http.request_head import Head, Request
from gateway.http.response_reader import LAST_CHUNK, BodyWalker, ResponseHead, extract_tail
from gateway.policy import external_checks
from gateway.policy.request_policy import Policy
from gateway.request import body_members
from gateway.request.api_routes import Operation
from gateway.request.headers import get_call_headers, upstream_head
from gateway.server.response_relay import Answer
from gateway.upstream import external_check_client, token_usage
from gateway.upstream.connection import Loss, Sink

if TYPE_CHECKING:
    from gateway.server.connection import Connection
    from gateway.server.context import GatewayContext

PARKED: Final = 0
SENT: Final = 1
RELAYING: Final = 2
ENDED: Final = 3
CHECKING: Final = 4
BUFFERING: Final = 5
"""Waiting for a grant; sent to an engine that has not responded; being relayed (committed); ended; waiting for an
external check of the request or of its answer; receiving the rest of a form whose engine was released.
"""

GROWING_S_MAX = 3.0
"""An engine that gets a form while it arrives is released if it does not have all of it after this time. The form is
then received without an engine, so that a slow client does not occupy a slot.
"""

BREATHS_S = (0.05, 1.0)  # not Final: code that mypyc compiled takes a constant tuple of floats for unset
"""Delay before the first and the second move off an engine that broke its connection.

A killed engine may close connections before it stops listening; after the first delay, it refuses new ones. A second
move requires that Routes report a planned shutdown of one of the two engines; the second delay gives time for that.
"""

Reason = Literal["connect", "reset", "busy", "timeout", "distrusted"]

COLD: Final = b"x-pilotlight-cold: 1\r\n"
"""The header line of responses to requests that waited for a start."""
_CODES: Final = {status: str(status) for status in range(200, 600)}

_NO_HEAD: Final = ResponseHead(0, False, 0, False, b"", b"")
_NO_BODY: Final = BodyWalker(_NO_HEAD)
_NO_ANSWER: Final = Answer(_NO_HEAD, _NO_BODY, framed=False, drop_usage=False)


class ProxiedCall(Sink):
    """A Call between its client and an engine; the Sink of the engine's response (`gateway.upstream.connection`)."""

    __slots__ = (
        "_alive_s", "_answer", "_body", "_breath", "_check", "_check_content", "_client", "_close", "_early", "_entry",
        "_framed", "_gateway", "_held", "_held_bytes", "_moved", "_operation", "_response", "_stage",
        "_stream_event_s", "_upwards", "_walker", "call", "counts_tokens", "drop_usage", "policy",
    )  # fmt: skip

    def __init__(  # noqa: PLR0917  as Call.__init__
        self, call: Call, gateway: GatewayContext, client: Connection, head: Head, operation: Operation,
        entry: ModelEntry, body: Body,
    ) -> None:  # fmt: skip
        super().__init__()
        self._moved = False  # bytes arrived since the last sweep; shares a cache line with the next three
        self._walker = _NO_BODY
        self._answer = _NO_ANSWER  # the relayed response, once committed
        self.call = call
        self._gateway = gateway
        self._client = client
        self._operation = operation
        self._entry = entry
        self._upwards = get_call_headers(head).upwards
        self._body: Body = body
        self.drop_usage = False  # the gateway requested the usage chunk, not the client
        self.counts_tokens = False  # the usage of a stream is not requested: its tokens are counted as they pass
        self._breath: asyncio.TimerHandle | None = None  # pending move
        self._stage = PARKED
        self._framed = head.minor == 1
        """Whether the gateway's own content is sent in chunks. HTTP/1.0: unframed, ended by the close."""
        self._close = not head.keep_alive or gateway.closing or isinstance(body, StreamingBody)
        self._early = False  # the head was sent while queued
        self._stream_event_s = self.call.arrived_s
        """When the last keep-alive of a queued stream was sent."""
        self._response = _NO_HEAD
        self._alive_s = 0.0
        self.policy: Policy | None = None
        """The policy with external checks; None if there are no checks."""
        self._check: asyncio.Task[None] | None = None
        """The running external check."""
        self._check_content = b""
        """The message of the check of the request, until it starts."""
        self._held: list[bytes] | None = None
        """The answer so far, if it is checked when it is complete."""
        self._held_bytes = 0

    @property
    def sent_s(self) -> float:
        """See Sink."""
        return self.call.sent_s

    @property
    def waits(self) -> bool:
        """Whether it waits for a grant."""
        return self._stage == PARKED

    # --- called by dispatch ----------------------------------------------------------------------------------------

    def granted(self, address: str) -> None:
        """A slot was granted: send the request."""
        self._stage = SENT
        self.call.sent_s = 0.0
        body = self._body
        try:
            pool = self._gateway.upstreams.to(address)
            head = upstream_head(self._upwards, self._operation, pool.authority, len(body), self._client.id_bytes)
        except CallError as error:
            self._refuse(error)
            return
        except ValueError:  # invalid address in Routes, perhaps from another version
            self._refuse(upstream_error())
            return
        single = self.call.stream and self._entry.closes_after_stream
        pool.send(self, (head, body), single=single)

    def refused(self, error: CallError) -> None:
        """Dispatch has ended the request with an error."""
        self._end(Outcome.FAILED, error.code)
        self._say(error)

    # --- called by the engine's connection (Sink) ------------------------------------------------------------------

    def engine_sent(self) -> None:
        """The request has been sent."""
        self.call.sent_s = self._alive_s = self._gateway.clock()

    def engine_head(self, head: ResponseHead, walker: BodyWalker) -> Callable[[bytes], None] | None:
        """Take the head, which does not commit yet; a busy response or a redirect moves the request."""
        if head.elsewhere:
            self._bounce("busy" if head.status >= 400 else "reset")
            return None
        self._response = head
        self._walker = walker
        if self._held is not None:
            self._held = []
            self._count_held(0)
            return self._hold
        return self._commit

    def engine_end(self) -> None:
        """The engine's response is complete."""
        if self._held is not None:
            self._end_held(self._held)
            return
        if self._stage == SENT:
            if self._walker.until_close:  # close-delimited body without a byte: broken
                self.engine_lost("reset")
                return
            self._commit(b"")
        if self._answer.cut_off:
            self._break(upstream_error())
            return
        rest = self._answer.ending()
        if rest:
            self._client.write(rest)
        self._finish(self._response.status, self._walker.tail())

    def engine_whole(self, head: ResponseHead, body: bytes) -> None:
        """Forward a response that arrived in one piece."""
        if self._held is not None and not head.elsewhere:
            self._check_answer(head, body)
            return
        if self._early or head.elsewhere:
            walker = BodyWalker(head)
            if self.engine_head(head, walker) is not None:
                self._commit(body)
                self.engine_end()
            return
        gateway = self._gateway
        self.call.first_byte_s = gateway.clock()
        self._close = self._close or gateway.closing
        out = self._relayed_head(head, length=head.length, chunked=False) + body
        self._stage = RELAYING
        self._client.write(out)
        self._finish(head.status, extract_tail(body))

    def _finish(self, status: int, tail: bytes) -> None:
        """The client has the whole response; `tail` holds the ends of its body."""
        if status < 400:
            tokens_in, tokens_out = token_usage.parse_token_usage(tail)
            if tokens_out or not self.counts_tokens:
                self.call.tokens_in, self.call.tokens_out = tokens_in, tokens_out
            self._end(Outcome.COMPLETED, _CODES[status])
        else:
            self._end(Outcome.FAILED, _CODES[status])
        self._client.answered(close=self._close)

    def engine_failed(self, error: Exception) -> None:
        """An exception while the response was handled: the client gets an error if the protocol allows it."""
        ended = self._stage == ENDED
        self._gateway.fail_faulty(self.call, error)
        if ended and self._client.proxied_call is self:  # the exception prevented the end of the response
            self._client.broke_off(is_reported=False)

    def engine_lost(self, loss: Loss) -> None:
        """Before the commit point the request may move; after it the client gets an error if the protocol allows it."""
        if self._stage != SENT:
            self._break(upstream_error())
        elif loss == "connect":
            self._bounce("connect")
        else:
            breath_s = BREATHS_S[self.call.fled is not None]
            reason: Reason = "distrusted" if loss == "distrusted" else "reset"
            self._breath = asyncio.get_running_loop().call_later(breath_s, self._bounce, reason)

    # --- external checks -------------------------------------------------------------------------------------------

    def apply_checks(self, policy: Policy, *, is_form: bool = False, body: Body | None = None) -> None:
        """Prepare the external checks of a policy. Raises CallError if the request cannot be checked. `body`: what they
        check, unless it is the body for the engine.
        """
        if not (policy.request_checks or policy.answer_checks):
            return
        self.policy = policy
        try:
            if self.call.stream and any(check.rejects_streams for check in policy.answer_checks):
                raise unchecked_stream()
            if policy.request_checks:
                checked = self._body if body is None else body
                content = external_checks.NO_BODY if is_form else external_checks.read_request_body(checked)
                self._check_content = self._message("request", content)
        except CallError:
            self._drop_body()
            raise
        if policy.answer_checks and not self.call.stream:
            self._held = []

    def check_request(self) -> bool:
        """Start the check of the request; False if there is none."""
        content, self._check_content = self._check_content, b""
        if content and self.policy is not None:
            self._start_check("request", self.policy.request_checks, content)
        return bool(content)

    def checked(self, error: CallError | None) -> None:
        """Continue after a check, unless it has rejected the request or the answer."""
        self._check = None
        if self._stage != CHECKING:
            return
        if error is not None:
            self._refuse(error)
        elif self._response is _NO_HEAD:
            self._stage = PARKED
            self._gateway.perform(self._gateway.dispatch.arrive(self.call, self._gateway.clock()))
        else:
            self._deliver()

    def _start_check(self, kind: str, checks: tuple[PolicyCheck, ...], content: bytes) -> None:
        self._stage = CHECKING
        gateway = self._gateway
        self._check = gateway.checks.start(kind, self.call.tenant, checks, content, partial(gateway.checked, self))
        if self._check is None:
            self._refuse(too_many_checks())

    def _message(self, kind: str, body: Raw) -> bytes:
        return self._render_check(kind, self._operation.engine_path, body)

    def _render_check(self, kind: str, path: bytes, body: Raw) -> bytes:
        call = self.call
        message = external_checks.CheckMessage(kind, call.model, call.tenant, call.id, path.decode(), body)
        return external_checks.render_check(message)

    def _hold(self, data: bytes) -> None:
        """Keep a piece of an answer that is checked when it is complete."""
        self._moved = True
        held = self._held
        if held is None:
            return
        if self._stage == SENT:
            self._stage = RELAYING  # from here on the request does not move
            self.call.first_byte_s = self._gateway.clock()
            self._drop_body()
        content = self._walker.strip(data)
        held.append(content)
        self._count_held(self._held_bytes + len(content))
        if self._held_bytes > external_checks.CONTENT_BYTES_MAX:
            self._break(unchecked_answer())
        elif self._gateway.checks.held_bytes > external_check_client.HELD_BYTES_MAX:
            self._break(too_many_checks())

    def _count_held(self, size: int) -> None:
        """Account for this size of the held answer."""
        self._gateway.checks.held_bytes += size - self._held_bytes
        self._held_bytes = size

    def _end_held(self, held: list[bytes]) -> None:
        """The answer is complete."""
        body, until_close = b"".join(held), self._walker.until_close
        if until_close and self._stage == SENT:  # close-delimited body without a byte: broken
            self.engine_lost("reset")
        elif until_close and self._response.content_type.startswith(b"application/json") and not body.endswith(b"}"):
            self._break(upstream_error())
        else:
            self._check_answer(self._response, body)

    def _check_answer(self, head: ResponseHead, body: bytes) -> None:
        """Check a complete answer. Errors of the engine are not checked."""
        if self._stage == SENT:
            self.call.first_byte_s = self._gateway.clock()
            self._drop_body()
        self._held = [body]
        self._response = head._replace(chunked=False, length=len(body))
        if head.status >= 300 or self.policy is None:
            self._deliver()
        elif len(body) > external_checks.CONTENT_BYTES_MAX:
            self._break(unchecked_answer())
        else:
            content = self._message("answer", external_checks.read_answer_body(head, body))
            self._start_check("answer", self.policy.answer_checks, content)

    def _deliver(self) -> None:
        """Send the held answer to the client."""
        held, self._held = self._held, None
        self._stage = SENT
        self.engine_whole(self._response, b"".join(held or ()))

    # --- called by the client's connection -------------------------------------------------------------------------

    def client_left(self) -> None:
        """The client has disconnected."""
        self._let_go()
        self._end(Outcome.ABANDONED, "client_closed")

    def more(self) -> None:
        """More of a streaming body may be forwarded."""
        if self.engine is not None:
            self.engine.send_more()

    def whole(self, request: Request, growing: StreamingBody) -> bool:
        """A streaming body is complete; False if it is no longer needed. Raises CallError if it is invalid."""
        if self._stage == ENDED:
            return False
        headers = get_call_headers(request.head)
        default = self._gateway.directory.settings.default_model
        peek = body_members.read_body(self._operation, request.body, headers.content_type, headers.model, default)
        growing.end()
        if self._stage == RELAYING:  # an engine that responds while it reads still needs the rest
            self._body = request.body
        else:
            self.call.stream, self.call.sent_s = peek.stream, self.call.sent_s and self._gateway.clock()
            self._close = self._early or not request.head.keep_alive or self._gateway.closing
            self._body = body_members.edit_body(self._operation, peek, self._entry.served_name)
            if self.engine is not None:
                self.engine.single |= self.call.stream and self._entry.closes_after_stream
        self.more()
        return True

    def arrive_again(self) -> None:
        """The body of a request whose engine was released is complete: dispatch it like a new request."""
        if self._stage != BUFFERING:
            return
        call, now_s = self.call, self._gateway.clock()
        call.arrived_s, call.deadline_s = now_s, now_s + call.deadline_s - call.arrived_s
        self._stage = PARKED
        self._gateway.perform(self._gateway.dispatch.arrive(call, now_s))

    def pause(self) -> None:
        """The client does not keep up: pause the engine."""
        if self.engine is not None:
            self.engine.pause()

    def resume(self) -> None:
        """The client has caught up."""
        if self.engine is not None:
            self.engine.resume()

    # --- timeouts --------------------------------------------------------------------------------------------------

    def sweep(self, now_s: float) -> None:
        """Check the request's timeouts; called about every `CALLS_SWEEP_S`."""
        stage, clocks = self._stage, self._entry.clocks
        if stage == PARKED:
            self._sweep_parked(now_s)
        elif stage == SENT:
            is_growing = isinstance(self._body, StreamingBody)
            limit_s = clocks.first_byte_seconds_max if self.call.stream else clocks.response_seconds_max
            if self.call.sent_s and now_s - self.call.sent_s > (GROWING_S_MAX if is_growing else limit_s):
                if is_growing:
                    self._release_engine(now_s)
                else:
                    self._bounce("timeout")
            elif self.call.stream and self._is_silent(now_s):
                self._keep_alive(now_s, sse_relay.render_keepalive(self.call.dialect))
        elif stage in (CHECKING, BUFFERING):
            if self.call.stream:
                if self._is_silent(now_s):
                    self._keep_alive(now_s, sse_relay.render_keepalive(self.call.dialect))
            elif stage == CHECKING and self._response is _NO_HEAD and self._waits_too_long(now_s):
                self._refuse(deadline_reached(RETRY_AFTER_S))
        elif stage == RELAYING:
            moved, self._moved = self._moved, False
            paused = self.call.stream and self._client.paused  # then no byte is expected
            if moved or paused:
                self._gateway.perform(self._gateway.dispatch.heard(self.call, now_s))
            if paused or (self.call.stream and moved):
                self._alive_s = self._stream_event_s = now_s
                return
            limit_s = clocks.stall_seconds_max if self.call.stream else clocks.response_seconds_max
            if now_s - self._alive_s > limit_s:
                self._break(upstream_timeout())
            elif self.call.stream and self._answer.whole and self._is_silent(now_s):
                self._stream_event_s = now_s
                self._client.write(self._answer.frame(sse_relay.render_keepalive(self.call.dialect)))

    def fail(self, error: CallError) -> None:
        """End it now: the grace period of a shutdown is over, or the rest of its body cannot be read."""
        if self._stage == RELAYING:
            self._break(error)
        elif self._stage != ENDED:
            self._refuse(error)

    def _sweep_parked(self, now_s: float) -> None:
        if self.call.stream:
            if self._is_silent(now_s):
                position, expected_s = self._gateway.dispatch.wait_note(self.call, now_s)
                self._keep_alive(now_s, sse_relay.render_waiting_event(position, expected_s, self.call.dialect))
        elif self._waits_too_long(now_s):
            self._gateway.perform(self._gateway.dispatch.give_up(self.call, now_s))

    def _waits_too_long(self, now_s: float) -> bool:
        """Return whether a request without streaming has waited for a slot for `silentSecondsMax`."""
        return 0 < self._gateway.directory.settings.silent_seconds_max <= now_s - self.call.arrived_s

    def _is_silent(self, now_s: float) -> bool:
        """Return whether a keep-alive is due: proxies close connections that are silent, by default after 60 s."""
        return 0 < self._gateway.directory.settings.keepalive_seconds <= now_s - self._stream_event_s

    def _keep_alive(self, now_s: float, content: bytes) -> None:
        """Send a keep-alive before the response, the first time after the early head (interfaces, section 3)."""
        self._stream_event_s = now_s
        client, out = self._client, b""
        if not self._early:
            self._early = True
            self._close = self._close or not self._framed
            more = client.cors + (COLD if self.call.cold else b"")
            out = responses.early_head(client.id_bytes, chunked=self._framed, close=self._close, more=more)
        self._client.write(out + self._frame(content))

    # --- the body --------------------------------------------------------------------------------------------------

    def _commit(self, data: bytes) -> None:
        """The first body byte, or an empty body: from here on the response is this engine's."""
        head, engine, early = self._response, self.engine, self._early
        self.call.first_byte_s = self._gateway.clock()
        self._answer = answer = Answer(
            head,
            self._walker,
            framed=self._framed,
            drop_usage=self.drop_usage,
            early=early,
            note=b": server-timing %b\n" % self._timing() if early else b"",
            dialect=self.call.dialect,
        )
        if self._gateway.closing or (answer.length is None and not answer.chunked):
            self._close = True
        out = answer.take(data)
        if self.counts_tokens:
            self.call.tokens_out = token_usage.count_tokens(data)
        if not early:
            out = self._relayed_head(head, length=answer.length, chunked=answer.chunked) + out
        self._stage = RELAYING  # not earlier: after an irregular first byte the request may still move
        self._moved = True
        self._drop_body()
        if engine is not None:
            engine.take = self._relay_and_count if self.counts_tokens else self._relay
            if self._client.paused:
                engine.pause()
        self._client.write(out)

    def _relay(self, data: bytes) -> None:
        """Forward one piece of the body to the client's transport (hot path)."""
        self._moved = True
        answer = self._answer
        out = answer.shape(data)
        if self._walker.ended:
            out += answer.ending()
        if out:
            self._client.write(out)

    def _relay_and_count(self, data: bytes) -> None:
        """Forward one piece of a stream whose engine does not report its tokens."""
        self.call.tokens_out += token_usage.count_tokens(data)
        self._relay(data)

    def _frame(self, content: bytes) -> bytes:
        return sse_relay.encode_chunk(content) if self._framed else content

    def _relayed_head(self, head: ResponseHead, *, length: int | None, chunked: bool) -> bytes:
        more = b"server-timing: %b\r\n%b" % (self._timing(), self._client.cors)
        if self.call.cold:
            more += COLD
        return responses.render_head(
            head.status,
            head.fields,
            self._client.id_bytes,
            length=length,
            chunked=chunked,
            close=self._close,
            more=more,
        )

    def _timing(self) -> bytes:
        phases_ms = self._gateway.dispatch.phases_ms(self.call.model) if self.call.cold else {}
        queued_s = (self.call.granted_s or self.call.arrived_s) - self.call.arrived_s
        return responses.server_timing(queued_s, self.call.first_byte_s - self.call.sent_s, phases_ms)

    # --- ends ------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        if self.engine is not None:
            self.engine.let_go()
        if self._breath is not None:
            self._breath.cancel()
            self._breath = None
        if self._check is not None:
            self._check.cancel()
            self._check = None

    def _drop_body(self) -> None:
        """Drop the body, which will not be sent again."""
        body, self._body = self._body, b""
        self._gateway.discard(body)

    def _bounce(self, reason: Reason) -> None:
        """The engine gave no response: dispatch moves the request or rejects it."""
        self._let_go()
        self._stage = PARKED
        gateway = self._gateway
        gateway.telemetry.retried(self.call.model, reason)
        gateway.perform(gateway.dispatch.bounce(self.call, gateway.clock(), reason))

    def _release_engine(self, now_s: float) -> None:
        """The client is slow: let the engine go until all of the form has arrived."""
        self._let_go()
        self._stage = BUFFERING
        self._gateway.perform(self._gateway.dispatch.withdraw(self.call, now_s))

    def _refuse(self, error: CallError) -> None:
        """Fail a request without a response."""
        self._let_go()
        self._end(Outcome.FAILED, error.code)
        self._say(error)

    def _break(self, error: CallError) -> None:
        """Abort the response after the commit point. No client may take it for complete."""
        if self._held is not None:
            self._refuse(error)  # nothing was sent
            return
        self._let_go()
        is_reported = self._answer.whole
        if is_reported:
            self._client.write(self._answer.release() + self._frame(render_error_event(error, self.call.dialect)))
        self._end(Outcome.FAILED, error.code)
        self._client.broke_off(is_reported=is_reported or self._framed)

    def _say(self, error: CallError) -> None:
        """Send the request's one error, as a response or, after an early head, as the last event of the stream."""
        if self._early:
            event = self._frame(render_error_event(error, self.call.dialect))
            self._client.write(event + LAST_CHUNK if self._framed else event)
        else:
            self._client.say_error(error, self.call.dialect, close=self._close)
        self._client.answered(close=self._close or error.close)

    def _end(self, outcome: Outcome, code: str) -> None:
        """Record the outcome, once."""
        gateway = self._gateway
        self._stage = ENDED
        if self._held_bytes:
            self._count_held(0)
        now_s = gateway.clock()
        try:
            self._drop_body()  # the deadline heap may keep an ended Call for a while
            phases_ms = gateway.dispatch.phases_ms(self.call.model) if self.call.cold else {}
            start_s = (sum(phases_ms.values()) - phases_ms.get("decide", 0.0)) / 1e3
            gateway.telemetry.ended(self.call, outcome, code, now_s, start_s)
        finally:
            gateway.end(self, outcome, now_s)
