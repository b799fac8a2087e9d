"""An exception that one Model causes affects only that Model, whatever raises it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName, ReplicaId, ReplicaUse, Report
from autoscaler.controller.fault_attribution import CULPRITS_MAX, find_culprits
from autoscaler.controller.loop import RETRY_S_MAX
from autoscaler.drivers.resilient_tasks import retry_until_success
from autoscaler.exception_handling import describe_error
from autoscaler.explain import model as explain
from autoscaler.explain import status_rows
from autoscaler.explain.decision_log import Log
from autoscaler.fold.model_quarantine import TRIAL_S, list_quarantined_models
from autoscaler.fold.quarantine_mask import assume_quarantined, mask_quarantined
from autoscaler.planner.plan import plan
from autoscaler.queries.response_types import Row
from autoscaler.routing import catalogue, routes
from autoscaler.server import read_responses
from autoscaler.spec.model import Model, StartLimits
from autoscaler.state.actions import DrainReplica
from autoscaler.state.events import (
    DocumentsSeen,
    FaultSeen,
    FollowingSeen,
    GatewayGone,
    GatewaySeen,
    ModelStopped,
    ModelWoken,
    ReplicaSeen,
    Reported,
    Seen,
    Tick,
)
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, Replica, World
from tests.simulation.environment import virtual_loop
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, world
from tests.support.harness.driver_events import seen_of
from tests.support.harness.faults.fault_injection import POINTS, InjectedError, concerns, inject
from tests.support.harness.manual_loop import SteppedLoop

A, B, C = model("a", 10), model("b", 10), model("c", 10)
USED = {"big": History(last_activity_s=T0 - 5)}
"""The replica is idle, but not long enough to be stopped."""
DEVICES = [device("gpu0", 24), device("gpu1", 24)]


def called(*models: Model, now_s: float = T0) -> Reported:
    """A report with one queued request for each of these Models."""
    levels = tuple(level(one.name, 1, wait_s=1.0) for one in models)
    return Reported(report=Report(gateway=GatewayId("g1"), boot="b", sequence=int(now_s), epoch=1, levels=levels))


def stepped(*replicas: Replica) -> SteppedLoop:
    """A loop with three Models on two devices."""
    return SteppedLoop(world([A, B, C], DEVICES, replicas))


def started(loop: SteppedLoop) -> list[str]:
    return sorted({one.model for one in loop.driver.started})


# --- attribution of faults --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{3}, {0}, {99}, {3, 4, 57}, set(range(CULPRITS_MAX))])
def test_faulty_models_among_100_are_found_in_at_most_11_trials_each(bad: set[int]) -> None:
    trials = 0

    def works(out: Collection[int]) -> bool:
        nonlocal trials
        trials += 1
        return bad <= set(out)

    assert set(find_culprits(range(100), works)) == bad
    assert trials <= 2 + 9 * len(bad)


def test_search_for_faulty_models_stops_at_the_maximum_number() -> None:
    assert len(find_culprits(range(100), lambda out: len(out) > CULPRITS_MAX)) == CULPRITS_MAX
    assert find_culprits(range(100), lambda _: False) == ()
    assert find_culprits([], lambda _: False) == ()


def test_multi_line_exception_is_described_in_one_printable_line() -> None:
    with pytest.raises(InjectedError) as caught:
        raise InjectedError("two\nlines \x1b[31m \ud800 " + "x" * 9999)
    message = describe_error(caught.value)
    assert message.startswith("InjectedError in test_fault_attribution.py:")
    assert message.isascii()
    assert message.isprintable()
    assert len(message) < 500
    assert describe_error(ExceptionGroup("", [caught.value])) == message


def test_fault_is_attributed_to_the_model_whose_evaluation_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating the eviction of `big` raises, and that happens only when `b` needs its memory."""
    big = model("big", 20)
    inject(monkeypatch, "autoscaler.placement.model.bin_builder:evictable_s", concerns("big"))
    busy = [gateway(levels=[level("b", 1, wait_s=99.0)])]
    loop = SteppedLoop(world([big, B], [device("gpu0", 24)], [replica(big, "r")], busy, USED))
    assert set(loop.step(Tick()).learned.faults) == {"big"}


