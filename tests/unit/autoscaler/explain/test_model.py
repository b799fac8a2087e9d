"""Explain: its sentences about a Model."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.explain.decision_log import Log, list_recent_decisions
from autoscaler.explain.model import Explanation, explain_model
from autoscaler.explain.status_rows import list_status_rows
from autoscaler.fold.indices import rebuild_indices
from autoscaler.placement.learning.training import build_initial_values
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Adopted
from autoscaler.state.actions import Plan, Unmet
from autoscaler.state.events import Transition
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import ClusterFacts, Drain, History, World
from autoscaler.text import format_count, format_duration, format_size, format_tenants
from tests.support.builders.placement_values import cluster, exercise_of, lesson
from tests.support.builders.worlds import T0, device, gateway, level, model, replace_fields, replica, use, world

A, B = model("a", 20), model("b", 20)


def explain(made: World, name: str = "b", log: Log | None = None) -> Explanation:
    return explain_model(made, plan(made, T0), log or Log(), ModelName(name), T0)


def test_explain_names_the_model_on_a_slice_and_its_residency_end() -> None:
    calls = [gateway(levels=[level("a", 1, 1), level("b", 2, wait_s=3)], uses=[use("r", 1)])]
    known = {"a": History(starts_s=(4.0,), last_activity_s=T0)}
    explanation = explain(world([A, B], [device()], [replica(A, "r", ready_s=T0 - 10)], calls, known))
    held = "4Gi free of 24Gi, held by a (busy, residency ends in 2 s)"
    assert explanation.state == "waiting"
    assert explanation.sentences == (
        "1 replica is needed: 2 waiting, tenant acme, for 3 s.",
        f"Not placed: needs 20Gi on one device; the largest has {held}.",
        f"gpu0: {held}.",
        "Eviction of a (r on gpu0), restart takes 4 s: a is busy, residency ends in 2 s.",
    )
    assert [candidate.slice for candidate in explanation.candidates] == ["gpu0"]


def test_explain_states_how_weights_are_mounted_for_each_source() -> None:
    def weights(artifact: str, facts: ClusterFacts | None) -> list[str]:
        there = replace(B, spec=replace(B.spec, artifact=artifact))
        return [one for one in explain(world([there], [device()], mounting=facts)).sentences if "weights" in one]

    oci, may, may_not = "oci://r.io/a:1", ClusterFacts(volumes=True), ClusterFacts(server=(1, 30))
    absent = f"Its weights ({oci}) are on no node yet; the next start pulls them."
    assert weights(oci, may) == [absent, "Its weights are mounted as a read-only volume of their node's store."]
    assert weights(oci, may_not)[1].startswith("Its weights cannot be mounted in its pods: Pilotlight may not create")
    assert weights("pvc://shared/a", may_not) == ["Its weights are in the claim shared, which is mounted as it is."]
    assert weights(oci, None) == [absent]
    assert weights("file:///a", may) == []
    assert weights("hf://a/b", may)[1:] == ["Its weights are mounted as a read-only volume of their node's store."]


def test_explain_mentions_learned_placement_only_while_a_start_is_needed() -> None:
    at, calls = cluster(), [gateway(levels=[level("b", 1)])]
    known = exercise_of(at)
    chosen = (
        "Among slices of equal price and size, the one with the best value is chosen; the values were learned from "
        "2 request shapes, 3 nodes, seed 7."
    )
    waits = world(
        at.models.values(), at.nodes.slices.values(), gateways=calls, lesson=lesson(replace(known, seed=7), 1)
    )
    assert chosen in explain(waits).sentences
    starts = replica(at.models[B.name], "r", ["g0"], S.STARTING)
    assert chosen in explain(rebuild_indices(replace(waits, replicas={starts.id: starts}), T0)).sentences
    runs = replica(at.models[B.name], "r", ["g0"])
    for other in (
        replace_fields(waits, lesson=None),
        replace_fields(waits, lesson=build_initial_values(known)),
        replace(waits, replicas={runs.id: runs}),
    ):
        assert not any("learned" in sentence for sentence in explain(rebuild_indices(other, T0)).sentences)


def test_explain_gives_the_start_reason_and_start_times_of_a_replica() -> None:
    known = {"b": History(starts_s=(3.0, 5.0), last_activity_s=T0 - 12)}
    runs = replica(B, "r", reason="wake b: 3 waiting, tenant acme")
    explanation = explain(world([B], [device()], [runs], histories=known))
    assert explanation.state == "ready"
    assert explanation.sentences == (
        "1 replica is needed: last used 12 s ago, idle timeout 60 s.",
        "r has been ready for 100 s on gpu0: wake b: 3 waiting, tenant acme.",
        "Its last start took 5 s, the median is 5 s.",
    )


def test_explain_gives_the_soonest_deadline_of_queued_requests() -> None:
    calls = [
        gateway("g1", [replace(level("b", 2), soonest_deadline_s=90.0)], seen_s=T0 - 2),
        gateway("g2", [replace(level("b", 1, tenant="lab"), soonest_deadline_s=14.0), level("b", 0, 3)], seen_s=T0 - 1),
    ]
    explanation = explain(world([B], [device()], gateways=calls))
    assert explanation.sentences[1] == "The earliest deadline of 3 queued requests is in 13 s."


def test_explain_reports_an_engine_that_sends_nothing_during_a_request() -> None:
    def sentences(*ages: float | None, in_use: int = 1) -> tuple[str, ...]:
        uses = [replace(use("r", in_use), last_byte_age_s=age_s) for age_s in ages]
        calls = [gateway(f"g{n}", [level("b", 0, 1)], [each], T0 - 2) for n, each in enumerate(uses)]
        return explain(world([B], [device()], [replica(B, "r")], calls)).sentences

    quiet = "Requests run on r, but its engine has sent no output for 12 s."
    assert quiet in sentences(10.0)
    assert quiet in sentences(40.0, 10.0, None), "the newest counts"
    assert not [line for line in sentences(3.0) if "sent" in line], "5 s ago: it may just think"
    assert not [line for line in sentences(10.0, in_use=0) if "sent" in line], "no request waits for it"


def test_explain_names_the_gateway_that_a_drain_waits_for() -> None:
    drain = Drain(since_s=T0 - 1, reason="idle for 60 s", came_from=S.READY, epoch=1, version=2)
    going = replica(B, "r", state=S.DRAINING, drain=drain, since_s=T0 - 1)
    explanation = explain(world([B], [device()], [going]))
    assert explanation.sentences[:2] == (
        "No replica is needed now: it has no requests.",
        "r has been draining for 1 s on gpu0: idle for 60 s; gateway g1 has not acknowledged.",
    )


def test_explain_reports_the_last_start_failure_and_the_next_try() -> None:
    failed = {"b": History(episodes=2, failure="exit status 1", refused_until_s=T0 + 90, retry_at_s=T0 + 90)}
    explanation = explain(world([B], [device()], gateways=[gateway(levels=[level("b", 1)])], histories=failed))
    assert explanation.state == "failed"
    sentence = (
        "Its last start failed: exit status 1. 2 starts failed in a row. "
        "Its requests are rejected and no start is attempted for 90 s."
    )
    assert sentence in explanation.sentences


GONE = "/m/b.gguf does not exist; put the model there, or correct spec.artifact"


def test_obstacle_to_a_start_is_explained_before_and_after_requests() -> None:
    idle = world([B], [device()], obstacles={"b": GONE})
    explanation, (row,) = explain(idle), list_status_rows(idle, Plan(), T0)
    assert (explanation.state, row.state, row.why) == ("zero", "zero", f"cannot start: {GONE}")
    assert explanation.sentences == (
        "No replica is needed now: it has no requests.",
        f"It cannot start: {GONE}. Its requests are rejected with model_start_failed.",
    )
    failed = {"b": History(failure=GONE, refused_until_s=T0 + 50, retry_at_s=T0 + 50)}
    called = world([B], [device()], obstacles={"b": GONE}, histories=failed)
    explanation, (row,) = explain(called), list_status_rows(called, Plan(), T0)
    assert (explanation.state, row.state, row.why) == ("failed", "failed", f"cannot start: {GONE}")
    assert explanation.sentences[1:] == (
        f"It cannot start: {GONE}. Its requests are rejected with model_start_failed.",
        "Its requests are rejected and no start is attempted for 50 s.",
    )


def test_explain_states_why_a_running_model_cannot_start_a_replica() -> None:
    made = world(
        [B], [device()], [replica(B, "r")], obstacles={"b": GONE}, histories={"b": History(last_activity_s=T0)}
    )
    assert f"Another replica cannot start: {GONE}." in explain(made).sentences
    (row,) = list_status_rows(made, Plan(), T0)
    assert (row.state, row.why) == ("ready", "last used 0 s ago, idle timeout 60 s")


def test_explain_gives_the_needed_and_the_maximum_replica_count() -> None:
    many = model("b", 1, slots=1, high=4)
    waiting = world([many], [device()], gateways=[gateway(levels=[level("b", 3, wait_s=60)])])
    assert (
        explain(waiting).sentences[0].startswith("3 replicas are needed (of at most 4): 3 waiting, tenant acme: 3 x 1 ")
    )


def test_explain_names_gateways_that_prevent_scale_down() -> None:
    explanation = explain(world([B], [device()], [replica(B, "r")], [gateway("g7", seen_s=T0 - 60)]))
    assert explanation.sentences[-1] == "Nothing is scaled down until these gateways report: g7."


def test_recent_replica_transitions_are_listed_newest_first() -> None:
    log = Log()
    for at_s, before, after, verb in ((T0 - 9, S.PENDING, S.STARTING, "place"), (T0 - 2, S.STARTING, S.READY, "seen")):
        log.extend([Transition(at_s, ReplicaId("r"), B.name, (), before, after, verb, "why")])
    made = world([B], [device()])
    assert list_recent_decisions(log, T0) == (
        "b: r starting -> ready, 2 s ago: why",
        "b: r pending -> starting, 9 s ago: why",
    )
    assert explain(made, log=log).sentences[-1] == "Last: r starting -> ready, 2 s ago: why."


def moves(*rows: tuple[float, S, S, str]) -> Log:
    """A log of Model b. Each row: seconds ago, from, to, why."""
    log = Log()
    log.extend(
        Transition(
            at_s=T0 - ago_s, replica=ReplicaId("r"), model=B.name, slices=(), before=before, after=after,
            verb="", reason=why,
        )
        for ago_s, before, after, why in rows
    )  # fmt: skip
    return log


def test_stop_reason_is_explained_until_the_model_serves_again() -> None:
    ends = (
        (46.0, S.READY, S.DRAINING, "make room for ada"),
        (45.5, S.DRAINING, S.STOPPING, "no Call is on it"),
        (45.0, S.SCRUBBING, S.GONE, "nothing of it is left"),
    )
    made = world([B], [device()])
    why, last_move = (
        "It stopped 46 s ago: make room for ada.",
        "Last: r scrubbing -> gone, 45 s ago: nothing of it is left.",
    )
    assert explain(made, log=moves(*ends)).sentences[-2:] == (why, last_move)
    starts = world([B], [device()], [replica(B, "r2", state=S.STARTING)])
    assert why in explain(starts, log=moves(*ends)).sentences
    again = world([B], [device()], [replica(B, "r2")])
    assert not [line for line in explain(again, log=moves(*ends)).sentences if line.startswith("It stopped")]
    idle = moves((90.0, S.READY, S.DRAINING, "make room for ada"), (5.0, S.READY, S.DRAINING, "idle for 2 s"), ends[2])
    assert "It stopped 5 s ago: idle for 2 s." in explain(made, log=idle).sentences, "the newest"


def test_model_failure_is_explained_with_its_reason_and_time() -> None:
    broke = (8.0, S.READY, S.FAILED, "was killed by SIGKILL")
    explanation = explain(world([B], [device()]), log=moves(broke, (7.0, S.SCRUBBING, S.GONE, "nothing of it is left")))
    assert explanation.sentences[-2] == "It failed 8 s ago: was killed by SIGKILL."
    draining = replica(B, "r", state=S.FAILED, failure="was killed by SIGKILL", since_s=T0 - 8)
    explanation = explain(world([B], [device()], [draining]), log=moves(broke))
    assert not [line for line in explanation.sentences if line.startswith("It failed")], (
        "its last transition already states the reason"
    )


def test_model_that_fits_no_device_is_explained_with_or_without_demand() -> None:
    huge, never = model("huge", 30), "needs 30Gi on one device; the largest has 24Gi"
    for waiting in (0, 2):
        made = world([huge], [device()], gateways=[gateway(levels=[level("huge", waiting)] if waiting else [])])
        explanation = explain(made, "huge")
        assert explanation.sentences[-2:] == (
            f"It fits on no device: {never}. Its requests are rejected with no_capacity.",
            "gpu0: it has 24Gi in total, which does not satisfy 30Gi on one device.",
        )
        (row,) = list_status_rows(made, plan(made, T0), T0)
        assert row.why == f"fits on no device: {never}"


def test_running_model_is_not_reported_as_fitting_no_device() -> None:
    huge = model("huge", 30)
    made = world([huge], [device()], [replica(huge, "r")])
    assert not [line for line in explain(made, "huge").sentences if "no device" in line]
    (row,) = list_status_rows(made, plan(made, T0), T0)
    assert "no device" not in row.why


def test_rejection_for_lack_of_a_device_is_listed_as_a_recent_decision() -> None:
    log = Log()
    log.refuse([Unmet(model=ModelName("huge"), reason="needs 30Gi on one device", never=True)], T0 - 3)
    message = "its requests were rejected, 3 s ago: it fits on no device: needs 30Gi on one device"
    assert list_recent_decisions(log, T0) == (f"huge: {message}",)
    assert explain(world([model("huge")], [device()]), "huge", log).sentences[-1] == f"Last: {message}."


@pytest.mark.parametrize(("held", "begins"), [(0, "No replica is needed now"), (2, "2 replicas are needed")])
def test_replica_count_set_with_kubectl_is_explained_exactly_once(held: int, begins: str) -> None:
    message = f"scaled to {held} by kubectl; holds until then"
    by_hand = Adopted(
        kind="Deployment", namespace="default", name="a", held=True, reason="ScaledByHand", message=message
    )
    made = replace(model("a", 20, low=held, high=held, paused=not held), adopted=by_hand)
    first, *others = explain(world([made], [device()]), "a").sentences
    assert first.startswith(begins)
    assert first.endswith(f": {message}.")
    assert not [line for line in others if "holds until" in line]
    served = world([made], [device()], [replica(made, "r")], histories={"a": History(last_activity_s=T0)})
    assert [message in line for line in explain(served, "a").sentences].count(True) == 1


def test_durations_sizes_and_counts_are_printed_with_their_unit() -> None:
    durations = ", ".join(map(format_duration, (0.42, 3.0, 12.3, 200.0, 7300.0)))
    assert durations == "0.4 s, 3 s, 12 s, 3 min 20 s, 2 h 1 min"
    assert [format_size(b) for b in (20 << 30, 1 << 29, 12)] == ["20Gi", "512Mi", "12 bytes"]
    assert [format_count(count, "tenant") for count in (0, 1, 2)] == ["0 tenants", "1 tenant", "2 tenants"]
    assert format_tenants(["b", "a"]) == "tenants a, b"
    assert format_tenants("abcde") == "tenants a, b, c and 2 more"
