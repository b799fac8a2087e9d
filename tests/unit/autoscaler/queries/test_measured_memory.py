"""The memory of a replica identifies its grant even if the document no longer offers that grant."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.agent_contract import NodeReport, PodUse
from autoscaler.contract import ModelName
from autoscaler.explain.decision_log import Log
from autoscaler.explain.fit import Needs, explain_fit
from autoscaler.explain.model import explain_model
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import plan
from autoscaler.queries.granted_memory import MIB, describe_granted_memory, has_grown, has_shrunk
from autoscaler.queries.measured_memory import (
    MARGIN,
    NOTICED_BYTES,
    SERVED_S,
    correct_memory_estimate,
    record_measured_memory,
)
from autoscaler.spec.model import Gpu, Model, ModelSpec
from autoscaler.spec.quantity import BytesOrAuto
from autoscaler.state.events import DocumentsSeen, HistorySeen, NodeReported, Seen
from autoscaler.state.world import History, PodRef, Replica, World
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replica, use, world
from tests.support.harness.driver_events import seen_of
from tests.unit.autoscaler.placement.test_memory_growth import growing

GROWS, ELASTIC, NEITHER = Gpu(growth_percent=100), Gpu(elastic_percent=30), Gpu()


def asks(gpu: Gpu) -> Model:
    """A Model that requests 10 GiB."""
    return growing(context_tokens=2048, gpu=gpu)


def serving(of: Model, memory_gi: int) -> Replica:
    """A replica that has served for a while."""
    return replica(of, "ra", memory_bytes=memory_gi * GI, ready_s=T0 - 5000, since_s=T0 - 5000)


def seen_using(of: Model, one: Replica, used_gi: float) -> World:
    at = world([of], [device()], [one], histories={of.name: History(last_activity_s=T0 - 10)})
    then, _ = fold(at, (replace(seen_of(one, Seen.READY), used_bytes=int(used_gi * GI)),), T0)
    return then


@pytest.mark.parametrize("gpu", [GROWS, NEITHER])
def test_usage_of_a_replica_with_extra_memory_does_not_raise_the_estimate(gpu: Gpu) -> None:
    then = seen_using(asks(gpu), replica(asks(gpu), "ra", memory_bytes=20 * GI, slots=9), 19)
    assert then.models[asks(gpu).name].memory_bytes == 10 * GI
    message = explain_model(then, plan(then, T0), Log(), asks(gpu).name, T0).sentences
    assert any("granted 20Gi instead of 10Gi, with 9 slots instead of 4" in line for line in message)


@pytest.mark.parametrize("gpu", [ELASTIC, NEITHER])
def test_usage_of_a_replica_with_less_memory_does_not_lower_the_estimate(gpu: Gpu) -> None:
    cut = seen_using(asks(gpu), serving(asks(gpu), 7), 5)
    assert cut.models[asks(gpu).name].memory_bytes == 10 * GI
    whole = seen_using(asks(gpu), serving(asks(gpu), 10), 5)
    assert whole.models[asks(gpu).name].memory_bytes == 6.25 * GI, (
        "memory use is learned from a replica with its full request"
    )


def test_usage_of_a_replica_with_its_requested_memory_sets_the_estimate() -> None:
    """It got the memory requested at its start; later measurements neither grow nor shrink its grant."""
    of = asks(NEITHER)
    for corrected_gi in (6, 13):
        now = replace(of, memory_bytes=corrected_gi * GI)
        one = replica(of, "ra")
        assert (has_grown(now, one), has_shrunk(now, one), describe_granted_memory(now, one)) == (False, False, "")
    assert seen_using(of, replica(of, "ra"), 13).models[of.name].memory_bytes == 13 * GI


def test_grant_within_a_mebibyte_of_the_estimate_counts_as_unchanged() -> None:
    of, whole, two = asks(NEITHER), model("w", 0), model("t", 4, gpu=Gpu(count=2))
    for one in (replica(of, "r", memory_bytes=10 * GI + MIB - 1), replica(of, "r", memory_bytes=10 * GI - MIB + 1)):
        assert (has_grown(of, one), has_shrunk(of, one)) == (False, False)
    assert describe_granted_memory(whole, replica(whole, "r", memory_bytes=24 * GI)) == ""
    assert describe_granted_memory(two, replica(two, "r", memory_bytes=24 * GI)) == ""
    assert describe_granted_memory(of, replica(of, "r", memory_bytes=20 * GI, spec_hash="0" * 8)) == "", (
        "it runs by another document"
    )


NEW = History()
A = replace(model("a", 8), estimated_bytes=8 * GI)


def after(*used: tuple[float, bool], of: Model = A) -> float:
    """The estimate in GiB after these measurements: (GiB used, whether the replica had served)."""
    history = NEW
    for gib, served in used:
        history = record_measured_memory(history, of, int(gib * GI), served=served)
    return correct_memory_estimate(of, history).memory_bytes / GI


def test_usage_above_the_estimate_raises_it_before_the_replica_serves() -> None:
    assert after() == 8
    assert after((9, False)) == 9
    assert after((9, False), (5, True)) == 9, "the most that was seen, not the latest"
    assert after((9, False), (10, False)) == 10


def test_measured_usage_below_the_estimate_replaces_it_after_serving() -> None:
    assert after((4, False)) == 8
    assert after((4, True)) == 4 * MARGIN
    assert after((4, True), (6, False)) == 6 * MARGIN, "it grew since"
    assert after((7, True)) == 8, "the margin is above the estimate"


def test_vllm_usage_raises_the_estimate_only_above_its_reserved_memory() -> None:
    """It uses all the memory that it reserves, and on a slice of its own all of the slice."""
    auto = ModelSpec(engine="vllm", gpu=Gpu(memory_bytes=BytesOrAuto(0)))
    of = replace(A, spec=auto, memory_bytes=8 * GI, estimated_bytes=8 * GI)
    there = world([of], [device()], [replica(of, "a1", memory_bytes=8 * GI)])
    for used, counted in ((3, 8), (8, 8), (9, 9)):
        assert served(T0 + 2 * SERVED_S, used, there).models[of.name].memory_bytes == counted * GI
    again = served(T0, 9, there)
    now = replica(of, "a1", memory_bytes=9 * GI)
    after = served(T0 + 1, 10, replace(again, replicas={now.id: now}))
    assert after.models[of.name].memory_bytes == 9 * GI, "given more it takes more: that is no news"
    own = world([of], [device(shared=False)], [replica(of, "a1", memory_bytes=8 * GI)])
    assert served(T0, 20, own).models[of.name].memory_bytes == 8 * GI


def test_measured_growth_below_the_recording_threshold_is_ignored() -> None:
    history = record_measured_memory(NEW, A, 5 * GI, served=False)
    assert record_measured_memory(history, A, 5 * GI + NOTICED_BYTES - 1, served=False) is history
    assert record_measured_memory(history, A, 3 * GI, served=False) is history


def test_measurement_is_ignored_for_another_spec_or_estimate() -> None:
    history = record_measured_memory(NEW, A, 4 * GI, served=True)
    slots = replace(A, slots=99)
    other = replace(A, estimated_bytes=9 * GI, memory_bytes=9 * GI)
    assert correct_memory_estimate(A, history).memory_bytes == 4 * GI * MARGIN
    assert correct_memory_estimate(slots, history) is slots
    assert correct_memory_estimate(other, history) is other


def test_explicit_memory_and_whole_device_models_are_never_corrected() -> None:
    for of in (model("a", 8), model("a", 0)):
        assert record_measured_memory(NEW, of, 20 * GI, served=True) is NEW
        assert (
            correct_memory_estimate(of, replace(NEW, used=record_measured_memory(NEW, A, 20 * GI, served=True).used))
            is of
        )


def test_spec_hash_excludes_memory_estimates_and_measurements() -> None:
    other = replace(A, estimated_bytes=9 * GI, memory_bytes=9 * GI)
    assert A.spec_hash() == other.spec_hash()
    asked = [replace(A, spec=replace(A.spec, gpu=Gpu(memory_bytes=BytesOrAuto(n)))).spec_hash() for n in (GI, 2 * GI)]
    assert len({*asked, A.spec_hash()}) == 3, "the document's request is"


def served(now_s: float, used_gib: float, made: World) -> World:
    """`a` runs, and its driver reports its memory use."""
    known = made.replicas[next(iter(made.replicas))]
    ready = replace(seen_of(known, Seen.READY), used_bytes=int(used_gib * GI))
    return fold(made, (ready,), now_s)[0]


def reported(at: World, now_s: float, *uses: tuple[str, str, float], sequence: int = 1) -> World:
    """The node agent reports how many GiB of which device each pod uses."""
    pod_uses = tuple(PodUse(pod_uid=uid, device=device, used_bytes=int(gib * GI)) for uid, device, gib in uses)
    return fold(at, (NodeReported(report=NodeReport(node="n0", boot="b", sequence=sequence, uses=pod_uses)),), now_s)[0]


def in_pod(at: World, uid: str = "u1") -> World:
    """The same replica as a pod of a cluster."""
    pod = PodRef(namespace="engines", name="r", uid=uid)
    return replace(
        at, replicas={id: replace(one, runtime=replace(one.runtime, pod=pod)) for id, one in at.replicas.items()}
    )


def running(ready_s: float, active_s: float) -> World:
    calls = [gateway(levels=[level("a", 0, 1)], uses=[use("r", 1)])]
    runs = replica(A, "r", ready_s=ready_s)
    return world([A], [device()], [runs], calls, {"a": History(last_activity_s=active_s)})


def test_measured_memory_applies_to_new_replicas_and_restarts_none() -> None:
    before = running(T0 - 10, T0 - 5)
    upon = served(T0, 9, before)
    assert upon.models[A.name].memory_bytes == 9 * GI
    assert upon.replicas == before.replicas
    assert plan(upon, T0).actions == plan(before, T0).actions == ()
    again, _ = fold(upon, (DocumentsSeen(models=(A,)),), T0)
    assert again.models[A.name].memory_bytes == 9 * GI, "documents that are read again"
    estimated = replace(A, estimated_bytes=7 * GI, memory_bytes=7 * GI)
    upgraded, _ = fold(upon, (DocumentsSeen(models=(estimated,)),), T0)
    assert upgraded.models[A.name].memory_bytes == 7 * GI
    assert plan(upgraded, T0).actions == (), "another estimate after an upgrade: no rollout"


def test_measured_memory_is_capped_at_the_device_memory() -> None:
    upon = served(T0, 1000, running(T0 - 10, T0 - 5))
    assert upon.models[A.name].memory_bytes == device().memory_bytes


def test_lower_usage_applies_only_after_long_readiness_and_a_request() -> None:
    long_s = T0 - SERVED_S
    assert served(T0, 4, running(long_s, T0 - 5)).models[A.name].memory_bytes == 4 * GI * MARGIN
    assert served(T0, 4, running(long_s + 1, T0 - 5)).models[A.name].memory_bytes == 8 * GI
    assert served(T0, 4, running(long_s, long_s - 1)).models[A.name].memory_bytes == 8 * GI


def test_missing_usage_or_an_older_spec_gives_no_measurement() -> None:
    before = running(T0 - 10, T0 - 5)
    assert served(T0, 0, before).learned.histories == before.learned.histories
    old = world([A], [device()], [replica(A, "r", spec_hash="before")])
    assert served(T0, 20, old).models == old.models


def test_node_agent_report_of_pod_usage_sets_the_memory_estimate() -> None:
    """The rule is the same as on a single machine, and `explain fit` reports the same."""
    early, long_s = in_pod(running(T0 - 10, T0 - 5)), T0 - SERVED_S
    upon = reported(early, T0, ("u1", "GPU-a", 9), ("u2", "GPU-a", 14))
    assert upon.models[A.name].memory_bytes == 9 * GI
    assert (upon.replicas, plan(upon, T0).actions) == (early.replicas, ())
    fit = explain_fit(upon, upon.models[A.name], Needs(), T0)
    assert (fit.basis, fit.used_bytes) == ("measured", 9 * GI)
    assert fit.sentences[1].endswith("at most 9Gi of a device, before it had served for some time.")
    less = reported(in_pod(running(long_s, T0 - 5)), T0, ("u1", "GPU-a", 4))
    assert less.models[A.name].memory_bytes == 4 * GI * MARGIN, "it had served for a while"
    full = reported(early, T0, ("u1", "GPU-a", 1000))
    assert full.models[A.name].memory_bytes == device().memory_bytes
    grown = reported(reported(early, T0, ("u1", "GPU-a", 3)), T0 + 1, ("u1", "GPU-a", 9), sequence=2)
    assert grown.models[A.name].memory_bytes == 9 * GI, "as it grew"


def test_unmatched_outdated_or_late_usage_report_is_ignored() -> None:
    before = in_pod(running(T0 - 10, T0 - 5))
    assert reported(before, T0).learned.histories == before.learned.histories
    assert reported(before, T0, ("u2", "GPU-a", 20)).learned.histories == before.learned.histories, "another pod's"
    assert reported(before, T0, ("", "GPU-a", 20)).learned.histories == before.learned.histories
    assert reported(running(T0 - 10, T0 - 5), T0, ("u1", "GPU-a", 20)).learned.histories == before.learned.histories, (
        "no pod is known"
    )
    old = replace(before, replicas={id: replace(one, spec_hash="before") for id, one in before.replicas.items()})
    assert reported(old, T0, ("u1", "GPU-a", 20)).learned.histories == before.learned.histories
    again = reported(before, T0, ("u1", "GPU-a", 3), sequence=5)
    assert reported(again, T0 + 1, ("u1", "GPU-a", 9), sequence=5) is again, "a report that is late"


def test_usage_over_several_devices_is_averaged_per_device() -> None:
    two = replace(A, spec=replace(A.spec, gpu=replace(A.spec.gpu, count=2)))
    cards = [device("gpu0"), device("gpu1")]
    at = in_pod(world([two], cards, [replica(two, "r", ["gpu0", "gpu1"])]))
    upon = reported(at, T0, ("u1", "GPU-a", 9), ("u1", "GPU-b", 11))
    assert upon.models[A.name].memory_bytes == 10 * GI


def test_recorded_measurement_applies_after_a_restart() -> None:
    history = record_measured_memory(NEW, A, 9 * GI, served=False)
    restarted, _ = fold(world([A], [device()]), (HistorySeen(model=A.name, history=history),), T0)
    assert restarted.models[ModelName("a")].memory_bytes == 9 * GI


def test_explain_fit_of_a_measured_model_states_its_measured_memory() -> None:
    upon = served(T0, 4, running(T0 - SERVED_S, T0 - 5))
    fit = explain_fit(upon, upon.models[A.name], Needs(source="It", token_bytes=1), T0)
    assert (fit.basis, fit.used_bytes) == ("measured", 4 * GI)
    assert (
        fit.sentences[0]
        == "a is assumed to need 5Gi, as measured; the estimate from its artifact is 8Gi. It gives this estimate:"
    )
    assert "Measured: a replica uses at most 4Gi of a device, after it had served for some time." in fit.sentences
    early = served(T0, 4, running(T0 - 10, T0 - 5))
    fit = explain_fit(early, early.models[A.name], Needs(), T0)
    assert fit.sentences[1].endswith("at most 4Gi of a device, before it had served for some time.")