def test_replica_observation_with_the_wrong_model_is_logged_and_ignored(caplog: pytest.LogCaptureFixture) -> None:
    loop = stepped(replica(A, "r", state=S.READY))
    loop.step(seen_of(replica(B, "r"), Seen.READY))
    assert [record.getMessage() for record in caplog.records] == [
        "event=replica_ignored replica=r reason='it was reported for model b and is of another model'"
    ]
    assert loop.loop.world.replicas[ReplicaId("r")].model == "a"


# --- the masked `World` -----------------------------------------------------------------------------------------------


def test_replica_of_a_quarantined_model_is_not_evicted() -> None:
    big = model("big", 20)
    waits = [gateway(levels=[level("b", 1, wait_s=99.0)])]
    before = world([big, B], [device("gpu0", 24)], [replica(big, "r")], waits, USED)
    (move,) = plan(before, T0).actions
    assert isinstance(move, DrainReplica)
    assert (move.replica, move.victim_of) == ("r", "b")
    hidden = mask_quarantined(assume_quarantined(before, [big.name]))
    assert plan(hidden, T0).actions == ()
    assert [one.resources.slices for one in hidden.replicas.values()] == [("gpu0",)]


def test_quarantined_model_keeps_its_start_and_drain_time_limits() -> None:
    slow = model("slow", 10, start=StartLimits(seconds_max=7200), drain_seconds_max=5000)
    (stand_in,) = mask_quarantined(
        assume_quarantined(world([slow], DEVICES, [replica(slow, "r")]), [slow.name])
    ).models.values()
    assert (stand_in.spec.start.seconds_max, stand_in.spec.drain_seconds_max) == (7200, 5000)


def test_quarantined_model_keeps_its_tenants() -> None:
    own = model("own", 10, tenants=("acme",))
    hidden = mask_quarantined(assume_quarantined(world([own], DEVICES, [replica(own, "r")]), [own.name]))
    (stand_in,) = hidden.models.values()
    assert stand_in.spec.tenants == ("acme",)


def test_world_without_quarantined_models_is_returned_as_the_same_object() -> None:
    healthy = world([A])
    assert mask_quarantined(healthy) is healthy


# --- the loop ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", [one for one in POINTS if one.startswith("autoscaler.")])
def test_exception_at_any_point_affects_only_the_model_that_caused_it(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = inject(monkeypatch, point, concerns("b"))
    loop = stepped(replica(B, "rb", ["gpu1"]))
    for _ in range(3):
        loop.step(called(A, B, C, now_s=loop.now_s), *seen(loop, B))
        publish_all(loop)
        loop.now_s += 1.0
    assert {"a", "c"} <= set(started(loop))
    assert "b" not in started(loop)
    assert loop.loop.world.replicas[ReplicaId("rb")].state is S.READY
    assert {name for name, _ in faults.reported} <= {"b"}
    assert set(loop.loop.world.learned.faults) <= {"b"}
    assert loop.loop.world.degraded == ""


def seen(loop: SteppedLoop, of: Model) -> list[ReplicaSeen]:
    return [seen_of(one, Seen.READY) for one in loop.loop.world.replicas.values() if one.model == of.name]


def publish_all(loop: SteppedLoop) -> None:
    loop.loop.contained("publish", catalogue.catalogue_full)
    loop.loop.contained("publish", lambda at: routes.routes_full(at, GatewayId("g1"), loop.now_s))


def test_requests_for_a_faulty_cold_model_are_told_to_retry_in_60_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("b"))
    loop = stepped()
    after = loop.step(called(A, B))
    route = routes.model_route(after, B.name, T0, GatewayId("g1"))
    assert route is not None
    assert route.refusal is not None
    assert (route.state, route.refusal.code, route.refusal.retry_after_s) == ("failed", "model_faulty", 60.0)
    other = routes.model_route(after, A.name, T0, GatewayId("g1"))
    assert other is not None
    assert other.refusal is None


