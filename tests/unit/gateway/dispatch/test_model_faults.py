"""An exception for one model closes only this model. The tests patch methods, so they need the gateway's sources."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec
import pytest

from autoscaler.contract import ModelName, Refusal, ReplicaId, Report, Route, RoutesDelta, TenantName, make_decoder
from gateway.dispatch.reports import Account
from tests.support.harness.faults.fault_injection import InjectedError, concerns, inject
from tests.support.harness.gateway.dispatch_script import Script


def _about_llama(*args: object) -> bool:
    return any(getattr(one, "name", "") == "llama" or concerns("llama")(one) for one in args)


def _routes(*, full: bool = False) -> RoutesDelta:
    """One ready replica of each of the two models."""
    replicas = tuple(
        Route(
            replica=ReplicaId(f"{name}-1"), model=ModelName(name), state="ready", address=f"{name}:80", slots=8,
            hold=8, granted=9,
        )
        for name in ("llama", "tiny")
    )  # fmt: skip
    return RoutesDelta(epoch=0, version=0, full=full, replicas=replicas)


@pytest.mark.parametrize(
    "point",
    [
        "model_dispatcher:ModelDispatcher.look",
        "model_dispatcher:ModelDispatcher.settle",
        "model_dispatcher:ModelDispatcher._grant",
        "routing_table:Routes._update",
        "routing_table:Routes._allow",
    ],
)
def test_exception_while_routes_are_applied_makes_only_its_model_faulty(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script()
    script.model("tiny")
    script.arrive("waiting")
    fault = inject(monkeypatch, f"gateway.dispatch.{point}", _about_llama, expected=False)
    effects = script.routes(_routes())
    assert effects[-2:] == ["fault llama", "report"]
    assert script.dispatch.has_faults()
    assert script.arrive("c1", model="tiny") == ["grant c1 tiny-1", "report"]
    assert script.arrive("c2") == ["refuse c2 model_faulty"]
    assert (script.refused["c2"].error.status, script.refused["c2"].error.should_retry) == (503, False)
    fault.stop()
    script.model()
    script.routes(_routes(full=True))
    assert not script.dispatch.has_faults()
    assert script.arrive("c3") == ["grant c3 llama-1", "report"]


def test_exception_for_one_model_rejects_its_queued_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.model("tiny")
    script.arrive_many(3, "c")
    script.arrive("t1", model="tiny")
    inject(monkeypatch, "gateway.dispatch.routing_table:Routes._update", _about_llama, expected=False)
    refused = [f"refuse c{number} model_faulty" for number in range(3)]
    assert script.routes(_routes()) == [*refused, "fault llama", "grant t1 tiny-1", "report"]
    assert (script.dispatch.next_s(), script.level("acme").model) == (None, "tiny")
    assert [total.finished for total in script.totals() if total.model == "llama"] == [3]


def test_exception_in_a_request_operation_makes_only_its_model_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[tuple[str, Callable[[Script], list[str]]]] = [
        ("arrive", lambda script: script.arrive("c9")),
        ("finish", lambda script: script.finish("c1")),
        ("heard", lambda script: script.heard("c1")),
        ("bounce", lambda script: script.bounce("c1", "reset")),
    ]
    for name, act in acts:
        script = Script()
        script.model("tiny")
        script.routes(_routes())
        script.arrive("c1")
        with monkeypatch.context() as patch:
            point = f"gateway.dispatch.model_dispatcher:ModelDispatcher.{name}"
            inject(patch, point, _about_llama, expected=False)
            assert "fault llama" in act(script), name
        assert script.arrive("t1", model="tiny") == ["grant t1 tiny-1", "report"]
        assert script.arrive("c2") == ["refuse c2 model_faulty"]


def test_exception_at_a_deadline_makes_only_its_model_faulty(monkeypatch: pytest.MonkeyPatch) -> None:
    script = Script()
    script.model("tiny")
    script.arrive("c1", wait_s=5)
    script.arrive("t1", wait_s=5, model="tiny")
    inject(monkeypatch, "gateway.dispatch.model_dispatcher:ModelDispatcher.expire", _about_llama, expected=False)
    effects = script.at(5.0)
    assert {"refuse c1 model_faulty", "fault llama", "refuse t1 model_starting"} <= set(effects)


STEPS = (
    *(f"model_dispatcher:ModelDispatcher.{name}" for name in (
        "arrive", "finish", "heard", "bounce", "expire", "serve", "settle", "look", "turn_away", "refuse_parked",
        "refusal", "_refuse_hasty", "_hopeless", "_late", "_count_cold", "_open", "_list", "_grant", "_park", "_unpark",
        "_unparked", "_release", "_refuse", "_end",
    )),
    *(f"fair_queue:Queue.{name}" for name in (
        "open", "full", "park", "park_first", "_add", "_discount", "_count", "remove", "charge",
    )),
    *(f"fair_queue:TenantQueue.{name}" for name in ("soonest_s", "soonest", "first", "compact")),
    *(f"slots:Hold.{name}" for name in ("take", "give", "suspect", "heard", "byte_age_s", "stalled")),
    *(f"slots:ModelRoutes.{name}" for name in ("choose", "recount", "expected_wait_s", "capacity_wait_s")),
    *(f"routing_table:Routes.{name}" for name in ("release", "give_back", "_allow", "_remove", "_update")),
    *(f"reports:{name}" for name in ("Accounts.touch", "Accounts.of", "Accounts.refused_cold", "Account.total")),
    "fair_queue:Deadlines.watch",
    "dispatcher:_times_s",
)  # fmt: skip
"""Functions that an operation on one model calls, directly or not."""


class Ledger:
    """A Script that follows each request by the Effects, and compares all counters with that after every step."""

    def __init__(self) -> None:
        self.script = Script(calls_max=4)
        self.running: dict[str, str] = {}
        self.parked: set[str] = set()
        self.ended: set[str] = set()

    def step(self, effects: list[str], *, arrived: str = "", bounced: str = "", ended: str = "") -> None:
        if bounced in self.running:
            del self.running[bounced]
            arrived = bounced
        if arrived:
            self.parked.add(arrived)
        if ended:
            self._end(ended)
        for word in effects:
            kind, *rest = word.split()
            if kind == "grant":
                self.parked.remove(rest[0])
                self.running[rest[0]] = rest[1]
            elif kind == "refuse":
                assert rest[0] not in self.ended, "one outcome"
                self._end(rest[0])
        self.check()

    def _end(self, id: str) -> None:
        self.running.pop(id, None)
        self.parked.discard(id)
        self.ended.add(id)

    def check(self) -> None:
        dispatch = self.script.dispatch
        desk = dispatch._desks[ModelName("llama")]
        assert {call.id: call.replica for call in desk.running} == self.running
        assert {call.id for line in desk.queue.lines.values() for call in line.calls} == self.parked
        assert (desk.queue.waiting, dispatch._tally.waiting) == (len(self.parked), len(self.parked))
        assert (desk.queue.bytes, dispatch.parked.bytes) == (10 * len(self.parked), 10 * len(self.parked))
        assert {hold.replica: hold.in_use for hold in desk.part.holds.values() if hold.in_use} == Counter(
            self.running.values()
        )
        lines = desk.queue.lines.values()
        assert sum(line.running for line in lines) == len(self.running)
        account = dispatch._tally.accounts._accounts.get(
            (desk.name, TenantName("acme")), Account(desk.name, TenantName("acme"))
        )
        assert (account.running, account.waiting) == (len(self.running), len(self.parked))
        assert account.admitted - account.finished == len(self.running) + len(self.parked)

    def report(self) -> None:
        """An autoscaler accepts the report, and it has the right counts."""
        report = make_decoder(Report)(msgspec.json.encode(self.script.report()))
        levels = [level for level in report.levels if level.model == "llama"]
        assert sum(level.running for level in levels) == len(self.running)
        assert sum(level.waiting for level in levels) == len(self.parked)
        used = {use.replica: use.in_use for use in report.replicas if use.in_use}
        assert used == Counter(self.running.values())
        if self.script.dispatch._pending:
            self.step(self.script.at(self.script.now_s))

    def arrive(self, id: str, *, wait_s: float = 100.0) -> None:
        self.step(self.script.arrive(id, wait_s=wait_s), arrived=id)


def _load(one: Ledger) -> None:
    """Requests of the model in every state, and every operation on them."""
    script = one.script
    one.arrive("w0", wait_s=2.0)
    one.step(script.at(2.0))
    one.arrive("w1")
    one.step(script.play(script.dispatch.give_up(script.calls["w1"], script.now_s)))
    for replica, hold in (("r1", 2), ("r2", 1)):
        one.step(script.replica(replica, hold))
    for number in range(8):
        one.arrive(f"c{number}")
    one.report()
    one.step(script.heard("c0"))
    one.step(script.bounce("c1", "connect"), bounced="c1")
    one.step(script.finish("c0"), ended="c0")
    one.step(script.leave("c3"), ended="c3")
    one.step(script.bounce("c2", "reset"), bounced="c2")
    one.step(script.at(5.0))
    one.report()
    one.arrive("d0")
    one.step(script.remove_replica("r1"))
    one.step(script.say(others_wait=True, state="ready"))
    for id in ("c1", "c2"):
        one.step(script.finish(id), ended=id)
    one.step(script.remove_replica("r2"))
    one.step(script.say(state="zero", expected_s=60.0))
    one.arrive("d1", wait_s=1.0)
    one.arrive("d2")
    one.step(script.say(state="zero", capacity_s=500.0))
    one.arrive("d3", wait_s=1000.0)
    one.step(script.say(state="failed", refusal=Refusal(code="model_start_failed", message="", retry_after_s=9.0)))
    one.arrive("d4")
    one.report()


@pytest.mark.parametrize("lasting", [False, True], ids=["once", "always"])
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("point", STEPS)
def test_counters_and_reports_match_requests_after_an_exception_anywhere(
    point: str, late: bool, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception is raised at each call of the function in turn: before it does anything, or after everything."""
    module, _, path = f"gateway.dispatch.{point}".partition(":")
    *owners, name = path.split(".")
    owner: Any = import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    real, calls, at = getattr(owner, name), [0], 0

    def faulty(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        result = real(*args, **kwargs) if late else None
        if calls[0] == at or (lasting and calls[0] > at > 0):
            raise InjectedError(point)
        return result if late else real(*args, **kwargs)

    raised = False
    while at == 0 or calls[0] >= at:
        calls[0], at = 0, at + 1
        one = Ledger()
        one.script.model("tiny")
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, faulty)
            _load(one)
        raised = raised or calls[0] >= at
        at_fault = one.script.dispatch.has_faults()
        one.script.model()
        one.step(one.script.routes(_routes(full=True)))
        assert not one.script.dispatch.has_faults()
        for id in sorted(one.running):
            one.step(one.script.finish(id), ended=id)
        one.report()
        one.arrive("last")
        assert one.running == {"last": "llama-1"}, (at, at_fault)
    assert raised, "the scenario calls the function"
