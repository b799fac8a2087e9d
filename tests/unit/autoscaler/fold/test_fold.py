"""The fold: actions along the state table, observations that skip states, and what is learned about Models."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.demand.model_history import start_deadline_s
from autoscaler.fold.fold import Observation, fold
from autoscaler.planner.plan import plan
from autoscaler.server.read_responses import list_devices
from autoscaler.state.actions import (
    Acted,
    Action,
    DrainReplica,
    FailReplica,
    FailStart,
    ReviveReplica,
    StartReplica,
    StopReplica,
)
from autoscaler.state.events import DocumentsSeen, GatewaySeen, HistorySeen, ReplicaSeen, Seen, SlicesSeen, Synced, Tick
from autoscaler.state.lifecycle import IllegalIntentError
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History, World
from tests.support.builders.fold import DOC, G1, M, R, after, moved, pending, reported, seen, total
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, world

# --- actions --------------------------------------------------------------------------------------------------------


def test_replica_moves_from_pending_to_gone_along_the_transition_table() -> None:
    at, moves = after(world([DOC], [device()]), StartReplica(replica=pending(), reason="3 waiting"))
    assert moved(moves) == ["pending --place--> starting"]
    assert (at.replicas[R].times.created_s, at.replicas[R].reason) == (T0, "3 waiting")
    at, moves = after(at, seen(Seen.STARTING, started_s=T0 + 0.5), now_s=T0 + 0.5)
    assert moves == ()
    at, moves = after(at, seen(Seen.READY, address="h:1"), now_s=T0 + 4.5)
    assert moved(moves) == ["starting --seen--> ready"]
    assert (at.replicas[R].times.ready_s, at.replicas[R].runtime.address) == (T0 + 4.5, "h:1")
    assert at.learned.histories[M].starts_s == (4.0,)
    version = at.version
    at, moves = after(at, DrainReplica(replica=R, reason="idle"), now_s=T0 + 90.0)
    assert moved(moves) == ["ready --drain--> draining"]
    drain = at.replicas[R].drain
    assert drain is not None
    assert (drain.came_from, drain.epoch, drain.version) == (S.READY, at.epoch, version + 1)
    assert at.version == version + 1
    assert at.learned.histories[M].served_until_s == T0 + 90.0
    at, moves = after(at, StopReplica(replica=R, grace_s=5.0, reason="acknowledged"), now_s=T0 + 91.0)
    assert moved(moves) == ["draining --acknowledged--> stopping"]
    assert at.learned.histories[M].stopped_idle_s == T0 + 91.0
    at, moves = after(at, seen(Seen.EXITED), seen(Seen.CLEAN, proof="exited"), now_s=T0 + 92.0)
    assert moved(moves) == ["stopping --seen--> scrubbing", "scrubbing --seen--> gone"]
    assert moves[-1].reason == "clean: exited"
    assert [len(m) for m in (at.replicas, at.by_model, at.by_slice)] == [0, 0, 0]


@pytest.mark.parametrize(
    ("state", "action"),
    [
        (S.STOPPING, DrainReplica(replica=R, reason="")),
        (S.STOPPING, ReviveReplica(replica=R, reason="")),
        (S.READY, ReviveReplica(replica=R, reason="")),
        (S.READY, StopReplica(replica=R, grace_s=1.0, reason="")),
        (S.STARTING, StopReplica(replica=R, grace_s=1.0, reason="")),
        (S.FAILED, FailReplica(replica=R, reason="")),
        (S.READY, StartReplica(replica=pending(), reason="")),
        (S.READY, DrainReplica(replica=ReplicaId("unknown"), reason="")),
    ],
)
def test_action_not_allowed_in_a_replica_state_raises_illegal_intent_error(state: S, action: Action) -> None:
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=state)])
    with pytest.raises(IllegalIntentError):
        fold(at, [Acted(action=action)], T0)


@pytest.mark.parametrize("came_from", [S.READY, S.UNREADY, S.STARTING])
def test_replica_revived_from_a_drain_returns_to_its_former_state(came_from: S) -> None:
    at, _ = after(
        world([DOC], [device()], replicas=[replica(DOC, "r", state=came_from)]), DrainReplica(replica=R, reason="")
    )
    at, moves = after(at, ReviveReplica(replica=R, reason="wanted"))
    assert moved(moves) == [f"draining --revive-{came_from}--> {came_from}"]
    assert at.replicas[R].drain is None


def test_replica_that_becomes_ready_while_draining_is_revived_as_ready() -> None:
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=S.STARTING)])
    at, _ = after(at, DrainReplica(replica=R, reason=""))
    at, moves = after(at, seen(Seen.READY), now_s=T0 + 1.0)
    assert moves == ()
    assert at.replicas[R].state is S.DRAINING
    at, _ = after(at, ReviveReplica(replica=R, reason="wanted"), now_s=T0 + 2.0)
    assert (at.replicas[R].state, at.replicas[R].times.ready_s) == (S.READY, T0 + 1.0)


# --- observations may skip states and never raise -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sight", "state"),
    [(Seen.STARTING, S.STARTING), (Seen.READY, S.READY), (Seen.UNREADY, S.UNREADY), (Seen.EXITED, S.FAILED)],
)
def test_observed_replica_of_an_unknown_model_is_adopted(sight: Seen, state: S) -> None:
    at, moves = after(world([]), seen(sight, of="nobody-knows-it"))
    assert at.replicas[R].state is state
    assert moved(moves) == [f"None --seen--> {state}"]
    assert not at.learned.histories


def test_cleanup_observation_of_an_unknown_replica_is_ignored() -> None:
    at, _ = after(world([DOC], [device()]), Tick())
    assert fold(at, [seen(Seen.CLEAN)], T0) == (at, ())


@pytest.mark.parametrize("state", [state for state in S if state is not S.GONE])
@pytest.mark.parametrize("sight", Seen)
def test_only_a_clean_observation_removes_a_replica_in_any_state(state: S, sight: Seen) -> None:
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=state)])
    at, _ = after(at, seen(sight))
    assert (R in at.replicas) is (sight is not Seen.CLEAN)


@pytest.mark.parametrize("sight", Seen)
def test_observation_for_another_model_does_not_change_a_replica(sight: Seen) -> None:
    """Otherwise the requests of one Model would be sent to the process of another."""
    at, _ = after(world([DOC, model("b")], [device()], replicas=[replica(DOC, "r", state=S.READY)]), Tick())
    assert fold(at, [seen(sight, of="b", address="10.6.6.6:80")], T0) == (at, ())


def test_starting_replica_that_vanishes_counts_as_a_failed_start() -> None:
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=S.STARTING, started_s=T0 - 1.0)])
    at, moves = after(at, seen(Seen.CLEAN))
    assert [m.after for m in moves] == [S.FAILED, S.SCRUBBING, S.GONE]
    assert at.learned.histories[M].tries == 1


@pytest.mark.parametrize("state", [S.STARTING, S.FAILED, S.STOPPING, S.SCRUBBING])
def test_removal_of_a_replica_increments_the_world_version(state: S) -> None:
    """The key of a start is built from the version (`plan.build_intent_key`) and identifies the started replica."""
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=state, failure="it broke")])
    assert after(at, seen(Seen.CLEAN))[0].version == at.version + 1


def test_ready_observation_does_not_undo_a_stop_or_a_failure() -> None:
    for state in (S.STOPPING, S.FAILED, S.SCRUBBING):
        at = world([DOC], [device()], replicas=[replica(DOC, "r", state=state)])
        at, moves = after(at, seen(Seen.READY))
        assert moves == ()
        assert at.replicas[R].state is state


def test_memory_growth_of_a_starting_replica_is_recorded_with_its_time() -> None:
    at = world([DOC], [device()], replicas=[replica(DOC, "r", state=S.STARTING)])
    at, _ = after(at, seen(Seen.STARTING, grew=True), now_s=T0 + 7.0)
    assert at.replicas[R].times.grown_s == T0 + 7.0


# --- failed starts ----------------------------------------------------------------------------------------------------


def try_once(at: World, now_s: float, reason: str = "out of memory") -> World:
    """The state after a start that fails at once."""
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.STARTING), now_s=now_s)
    at, _ = after(at, seen(Seen.EXITED, reason=reason), seen(Seen.CLEAN), now_s=now_s)
    return at


def test_failed_starts_are_retried_quickly_then_after_a_doubling_backoff() -> None:
    at, now_s = world([DOC], [device()]), T0
    for pause_s in (60.0, 120.0, 240.0):
        at = try_once(at, now_s)
        assert (at.learned.histories[M].tries, at.learned.histories[M].retry_at_s) == (1, now_s)
        at = try_once(at, now_s)
        assert (at.learned.histories[M].tries, at.learned.histories[M].retry_at_s) == (2, now_s + 0.5)
        at = try_once(at, now_s + 0.5)
        assert (at.learned.histories[M].tries, at.learned.histories[M].retry_at_s) == (3, now_s + 1.5)
        at = try_once(at, now_s + 1.5)
        history = at.learned.histories[M]
        assert (history.tries, history.first_try_s, history.failure) == (0, None, "out of memory")
        assert history.refused_until_s == history.retry_at_s == now_s + 1.5 + pause_s
        now_s = history.refused_until_s
        at, _ = after(at, Tick(), now_s=now_s)
        assert at.learned.histories[M].refused_until_s == 0.0
    assert at.learned.histories[M].episodes == 3


def test_start_that_fails_shortly_before_its_time_limit_is_not_retried() -> None:
    """Otherwise the retry would begin a new start for the same requests, again and again, without a back-off."""
    at = try_once(try_once(world([DOC], [device()]), T0), T0)
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.STARTING), now_s=T0 + 0.5)
    failed_s = T0 + at.models[M].spec.start.seconds_max - 0.2  # the delay would be 1 s
    at, _ = after(at, seen(Seen.EXITED, reason="out of memory"), seen(Seen.CLEAN), now_s=failed_s)
    history = at.learned.histories[M]
    assert (history.tries, history.episodes, history.refused_until_s) == (0, 1, failed_s + 60.0)


def test_start_failure_an_hour_ago_does_not_count_against_a_new_start() -> None:
    """The failed start was not retried because no request waited; the new one has its own time limit and retries."""
    at = try_once(world([DOC], [device()]), T0)
    late_s = T0 + 3600.0
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.STARTING), now_s=late_s)
    start = at.models[M].spec.start
    assert start_deadline_s(at, at.replicas[R]) == late_s + start.seconds_max
    at, _ = after(at, seen(Seen.EXITED, reason="out of memory"), now_s=late_s + 5.0)
    assert (at.learned.histories[M].tries, at.learned.histories[M].refused_until_s) == (1, 0.0)


def ready_after_two_failures() -> World:
    """Ready at T0 + 1; the earlier failures still count, but no request is rejected and no delay remains."""
    at = try_once(try_once(world([DOC], [device()]), T0), T0)
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.READY), now_s=T0 + 1.0)
    history = at.learned.histories[M]
    assert (history.tries, history.retry_at_s, history.failure) == (2, 0.0, "")
    return at


@pytest.mark.parametrize(
    ("event", "at_s"),
    [(DrainReplica(replica=R, reason="idle"), T0 + 1.5), (seen(Seen.EXITED, reason="SIGSEGV"), T0 + 60.0)],
    ids=["drain", "late failure"],
)
def test_drain_or_late_failure_of_a_ready_replica_resets_failed_starts(
    event: Action | ReplicaSeen, at_s: float
) -> None:
    at, _ = after(ready_after_two_failures(), event, now_s=at_s)
    history = at.learned.histories[M]
    assert (history.tries, history.first_try_s, history.retry_at_s, history.episodes) == (0, None, 0.0, 0)


def test_engine_exit_right_after_ready_counts_as_a_failed_start() -> None:
    """For example, a crash at the first request: each one counts as another failed start."""
    at, _ = after(ready_after_two_failures(), seen(Seen.EXITED, reason="SIGSEGV"), seen(Seen.CLEAN), now_s=T0 + 1.2)
    assert (at.learned.histories[M].tries, at.learned.histories[M].retry_at_s) == (3, T0 + 2.2)
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.READY), now_s=T0 + 2.2)
    at, _ = after(at, seen(Seen.EXITED, reason="SIGSEGV"), now_s=T0 + 2.4)
    assert at.learned.histories[M].refused_until_s == T0 + 2.4 + 60.0


def test_start_that_exceeds_its_time_limit_fails_and_backs_off() -> None:
    at, _ = after(world([DOC], [device()]), StartReplica(replica=pending(), reason=""), seen(Seen.STARTING))
    at, moves = after(at, FailReplica(replica=R, reason="start took longer than 100 s"), now_s=T0 + 100.0)
    assert moved(moves) == ["starting --broke--> failed"]
    assert at.learned.histories[M].refused_until_s == T0 + 160.0


def test_failure_of_a_ready_replica_is_not_a_failed_start() -> None:
    at, moves = after(world([DOC], [device()], replicas=[replica(DOC, "r")]), seen(Seen.EXITED, reason="SIGSEGV"))
    assert at.replicas[R].failure == "SIGSEGV"
    assert [m.reason for m in moves] == ["SIGSEGV"]
    assert at.learned.histories[M] == History(served_until_s=T0)


def test_spec_change_clears_the_start_backoff() -> None:
    at = world([DOC], histories={"m": History(refused_until_s=T0 + 60.0, episodes=2, failure="no such file")})
    at, _ = after(at, DocumentsSeen(models=(replace(DOC, slots=8),)))
    assert at.learned.histories[M] == History()


def test_failure_of_the_old_spec_does_not_delay_the_changed_spec() -> None:
    at, _ = after(world([DOC], [device()]), StartReplica(replica=pending(), reason=""), seen(Seen.STARTING))
    at, _ = after(at, DocumentsSeen(models=(replace(DOC, spec=replace(DOC.spec, image="another:2")),)))
    at, moves = after(at, seen(Seen.EXITED, reason="no such file"))
    assert moved(moves) == ["starting --seen--> failed"]
    assert at.learned.histories.get(M, History()) == History()


def test_start_times_are_kept_only_for_the_newest_32_starts() -> None:
    at = world([DOC], [device()])
    for start in range(40):
        now_s = T0 + 100.0 * start
        at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.STARTING), now_s=now_s)
        at, _ = after(at, seen(Seen.READY), now_s=now_s + start)
        at, _ = after(at, seen(Seen.CLEAN), now_s=now_s + start)
    assert at.learned.histories[M].starts_s == tuple(float(s) for s in range(8, 40))


# --- scale to zero, and undoing it ------------------------------------------------------------------------------------


def to_zero(at: World, now_s: float) -> World:
    """The state after a replica starts, becomes ready, drains and stops as idle."""
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.READY), now_s=now_s)
    at, _ = after(at, DrainReplica(replica=R, reason="idle"), now_s=now_s)
    at, _ = after(at, StopReplica(replica=R, grace_s=1.0, reason=""), seen(Seen.CLEAN), now_s=now_s)
    return at


def test_idle_stop_followed_by_an_early_restart_counts_as_premature() -> None:
    at = to_zero(world([DOC], [device()]), T0)
    at = to_zero(at, T0 + 100.0)
    assert at.learned.histories[M].regrets == 1
    at = to_zero(at, T0 + 400.0)
    assert at.learned.histories[M].regrets == 1
    at = to_zero(at, T0 + 400.0 + 601.0)
    assert at.learned.histories[M].regrets == 0


def test_eviction_is_not_recorded_as_an_idle_stop() -> None:
    at, _ = after(
        world([DOC], [device()], replicas=[replica(DOC, "r")]), DrainReplica(replica=R, reason="", victim_of=M)
    )
    at, _ = after(at, StopReplica(replica=R, grace_s=1.0, reason=""))
    assert at.learned.histories[M].stopped_idle_s is None


def test_demand_peaks_of_the_idle_timeout_are_kept_in_at_most_13_rows() -> None:
    at = world([DOC], gateways=[])
    for second in range(300):
        waiting = 9 if second == 250 else 1
        at, _ = after(at, reported(second + 1, levels=[level("m", running=waiting)]), now_s=T0 + second)
        assert len(at.learned.histories[M].peaks) <= 13
    assert max(calls for _, calls in at.learned.histories[M].peaks) == 9
    assert min(bucket + 1 for bucket, _ in at.learned.histories[M].peaks) > T0 + 299 - 60.0


# --- other ------------------------------------------------------------------------------------------------------------


def test_observations_without_changes_return_the_same_world_object() -> None:
    at, _ = after(world([DOC], [device()]), seen(Seen.READY), Synced(), GatewaySeen(gateway=G1))
    batch: list[Observation] = [
        seen(Seen.READY),
        Synced(),
        GatewaySeen(gateway=G1),
        SlicesSeen(slices=(device(),)),
        DocumentsSeen(models=(DOC,)),
        Tick(),
    ]
    assert fold(at, batch, T0 + 1.0)[0] is at


def test_world_version_rises_by_one_per_batch_that_affects_gateways() -> None:
    at = world([DOC], [device()])
    one, _ = after(at, seen(Seen.READY), seen(Seen.READY, "r2"), seen(Seen.UNREADY))
    assert one.version == at.version + 1
    none, _ = after(one, SlicesSeen(slices=()), seen(Seen.UNREADY, grew=True), HistorySeen(model=M, history=History()))
    assert none.version == one.version


@pytest.mark.parametrize("documents_first", [True, False])
def test_start_failures_recorded_for_an_old_spec_do_not_delay_a_start(documents_first: bool) -> None:
    never = replica(DOC, "r", state=S.STARTING)
    at, _ = after(world([DOC], [device()], [never]), FailReplica(replica=never.id, reason="no such file"))
    failed = at.learned.histories[M]
    assert (failed.failure, failed.failed_hash) == ("no such file", DOC.spec_hash())
    refused, _ = after(world([DOC], [device()]), FailStart(model=M, reason="no such program"))
    remembered = [HistorySeen(model=M, history=one) for one in (failed, refused.learned.histories[M])]
    for doc in (DOC, replace(DOC, slots=8)):
        kept = doc == DOC
        for seen_ in remembered:
            documents = DocumentsSeen(models=(doc,))
            order = (documents, seen_) if documents_first else (seen_, documents)
            now = after(world([]), *order)[0].learned.histories[M]
            assert (now.failure, now.retry_at_s) == (
                (seen_.history.failure, seen_.history.retry_at_s) if kept else ("", 0.0)
            )


def test_removal_of_a_model_document_drops_its_history() -> None:
    at, _ = after(world([DOC], [device()]), HistorySeen(model=M, history=History(starts_s=(3.0,))))
    assert at.learned.histories[M].starts_s == (3.0,)
    at, _ = after(at, reported(2, totals=(total(busy_slot_us=1),)), DocumentsSeen())
    assert [len(m) for m in (at.models, at.learned.histories, at.learned.attained)] == [0, 0, 0]


def test_fold_does_not_modify_its_input_world() -> None:
    at = world([DOC], [device()], [replica(DOC, "r")])
    before = (dict(at.replicas), dict(at.by_model), dict(at.loads), dict(at.gateways))
    after(at, seen(Seen.CLEAN), seen(Seen.READY, "r2"), reported(2, levels=[level("m", waiting=1)]))
    assert (at.replicas, at.by_model, at.loads, at.gateways) == before


def test_start_lost_with_its_node_does_not_count_as_a_failed_start() -> None:
    at, _ = after(world([DOC], [device()]), StartReplica(replica=pending(), reason=""), seen(Seen.STARTING))
    at, _ = after(at, SlicesSeen(slices=()), seen(Seen.EXITED, reason="its node n0 is lost"), now_s=T0 + 5.0)
    assert at.replicas[R].state is S.FAILED
    assert at.learned.histories.get(M, History()).tries == 0


def test_slice_with_zero_memory_gets_no_replica() -> None:
    """A replica without a memory request would take the whole slice, which has no memory."""
    of, calls = model("a", 0), gateway(levels=[level("a", 1, wait_s=5.0)])
    begin = world([of], [], [], [calls])
    seen, _ = fold(begin, [SlicesSeen(slices=(device("gpu0", 0),))], T0)
    made = plan(seen, T0)
    assert made.actions == ()
    assert [one.model for one in made.unmet] == ["a"]
    assert [(one.id, one.closed.partition(":")[0]) for one in list_devices(seen, T0)] == [
        ("gpu0", "its memory reads 0 bytes")
    ]
    again, _ = fold(seen, [SlicesSeen(slices=(device("gpu0", 0),))], T0)
    assert again.nodes.slices is seen.nodes.slices, "the same look changes nothing"
    well, _ = fold(seen, [SlicesSeen(slices=(device("gpu0", 24), device("gpu1", 0, closed="taken")))], T0)
    assert [one.closed for one in well.nodes.slices.values()] == ["", "taken"]
    assert [type(one).__name__ for one in plan(well, T0).actions] == ["StartReplica"]