def test_ready_replica_of_a_quarantined_model_goes_on_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("b"))
    loop = stepped(replica(B, "rb", ["gpu1"], state=S.READY))
    after = loop.step(called(B))
    assert set(after.learned.faults) == {"b"}
    full = routes.routes_full(after, GatewayId("g1"), T0)
    assert [(one.replica, one.state) for one in full.replicas] == [("rb", S.READY)]
    assert [(one.state, one.refusal) for one in full.models if one.model == "b"] == [("ready", None)]
    assert loop.driver.stopped == []


def test_routes_reject_requests_of_a_model_only_during_its_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("b"))
    loop, g1 = stepped(), GatewayId("g1")
    before = loop.loop.world
    after = loop.step(called(B))
    delta = routes.routes_delta(before, after, g1, T0)
    assert delta is not None
    assert delta.version > before.version
    assert [one.refusal is not None for one in delta.models if one.model == "b"] == [True]
    faults.stop()
    loop.now_s += 61.0
    later = loop.step(Tick())
    delta = routes.routes_delta(after, later, g1, loop.now_s)
    assert delta is not None
    assert [one.refusal for one in delta.models if one.model == "b"] == [None]


def test_quarantine_doubles_with_each_fault_up_to_thirty_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("b"))
    loop, lasted = stepped(), list[float]()
    for _ in range(7):
        loop.step(called(B, now_s=loop.now_s))
        fault = loop.loop.world.learned.faults[B.name]
        lasted.append(fault.until_s - loop.now_s)
        loop.now_s = fault.until_s
    assert lasted == [60.0, 120.0, 240.0, 480.0, 960.0, 1800.0, 1800.0]
    assert faults.reported == [("b", "plan")] * 7
    faults.stop()
    loop.step(called(B, now_s=loop.now_s))
    assert started(loop) == ["b"]
    loop.now_s += TRIAL_S
    assert loop.step(Tick()).learned.faults == {}


def test_changed_document_ends_the_quarantine_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(
        monkeypatch,
        "autoscaler.demand.desired_replicas:compute_desired_replicas",
        lambda _, of, __: of.name == "b" and not of.spec.aliases,
    )
    loop = stepped()
    loop.step(called(B))
    assert loop.step(DocumentsSeen(models=(A, B, C))).learned.faults
    other = replace(B, spec=replace(B.spec, aliases=("x",)))
    assert loop.step(DocumentsSeen(models=(A, other, C)), called(B, now_s=T0 + 1)).learned.faults == {}
    assert started(loop) == ["b"]


def test_operator_wake_ends_the_quarantine_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("b"))
    loop = stepped()
    loop.step(called(B))
    faults.stop()
    loop.step(ModelWoken(model=B.name))
    assert started(loop) == ["b"]
    assert loop.loop.world.learned.faults[B.name].times == 1  # a fault within half an hour doubles the next quarantine


