"""The fold: intents along the table, observations that jump, what is learnt of Models, and indices that never drift."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler import shares
from autoscaler.actions import Acted, Action, DrainReplica, FailReplica, ReviveReplica, StartReplica, StopReplica
from autoscaler.contract import GatewayId, Level, ModelName, ReplicaId, ReplicaUse, Report, TenantName, Total
from autoscaler.draft import with_grant
from autoscaler.fold import Observation, fold
from autoscaler.fold_reports import acknowledged
from autoscaler.indices import rebuild
from autoscaler.model import Start
from autoscaler.states import IllegalIntentError
from autoscaler.states import ReplicaState as S
from autoscaler.world import (
    DocumentsSeen,
    GatewayGone,
    GatewaySeen,
    Grant,
    History,
    HistorySeen,
    Replica,
    ReplicaSeen,
    Reported,
    Seen,
    Slice,
    SlicesSeen,
    Synced,
    Tick,
    Transition,
    World,
)
from tests.kit.worlds import GI, T0, device, level, model, replica, world

M, R, G1 = ModelName("m"), ReplicaId("r"), GatewayId("g1")
DOC = model("m", start=Start(seconds_max=100.0, retries=3), idle_seconds=60.0)


def seen(state: Seen, name: str = "r", of: str = "m", **fields: object) -> ReplicaSeen:
    """What the driver sees of a Replica."""
    known = ReplicaSeen(
        id=ReplicaId(name),
        model=ModelName(of),
        spec_hash="h",
        intent=name,
        slices=(device().id,),
        memory_bytes=GI,
        slots=4,
        seen=state,
    )
    return replace(known, **fields)


def pending(name: str = "r") -> Replica:
    return replica(DOC, name, state=S.PENDING, since_s=0.0, created_s=0.0, started_s=None)


def after(at: World, *batch: Observation | Action, now_s: float = T0) -> tuple[World, tuple[Transition, ...]]:
    """The World after a batch; it must agree with its rebuild."""
    made, moves = fold(at, [o if not isinstance(o, Action) else Acted(action=o) for o in batch], now_s)
    assert made == rebuild(made, now_s)
    return made, moves


def moved(moves: tuple[Transition, ...]) -> list[str]:
    """`ready --drain--> draining` for each move."""
    return [f"{m.before} --{m.verb}--> {m.after}" for m in moves]


# --- intents --------------------------------------------------------------------------------------------------------


def test_a_replica_goes_from_pending_to_gone_along_the_table() -> None:
    at, moves = after(world([DOC]), StartReplica(replica=pending(), reason="3 waiting"))
    assert moved(moves) == ["pending --place--> starting"]
    assert (at.replicas[R].created_s, at.replicas[R].reason) == (T0, "3 waiting")
    at, moves = after(at, seen(Seen.STARTING, started_s=T0 + 0.5), now_s=T0 + 0.5)
    assert moves == ()
    at, moves = after(at, seen(Seen.READY, address="h:1"), now_s=T0 + 4.5)
    assert moved(moves) == ["starting --seen--> ready"]
    assert (at.replicas[R].ready_s, at.replicas[R].address) == (T0 + 4.5, "h:1")
    assert at.histories[M].starts_s == (4.0,)
    version = at.version
    at, moves = after(at, DrainReplica(replica=R, reason="idle"), now_s=T0 + 90.0)
    assert moved(moves) == ["ready --drain--> draining"]
    drain = at.replicas[R].drain
    assert drain is not None
    assert (drain.came_from, drain.epoch, drain.version) == (S.READY, at.epoch, version + 1)
    assert at.version == version + 1
    assert at.histories[M].served_until_s == T0 + 90.0
    at, moves = after(at, StopReplica(replica=R, grace_s=5.0, reason="acknowledged"), now_s=T0 + 91.0)
    assert moved(moves) == ["draining --acknowledged--> stopping"]
    assert at.histories[M].stopped_idle_s == T0 + 91.0
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
def test_an_intent_that_the_table_does_not_allow_raises(state: S, action: Action) -> None:
    at = world([DOC], replicas=[replica(DOC, "r", state=state)])
    with pytest.raises(IllegalIntentError):
        fold(at, [Acted(action=action)], T0)


@pytest.mark.parametrize("came_from", [S.READY, S.UNREADY, S.STARTING])
def test_a_revived_replica_is_what_it_was(came_from: S) -> None:
    at, _ = after(world([DOC], replicas=[replica(DOC, "r", state=came_from)]), DrainReplica(replica=R, reason=""))
    at, moves = after(at, ReviveReplica(replica=R, reason="wanted"))
    assert moved(moves) == [f"draining --revive-{came_from}--> {came_from}"]
    assert at.replicas[R].drain is None


def test_what_happens_while_it_drains_decides_what_it_is_revived_to() -> None:
    at = world([DOC], replicas=[replica(DOC, "r", state=S.STARTING)])
    at, _ = after(at, DrainReplica(replica=R, reason=""))
    at, moves = after(at, seen(Seen.READY), now_s=T0 + 1.0)
    assert moves == ()
    assert at.replicas[R].state is S.DRAINING
    at, _ = after(at, ReviveReplica(replica=R, reason="wanted"), now_s=T0 + 2.0)
    assert (at.replicas[R].state, at.replicas[R].ready_s) == (S.READY, T0 + 1.0)


# --- observations jump and never raise ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sight", "state"),
    [(Seen.STARTING, S.STARTING), (Seen.READY, S.READY), (Seen.UNREADY, S.UNREADY), (Seen.EXITED, S.FAILED)],
)
def test_what_runs_already_is_adopted_wanted_or_not(sight: Seen, state: S) -> None:
    at, moves = after(world([]), seen(sight, of="nobody-knows-it"))
    assert at.replicas[R].state is state
    assert moved(moves) == [f"None --seen--> {state}"]
    assert not at.histories


def test_something_unknown_that_is_clean_is_nothing() -> None:
    at, _ = after(world([DOC]), Tick())
    assert fold(at, [seen(Seen.CLEAN)], T0) == (at, ())


@pytest.mark.parametrize("state", set(S) - {S.GONE})
@pytest.mark.parametrize("sight", Seen)
def test_no_observation_raises_in_any_state(state: S, sight: Seen) -> None:
    at = world([DOC], replicas=[replica(DOC, "r", state=state)])
    at, _ = after(at, seen(sight))
    assert (R in at.replicas) is (sight is not Seen.CLEAN)


def test_a_replica_that_vanishes_has_failed_and_is_gone() -> None:
    at = world([DOC], replicas=[replica(DOC, "r", state=S.STARTING, started_s=T0 - 1.0)])
    at, moves = after(at, seen(Seen.CLEAN))
    assert [m.after for m in moves] == [S.FAILED, S.SCRUBBING, S.GONE]
    assert at.histories[M].tries == 1


def test_an_order_under_way_is_not_undone_by_a_process_that_still_answers() -> None:
    for state in (S.STOPPING, S.FAILED, S.SCRUBBING):
        at = world([DOC], replicas=[replica(DOC, "r", state=state)])
        at, moves = after(at, seen(Seen.READY))
        assert moves == ()
        assert at.replicas[R].state is state


def test_growth_restarts_the_start_lock_of_the_device() -> None:
    at = world([DOC], replicas=[replica(DOC, "r", state=S.STARTING)])
    at, _ = after(at, seen(Seen.STARTING, grew=True), now_s=T0 + 7.0)
    assert at.replicas[R].grown_s == T0 + 7.0


# --- failed starts ----------------------------------------------------------------------------------------------------


def try_once(at: World, now_s: float, reason: str = "out of memory") -> World:
    """A start that fails at once."""
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.STARTING), now_s=now_s)
    at, _ = after(at, seen(Seen.EXITED, reason=reason), seen(Seen.CLEAN), now_s=now_s)
    return at


def test_tries_follow_quickly_then_the_episode_fails_and_backs_off_for_longer_each_time() -> None:
    at, now_s = world([DOC]), T0
    for pause_s in (60.0, 120.0, 240.0):
        at = try_once(at, now_s)
        assert (at.histories[M].tries, at.histories[M].retry_at_s) == (1, now_s)
        at = try_once(at, now_s)
        assert (at.histories[M].tries, at.histories[M].retry_at_s) == (2, now_s + 0.5)
        at = try_once(at, now_s + 0.5)
        history = at.histories[M]
        assert (history.tries, history.first_try_s, history.failure) == (0, None, "out of memory")
        assert history.refused_until_s == history.retry_at_s == now_s + 0.5 + pause_s
        now_s = history.refused_until_s
        at, _ = after(at, Tick(), now_s=now_s)
        assert at.histories[M].refused_until_s == 0.0
    assert at.histories[M].episodes == 3


def test_a_start_that_is_ready_ends_the_episode() -> None:
    at = try_once(try_once(world([DOC]), T0), T0)
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.READY), now_s=T0 + 1.0)
    history = at.histories[M]
    assert (history.tries, history.first_try_s, history.failure, history.episodes) == (0, None, "", 0)


def test_one_try_that_takes_longer_than_the_limit_is_a_failed_episode() -> None:
    at, _ = after(world([DOC]), StartReplica(replica=pending(), reason=""), seen(Seen.STARTING))
    at, moves = after(at, FailReplica(replica=R, reason="start took longer than 100 s"), now_s=T0 + 100.0)
    assert moved(moves) == ["starting --broke--> failed"]
    assert at.histories[M].refused_until_s == T0 + 160.0


def test_a_replica_that_broke_after_it_was_ready_is_no_failed_start() -> None:
    at, moves = after(world([DOC], replicas=[replica(DOC, "r")]), seen(Seen.EXITED, reason="SIGSEGV"))
    assert at.replicas[R].failure == "SIGSEGV"
    assert [m.reason for m in moves] == ["SIGSEGV"]
    assert at.histories[M] == History(served_until_s=T0)


def test_a_changed_spec_is_tried_at_once_whatever_failed_before() -> None:
    at = world([DOC], histories={"m": History(refused_until_s=T0 + 60.0, episodes=2, failure="no such file")})
    at, _ = after(at, DocumentsSeen(models=(replace(DOC, slots=8),)))
    assert at.histories[M] == History()


def test_what_is_learnt_of_starts_is_bounded() -> None:
    at = world([DOC])
    for start in range(40):
        now_s = T0 + 100.0 * start
        at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.STARTING), now_s=now_s)
        at, _ = after(at, seen(Seen.READY), now_s=now_s + start)
        at, _ = after(at, seen(Seen.CLEAN), now_s=now_s + start)
    assert at.histories[M].starts_s == tuple(float(s) for s in range(8, 40))


# --- going to zero, and regretting it ---------------------------------------------------------------------------------


def to_zero(at: World, now_s: float) -> World:
    """Starts, gets ready, drains and stops for idleness."""
    at, _ = after(at, StartReplica(replica=pending(), reason=""), seen(Seen.READY), now_s=now_s)
    at, _ = after(at, DrainReplica(replica=R, reason="idle"), now_s=now_s)
    at, _ = after(at, StopReplica(replica=R, grace_s=1.0, reason=""), seen(Seen.CLEAN), now_s=now_s)
    return at


def test_a_start_soon_after_an_idle_stop_is_a_regret_and_a_late_one_forgets_all() -> None:
    at = to_zero(world([DOC]), T0)
    at = to_zero(at, T0 + 100.0)
    assert at.histories[M].regrets == 1
    at = to_zero(at, T0 + 400.0)
    assert at.histories[M].regrets == 1
    at = to_zero(at, T0 + 400.0 + 601.0)
    assert at.histories[M].regrets == 0


def test_an_eviction_is_not_idleness() -> None:
    at, _ = after(world([DOC], replicas=[replica(DOC, "r")]), DrainReplica(replica=R, reason="", victim_of=M))
    at, _ = after(at, StopReplica(replica=R, grace_s=1.0, reason=""))
    assert at.histories[M].stopped_idle_s is None


def test_peaks_cover_the_idle_window_in_thirteen_rows_at_most() -> None:
    at = world([DOC], gateways=[])
    for second in range(300):
        waiting = 9 if second == 250 else 1
        at, _ = after(at, reported(second + 1, levels=[level("m", running=waiting)]), now_s=T0 + second)
        assert len(at.histories[M].peaks) <= 13
    assert max(calls for _, calls in at.histories[M].peaks) == 9
    assert min(bucket + 1 for bucket, _ in at.histories[M].peaks) > T0 + 299 - 60.0


# --- reports --------------------------------------------------------------------------------------------------------


def reported(
    sequence: int,
    *,
    levels: list[Level] | None = None,
    name: str = "g1",
    boot: str = "b",
    totals: tuple[Total, ...] = (),
    epoch: int = 1,
) -> Reported:
    return Reported(
        report=Report(
            gateway=GatewayId(name),
            boot=boot,
            sequence=sequence,
            epoch=epoch,
            version=1,
            levels=tuple(levels or ()),
            totals=totals,
        )
    )


def total(**fields: float) -> Total:
    return replace(Total(model=M, tenant=TenantName("acme")), **fields)


def test_levels_are_summed_over_gateways_and_say_how_long_somebody_waits() -> None:
    at, _ = after(
        world([DOC], gateways=[]),
        reported(1, levels=[level("m", waiting=3, running=2, wait_s=4.0)]),
        reported(1, levels=[level("m", waiting=1, wait_s=1.0, tenant="lab")], name="g2"),
    )
    load = at.loads[M]
    assert (load.waiting, load.running, load.oldest_s) == (4, 2, T0 - 4.0)
    assert load.tenants == {"acme", "lab"}
    assert load.waiting_at == {"g1", "g2"}


def test_late_and_doubled_reports_change_nothing() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(5, levels=[level("m", waiting=3)]))
    same, _ = after(at, reported(5, levels=[level("m", waiting=3)]), reported(4), now_s=T0 + 1.0)
    assert same is at


def test_demand_of_a_gateway_that_fell_silent_expires_after_ten_seconds() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", running=3)]))
    at, _ = after(at, Tick(), now_s=T0 + 9.9)
    assert at.loads[M].running == 3
    at, _ = after(at, Tick(), now_s=T0 + 10.0)
    assert at.loads == {}
    assert at.histories[M].last_activity_s == T0
    assert not at.gateways[G1].gone


def test_service_is_the_growth_of_the_counts_of_one_boot() -> None:
    key = (M, TenantName("acme"))
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(busy_slot_us=2_000_000),)))
    at, _ = after(at, reported(2, totals=(total(busy_slot_us=5_000_000),)))
    assert at.attained[key].slot_s == 5.0
    at, _ = after(at, reported(1, boot="b2", totals=(total(busy_slot_us=1_000_000),)))
    assert at.attained[key].slot_s == 6.0


def test_a_tenant_that_comes_back_starts_level_with_the_least_served_active_one() -> None:
    busy = Total(model=M, tenant=TenantName("busy"), busy_slot_us=100_000_000)
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", running=1, tenant="busy")], totals=(busy,)))
    levels = [level("m", running=1, tenant="busy"), level("m", waiting=1, tenant="new")]
    at, _ = after(at, reported(2, levels=levels))
    assert at.attained[M, TenantName("new")].slot_s == 100.0


def test_a_refused_cold_call_is_demand_for_one_start_held_for_twice_what_was_told() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(refused_cold=1, retry_after_s=30.0),)))
    history = at.histories[M]
    assert (history.refused_cold_s, history.hold_until_s) == (T0, T0 + 60.0)
    again, _ = after(at, reported(2, totals=(total(refused_cold=1, retry_after_s=30.0, idle_s=5.0),)), now_s=T0 + 5.0)
    assert again.histories[M] == history


def test_idleness_counts_from_the_last_finish_anywhere() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, totals=(total(finished=1, idle_s=20.0),)))
    assert at.histories[M].last_activity_s == T0 - 20.0
    at, _ = after(at, reported(1, name="g2", totals=(total(finished=1, idle_s=50.0),)))
    assert at.histories[M].last_activity_s == T0 - 20.0


def test_a_gateway_that_is_proven_dead_is_forgotten_in_the_end_and_its_late_report_revives_nobody() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, levels=[level("m", waiting=3)]))
    at, _ = after(at, GatewayGone(gateway=G1), reported(2, levels=[level("m", waiting=3)]), now_s=T0 + 1.0)
    assert at.gateways[G1].gone
    assert at.loads == {}
    at, _ = after(at, Tick(), now_s=T0 + 61.0)
    assert at.gateways == {}


def test_the_death_of_a_former_boot_is_nothing_to_the_next() -> None:
    at, _ = after(world([DOC], gateways=[]), reported(1, boot="b1"), reported(1, boot="b2"))
    assert fold(at, [GatewayGone(gateway=G1, boot="b1")], T0)[0] is at


def test_a_known_gateway_that_never_reported_is_not_in_the_epoch() -> None:
    at, _ = after(world([DOC], gateways=[]), GatewaySeen(gateway=G1))
    assert not at.gateways[G1].in_epoch
    assert not at.handed_over
    at, _ = after(at, reported(1, epoch=0))
    assert not at.gateways[G1].in_epoch
    at, _ = after(at, reported(2))
    assert at.gateways[G1].in_epoch
    assert at.handed_over


# --- grants -----------------------------------------------------------------------------------------------------------


def grants(*pairs: tuple[int, int]) -> tuple[Grant, ...]:
    return tuple(Grant(version=version, hold=hold) for version, hold in pairs)


@pytest.mark.parametrize(
    ("version", "hold", "left"),
    [
        (3, 4, grants((2, 4), (5, 2), (8, 1))),
        (5, 2, grants((5, 2), (8, 1))),
        (7, 1, grants((5, 2), (8, 1))),
        (8, 1, grants((8, 1))),
        (9, 0, None),
        (1, 4, grants((2, 4), (5, 2), (8, 1))),
    ],
)
def test_a_report_voids_the_grants_before_the_one_it_acts_on(version: int, hold: int, left: object) -> None:
    use = ReplicaUse(replica=R, hold=hold)
    assert acknowledged({R: grants((2, 4), (5, 2), (8, 1))}, {R: use}, version).get(R) == left


def test_a_hold_of_a_former_leader_is_taken_over_as_it_is() -> None:
    assert acknowledged({}, {R: ReplicaUse(replica=R, hold=3)}, 7) == {R: grants((0, 3))}
    assert acknowledged({R: grants((0, 3))}, {R: ReplicaUse(replica=R, hold=2)}, 7) == {R: grants((0, 2))}
    assert acknowledged({R: grants((0, 3))}, {}, 7) == {}


def test_grants_that_a_newer_one_covers_are_dropped_so_they_are_bounded_by_the_slots() -> None:
    assert with_grant(grants((1, 4), (2, 2), (3, 1)), Grant(version=4, hold=2)) == grants((1, 4), (4, 2))


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_nothing_new_gives_the_very_same_world() -> None:
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


def test_the_version_rises_by_one_for_a_batch_that_gateways_must_learn_of_and_by_none_for_another() -> None:
    at = world([DOC], [device()])
    one, _ = after(at, seen(Seen.READY), seen(Seen.READY, "r2"), seen(Seen.UNREADY))
    assert one.version == at.version + 1
    none, _ = after(one, SlicesSeen(slices=()), seen(Seen.UNREADY, grew=True), HistorySeen(model=M, history=History()))
    assert none.version == one.version


def test_documents_that_go_take_what_was_learnt_with_them() -> None:
    at, _ = after(world([DOC]), HistorySeen(model=M, history=History(starts_s=(3.0,))))
    assert at.histories[M].starts_s == (3.0,)
    at, _ = after(at, reported(2, totals=(total(busy_slot_us=1),)), DocumentsSeen())
    assert [len(m) for m in (at.models, at.histories, at.attained)] == [0, 0, 0]


def test_a_world_in_use_is_never_changed_in_place() -> None:
    at = world([DOC], [device()], [replica(DOC, "r")])
    before = (dict(at.replicas), dict(at.by_model), dict(at.loads), dict(at.gateways))
    after(at, seen(Seen.CLEAN), seen(Seen.READY, "r2"), reported(2, levels=[level("m", waiting=1)]))
    assert (at.replicas, at.by_model, at.loads, at.gateways) == before


# --- properties -----------------------------------------------------------------------------------------------------

names = st.sampled_from(["r1", "r2", "r3"])
sights = st.builds(
    lambda name, sight, of, slot: seen(sight, name, of, slices=(Slice(**slot).id,)),
    names,
    st.sampled_from(Seen),
    st.sampled_from(["m", "n"]),
    st.sampled_from([{"id": i, "device": "d", "node": "n", "memory_bytes": 1} for i in ("s1", "s2")]),
)
level_lists = st.lists(
    st.builds(
        level,
        st.sampled_from(["m", "n"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from([0.0, 2.5]),
        st.sampled_from(["x", "y"]),
    ),
    max_size=3,
    unique_by=lambda row: (row.model, row.tenant),
)
reports = st.builds(
    lambda name, boot, sequence, levels, epoch: reported(sequence, levels=levels, name=name, boot=boot, epoch=epoch),
    st.sampled_from(["g1", "g2"]),
    st.sampled_from(["b1", "b2"]),
    st.integers(1, 9),
    level_lists,
    st.sampled_from([0, 1]),
)
others = st.sampled_from(
    [
        Synced(),
        Tick(),
        GatewaySeen(gateway=G1),
        GatewaySeen(gateway=G1, boot="b2"),
        GatewayGone(gateway=G1),
        DocumentsSeen(models=(DOC,)),
        DocumentsSeen(models=(DOC, model("n"))),
    ]
)
intents = st.one_of(
    st.builds(lambda name: StartReplica(replica=pending(name), reason=""), names),
    st.builds(lambda name: DrainReplica(replica=ReplicaId(name), reason=""), names),
    st.builds(lambda name: ReviveReplica(replica=ReplicaId(name), reason=""), names),
    st.builds(lambda name: StopReplica(replica=ReplicaId(name), grace_s=1.0, reason=""), names),
    st.builds(lambda name: FailReplica(replica=ReplicaId(name), reason=""), names),
)
batches = st.lists(
    st.tuples(st.lists(st.one_of(sights, reports, others), max_size=6), intents, st.sampled_from([0.0, 0.2, 6.0])),
    max_size=10,
)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(batches)
def test_indices_equal_a_rebuild_after_any_batch(
    batches: list[tuple[list[Observation], Action, float]],
) -> None:
    at, now_s = World(epoch=1), T0
    for batch, intent, pause_s in batches:
        now_s += pause_s
        at, _ = fold(at, batch, now_s)
        assert at == rebuild(at, now_s)
        try:
            at, _ = fold(at, [Acted(action=intent)], now_s)
        except IllegalIntentError:
            continue
        assert at == rebuild(at, now_s)
        granted = shares.divide(at, now_s)
        if granted is not None:
            at, _ = fold(at, [granted], now_s)
            assert at == rebuild(at, now_s)
        for known in at.gateways.values():
            for row in known.grants.values():
                assert [g.hold for g in row] == sorted({g.hold for g in row}, reverse=True)


truths = st.tuples(
    st.lists(
        st.builds(seen, st.sampled_from([Seen.STARTING, Seen.READY, Seen.UNREADY]), names), unique_by=lambda o: o.id
    ),
    st.lists(reports.filter(lambda r: r.report.boot == "b1"), max_size=6),
)


@settings(derandomize=True, deadline=None, max_examples=200)
@given(truths, st.randoms(use_true_random=False), st.integers(1, 4))
def test_levels_in_any_order_doubled_or_split_into_batches_give_the_same_world(
    truth: tuple[list[ReplicaSeen], list[Reported]], order: object, size: int
) -> None:
    """All but the version, which counts batches."""
    sights, said = truth
    newest = {(r.report.gateway, r.report.sequence): r for r in said}
    fixed: list[Observation] = [*sights, *newest.values(), DocumentsSeen(models=(DOC,)), Synced()]
    once, _ = fold(World(epoch=1), fixed, T0)
    mixed = fixed + fixed
    assert hasattr(order, "shuffle")
    order.shuffle(mixed)
    at = World(epoch=1)
    for first in range(0, len(mixed), size):
        at, _ = fold(at, mixed[first : first + size], T0)
    assert quiet(at) == quiet(once)


def quiet(at: World) -> World:
    """What does not depend on the way there: not the count of batches, nor peaks of demand that was seen on the way."""
    gateways = {id: replace(g, in_epoch=False) for id, g in at.gateways.items()}
    return replace(
        at, version=0, histories={}, attained={}, undivided=frozenset(), handed_over=False, gateways=gateways
    )
