"""Declared devices without access to nodes: limited by quotas, closed while the scheduler finds no node."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.inventory import declared_devices, resource_quotas
from autoscaler.drivers.kubernetes.inventory.declared_devices import DeclaredDevices
from autoscaler.drivers.kubernetes.inventory.resource_quotas import Quota
from autoscaler.kubernetes.api import Api, Object
from autoscaler.planner.plan import plan
from autoscaler.spec.model import Model
from autoscaler.spec.pod import Pod
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing, PriorityClass, Settings
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import DocumentsSeen
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, SliceId, World
from tests.support.builders.worlds import GI, T0, gateway, kinds, level, model, replica, world
from tests.support.fakes.kubernetes.api_server import Server
from tests.support.harness.manual_loop import SteppedLoop

UNSCHEDULABLE = "Unschedulable: 0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def nodes(product: str, memory_gi: int = 16, count: int = 1, **labels: str) -> NodeKind:
    device = NodeDevice(model=product, memory_bytes=Bytes(memory_gi * GI), count=count)
    return NodeKind(selector=labels, device=device)


T4 = nodes("T4", pool="t4")
A100 = nodes("A100", 80, 2, pool="a100")


def offered(on: tuple[NodeKind, ...], *quotas: Quota, replicas: tuple[Replica, ...] = ()) -> dict[str, str]:
    """Slice -> reason why it is closed."""
    there = declared_devices.build_declared_slices(on, quotas, {one.id: one for one in replicas})
    return {slice_.id: slice_.closed for slice_ in there}


def held(of: Model, *on: str, state: S = S.READY, **fields: Any) -> Replica:
    return replica(of, f"{of.name}-r", on, state, **fields)


def test_each_node_entry_in_settings_becomes_one_node_with_reserved_name() -> None:
    first, *others = declared_devices.build_declared_slices((T4, A100), (), {})
    assert (first.id, first.node, first.product, first.memory_bytes) == ("nodes[0]/gpu0", "nodes[0]", "T4", 16 * GI)
    assert (first.labels, first.labels_known) == ({"pool": "t4"}, False)
    assert [other.id for other in others] == ["nodes[1]/gpu0", "nodes[1]/gpu1"]


def test_pod_on_a_declared_node_selects_the_labels_of_its_settings_entry() -> None:
    assert declared_devices.find_node_selector((T4, A100), (SliceId("nodes[1]/gpu0"), SliceId("nodes[1]/gpu1"))) == {
        "pool": "a100"
    }
    assert declared_devices.find_node_selector((), (SliceId("quota[]/gpu0"),)) == {}
    assert declared_devices.find_node_selector((T4,), (SliceId("nodes[7]/gpu0"),)) == {}, "it was declared once"
    assert declared_devices.find_node_selector((T4,), (SliceId(f"nodes[{'9' * 5000}]/gpu0"),)) == {}
    assert declared_devices.find_node_selector((T4,), (SliceId("node-1/gpu0"),)) is None, "a node that the plan chose"
    assert declared_devices.find_node_selector((T4,), ()) is None


def test_gpu_quota_limits_declared_devices_or_defines_them_if_none() -> None:
    full = "ResourceQuota q allows 2 nvidia.com/gpu, and all are in use"
    assert offered((T4, A100), Quota("q", 2, 0)) == {"nodes[0]/gpu0": "", "nodes[1]/gpu0": "", "nodes[1]/gpu1": full}
    assert offered((T4,), Quota("q", 2, 2), Quota("loose", 9, 2)) == {"nodes[0]/gpu0": full}, "others have them"
    assert offered((), Quota("q", 2, 1)) == {"quota[]/gpu0": "", "quota[]/gpu1": full}
    assert offered(()) == offered((), Quota("q", 0, 0)) == {}


def test_own_replicas_count_against_quota_until_their_pods_are_gone() -> None:
    a = held(model("a"), "nodes[1]/gpu0", state=S.STARTING)
    assert offered((T4, A100), Quota("q", 2, 0), replicas=(a,)) == {
        "nodes[0]/gpu0": "", "nodes[1]/gpu0": "",
        "nodes[1]/gpu1": "ResourceQuota q allows 2 nvidia.com/gpu, and all are in use",
    }  # fmt: skip
    cleared = replace(a, state=S.SCRUBBING)
    assert set(offered((T4, A100), Quota("q", 2, 0), replicas=(cleared,)).values()) == {""}


def test_declared_node_is_unavailable_while_a_pod_for_it_cannot_schedule() -> None:
    waits = held(model("a"), "nodes[0]/gpu0", state=S.STARTING, waits=UNSCHEDULABLE)
    why = f"a already waits for a node of this kind: {UNSCHEDULABLE}"
    assert offered((T4, A100, T4), replicas=(waits,)) == {
        "nodes[0]/gpu0": "", "nodes[1]/gpu0": "", "nodes[1]/gpu1": "", "nodes[2]/gpu0": why,
    }  # fmt: skip
    pulls = replace(waits, runtime=replace(waits.runtime, waits="node n1 prepares its image and volumes"))
    assert set(offered((T4, T4), replicas=(pulls,)).values()) == {""}


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        ({"hard": {"requests.nvidia.com/gpu": "4"}}, Quota("q", 4, 1)),
        ({"hard": {"requests.cpu": "4"}}, None),
        ({"hard": {"requests.nvidia.com/gpu": "4"}, "scopes": ["BestEffort"]}, None),
        ({"hard": {"requests.nvidia.com/gpu": "4"}, "scopeSelector": {"matchExpressions": []}}, None),
    ],
)
def test_only_a_gpu_resource_quota_without_scopes_limits_devices(spec: Object, found: Quota | None) -> None:
    status = {"used": {"requests.nvidia.com/gpu": "1"}}
    assert resource_quotas.read_quota({"metadata": {"name": "q"}, "spec": spec, "status": status}) == found


# --- the resulting plan -----------------------------------------------------------------------------------------------


def made(models: tuple[Model, ...], *replicas: Replica, waiting: str, on: tuple[NodeKind, ...] = (T4,)) -> World:
    """A state with one queued request for each Model in `waiting`."""
    slices = declared_devices.build_declared_slices(on, (), {one.id: one for one in replicas})
    return world(models, slices, replicas, [gateway(levels=[level(name, 1) for name in waiting])])


def test_idle_replica_is_drained_for_a_waiting_model_on_a_declared_node() -> None:
    a, b = model("a", residency_seconds=0), model("b")
    assert kinds(plan(made((a, b), held(a, "nodes[0]/gpu0"), waiting="b"), T0)) == ["drain a-r"]


def test_model_waits_with_reason_while_another_pod_is_unschedulable() -> None:
    a, b = model("a"), model("b")
    waits = held(a, "nodes[0]/gpu0", state=S.STARTING, waits=UNSCHEDULABLE)
    answer = plan(made((a, b), waits, waiting="ab", on=(T4, T4)), T0)
    assert kinds(answer) == []
    (unmet,) = answer.unmet
    assert not unmet.never
    assert "a already waits for a node of this kind: Unschedulable: 0/3" in unmet.reason


def test_model_whose_selector_excludes_a_declared_node_gets_another_node() -> None:
    b = model("b", pod=Pod(node_selector={"pool": "a100", "zone": "z1"}))
    (start,) = plan(made((b,), waiting="b", on=(T4, A100)), T0).actions
    assert isinstance(start, StartReplica)
    assert start.replica.resources.slices == ("nodes[1]/gpu0",), "the zone is not known, and no contradiction"


async def test_slices_are_reported_when_a_quota_or_the_settings_change() -> None:
    server, stepped = Server(), SteppedLoop(world())
    hard = {"requests.nvidia.com/gpu": "1"}
    server.truth["q"] = {
        "metadata": {"name": "q", "namespace": "n", "resourceVersion": "1"}, "spec": {"hard": hard},
    }  # fmt: skip
    devices = DeclaredDevices(cast("Api", server), "n", stepped.loop.observe, lambda: stepped.loop.world)
    stepped.loop.listeners.append(devices.on_step)
    assert stepped.step().nodes.slices == {}
    watching = asyncio.create_task(devices.run())
    async with asyncio.timeout(60):
        while not stepped.step().nodes.slices:
            await asyncio.sleep(0)
    watching.cancel()
    assert list(stepped.loop.world.nodes.slices) == ["quota[]/gpu0"]
    stepped.step(DocumentsSeen(settings=Settings(nodes=(A100,))))
    assert list(stepped.step().nodes.slices) == ["nodes[0]/gpu0"], "the quota allows one of two"


@pytest.mark.parametrize("slicing", [NodeSlicing("mig"), NodeSlicing("dra"), NodeSlicing("hami", template="vir04")])
def test_declared_node_with_mig_dra_or_a_hami_template_is_unavailable(slicing: NodeSlicing) -> None:
    slices = declared_devices.build_declared_slices((replace(A100, slicing=slicing),), (), {})
    assert {one.closed for one in slices} == {declared_devices.UNKNOWN_PARTS.format(kind=slicing.kind)}


def test_pod_on_declared_hami_cards_requests_memory_and_no_named_card() -> None:
    kinds = (replace(A100, slicing=NodeSlicing("hami"), device=replace(A100.device, count=2)),)
    slices = declared_devices.build_declared_slices(kinds, (), {})
    assert [(one.shared, one.closed, one.holders_max, one.kind) for one in slices] == [(True, "", 10, "hami")] * 2
    assert {one.memory_bytes for one in slices} == {A100.device.memory_bytes}
    ranked = Settings(priority_classes=(PriorityClass(0, "usual", hami_priority=1),)).priority_class(5)
    pod_fields = declared_devices.find_pod_fields(kinds, replica(model("a", 8), "r", [slices[0].id]), ranked)
    assert pod_fields is not None
    assert pod_fields.limits == {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "8192", "nvidia.com/priority": "1"}
    assert (pod_fields.scheduler, sorted(pod_fields.annotations)) == (
        "hami-scheduler", ["hami.io/gpu-scheduler-policy", "hami.io/node-scheduler-policy"],
    )  # fmt: skip
    quota = Quota("q", hard=1, used=0)
    assert len(declared_devices.build_declared_slices(kinds, (quota,), {})) == 1, "no more cards than pods may ask for"
