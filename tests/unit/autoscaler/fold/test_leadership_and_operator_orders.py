"""Operator orders in virtual time: the plan obeys and reports them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.agent_contract import DeviceReport, NodeReport
from autoscaler.contract import ModelName, ReplicaId
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.explain.status_rows import list_status_rows
from autoscaler.fold.fold import Observation, fold
from autoscaler.planner.plan import plan
from autoscaler.queries.agent_reports import find_device_report
from autoscaler.queries.gateway_reports import decide_stop
from autoscaler.queries.operator_orders import FORCE_S, explain_closed_slice, find_drain_cordon, is_stop_ordered
from autoscaler.server.read_responses import list_nodes
from autoscaler.state.actions import (
    AcquireLease,
    Acted,
    CutNode,
    DrainReplica,
    FailStart,
    ReleaseLease,
    ReviveReplica,
    StartReplica,
)
from autoscaler.state.events import CordonsSeen, ModelStopped, ModelWoken, NodeReported
from autoscaler.state.lifecycle import LIVE
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Cordon, CordonTarget, History, SliceId, World
from tests.support.builders.worlds import (
    T0,
    Scene,
    device,
    folded,
    gateway,
    kinds,
    level,
    model,
    replace_fields,
    replica,
    use,
    world,
)
from tests.support.example_budget import examples
from tests.unit.autoscaler.planner.test_plan import worlds

A = model("a", 20, idle_seconds=600.0)
GPU0, NODE = CordonTarget("device", "gpu0"), CordonTarget("node", "n0")


def after(at: World, *batch: Observation, now_s: float = T0) -> World:
    made, _ = fold(at, batch, now_s)
    return made


def cordon(place: CordonTarget = GPU0, *, drain: bool = False, force: bool = False) -> CordonsSeen:
    return CordonsSeen(cordons=(Cordon(place=place, node="n0", since_s=T0, drain=drain, force=force),))


def no_requests(_now_s: float, _scene: Scene) -> list[tuple[str, int, int]]:
    return []


# --- wake and stop --------------------------------------------------------------------------------------------------


def test_woken_model_starts_and_stays_for_one_idle_timeout() -> None:
    short = model("a", 20, idle_seconds=60.0)
    scene = Scene(after(world([short], [device()]), ModelWoken(model=A.name)), no_requests, start_s=5.0)
    scene.run(30)
    assert [type(action).__name__ for _, action in scene.actions] == ["StartReplica"]
    assert scene.actions[0][1].reason == "wake a: woken by an operator"
    assert scene.ready("a")
    scene.run(60)
    assert not scene.world.by_model, "its window is over"


def test_operator_wake_clears_the_backoff_of_a_failed_start() -> None:
    failed = History(tries=3, episodes=1, refused_until_s=T0 + 600, retry_at_s=T0 + 600, failure="it broke")
    at = world([A], [device()], histories={"a": failed})
    woken = after(at, ModelWoken(model=A.name))
    assert kinds(plan(woken, T0)) == ["start a"]
    assert woken.version == at.version + 1, "gateways hear that Calls are not refused any more"


def test_operator_wake_revives_a_draining_replica() -> None:
    at = folded(world([A], [device()], [replica(A, "r1")]), [DrainReplica(replica=ReplicaId("r1"), reason="idle")])
    assert kinds(plan(after(at, ModelWoken(model=A.name), now_s=T0 + 1), T0 + 1)) == ["revive r1"]


def test_stop_drains_every_replica_despite_running_and_queued_requests() -> None:
    b = model("b", 5, high=3, slots=1)
    calls = [gateway(levels=[level("b", 2, 2)], uses=[use("r1", 1), use("r2", 1)])]
    at = world([b], [device()], [replica(b, "r1"), replica(b, "r2")], calls)
    stopped = after(at, ModelStopped(model=b.name))
    made = plan(stopped, T0)
    assert kinds(made) == ["drain r1", "drain r2"]
    assert {action.reason for action in made.actions} == {"stopped by an operator"}
    drained = folded(stopped, made.actions)
    assert kinds(plan(drained, T0)) == [], "not revived, nothing started beside it"
    why = {row.model: row.why for row in list_status_rows(drained, made, T0)}
    assert why[b.name] == "stopped by an operator"


def test_queued_requests_restart_a_model_after_its_stop_completes() -> None:
    def waits(_now_s: float, _scene: Scene) -> list[tuple[str, int, int]]:
        return [("a", 1, 0)]

    at = world([A], [device()], [replica(A, "r1")])
    scene = Scene(after(at, ModelStopped(model=A.name)), waits)
    scene.run(3)
    verbs = [(type(action).__name__.removesuffix("Replica")) for _, action in scene.actions]
    assert verbs == ["Drain", "Stop", "Start"]
    assert not scene.world.stops


def test_stop_of_a_model_without_replicas_only_cancels_its_wake() -> None:
    assert not after(world([A], [device()]), ModelStopped(model=A.name)).stops
    woken = after(world([A], [device()]), ModelWoken(model=A.name))
    assert kinds(plan(after(woken, ModelStopped(model=A.name)), T0)) == []


def test_operator_stop_is_not_recorded_as_an_idle_stop() -> None:
    at = after(world([A], [device()], [replica(A, "r1")]), ModelStopped(model=A.name))
    at = folded(at, plan(at, T0).actions)
    scene = Scene(at, no_requests)
    scene.run(2)
    assert not scene.world.replicas
    assert scene.world.learned.histories[A.name].stopped_idle_s is None


def test_forced_stop_shortens_the_wait_for_running_requests() -> None:
    at = world([A], [device()], [replica(A, "r1")], [gateway(levels=[level("a", 0, 1)], uses=[use("r1", 1)])])
    at = after(at, ModelStopped(model=A.name))
    at = folded(at, plan(at, T0).actions)
    drains = at.replicas[ReplicaId("r1")]
    assert decide_stop(at, drains, T0 + FORCE_S).next_s == T0 + A.spec.drain_seconds_max
    forced = after(at, ModelStopped(model=A.name, force=True), now_s=T0 + 5)
    assert not decide_stop(forced, drains, T0 + 5 + FORCE_S - 0.1).stop
    assert decide_stop(forced, drains, T0 + 5 + FORCE_S).stop
    calmer = after(forced, ModelStopped(model=A.name), now_s=T0 + 6)
    assert calmer.stops[A.name].force, "what is forced stays forced"


# --- cordon and drain -----------------------------------------------------------------------------------------------


def test_cordoned_device_gets_no_replica_and_explain_gives_the_reason() -> None:
    requests = [gateway(levels=[level("a", 1)])]
    at = after(world([A], [device()], [], requests), cordon())
    made = plan(at, T0)
    assert kinds(made) == []
    (unmet,) = made.unmet
    assert unmet.reason == "needs 20Gi on one device; device gpu0 is cordoned by an operator"
    assert not unmet.never
    assert list_status_rows(at, made, T0)[0].why == unmet.reason
    explanation = explain_model(at, made, Log(), A.name, T0)
    assert explanation.candidates[0].ruled_out == "device gpu0 is cordoned by an operator"
    opened = after(at, CordonsSeen(cordons=()))
    assert kinds(plan(opened, T0)) == ["start a"]


def test_cordoned_node_excludes_only_its_own_devices_from_placement() -> None:
    requests = [gateway(levels=[level("a", 1)])]
    devices = [device("gpu0"), device("gpu1"), device("gpu2", node="n1")]
    (start,) = plan(after(world([A], devices, [], requests), cordon(NODE)), T0).actions
    assert isinstance(start, StartReplica)
    assert start.replica.resources.slices == (SliceId("gpu2"),)


def test_replica_on_a_cordoned_device_stays_and_is_not_evicted() -> None:
    other = model("b", 20)
    at = world([A, other], [device()], [replica(A, "r1")], [gateway(levels=[level("b", 1)])])
    assert kinds(plan(at, T0)) == ["drain r1"], "without a cordon it makes room"
    assert kinds(plan(after(at, cordon()), T0)) == []


def test_drained_device_is_vacated_after_a_replacement_is_ready_elsewhere() -> None:
    at = world([A], [device("gpu0"), device("gpu1")], [replica(A, "r1")])
    scene = Scene(after(at, cordon(drain=True)), lambda now_s, scene: [("a", 0, 1)], start_s=5.0)
    scene.run(20)
    reasons = [(type(action).__name__.removesuffix("Replica"), action.reason) for _, action in scene.actions]
    assert [verb for verb, _ in reasons] == ["Start", "Drain", "Stop"]
    assert reasons[0][1] == "move a: device gpu0 is drained by an operator"
    assert reasons[1][1] == "device gpu0 is drained by an operator"
    (left,) = scene.world.replicas.values()
    assert (left.state, left.resources.slices) == (S.READY, (SliceId("gpu1"),))


def test_drained_device_is_vacated_even_without_a_replacement_device() -> None:
    at = world([A], [device("gpu0")], [replica(A, "r1")])
    scene = Scene(after(at, cordon(drain=True)), no_requests)
    scene.run(3)
    assert [type(action).__name__ for _, action in scene.actions] == ["DrainReplica", "StopReplica"]
    assert "no slice is free for its replacement" in scene.actions[0][1].reason
    assert not scene.world.by_slice


def test_queued_requests_do_not_revive_a_replica_on_a_drained_device() -> None:
    at = after(world([A], [device()], [replica(A, "r1")], [gateway(levels=[level("a", 3)])]), cordon(drain=True))
    at, _ = fold(at, [Acted(action=DrainReplica(replica=ReplicaId("r1"), reason="moves"))], T0)
    assert kinds(plan(at, T0)) == []


def test_failing_replacement_keeps_the_old_replica_unless_drain_is_forced() -> None:
    fails = History(tries=1, retry_at_s=T0 + 60, failure="no memory", episodes=1)
    at = world([A], [device("gpu0"), device("gpu1")], [replica(A, "r1")], histories={"a": fails})
    made = plan(after(at, cordon(drain=True)), T0)
    assert kinds(made) == []
    assert made.unmet[0].reason.startswith("its replacement failed to start, and the old one keeps serving")
    assert kinds(plan(after(at, cordon(drain=True, force=True)), T0)) == ["drain r1"]


def test_forced_device_drain_does_not_wait_for_a_replacement_replica() -> None:
    at = world([A], [device("gpu0"), device("gpu1")], [replica(A, "r1")], [gateway(levels=[level("a", 2, 1)])])
    forced = after(at, cordon(drain=True, force=True))
    first = plan(forced, T0)
    assert kinds(first) == ["drain r1"]
    then = folded(forced, first.actions)
    assert kinds(plan(then, T0)) == ["start a"]
    busy = replace(then, gateways={g.id: replace(g, uses={u.replica: u for u in [use("r1", 1)]})
                                   for g in then.gateways.values()})  # fmt: skip
    drains = busy.replicas[ReplicaId("r1")]
    assert not decide_stop(busy, drains, T0 + FORCE_S - 1).stop
    assert decide_stop(busy, drains, T0 + FORCE_S).stop


def test_forced_device_drain_drains_all_its_replicas_of_an_idle_model() -> None:
    starting = [replica(A, f"r{at}", state=S.STARTING, on=[on]) for at, on in enumerate(("gpu0", "gpu0", "gpu1"))]
    at = world([A], [device("gpu0"), device("gpu1")], starting)
    made = plan(after(at, cordon(drain=True, force=True)), T0)
    assert {"drain r0", "drain r1"} <= {*kinds(made)}


def test_drained_node_moves_its_replicas_one_at_a_time() -> None:
    b = model("b", 20, low=2, high=2)
    on = [replica(b, "r1", on=["gpu0"]), replica(b, "r2", on=["gpu1"])]
    at = world([b], [device("gpu0"), device("gpu1"), device("gpu2", node="n1"), device("gpu3", node="n1")], on)
    scene = Scene(after(at, cordon(NODE, drain=True)), no_requests, start_s=3.0)
    scene.run(30)
    verbs = "".join(type(action).__name__[0:2] for _, action in scene.actions)
    assert verbs == "StDrSt" * 2, "start, drain, stop; and again"
    assert {one.resources.slices for one in scene.world.replicas.values()} == {(SliceId("gpu2"),), (SliceId("gpu3"),)}


@st.composite
def ordered(draw: st.DrawFn) -> World:
    """A `World` with arbitrary orders for its three devices, its node and its Models."""
    places = [NODE, *(CordonTarget("device", f"g{i}") for i in range(3))]
    drains = st.tuples(st.sampled_from(places), st.booleans(), st.booleans())
    cordons = {
        place: Cordon(place=place, node="n0", since_s=T0 - 5, drain=drain, force=drain and force)
        for place, drain, force in draw(st.lists(drains, max_size=3))
    }
    stopped = draw(st.sets(st.sampled_from("abcd"), max_size=2))
    made = replace_fields(draw(worlds()), cordons=cordons)
    return after(made, *(ModelStopped(model=ModelName(name)) for name in sorted(stopped)))


@settings(derandomize=True, deadline=None, max_examples=examples(300))
@given(ordered())
def test_plan_never_starts_a_stopped_model_or_uses_a_cordoned_device(begin: World) -> None:
    at, seen = begin, set[str]()
    for _ in range(6):
        made = plan(at, T0)
        for action in made.actions:
            if isinstance(action, StartReplica):
                assert not any(explain_closed_slice(at, at.nodes.slices[id]) for id in action.replica.resources.slices)
                assert action.replica.model not in at.stops
            elif isinstance(action, ReviveReplica):
                assert not is_stop_ordered(at, at.replicas[action.replica])
            if not isinstance(action, StartReplica | FailStart | CutNode | AcquireLease | ReleaseLease):
                word = f"{type(action).__name__} {action.replica}"
                assert word not in seen
                seen.add(word)
        at = folded(at, made.actions)
    assert plan(at, T0).actions == ()
    for replica_ in at.replicas.values():
        cordon_ = find_drain_cordon(at, replica_)
        if replica_.model in at.stops or (cordon_ is not None and cordon_.force):
            assert replica_.state not in LIVE


# --- node agents ----------------------------------------------------------------------------------------------------


def report(sequence: int, boot: str = "b1", used: int = 5) -> NodeReported:
    devices = (DeviceReport(id="gpu0", memory_bytes=24, used_bytes=used),)
    return NodeReported(report=NodeReport(node="n0", boot=boot, sequence=sequence, devices=devices))


def used_bytes(at: World, now_s: float = T0) -> int | None:
    found = find_device_report(at, at.nodes.slices[SliceId("gpu0")], now_s)
    return None if found is None else found.used_bytes


def test_node_report_expires_after_ten_seconds() -> None:
    at = world([A], [device()])
    assert used_bytes(at) is None, "no agent is not zero"
    at = after(at, report(1))
    assert used_bytes(at) == 5
    assert used_bytes(at, T0 + 9.9) == 5
    assert used_bytes(at, T0 + 10.0) is None
    (shown,) = list_nodes(at, T0 + 11)
    assert (shown.name, shown.age_seconds, shown.fresh) == ("n0", 11.0, False)


def test_late_and_duplicate_node_reports_are_ignored() -> None:
    at = after(world([A], [device()]), report(2, used=7))
    for stale in (report(2, used=1), report(1, used=1)):
        assert after(at, stale, now_s=T0 + 1) is at
    reborn = after(at, report(1, boot="b2", used=9), now_s=T0 + 1)
    assert used_bytes(reborn) == 9
    assert after(reborn, report(3, boot="b1", used=1), now_s=T0 + 2) is reborn, (
        "the report of an agent that was removed"
    )


def test_operator_wake_of_an_unknown_model_changes_nothing() -> None:
    at = after(world([A], [device()]))
    assert after(at, ModelWoken(model=ModelName("x"))) is at
