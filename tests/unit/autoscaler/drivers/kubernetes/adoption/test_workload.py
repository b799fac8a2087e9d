"""Adopted workloads: assignment of pods to replicas, writes, and the resulting plan."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName, ReplicaId
from autoscaler.demand.desired_replicas import DesiredReplicas
from autoscaler.drivers.driver import Observe
from autoscaler.drivers.kubernetes.adoption.annotations import read_model
from autoscaler.drivers.kubernetes.adoption.objects import WorkloadKey
from autoscaler.drivers.kubernetes.adoption.workload import UNORDERED_S, Mode
from autoscaler.drivers.kubernetes.composite import CompositeDriver
from autoscaler.drivers.kubernetes.objects.pod_state import read_waiting_reason
from autoscaler.fold.fold import fold
from autoscaler.planner.reconcile import PlannedModel, reconcile_model
from autoscaler.spec.model import ADOPTED_HASH, Model, ModelSpec
from autoscaler.state.events import DocumentsSeen, ReplicaSeen, Seen, Synced
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, World
from tests.support.builders.adoption_workload import Bench, annotated, running

ORDERED = "ada-adopted-0123456789"
"""The id of a replica that a leader ordered."""

# --- assignment of pods to replicas -----------------------------------------------------------------------------------


def test_two_ordered_starts_scale_to_two_and_each_gets_a_new_pod() -> None:
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.start("b")
    assert bench.write() == 2
    assert bench.write() is None
    bench.pod("p1", started_unix_s=None, ip="", waits="its container is being made")
    assert bench.take_reports() == [("a", "starting")]
    (mark,) = bench.core.marks(going=False)
    assert (mark.pod, mark.replica, mark.intent, mark.goes_first) == ("p1", "a", "i-a", False)
    bench.core.marked(mark)
    assert bench.core.marks(going=False) == []
    bench.pod("p1", started_unix_s=1.0, ip="10.0.0.1", waits="")
    bench.ready("p1")
    assert bench.take_reports() == [("a", "starting"), ("a", "ready")]
    bench.pod("p2")
    assert bench.take_reports() == [("b", "starting")]


IMAGE = "ImagePullBackOff: not found"


def test_image_pull_failure_ends_start_and_scales_down_after_a_minute() -> None:
    """The same rule as for Pilotlight's own pods."""
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    assert bench.write() == 1
    bench.now_s = 5.0
    bench.pod("p1", started_unix_s=None, ip="", waits="ErrImagePull: not found", patience_s=60.0)
    bench.now_s = 20.0
    bench.pod("p1", waits=IMAGE)
    assert bench.take_reports() == [("a", "starting"), ("a", "starting")]
    assert bench.core.due_s() == 65.0
    bench.core.look(64.0)
    assert bench.take_reports() == []
    bench.core.look(65.0)
    (reports,) = bench.core.take()
    assert (reports.id, reports.seen, reports.reason) == ("a", Seen.EXITED, IMAGE)
    assert bench.core.due_s() is None
    assert bench.write() == 0


def test_alternating_image_errors_count_as_one_wait() -> None:
    """A kubelet reports the error of each pull, and between the pulls that it backs off."""
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.write()
    for number, reason in enumerate(("SignatureValidationFailed", "ImagePullBackOff") * 2 + ("ErrImagePull",)):
        bench.now_s = 10.0 * number
        waits = read_waiting_reason({"spec": {}}, {"waiting": {"reason": reason}})
        bench.pod(
            "p1", started_unix_s=None, ip="", waits=waits.reason, patience_s=waits.patience_s, waits_for=waits.container
        )
    assert bench.core.due_s() == 60.0
    bench.core.look(60.0)
    assert bench.take_reports()[-1] == ("a", "exited")


def test_failed_start_blocks_next_one_for_a_minute_or_until_new_template() -> None:
    """Otherwise each request would wait a minute for the same failure."""
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.write()
    bench.pod("p1", started_unix_s=None, ip="", waits=IMAGE, patience_s=60.0)
    assert not bench.core.obstacle(59.0)
    bench.core.look(60.0)
    assert [bench.core.obstacle(now_s) for now_s in (60.0, 119.0, 120.0)] == [IMAGE, IMAGE, ""]
    bench.scaled(0, template="new")
    assert not bench.core.obstacle(61.0)