def test_observation_of_a_quarantined_model_is_applied_after_quarantine(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.fold.replicas:apply_replica_observation", concerns("b"))
    loop = stepped(replica(B, "rb", ["gpu1"], state=S.STARTING))
    loop.step(*seen(loop, B))
    faults.stop()
    assert loop.step(Tick()).replicas[ReplicaId("rb")].state is S.STARTING
    assert loop.step(ModelWoken(model=B.name)).replicas[ReplicaId("rb")].state is S.READY


def test_operator_stop_of_a_quarantined_model_drains_its_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", concerns("b"))
    loop = stepped(replica(B, "rb"))
    loop.step(called(B))
    assert loop.step(ModelStopped(model=B.name)).replicas[ReplicaId("rb")].state is S.DRAINING


def test_previous_document_stays_in_force_if_applying_a_new_one_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = stepped()
    faults = inject(
        monkeypatch, "autoscaler.fold.fold:correct_memory_estimate", lambda of, _: of.name == "b" and of.spec.paused
    )
    changed = [replace(one, spec=replace(one.spec, paused=True)) for one in (A, B, C)]
    after = loop.step(DocumentsSeen(models=tuple(changed)))
    assert [after.models[one.name].spec.paused for one in (A, B, C)] == [True, False, True]
    assert set(after.learned.faults) == {"b"}
    faults.stop()
    loop.now_s += RETRY_S_MAX
    assert loop.step(Tick()).models[B.name].spec.paused


def test_planning_fault_of_no_model_marks_the_loop_degraded_until_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = stepped()
    faults = inject(monkeypatch, "autoscaler.provisioning.provisioner:provision_capacity", lambda *_: True)
    after = loop.step(called(A))
    assert after.degraded.startswith("plan: InjectedError in ")
    assert (started(loop), after.learned.faults, faults.reported) == ([], {}, [(None, "plan")])
    faults.stop()
    assert loop.step(Tick()).degraded  # not before the quarantine ends
    loop.now_s += 1.0
    assert loop.step(Tick()).degraded == ""
    assert started(loop) == ["a"]


def test_observation_that_fails_to_apply_is_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = stepped()
    faults = inject(monkeypatch, "autoscaler.fold.gateway_reports:register_gateway", lambda *_: True)
    after = loop.step(GatewaySeen(gateway=GatewayId("g2")), called(A))
    assert after.degraded.startswith("fold: InjectedError in ")
    assert (after.loads[A.name].waiting, started(loop)) == (1, ["a"]), "all else goes on"
    faults.stop()
    loop.now_s += RETRY_S_MAX
    after = loop.step(Tick())
    assert (after.degraded, "g2" in after.gateways) == ("", True)


def test_slots_used_by_a_faulty_model_do_not_count_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the same slot would be given to another gateway."""
    loop = stepped(replica(B, "rb", ["gpu1"], state=S.READY))
    use = ReplicaUse(replica=ReplicaId("rb"), hold=1, in_use=1)
    levels = (level("a", 1), level("b", 0, 1))
    inject(monkeypatch, "autoscaler.fold.gateway_reports:_comes_back", lambda _draft, name, *_: name == "b")
    report = Report(gateway=GatewayId("g1"), boot="b", sequence=2, epoch=1, levels=levels, replicas=(use,))
    after = loop.step(Reported(report=report))
    assert set(after.learned.faults) == {"b"}
    assert (after.gateways[GatewayId("g1")].uses, after.loads[A.name].waiting) == ({use.replica: use}, 1)


def test_newer_observation_replaces_an_older_one_that_failed_to_apply(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a replica that is gone would reappear when the older observation is folded."""
    faults = inject(
        monkeypatch, "autoscaler.fold.replicas:apply_replica_observation", lambda _, one: one.seen is Seen.READY
    )
    loop = stepped(replica(B, "rb", ["gpu1"]))
    one = loop.loop.world.replicas[ReplicaId("rb")]
    loop.step(seen_of(one, Seen.READY), seen_of(one, Seen.EXITED), seen_of(one, Seen.CLEAN, proof="exited"))
    faults.stop()
    loop.now_s += RETRY_S_MAX
    assert "rb" not in loop.step(Tick(), ModelWoken(model=B.name)).replicas


def test_retried_observations_of_two_gateways_do_not_replace_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = stepped()
    loop.step(*(GatewaySeen(gateway=GatewayId(name)) for name in ("g2", "g3")))
    faults = inject(monkeypatch, "autoscaler.fold.gateway_reports:mark_gateway_gone", lambda *_: True)
    loop.step(*(GatewayGone(gateway=GatewayId(name)) for name in ("g2", "g3")))
    faults.stop()
    loop.now_s += RETRY_S_MAX
    loop.step(Tick())
    assert all(loop.loop.world.gateways[GatewayId(name)].gone for name in ("g2", "g3"))


def test_failed_action_is_discarded_when_the_leadership_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "tests.support.harness.manual_loop:IdleDriver.stop", concerns("b"))
    loop = stepped(replica(B, "rb", state=S.FAILED))
    loop.step(called(A))
    faults.stop()
    loop.step(FollowingSeen())
    loop.now_s += RETRY_S_MAX
    loop.step(Tick())
    assert not loop.driver.stopped


