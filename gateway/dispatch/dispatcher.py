"""Dispatch: every Call of one gateway from admission to its one Outcome (architecture, section 6).

Owns the desks of all Models, what the autoscaler said, and the reports. Promises: one Outcome per Call; no Call waits
while a Slot that it may use is free; nothing is granted above what is allowed (interfaces, section 6, Holds) or after
its deadline; priority first, then fair over Tenants, then first come first served; every queue is bounded. Pure and
single-writer: all methods are synchronous, times are monotonic seconds that are passed in, and what is to be done is
returned as Effects, to be performed in order. It must not know of connections, bodies or what an engine's answer means.
"""

from __future__ import annotations

from collections.abc import Iterator

from autoscaler.contract import (
    CatalogueDelta,
    GatewayId,
    Level,
    ModelName,
    Report,
    ReportAnswer,
    RoutesDelta,
)
from gateway import errors
from gateway.dispatch.call import Call, CallState, Outcome
from gateway.dispatch.effects import Effect, Refuse, ReportNow
from gateway.dispatch.fair_queue import Parked, TenantQueue
from gateway.dispatch.memory_pressure import Pressure
from gateway.dispatch.model_dispatcher import Bounce, ModelDispatcher, SharedCounters
from gateway.dispatch.routes import Routes

_PARKED, _RUNNING, _ENDED = CallState.PARKED, CallState.RUNNING, CallState.ENDED
_REPORT_NOW = ReportNow()


