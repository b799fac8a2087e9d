"""Rows of `pilotlight status`: one per Model, with its state and the reason."""

from __future__ import annotations

from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.explain.status_rows import list_status_rows, model_state
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import plan
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.state.actions import Plan
from autoscaler.state.events import Tick
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import History
from tests.support.builders.worlds import T0, device, drain, gateway, level, model, replica, use, world

A, B = model("a", 20), model("b", 20)


def test_status_gives_the_failure_reason_and_the_next_try_time() -> None:
    failed = {"b": History(episodes=1, failure="exit status 1", refused_until_s=T0 + 60, retry_at_s=T0 + 60)}
    made = world([B], [device()], gateways=[gateway(levels=[level("b", 1)])], histories=failed)
    (row,) = list_status_rows(made, plan(made, T0), T0)
    assert (row.state, row.why) == ("failed", "exit status 1; the next attempt is in 60 s")


def test_status_has_a_row_for_every_model_and_for_leftover_replicas() -> None:
    left = replica(model("gone", 2), "old")
    calls = [gateway(levels=[level("a", 2, 1)], uses=[use("r", 1)])]
    made = world([A, B], [device()], [replica(A, "r"), left], calls)
    rows = {row.model: row for row in list_status_rows(made, plan(made, T0), T0)}
    assert list(rows) == ["a", "b", "gone"]
    a = rows[ModelName("a")]
    assert (a.state, a.replicas, a.waiting, a.running, a.devices, a.since_s) == (
        "ready",
        {"ready": 1},
        2,
        1,
        ("gpu0",),
        100,
    )
    assert (rows[ModelName("b")].state, rows[ModelName("b")].why) == ("zero", "it has no requests")
    assert rows[ModelName("gone")].why == "no longer in the documents"
    (row,) = list_status_rows(world([], [device()], [replace(left, spec_hash=ADOPTED_HASH)]), Plan(), T0)
    assert row.why == "no longer annotated, or it was deleted"


def test_status_prefers_the_reason_of_a_live_replica_over_a_stopping_one() -> None:
    ends = replica(A, "r1", state=S.SCRUBBING, drain=replace(drain(), reason="stopped by an operator"))
    used = {"a": History(last_activity_s=T0)}
    (row,) = list_status_rows(world([A], [device()], [ends, replica(A, "r2")], histories=used), Plan(), T0)
    assert (row.state, row.why) == ("ready", "last used 0 s ago, idle timeout 60 s")
    (row,) = list_status_rows(world([A], [device()], [ends]), Plan(), T0)
    assert row.why == "stopped by an operator"


def test_model_state_names_the_state_of_its_replica_or_paused_or_zero() -> None:
    for state, word in ((S.STARTING, "starting"), (S.UNREADY, "unready"), (S.SCRUBBING, "stopping")):
        assert model_state(world([A], [device()], [replica(A, "r", state=state)]), A.name, T0) == word
    assert model_state(world([model("a", paused=True)]), A.name, T0) == "paused"
    assert model_state(fold(world([A]), (Tick(),), T0)[0], A.name, T0) == "zero"
