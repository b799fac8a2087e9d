"""CPU and memory of nodes, from the API objects to the plan."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects.other_pods import Hosts
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.fold.fold import fold
from autoscaler.placement.learning.training import build_training_input
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Model
from autoscaler.spec.pod import PLACE, Resources
from autoscaler.spec.quantity import read_milli
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import HostsSeen, ReplicaSeen, Seen
from autoscaler.state.pod_requests import sum_pod_requests
from autoscaler.state.resources import CPU_MAX, HostAmount, HostResources
from autoscaler.state.world import History, NodeId, World
from tests.support.builders.worlds import GI, T0, device, gateway, level, model, replace_fields, replica, world

MI = 1 << 20


def has(cpu: str = "0", memory: str = "0", **more: Any) -> dict[str, Any]:
    return {"resources": {"requests": {"cpu": cpu, "memory": memory}}, **more}


ALWAYS = {"restartPolicy": "Always"}


@pytest.mark.parametrize(
    ("spec", "milli", "mebi"),
    [
        ({"containers": [has("500m", "1Gi"), has("1", "512Mi")]}, 1500, 1536),
        ({"containers": [has("1")], "initContainers": [has("3"), has("2", "8Mi")]}, 3000, 8),
        ({"containers": [has("1")], "initContainers": [has("1", **ALWAYS), has("500m")]}, 2000, 0),
        ({"containers": [has("1")], "initContainers": [has("2"), has("1", **ALWAYS)]}, 2000, 0),
        ({"containers": [has("1")], "initContainers": [has("1", **ALWAYS), has("2")]}, 3000, 0),
        ({"containers": [has("1", "1Mi")], "overhead": {"cpu": "250m", "memory": "120Mi"}}, 1250, 121),
        ({"containers": [has("1", "1Mi")], **has("3", "2Mi")}, 3000, 2),
        ({"containers": [has("1", "1Mi")], "resources": {"requests": {"cpu": "4"}}}, 4000, 1),
        ({"containers": [{"name": "a"}], "initContainers": None}, 0, 0),
    ],
    ids=[
        "together", "the most of the first", "and who stays beside it", "who comes later", "who came before",
        "and its overhead", "of the pod as a whole", "of one of the two", "no value is reported",
    ],
)  # fmt: skip
def test_sum_of_pod_requests_matches_the_kubernetes_scheduler(spec: Any, milli: int, mebi: int) -> None:
    assert sum_pod_requests(spec) == HostAmount(milli, mebi * MI)


@pytest.mark.parametrize(("text", "milli"), [("129e6", 129 * 10**9), ("1E3", 10**6), ("1E", 10**21), ("1500u", 2),
                                             ("100n", 1), ("1.5e1", 15_000), ("1e-3", 1), (2, 2000)])  # fmt: skip
def test_kubernetes_quantity_in_any_notation_is_rounded_up_to_milli_units(text: str | int, milli: int) -> None:
    assert read_milli(text) == milli


def test_foreign_pod_without_a_node_or_requests_is_not_recorded() -> None:
    found = other_pods.read_other_pod({"metadata": {}, "spec": {"nodeName": "n1", "containers": [has("2", "1Gi")]}})
    assert found is not None
    assert (found.node, found.cpu_memory, found.has_devices) == ("n1", HostAmount(2000, GI), False)
    assert other_pods.read_other_pod({"metadata": {}, "spec": {"nodeName": "n1", "containers": [{}]}}) is None
    assert other_pods.read_other_pod({"metadata": {}, "spec": {"containers": [has("2")]}}) is None
    keeps = {"metadata": {"labels": {PLACE: "lease"}}, "spec": {"nodeName": "n1", "containers": [has("2")]}}
    assert other_pods.read_other_pod(keeps) is None, "it gives way to a Replica"


def test_cpu_and_memory_of_a_node_are_read_from_its_allocatable() -> None:
    status = {"allocatable": {"cpu": "3920m", "memory": "8Gi", "pods": "110"}, "capacity": {"cpu": "4"}}
    seen = nodes.read_node({"metadata": {"name": "n"}, "spec": {}, "status": status})
    assert seen.cpu_memory == HostAmount(3920, 8 * GI)
    assert seen.amounts == {}, "CPU is nothing that Slices are made of"


def test_added_and_removed_pods_change_the_free_cpu_and_memory_of_a_node() -> None:
    hosts, size = Hosts(), HostAmount(8000, 8 * GI)
    host_sizes = {NodeId("n1"): size, NodeId("n2"): size}
    first = hosts.seen(host_sizes)
    assert hosts.take("n1", HostAmount(3000, GI))
    assert not hosts.take("n1", HostAmount())
    assert hosts.take("n1", HostAmount(6000))
    after = hosts.seen(host_sizes)
    assert after == {"n1": HostResources(*size, -1000, 7 * GI), "n2": HostResources(*size, *size)}
    assert after[NodeId("n2")] is first[NodeId("n2")], "what did not change is the very same"
    assert hosts.give_back("n1", HostAmount(6000))
    assert hosts.give_back("n1", HostAmount(3000, GI))
    assert hosts.seen(host_sizes) == first


# --- the resulting plan -----------------------------------------------------------------------------------------------

N0, N1 = NodeId("n0"), NodeId("n1")
SIZE = HostAmount(8000, 64 * GI)


def asking(name: str, cpu: str) -> Model:
    return model(name, 10, resources=Resources(requests={"cpu": cpu}))


def called(*models: Model, **fields: Any) -> World:
    slices = [device("n0/g0", 12, "n0"), device("n1/g0", 24, "n1")]
    return world(models, slices, gateways=[gateway(levels=[level(one.name, 1) for one in models])], **fields)


def having(one: World, **left: int) -> World:
    """The state after a driver reports this many free cores per node."""
    host_sizes = {NodeId(node): HostResources(*SIZE, cores * 1000, SIZE.host_bytes) for node, cores in left.items()}
    return fold(one, (HostsSeen(hosts=host_sizes),), T0)[0]


def starts(one: World) -> list[tuple[str, tuple[str, ...], HostAmount]]:
    acts = [action.replica for action in plan(one, T0).actions if isinstance(action, StartReplica)]
    return [(str(made.model), made.resources.slices, made.resources.host_request) for made in acts]


def test_replica_is_placed_on_a_node_with_enough_free_cpu() -> None:
    there = called(asking("a", "4"))
    assert starts(there) == [("a", ("n0/g0",), HostAmount(4000))], "nothing is known"
    assert starts(having(there, n0=3, n1=4)) == [("a", ("n1/g0",), HostAmount(4000))]
    assert starts(having(there, n0=4, n1=4)) == [("a", ("n0/g0",), HostAmount(4000))]


def test_model_without_resource_requests_gets_a_cpu_request_of_100m() -> None:
    silent = called(model("a", 10))
    assert starts(having(silent, n0=0, n1=1)) == [("a", ("n1/g0",), HostAmount(100))]


def test_free_cpu_uses_recorded_replica_requests_instead_of_the_spec() -> None:
    there = called(asking("a", "4"))
    one = replica(asking("b", "1"), "b-r", ("n0/g0",))
    held = replace(one, resources=replace(one.resources, host_request=HostAmount(5000), memory_bytes=GI))
    left = replace(
        there, replicas={one.id: held}, by_slice={one.resources.slices[0]: (one.id,)}, by_model={one.model: (one.id,)}
    )
    assert starts(having(left, n0=8, n1=3)) == []
    assert starts(having(left, n0=9, n1=3))[0][:2] == ("a", ("n0/g0",))


def test_observed_pod_requests_override_the_requests_of_the_spec() -> None:
    a = asking("a", "4")
    one = replica(a, "a-r", ("n0/g0",))
    there = replace(called(a), replicas={one.id: one}, by_model={a.name: (one.id,)})
    seen = ReplicaSeen(
        id=one.id, model=a.name, spec_hash=one.spec_hash, intent=one.intent, slices=one.resources.slices,
        memory_bytes=1, slots=1, seen=Seen.READY, host_request=HostAmount(4250, GI),
    )  # fmt: skip
    after, _ = fold(there, (seen,), T0)
    assert after.replicas[one.id].resources.host_request == HostAmount(4250, GI)
    unknown, _ = fold(after, (replace(seen, host_request=None),), T0)
    assert unknown.replicas[one.id].resources.host_request == HostAmount(4250, GI), "an unknown value is not reported"
    adopted, _ = fold(called(a), (seen,), T0)
    assert adopted.replicas[one.id].resources.host_request == HostAmount(4250, GI)


def test_unchanged_node_resources_return_the_same_world_object() -> None:
    there = having(called(asking("a", "4")), n0=3, n1=4)
    assert having(there, n0=3, n1=4) is there
    after = having(there, n0=2, n1=4)
    assert after.nodes.hosts[N1] is there.nodes.hosts[N1]


def test_explain_reports_the_missing_cpu_of_each_candidate() -> None:
    there = having(called(asking("a", "4")), n0=3, n1=0)
    answer = plan(there, T0)
    explanation = explain_model(there, answer, Log(), there.models[asking("a", "4").name].name, T0)
    assert [one.ruled_out for one in explanation.candidates] == [
        "its node has too little CPU: 3 cores left of 8 cores",
        "its node has too little CPU: 0 cores left of 8 cores",
    ]
    assert "node n0 has too little CPU" in answer.unmet[0].reason


def test_training_input_groups_nodes_of_nearly_equal_cpu() -> None:
    one = called(asking("a", "4"), histories={"a": History(last_activity_s=T0)})
    slices = [device(f"n{n}/g0", 24, f"n{n}") for n in range(3)]
    host_sizes = {NodeId(f"n{n}"): HostResources(7900 + n, 64 * GI + n, 0, 0) for n in range(2)}
    made = build_training_input(replace_fields(one, slices={each.id: each for each in slices}, hosts=host_sizes), T0)
    assert made is not None
    assert [(alike.cpu_milli, alike.many) for alike in made.nodes] == [(8000, 2), (CPU_MAX, 1)]
