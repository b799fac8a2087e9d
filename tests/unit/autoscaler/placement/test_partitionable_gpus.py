"""GPUs that a DRA driver offers whole or in parts: which replicas wait for a whole GPU or for the rest of one."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.objects import node_slices
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.placement.partitionable_gpus import REST_S, list_rejoinable_gpus
from autoscaler.planner.plan import plan
from autoscaler.provisioning.unplaceable_models import list_unplaceable_models
from autoscaler.slicing.dra import claimed_mig_profile
from autoscaler.slicing.slicer_protocol import Object, SliceShare
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.settings import Price, Settings
from autoscaler.state.actions import StartReplica
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.node_labels_and_taints import NodeBackoff
from autoscaler.state.resources import HostResources
from autoscaler.state.world import Copy, NodeId, Replica, Slice, World
from tests.support.builders.resource_slices import DRIVER, cut_name, partitionable, partitionables
from tests.support.builders.slices import NODE
from tests.support.builders.worlds import GI, T0, gateway, level, model, replace_fields, replica, world
from tests.unit.autoscaler.slicing.test_dra_partitions import SETTINGS

AT = f"{DRIVER}/{NODE}"


def there(published: list[Object], *kept: str) -> list[Slice]:
    """Slices as the driver builds them; `kept`: entries allocated to claims."""
    declared = parse_documents([("a.yaml", SETTINGS % "true")]).settings.nodes
    seen = [NodeSeen(NODE, {}, usable=True, lost=False)]
    names = [f"{AT}/{one}" for one in kept]
    return list(
        node_slices.build_slices(seen, declared, lambda _: {}, resource_claims.group_slices_by_node(published), names)
    )


def asked(slices: list[Slice], *models: Model, replicas: tuple[Replica, ...] = (), **more: Any) -> World:
    """A `World` with one queued request for each model."""
    levels = [level(one.name, 1) for one in models]
    return world(models, slices, replicas, gateways=[gateway(levels=levels)], **more)


def on_nodes(*names: str, many: int = 1, **labels: dict[str, str]) -> list[Slice]:
    """Idle partitionable GPUs on these nodes."""
    declared = parse_documents([("a.yaml", SETTINGS % "true")]).settings.nodes
    seen = [NodeSeen(name, labels.get(name, {}), usable=True, lost=False) for name in names]
    published = resource_claims.group_slices_by_node([one for name in names for one in partitionables(name, many)])
    return list(node_slices.build_slices(seen, declared, lambda _: {}, published, []))


def began(on: str, **fields: Any) -> Replica:
    """A replica of model `first`, which needs a part of that GPU, has just been ordered."""
    return replica(model("first", 5), "r", (on,), S.STARTING, created_s=T0, started_s=T0, since_s=T0, **fields)


def starts(at: World) -> dict[str, str]:
    """Model -> the entry on which it starts."""
    found = (getattr(one, "replica", None) for one in plan(at, T0).actions)
    placed = (one for one in found if one is not None and one.resources.slices)
    return {one.model: one.resources.slices[0].rpartition("/")[2] for one in placed}


def test_whole_gpu_replica_waits_until_all_partitions_are_released() -> None:
    slices = there(partitionable(NODE), cut_name("1g.10gb", 0))
    assert all(one.device_bytes for one in slices), "no whole GPU is offered"
    small, large = model("small", 5, low=1), model("large", 70)
    on = replica(small, "r", (f"{NODE}/{cut_name('1g.10gb', 0)}",))
    at = world([large, small], slices, [on], gateways=[gateway(levels=[level("large", 1)])])
    (unmet,) = plan(at, T0).unmet
    assert (unmet.model, unmet.never) == ("large", False)
    assert f"{NODE}/gpu-0 is whole again when all its parts are free" in unmet.reason
    assert list_unplaceable_models(at) == {}
    assert list_unplaceable_models(asked(slices, model("two", 70, gpu=Gpu(count=2)))).keys() == {"two"}
    assert list_unplaceable_models(asked(slices, model("huge", 90))).keys() == {"huge"}, "more than all of it"
    quarters = there(partitionable(NODE), cut_name("1g.20gb", 0), cut_name("3g.40gb", 4), cut_name("1g.20gb", 2))
    assert list_unplaceable_models(asked(quarters, model("huge", 90))).keys() == {"huge"}, (
        "regardless of its partitions"
    )


def test_whole_gpu_model_is_unplaceable_on_statically_partitioned_gpus() -> None:
    """Published by a driver without dynamic MIG: only the parts."""
    counters, devices = partitionable(NODE)
    devices["spec"]["devices"] = [one for one in devices["spec"]["devices"] if "-1g10gb-" in one["name"]]
    at = asked(there([counters, devices]), model("large", 70))
    (unmet,) = plan(at, T0).unmet
    assert unmet.never
    assert list_unplaceable_models(at).keys() == {"large"}


def test_second_small_replica_waits_a_limited_time_for_the_rest_of_a_gpu() -> None:
    idle = there(partitionables(NODE, 2))
    assert [one.id.rpartition("/")[2] for one in idle] == ["gpu-0", "gpu-1"]
    a, b = model("a", 5), model("b", 30)
    at = asked(idle, a, b)
    begun = starts(at)
    assert len(begun) == 1
    (unmet,) = plan(at, T0).unmet
    assert "waits for the rest of" in unmet.reason
    assert not unmet.never
    ((first, gpu),) = begun.items()
    on = replica(a if first == "a" else b, "r", (f"{NODE}/{gpu}",), S.STARTING, created_s=T0)
    after = asked(idle, a, b, replicas=(on,))
    assert starts(after) == {}, "its claim has no part yet"
    assert plan(after, T0 + REST_S - 1).next_s == T0 + REST_S
    on = replace(on, times=replace(on.times, created_s=T0 - REST_S))
    assert starts(asked(idle, a, b, replicas=(on,))).keys() == {"a", "b"} - {first}, "not for ever"


def test_two_replicas_start_at_once_on_different_parts_of_one_gpu() -> None:
    """Hardware isolates the parts; otherwise a replica that waited for the rest would use another GPU in the end."""
    first, a, b = cut_name("3g.40gb", 0), model("a", 30), model("b", 5)
    on = replica(a, "r", (f"{NODE}/{first}",), S.STARTING, created_s=T0, started_s=T0, since_s=T0)
    begun = starts(asked(there(partitionables(NODE, 2), first), a, b, replicas=(on,)))
    assert begun["b"].startswith("gpu-0-mig-")


def test_replica_too_large_for_the_rest_of_a_gpu_takes_another_at_once() -> None:
    idle = there(partitionables(NODE, 2))
    for other in (model("b", 70), model("b", 30, gpu=Gpu(count=1, compute_percent=50)), model("b", 0)):
        assert starts(asked(idle, model("a", 5, gpu=Gpu(compute_percent=50)), other)).keys() == {"a", "b"}


def test_three_half_gpu_replicas_use_two_gpus_and_one_waits() -> None:
    idle = there(partitionables(NODE, 3))
    many = [model(f"m{at}", 30) for at in range(3)]
    assert len(starts(asked(idle, *many))) == 2, "two fit on the first; the third takes the second"


def test_gpu_that_a_waiting_replica_will_not_use_is_assigned_to_another() -> None:
    """In the same plan: it need not wait as long as they do. One of the GPUs is divided for both small models."""
    idle = there(partitionables(NODE, 2))
    a, b, c = model("a", 5), model("b", 30), model("c", 70)
    levels = [level(name, 1, wait_s=9.0 - at) for at, name in enumerate("abc")]
    made = plan(world((a, b, c), idle, gateways=[gateway(levels=levels)]), T0)
    begun = {
        one.replica.model: one.replica.resources.slices[0] for one in made.actions if isinstance(one, StartReplica)
    }
    assert begun == {"a": f"{NODE}/gpu-0", "c": f"{NODE}/gpu-1"}
    assert [(one.model, one.never) for one in made.unmet] == [("b", False)]
    d = model("d", 30)
    levels = [level(name, 1, wait_s=9.0 - at) for at, name in enumerate("abd")]
    made = plan(world((a, b, d), idle, gateways=[gateway(levels=levels)]), T0)
    begun = {
        one.replica.model: one.replica.resources.slices[0] for one in made.actions if isinstance(one, StartReplica)
    }
    assert begun == {"a": f"{NODE}/gpu-0", "d": f"{NODE}/gpu-1"}, "a 1g and a 3g leave no other 3g"
    assert [one.model for one in made.unmet] == ["b"]


def test_second_replica_of_a_model_does_not_wait_for_a_gpu_part() -> None:
    idle = there(partitionables(NODE, 2))
    b = model("b", 5, low=2, high=2)
    on = replica(b, "r", ("elsewhere/gpu-0",))
    assert starts(asked(idle, model("a", 5), b, replicas=(on,))).keys() == {"a", "b"}


# --- no unnecessary wait ----------------------------------------------------------------------------------------------

FIRST = model("first", 5)


def waits_for_first(at: World) -> bool:
    """Whether `b` waits for the rest of the GPU on which `first` starts, instead of starting at once."""
    (unmet,) = [one for one in [*plan(at, T0).unmet, None] if one is None or one.model == "b"][:1]
    assert (unmet is None) == (starts(at).get("b") is not None)
    return unmet is not None and "waits for the rest of x/gpu-0" in unmet.reason


def test_replica_waits_for_the_rest_of_a_gpu_to_keep_another_gpu_whole() -> None:
    idle = on_nodes("x", "y")
    assert waits_for_first(asked(idle, FIRST, model("b", 5), replicas=(began("x/gpu-0"),)))


def test_replica_does_not_wait_for_a_part_if_it_prefers_another_gpu() -> None:
    """If the weights are on the other node, or the other GPU is cheaper, that preference comes first."""
    idle, b = on_nodes("x", "y", y={"karpenter.sh/capacity-type": "spot"}), model("b", 5, artifact="file:///b")
    on = (began("x/gpu-0"),)

    def copies(*names: str) -> frozenset[Copy]:
        return frozenset(Copy(artifact="file:///b", node=NodeId(name)) for name in names)

    assert waits_for_first(asked(idle, FIRST, b, replicas=on))
    assert not waits_for_first(asked(idle, FIRST, b, replicas=on, copies=copies("y")))
    assert waits_for_first(asked(idle, FIRST, b, replicas=on, copies=copies("x", "y")))
    assert waits_for_first(asked(on_nodes("x", many=2), FIRST, b, replicas=on, copies=copies("x")))
    prices = Price(device="H100", per_hour=4.0), Price(device="H100", per_hour=1.5, bought="spot")
    assert not waits_for_first(asked(idle, FIRST, b, replicas=on, settings=Settings(prices=prices)))
    assert waits_for_first(asked(on_nodes("x", "y"), FIRST, b, replicas=on, settings=Settings(prices=prices)))


def test_replica_does_not_wait_for_a_start_whose_pod_cannot_schedule() -> None:
    """Its pod allocates no claim there, so the rest of the GPU is never offered."""
    idle, b = on_nodes("x", "y"), model("b", 5)
    assert waits_for_first(asked(idle, FIRST, b, replicas=(began("x/gpu-0"),)))
    assert not waits_for_first(asked(idle, FIRST, b, replicas=(began("x/gpu-0", stranded_s=T0),)))


def test_replica_does_not_wait_for_a_part_of_an_unsuitable_gpu() -> None:
    idle, on = on_nodes("x", "y", x={"zone": "a"}, y={"zone": "b"}), (began("x/gpu-0"),)
    for b, why in (
        (model("b", 5, pod=Pod(node_selector={"zone": "b"})), "its node has another label"),
        (
            model("b", 5, spread="zone"),
            "it must be apart from other replicas of its Model, whose places are unknown here",
        ),
    ):
        assert not waits_for_first(asked(idle, FIRST, b, replicas=on)), why
    at = asked(idle, FIRST, model("b", 5), replicas=on)
    assert not waits_for_first(
        replace_fields(at, backoffs={(ModelName("b"), NodeId("x")): NodeBackoff(until_s=T0 + 60, times=1)})
    ), "shunned"
    other = [replace(one, product="NVIDIA A100-SXM4-80GB") if one.node == "x" else one for one in idle]
    assert not waits_for_first(asked(other, FIRST, model("b", 5), replicas=on)), "its parts are others"


@pytest.mark.parametrize(("cpu_milli", "waits"), [(4000, True), (500, False)])
def test_replica_does_not_wait_for_a_node_with_too_little_cpu(cpu_milli: int, *, waits: bool) -> None:
    b = model("b", 5, resources=Resources(requests={"cpu": "2"}))
    hosts = {NodeId("x"): HostResources(cpu_milli, GI, cpu_milli, GI), NodeId("y"): HostResources(9000, GI, 9000, GI)}
    assert waits_for_first(asked(on_nodes("x", "y"), FIRST, b, replicas=(began("x/gpu-0"),), hosts=hosts)) == waits
    one = asked(on_nodes("x", many=2), FIRST, b, replicas=(began("x/gpu-0"),), hosts={NodeId("x"): hosts[NodeId("y")]})
    assert waits_for_first(one), "on the same node it takes that anyway"


def test_replica_does_not_wait_if_no_other_replica_is_starting_on_a_gpu() -> None:
    idle, b = on_nodes("x", "y"), model("b", 5)
    ready = replace(began("x/gpu-0"), state=S.READY, times=replace(began("x/gpu-0").times, ready_s=T0))
    assert not waits_for_first(asked(idle, FIRST, b, replicas=(ready,))), "it has its part by now"
    cpu_only = replica(model("first", 0, gpu=Gpu(count=0)), "r", (), S.STARTING, created_s=T0, since_s=T0)
    assert not waits_for_first(asked(idle, FIRST, b, replicas=(cpu_only,)))


def test_replica_takes_an_offered_gpu_part_instead_of_waiting() -> None:
    """A replica starting on such a part delays no other one: the rest of its GPU is already offered."""
    part, small = cut_name("3g.40gb", 0), model("small", 30, low=1)
    slices, b = there(partitionables(NODE, 2), part), model("b", 5)
    on = (replica(small, "s", (f"{NODE}/{part}",)), began(f"{NODE}/gpu-1"))
    assert starts(asked(slices, small, FIRST, b, replicas=on))["b"].startswith("gpu-0-mig-")
    begins = replica(small, "s", (f"{NODE}/{part}",), S.STARTING, created_s=T0, started_s=T0, since_s=T0)
    assert "b" in starts(asked(slices, small, b, replicas=(begins,)))


def test_start_on_an_offered_gpu_part_makes_no_replica_wait() -> None:
    """The rest of that GPU is not the rest of a whole one."""
    taken = cut_name("3g.40gb", 0)
    slices, b = there(partitionables(NODE, 2), taken), model("b", 5)
    part = next(one for one in slices if one.device_bytes and one.id != f"{NODE}/{taken}")
    whole = next(one for one in slices if one.id == f"{NODE}/gpu-1")
    assert claimed_mig_profile(SliceShare(part, 5 * GI, 0)), "of that part less would be claimed, too"
    at = asked([part, whole], FIRST, b, replicas=(began(part.id),))
    assert starts(at)["b"] == "gpu-1"


def test_partitioned_gpu_is_a_future_whole_gpu_unless_it_is_offered_whole() -> None:
    parts, whole = there(partitionable(NODE), cut_name("1g.10gb", 0)), there(partitionable(NODE))
    assert [one.slice.id for one in list_rejoinable_gpus(world([], parts))] == [one.id for one in whole]
    assert list_rejoinable_gpus(world([], [*parts, *whole])) == ()
