"""A model that cannot start: nothing is evicted for it, its clients get an error, and it is checked again later."""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.contract import GatewayId, ModelName
from autoscaler.demand.history_updates import EPISODE_AFTER_S
from autoscaler.fold.fold import fold
from autoscaler.fold.indices import rebuild_indices
from autoscaler.planner.plan import plan
from autoscaler.routing.routes import model_route
from autoscaler.state.actions import Acted, FailStart
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
    world,
)
from tests.support.harness.manual_loop import SteppedLoop

A, B = model("a", 20), model("b", 20)
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


def test_driver_checks_that_a_model_can_start_before_an_eviction() -> None:
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
