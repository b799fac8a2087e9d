"""Which replica exits count as a failure of the MPS server, and when its slices are available again."""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.queries import mps_server_failures
from autoscaler.queries.mps_server_failures import PAUSE_S, PAUSE_S_MAX, TOGETHER_S
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, World
from tests.support.builders.worlds import T0, device, model, replace_fields, replica, world

HERE, THERE = replace(device("d"), kind="mps"), replace(device("e"), node=device("d").node, kind="mps")


def ready(name: str, **more: object) -> Replica:
    one = replica(model(name), name, [HERE.id])
    return replace_fields(one, **{"state": S.READY, "created_s": T0 - 60.0, "ready_s": T0 - 50.0, **more})


def fall(there: World, *ends: tuple[Replica, float], others: tuple[Replica, ...] = ()) -> World:
    for at, (one, at_s) in enumerate(ends):
        left = [*(each for each, _ in ends[at + 1 :]), *others]
        there = replace_fields(there, mps_failures=mps_server_failures.record_replica_failure(there, left, one, at_s))
    return there


THESE = world([model("a"), model("b")], [HERE, THERE])
A, B = ready("a"), ready("b")
FELL = fall(THESE, (A, T0), (B, T0 + 1.0))


def test_simultaneous_failures_pause_placement_on_the_mps_slices() -> None:
    assert mps_server_failures.list_mps_failed_slices(FELL, T0 + 1.0).keys() == {HERE.id, THERE.id}, (
        "its kubelet chooses among them"
    )
    assert mps_server_failures.list_mps_failed_slices(FELL, T0 + 1.0 + PAUSE_S) == {}


def test_single_or_unrelated_failures_do_not_pause_mps_slices() -> None:
    assert not mps_server_failures.list_mps_failed_slices(fall(THESE, (A, T0)), T0)
    assert not mps_server_failures.list_mps_failed_slices(fall(THESE, (A, T0), (B, T0 + TOGETHER_S)), T0 + TOGETHER_S)
    assert not mps_server_failures.list_mps_failed_slices(
        fall(THESE, (A, T0), (B, T0 + 1.0), others=(ready("c"),)), T0 + 1.0
    )
    assert not mps_server_failures.list_mps_failed_slices(
        fall(THESE, (A, T0), (ready("a2", created_s=T0 + 0.5), T0 + 1.0)), T0 + 1.0
    )


def test_mps_pause_doubles_per_failed_start_until_a_replica_is_ready() -> None:
    tried, at_s, there = ready("a3", created_s=T0 + 9.0, ready_s=None), T0 + 9.0, FELL
    for times in range(1, 12):
        there = fall(there, (tried, at_s))
        (one,) = there.nodes.mps_failures.values()
        assert one.until_s - at_s == min(PAUSE_S * 2.0**times, PAUSE_S_MAX)
    assert mps_server_failures.record_replica_ready(there, tried) == {}
    assert mps_server_failures.record_replica_ready(there, A) == there.nodes.mps_failures, "it was there before"


def test_mps_slices_stay_paused_while_one_start_is_in_progress() -> None:
    starting = ready("a3", created_s=T0 + 9.0, state=S.STARTING, ready_s=None)
    there = world([model("a3")], [HERE, THERE], [starting], mps_failures=FELL.nodes.mps_failures)
    assert mps_server_failures.list_mps_failed_slices(there, T0 + 60.0).keys() == {HERE.id, THERE.id}