def test_crashing_init_container_ends_start_a_minute_after_first_crash() -> None:
    """The deadline holds even while it runs again; before the crash the deadline was longer."""
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.write()
    bench.pod("p1", started_unix_s=None, ip="", waits="init container a has not finished", patience_s=900.0)
    for now_s in (100.0, 110.0, 125.0):
        bench.now_s = now_s
        bench.pod("p1", waits=f"CrashLoopBackOff: init container a ({now_s})", patience_s=60.0)
    assert bench.core.due_s() == 160.0
    bench.core.look(160.0)
    assert bench.take_reports()[-1] == ("a", "exited")


def test_each_injected_init_container_gets_the_full_time_limit() -> None:
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.write()
    for now_s, name in ((0.0, "first"), (50.0, "second"), (55.0, "second")):
        bench.now_s = now_s
        waits = f"init container {name} has not finished ({now_s})"
        bench.pod("p1", started_unix_s=None, ip="", waits=waits, patience_s=60.0, waits_for=name)
    assert bench.core.due_s() == 110.0
    bench.core.look(110.0)
    assert bench.take_reports()[-1] == ("a", "exited")


def test_devices_of_an_ended_pod_kept_by_a_finalizer_count_as_free() -> None:
    bench = Bench(replicas=1)
    bench.core.begin(0.0)
    bench.pod("p1")
    bench.core.look(5.0)
    bench.ready("p1")
    (replica,) = {id for id, _ in bench.take_reports()}
    bench.pod("p1", leaving=True, finalizers=("kueue.x-k8s.io/managed",))
    bench.pod("p1", ended="ended with status 0", over=True, started_unix_s=None)
    reports = bench.core.take()
    assert [(one.id, one.seen) for one in reports[-2:]] == [(replica, Seen.EXITED), (replica, Seen.CLEAN)]
    assert reports[-1].proof == "exited; its pod is kept by the finalizer kueue.x-k8s.io/managed"
    bench.delete_pod("p1")
    assert bench.take_reports() == []


def test_image_pulled_after_initial_failures_does_not_end_the_start() -> None:
    bench = Bench(replicas=1)
    bench.core.begin(0.0)
    bench.pod("p1", started_unix_s=None, ip="", waits=IMAGE, patience_s=60.0)
    bench.core.look(30.0)
    bench.now_s = 40.0
    bench.pod("p1", waits="its container is being made", patience_s=None)
    bench.core.look(100.0)
    assert [seen for _, seen in bench.take_reports()] == ["starting", "starting"]
    bench.now_s = 100.0
    bench.pod("p1", waits=IMAGE, patience_s=60.0)
    bench.core.look(160.0)
    assert bench.take_reports()[-1][1] == "exited"
    bench.core.refused("no", 160.0)
    bench.pod("p1", started_unix_s=200.0, waits="", patience_s=None, ip="10.0.0.1")
    assert not bench.core._pods["uid-p1"].ended


def test_existing_pods_become_replicas_named_by_annotation_or_pod() -> None:
    bench = Bench(replicas=2)
    bench.pod("p1")
    bench.pod("p2", replica=ORDERED, intent="0123456789")
    bench.ready("p1")
    assert bench.take_reports() == []
    bench.core.begin(0.0)
    assert bench.take_reports() == [(ORDERED, "starting"), ("p1-uid-p", "ready")]
    assert bench.core.marks(going=False) == [], "its name is sufficient"


@pytest.mark.parametrize(
    ("replica", "intent"),
    [
        ("victim-abc", "i"),
        ("victim-adopted-0123456789", "0123456789"),
        ("ada-adopted-0123456789", "i"),
        ("ada-adopted-b-adopted-0123456789", "b-adopted-0123456789"),
        ("p1-uid-q", "uid-p1"),
        ("p1-uid-p-x", "uid-p1"),
    ],
)
def test_pod_with_a_forged_replica_annotation_keeps_its_own_id(replica: str, intent: str) -> None:
    """The owner of a workload can set any annotation, in its template or on a pod."""
    bench = Bench(replicas=1)
    bench.pod("p1", replica=replica, intent=intent)
    bench.core.begin(0.0)
    assert bench.take_reports() == [("p1-uid-p", "starting")]
    bench.pod("p1", replica=f"{replica}-2")
    assert bench.take_reports() == []
    bench.core.lead(0.0)
    assert [mark.replica for mark in bench.core.marks(going=False)] == ["p1-uid-p"], "the annotation is replaced"


