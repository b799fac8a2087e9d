"""The plan without free capacity: which replicas are evicted, for which models, and when."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from autoscaler.demand.desired_replicas import refused_until_s
from autoscaler.placement.model.bins import SERVE_FIRST_S
from autoscaler.planner.plan import all_wanted, plan
from autoscaler.state.actions import DrainReplica, StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History
from tests.support.builders.worlds import T0, Scene, device, drain, gateway, kinds, level, model, replica, use, world

A, B = model("a", 20), model("b", 20)


def test_victim_is_revived_only_if_its_slice_is_no_longer_wanted() -> None:
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
    gone = world([A, B], [device()], [], calls, {"a": refused})
    assert [all_wanted(gone, at_s)[A.name].count for at_s in (end_s - 1.0, end_s)] == [1, 0]


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
