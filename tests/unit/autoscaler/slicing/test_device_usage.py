"""Use of sliced devices by foreign pods: counted against their resource, card or entry, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects.node_slices import RESLICED, NodeSeen
from autoscaler.drivers.kubernetes.objects.other_pods import OtherPod
from autoscaler.fold.fold import fold
from autoscaler.planner.plan import plan
from autoscaler.queries.device_health import OTHERS, list_closed_slices
from autoscaler.slicing import device_usage, slicers
from autoscaler.slicing.device_usage import FULL, DeviceUsage
from autoscaler.slicing.dra import Dra, Got
from autoscaler.slicing.hami import HANDSHAKE, NVIDIA, HamiAllocation
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.spec.model import Gpu, Model
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import SlicesSeen
from autoscaler.state.world import Slice, SliceId
from tests.support.builders.resource_slices import DRIVER, gpu, many, resource_slice
from tests.support.builders.slices import GIB, NODE, SINGLE, card, hami_node, mig_node, npu_node
from tests.support.builders.worlds import T0, gateway, level, model, replica, world

MIB = 1 << 20
AMD = NodeFacts(NODE, {"amd.com/gpu.vram": "64G"}, {}, {"amd.com/gpu": "4", "nvidia.com/gpu": "2"})


def seen(node: NodeFacts) -> NodeSeen:
    """The node as the driver stores it."""
    metadata = {"name": node.name, "labels": dict(node.labels), "annotations": dict(node.annotations)}
    status = {"allocatable": dict(node.allocatable), "conditions": [{"type": "Ready", "status": "True"}]}
    return nodes.read_node({"metadata": metadata, "spec": {}, "status": status})


def pod(limits: dict[str, str], **annotations: str) -> OtherPod:
    """A foreign pod as the driver stores it."""
    containers: list[Any] = [{"name": "a", "resources": {"limits": {"cpu": "2", **limits}}}]
    metadata = {name.replace("_", "-"): fields for name, fields in annotations.items()}
    spec = {"nodeName": NODE, "containers": containers}
    found = other_pods.read_other_pod(
        {"metadata": {"annotations": {f"hami.io/{key}": v for key, v in metadata.items()}}, "spec": spec}
    )
    assert found is not None
    return found


# --- counted by a resource --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("node", "limits", "removed"),
    [
        (mig_node(_1g_10gb="4", _3g_40gb="2"), {"nvidia.com/mig-3g.40gb": "1"}, {"nvidia.com/mig-3g.40gb": 1}),
        (SINGLE, {"nvidia.com/gpu": "3"}, {"nvidia.com/gpu": 3}),
        (AMD, {"amd.com/gpu": "1"}, {"amd.com/gpu": 1}),
        (AMD, {"nvidia.com/gpu": "1", "amd.com/gpu": "4"}, {"nvidia.com/gpu": 1, "amd.com/gpu": 4}),
    ],
    ids=["a cut of its profile", "cuts that are called GPUs", "another maker's", "of both makers"],
)
def test_foreign_pod_uses_up_only_the_resource_it_requests(
    node: NodeFacts, limits: dict[str, str], removed: dict[str, int]
) -> None:
    there = seen(node)
    found = nodes.build_slices([there])
    others = nodes.count_taken_slices([there], found, [pod(limits)])
    assert others == {f"{NODE} {name}": much for name, much in removed.items()}
    closed = list_closed_slices(world([], found, others=others), T0)
    assert sorted(one.handle for one in found if one.id in closed) == sorted(
        name for name, much in removed.items() for _ in range(much)
    )
    assert set(closed.values()) == {OTHERS}


def test_pod_without_device_limits_does_not_count_as_device_usage() -> None:
    spec = {"nodeName": NODE, "containers": [{"resources": {"limits": {"example.com/nic": "1", "memory": "1Gi"}}}]}
    assert other_pods.read_other_pod({"metadata": {}, "spec": spec}) is None


# --- cards that HAMi shares -------------------------------------------------------------------------------------------


def left(node: NodeFacts, *pods: OtherPod) -> tuple[tuple[Slice, ...], dict[str, int]]:
    return device_usage.subtract_usage(
        nodes.build_slices([seen(node)]),
        (one for pod in pods for one in device_usage.list_card_usage(pod.node, pod.cards)),
    )


def test_hami_share_used_by_foreign_pods_is_subtracted_from_the_card() -> None:
    foreign = pod({"nvidia.com/gpu": "1"}, vgpu_devices_allocated="GPU-aaaa,NVIDIA,20480,30:;")
    assert foreign.cards == (HamiAllocation(0, "GPU-aaaa", 20 * GIB, 30),)
    (one, other), removed = left(hami_node(card(), card("GPU-bbbb")), foreign)
    assert (one.memory_bytes, one.compute_percent, one.device_bytes, one.closed) == (60 * GIB, 70, 80 * GIB, "")
    assert (other.memory_bytes, other.compute_percent, removed) == (80 * GIB, 100, {})
    pod_fields = slicers.build_pod_fields(
        replace(
            replica(model("a"), "r", [one.id]),
            resources=replace(replica(model("a"), "r", [one.id]).resources, memory_bytes=60 * GIB, compute_percent=70),
        ),
        {one.id: one},
    )
    assert pod_fields is not None
    assert pod_fields.limits["nvidia.com/gpucores"] == "69", "it is not alone on the card"


@pytest.mark.parametrize("held", ["81920,0", "99999,10", "1024,100"])
def test_hami_card_fully_used_by_a_foreign_pod_is_unavailable(held: str) -> None:
    (one,), _ = left(hami_node(card()), pod({}, vgpu_devices_allocated=f"GPU-aaaa,NVIDIA,{held}:;"))
    assert (one.closed, one.memory_bytes > 0) == (FULL, True)


def test_npu_partition_used_by_a_foreign_pod_counts_as_one_used_slice() -> None:
    _, removed = left(npu_node("NPU-1", "NPU-2"), pod({}, Ascend910B2_devices_allocated="NPU-1,Ascend910B2,8192,3:;"))
    assert removed == {f"{NODE} NPU-1": 1}


def test_hami_node_is_unavailable_while_a_replica_from_before_hami_runs() -> None:
    """HAMi does not know either which card that replica uses."""
    on = nodes.build_slices([seen(hami_node(card(), card("GPU-bbbb")))])
    closed, lost = nodes.close_stale_slices(on, [SliceId(f"{NODE}/gpu0")])
    assert [one.closed for one in closed] == [RESLICED] * 2
    assert lost == [OtherPod(NODE, lost=1)]
    assert nodes.close_stale_slices(on, [on[0].id]) == (on, [])


def test_hami_handshake_annotation_is_kept_only_if_it_says_deleted() -> None:
    """Other handshakes change twice a minute, and each change of a node would trigger planning."""
    fields = {NVIDIA.register: "[]", HANDSHAKE: "Requesting_2026.11.20 00:00:00", "other.io/x": "y"}
    node = NodeFacts(NODE, {}, fields)
    assert seen(node).annotations == {NVIDIA.register: "[]"}
    removed = {**fields, HANDSHAKE: "Deleted_2026.11.20 00:00:00"}
    assert HANDSHAKE in seen(node._replace(annotations=removed)).annotations


@given(st.lists(st.tuples(st.sampled_from(["GPU-aaaa", "GPU-bbbb", "GPU-cccc"]), st.integers(1, 90_000),
                          st.integers(0, 120))))  # fmt: skip
def test_remaining_card_share_is_never_negative_or_too_large(held: list[tuple[str, int, int]]) -> None:
    on = nodes.build_slices([seen(hami_node(card(), card("GPU-bbbb")))])
    foreign = [HamiAllocation(0, uuid, mib * MIB, cores) for uuid, mib, cores in held]
    found, _ = device_usage.subtract_usage(on, device_usage.list_card_usage(NODE, foreign))
    for one in found:
        used = sum(each.memory_bytes for each in foreign if each.uuid == one.handle)
        assert one.closed or one.memory_bytes + used <= 80 * GIB
        assert one.memory_bytes > 0
        assert one.compute_percent >= 0


def placed(node: NodeFacts, of: Model, *pods: OtherPod) -> tuple[list[tuple[SliceId, ...]], list[str]]:
    """The slices on which the plan starts one request's replica on that node, and the reasons if it does not."""
    found, _ = left(node, *pods)
    seen_ = SlicesSeen(slices=found)
    answer = plan(fold(world([of], gateways=[gateway(levels=[level(of.name, 1)])]), (seen_,), T0)[0], T0)
    begun = [one.replica.resources.slices for one in answer.actions if isinstance(one, StartReplica)]
    return begun, [one.reason for one in answer.unmet]