class Dispatch:
    """The core of one gateway. `boot` differs at every start of it."""

    def __init__(self, gateway: GatewayId, boot: str) -> None:
        self._gateway = gateway
        self._boot = boot
        self._sequence = 0
        self._catalogue = (0, 0)
        self._routes = Routes()
        self._desks: dict[ModelName, ModelDispatcher] = {}
        """As many as catalogue and Routes name."""
        self._tally = SharedCounters()
        self._suspected: set[ModelName] = set()
        """Models with a Replica that did not take a connection."""
        self._others_wait: set[ModelName] = set()
        self._said_waiting = False
        """The last report said that Calls wait: that they do no more must not wait for the next second."""
        self._closing = False

    # --- what the autoscaler says ---------------------------------------------------------------------------

    def catalogue(self, delta: CatalogueDelta, now_s: float) -> list[Effect]:
        """Takes a change of the catalogue, unless it is old. Calls parked for Models gone or paused are refused."""
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
            desk.look(now_s, out)
            self._retire(desk)
        for entry in delta.models:
            desk = self._desk(entry.name)
            desk.entry = entry
            desk.look(now_s, out)
        self._weigh(delta)
        return self._done(out)

    def routes(self, delta: RoutesDelta, now_s: float) -> list[Effect]:
        """Takes a change of Routes, or ignores it when it is older than what is known. Grants what fits then."""
        out: list[Effect] = []
        epoch = self._routes.epoch
        changes = self._routes.apply(delta, now_s)
        if changes is None:
            return out
        if self._routes.epoch > epoch:
            self._tally.accounts.resend()  # a new leader may have missed what the old one acknowledged
        if changes.acknowledge:
            self._tally.edge = True
        for name in sorted(changes.models):
            desk = self._desk(name)
            desk.look(now_s, out)
            if desk.queue.waiting:
                self._tally.edge = True
            if desk.part.route.others_wait:
                self._others_wait.add(name)
            else:
                self._others_wait.discard(name)
            self._retire(desk)
        return self._done(out)

    # --- the life of a Call ---------------------------------------------------------------------------------

    def arrive(self, call: Call, now_s: float) -> list[Effect]:
        """A new Call: granted, parked or refused."""
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
        elif desk.closed:
            desk.turn_away(call, now_s, out)
        else:
            desk.arrive(call, now_s, out)
        return self._done(out) if self._tally.edge else out

    def leave(self, call: Call, now_s: float) -> list[Effect]:
        """The client left, wherever the Call is. Nothing for a Call that has ended."""
        return self.finish(call, now_s, Outcome.ABANDONED)

    def finish(self, call: Call, now_s: float, outcome: Outcome) -> list[Effect]:
        """The Call has ended; its Slot goes to who waits. Nothing for a Call that has ended before."""
        out: list[Effect] = []
        if call.state is _RUNNING or call.state is _PARKED:
            self._desks[call.model].finish(call, now_s, outcome, out)
        return self._done(out) if self._tally.edge else out

    def heard(self, call: Call, now_s: float) -> list[Effect]:
        """Bytes of the answer to a running Call came lately; to be said now and then while they do."""
        out: list[Effect] = []
        if call.state is _RUNNING:
            self._desks[call.model].heard(call, now_s, out)
        return self._done(out)

    def give_up(self, call: Call, now_s: float) -> list[Effect]:
        """A parked Call is not to wait any longer; while its Model is cold that still is demand. Else nothing."""
        out: list[Effect] = []
        if call.state is _PARKED and call.line is not None:
            self._desks[call.model].expire(call.line, call, now_s, out)
        return self._done(out)

    def bounce(self, call: Call, now_s: float, reason: Bounce) -> list[Effect]:
        """The engine failed before the commit point: the Call moves at most once, within the Model's retry budget."""
        out: list[Effect] = []
        if call.state is _RUNNING:
            if reason == "connect":
                self._suspected.add(call.model)
            closing = errors.shutting_down() if self._closing else None
            self._desks[call.model].bounce(call, now_s, reason, closing, out)
        return self._done(out)

    def tick(self, now_s: float) -> list[Effect]:
        """Time has passed: deadlines expire, a leader falls silent, suspect Replicas are probed."""
        out: list[Effect] = []
        if now_s >= self._routes.silent_at_s:
            self._fall_silent(now_s, out)
        for line in self._tally.deadlines.due(now_s):
            self._desks[line.model].expire(line, line.soonest(), now_s, out)
        for name in sorted(self._suspected):
            desk = self._desks.get(name)
            if desk is None or not desk.part.suspects:
                self._suspected.discard(name)
            else:
                desk.serve(now_s, out)
        return self._done(out)

    def next_s(self) -> float | None:
        """When `tick` has something to do, at the latest; None when nothing is due."""
        due_s = self._tally.deadlines.next_s()
        if due_s is None:
            return None  # nothing waits: then neither silence nor a probe is urgent
        due_s = min(due_s, self._routes.silent_at_s)
        for name in self._suspected:
            desk = self._desks.get(name)
            probe_s = desk.part.probe_s() if desk is not None and desk.queue.waiting else None
            if probe_s is not None:
                due_s = min(due_s, probe_s)
        return due_s

    def shutdown(self, now_s: float) -> list[Effect]:
        """The gateway stops: parked and new Calls are refused, running ones go on."""
        self._closing = True
        out: list[Effect] = []
        for desk in self._desks.values():
            desk.refuse_parked(errors.shutting_down, now_s, out)
        return self._done(out)

    @property
    def parked(self) -> Parked:
        """The small bodies that wait."""
        return self._tally.parked

    @property
    def pressure(self) -> Pressure:
        """How short the gateway's memory is; written by the shell."""
        return self._tally.pressure

    @pressure.setter
    def pressure(self, now: Pressure) -> None:
        self._tally.pressure = now

    # --- reports --------------------------------------------------------------------------------------------

    def report(self, now_s: float) -> Report:
        """The levels as they are now, and the counts that nobody has acknowledged."""
        self._sequence += 1
        levels = self._levels(now_s)
        self._said_waiting = any(level.waiting for level in levels)
        return Report(
            gateway=self._gateway,
            boot=self._boot,
            sequence=self._sequence,
            epoch=self._routes.epoch,
            version=self._routes.version,
            levels=levels,
            totals=self._tally.accounts.totals(now_s, self._sequence),
            replicas=tuple(self._routes.uses(now_s)),
        )

    def answered(self, sequence: int, answer: ReportAnswer) -> None:
        """An autoscaler has the report `sequence`. Only the leader's counts, or one that lacks everything."""
        if answer.epoch < self._routes.epoch:
            return
        if answer.resend:
            self._tally.accounts.resend()
        elif answer.leads:
            self._tally.accounts.acknowledged(sequence)

    def busy(self) -> bool:
        """Whether anything waits, here or elsewhere, or the last report said so: reports are due more often then."""
        return self._tally.waiting > 0 or bool(self._others_wait) or self._said_waiting

    # --- what others want to know ---------------------------------------------------------------------------

    def wait_note(self, call: Call, now_s: float) -> tuple[int, float | None]:
        """For a parked Call: its position among its Tenant's Calls of the same priority (1 is next), and the estimate.

        Others' queues are nobody's business. One that left from the middle is counted until those before it are gone.
        (0, None) for a Call that is not parked.
        """
        if call.state is not _PARKED:
            return 0, None
        desk = self._desks[call.model]
        calls = desk.queue.lines[call.tenant, call.priority].calls
        position = calls[call] - next(iter(calls.values())) + 1
        return min(position, len(calls)), None if desk.part.ready else desk.part.expected_wait_s(now_s)

    def model_state(self, model: ModelName) -> str:
        """What Routes say of the Model: zero, starting, ready, draining or failed."""
        desk = self._desks.get(model)
        return "zero" if desk is None else desk.part.route.state

    def phases_ms(self, model: ModelName) -> dict[str, float]:
        """The phases of the Model's last start, for Server-Timing."""
        desk = self._desks.get(model)
        return {} if desk is None else desk.part.route.phases_ms

    def expected_wait_s(self, model: ModelName, now_s: float) -> float | None:
        """Seconds until a cold Call would be answered: 0 with a ready Replica, None when nobody knows."""
        desk = self._desks.get(model)
        if desk is None:
            return None
        return 0.0 if desk.part.ready else desk.part.expected_wait_s(now_s)

    def counts(self) -> Iterator[tuple[ModelName, int, int]]:
        """(Model, Calls waiting, Calls running) of every Model, for metrics."""
        return ((name, desk.queue.waiting, desk.running) for name, desk in self._desks.items())

    # --- steps ----------------------------------------------------------------------------------------------

    def _done(self, out: list[Effect]) -> list[Effect]:
        """The Effects of one method, ReportNow at the end if there was an edge."""
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
        """Forgets a Model that neither catalogue nor Routes name and that has no Call."""
        if desk.orphaned:
            self._desks.pop(desk.name, None)
            self._others_wait.discard(desk.name)
            self._routes.drop(desk.name)
            self._tally.accounts.forget(desk.name)

    def _fall_silent(self, now_s: float, out: list[Effect]) -> None:
        for name in sorted(self._routes.fall_silent()):
            self._desk(name).look(now_s, out)

    def _weigh(self, delta: CatalogueDelta) -> None:
        """Takes the Tenants' weights."""
        steps = {} if delta.full else self._tally.steps
        for name in delta.tenants_gone:
            steps.pop(name, None)
        steps.update((entry.name, 1.0 / entry.weight) for entry in delta.tenants)
        self._tally.steps = steps
        for desk in self._desks.values():
            for (tenant, _), line in desk.queue.lines.items():
                line.step = steps.get(tenant, 1.0)

    def _levels(self, now_s: float) -> tuple[Level, ...]:
        """One Level per line with a Call; lines without leave the list, and an idle Model forgets its lines."""
        levels: list[Level] = []
        kept: list[TenantQueue] = []
        for line in self._tally.listed:
            if line.calls or line.running:
                levels.append(_level(line, now_s))
                kept.append(line)
                continue
            line.listed = False
            desk = self._desks.get(line.model)
            if desk is not None and desk.idle:
                desk.queue.forget()
                self._retire(desk)
        self._tally.listed = kept
        return tuple(levels)


def _level(line: TenantQueue, now_s: float) -> Level:
    soonest_s = line.soonest_s()
    return Level(
        model=line.model,
        tenant=line.account.tenant,
        priority=line.lane.priority,
        waiting=len(line.calls),
        running=line.running,
        oldest_wait_s=max(0.0, now_s - line.first().arrived_s) if line.calls else 0.0,
        soonest_deadline_s=None if soonest_s is None else max(0.0, soonest_s - now_s),
    )