@pytest.mark.parametrize(("replica", "intent"), [("p1-uid-p-2", "uid-p1"), ("ada-adopted-0123456789", "0123456789")])
def test_pod_keeps_the_replica_id_that_an_earlier_leader_assigned(replica: str, intent: str) -> None:
    bench = Bench(replicas=1)
    bench.pod("p1", replica=replica, intent=intent)
    bench.core.begin(0.0)
    assert bench.take_reports() == [(replica, "starting")]


def test_pod_without_a_start_order_becomes_a_replica_after_a_delay() -> None:
    bench = Bench(replicas=1)
    bench.core.begin(0.0)
    bench.pod("p1")
    assert bench.take_reports() == []
    assert bench.core.due_s() == UNORDERED_S
    bench.now_s = UNORDERED_S
    bench.core.look(bench.now_s)
    assert bench.take_reports() == [("p1-uid-p", "starting")]


def test_pod_to_stop_gets_a_low_deletion_cost_before_the_scale_down() -> None:
    bench = running(2)
    bench.stop("r1")
    (mark,) = bench.core.marks(going=True)
    assert (mark.pod, mark.replica, mark.goes_first) == ("p1", "r1", True)
    assert bench.write() == 1
    bench.pod("p1", leaving=True)
    bench.delete_pod("p1")
    assert bench.take_reports() == [("r1", "exited"), ("r1", "clean")]


def test_remaining_pod_gets_a_new_replica_id_if_scale_down_removes_another() -> None:
    bench = running(2)
    bench.now_s = 10.0
    bench.stop("r1")
    bench.write()
    bench.pod("p0", leaving=True)
    reports = bench.take_reports()
    assert reports == [("r0", "leaving"), ("r1", "exited"), ("r1", "clean"), ("p1-uid-p", "ready")]


def test_workload_state_older_than_own_write_is_ignored() -> None:
    bench = running(2)
    bench.stop("r1")
    level = bench.core.level()
    assert level == 1
    bench.core.wrote(level, bench.seen.version + 5, bench.now_s)
    bench.core.see(bench.seen, bench.model, Mode.LEVEL, bench.now_s)
    assert bench.take_reports() == [], "it may still go"


def test_rollout_replaces_serving_replica_without_extra_replicas() -> None:
    """The new pod is a spare while the old one serves, and replaces it in the same step."""
    bench = running(1)
    bench.now_s = 10.0
    bench.pod("new")
    bench.ready("new")
    assert bench.take_reports() == []
    bench.now_s += UNORDERED_S
    bench.pod("p0", leaving=True)
    assert bench.take_reports() == [("r0", "leaving"), ("new-uid-n", "ready")]
    bench.delete_pod("p0")
    assert bench.take_reports() == [("r0", "exited"), ("r0", "clean")]
    assert bench.write() is None


def test_rollout_adds_ready_pod_before_an_old_pod_is_stopped() -> None:
    """The ready new pod becomes a replica above the scale, and one of two old pods is marked to be deleted first."""
    bench = running(2)
    bench.now_s = 10.0
    bench.pod("n0", template="2", created="2026-01-02T00:00:00Z")
    bench.now_s += UNORDERED_S
    bench.core.look(bench.now_s)
    assert (bench.take_reports(), bench.core.due_s()) == ([], None), "it does not answer yet"
    bench.ready("n0")
    assert {one.id: one.rank for one in bench.core.take()} == {"r0": 1, "r1": 1, "n0-uid-n": 0}
    assert bench.write() is None, "it is no reason to scale"
    bench.stop("r1")
    assert bench.core.marks(going=True)[0].pod == "p1"
    assert bench.write() is None
    bench.pod("p1", leaving=True)
    bench.pod("n1", template="2", created="2026-01-02T00:00:01Z")
    bench.ready("n1")
    bench.delete_pod("p1")
    bench.now_s += UNORDERED_S
    bench.core.look(bench.now_s)
    assert bench.take_reports() == [("r1", "exited"), ("r1", "clean"), ("n1-uid-n", "ready")]
    bench.stop("r0")
    bench.pod("p0", leaving=True)
    bench.delete_pod("p0")
    assert bench.take_reports() == [("r0", "exited"), ("r0", "clean")]
    assert bench.write() is None