def test_model_for_whole_devices_gets_no_part_of_a_device() -> None:
    """A program can use only one MIG device, and the rest of a partly used card is not a whole device."""
    foreign = pod({}, vgpu_devices_allocated="GPU-aaaa,NVIDIA,1024,0:;")
    node, whole, two = hami_node(card(), card("GPU-bbbb")), model("a", 0), model("a", 5, gpu=Gpu(count=2))
    assert placed(node, whole)[0] == [(SliceId(f"{NODE}/GPU-aaaa"),)]
    assert placed(node, whole, foreign)[0] == [(SliceId(f"{NODE}/GPU-bbbb"),)]
    assert placed(node, model("a", 75), foreign)[0] == [(SliceId(f"{NODE}/GPU-aaaa"),)], "it fits into the free memory"
    assert len(placed(node, two)[0][0]) == 2
    assert placed(node, two, foreign)[0] == []
    cuts = mig_node(_1g_10gb="4", _3g_40gb="2")
    assert placed(cuts, model("a", 5))[0] == [(SliceId(f"{NODE}/mig-1g.10gb-0"),)]
    assert [placed(cuts, one)[0] for one in (whole, two)] == [[], []]
    assert "whole device" in placed(cuts, two)[1][0]
    assert placed(mig_node(_7g_80gb="1"), whole)[0] == [(SliceId(f"{NODE}/mig-7g.80gb-0"),)], "all of its GPU"


# --- entries of ResourceSlices ----------------------------------------------------------------------------------------


def test_claimed_device_counts_as_used_and_claimed_capacity_is_deducted() -> None:
    objects = [resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1), many(2)])]
    on = Dra().inventory(NodeFacts(NODE, devices=objects)) or ()
    at = f"{DRIVER}/{NODE}"
    got = [
        Got("r", f"{at}/gpu-1", None),
        Got("r", f"{at}/gpu-2", 30 * GIB),
        Got("r", "gpu.nvidia.com/other/gpu-0", None),
    ]
    (first, second, shared), removed = device_usage.subtract_usage(on, device_usage.list_dra_usage(on, got))
    assert removed == {second.counted: 1}
    assert (first, shared.memory_bytes, shared.closed) == (on[0], 50 * GIB, "")
    (_, _, shared), _ = device_usage.subtract_usage(on, [(on[2].counted, DeviceUsage(None))])
    assert shared.closed == FULL
