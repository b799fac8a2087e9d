"""The plan: a `World` in; ordered actions with reasons out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.demand.model_history import start_deadline_s
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.explain.status_rows import list_status_rows
from autoscaler.planner.plan import plan
from autoscaler.queries.gateway_reports import PROGRESS_S, STALLED, STALLED_GRACE_S
from autoscaler.spec.model import ADOPTED_HASH, Gpu, Rollout, StartLimits
from autoscaler.state.actions import (
    AcquireLease,
    Acted,
    CutNode,
    DrainReplica,
    FailStart,
    Plan,
    ReleaseLease,
    ReviveReplica,
    StartReplica,
    StopReplica,
)
from autoscaler.state.capacity import LeasesSeen, OffersSeen, ProvidersSeen
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Gateway, History, World
from tests.support.builders.capacity import observe, offer, surge
from tests.support.builders.fold import DOC, M, R, after, moved, pending, seen
from tests.support.builders.worlds import (
    GI,
    T0,
    Scene,
    device,
    drain,
    folded,
    gateway,
    kinds,
    level,
    model,
    replica,
    use,
    verb,
    world,
)
from tests.support.example_budget import examples
from tests.support.fakes.provider import FakeProvider, Fate

A, B = model("a", 20), model("b", 20)


def acknowledged(name: str = "g1", **fields: Any) -> Gateway:
    """A gateway that has applied version 2; `fields` are those of `gateway`."""
    made = gateway(name, **fields)
    assert made.report is not None
    return replace(made, report=replace(made.report, version=2))


def test_plan_is_empty_before_the_driver_has_synced() -> None:
    calls = [gateway(levels=[level("a", 3)])]
    assert plan(world([A], [device()], gateways=calls, synced=False), T0).actions == ()


def test_waiting_requests_at_scale_zero_start_a_replica() -> None:
    made = plan(world([A], [device()], gateways=[gateway(levels=[level("a", 3)])]), T0)
    start = made.actions[0]
    assert isinstance(start, StartReplica)
    assert start.reason == "wake a: 3 waiting, tenant acme"
    assert (start.replica.resources.slices, start.replica.resources.memory_bytes, start.replica.state) == (
        ("gpu0",),
        20 * GI,
        S.PENDING,
    )
    assert start.replica.id == f"a-{A.spec_hash()}-{start.replica.intent}"


def test_equal_input_gives_an_equal_plan_until_the_leader_epoch_changes() -> None:
    made = world([A], [device()], gateways=[gateway(levels=[level("a", 3)])])
    assert plan(made, T0) == plan(made, T0)
    assert plan(made, T0).actions != plan(replace(made, epoch=2), T0).actions


def test_slash_and_colon_in_a_model_name_become_hyphens_in_the_replica_id() -> None:
    odd = model("team/../llama:8b")
    start = plan(world([odd], [device()], gateways=[gateway(levels=[level(odd.name, 1)])]), T0).actions[0]
    assert isinstance(start, StartReplica)
    assert start.replica.id.startswith("team-..-llama-8b-")


def test_replicas_on_one_device_start_one_after_the_other() -> None:
    a = model("a", 5, slots=1, high=3)
    begin = world([a], [device()], gateways=[gateway(levels=[level("a", 9, wait_s=60)])])
    first = plan(begin, T0)
    assert kinds(first) == ["start a"]
    after = folded(begin, first.actions)
    assert plan(after, T0).actions == ()
    waits = plan(after, T0 + 1).unmet[0].reason
    assert waits == "waits on gpu0 until the replica that is starting there is ready; replicas start one at a time"


def test_hanging_start_locks_its_device_for_a_limited_time() -> None:
    hung = replica(A, "a-r", state=S.STARTING, since_s=T0, started_s=T0, memory_bytes=GI)
    small = model("b", 2)
    made = world([A, small], [device()], [hung], [gateway(levels=[level("a", 1), level("b", 1)], seen_s=T0 + 119)])
    assert kinds(plan(made, T0 + 119)) == []
    assert plan(made, T0 + 119).next_s == T0 + 120
    assert kinds(plan(made, T0 + 120)) == ["start b"]
    grew = replace(made, replicas={hung.id: replace(hung, times=replace(hung.times, grown_s=T0 + 50))})
    assert kinds(plan(grew, T0 + 120)) == []


def test_idle_replica_drains_and_stops_once_gateways_acknowledge() -> None:
    idle = History(last_activity_s=T0 - 60)
    begin = world([A], [device()], [replica(A, "r")], histories={"a": idle})
    made = plan(begin, T0)
    assert made.actions == (DrainReplica(replica=replica(A, "r").id, reason="idle for 60 s"),)
    after = folded(begin, made.actions)
    assert plan(after, T0).actions == ()
    acked = replace(after, gateways={g.id: g for g in [acknowledged()]})
    assert kinds(plan(acked, T0 + 1)) == ["stop r"]


@pytest.mark.parametrize(
    ("gateway_", "stops"),
    [
        (acknowledged(), True),
        (gateway(), False),
        (acknowledged(uses=[use("r", 1)]), False),
        (gateway(in_epoch=False, report=None), False),
        (gateway(gone=True), True),
    ],
    ids=["acknowledged", "older version", "a Call is on it", "silent", "gone"],
)
def test_drained_replica_stops_only_after_all_gateways_acknowledge(gateway_: Gateway, stops: bool) -> None:
    going = replica(A, "r", state=S.DRAINING, drain=drain())
    made = plan(world([A], [device()], [going], [acknowledged("g0"), gateway_]), T0)
    assert kinds(made) == (["stop r"] if stops else [])


def test_drain_ends_after_its_grace_period() -> None:
    a = model("a", drain_seconds_max=30.0)
    going = replica(a, "r", state=S.DRAINING, drain=drain(since_s=T0 - 29))
    made = world([a], [device()], [going], [gateway(uses=[use("r", 2)])])
    assert (kinds(plan(made, T0)), plan(made, T0).next_s) == ([], T0 + 1)
    assert kinds(plan(made, T0 + 1)) == ["stop r"]


def test_new_leader_delays_stops_10_s_if_a_gateway_has_not_reported() -> None:
    going = replica(A, "r", state=S.DRAINING, drain=drain(since_s=T0 - 700))
    strange = gateway("g2", in_epoch=False)
    made = world([A], [device()], [going], [acknowledged(), strange], leading_since_s=T0 - 4)
    assert (kinds(plan(made, T0)), plan(made, T0).next_s) == ([], T0 + 6)
    assert kinds(plan(made, T0 + 6)) == ["stop r"]


@pytest.mark.case("11")
def test_request_during_a_drain_revives_the_replica() -> None:
    going = replica(A, "r", state=S.DRAINING, drain=drain())
    made = plan(world([A], [device()], [going], [acknowledged(levels=[level("a", 1)])]), T0)
    assert made.actions == (ReviveReplica(replica=going.id, reason="wanted again: 1 waiting, tenant acme"),)


def test_scale_down_prefers_starting_then_less_busy_replicas() -> None:
    a = model("a", 2, high=1)
    made = [replica(a, "r1"), replica(a, "r2"), replica(a, "r3", state=S.STARTING)]
    calls = [gateway(levels=[level("a", 0, 3)], uses=[use("r1", 1), use("r2", 2)])]
    history = {"a": History(last_activity_s=T0)}
    assert kinds(plan(world([a], [device()], made, calls, history), T0)) == ["drain r1", "drain r3"][::-1]


def test_start_over_its_time_limit_fails_and_is_stopped() -> None:
    a = model("a", start=StartLimits(seconds_max=30.0))
    slow = replica(a, "r", state=S.STARTING, started_s=T0 - 29)
    made = world([a], [device()], [slow], [gateway(levels=[level("a", 1)])])
    assert (kinds(plan(made, T0)), plan(made, T0).next_s) == ([], T0 + 1)
    failed = plan(made, T0 + 1)
    assert kinds(failed) == ["fail r"]
    assert failed.actions[0].reason == "not ready after 30 s (start.secondsMax)"
    after = folded(made, failed.actions, T0 + 1)
    assert kinds(plan(after, T0 + 1)) == ["stop r"]


def test_retried_start_fails_at_the_time_limit_of_the_first_attempt() -> None:
    a = model("a", start=StartLimits(seconds_max=30.0))
    again = replica(a, "r", state=S.STARTING, started_s=T0 - 5)
    tried = {"a": History(tries=1, first_try_s=T0 - 30)}
    assert kinds(plan(world([a], [device()], [again], histories=tried), T0)) == ["fail r"]


@pytest.mark.case("2")
def test_failed_start_is_retried_after_a_backoff_that_is_reported() -> None:
    calls = [gateway(levels=[level("a", 1)])]
    failing = {"a": History(refused_until_s=T0 + 60, retry_at_s=T0 + 60, episodes=1, failure="exit status 1")}
    made = world([A], [device()], gateways=calls, histories=failing)
    answer = plan(made, T0)
    assert (answer.actions, answer.unmet[0].reason) == ((), "exit status 1; next attempt in 60 s")
    assert kinds(plan(made, T0 + 60)) == ["start a"]


def test_replicas_of_deleted_and_paused_models_drain() -> None:
    removed = world([], [device()], [replica(A, "r")])
    assert plan(removed, T0).actions == (
        DrainReplica(replica=replica(A, "r").id, reason="its Model is no longer in the documents"),
    )
    own = replace(replica(A, "r"), spec_hash=ADOPTED_HASH)
    (drains,) = plan(world([], [device()], [own]), T0).actions
    assert drains.reason == "its Model is no longer annotated, or it was deleted"
    paused = model("a", 20, paused=True)
    assert kinds(plan(world([paused], [device()], [replica(paused, "r")]), T0)) == ["drain r"]


def test_changed_spec_starts_the_new_replica_first_if_both_fit() -> None:
    a = model("a", 10)
    old = replica(a, "old", spec_hash="before")
    calls = [gateway(levels=[level("a", 0, 1)], uses=[use("old", 1)])]
    begin = world([a], [device()], [old], calls, {"a": History(last_activity_s=T0)})
    first = plan(begin, T0)
    assert kinds(first) == ["start a"]
    during = folded(begin, first.actions)
    assert kinds(plan(during, T0)) == []
    ready = {
        r.id: replace(r, state=S.READY, times=replace(r.times, ready_s=T0)) if r.state is S.STARTING else r
        for r in during.replicas.values()
    }
    assert kinds(plan(replace(during, replicas=ready), T0)) == ["drain old"]


def test_changed_spec_drains_one_replica_first_if_surge_does_not_fit() -> None:
    a = model("a", 20, slots=1, high=2)
    old = [replica(a, f"old{i}", [f"gpu{i}"], spec_hash="before") for i in (0, 1)]
    calls = [gateway(levels=[level("a", 0, 2)], uses=[use("old0", 1), use("old1", 1)])]
    begin = world([a], [device(), device("gpu1")], old, calls, {"a": History(last_activity_s=T0)})
    made = plan(begin, T0)
    assert kinds(made) == ["drain old0"]
    assert kinds(plan(folded(begin, made.actions), T0)) == []


def rolling(surge: int, devices: int) -> World:
    """Three busy replicas of an old spec, each on its own device, and `devices` devices in total."""
    a = model("a", 20, slots=1, high=3, rollout=Rollout(surge=surge))
    old = [replica(a, f"old{i}", [f"gpu{i}"], spec_hash="before") for i in range(3)]
    calls = [gateway(levels=[level("a", 0, 3)], uses=[use(f"old{i}", 1) for i in range(3)])]
    names = [device(*(() if i == 0 else (f"gpu{i}",))) for i in range(devices)]
    return world([a], names, old, calls, {"a": History(last_activity_s=T0)})


def seen_ready(world: World) -> World:
    """The `World` after all starting replicas have become ready."""
    replicas = {
        r.id: replace(r, state=S.READY, times=replace(r.times, ready_s=T0)) if r.state is S.STARTING else r
        for r in world.replicas.values()
    }
    return replace(world, replicas=replicas)


def test_changed_spec_of_a_model_with_one_replica_starts_one_successor() -> None:
    old = model("a", 5, low=1, high=4, idle_seconds=100.0)
    new = model("a", 5, low=1, high=4, idle_seconds=100.0, args=("--other",))
    scene = Scene(world([new], [device(memory_gi=80)], [replica(old, "r1")]), lambda _now_s, _scene: [])
    scene.run(60)
    assert [verb(action) for _, action in scene.actions] == ["start", "drain", "stop"]
    assert [scene.world.replicas[id].spec_hash for id in scene.ready("a")] == [new.spec_hash()]


@pytest.mark.parametrize(
    ("surge", "devices", "first"),
    [
        (0, 6, ["drain old0"]),
        (1, 6, ["start a"]),
        (2, 6, ["start a", "start a"]),
        (5, 6, ["start a", "start a", "start a"]),
        (2, 4, ["start a"]),
        (2, 3, ["drain old0"]),
    ],
)
def test_rollout_starts_as_many_replicas_as_surge_and_capacity_allow(
    surge: int, devices: int, first: list[str]
) -> None:
    begin = rolling(surge, devices)
    made = plan(begin, T0)
    assert kinds(made) == first
    during = folded(begin, made.actions)
    if surge:
        assert kinds(plan(during, T0)) == [], "a step is under way"
        new = first.count("start a")
        drains = kinds(plan(seen_ready(during), T0))
        assert drains == [f"drain old{i}" for i in range(new)], "one old one goes for each new one"


def test_old_replica_stays_if_replicas_of_the_changed_spec_fail() -> None:
    old = replica(A, "old", spec_hash="before")
    failed = {"a": History(last_activity_s=T0, episodes=1, failure="no such file", refused_until_s=T0 + 9)}
    calls = [gateway(levels=[level("a", 0, 1)], uses=[use("old", 1)])]
    made = world([A], [device()], [old], calls, failed)
    assert kinds(plan(made, T0)) == []
    assert "the old one keeps serving" in plan(made, T0).unmet[0].reason
    assert kinds(plan(made, T0 + 9)) == []


def test_replica_with_gpu_count_two_gets_two_devices() -> None:
    big = model("big", 20, gpu=Gpu(count=2))
    made = plan(world([big], [device(), device("gpu1")], gateways=[gateway(levels=[level("big", 1)])]), T0)
    start = made.actions[0]
    assert isinstance(start, StartReplica)
    assert start.replica.resources.slices == ("gpu0", "gpu1")


def test_minimum_replicas_start_without_requests_but_evict_no_replica() -> None:
    kept = model("k", 20, low=1)
    assert kinds(plan(world([kept], [device()]), T0)) == ["start k"]
    assert (
        kinds(plan(world([kept, A], [device()], [replica(A, "r")], histories={"a": History(last_activity_s=T0)}), T0))
        == []
    )


# --- properties and scenarios ---------------------------------------------------------------------------------------

CALLS = st.tuples(st.sampled_from("abcd"), st.integers(0, 9), st.integers(0, 3))
STATES = st.sampled_from([S.STARTING, S.READY, S.UNREADY, S.DRAINING, S.FAILED, S.STOPPING, S.SCRUBBING])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    models = [
        model(name, draw(st.sampled_from([6, 12, 20])), high=3, priority=draw(st.integers(0, 1))) for name in "abcd"
    ]
    slices = [device(f"g{i}", 24) for i in range(draw(st.integers(1, 3)))]
    made = []
    for slice_ in slices:
        free = 24 * GI
        for i in range(draw(st.integers(0, 3))):
            of = draw(st.sampled_from(models))
            if of.memory_bytes > free:
                continue
            free -= of.memory_bytes
            state = draw(STATES)
            going = drain(draw(st.sampled_from([T0 - 700, T0 - 1])), victim_of=draw(st.sampled_from([None, "a", "b"])))
            made.append(
                replica(of, f"{slice_.id}-{i}", [slice_.id], state, drain=going if state is S.DRAINING else None)
            )
    levels = [level(name, waiting, running) for name, waiting, running in draw(st.lists(CALLS, max_size=4))]
    used = [use(r.id, draw(st.integers(0, 2))) for r in made]
    first = gateway(levels=levels, uses=used)
    second = draw(st.sampled_from([acknowledged("g2"), gateway("g2", in_epoch=False), gateway("g2", gone=True)]))
    histories = {name: History(last_activity_s=T0 - draw(st.sampled_from([1, 100]))) for name in "abcd"}
    return world(models, slices, made, [first, second], histories)


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(worlds())
def test_applying_plans_repeatedly_converges_to_no_actions(begin: World) -> None:
    seen: set[str] = set()
    after = begin
    for _ in range(4):
        made = plan(after, T0)
        assert not seen & set(kinds(made))
        for action in made.actions:
            if not isinstance(action, StartReplica | FailStart | CutNode | AcquireLease | ReleaseLease):
                seen.add(f"{verb(action)} {action.replica}")
        after = folded(after, made.actions)
    assert plan(after, T0).actions == ()


@settings(derandomize=True, deadline=None, max_examples=examples(200))
@given(worlds())
def test_plan_never_stops_a_draining_replica_before_acknowledgement(begin: World) -> None:
    made = plan(begin, T0)
    for action in made.actions:
        if isinstance(action, StopReplica) and begin.replicas[action.replica].state is S.DRAINING:
            going = begin.replicas[action.replica].drain
            assert going is not None
            if T0 - going.since_s < 600:
                known = [g for g in begin.gateways.values() if not g.gone]
                assert all(g.report is not None and g.report.version >= 2 for g in known)
                assert not any(u.in_use for g in known for u in g.uses.values() if u.replica == action.replica)
    after = folded(begin, made.actions)
    for slice_ in after.nodes.slices.values():
        claimed = sum(after.replicas[id].resources.memory_bytes for id in after.by_slice.get(slice_.id, ()))
        assert claimed <= slice_.memory_bytes
    assert made.next_s is None or made.next_s > T0


@pytest.mark.case("10")
def test_scale_down_from_four_to_one_interrupts_no_request() -> None:
    """Four replicas of 5 requests each are reduced to one only as requests end. None is stopped while serving."""
    a = model("a", 5, slots=5, high=4, idle_seconds=10.0)
    supply = [replica(a, f"r{i}") for i in range(4)]
    left = {"calls": 20.0}

    def calls(now_s: float, _: Scene) -> Iterable[tuple[str, int, int]]:
        left["calls"] = max(1.0, 20 - (now_s - T0) / 5)
        return [("a", 0, int(left["calls"]))]

    scene = Scene(world([a], [device()], supply, []), calls)
    scene.run(200)
    for at_s, action in scene.verbs("stop"):
        assert action.reason.split("; ")[1].startswith("drained in"), (at_s, action)
    assert len(scene.verbs("stop")) == 3
    assert len(scene.ready("a")) == 1


# --- two concurrent leaders, one of which was paused ------------------------------------------------------------------


WAITING = 3
STEPS = st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(["look", "act", "crash"])), max_size=30)


class Both:
    """Two Worlds with the same queued requests, and one fabric."""

    def __init__(self) -> None:
        could = (offer(devices_max=8), offer(name="w2", node="w2", devices_max=8))
        self.rack = FakeProvider("rack", lambda: T0, lambda _s, _what: None, could, 8, lambda _: Fate(after_s=1e6))
        begin = observe(surge(waiting=WAITING), ProvidersSeen(providers=("rack",)))
        self.worlds = [begin, replace(begin, epoch=2)]

    def look(self, of: World) -> World:
        """Report the offers, then the orders, as the shell does."""
        offered = observe(of, OffersSeen(provider="rack", offers=self.rack.offers_now()))
        return observe(offered, LeasesSeen(provider="rack", leases=self.rack.list_now(), began_s=T0))

    def act(self, of: World, *, crash: bool) -> World:
        """Execute all planned actions, or only the first one if the leader crashes."""
        for action in plan(of, T0).actions[: 1 if crash else None]:
            of = observe(of, Acted(action=action))
            if isinstance(action, AcquireLease):
                self.rack.acquire_now(action.order)
            elif isinstance(action, ReleaseLease):
                self.rack.release_now(action.order)
        return of


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(STEPS)
@example([(0, "look"), (1, "look"), (0, "act"), (1, "act")])
def test_two_interleaved_leaders_place_each_capacity_order_only_once(steps: list[tuple[int, str]]) -> None:
    both = Both()
    for which, what in steps:
        world = both.worlds[which]
        both.worlds[which] = both.look(world) if what == "look" else both.act(world, crash=what == "crash")
        assert len(both.rack.alive) <= WAITING
    for which in (0, 1):
        both.worlds[which] = both.act(both.look(both.worlds[which]), crash=False)
    assert len(both.rack.alive) == WAITING, "and all of it"


# --- starts that wait for an external cause ---------------------------------------------------------------------------


WHY = "Unschedulable: 0/1 nodes are available: 1 Insufficient nvidia.com/gpu"
LONG_S = 100_000.0


def begun() -> World:
    return after(world([DOC], [device()]), StartReplica(replica=pending(), reason="wake m: 3 waiting"))[0]


def waiting() -> World:
    return after(begun(), seen(Seen.STARTING, waits=WHY))[0]


def test_start_of_an_unscheduled_replica_has_no_deadline() -> None:
    at = waiting()
    assert (at.replicas[R].state, at.replicas[R].times.started_s, at.replicas[R].runtime.waits) == (
        S.STARTING,
        None,
        WHY,
    )
    assert start_deadline_s(at, at.replicas[R]) is None
    assert not [kind for kind in kinds(plan(at, T0 + LONG_S)) if kind.startswith("fail")]


def test_start_without_a_wait_reason_keeps_its_deadline() -> None:
    at = begun()
    assert start_deadline_s(at, at.replicas[R]) == T0 + DOC.spec.start.seconds_max
    assert kinds(plan(at, T0 + LONG_S)) == [f"fail {R}"]


def test_start_deadline_is_measured_from_the_process_start_after_a_wait() -> None:
    at, _ = after(waiting(), seen(Seen.STARTING, started_s=T0 + LONG_S), now_s=T0 + LONG_S)
    assert at.replicas[R].runtime.waits == ""
    assert start_deadline_s(at, at.replicas[R]) == T0 + LONG_S + DOC.spec.start.seconds_max
    at, _ = after(at, seen(Seen.READY), now_s=T0 + LONG_S + 3.0)
    assert at.learned.histories[M].starts_s == (3.0,)


def test_new_leader_recognizes_a_replica_that_waits_to_be_scheduled() -> None:
    at, _ = after(world([DOC], [device()]), seen(Seen.STARTING, waits=WHY))
    assert (at.replicas[R].state, at.replicas[R].times.started_s, at.replicas[R].runtime.waits) == (
        S.STARTING,
        None,
        WHY,
    )


def test_reason_for_which_a_start_waits_is_shown_in_explain_and_status() -> None:
    at = waiting()
    explanation = explain_model(at, Plan(), Log(), M, T0 + 5)
    assert (
        f"{R} has been starting for 5 s on gpu0: wake m: 3 waiting; its engine is not started yet: {WHY}."
        in explanation.sentences
    )
    (row,) = list_status_rows(at, Plan(), T0)
    assert (row.state, row.why) == ("starting", WHY)


def test_externally_deleted_replica_drains_without_revival_or_failure() -> None:
    at = world(
        [DOC], [device()], replicas=[replica(DOC, "r", state=S.READY)], gateways=[gateway(levels=[level("m", 1)])]
    )
    at, moves = after(at, seen(Seen.TAKEN, reason="its pod is being deleted: Preempted"))
    assert moved(moves) == ["ready --seen--> draining"]
    drain = at.replicas[R].drain
    assert drain is not None
    assert (drain.reason, drain.taken, drain.version) == ("its pod is being deleted: Preempted", True, at.version)
    assert not [one for one in plan(at, T0).actions if isinstance(one, ReviveReplica)]
    at, moves = after(at, seen(Seen.TAKEN, reason="again"), seen(Seen.EXITED), now_s=T0 + 1.0)
    assert moved(moves) == ["draining --seen--> scrubbing"]
    assert not at.learned.histories.get(M, History()).failure


def test_draining_replica_deleted_externally_keeps_its_drain_reason() -> None:
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=S.READY)])
    at, _ = after(at, DrainReplica(replica=R, reason="idle"))
    at, moves = after(at, seen(Seen.TAKEN))
    assert moves == ()
    drain = at.replicas[R].drain
    assert drain is not None
    assert (drain.reason, drain.taken) == ("idle", True)


def test_replica_first_seen_while_its_pod_is_being_deleted_drains() -> None:
    at, moves = after(world([DOC], [device()]), seen(Seen.TAKEN))
    assert at.replicas[R].state is S.DRAINING
    assert moved(moves) == ["None --seen--> unready", "unready --seen--> draining"]


def test_replica_whose_pod_is_deleted_externally_is_replaced() -> None:
    """A replica whose pod is being deleted does not count as available."""
    at = world(
        [DOC], [device()], replicas=[replica(DOC, "r", state=S.READY)], gateways=[gateway(levels=[level("m", 1)])]
    )  # fmt: skip
    assert not [one for one in plan(at, T0).actions if isinstance(one, StartReplica)]
    at, _ = after(at, seen(Seen.TAKEN))
    assert len([one for one in plan(at, T0).actions if isinstance(one, StartReplica)]) == 1


def stalled_world(*others: Gateway, **fields: Any) -> World:
    """Replica a1 is ready; no stream at gateway g1 gets a byte from it."""
    silent = replace(use("a1", 1), last_byte_age_s=130.0, stalled=True)
    stuck = gateway("g1", uses=[silent], stalled=(silent.replica,), levels=[level("a", running=1)])
    return world([A], [device()], [replica(A, "a1", **fields)], [stuck, *others])


def test_replica_that_sends_nothing_to_waiting_streams_is_drained() -> None:
    of = stalled_world()
    (action,) = plan(of, T0).actions
    assert isinstance(action, DrainReplica)
    assert (action.replica, action.reason) == ("a1", STALLED)


@pytest.mark.parametrize(("age_s", "drained"), [(None, True), (PROGRESS_S, True), (PROGRESS_S - 1, False)])
def test_stalled_replica_is_kept_only_if_it_sends_to_another_gateway(age_s: float | None, drained: bool) -> None:
    other = gateway("g2", uses=[replace(use("a1", 1), last_byte_age_s=age_s)])
    assert bool(plan(stalled_world(other), T0).actions) == drained


def test_draining_stalled_replica_stops_after_a_grace_and_is_not_revived() -> None:
    of = stalled_world(state=S.DRAINING, drain=replace(drain(since_s=T0), reason=STALLED))
    assert not [one for one in plan(of, T0 + STALLED_GRACE_S - 1).actions if not isinstance(one, StartReplica)]
    assert [one.replica for one in plan(of, T0 + STALLED_GRACE_S).actions if isinstance(one, StopReplica)] == ["a1"]
    assert list_status_rows(of, plan(of, T0), T0)[0].why == STALLED
