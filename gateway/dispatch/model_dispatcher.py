"""Dispatch of one model in one gateway: its requests, its queue and its share of the Routes.

Decides which requests are granted, queued, moved or rejected, and keeps the retry budget. Invariants: after every
public method no request waits while a slot that it may use is free, and nothing is granted after its deadline. Effects
are appended to a list that is passed in. `SharedCounters` is shared by all models of a gateway; apart from it a
dispatcher is independent of other models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from autoscaler.contract import ModelEntry, ModelName, QueueLimits, TenantName
from gateway import errors
from gateway.dispatch.call import Call, CallState, Outcome
from gateway.dispatch.effects import Effect, Grant, Refuse
from gateway.dispatch.fair_queue import DEFAULT_STEP, Deadlines, Parked, Queue, TenantQueue
from gateway.dispatch.memory_pressure import Pressure
from gateway.dispatch.reports import Accounts
from gateway.dispatch.routing_table import Routes
from gateway.dispatch.slots import Hold, ModelRoutes
from gateway.errors import MAX_RETRY_AFTER_S, CallError

RETRY_AFTER_S: Final = 1.0
"""Retry-After if no better value is known."""
PAUSED_RETRY_AFTER_S: Final = 60.0
RETRIES_PER_GRANT: Final = 0.1
RETRIES_MAX: Final = 10.0
"""The retry budget of a model: a token bucket, so that a broken model costs at most a tenth more."""

_LAST_WORDS: dict[str, Callable[[], CallError]] = {
    "connect": errors.upstream_error,
    "reset": errors.upstream_error,
    "timeout": errors.upstream_timeout,
    "distrusted": errors.engine_distrusted,
    "busy": lambda: errors.service_unavailable(
        "overloaded", "the engine accepts no more requests now; try again after the time in Retry-After", RETRY_AFTER_S
    ),
}
"""Errors for requests that cannot move."""

Bounce = Literal["connect", "reset", "busy", "timeout", "distrusted"]
"""How an engine failed before the commit point."""

_PARKED: Final = CallState.PARKED
_RUNNING: Final = CallState.RUNNING
_ENDED: Final = CallState.ENDED
_NO_ENTRY: Final = QueueLimits()


class SharedCounters:
    """State shared by the dispatchers of one gateway."""

    __slots__ = ("accounts", "deadlines", "edge", "listed", "parked", "pressure", "steps", "waiting")

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.deadlines = Deadlines()
        self.listed: list[TenantQueue] = []
        """Lines that had a request since the last report."""
        self.steps: dict[TenantName, int] = {}
        """Tenant -> the step of its line; DEFAULT_STEP if missing."""
        self.waiting = 0
        self.parked = Parked()
        self.pressure = Pressure.NONE
        self.edge = False
        """Whether the next report is due at once."""


class ModelDispatcher:
    """One model in this gateway."""

    __slots__ = (
        "_routes", "_tally", "closed", "entry", "faults", "in_transit", "name", "part", "queue", "retries", "running",
        "was_ready",
    )  # fmt: skip

    def __init__(self, name: ModelName, routes: Routes, tally: SharedCounters) -> None:
        self.name = name
        self.entry: ModelEntry | None = None
        self.queue = Queue(name, tally.parked)
        self.part: ModelRoutes = routes.of(name)
        self.running: set[Call] = set()
        """Its running requests. The counts of holds, lines and accounts are derived from them."""
        self.in_transit: Call | None = None
        """The request that is being moved, ended or admitted, so that an exception can be attributed to it."""
        self.retries = RETRIES_MAX
        self.closed = True
        """Whether nothing may be queued: the model is unknown, paused, rejected by the autoscaler, or faulty."""
        self.faults: set[str] = set()
        """Operations that raised an exception for this model and have not succeeded since."""
        self.was_ready = False
        self._routes = routes
        self._tally = tally

    def __repr__(self) -> str:
        return f"<ModelDispatcher {self.name} {self.queue.waiting} waiting, {len(self.running)} running>"

    @property
    def idle(self) -> bool:
        """Whether it has no request."""
        return not self.running and not self.queue.waiting

    @property
    def orphaned(self) -> bool:
        """Whether it can be dropped: neither catalogue nor Routes name it, and it has no request."""
        return self.entry is None and not self.part.holds and not self.part.named and self.idle

    # --- changes of catalogue and Routes --------------------------------------------------------------------

    def look(self, now_s: float, out: list[Effect]) -> None:
        """Catalogue or Routes have changed: reject requests that may no longer wait, grant what fits."""
        if self.entry is not None:
            clocks = self.entry.clocks
            self.part.silent_s_max = max(
                clocks.first_byte_seconds_max, clocks.stall_seconds_max, clocks.response_seconds_max
            )
        refusal = self.part.route.refusal
        self.closed = self.entry is None or self.entry.paused or refusal is not None or bool(self.faults)
        if self.was_ready and not self.part.ready:
            self._tally.accounts.cooled(self.name)
        self.was_ready = self.part.ready
        if self.closed:
            self.refuse_parked(self.refusal, now_s, out)
        else:
            self._refuse_hasty(now_s, out)
        self.settle(now_s, out)

    def refusal(self) -> CallError:
        """Return why it is closed."""
        if self.entry is None:
            return errors.model_not_found()
        if self.faults:
            return errors.model_faulty()
        why = self.part.route.refusal
        if why is None or (self.entry.paused and why.code != "model_faulty"):
            message = "the model is paused; set spec.paused to false, or scale its adopted workload above zero"
            return errors.service_unavailable("no_capacity", message, PAUSED_RETRY_AFTER_S, should_retry=False)
        return errors.service_unavailable(why.code, why.message, why.retry_after_s, should_retry=why.should_retry)

    def turn_away(self, call: Call, now_s: float, out: list[Effect]) -> None:
        """Reject a new request while closed. If Routes contain the rejection, the request is demand for one start."""
        why = self.part.route.refusal
        if self.entry is not None and not self.entry.paused and why is not None and not self.faults:
            self._count_cold(call, why.retry_after_s, now_s)
        out.append(Refuse(call, self.refusal()))
        call.state = _ENDED

    def close_faulty(self, operation: str, now_s: float, out: list[Effect]) -> None:
        """An operation raised an exception: close the model and reject the request in transit and the queued ones.

        It calls no function of the operations that may have raised, and counts again what they may have left
        inconsistent. Requests that run go on.
        """
        call, self.in_transit = self.in_transit, None
        lost = self.queue.clear() if call is None else [call, *self.queue.clear()]
        self._tally.edge = self._tally.edge or bool(lost) or operation not in self.faults
        self.faults.add(operation)
        self.closed = True
        try:
            for line in self.queue.lines.values():
                self._tally.accounts.touch(line.account, now_s)
        finally:
            refused = {effect.call for effect in out if isinstance(effect, Refuse)}
            ended = [one for one in lost if self.end_faulty(one, now_s)]
            out.extend(Refuse(one, errors.model_faulty()) for one in ended if one not in refused)
            self._recount()

    def end_faulty(self, call: Call, now_s: float) -> bool:
        """End a request whose counts `close_faulty` corrects; False if it has ended before."""
        if call.state is _ENDED:
            return False
        call.state = _ENDED
        call.hold = None
        self.running.discard(call)
        if call.line is not None:
            call.line.account.finished += 1
            call.line.account.active_s = now_s
        return True

    def _recount(self) -> None:
        """Derive the counts of holds, lines and accounts from the running requests; nothing is queued."""
        for line in self.queue.lines.values():
            line.running = line.account.running = line.account.waiting = 0
        for hold in self.part.holds.values():
            hold.in_use = 0
        for call in self.running:
            if call.hold is not None:
                call.hold.in_use += 1
            if call.line is not None:
                call.line.running += 1
                call.line.account.running += 1
        self._routes.recount(self.part)

    def refuse_parked(self, error: Callable[[], CallError], now_s: float, out: list[Effect]) -> None:
        """Reject all queued requests with this error."""
        if not self.queue.waiting:
            return
        for line in self.queue.lines.values():
            while line.calls:
                call = line.first()
                self._unpark(line, call, now_s)
                self._refuse(line, call, error(), now_s, out)

    def _refuse_hasty(self, now_s: float, out: list[Effect]) -> None:
        """Reject queued requests whose deadline comes before the capacity that the model waits for."""
        wait_s = self.part.capacity_wait_s(now_s)
        if wait_s is None or not self.queue.waiting:
            return
        for line in self.queue.lines.values():
            while (soonest_s := line.soonest_s()) is not None and soonest_s < now_s + wait_s:
                call = line.soonest()
                self._unpark(line, call, now_s)
                self._refuse(line, call, self._late(call, now_s), now_s, out)

    # --- life cycle of a request ----------------------------------------------------------------------------

    def arrive(self, call: Call, now_s: float, out: list[Effect]) -> None:
        """Grant, queue or reject a new request while open."""
        part = self.part
        if part.suspects and self.queue.waiting:
            self.serve(now_s, out)  # a probe may be due: waiting requests go first
        hold = part.choose(now_s) if part.free or part.suspects else None
        if call.deadline_s < now_s and call.arrived_s < call.deadline_s:
            hold = None  # its external check took too long; a request that may not wait at all can still run
        if hold is None:
            error = self._hopeless(call, now_s)
            if error is not None:
                call.state = _ENDED
                out.append(Refuse(call, error))
                return
        line = self.queue.lines.get((call.tenant, call.priority)) or self._open(call)
        account = line.account
        self._tally.accounts.touch(account, now_s)
        self.in_transit = call
        call.line = line
        account.admitted += 1
        account.active_s = now_s
        if hold is None:
            self._park(line, call, first=False)
        else:
            if not self.running:
                self._tally.edge = True  # 0 -> 1: the idle timeout must stop
            self.queue.charge(line)
            self._grant(line, hold, call, now_s, out)

    def finish(self, call: Call, now_s: float, outcome: Outcome, out: list[Effect]) -> None:
        """A queued or running request has ended; its slot goes to a waiting one."""
        line = _line(call)
        self.in_transit = call
        if call.state is _RUNNING:
            hold = self._release(line, call, now_s)
            if hold is not None and outcome is Outcome.COMPLETED:
                hold.heard(call.granted_s or 0.0, now_s)
        else:
            self._unpark(line, call, now_s)
        line.account.tokens_in += call.tokens_in
        line.account.tokens_out += call.tokens_out
        self._end(line, call, now_s)
        if self.queue.waiting or self.part.route.others_wait:
            self.settle(now_s, out)

    def heard(self, call: Call, now_s: float, out: list[Effect]) -> None:
        """Response bytes arrive for a running request; a suspect replica accepts requests again."""
        if call.hold is not None and call.hold.heard(call.granted_s or 0.0, now_s):
            self.settle(now_s, out)

    def bounce(self, call: Call, now_s: float, reason: Bounce, closing: CallError | None, out: list[Effect]) -> None:
        """The engine failed before the commit point: move the request, or reject it (`closing`: it may not be queued).

        A request that has reached its time limit ends: elsewhere it would wait as long again. A refused connection does
        not count, because the engine received nothing; neither does an engine with a planned shutdown. Otherwise a
        request that the engine received moves once, because the request itself may kill its engines. Only a busy engine
        uses up the retry budget: a replica that died is no overload, and all its requests move. If the model no longer
        accepts requests, a request that could move gets the same error as the queued ones.
        """
        line = _line(call)
        failed = call.replica
        hold = self._release(line, call, now_s)
        if hold is None:
            raise ValueError(f"{call!r} runs nowhere")
        untouched, busy = reason == "connect", reason == "busy"
        counts = not untouched and not hold.leaves
        if untouched:
            hold.suspect(now_s)
            self._tally.edge = True
        spent = (counts and call.fled is not None and not call.fled.leaves) or (busy and self.retries < 1.0)
        spent = spent or reason == "timeout"
        if spent or self.closed or call.deadline_s <= now_s:
            error = self.refusal() if self.closed and not spent else _LAST_WORDS[reason]()
            self._refuse(line, call, error, now_s, out)
        else:
            other = self.part.choose(now_s, avoid=failed)
            if other is None and closing is not None:
                self._refuse(line, call, closing, now_s, out)
            else:
                call.moves += not untouched
                call.fled = hold if counts else call.fled
                self.retries -= busy
                if other is None:
                    self._park(line, call, first=True)
                else:
                    self._grant(line, other, call, now_s, out)
        self.settle(now_s, out)

    def expire(self, line: TenantQueue, call: Call, now_s: float, out: list[Effect]) -> None:
        """Reject a queued request at its deadline."""
        self._unpark(line, call, now_s)
        self._refuse(line, call, self._late(call, now_s), now_s, out)

    def expire_soonest(self, line: TenantQueue, now_s: float, out: list[Effect]) -> None:
        """Reject the queued request of a line whose deadline is the soonest and has passed."""
        self.expire(line, line.soonest(), now_s, out)

    def serve(self, now_s: float, out: list[Effect]) -> None:
        """Grant free slots to waiting requests, in order."""
        queue, part = self.queue, self.part
        while queue.waiting:
            hold = part.choose(now_s)
            if hold is None:
                return
            line, call = queue.pop()
            self.in_transit = call
            self._unparked(line, now_s)
            if call.deadline_s <= now_s:
                self._refuse(line, call, self._late(call, now_s), now_s, out)
            else:
                self._grant(line, hold, call, now_s, out)

    def settle(self, now_s: float, out: list[Effect]) -> None:
        """Grant what fits; then return unused holds at once if others wait."""
        if self.queue.waiting and (self.part.free or self.part.suspects):
            self.serve(now_s, out)
        if self.part.route.others_wait and self._routes.give_back(self.part, waiting=self.queue.waiting):
            self._tally.edge = True

    # --- steps ----------------------------------------------------------------------------------------------

    def _hopeless(self, call: Call, now_s: float) -> CallError | None:
        """Return why a request without a free slot may not be queued, if so. An unknown estimate is no reason."""
        expected_s = None if self.part.ready else self.part.expected_wait_s(now_s)
        if self._tally.pressure and not self.part.ready:
            error = errors.out_of_memory()
            self._count_cold(call, error.retry_after_s or RETRY_AFTER_S, now_s)
            return error
        comes_s = self.part.capacity_wait_s(now_s)
        if call.deadline_s <= now_s or call.deadline_s < now_s + max(expected_s or 0.0, comes_s or 0.0):
            return self._late(call, now_s)
        if self.queue.full(call, _NO_ENTRY if self.entry is None else self.entry.queue):
            return errors.queue_full(_retry_after_s(expected_s))
        return None

    def _late(self, call: Call, now_s: float) -> CallError:
        """Return the error for a deadline that has passed or cannot be met; a cold request counts as demand."""
        if self.part.ready:
            return errors.deadline_reached(RETRY_AFTER_S)
        expected_s, comes_s = self.part.expected_wait_s(now_s), self.part.capacity_wait_s(now_s)
        retry_after_s = _retry_after_s(expected_s if comes_s is None else comes_s)
        self._count_cold(call, retry_after_s, now_s)
        if comes_s is not None:
            return errors.capacity_pending(comes_s, retry_after_s)
        return errors.model_starting(expected_s, retry_after_s)

    def _count_cold(self, call: Call, retry_after_s: float, now_s: float) -> None:
        self._tally.accounts.refused_cold(self.name, call.tenant, now_s, retry_after_s)
        self._tally.edge = True

    def _open(self, call: Call) -> TenantQueue:
        account = self._tally.accounts.of(self.name, call.tenant)
        return self.queue.open(call.tenant, call.priority, account, self._tally.steps.get(call.tenant, DEFAULT_STEP))

    def _list(self, line: TenantQueue) -> None:
        if not line.listed:
            line.listed = True
            self._tally.listed.append(line)

    def _grant(self, line: TenantQueue, hold: Hold, call: Call, now_s: float, out: list[Effect]) -> None:
        """Run the request. The caller has called `Accounts.touch` for its account."""
        call.state = _RUNNING
        call.granted_s = now_s
        call.replica = hold.replica
        call.hold = hold
        hold.take(now_s)
        line.running += 1
        line.account.running += 1
        self.running.add(call)
        if self.retries < RETRIES_MAX and not call.moves:  # moves must not refill the budget that they use
            self.retries = min(RETRIES_MAX, self.retries + RETRIES_PER_GRANT)
        if not line.listed:
            self._list(line)
        out.append(Grant(call, hold.replica, hold.address))
        self.in_transit = None

    def _park(self, line: TenantQueue, call: Call, *, first: bool) -> None:
        """Queue the request. The caller has called `Accounts.touch` for its account."""
        if not line.calls:
            self._tally.edge = True  # 0 -> 1
        call.state = _PARKED
        call.replica = call.hold = call.granted_s = None
        call.cold = call.cold or not self.part.ready
        if first:
            self.queue.park_first(line, call)
        else:
            self.queue.park(line, call)
        self._tally.waiting += 1
        line.account.waiting += 1
        self._tally.deadlines.watch(line, call.deadline_s)
        self._list(line)
        self.in_transit = None

    def _unpark(self, line: TenantQueue, call: Call, now_s: float) -> None:
        self.in_transit = call
        self.queue.remove(line, call)
        self._unparked(line, now_s)

    def _unparked(self, line: TenantQueue, now_s: float) -> None:
        self._tally.accounts.touch(line.account, now_s)
        self._tally.waiting -= 1
        line.account.waiting -= 1

    def _release(self, line: TenantQueue, call: Call, now_s: float) -> Hold | None:
        """Release its slot; None if it has none. If the slot was above a lowered hold, or the last of a draining
        replica, report at once.
        """
        hold = call.hold
        if hold is None:
            return None
        if hold.in_use > hold.held or (hold.in_use == 1 and not hold.ready):
            self._tally.edge = True
        self._tally.accounts.touch(line.account, now_s)
        self._routes.release(hold, now_s, call.first_byte_s)
        call.hold = None
        line.running -= 1
        line.account.running -= 1
        self.running.discard(call)
        return hold

    def _refuse(self, line: TenantQueue, call: Call, error: CallError, now_s: float, out: list[Effect]) -> None:
        """Fail an admitted request with this error; it has left queue and replica."""
        out.append(Refuse(call, error))
        self._end(line, call, now_s)

    def _end(self, line: TenantQueue, call: Call, now_s: float) -> None:
        call.state = _ENDED
        line.account.finished += 1
        line.account.active_s = now_s
        if not self.running and not self.queue.waiting:
            self._tally.edge = True  # the last request has ended


def _line(call: Call) -> TenantQueue:
    """Return the line of an admitted request."""
    if call.line is None:
        raise ValueError(f"{call!r} was never admitted")
    return call.line


def _retry_after_s(expected_s: float | None) -> float:
    return RETRY_AFTER_S if expected_s is None else min(max(expected_s, RETRY_AFTER_S), MAX_RETRY_AFTER_S)
