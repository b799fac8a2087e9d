"""Replicas whose pods are deleted externally: they drain and are replaced, and this does not count as a failure."""

from __future__ import annotations

from autoscaler.planner.plan import plan
from autoscaler.state.actions import DrainReplica, ReviveReplica, StartReplica
from autoscaler.state.events import Seen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History
from tests.support.builders.fold import DOC, M, R, after, moved, seen
from tests.support.builders.worlds import T0, device, gateway, level, replica, world


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
