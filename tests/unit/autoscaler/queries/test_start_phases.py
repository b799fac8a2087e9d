"""The phases of a start, the parts of `place`, and starts that were not observed."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.demand.model_history import start_deadline_s
from autoscaler.drivers.kubernetes.objects.pod_state import StartTiming
from autoscaler.queries.start_phases import PARTS, last_phases_ms, parts_s, phases_s, phases_with_parts_s
from autoscaler.spec.document_names import format_replica_id
from autoscaler.spec.model import ADOPTED_HASH
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import LeadingSeen, Seen, Synced
from autoscaler.state.world import Placing, PodRef, Replica
from tests.support.builders.adoption_workload import Bench
from tests.support.builders.fold import DOC, M, R, after, pending, seen
from tests.support.builders.worlds import T0, replica, world


def started(placing: Placing | None = None, **fields: float) -> Replica:
    """Requested at T0, ordered 1 s later, process started at 10 s, ready at 12 s."""
    times: dict[str, Any] = {"wanted_s": T0, "created_s": T0 + 1, "started_s": T0 + 10, "ready_s": T0 + 12, **fields}
    return replica(DOC, "r", placing=placing or Placing(), **times)


def test_start_time_is_split_into_decide_place_image_and_load_phases() -> None:
    one = started(Placing(asked_s=T0 + 2, bound_s=T0 + 4, prepared_s=T0 + 7))
    assert phases_s(one) == {"decide": 1, "place": 6, "image": 3, "load": 2}
    assert list(phases_with_parts_s(one).items()) == [
        ("decide", 1), ("place", 6), ("place.write", 1), ("place.schedule", 2), ("place.kubelet", 3), ("image", 3),
        ("load", 2),
    ]  # fmt: skip


def test_pull_is_a_separate_start_phase_only_if_it_ends_during_placement() -> None:
    assert phases_s(started(Placing(pulled_s=T0 + 8))) == {"decide": 1, "pull": 7, "place": 2, "load": 2}
    assert phases_s(started(Placing(pulled_s=T0 + 1))) == {"decide": 1, "pull": 0, "place": 9, "load": 2}
    for pulled_s in (T0, T0 + 11):
        assert phases_s(started(Placing(pulled_s=pulled_s))) == {"decide": 1, "place": 9, "load": 2}


@pytest.mark.parametrize(
    ("placing", "parts"),
    [
        (Placing(), {}),
        (Placing(asked_s=T0 + 2), {"place.write": 1}),
        (Placing(bound_s=T0 + 4), {"place.kubelet": 6}),
        (Placing(asked_s=T0 + 5, bound_s=T0 + 4), {"place.write": 4, "place.kubelet": 6}),
        (Placing(asked_s=T0 - 1, bound_s=T0 + 4), {"place.kubelet": 6}),
        (Placing(asked_s=T0 + 2, bound_s=T0 + 4, prepared_s=T0 + 11),
         {"place.write": 1, "place.schedule": 2, "place.kubelet": 6}),
    ],
)  # fmt: skip
def test_part_of_the_place_phase_without_observed_begin_is_omitted(placing: Placing, parts: dict[str, float]) -> None:
    assert parts_s(started(placing)) == parts
    assert phases_s(started(placing)) == {"decide": 1, "place": 9, "load": 2}, "no image without its begin"


@settings(derandomize=True, deadline=None)
@given(st.tuples(*(st.none() | st.floats(0, 20) for _ in range(3))), st.floats(0, 12))
def test_recorded_start_phases_sum_to_the_total_start_time(moments: tuple[float | None, ...], began_s: float) -> None:
    asked_s, bound_s, prepared_s = (None if moment is None else T0 + moment for moment in moments)
    one = started(Placing(asked_s=asked_s, bound_s=bound_s, prepared_s=prepared_s), started_s=T0 + began_s)
    found = phases_s(one)
    if began_s < 1:
        assert found == phases_with_parts_s(one) == {}, "its process is older than its order"
        return
    assert sum(found.values()) == pytest.approx(12)
    assert set(phases_with_parts_s(one)) - set(found) <= set(PARTS)
    if asked_s is not None and bound_s is not None and one.times.created_s <= asked_s <= bound_s <= T0 + began_s:
        assert sum(parts_s(one).values()) <= found["place"] + 1e-9 or prepared_s is not None


# --- starts that were not observed ------------------------------------------------------------------------------------


def test_adopted_replica_has_no_phases_and_records_no_start_time() -> None:
    """After a restart or leader change: an engine that has run for an hour did not take an hour to start."""
    at, _ = after(world([DOC]), seen(Seen.READY, started_s=T0 - 3600), now_s=T0)
    assert (at.replicas[R].runtime.found, phases_s(at.replicas[R])) == (True, {})
    assert at.learned.histories.get(M) is None
    unready, _ = after(world([DOC]), seen(Seen.STARTING, started_s=T0 - 3600), now_s=T0)
    assert start_deadline_s(unready, unready.replicas[R]) == T0 + 100.0, (
        "it may have been ready before: its time begins again"
    )
    at, _ = after(unready, seen(Seen.READY, started_s=T0 - 3600), now_s=T0 + 1)
    assert (at.learned.histories[M].starts_s, last_phases_ms(at.replicas.values())) == ((), {})


def test_new_leader_records_no_times_of_earlier_starts() -> None:
    at, _ = after(world([DOC]), StartReplica(replica=pending(), reason="3 waiting"))
    at, _ = after(at, seen(Seen.READY, started_s=T0 + 0.5), now_s=T0 + 2)
    assert (at.learned.histories[M].starts_s, phases_s(at.replicas[R])) == ((1.5,), {"place": 0.5, "load": 1.5})
    at, _ = after(at, LeadingSeen(epoch=2), seen(Seen.READY, started_s=T0 + 0.5), Synced(), now_s=T0 + 600)
    assert (at.learned.histories[M].starts_s, phases_s(at.replicas[R])) == ((1.5,), {})


def test_process_older_than_its_replica_records_no_start_time() -> None:
    """A pod from a rollout is assigned to a replica that waits for one."""
    at, _ = after(world([DOC]), StartReplica(replica=pending(), reason="3 waiting"))
    at, _ = after(at, seen(Seen.READY, started_s=T0 - 60), now_s=T0 + 1)
    assert (at.learned.histories[M].starts_s, phases_s(at.replicas[R])) == ((), {})


def test_later_observation_without_a_pod_keeps_the_pod_and_its_times() -> None:
    at, _ = after(world([DOC]), StartReplica(replica=pending(), reason="3 waiting"))
    pod, bound = PodRef(namespace="n", name="r", uid="u"), Placing(asked_s=T0 + 1, bound_s=T0 + 2)
    at, _ = after(at, seen(Seen.STARTING, waits="its image", pod=pod, placing=bound), now_s=T0 + 2)
    at, _ = after(at, seen(Seen.STARTING, waits="the API server does not answer"), now_s=T0 + 3)
    assert (at.replicas[R].runtime.pod, at.replicas[R].times.placing) == (pod, bound)


# --- as observed by a driver ------------------------------------------------------------------------------------------


def test_each_pod_start_step_has_the_time_of_its_first_observation() -> None:
    one = StartTiming()
    one.ask(1.0)
    one.see(2.0, bound=False, prepared=False, runs=False)
    one.see(3.0, bound=True, prepared=False, runs=False)
    one.see(4.0, bound=True, prepared=True, runs=False)
    one.see(5.0, bound=True, prepared=True, runs=False)
    one.see(6.0, bound=True, prepared=True, runs=True)
    one.see(7.0, bound=True, prepared=True, runs=True)
    one.ask(8.0)
    assert (one.placing, one.started_s) == (Placing(asked_s=1.0, bound_s=3.0, prepared_s=4.0), 6.0)


@pytest.mark.parametrize("answered_s", [None, 5.0])
def test_pod_seen_before_the_create_response_sets_the_request_time(answered_s: float | None) -> None:
    one = StartTiming()
    one.see(2.0, bound=False, prepared=False, runs=False)
    one.ask(answered_s)
    one.see(3.0, bound=True, prepared=False, runs=False)
    assert one.placing == Placing(asked_s=2.0, bound_s=3.0)


def test_start_steps_not_observed_before_the_process_ran_have_no_times() -> None:
    for asked_s, started_s in ((None, None), (1.0, 2.0)):
        one = StartTiming()
        if asked_s is None:
            one.see(1.0, bound=True, prepared=True, runs=True)
        else:
            one.ask(asked_s)
        one.see(2.0, bound=True, prepared=True, runs=True)
        assert (one.placing, one.started_s) == (Placing(asked_s=asked_s), started_s)


@pytest.mark.parametrize(("written_s", "asked_s"), [(10.8, 10.8), (None, 10.9)], ids=["before", "after"])
def test_start_of_an_adopted_workload_has_times_of_the_controller_clock(
    written_s: float | None, asked_s: float
) -> None:
    """The scale write returns before or after the pod is seen. Kubelet timestamps are in whole seconds only."""
    bench = Bench()
    bench.core.begin(0.0)
    bench.now_s = 10.7
    bench.start("a")
    if written_s is not None:
        bench.now_s = written_s
        bench.write()
    for moment, more in ((10.9, {}), (11.0, {"bound": True}), (11.1, {"prepared": True})):
        bench.now_s = moment
        bench.pod("p1", started_unix_s=None, ip="", waits="its container is being made", **more)
    if written_s is None:
        bench.write()
    bench.now_s = 11.2
    bench.pod("p1", started_unix_s=10.0, ip="10.0.0.1", waits="")
    *_, event = bench.core.take()
    assert (event.id, event.started_s) == ("a", 11.2)
    assert event.placing == Placing(asked_s=asked_s, bound_s=11.0, prepared_s=11.1)


def test_pod_reassigned_to_another_replica_uses_its_kubelet_start_time() -> None:
    bench, intents = Bench(replicas=1), ("0123456789", "abcdef0123")
    first, second = (format_replica_id(bench.core.model.name, ADOPTED_HASH, intent) for intent in intents)
    bench.pod("p1", started_unix_s=None, ip="", waits="its container is being made", replica=first, intent=intents[0])
    bench.core.begin(1.0)
    bench.now_s = 2.2
    bench.pod("p1", started_unix_s=2.0, ip="10.0.0.1", waits="")
    assert [(one.id, one.started_s) for one in bench.core.take()][-1] == (first, 2.2)
    bench.pod("p1", replica=second, intent=intents[1])
    assert [(one.id, one.started_s) for one in bench.core.take()][-1] == (second, 2.0), "as its kubelet wrote down"
