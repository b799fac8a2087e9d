"""A start that waits for an external cause (capacity, an image, the API server) is reported, and is no failed start."""

from __future__ import annotations

from autoscaler.demand.history_updates import start_deadline_s
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model, list_status_rows
from autoscaler.planner.plan import plan
from autoscaler.state.actions import Plan, StartReplica
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import World
from tests.support.builders.fold import DOC, M, R, after, pending, seen
from tests.support.builders.worlds import T0, device, kinds, world

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


def test_start_deadline_counts_from_the_first_process_after_a_wait() -> None:
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
