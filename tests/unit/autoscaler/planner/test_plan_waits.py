"""Starts that wait for an external cause, and replicas whose pods are deleted externally, are no failures."""

from __future__ import annotations

from autoscaler.demand.model_history import start_deadline_s
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model, list_status_rows
from autoscaler.planner.plan import plan
from autoscaler.state.actions import DrainReplica, Plan, ReviveReplica, StartReplica
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, World
from tests.support.builders.fold import DOC, M, R, after, moved, pending, seen
from tests.support.builders.worlds import T0, device, gateway, kinds, level, replica, world

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