def test_rollout_counts_at_most_one_extra_ready_pod_as_a_replica() -> None:
    bench = running(1)
    for number in range(3):
        bench.pod(f"n{number}", template="2", created="2026-01-02T00:00:00Z")
        bench.ready(f"n{number}")
    bench.now_s = 10.0
    bench.core.look(bench.now_s)
    assert sum(state == "ready" for id, state in bench.take_reports() if id != "r0") == 1
    bench.pod("n1", leaving=True)
    bench.pod("n2", leaving=True)
    bench.start("more")
    assert bench.write() == 2


def test_replica_ordered_during_rollout_gets_the_new_pod_at_once() -> None:
    bench = running(1)
    bench.pod("new")
    bench.ready("new")
    bench.pod("p0", leaving=True)
    bench.start("a")
    assert bench.take_reports() == [("r0", "leaving"), ("a", "ready")]
    assert bench.write() is None


def test_stop_of_replica_without_pod_only_lowers_the_scale() -> None:
    bench = running(1)
    bench.start("b")
    assert bench.write() == 2
    bench.stop("b")
    assert bench.take_reports() == [("b", "clean")]
    assert bench.write() == 1


def test_engine_exit_lowers_the_scale_by_one() -> None:
    bench = running(1)
    bench.pod("p0", ended="was killed by SIGKILL", started_unix_s=None)
    assert bench.take_reports() == [("r0", "exited")]
    assert bench.write() == 0
    bench.delete_pod("p0")
    assert bench.take_reports() == [("r0", "clean")]


def test_exit_of_a_statefulset_pod_other_than_the_last_keeps_the_scale() -> None:
    bench = running(3, key=WorkloadKey("StatefulSet", "default", "ada"))
    bench.pod("p0", ended="ended with status 3", started_unix_s=None)
    assert bench.take_reports() == [("r0", "exited"), ("r0", "clean")]
    assert bench.write() is None, "to lower the scale would end another one"
    bench.pod("p0", ended="", started_unix_s=5.0)
    bench.start("again")
    assert bench.take_reports() == [("again", "starting")]
    assert bench.write() is None


def test_manual_scale_is_never_overwritten() -> None:
    bench = running(2)
    bench.now_s = 10.0
    bench.core.see(bench.seen, bench.model, Mode.HELD, bench.now_s)
    bench.stop("r1")
    assert bench.core.marks(going=True)[0].goes_first is False
    assert bench.write() is None
    assert bench.take_reports() == [("r1", "exited"), ("r1", "clean"), ("p1-uid-p", "ready")]


def test_workload_with_another_autoscaler_is_scaled_only_to_zero_or_one() -> None:
    bench = Bench(mode=Mode.TOGGLE)
    bench.core.begin(0.0)
    bench.start("a")
    bench.start("b")
    assert bench.write() == 1
    bench.scaled(3)
    for name in ("p1", "p2", "p3"):
        bench.pod(name)
    bench.now_s = 10.0
    bench.core.look(bench.now_s)
    ids = {id for id, _ in bench.take_reports()}
    assert {"a", "b"} < ids
    bench.stop("a")
    assert bench.write() is None
    for id in (ids | {id for id, _ in bench.take_reports()}) - {"a"}:
        bench.core.stop(bench.order(id), bench.now_s)
    for id in {id for id, _ in bench.take_reports()}:
        bench.core.stop(bench.order(id), bench.now_s)
    assert bench.write() == 0


def test_scale_of_a_released_workload_is_unchanged_by_a_replica_stop() -> None:
    bench = running(1)
    bench.core.see(bench.seen, bench.model, Mode.RELEASED, 1.0)
    bench.stop("r0")
    assert bench.take_reports() == [("r0", "leaving"), ("r0", "exited"), ("r0", "clean")]
    assert (bench.write(), bench.core.empty) == (None, True)


