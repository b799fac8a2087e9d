"""The first step of the ladder: which replicas can be evicted, what that costs, and why it happens or not."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import Explanation, explain_model
from autoscaler.explain.scale_up_options import Step
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, World
from tests.support.builders.capacity import acted, cloud, offer, offered, orders
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replica, use, world

A, B = model("a", 20), model("b", 20)
KNOWN = {"a": History(starts_s=(4.0,), last_activity_s=T0)}
MORE = (offer(node="n0", memory_bytes=24 * GI), cloud(memory_bytes=24 * GI))


def held(*, ready_s: float = 100, busy: int = 0, waiting: int = 1, holder: Model = A, waiter: Model = B) -> World:
    """A Model holds the only device, and requests for another Model wait."""
    levels = [level("a", 0, busy), level("b", waiting, wait_s=3)]
    calls = [gateway(levels=levels, uses=[use("r", busy)])]
    on = replica(holder, "r", ready_s=T0 - ready_s)
    return world([holder, waiter], [device()], [on], calls, KNOWN, leading_since_s=T0 - 500)


def explain(of: World, now_s: float = T0) -> Explanation:
    return explain_model(of, plan(of, now_s), Log(), ModelName("b"), now_s)


def first(of: World, now_s: float = T0) -> Step:
    """The eviction step, which is the first step of the ladder."""
    step, *rest = explain(of, now_s).ladder
    assert step.kind == "evict"
    assert all(one.kind == "offer" for one in rest)
    return step


def test_chosen_eviction_is_explained_with_victim_and_restart_time() -> None:
    begin = offered(held(), *MORE)
    step = first(begin)
    assert step.says == "Eviction of a (r on gpu0), restart takes 4 s"
    assert (step.chosen, step.under_way, step.why_not, step.cost) == (True, True, "", 0.0)
    (victim,) = step.victims
    assert (victim.replica, victim.model, victim.slices, victim.restart_seconds) == ("r", "a", ("gpu0",), 4.0)
    why_not = {one.why_not for one in explain(begin).ladder[1:]}
    assert why_not == {"an eviction makes room for it"}
    after, done = acted(begin)
    assert not orders(done), "the plan gives the same reason"
    assert after.replicas[victim.replica].state is S.DRAINING
    assert first(after, T0 + 1).under_way, "it is listed until it has left"
    message = "Eviction of a (r on gpu0), restart takes 4 s: chosen, in progress."
    assert message in explain(after, T0 + 1).sentences


@pytest.mark.parametrize(
    ("begin", "why_not", "wait_s"),
    [
        (held(ready_s=10, busy=1), "a is busy, residency ends in 2 s", 2.0),
        (held(holder=replace(A, spec=replace(A.spec, priority=5))), "a is idle, higher priority", None),
        (held(holder=model("a", 20, low=1)), "a is idle, kept by replicas.min", None),
        (held(waiting=0, waiter=model("b", 20, low=1)), "a is idle, and no request waits for b", None),
    ],
)
def test_rejected_eviction_names_its_victim_and_the_reason(begin: World, why_not: str, wait_s: float | None) -> None:
    begin = offered(begin, *MORE)
    step = first(begin)
    assert (step.chosen, step.why_not, step.expected_seconds) == (False, why_not, wait_s)
    assert [one.model for one in step.victims] == ["a"]
    assert explain(begin).ladder[1].chosen, "then capacity is added"
    _, done = acted(begin)
    assert [provider for provider, _ in orders(done)] == ["rack"]
    assert f"Eviction of a (r on gpu0), restart takes 4 s: {why_not}." in explain(begin).sentences


def test_busy_replica_is_not_evicted_for_a_model_with_a_ready_replica() -> None:
    several = model("b", 20, high=2, slots=1)
    calls = [gateway(levels=[level("a", 0, 1), level("b", 1, 1, wait_s=3)], uses=[use("r", 1), use("s", 1)])]
    on = [replica(A, "r", ready_s=T0 - 100), replica(several, "s", ["gpu1"], ready_s=T0 - 100)]
    begin = world([A, several], [device(), device("gpu1")], on, calls, KNOWN, leading_since_s=T0 - 500)
    assert first(begin).why_not == "a is busy, and b already has a replica"


def test_explain_states_the_missing_memory_if_nothing_can_be_evicted() -> None:
    begin = offered(world([B], [device("cpu", 1)], gateways=[gateway(levels=[level("b", 1)])]), *MORE)
    step = first(begin)
    assert (step.says, step.victims, step.chosen) == ("Eviction", (), False)
    assert step.why_not == "needs 20Gi on one device; the largest has 1Gi"


def test_no_eviction_or_offer_is_chosen_if_a_device_is_or_becomes_free() -> None:
    calls = [gateway(levels=[level("b", 1)])]
    roomy = offered(world([B], [device()], gateways=calls, leading_since_s=T0 - 500), *MORE)
    assert first(roomy).why_not == "it fits on free capacity"
    assert not any(one.chosen for one in explain(roomy).ladder)
    leaves = replica(A, "r", state=S.STOPPING, ready_s=T0 - 100, since_s=T0 - 1)
    soon = offered(world([A, B], [device()], [leaves], calls, leading_since_s=T0 - 500), *MORE)
    assert first(soon).why_not == "it waits on gpu0 until a has stopped"
    assert not any(one.chosen for one in explain(soon).ladder)


def test_explain_lists_no_scaling_steps_without_victims_and_providers() -> None:
    (step,) = explain(held(ready_s=10)).ladder
    assert step.kind == "evict"
    assert not explain(world([B], [device("cpu", 1)], gateways=[gateway(levels=[level("b", 1)])])).ladder
