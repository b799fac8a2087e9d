"""The number of desired replicas: inputs are levels and histories, the result is a count and a reason."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from math import pi, sin
from typing import Any

import pytest

from autoscaler.contract import ModelName, ReplicaId, TenantName, Total
from autoscaler.demand.desired_replicas import (
    PEAK_BUCKET_S,
    DesiredReplicas,
    compute_desired_replicas,
    unserved_since_s,
)
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Gateway, History, Move, World
from tests.support.builders.worlds import T0, Scene, device, gateway, level, model, replica, verb, world

KNOWN = History(starts_s=(8.0,), last_activity_s=T0)


def peaks(*pairs: tuple[float, int]) -> tuple[tuple[int, int], ...]:
    """(time, requests) pairs in the form that `History` keeps."""
    return tuple((round(at_s / PEAK_BUCKET_S), calls) for at_s, calls in pairs)


def ask(of: Model, *, history: History = KNOWN, now_s: float = T0, **fields: Any) -> DesiredReplicas:
    """The result for one Model; `fields` are any fields of `World`."""
    made = world([of], [device()], histories={of.name: history}, **fields)
    return compute_desired_replicas(made, of, now_s)


def test_single_queued_request_without_replicas_demands_an_urgent_start() -> None:
    answer = ask(model("a"), gateways=[gateway(levels=[level("a", 1)])])
    assert (answer.count, answer.urgent, answer.reason) == (1, True, "1 waiting, tenant acme")


def test_burst_at_zero_replicas_starts_the_needed_number_up_to_the_maximum() -> None:
    flood = [gateway(levels=[level("a", 1000)])]
    assert ask(model("a", slots=8, high=4), gateways=flood).count == 4
    assert ask(model("a", slots=400, high=4), gateways=flood).count == 3


def test_only_a_lasting_demand_spike_starts_more_replicas() -> None:
    a = model("a", slots=4, high=3)
    spike: dict[str, Any] = {
        "replicas": [replica(a, "r1")],
        "gateways": [gateway(levels=[level("a", 6, 4, wait_s=0.5)])],
    }
    answer = ask(a, **spike)
    assert (answer.count, answer.next_s) == (1, T0 + 1.5)
    assert ask(a, now_s=T0 + 1.5, **spike).count == 3


def test_replica_count_is_kept_during_a_move_without_queued_requests() -> None:
    a = model("a", slots=1, high=4)
    left = [replica(a, "r1"), replica(a, "r2", move=Move(replica=ReplicaId("r1")))]
    answer = ask(a, replicas=left, gateways=[gateway(levels=[level("a", 0, 2)])])
    assert (answer.count, answer.next_s) == (2, None), "both serve, one in the place of the other"


def test_desired_replicas_use_the_actual_slot_count_of_each_replica() -> None:
    a = model("a", slots=4, high=2)
    calls = [gateway(levels=[level("a", 1, 3, wait_s=60)])]
    assert ask(a, replicas=[replica(a, "r1")], gateways=calls).count == 1
    assert ask(a, replicas=[replica(a, "r1", slots=3)], gateways=calls).count == 2


def test_starting_replica_with_slots_for_the_queue_prevents_another_start() -> None:
    a = model("a", slots=4, high=4)
    supply = [replica(a, "r1"), replica(a, "r2", state=S.STARTING)]
    assert ask(a, replicas=supply, gateways=[gateway(levels=[level("a", 4, 4, wait_s=60)])]).count == 2


def test_backlog_that_ends_before_a_start_would_finish_starts_no_replica() -> None:
    a = model("a", slots=4, high=4)
    done = Total(model=ModelName("a"), tenant=TenantName("acme"), finished=100, busy_slot_us=100_000_000)
    quick = gateway(levels=[level("a", 20, 4, wait_s=5)], totals={(a.name, TenantName("acme")): done})
    answer = ask(a, replicas=[replica(a, "r1")], gateways=[quick])
    assert (answer.count, "the queue drains in about 5 s, a start takes 8 s" in answer.reason) == (1, True)


def test_scale_down_waits_until_fewer_replicas_cover_the_recent_peak() -> None:
    a = model("a", slots=4, high=3, idle_seconds=60.0)
    supply = [replica(a, name, created_s=T0 - 2000) for name in ("r1", "r2", "r3")]
    reports = [gateway(levels=[level("a", 0, 2)])]
    high = History(last_activity_s=T0, peaks=peaks((T0 - 50, 11), (T0 - 5, 2)))
    answer = ask(a, replicas=supply, gateways=reports, history=high)
    assert answer.count == 3
    assert answer.next_s == pytest.approx(T0 + 10.1)
    later = [gateway(levels=[level("a", 0, 2)], seen_s=T0 + 10)]
    assert ask(a, replicas=supply, gateways=later, history=high, now_s=T0 + 10.2).count == 1


@pytest.mark.parametrize("idle_seconds", ["auto", 60.0, 300.0])
def test_ready_second_replica_is_kept_for_twenty_minutes(idle_seconds: float | str) -> None:
    a = model("a", slots=4, high=2, idle_seconds=idle_seconds)
    supply = [replica(a, "r1"), replica(a, "r2", created_s=T0 - 1100)]
    reports = [gateway(levels=[level("a", 0, 2)])]
    answer = ask(a, replicas=supply, gateways=reports, history=History(last_activity_s=T0))
    assert answer.count == 2
    fresh = [gateway(levels=[level("a", 0, 2)], seen_s=T0 + 1100)]
    assert ask(a, replicas=supply, gateways=fresh, history=History(last_activity_s=T0), now_s=T0 + 1101).count == 1


def test_model_scales_to_zero_one_idle_timeout_after_its_last_activity() -> None:
    a = model("a", idle_seconds=60.0)
    made: dict[str, Any] = {"replicas": [replica(a, "r1")], "history": History(last_activity_s=T0 - 55)}
    answer = ask(a, **made)
    assert (answer.count, answer.next_s) == (1, T0 + 5)
    removed = ask(a, now_s=T0 + 5, **made)
    assert (removed.count, removed.reason) == (0, "idle for 60 s")


def test_adopted_replica_gets_a_full_idle_timeout_under_a_new_leader() -> None:
    a = model("a", idle_seconds=60.0)
    old: dict[str, Any] = {"replicas": [replica(a, "r1")], "history": History(last_activity_s=T0 - 70)}
    answer = ask(a, leading_since_s=T0 - 20, **old)
    assert (answer.count, answer.next_s) == (1, T0 + 40)
    assert answer.reason == "not used since this leader began 20 s ago, idle timeout 60 s"
    assert ask(a, leading_since_s=T0 - 60, **old).count == 0


@pytest.mark.case("12")
def test_request_that_outlasts_the_idle_timeout_keeps_its_replica() -> None:
    a = model("a", idle_seconds=1.0)
    running = [gateway(levels=[level("a", 0, 1)])]
    assert ask(a, replicas=[replica(a, "r1")], gateways=running, history=History(last_activity_s=T0 - 9)).count == 1


@pytest.mark.parametrize(
    "strange",
    [gateway("g2", seen_s=T0 - 11), gateway("g2", in_epoch=False), gateway("g2", report=None, in_epoch=False)],
    ids=["expired", "of an older epoch", "never reported"],
)
def test_expired_or_unknown_gateway_prevents_scale_to_zero(strange: Gateway) -> None:
    a = model("a", idle_seconds=1.0)
    old = History(last_activity_s=T0 - 500)
    answer = ask(a, replicas=[replica(a, "r1")], history=old, gateways=[gateway(), strange])
    assert (answer.count, "g2" in answer.reason) == (1, True)


def test_gateway_confirmed_gone_does_not_prevent_scale_to_zero() -> None:
    a = model("a", idle_seconds=1.0)
    old = History(last_activity_s=T0 - 500)
    dead = gateway("g2", seen_s=T0 - 11, gone=True)
    assert ask(a, replicas=[replica(a, "r1")], history=old, gateways=[gateway(), dead]).count == 0


def test_new_leader_without_gateways_delays_scale_down_by_ten_seconds() -> None:
    a = model("a", idle_seconds=1.0)
    alone: dict[str, Any] = {
        "replicas": [replica(a, "r1")],
        "gateways": [],
        "history": History(last_activity_s=T0 - 500),
    }
    assert ask(a, leading_since_s=T0 - 5, **alone).count == 1
    assert ask(a, leading_since_s=T0 - 10, **alone).count == 0


@pytest.mark.case("4")
def test_replica_without_requests_is_kept_until_rejected_clients_may_retry() -> None:
    a = model("a", idle_seconds=1.0)
    left = History(starts_s=(4.0,), last_activity_s=T0 - 20, hold_until_s=T0 + 30)
    assert ask(a, replicas=[replica(a, "r1", state=S.STARTING)], history=left).count == 1
    held = ask(a, replicas=[replica(a, "r1", ready_s=T0 - 1)], history=left)
    assert (held.count, held.next_s) == (1, T0 + 30)


def test_new_replica_without_requests_is_kept_until_its_residency_ends() -> None:
    """The residency is three times the last start duration."""
    a = model("a", idle_seconds=1.0)
    history = History(starts_s=(4.0,), last_activity_s=T0 - 20)
    kept = ask(a, replicas=[replica(a, "r1", ready_s=T0 - 1)], history=history)
    assert (kept.count, kept.next_s) == (1, T0 + 11)


def test_request_rejected_at_zero_replicas_is_demand_for_one_start() -> None:
    a = model("a")
    refused = History(refused_cold_s=T0 - 1, hold_until_s=T0 + 30)
    assert (ask(a, history=refused).count, ask(a, history=refused).urgent) == (1, True)
    assert ask(a, history=refused, now_s=T0 + 30).count == 0
    had_it = History(refused_cold_s=T0 - 100, hold_until_s=T0 + 30, served_until_s=T0 - 1)
    assert ask(a, history=had_it).count == 0


def test_idle_model_keeps_replicas_min_and_a_paused_model_gets_zero() -> None:
    a = model("a", low=2, high=3)
    assert (ask(a).count, ask(a).reason, ask(a).urgent) == (2, "replicas.min is 2", False)
    assert ask(model("a", paused=True, low=2, high=2), gateways=[gateway(levels=[level("a", 9)])]).count == 0


def test_each_premature_stop_doubles_the_auto_idle_timeout_up_to_a_bound() -> None:
    a = model("a")
    for regrets, window_s in ((0, 60), (1, 120), (3, 480), (4, 900), (16, 900)):
        history = History(last_activity_s=T0, regrets=regrets)
        late = [gateway(seen_s=T0 + window_s - 1)]
        answer = ask(a, replicas=[replica(a, "r1")], history=history, gateways=late, now_s=T0 + window_s - 0.5)
        assert (answer.count, answer.next_s) == (1, T0 + window_s)


def test_unserved_time_begins_when_the_last_replica_stops_serving() -> None:
    served = History(served_until_s=T0 - 3)
    made = world([model("a")], gateways=[gateway(levels=[level("a", 1, wait_s=9)])], histories={"a": served})
    assert unserved_since_s(made, ModelName("a"), T0) == T0 - 3


# --- case 6: demand that oscillates for two virtual hours -----------------------------------------------------------


def square(now_s: float, _: Scene) -> int:
    """Demand that switches on and off with the period of the idle timeout."""
    return 2 if (now_s - T0) % 120 < 60 else 0


def sine(now_s: float, _: Scene) -> int:
    """Demand around the slots of one replica, with a period of five minutes."""
    return round(4 + 3 * sin(2 * pi * now_s / 300))


def poisson() -> Callable[[float, Scene], int]:
    """Single requests of 5 s, one per minute on average."""
    rng = random.Random(6)
    until_s = [0.0]

    def calls(now_s: float, _: Scene) -> int:
        if rng.random() < 1 / 60:
            until_s[0] = now_s + 5
        return int(now_s < until_s[0])

    return calls


@pytest.mark.case("6")
@pytest.mark.parametrize("shape", [square, sine, poisson()], ids=["square", "sine", "poisson"])
def test_oscillating_demand_changes_scale_at_most_six_times_an_hour(shape: Callable[[float, Scene], int]) -> None:
    a = model("a", 10, slots=4, high=3)

    def levels(now_s: float, scene: Scene) -> Iterable[tuple[str, int, int]]:
        calls, room = shape(now_s, scene), 4 * len(scene.ready("a"))
        return [("a", max(0, calls - room), min(calls, room))]

    begin: World = world([a], [device(memory_gi=40)], gateways=[])
    scene = Scene(begin, levels, start_s=5)
    scene.run(7200)
    changes = scene.verbs("start", "drain")
    assert len(changes) <= 12, [(at_s - T0, verb(action), action.reason) for at_s, action in changes]
    for row in scene.transitions:
        assert (row.before, row.verb) != (S.STARTING, "drain"), row