def test_rejected_scale_fails_replicas_waiting_for_a_pod() -> None:
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.core.refused("no such right", 0.0)
    reports = bench.core.take()
    assert [(one.seen, one.reason) for one in reports] == [(Seen.EXITED, "no such right"), (Seen.CLEAN, "")]


def test_rejected_scale_blocks_starts_for_a_minute() -> None:
    bench = Bench()
    bench.core.begin(0.0)
    bench.core.refused("no such right", 5.0, lasts=True)
    assert [bench.core.obstacle(now_s) for now_s in (5.0, 64.0, 65.0)] == ["no such right", "no such right", ""]


def test_replica_waiting_for_blocked_pod_reports_the_reason() -> None:
    bench = Bench()
    bench.core.begin(0.0)
    bench.start("a")
    bench.scaled(1, trouble="exceeded quota")
    (reports,) = bench.core.take()
    assert (reports.id, reports.seen, reports.waits) == ("a", Seen.STARTING, "exceeded quota")


def test_rejected_pod_ends_the_start_after_a_minute_and_lowers_the_scale() -> None:
    """The message changes after each attempt of the controller, and the next start is blocked for a minute."""
    bench = running(1)
    bench.start("a")
    assert bench.write() == 2
    bench.now_s = 5.0
    bench.scaled(2, trouble='pods "ada-1" is forbidden: violates PodSecurity')
    bench.now_s = 30.0
    bench.scaled(2, trouble=(last := 'pods "ada-2" is forbidden: violates PodSecurity'))
    assert bench.core.due_s() == 65.0
    bench.core.look(64.9)
    assert bench.take_reports() == [("a", "starting"), ("a", "starting")]
    bench.now_s = 65.0
    bench.core.look(bench.now_s)
    reports = bench.core.take()
    assert [(one.id, one.seen, one.reason) for one in reports] == [("a", Seen.EXITED, last), ("a", Seen.CLEAN, "")]
    assert bench.write() == 1
    bench.scaled(1, trouble="")
    assert [bench.core.obstacle(now_s) for now_s in (65.0, 124.0, 125.0)] == [last, last, ""]
    assert (bench.take_reports(), bench.core.due_s()) == ([], None), "the other replica is not affected"


REJECTED, QUOTA = 'pods "ada-1" is forbidden: violates PodSecurity', 'pods "ada-1" is forbidden: exceeded quota: q'


@pytest.mark.parametrize("between", ["", QUOTA], ids=["nothing", "exhausted-quota"])
def test_time_limit_of_a_rejected_pod_runs_only_while_a_replica_waits(between: str) -> None:
    bench = running(1)
    bench.scaled(1, trouble=REJECTED)
    bench.core.look(100.0)
    bench.now_s = 100.0
    bench.start("a")
    bench.write()
    bench.now_s = 150.0
    bench.scaled(2, trouble=between)
    assert bench.core.due_s() is None
    bench.core.look(1000.0)
    bench.now_s = 1000.0
    bench.scaled(2, trouble=REJECTED)
    assert bench.core.due_s() == 1060.0
    bench.core.look(1059.0)
    bench.pod("p1")
    bench.core.look(1060.0)
    assert bench.take_reports()[-1] == ("a", "starting")
    assert bench.write() is None


def test_new_leader_reports_all_replicas_and_drops_old_starts_and_stops() -> None:
    bench = running(1)
    bench.start("b")
    bench.stop("r0")
    bench.core.lead(1.0)
    assert bench.take_reports() == [("r0", "ready")], (
        "and as it is: how long it has run is not how long it took to start"
    )
    assert bench.write() is None
    bench.start("b")
    assert bench.write() == 2


def test_follower_reports_an_engine_exit_but_writes_nothing() -> None:
    bench = running(1)
    bench.stop("r0")
    bench.core.follow()
    bench.pod("p0", ended="was killed by SIGKILL", started_unix_s=None)
    assert (bench.write(), bench.core.marks(going=True)) == (None, [])
    assert bench.take_reports() == [("r0", "exited")]


def test_replica_is_renamed_if_another_leader_annotated_its_pod() -> None:
    bench = running(1)
    bench.pod("p0", replica="r0", intent="i-r0")
    bench.pod("p0", replica=ORDERED, intent="0123456789")
    assert bench.take_reports() == [("r0", "leaving"), ("r0", "exited"), ("r0", "clean"), (ORDERED, "ready")]


