"""Placements that the scheduler would reject: devices in use by other pods, taints, and nodes that failed before."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import GatewayId, Report
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects.other_pods import OtherPod
from autoscaler.drivers.kubernetes.objects.replica_observations import build_podless_observation
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.fold.fold import fold
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.types import Bin, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.planner.plan import plan
from autoscaler.queries.device_health import OTHERS
from autoscaler.queries.unschedulable_replicas import SHUN_S, SHUN_S_MAX, STRANDED_S
from autoscaler.server.read_responses import list_devices
from autoscaler.spec.model import Model
from autoscaler.spec.pod import GPU, Pod, Toleration
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import DrainReplica, StartReplica, StopReplica
from autoscaler.state.events import Reported, Seen, SlicesSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.node_labels_and_taints import NodeBackoff, Taint, find_untolerated_taint
from autoscaler.state.resources import ResourceAmount
from autoscaler.state.world import History, NodeId, Replica, Slice, World
from tests.support.builders.placement_requests import placement_request
from tests.support.builders.worlds import (
    GI,
    T0,
    device,
    folded,
    gateway,
    kinds,
    level,
    model,
    replace_fields,
    replica,
    world,
)
from tests.support.example_budget import examples

LAB = Taint("lab", "chem", "NoSchedule")


def gpus(node: str, count: int = 1, **fields: Any) -> list[Slice]:
    return [device(f"{node}/gpu{n}", 24, node, shared=False, **fields) for n in range(count)]


def called(*models: Model, on: list[Slice], **fields: Any) -> World:
    return world(models, on, gateways=[gateway(levels=[level(one.name, 1) for one in models])], **fields)


def places(there: World, now_s: float = T0) -> list[str]:
    """The slices on which starts are planned."""
    return [a.replica.resources.slices[0] for a in plan(there, now_s).actions if isinstance(a, StartReplica)]


# --- foreign pods -----------------------------------------------------------------------------------------------------


def pod(*limits: str, first: tuple[tuple[str, str], ...] = (), node: str = "n1") -> Any:
    """A pod with these GPU limits per container; `first`: (GPUs, restartPolicy) of its init containers."""

    def has(many: str) -> dict[str, Any]:
        return {"resources": {"limits": {"nvidia.com/gpu": many, "memory": "1Gi"}}}

    spec = {"nodeName": node, "containers": [has(one) for one in limits] or [{"name": "a"}]}
    spec["initContainers"] = [{**has(many), "restartPolicy": policy} for many, policy in first]
    return {"metadata": {"name": "x", "namespace": "others"}, "spec": spec}


@pytest.mark.parametrize(
    ("found", "gpus"),
    [
        (pod("2", "1"), 3),
        (pod("1", first=(("4", "Never"),)), 4),
        (pod("1", first=(("2", "Always"),)), 3),
        (pod(), None),
        (pod("1", node=""), None),
        ({"spec": {"nodeName": "n1", "containers": [{"resources": {}}], "initContainers": None}}, None),
    ],
    ids=["all containers", "what runs first has more", "sidecars", "none", "nowhere yet", "no report"],
)
def test_foreign_pod_is_recorded_only_with_a_node_and_a_gpu_count(found: Any, gpus: int | None) -> None:
    assert other_pods.read_other_pod(found) == (None if gpus is None else OtherPod("n1", {"nvidia.com/gpu": gpus}))


def test_foreign_pods_occupy_spare_gpus_of_a_node_before_its_slices() -> None:
    there = [
        nodes.NodeSeen(name, {}, usable=True, lost=False, amounts={GPU: many})
        for name, many in (("n1", "4"), ("n2", "2"))
    ]
    slices = [replace(one, handle=GPU) for one in (*gpus("n1", 2), *gpus("n2", 2))]
    pods = [OtherPod(name, {GPU: many}) for name, many in (("n1", 3), ("n2", 1), ("n2", 1), ("gone", 8))]
    assert nodes.count_taken_slices(there, slices, pods) == {f"n1 {GPU}": 1, f"n2 {GPU}": 2}


def test_model_is_placed_on_a_device_not_used_by_foreign_pods() -> None:
    a = model("a", 10)
    there = called(a, on=[*gpus("n1"), *gpus("n2")])
    assert places(there) == ["n1/gpu0"]
    taken, _ = fold(there, (SlicesSeen(slices=tuple(there.nodes.slices.values()), others={NodeId("n1"): 1}),), T0)
    assert places(taken) == ["n2/gpu0"]
    full = replace_fields(taken, others={NodeId("n1"): 1, NodeId("n2"): 1})
    answer = plan(full, T0)
    assert [(unmet.reason, unmet.never) for unmet in answer.unmet] == [(f"needs 10Gi on one device; {OTHERS}", False)]
    assert [one.closed for one in list_devices(full, T0)] == [OTHERS] * 2
    assert {one.ruled_out for one in explain_model(full, answer, Log(), a.name, T0).candidates} == {OTHERS}


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.integers(1, 6), st.integers(0, 8), st.integers(0, 6))
def test_started_replicas_never_exceed_devices_left_by_foreign_pods(many: int, others: int, ours: int) -> None:
    """Our replicas keep their devices; only devices that are free of both are assigned."""
    held = [model(f"h{n}", 10) for n in range(min(ours, many))]
    there = [replica(one, one.name, [f"n1/gpu{n}"]) for n, one in enumerate(held)]
    wanted = model("a", 10, high=8)
    begin = world(
        [wanted, *held], gpus("n1", many), there, others={NodeId("n1"): others},
        gateways=[gateway(levels=[level("a", 32), *(level(one.name, 0, 1) for one in held)])],
    )  # fmt: skip
    assert len(places(begin)) == max(0, many - len(held) - others)


# --- taints -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tolerated", "goes"),
    [
        (Toleration(key="lab", operator="Exists"), True),
        (Toleration(key="lab", value="chem"), True),
        (Toleration(key="lab", operator="Equal", value="chem", effect="NoSchedule"), True),
        (Toleration(operator="Exists"), True),
        (Toleration(key="lab", operator="Exists", effect="NoExecute"), False),
        (Toleration(key="lab", value="bio"), False),
        (Toleration(key="other", operator="Exists"), False),
        (Toleration(), False),
    ],
)
def test_toleration_matches_taints_like_kubernetes(tolerated: Toleration, goes: bool) -> None:
    assert (find_untolerated_taint([LAB], [tolerated]) is None) is goes


def test_node_keeps_only_the_taints_that_affect_placement() -> None:
    taints = [{"key": key, "effect": effect} for key, effect in (
        ("nvidia.com/gpu", "NoSchedule"), ("node.kubernetes.io/unschedulable", "NoSchedule"),
        ("soft", "PreferNoSchedule"), ("node.kubernetes.io/disk-pressure", "NoSchedule"), ("out", "NoExecute"),
    )]  # fmt: skip
    status = {"allocatable": {"nvidia.com/gpu": "1"}}
    seen = nodes.read_node({"metadata": {"name": "n"}, "spec": {"taints": taints}, "status": status})
    assert [str(one) for one in seen.taints] == ["node.kubernetes.io/disk-pressure:NoSchedule", "out:NoExecute"]
    assert nodes.build_slices([seen])[0].taints == seen.taints


def test_deletion_candidate_taint_is_recorded_and_allows_placement() -> None:
    soft = {"key": "DeletionCandidateOfClusterAutoscaler", "value": "1732370000", "effect": "PreferNoSchedule"}
    status = {"allocatable": {"nvidia.com/gpu": "1"}}
    seen = nodes.read_node({"metadata": {"name": "n"}, "spec": {"taints": [soft]}, "status": status})
    assert [one.key for one in seen.taints] == [soft["key"]]
    assert find_untolerated_taint(seen.taints, ()) is None
    assert places(called(model("a", 10), on=gpus("n1", taints=seen.taints))) == ["n1/gpu0"]


def test_node_with_an_untolerated_taint_is_avoided_and_explained() -> None:
    a, tolerates = model("a", 10), Pod(tolerations=(Toleration(key="lab", operator="Exists"),))
    slices = [*gpus("n1", taints=(LAB,)), *gpus("n2")]
    assert places(called(a, on=slices)) == ["n2/gpu0"]
    assert places(called(model("b", 10, pod=tolerates), on=slices)) == ["n1/gpu0"]
    assert places(called(a, on=slices, settings=Settings(pod=tolerates))) == ["n1/gpu0"]
    only = called(a, on=slices[:1])
    answer = plan(only, T0)
    why = "its node is tainted lab=chem:NoSchedule, which spec.pod.tolerations do not tolerate"
    assert [(one.reason, one.never) for one in answer.unmet] == [(f"needs 10Gi on one device; {why}", False)]
    assert explain_model(only, answer, Log(), a.name, T0).candidates[0].ruled_out == why


@settings(derandomize=True, deadline=None, max_examples=examples(80))
@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=5), st.permutations(range(6)))
def test_packer_never_uses_a_node_that_is_avoided_or_not_tolerated(
    there: list[tuple[bool, bool]], order: list[int]
) -> None:
    """Replicas with different tolerations at once: each gets a permitted node, in any order of arrival."""
    shelves = [
        Bin(slice=device(f"g{n}", 24, f"n{n}", taints=(LAB,) if tainted else ()), whole=True, incumbents=(),
              free=ResourceAmount(24 * GI, 100), coming=ResourceAmount(0, 0), locked=False)
        for n, (tainted, _) in enumerate(there)
    ]  # fmt: skip
    avoids = tuple(NodeId(f"n{n}") for n, (_, avoided) in enumerate(there) if avoided)
    tolerant = (Toleration(operator="Exists"),)
    requests = [
        placement_request(
            f"m{n}", memory_bytes=24 * GI, tolerations=tolerant if n % 2 else (), avoids=avoids if n < 3 else ()
        )
        for n in order
    ]
    packing = pack(requests, SliceIndex(shelves), frozenset(), RestartCosts(), T0)
    for placement in packing.placements:
        tainted, avoided = there[int(placement.slices[0][1:])]
        assert not (tainted and not placement.want.choice.tolerations)
        assert not (avoided and placement.want.choice.avoids)
    free = {placement.slices[0] for placement in packing.placements}
    for missing in packing.unmet:
        choice = missing.want.choice
        open_to = {f"g{n}" for n, (tainted, avoided) in enumerate(there)
                   if not (tainted and not choice.tolerations) and not (avoided and choice.avoids)}  # fmt: skip
        assert open_to <= free, "nothing that it could have is left over"
        assert not missing.never


# --- nodes that the scheduler rejected --------------------------------------------------------------------------------

NO = "Unschedulable: 0/3 nodes are available: 1 Insufficient nvidia.com/gpu."


class Kept:
    """Model `a` starts on n1, and the scheduler does not bind its pod."""

    def __init__(self, *on: Slice, **spec: Any) -> None:
        self.a = model("a", 10, **spec)
        self.now_s, self.sequence = T0, 1
        self.world = called(self.a, on=list(on))
        self.act()
        self.see(waits=NO)

    @property
    def last(self) -> Replica:
        return max(self.world.replicas.values(), key=lambda one: (one.times.created_s, one.state is S.STARTING))

    def act(self) -> list[str]:
        """Carry out the plan."""
        self.sequence += 1
        content = Report(
            gateway=GatewayId("g1"), boot="b", sequence=self.sequence, epoch=1, version=self.world.version,
            levels=(level("a", 1),),
        )  # fmt: skip
        self.world, _ = fold(self.world, (Reported(report=content),), self.now_s)
        answer = plan(self.world, self.now_s)
        self.next_s = answer.next_s
        self.world = folded(self.world, answer.actions, self.now_s)
        for action in answer.actions:
            if isinstance(action, StopReplica):
                self.world, _ = fold(
                    self.world,
                    (build_podless_observation(self.world.replicas[action.replica], Seen.CLEAN),),
                    self.now_s,
                )
        return [word.split()[0] for word in kinds(answer)]

    def see(self, seen: Seen = Seen.STARTING, **of: Any) -> None:
        self.world, _ = fold(self.world, (build_podless_observation(self.last, seen, **of),), self.now_s)

    def moves(self) -> str:
        """The replica is drained and started elsewhere: returns the new slice."""
        self.now_s += STRANDED_S
        assert self.act() == ["drain"]
        while self.last.state is not S.STARTING:
            assert self.act()
        return self.last.resources.slices[0]


def test_unschedulable_replica_moves_to_another_node_without_a_failure() -> None:
    one = Kept(*gpus("n1"), *gpus("n2"))
    assert one.last.resources.slices == ("n1/gpu0",)
    assert one.act() == []
    assert one.next_s == T0 + STRANDED_S
    first = one.last
    assert one.moves() == "n2/gpu0"
    history = one.world.learned.histories.get(one.a.name)
    assert history is None or (history.failure, history.tries, history.regrets) == ("", 0, 0)
    assert first.id not in one.world.replicas
    assert one.world.nodes.backoffs.keys() == {("a", "n1")}


def test_avoided_node_is_explained_and_used_again_after_its_backoff() -> None:
    a = model("a", 10)
    there = called(a, on=gpus("n1"), backoffs={(a.name, NodeId("n1")): NodeBackoff(until_s=T0 + 60, times=1)})
    answer = plan(there, T0)
    (unmet,) = answer.unmet
    assert not unmet.never
    assert "did not bind the last pod of the Model to its node" in unmet.reason
    (candidate,) = explain_model(there, answer, Log(), a.name, T0).candidates
    assert candidate.ruled_out in unmet.reason
    assert answer.next_s is not None
    assert answer.next_s <= T0 + 60
    assert places(there, T0 + 60) == ["n1/gpu0"]


def test_unschedulable_replica_waits_if_no_other_node_has_capacity() -> None:
    one = Kept(*gpus("n1"))
    one.now_s += 100 * STRANDED_S
    assert one.act() == []
    busy = model("b", 10)
    full = Kept(*gpus("n1"), *gpus("n2"))
    full.world = world(
        [full.a, busy], list(full.world.nodes.slices.values()), [full.last, replica(busy, "b-r", ["n2/gpu0"])],
        gateways=[gateway(levels=[level("a", 1), level("b", 0, 4)])],
    )  # fmt: skip
    full.world = replace(
        full.world, models={**full.world.models, busy.name: replace(busy, spec=replace(busy.spec, priority=9))}
    )
    full.now_s += STRANDED_S
    assert full.act() == []


def test_unschedulable_replica_drains_if_an_idle_replica_can_be_evicted() -> None:
    one, idle = Kept(*gpus("n1"), *gpus("n2")), model("b", 10)
    there = replica(idle, "b-r", ["n2/gpu0"], since_s=T0 - 1000, ready_s=T0 - 1000)
    one.world = world([one.a, idle], list(one.world.nodes.slices.values()), [one.last, there],
                      gateways=[gateway(levels=[level("a", 1)])],
                      histories={"b": History(last_activity_s=T0 - 30)})  # fmt: skip
    one.now_s += STRANDED_S
    answer = plan(one.world, one.now_s)
    drained = [a.replica for a in answer.actions if isinstance(a, DrainReplica) and a.stranded]
    assert drained == [one.last.id]


def test_avoided_node_is_retried_with_a_growing_bounded_backoff() -> None:
    """Neither of two nodes accepts the pod: it alternates between them, less and less often."""
    one = Kept(*gpus("n1"), *gpus("n2"))
    stays_s, where = list[float](), [one.moves()]
    for _ in range(14):
        one.see(waits=NO)
        began_s = one.now_s
        while not one.act():
            assert one.next_s is not None, "time alone brings it back"
            one.now_s = one.next_s
        stays_s.append(one.now_s - began_s)
        while one.last.state is not S.STARTING:
            assert one.act()
        where.append(one.last.resources.slices[0])
    assert where == ["n2/gpu0", "n1/gpu0"] * 7 + ["n2/gpu0"]
    assert stays_s[0] == SHUN_S
    assert max(stays_s) <= SHUN_S_MAX
    assert stays_s[-1] > 4 * SHUN_S


def test_node_that_accepts_the_replica_is_no_longer_avoided() -> None:
    one = Kept(*gpus("n1"), *gpus("n2"))
    one.moves()
    assert one.world.nodes.backoffs.keys() == {("a", "n1")}
    one.see(waits=NO)
    one.now_s += SHUN_S
    assert one.act() == ["drain"]
    while one.last.state is not S.STARTING:
        one.act()
    one.see(Seen.READY)
    assert one.world.nodes.backoffs.keys() == {("a", "n2")}


def test_replica_that_waits_for_its_image_is_not_moved() -> None:
    one = Kept(*gpus("n1"), *gpus("n2"))
    one.now_s += STRANDED_S - 1
    one.see(waits="node n1 prepares its image and volumes")
    one.now_s += 1000
    assert one.act() == []


def test_new_leader_moves_an_adopted_unschedulable_replica() -> None:
    one = Kept(*gpus("n1"), *gpus("n2"))
    found = replace(one.world, replicas={}, by_model={}, by_slice={})
    one.world, _ = fold(found, (build_podless_observation(one.last, Seen.STARTING, waits=NO),), one.now_s)
    assert one.moves() == "n2/gpu0"


def test_only_one_of_two_unschedulable_replicas_moves_to_a_free_device() -> None:
    a = model("a", 10, high=2)
    on = [*gpus("n1", 2), *gpus("n2")]
    waiting = [
        replica(a, f"r{n}", [f"n1/gpu{n}"], S.STARTING, waits=NO, stranded_s=T0, started_s=None) for n in range(2)
    ]
    begin = world([a], on, waiting, gateways=[gateway(levels=[level("a", 8)])])
    assert kinds(plan(begin, T0 + STRANDED_S)) == ["drain r0"]


@pytest.mark.case("20")
@pytest.mark.parametrize("state", [S.STOPPING, S.SCRUBBING])
def test_gpu_held_by_an_ended_replica_for_a_minute_gets_no_new_replica(state: S) -> None:
    """The memory that it leaves free may be used for a minute, then not until the GPU is free."""
    small, ended = model("b", 2), replica(model("a"), "a-r", state=state, since_s=T0, memory_bytes=GI)
    for product, starts in (("H100", []), ("", ["start b"])):
        waits = [gateway(levels=[level("b", 1, wait_s=90)], seen_s=T0 + 60)]
        at = world([model("a"), small], [device(product=product)], [ended], waits)
        assert kinds(plan(at, T0 + 59)) == ["start b"]
        assert kinds(plan(at, T0 + 60)) == starts, "the host's memory is no GPU: it is not closed"
        freed = world([model("a"), small], [device(product=product)], [], waits)
        assert kinds(plan(freed, T0 + 60)) == ["start b"]
    stuck = world([model("a"), small], [device(product="H100")], [ended], waits)
    assert "a has stopped but still holds memory of its device" in plan(stuck, T0 + 60).unmet[0].reason
