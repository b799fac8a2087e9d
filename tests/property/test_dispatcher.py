"""Dispatch under any sequence of events: the invariants after each (I1, I4 and I12 in research)."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from autoscaler.contract import RoutesDelta
from gateway.dispatch.call import Call, CallState, Outcome
from gateway.dispatch.effects import Effect, Grant, Refuse
from gateway.dispatch.model_dispatcher import Bounce
from gateway.dispatch.slots import Hold
from tests.support.example_budget import examples
from tests.support.harness.gateway.dispatch_script import Script, call_of

TENANTS = st.sampled_from(("a", "b", "c"))
REPLICAS = st.sampled_from(("r1", "r2", "r3"))
CALLS_MAX = 6


class Gateway(RuleBasedStateMachine):
    """One gateway, one Model, up to three replicas; compared with a plain recount."""

    def __init__(self) -> None:
        super().__init__()
        self.script = Script(calls_max=CALLS_MAX, weights={"a": 1.0, "b": 2.0, "c": 0.5})
        self.known: list[Call] = []
        self.outcomes: Counter[str] = Counter()
        self.desk = self.script.dispatch._desks[call_of("x").model]
        self.n = 0
        self.totals: dict[str, tuple[int, ...]] = {}

    def play(self, effects: list[Effect]) -> None:
        """Perform the Effects, checking each."""
        for effect in effects:
            if isinstance(effect, Grant):
                hold = self.script.dispatch._routes.holds[effect.replica]
                assert hold.ready, "granted on a Replica that takes none"
                assert hold.in_use <= hold.allowed, "granted above what is allowed"
                waited = effect.call.arrived_s < self.script.now_s or effect.call.moves
                assert not waited or effect.call.deadline_s > self.script.now_s, "granted after its deadline"
            elif isinstance(effect, Refuse):
                self.end(effect.call)

    def end(self, call: Call) -> None:
        self.outcomes[call.id] += 1
        assert call.state is CallState.ENDED
        self.known = [other for other in self.known if other is not call]

    def of(self, state: CallState, pick: int) -> Call | None:
        some = [call for call in self.known if call.state is state]
        return some[pick % len(some)] if some else None

    @rule(tenant=TENANTS, priority=st.sampled_from((0, 0, 3)), wait_s=st.sampled_from((0.0, 0.5, 3.0, 50.0)))
    def arrive(self, tenant: str, priority: int, wait_s: float) -> None:
        self.n += 1
        call = call_of(f"c{self.n}", tenant=tenant, priority=priority, wait_s=wait_s, now_s=self.script.now_s)
        self.known.append(call)
        self.play(self.script.dispatch.arrive(call, self.script.now_s))

    @precondition(lambda self: self.known)
    @rule(pick=st.integers(0, 99))
    def leave(self, pick: int) -> None:
        call = self.known[pick % len(self.known)]
        effects = self.script.dispatch.leave(call, self.script.now_s)
        self.end(call)
        self.play(effects)

    @rule(pick=st.integers(0, 99))
    def finish(self, pick: int) -> None:
        call = self.of(CallState.RUNNING, pick)
        if call is not None:
            effects = self.script.dispatch.finish(call, self.script.now_s, Outcome.COMPLETED)
            self.end(call)
            self.play(effects)

    @rule(pick=st.integers(0, 99))
    def heard_of(self, pick: int) -> None:
        call = self.of(CallState.RUNNING, pick)
        if call is not None:
            self.play(self.script.dispatch.heard(call, self.script.now_s))

    @rule(pick=st.integers(0, 99), reason=st.sampled_from(("connect", "reset", "busy", "timeout")))
    def bounce(self, pick: int, reason: Bounce) -> None:
        call = self.of(CallState.RUNNING, pick)
        if call is not None:
            assert call.hold is not None
            ordered = reason == "connect" or (reason != "timeout" and call.hold.leaves)
            first = call.fled is None or call.fled.leaves
            self.play(self.script.dispatch.bounce(call, self.script.now_s, reason))
            assert ordered or first or call.state is CallState.ENDED, "moved twice without an order"

    @rule(replica=REPLICAS, hold=st.integers(0, 3), state=st.sampled_from(("ready", "ready", "draining", "starting")))
    def replica(self, replica: str, hold: int, state: str) -> None:
        self.heard(lambda: self.script.replica(replica, hold, state=state, slots=3, gateways=2))

    @rule(replica=REPLICAS)
    def replica_gone(self, replica: str) -> None:
        self.heard(lambda: self.script.remove_replica(replica))

    @rule(others_wait=st.booleans(), expected_s=st.sampled_from((None, 1.0, 20.0)))
    def say(self, others_wait: bool, expected_s: float | None) -> None:
        self.heard(lambda: self.script.say(others_wait=others_wait, expected_s=expected_s))

    @rule()
    def a_new_leader(self) -> None:
        self.script.epoch += 1
        self.heard(lambda: self.script.routes(RoutesDelta(epoch=0, version=0, gateways=2)))

    def heard(self, say: object) -> None:
        """Apply Routes. Script returns descriptions, so the Effects are checked through the requests' states."""
        assert callable(say)
        say()
        for call in [call for call in self.known if call.state is CallState.ENDED]:
            self.end(call)

    @rule(past_s=st.sampled_from((0.01, 0.3, 1.0, 6.0)))
    def time_passes(self, past_s: float) -> None:
        self.script.now_s += past_s
        self.play(self.script.dispatch.tick(self.script.now_s))

    @rule()
    def report(self) -> None:
        """Levels, totals and uses equal a recount."""
        report = self.script.report()
        waiting, running = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
        for call in self.known:
            (waiting if call.state is CallState.PARKED else running)[call.tenant, call.priority] += 1
        assert {(level.tenant, level.priority): level.waiting for level in report.levels if level.waiting} == waiting
        assert {(level.tenant, level.priority): level.running for level in report.levels if level.running} == running
        for level in report.levels:
            parked = [call for call in self.known if call.state is CallState.PARKED]
            mine = [call for call in parked if (call.tenant, call.priority) == (level.tenant, level.priority)]
            soonest_s = min((call.deadline_s for call in mine), default=None)
            expected_s = None if soonest_s is None else max(0.0, soonest_s - self.script.now_s)
            assert level.soonest_deadline_s == expected_s
        for total in report.totals:
            alive = sum(call.tenant == total.tenant for call in self.known)
            assert total.admitted - total.finished == alive
            reported = (total.admitted, total.refused_cold, total.finished, total.busy_slot_us, total.waiting_call_us)
            before = self.totals.get(total.tenant, reported)
            assert all(now >= was for now, was in zip(reported, before, strict=True)), "cumulative counts never fall"
            self.totals[total.tenant] = reported
        use = Counter(call.replica for call in self.known if call.state is CallState.RUNNING)
        assert {each.replica: each.in_use for each in report.replicas if each.in_use} == use

    @invariant()
    def one_outcome_per_call_and_none_lost(self) -> None:
        assert all(count == 1 for count in self.outcomes.values())
        assert len(self.outcomes) + len(self.known) == self.n
        assert all(call.state in {CallState.PARKED, CallState.RUNNING} for call in self.known)

    @invariant()
    def no_call_waits_while_a_slot_it_may_use_is_free(self) -> None:
        if self.desk.queue.waiting:
            assert not [hold for hold in self.desk.part.holds.values() if self.usable(hold)]

    def usable(self, hold: Hold) -> bool:
        closed = hold.connect_failures and self.script.now_s < hold.probe_s
        return hold.ready and not closed and hold.in_use < hold.allowed

    @invariant()
    def bounds_and_counts_hold(self) -> None:
        parked = [call for call in self.known if call.state is CallState.PARKED]
        moved = sum(call.moves for call in parked)
        assert self.desk.queue.waiting == len(parked) <= CALLS_MAX + moved
        assert self.desk.queue.bytes == sum(call.body_bytes for call in parked)
        free = sum(max(0, hold.allowed - hold.in_use) for hold in self.desk.part.opened)
        assert self.desk.part.free == free
        due_s = self.script.dispatch.next_s()
        assert (due_s is None) == (not parked)
        assert due_s is None or due_s <= min(call.deadline_s for call in parked)


TestGateway = Gateway.TestCase
TestGateway.settings = settings(derandomize=True, deadline=None, max_examples=examples(150), stateful_step_count=60)
