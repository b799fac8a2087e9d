"""The plan without free capacity: evictions, and models that cannot start, for which nothing is evicted."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName
from autoscaler.demand.model_history import EPISODE_AFTER_S
from autoscaler.demand.residency import SERVE_FIRST_S, refused_until_s
from autoscaler.fold.fold import fold
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.plan import all_wanted, plan
from autoscaler.routing.routes import model_route
from autoscaler.state.actions import Acted, DrainReplica, FailStart, StartReplica
from autoscaler.state.events import DocumentsSeen, StartSeen, Tick
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Gateway, History, World
from tests.support.builders.worlds import (
    T0,
    Scene,
    device,
    drain,
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
from tests.support.harness.manual_loop import SteppedLoop

A, B = model("a", 20), model("b", 20)


def test_draining_victim_is_revived_only_if_its_slice_is_no_longer_needed() -> None:
    going = replica(A, "r", state=S.DRAINING, drain=drain(victim_of="b"))
    both = [gateway(levels=[level("a", 1), level("b", 1)], uses=[use("r", 1)])]
    assert kinds(plan(world([A, B], [device()], [going], both), T0)) == []
    alone = [gateway(levels=[level("a", 1)], uses=[use("r", 1)])]
    assert kinds(plan(world([A, B], [device()], [going], alone), T0)) == ["revive r"]


def test_busy_replica_is_evicted_only_after_its_residency() -> None:
    known = {"a": History(starts_s=(4.0,), last_activity_s=T0)}
    calls = [gateway(levels=[level("a", 5, 4), level("b", 1)], uses=[use("r", 4)])]
    made = world([A, B], [device()], [replica(A, "r", ready_s=T0 - 10)], calls, known)
    early = plan(made, T0)
    assert (kinds(early), early.next_s) == ([], T0 + 2)
    assert early.unmet[0].reason.endswith("held by a (busy, residency ends in 2 s)")
    action = plan(made, T0 + 2).actions[0]
    assert isinstance(action, DrainReplica)
    assert action.reason == "make room for b: a was resident 12 s, 1 waiting, tenant acme"
    assert action.victim_of == "b"


def test_evicted_replica_is_not_drained_again_for_a_rollout() -> None:
    old = replica(A, "r", ready_s=T0 - 100, spec_hash="before")
    calls = [gateway(levels=[level("a", 1, 1), level("b", 1, wait_s=9.0)], uses=[use("r", 1)])]
    decided = plan(world([A, B], [device()], [old], calls), T0)
    assert kinds(decided) == ["drain r"]
    assert isinstance(action := decided.actions[0], DrainReplica)
    assert action.victim_of == "b"


def test_ready_replica_with_queued_requests_is_not_evicted_at_once() -> None:
    """Otherwise two such models evict each other as soon as they are ready, and no request is ever served."""
    a = model("a", 20, residency_seconds=0.0)
    fresh = [replica(a, "r", ready_s=T0)]
    both = [level("a", 2), level("b", 2, wait_s=9.0)]
    made = world([a, B], [device()], fresh, [gateway(levels=both)])
    early = plan(made, T0)
    assert (kinds(early), early.next_s) == ([], T0 + SERVE_FIRST_S)
    assert kinds(plan(made, T0 + SERVE_FIRST_S)) == ["drain r"]
    called = world([a, B], [device()], fresh, [gateway(levels=both, uses=[use("r", 1)])])
    assert kinds(plan(called, T0)) == ["drain r"], "its Call runs to its end"


def test_start_for_a_rejected_request_is_kept_until_its_demand_expires() -> None:
    starting = [replica(A, "r", state=S.STARTING, since_s=T0, started_s=T0)]
    calls = [gateway(levels=[level("b", 9, wait_s=1.0)])]
    refused = History(refused_cold_s=T0 - 2.0, hold_until_s=T0 + 3.0)
    end_s = refused_until_s(refused)
    made = world([A, B], [device()], starting, calls, {"a": refused})
    assert end_s > T0 + 3.0
    assert kinds(plan(made, T0)) == []
    assert kinds(plan(made, T0 + 3.0)) == []
    assert kinds(plan(made, end_s)) == ["drain r"]
    removed = world([A, B], [device()], [], calls, {"a": refused})
    assert [all_wanted(removed, at_s)[A.name].count for at_s in (end_s - 1.0, end_s)] == [1, 0]


def test_no_second_eviction_while_a_drain_already_frees_enough_memory() -> None:
    c = model("c", 20)
    going = replica(A, "ra", ["gpu0"], S.DRAINING, drain=drain(victim_of="b"))
    made = [going, replica(c, "rc", ["gpu1"])]
    calls = [gateway(levels=[level("b", 1)], uses=[use("ra", 1)])]
    used = {"c": History(last_activity_s=T0)}
    assert kinds(plan(world([A, B, c], [device(), device("gpu1")], made, calls, used), T0)) == []


@pytest.mark.case("9")
def test_two_busy_models_on_one_slice_alternate_after_min_residency() -> None:
    """Both always have requests: each is served in turn, and neither is evicted before its residency ends."""
    a, b = model("a", 20, slots=4), model("b", 20, slots=4)

    def both(_: float, scene: Scene) -> Iterable[tuple[str, int, int]]:
        # Requests on a draining replica finish at once; the others wait until it is ready again.
        return [(name, 4, 4 if scene.ready(name) else 0) for name in ("a", "b")]

    scene = Scene(world([a, b], [device()], gateways=[]), both, start_s=5)
    scene.run(600, step_s=0.5)
    starts = [(at_s, action.replica.model) for at_s, action in scene.verbs("start") if isinstance(action, StartReplica)]
    assert [name for _, name in starts] == (["a", "b"] * len(starts))[: len(starts)]
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(starts)]
    assert min(gaps) >= 5 + 15
    assert max(gaps) <= 5 + 15 + 3
    assert len(starts) >= 600 / 23


@pytest.mark.case("9")
def test_alternating_client_swaps_models_at_most_once_per_residency() -> None:
    """A single client requests a, then b, then a ...: an idle model still stays for its residency."""
    served: list[str] = []

    def client(_: float, scene: Scene) -> Iterable[tuple[str, int, int]]:
        name = "ab"[len(served) % 2]
        if not scene.ready(name):
            return [(name, 1, 0)]
        served.append(name)
        return []

    scene = Scene(world([A, B], [device()], gateways=[]), client, start_s=2)
    scene.run(400, step_s=0.5)
    starts = [at_s for at_s, _ in scene.verbs("start")]
    gaps = [later - earlier for earlier, later in pairwise(starts)]
    assert min(gaps) >= 2 + 6
    assert len(served) >= 400 / (2 + 6 + 3)


WHY = "/m/b.gguf does not exist; put the model there, or correct spec.artifact"
BLOCKED = {B.name: WHY}


def waiting(*names: str) -> list[Gateway]:
    return [gateway(levels=[level(name, 2, wait_s=5) for name in names])]


def held() -> World:
    """Idle `a` has the only device, and `b` has queued requests."""
    return world([A, B], [device()], [replica(A, "r")], waiting("b"), {"a": History(last_activity_s=T0 - 5)})


def called_at(now_s: float) -> dict[GatewayId, Gateway]:
    """The gateway reports queued requests for `b` at `now_s`."""
    return {GatewayId("g1"): gateway(levels=[level("b", 2)], seen_s=now_s)}


def obstacles(made: World) -> dict[ModelName, str]:
    return dict(made.learned.obstacles)


# --- the plan ---------------------------------------------------------------------------------------------------------


def test_idle_replica_is_evicted_for_a_model_that_can_start() -> None:
    made = plan(held(), T0)
    assert (kinds(made), made.tries) == (["drain r"], ("b",))


def test_no_replica_is_evicted_for_a_model_that_cannot_start() -> None:
    made = plan(replace_fields(held(), obstacles=BLOCKED), T0)
    assert made.actions == (FailStart(model=B.name, reason=WHY),)
    assert made.tries == ()


def test_clients_get_model_start_failed_if_the_model_cannot_start() -> None:
    begun = replace_fields(held(), obstacles=BLOCKED)
    after = folded(begun, plan(begun, T0).actions)
    assert after.version > begun.version
    route = model_route(after, B.name, T0, GatewayId("g1"))
    assert route is not None
    assert route.refusal is not None
    assert (route.refusal.code, route.refusal.retry_after_s) == ("model_start_failed", EPISODE_AFTER_S)
    assert not route.refusal.should_retry
    again = plan(after, T0)
    assert again.actions == ()
    assert again.unmet[0].reason == f"{WHY}; next attempt in 60 s"


def test_retry_delay_of_a_model_that_cannot_start_does_not_grow() -> None:
    made = replace_fields(held(), obstacles=BLOCKED)
    for round in range(4):
        now_s = T0 + round * EPISODE_AFTER_S
        made, _ = fold(rebuild_indices(replace(made, gateways=called_at(now_s)), now_s), (Tick(),), now_s)
        assert FailStart(model=B.name, reason=WHY) in plan(made, now_s).actions
        made = folded(made, plan(made, now_s).actions, now_s)
        assert made.learned.histories[B.name].refused_until_s == now_s + EPISODE_AFTER_S


def test_victim_draining_for_a_model_that_cannot_start_is_revived() -> None:
    going = replica(A, "r", state=S.DRAINING, drain=drain(victim_of="b"))
    made = world([A, B], [device()], [going], waiting("a", "b"))
    assert kinds(plan(made, T0)) == []
    assert kinds(plan(replace_fields(made, obstacles=BLOCKED), T0)) == ["failstart b", "revive r"]


def test_serving_replica_stays_if_a_second_one_cannot_start() -> None:
    b = model("b", 10, slots=1, high=2)
    made = world([b], [device()], [replica(b, "r")], [gateway(levels=[level("b", 9, 1, wait_s=60)])])
    assert kinds(plan(made, T0)) == ["start b"]
    blocked = plan(replace_fields(made, obstacles=BLOCKED), T0)
    assert blocked.actions == ()
    assert blocked.unmet[0].reason == f"another replica cannot start: {WHY}"


def test_old_replica_keeps_serving_while_the_changed_spec_cannot_start() -> None:
    """Without a free Slice the old replica would drain for its replacement."""
    changed = model("b", 20, args=("--new",))
    made = world([changed], [device()], [replica(B, "r")], [gateway(levels=[level("b", 0, 1)])])
    replaced = plan(made, T0)
    assert (kinds(replaced), replaced.tries) == (["drain r"], ("b",))
    kept = plan(replace_fields(made, obstacles=BLOCKED), T0)
    assert kept.actions == ()
    assert kept.unmet[0].reason == f"a replica with the changed spec cannot start, and the old one keeps serving: {WHY}"


def test_minimum_replica_that_cannot_start_fails_without_an_attempt() -> None:
    kept = model("b", 20, low=1)
    made = world([kept], [device()], obstacles=BLOCKED)
    assert plan(made, T0).actions == (FailStart(model=B.name, reason=WHY),)
    scene = Scene(made, lambda _now_s, _scene: ())
    scene.run(30)
    assert scene.verbs("start") == []


# --- the fold ---------------------------------------------------------------------------------------------------------


def test_start_obstacle_is_forgotten_when_its_model_is_deleted() -> None:
    begun = world([A, B], [device()], handed_over=True)
    seen, _ = fold(begun, (StartSeen(model=B.name, obstacle=WHY), StartSeen(model=A.name)), T0)
    assert obstacles(seen) == BLOCKED
    assert fold(seen, (StartSeen(model=B.name, obstacle=WHY),), T0)[0] is seen
    assert fold(begun, (StartSeen(model=ModelName("gone"), obstacle=WHY),), T0)[0] is begun
    assert obstacles(fold(seen, (StartSeen(model=B.name),), T0)[0]) == {}
    assert obstacles(fold(seen, (DocumentsSeen(models=(A,)),), T0)[0]) == {}


def test_start_obstacle_resets_the_count_of_failed_start_attempts() -> None:
    tried = History(tries=2, first_try_s=T0 - 1, episodes=3, failure="exit status 1", retry_at_s=T0)
    begun = world([B], [device()], gateways=waiting("b"), histories={"b": tried})
    after, _ = fold(begun, (Acted(action=FailStart(model=B.name, reason=WHY)),), T0)
    known = after.learned.histories[B.name]
    assert (known.tries, known.episodes, known.failure) == (0, 3, WHY)


# --- the loop ---------------------------------------------------------------------------------------------------------


def test_no_eviction_if_the_driver_reports_that_the_model_cannot_start() -> None:
    stepped = SteppedLoop(held())
    stepped.driver.obstacles = {"b": WHY, "a": "never asked"}
    after = stepped.step()
    assert after.replicas[replica(A, "r").id].state is S.READY
    assert obstacles(after) == BLOCKED
    assert after.learned.histories[B.name].refused_until_s == T0 + EPISODE_AFTER_S
    assert (stepped.driver.started, stepped.driver.stopped) == ([], [])


def test_all_models_that_cannot_start_are_found_in_one_planner_step() -> None:
    many = [model(f"m{number}", 20) for number in range(9)]
    busy = [gateway(levels=[level(m.name, 1, wait_s=5) for m in many])]
    idle = {"a": History(last_activity_s=T0 - 5)}
    stepped = SteppedLoop(world([A, *many], [device()], [replica(A, "r")], busy, idle))
    stepped.driver.obstacles = {m.name: WHY for m in many}
    after = stepped.step()
    assert len(after.learned.obstacles) == 9
    assert after.replicas[replica(A, "r").id].state is S.READY


def test_eviction_proceeds_at_once_after_the_start_obstacle_is_removed() -> None:
    stepped = SteppedLoop(held())
    stepped.driver.obstacles = {"b": WHY}
    stepped.step()
    stepped.driver.obstacles = {}
    stepped.now_s += 5.0
    after = stepped.step(StartSeen(model=B.name))
    assert (obstacles(after), after.learned.histories[B.name].refused_until_s) == ({}, 0.0)
    stepped.now_s += 0.1
    stepped.loop.world = rebuild_indices(replace(after, gateways=called_at(stepped.now_s)), stepped.now_s)
    assert stepped.step(Tick()).replicas[replica(A, "r").id].state is S.DRAINING