def test_low_deletion_cost_from_a_previous_leader_is_reset() -> None:
    """It holds even if this process wrote the same value before; otherwise the pod would be deleted first."""
    bench = running(1)
    bench.pod("p0", replica="r0", intent="i-r0", goes_first=True)
    (mark,) = bench.core.marks(going=False)
    assert (mark.replica, mark.goes_first) == ("r0", False)
    bench.core.marked(mark)
    assert bench.core.marks(going=False) == []
    bench.pod("p0", goes_first=False)
    assert bench.core.marks(going=False) == []
    bench.pod("p0", goes_first=True)
    assert bench.core.marks(going=False) == [mark]


# --- the resulting plan -----------------------------------------------------------------------------------------------


def seen(name: str, state: Seen, rank: int = 0) -> ReplicaSeen:
    """An observation of an adopted replica."""
    return ReplicaSeen(
        id=ReplicaId(name), model=ModelName("ada"), spec_hash=ADOPTED_HASH, intent="i", slices=(), memory_bytes=0,
        slots=4, seen=state, rank=rank,
    )  # fmt: skip


def world(*observed: ReplicaSeen, model: Model | None = None) -> World:
    """The state after these observations."""
    documents = DocumentsSeen(models=(model or read_model(annotated()),))
    after, _ = fold(World(epoch=1), [documents, *observed, Synced()], 0.0)
    return after


def test_replica_ended_externally_is_stopping_and_not_failed() -> None:
    before = world(seen("a", Seen.READY))
    after, _ = fold(before, [seen("a", Seen.LEAVING)], 1.0)
    assert after.replicas[ReplicaId("a")].state is S.STOPPING
    after, _ = fold(after, [seen("a", Seen.EXITED), seen("a", Seen.CLEAN)], 2.0)
    assert not after.replicas
    assert after.learned.histories.get(ModelName("ada")) is None or not after.learned.histories[ModelName("ada")].tries


def test_surplus_replicas_with_the_highest_rank_are_drained_first() -> None:
    ready = [seen(name, Seen.READY, rank) for name, rank in (("a", 2), ("b", 0), ("c", 1))]
    found = world(*ready)
    case = PlannedModel(
        found, found.models[ModelName("ada")], DesiredReplicas(model=ModelName("ada"), count=1, reason=""), {}, {}, 1e4
    )
    assert [action.replica for action in reconcile_model(case).retires] == ["a", "c"]


# --- two drivers combined ---------------------------------------------------------------------------------------------


class Noting:
    """A driver that records its orders."""

    def __init__(self) -> None:
        self.orders: list[str] = []

    async def run(self, observe: Observe) -> None:
        self._observe = observe
        observe((Synced(),))

    def lead(self) -> None:
        self._observe((Synced(),))

    async def follow(self) -> None:
        self.orders.append("follow")

    def obstacle(self, model: Model) -> str:
        return f"{model.name}!"

    def start(self, replica: Replica, model: Model) -> None:
        self.orders.append(f"start {replica.id} of {model.name}")

    def stop(self, replica: Replica, grace_s: float) -> None:
        self.orders.append(f"stop {replica.id} in {grace_s:.0f}")


async def test_composite_driver_routes_each_order_to_the_driver_of_its_model() -> None:
    own, adopted, reports = Noting(), Noting(), list[object]()
    both = CompositeDriver(own, adopted)
    await both.run(reports.extend)
    assert reports == [Synced()]
    both.lead()
    assert reports == [Synced(), Synced()]
    foreign = Bench().order("a")
    own_one = replace(foreign, id=ReplicaId("b"), spec_hash="12345678")
    pods = Model(name=ModelName("bert"), spec=ModelSpec(engine="command"))
    both.start(foreign, read_model(annotated()))
    both.start(own_one, pods)
    both.stop(foreign, 5.0)
    both.stop(own_one, 6.0)
    assert adopted.orders == ["start a of ada", "stop a in 5"]
    assert own.orders == ["start b of bert", "stop b in 6"]
    assert both.obstacle(pods) == "bert!"
    await both.follow()
    assert (own.orders[-1], adopted.orders[-1]) == ("follow", "follow")