def test_many_faulty_models_do_not_stop_the_other_models(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = [model(f"x{number}", 1) for number in range(2 * CULPRITS_MAX + 3)]
    faults = inject(
        monkeypatch,
        "autoscaler.demand.desired_replicas:compute_desired_replicas",
        lambda _, one, *__: one.name.startswith("x"),
    )
    loop = SteppedLoop(world([A, *bad], DEVICES))
    for _ in range(4):
        loop.step(called(A, *bad, now_s=loop.now_s))
        loop.now_s += 1.0
    assert started(loop) == ["a"]
    assert set(loop.loop.world.learned.faults) == {one.name for one in bad}
    assert loop.loop.world.degraded == ""
    assert faults.reported


def test_new_model_whose_document_raises_an_exception_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(
        monkeypatch, "autoscaler.fold.fold:correct_memory_estimate", lambda one, _: one.name == "b" and one.memory_bytes
    )
    loop = SteppedLoop(world([A], DEVICES))
    after = loop.step(DocumentsSeen(models=(A, B, C)), called(C))
    assert set(after.models) == {"a", "b", "c"}
    assert set(after.learned.faults) == {"b"}
    assert started(loop) == ["c"]
    faults.stop()
    loop.now_s += RETRY_S_MAX
    assert loop.step(ModelWoken(model=B.name)).models[B.name] == B


@pytest.mark.parametrize("order", ["start", "stop", "obstacle"])
def test_driver_error_for_one_model_does_not_affect_the_others(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, f"tests.support.harness.manual_loop:IdleDriver.{order}", concerns("b"))
    loop = stepped(*([replica(B, "rb", state=S.FAILED)] if order == "stop" else []))
    after = loop.step(called(A, B))
    assert started(loop) == ["a"]
    assert set(after.learned.faults) == {"b"}
    if order == "start":
        (tried,) = [one for one in after.replicas.values() if one.model == "b"]
        assert "InjectedError" in tried.failure
    faults.stop()
    loop.now_s += RETRY_S_MAX
    loop.step(called(A, B, now_s=loop.now_s))
    assert order != "stop" or [one.id for one in loop.driver.stopped] == ["rb"]


def test_fault_reported_by_a_driver_is_recorded_for_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop = stepped()
    after = loop.step(FaultSeen(model=B.name, reason="KeyError: 7"), FaultSeen(model=ModelName(""), reason="OSError"))
    assert (after.learned.faults[B.name].reason, after.degraded) == ("KeyError: 7", "driver: OSError")
    assert faults.reported == [("b", "driver"), (None, "driver")]
    assert loop.step(FaultSeen(model=ModelName(""), reason="")).degraded == ""


def test_exception_in_a_listener_does_not_stop_the_control_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop, works = stepped(), [False]

    def listener(_: object) -> None:
        if not works[0]:
            raise InjectedError("listener")

    loop.loop.listeners.append(listener)
    after = loop.step(called(A))
    assert started(loop) == ["a"]
    loop.step(Tick())
    assert len(faults.reported) == 1
    assert "listener" in loop.loop.world.degraded
    works[0] = True
    loop.step(Tick())
    assert (loop.loop.world.degraded, after.learned.faults) == ("", {})


def test_memory_error_is_not_caught_by_the_control_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def exhausted(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("autoscaler.demand.desired_replicas.compute_desired_replicas", exhausted)
    with pytest.raises(MemoryError):
        stepped().step(called(A))


async def fails(times: int, error: Exception) -> list[tuple[float, str]]:
    """Reports of a task that raises `times` times and then runs for two minutes, each with its time."""
    clock, messages = asyncio.get_running_loop(), list[tuple[float, str]]()
    tries = iter(range(times))

    async def work() -> None:
        if next(tries, None) is not None:
            raise error
        await asyncio.sleep(120)

    await retry_until_success(work, lambda reason: messages.append((clock.time(), reason)))
    return messages


async def test_work_whose_cleanup_fails_is_not_retried_after_its_cancellation() -> None:
    """A TaskGroup raises the exception of its child instead of the cancellation."""
    begun, reasons = list[int](), list[str]()

    async def fails_when_cancelled() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("cleanup")

    async def work() -> None:
        begun.append(1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(fails_when_cancelled())

    task = asyncio.create_task(retry_until_success(work, reasons.append))
    while not begun:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait((task,))
    assert (task.cancelled(), len(begun), len(reasons)) == (True, 1, 1)


def test_failed_driver_task_is_retried_after_a_doubling_delay() -> None:
    reported = virtual_loop.run(fails(3, ValueError("odd")))
    begun_s = reported[0][0]
    assert [at_s - begun_s for at_s, _ in reported] == [0, 1, 3, 67, 127]
    assert ["odd" in reason for _, reason in reported] == [True, True, True, False, False]


@pytest.mark.parametrize(
    "error", [MemoryError(), ExceptionGroup("", [ValueError(), ExceptionGroup("", [MemoryError()])])]
)
def test_memory_error_ends_a_driver_task_without_a_retry(error: Exception) -> None:
    with pytest.raises(type(error)):
        virtual_loop.run(fails(1, error))


# --- what people and programs read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "point",
    [
        "autoscaler.demand.desired_replicas:compute_desired_replicas",
        "autoscaler.explain.status_rows:_why",
        "autoscaler.server.read_responses:effective_idle_window",
    ],
)
def test_status_and_explain_show_a_faulty_model_and_all_other_models(
    point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inject(monkeypatch, point, concerns("b"))
    loop = stepped(replica(C, "rc"))
    loop.step(called(A, B))
    if point.startswith("autoscaler.server"):
        monkeypatch.setattr("autoscaler.server.read_responses.effective_idle_window", refuses_b)
    now_s, planned = loop.now_s, loop.loop.plan

    def rows(at: World) -> tuple[Row, ...]:
        return status_rows.list_status_rows(at, planned, now_s)

    if point.startswith("autoscaler.server"):
        loop.loop.contained("status", read_responses.list_models)
    shown = {row.model: row for row in loop.loop.contained("status", rows)}
    views = {one.name: one for one in loop.loop.contained("status", read_responses.list_models)}
    assert set(shown) == set(views) == {"a", "b", "c"}
    assert shown[B.name].state == "faulty"
    assert "InjectedError" in shown[B.name].why
    assert "pilotlight wake b" in shown[B.name].why
    assert "InjectedError" in views[B.name].faulty
    message = loop.loop.contained("explain", lambda at: explain.explain_model(at, planned, Log(), B.name, now_s))
    assert "InjectedError" in message.sentences[0]
    assert loop.loop.contained("explain", lambda at: explain.explain_model(at, planned, Log(), A.name, now_s)).sentences


def refuses_b(_: World, of: Model, __: object) -> tuple[float, bool]:
    if of.name == "b":
        raise InjectedError("injected into idle_s")
    return 1.0, False


# --- work outside of the `World` that is retried ----------------------------------------------------------------------


def test_retry_callback_runs_before_planning_when_a_quarantine_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop, asked = stepped(), list[frozenset[ModelName]]()

    def retry(ended: frozenset[ModelName]) -> None:
        asked.append(ended)
        if len(asked) < 3:
            loop.loop.fault(B.name, "documents", "KeyError: 7")

    loop.loop.retries.append(retry)
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7", part="documents"), called(B))
    assert (asked, faults.reported) == ([], [("b", "documents")])
    for times, lasts_s in ((2, 60.0), (3, 120.0)):
        loop.now_s += lasts_s
        loop.step(called(B, now_s=loop.now_s))
        assert loop.loop.world.learned.faults[B.name].times == times
        assert started(loop) == []
    loop.step(ModelWoken(model=B.name), called(B, now_s=loop.now_s))
    assert asked == [{"b"}] * 3
    assert started(loop) == ["b"]


def test_end_of_a_fault_clears_it_only_if_reported_by_the_same_part(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop = stepped()
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7"))
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7", part="plan", is_over=True))
    assert set(loop.loop.world.learned.faults) == {"b"}
    loop.step(FaultSeen(model=B.name, reason="KeyError: 8", is_over=True))
    assert loop.loop.world.learned.faults == {}


def test_retry_callback_runs_for_a_quarantine_that_ends_between_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop, asked = stepped(), list[set[str]]()
    loop.loop.retries.append(lambda names: asked.append({*names}))
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7"))
    loop.now_s += 60.0
    loop.loop.fault(A.name, "status", "KeyError: 8")
    assert set(list_quarantined_models(loop.loop.world)) == {"a"}, "time passed when the fault was recorded"
    loop.step()
    assert asked == [{"b"}]
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7"), ModelWoken(model=B.name))
    assert asked == [{"b"}, {"b"}], "a quarantine may begin and end in one step"
    loop.step()
    assert len(asked) == 2


def test_model_starts_after_the_retry_if_its_quarantine_ends_within_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, asked = stepped(), list[set[str]]()
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop.loop.retries.append(lambda names: asked.append({*names}))
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7"))
    loop.now_s += 59.9
    real = loop.driver.obstacle

    def obstacle(of: Model) -> str:
        loop.now_s += 0.1
        loop.loop.fault(C.name, "driver", "KeyError: 8")
        return real(of)

    monkeypatch.setattr(loop.driver, "obstacle", obstacle)
    loop.step(called(A, B, now_s=loop.now_s))
    assert set(list_quarantined_models(loop.loop.world)) == {"c"}
    assert (asked, started(loop)) == ([], ["a"])
    loop.step(called(A, B, now_s=loop.now_s))
    assert (asked, started(loop)) == ([{"b"}], ["a", "b"])


def test_retry_callback_that_raises_is_repeated_after_a_growing_backoff(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop, asked = stepped(), list[tuple[float, set[str]]]()

    def retry(names: frozenset[ModelName]) -> None:
        asked.append((loop.now_s - T0, {*names}))
        if len(asked) < 5:
            raise InjectedError("retry")

    loop.loop.retries.append(retry)
    over = FaultSeen(model=C.name, reason="KeyError: 7", is_over=True)
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7"), FaultSeen(model=C.name, reason="KeyError: 7"))
    loop.step(ModelWoken(model=B.name), called(A, B))
    for _ in range(10):
        assert started(loop) == ["a"], "nothing starts before its retry"
        loop.now_s += 0.5
        loop.step(*((over,) if loop.now_s == T0 + 5.0 else ()))
    assert asked == [(0.0, {"b"}), (1.0, {"b"}), (3.0, {"b"}), (5.0, {"b", "c"})]
    loop.now_s += 8.0
    after = loop.step(called(A, B, now_s=loop.now_s))
    assert asked[4:] == [(13.0, {"b", "c"})]
    assert (after.degraded, started(loop)) == ("", ["a", "b"])
    loop.now_s += 60.0
    loop.step()
    assert len(asked) == 5


def test_exception_in_a_retry_callback_does_not_stop_the_control_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    faults = inject(monkeypatch, "autoscaler.demand.desired_replicas:compute_desired_replicas", lambda *_: False)
    loop = stepped()

    def retry(_: frozenset[ModelName]) -> None:
        raise InjectedError("retry")

    loop.loop.retries.append(retry)
    loop.step(FaultSeen(model=B.name, reason="KeyError: 7"))
    after = loop.step(ModelWoken(model=B.name), called(A))
    assert "retry: InjectedError" in after.degraded
    assert started(loop) == ["a"]
    assert len(faults.reported) == 2
