"""The dispatcher of a gateway: handles every request from admission to its single outcome.

Contains the dispatchers of all models, the autoscaler's data, and the reports. Invariants: each request has one
outcome. No request waits while a slot that it may use is free. Nothing is granted above the allowed slots (interfaces,
section 6, Holds) or after its deadline. The order is by priority, then fair over tenants, then first come, first
served. Queues are bounded. Pure, single writer: all methods are synchronous, times are monotonic seconds passed in, and
the caller performs the returned Effects in order. Independent of connections, bodies and the meaning of an engine's
response.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final

from autoscaler.contract import CatalogueDelta, GatewayId, Level, ModelName, Report, ReportAnswer, RoutesDelta
from gateway import errors
from gateway.dispatch.call import Call, CallState, Outcome
from gateway.dispatch.effects import Effect, ModelFaulted, Refuse, ReportNow
from gateway.dispatch.fair_queue import DEFAULT_STEP, Parked, TenantQueue, compute_step
from gateway.dispatch.memory_pressure import Pressure
from gateway.dispatch.model_dispatcher import Bounce, ModelDispatcher, SharedCounters
from gateway.dispatch.routing_table import Changes, Routes
from gateway.exception_handling import reraise_memory_error

_PARKED: Final = CallState.PARKED
_RUNNING: Final = CallState.RUNNING
_ENDED: Final = CallState.ENDED
_REPORT_NOW: Final = ReportNow()
_NO_FAULTS: Final[dict[ModelName, Exception]] = {}


class Dispatcher:
    """The dispatcher of one gateway. `boot` differs at every start."""

    def __init__(self, gateway: GatewayId, boot: str) -> None:
        self._gateway = gateway
        self._boot = boot
        self._sequence = 0
        self._catalogue = (0, 0)
        self._routes = Routes()
        self._desks: dict[ModelName, ModelDispatcher] = {}
        """One per model named by catalogue or Routes."""
        self._tally = SharedCounters()
        self._suspected: set[ModelName] = set()
        """Models with a replica that did not accept a connection."""
        self._others_wait: set[ModelName] = set()
        self._faulty: set[ModelName] = set()
        """Models closed because of an exception."""
        self._said_waiting = False
        """Whether the last report contained waiting requests."""
        self._closing = False
        self._pending: list[Effect] = []
        """Effects of exceptions in reports."""

    # --- input from the autoscaler --------------------------------------------------------------------------

    def catalogue(
        self, delta: CatalogueDelta, now_s: float, faults: Mapping[ModelName, Exception] = _NO_FAULTS
    ) -> list[Effect]:
        """Apply a change of the catalogue, unless it is old. Requests queued for removed or paused models fail.
        `faults`: models of the catalogue whose names raised an exception.
        """
        out: list[Effect] = []
        if (delta.epoch, delta.version) < self._catalogue:
            return out
        self._catalogue = (delta.epoch, delta.version)
        gone = set(delta.models_gone)
        if delta.full:
            gone |= self._desks.keys() - {entry.name for entry in delta.models}
        for name in sorted(gone & self._desks.keys()):
            desk = self._desks[name]
            desk.entry = None
            desk.faults.discard("names")
            self._look(desk, now_s, out)
            self._retire(desk)
        for entry in delta.models:
            desk = self._desk(entry.name)
            desk.entry = entry
            if entry.name in faults:
                self._fault(desk, "names", faults[entry.name], now_s, out)
            else:
                desk.faults.discard("names")
                self._look(desk, now_s, out)
        if delta.full or delta.tenants or delta.tenants_gone:
            self._weigh(delta)
        return self._done(out)

    def routes(self, delta: RoutesDelta, now_s: float) -> list[Effect]:
        """Apply a change of Routes, unless it is older than the current state, and grant what fits."""
        out: list[Effect] = []
        epoch = self._routes.epoch
        changes = self._routes.apply(delta, now_s)
        if changes is None:
            return out
        if self._routes.epoch > epoch:
            self._tally.accounts.resend()  # a new leader may lack reports that the old one acknowledged
        if changes.acknowledge:
            self._tally.edge = True
        self._look_all(changes, now_s, out, full=delta.full)
        for name in sorted(changes.models):
            desk = self._desk(name)
            if desk.queue.waiting:
                self._tally.edge = True
            if desk.part.route.others_wait:
                self._others_wait.add(name)
            else:
                self._others_wait.discard(name)
            self._retire(desk)
        return self._done(out)

    # --- life cycle of a request ----------------------------------------------------------------------------

    def arrive(self, call: Call, now_s: float) -> list[Effect]:
        """Grant, queue or reject a new request."""
        out: list[Effect] = []
        if now_s >= self._routes.silent_at_s:
            self._fall_silent(now_s, out)
        desk = self._desks.get(call.model)
        if desk is None or self._closing:
            call.state = _ENDED
            out.append(Refuse(call, errors.shutting_down() if self._closing else errors.model_not_found()))
        elif self._tally.pressure is Pressure.NO_CALLS:
            call.state = _ENDED
            out.append(Refuse(call, errors.out_of_memory()))
        else:
            try:
                if desk.closed:
                    desk.turn_away(call, now_s, out)
                else:
                    desk.arrive(call, now_s, out)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                self._fault(desk, "dispatch", error, now_s, out)
                if call.state is CallState.NEW:
                    call.state = _ENDED
                    out.append(Refuse(call, errors.model_faulty()))
        return self._done(out) if self._tally.edge else out

    def leave(self, call: Call, now_s: float) -> list[Effect]:
        """The client disconnected, in whatever state its request is. No-op for a request that has ended."""
        return self.finish(call, now_s, Outcome.ABANDONED)

    def finish(self, call: Call, now_s: float, outcome: Outcome) -> list[Effect]:
        """The request has ended; its slot goes to a waiting request. No-op for a request that has ended before."""
        out: list[Effect] = []
        if call.state is _RUNNING or call.state is _PARKED:
            desk = self._desks[call.model]
            try:
                desk.finish(call, now_s, outcome, out)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                desk.end_faulty(call, now_s)
                self._fault(desk, "dispatch", error, now_s, out)
        return self._done(out) if self._tally.edge else out

    def withdraw(self, call: Call, now_s: float) -> list[Effect]:
        """Release the slot of a request whose body is still incomplete. `arrive` admits it again later."""
        out = self.finish(call, now_s, Outcome.ABANDONED)
        call.state = CallState.NEW
        return out

    def heard(self, call: Call, now_s: float) -> list[Effect]:
        """Response bytes of a running request arrived; call it now and then while they do."""
        out: list[Effect] = []
        if call.state is _RUNNING:
            desk = self._desks[call.model]
            try:
                desk.heard(call, now_s, out)
            except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                self._fault(desk, "dispatch", error, now_s, out)
        return self._done(out)

    def give_up(self, call: Call, now_s: float) -> list[Effect]:
        """End the wait of a queued request; if its model is cold, it still counts as demand. No-op in other states."""
        out: list[Effect] = []
        if call.state is _PARKED and call.line is not None:
            desk = self._desks[call.model]
            self._contain(desk, partial(desk.expire, call.line, call, now_s, out), now_s, out)
        return self._done(out)

    def bounce(self, call: Call, now_s: float, reason: Bounce) -> list[Effect]:
        """The engine failed before the commit point: the request moves at most once, within the retry budget."""
        out: list[Effect] = []
        if call.state is _RUNNING:
            if reason == "connect":
                self._suspected.add(call.model)
            closing = errors.shutting_down() if self._closing else None
            desk = self._desks[call.model]
            desk.in_transit = call
            self._contain(desk, partial(desk.bounce, call, now_s, reason, closing, out), now_s, out)
        return self._done(out)

    def tick(self, now_s: float) -> list[Effect]:
        """Handle the passage of time: expired deadlines, a silent leader, probes of suspect replicas."""
        out, self._pending = self._pending, []
        if now_s >= self._routes.silent_at_s:
            self._fall_silent(now_s, out)
        deadlines = self._tally.deadlines
        for line in deadlines.due(now_s):
            desk = self._desks[line.model]
            self._contain(desk, partial(desk.expire_soonest, line, now_s, out), now_s, out)
        for name, error in deadlines.faults.items():
            self._fault(self._desk(name), "dispatch", error, now_s, out)
        deadlines.faults.clear()
        for name in sorted(self._suspected):
            suspected = self._desks.get(name)
            if suspected is None or not suspected.part.suspects:
                self._suspected.discard(name)
            else:
                self._contain(suspected, partial(suspected.serve, now_s, out), now_s, out)
        return self._done(out)

    def next_s(self) -> float | None:
        """Return the latest time for the next `tick`; None if nothing is due."""
        due_s = self._tally.deadlines.next_s()
        if self._pending or self._tally.deadlines.faults:
            return 0.0
        if due_s is None:
            return None  # nothing waits, so neither silence nor a probe is urgent
        due_s = min(due_s, self._routes.silent_at_s)
        for name in self._suspected:
            desk = self._desks.get(name)
            probe_s = desk.part.probe_s() if desk is not None and desk.queue.waiting else None
            if probe_s is not None:
                due_s = min(due_s, probe_s)
        return due_s

    def shutdown(self, now_s: float) -> list[Effect]:
        """Stop: queued and new requests are rejected, running ones continue."""
        self._closing = True
        out: list[Effect] = []
        for desk in self._desks.values():
            self._contain(desk, partial(desk.refuse_parked, errors.shutting_down, now_s, out), now_s, out)
        return self._done(out)

    @property
    def parked(self) -> Parked:
        """Small bodies of queued requests."""
        return self._tally.parked

    @property
    def pressure(self) -> Pressure:
        """Memory pressure of the gateway; set by `gateway.gateway`."""
        return self._tally.pressure

    @pressure.setter
    def pressure(self, now: Pressure) -> None:
        self._tally.pressure = now

    # --- reports --------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> Report:
        """Build a report: the current levels, and the unacknowledged counts. An exception closes its model; the next
        `tick` returns the effects.
        """
        self._sequence += 1
        faults: dict[ModelName, Exception] = {}
        levels = self._levels(now_s, faults)
        self._said_waiting = any(level.waiting for level in levels)
        totals = self._tally.accounts.totals(now_s, self._sequence, faults)
        replicas = tuple(self._routes.uses(now_s, faults))
        for name, error in faults.items():
            self._fault(self._desk(name), "dispatch", error, now_s, self._pending)
        return Report(
            gateway=self._gateway,
            boot=self._boot,
            sequence=self._sequence,
            epoch=self._routes.epoch,
            version=self._routes.version,
            levels=levels,
            totals=totals,
            replicas=replicas,
        )

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """An autoscaler has report `sequence`. Only the leader's answer counts, or one that requests a resend."""
        if answer.epoch < self._routes.epoch:
            return
        if answer.resend:
            self._tally.accounts.resend()
        elif answer.leads:
            self._tally.accounts.acknowledged(sequence)

    def busy(self) -> bool:
        """Return whether anything waits, here or elsewhere, or did in the last report: reports are then frequent."""
        return self._tally.waiting > 0 or bool(self._others_wait) or self._said_waiting

    def has_faults(self) -> bool:
        """Return whether an exception closed a model. The complete catalogue and Routes open it again."""
        return bool(self._faulty)

    # --- queries --------------------------------------------------------------------------------------------

    def wait_note(self, call: Call, now_s: float) -> tuple[int, float | None]:
        """Return a queued request's position among its tenant's of the same priority (1 is next), and the estimate.

        Other tenants' queues are not disclosed. A request removed from the middle counts until those before it are
        gone. (0, None) for a request that is not queued.
        """
        if call.state is not _PARKED:
            return 0, None
        desk = self._desks[call.model]
        calls = desk.queue.lines[call.tenant, call.priority].calls
        position = calls[call] - next(iter(calls.values())) + 1
        return min(position, len(calls)), None if desk.part.ready else desk.part.expected_wait_s(now_s)

    def model_state(self, model: ModelName) -> str:
        """Return the model's state in Routes: zero, starting, ready, draining or failed."""
        desk = self._desks.get(model)
        return "zero" if desk is None else desk.part.route.state

    def phases_ms(self, model: ModelName) -> dict[str, float]:
        """Return the phases of the model's last start, for Server-Timing."""
        desk = self._desks.get(model)
        return {} if desk is None else desk.part.route.phases_ms

    def expected_wait_s(self, model: ModelName, now_s: float) -> float | None:
        """Return the estimated wait of a cold request in seconds: 0 with a ready replica, None if unknown."""
        desk = self._desks.get(model)
        if desk is None:
            return None
        return 0.0 if desk.part.ready else desk.part.expected_wait_s(now_s)

    def counts(self) -> Iterator[tuple[ModelName, int, int]]:
        """Return (model, waiting, running) for every model, for metrics."""
        return ((name, desk.queue.waiting, len(desk.running)) for name, desk in self._desks.items())

    # --- steps ----------------------------------------------------------------------------------------------

    def _done(self, out: list[Effect]) -> list[Effect]:
        """Return the effects of one method, with ReportNow at the end if there was an edge."""
        if self._tally.edge:
            self._tally.edge = False
            out.append(_REPORT_NOW)
        return out

    def _desk(self, name: ModelName) -> ModelDispatcher:
        desk = self._desks.get(name)
        if desk is None:
            desk = self._desks[name] = ModelDispatcher(name, self._routes, self._tally)
        return desk

    def _retire(self, desk: ModelDispatcher) -> None:
        """Drop a model that neither catalogue nor Routes name and that has no request."""
        if desk.orphaned:
            self._desks.pop(desk.name, None)
            self._faulty.discard(desk.name)
            self._others_wait.discard(desk.name)
            self._routes.drop(desk.name)
            self._tally.accounts.forget(desk.name)

    def _fall_silent(self, now_s: float, out: list[Effect]) -> None:
        self._look_all(self._routes.fall_silent(), now_s, out, full=False)

    def _look_all(self, changes: Changes, now_s: float, out: list[Effect], *, full: bool) -> None:
        for name in sorted(changes.models):
            desk = self._desk(name)
            if name in changes.faults:
                self._fault(desk, "routes", changes.faults[name], now_s, out)
            else:
                if full:
                    desk.faults.discard("routes")
                self._look(desk, now_s, out)

    def _look(self, desk: ModelDispatcher, now_s: float, out: list[Effect]) -> None:
        """Handle a change of catalogue or Routes. If this succeeds, earlier exceptions of dispatch are over."""
        desk.faults.discard("dispatch")
        self._contain(desk, partial(desk.look, now_s, out), now_s, out)
        if desk.faults:
            self._faulty.add(desk.name)
        else:
            self._faulty.discard(desk.name)

    def _contain(self, desk: ModelDispatcher, act: Callable[[], None], now_s: float, out: list[Effect]) -> None:
        """Call `act`. The most frequent operations have a `try` of their own, which is faster."""
        try:
            act()
        except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
            self._fault(desk, "dispatch", error, now_s, out)

    def _fault(
        self, desk: ModelDispatcher, operation: str, error: Exception, now_s: float, out: list[Effect]
    ) -> None:  # fmt: skip
        """An exception concerns this model only: close it, and reject its queued requests and the one in transit.

        Further exceptions of the operation are not reported until a change of catalogue or Routes has opened the model.
        """
        reraise_memory_error(error)
        self._faulty.add(desk.name)
        is_new = operation not in desk.faults
        try:
            desk.close_faulty(operation, now_s, out)
        except Exception as second:  # noqa: BLE001 - the queue itself may be the cause
            reraise_memory_error(second)
            is_new = True
        self._tally.waiting = sum(one.queue.waiting for one in self._desks.values())
        if is_new:
            out.append(ModelFaulted(desk.name, error))

    def _weigh(self, delta: CatalogueDelta) -> None:
        """Apply the tenants' weights."""
        steps = {} if delta.full else self._tally.steps
        for name in delta.tenants_gone:
            steps.pop(name, None)
        steps.update((entry.name, compute_step(entry.weight)) for entry in delta.tenants)
        self._tally.steps = steps
        for desk in self._desks.values():
            for (tenant, _), line in desk.queue.lines.items():
                line.step = steps.get(tenant, DEFAULT_STEP)

    def _levels(self, now_s: float, faults: dict[ModelName, Exception]) -> tuple[Level, ...]:
        """Return one Level per line with a request; other lines leave the list, and an idle model drops its lines. A
        line that raises an exception is reported without times.
        """
        levels: list[Level] = []
        kept: list[TenantQueue] = []
        for line in self._tally.listed:
            if line.calls or line.running:
                try:
                    oldest_s, soonest_s = _times_s(line, now_s)
                except Exception as error:  # noqa: BLE001 - a fault of any kind is contained
                    reraise_memory_error(error)
                    faults[line.model], oldest_s, soonest_s = error, 0.0, None
                levels.append(
                    Level(
                        model=line.model,
                        tenant=line.account.tenant,
                        priority=line.lane.priority,
                        waiting=len(line.calls),
                        running=line.running,
                        oldest_wait_s=oldest_s,
                        soonest_deadline_s=soonest_s,
                    )
                )
                kept.append(line)
                continue
            line.listed = False
            desk = self._desks.get(line.model)
            if desk is not None and desk.idle:
                desk.queue.forget()
                self._retire(desk)
        self._tally.listed = kept
        return tuple(levels)


def _times_s(line: TenantQueue, now_s: float) -> tuple[float, float | None]:
    """Return the longest wait and the time until the soonest deadline; None if nothing is queued."""
    soonest_s = line.soonest_s()
    return (
        max(0.0, now_s - line.first().arrived_s) if line.calls else 0.0,
        None if soonest_s is None else max(0.0, soonest_s - now_s),
    )
