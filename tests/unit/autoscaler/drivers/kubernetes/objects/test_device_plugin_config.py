"""GPUs that the device plug-in shares: from the cluster's objects to placements and pod requests."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from autoscaler.agent_contract import DeviceReport, NodeReport, PodDevices
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.inventory import declared_devices, resource_quotas
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.drivers.kubernetes.objects import pod_manifest as pods
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.drivers.kubernetes.objects.other_pods import OtherPod
from autoscaler.drivers.kubernetes.objects.replica_observations import build_podless_observation
from autoscaler.fold.fold import fold
from autoscaler.kubernetes import device_plugin_config
from autoscaler.kubernetes.device_plugin_config import PLACES
from autoscaler.planner.plan import plan
from autoscaler.queries.device_health import ILL, OTHERS, list_unhealthy_slices
from autoscaler.slicing import slicers
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import API_VERSION, GPU
from autoscaler.spec.settings import Settings
from autoscaler.state.actions import StartReplica
from autoscaler.state.events import NodeReported, Seen, SlicesSeen
from autoscaler.state.resources import Isolation
from autoscaler.state.world import PodRef, Replica, Slice, SliceId, World
from tests.support.builders.worlds import GI, T0, folded, gateway, level, model, replace_fields, replica, world
from tests.support.harness.local_rig import launch

DEVICE = """
- selector: {node.kubernetes.io/instance-type: g4dn.xlarge}
  device: {model: T4, memory: 16Gi, count: 1}"""
SLICED = f"{DEVICE}\n  slicing: {{kind: timeslice, replicas: 3}}"
CONFIG = """
version: v1
flags: {migStrategy: none}
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 3
"""


def settings_of(entries: str) -> Settings:
    return parse_documents([("a.yaml", f"apiVersion: {API_VERSION}\nkind: Settings\nnodes:{entries}")]).settings


def g4dn(gpus: str = "3", **labels: str) -> NodeSeen:
    """A node without GPU feature discovery."""
    kind = {"node.kubernetes.io/instance-type": "g4dn.xlarge"}
    return nodes.read_node({
        "metadata": {"name": "n", "labels": {**kind, **labels}},
        "spec": {"taints": [{"key": GPU, "value": "true", "effect": "NoSchedule"}]},
        "status": {"allocatable": {GPU: gpus, "cpu": "4"}, "conditions": [{"type": "Ready", "status": "True"}]},
    })  # fmt: skip


def config_map(**data: str) -> dict[str, Any]:
    return {"metadata": {"name": "nvidia-device-plugin", "namespace": "kube-system"}, "data": data}


def slices(
    entries: str = SLICED, configured: dict[str, Any] | None = None, node: NodeSeen | None = None
) -> list[Slice]:
    there = {} if configured is None else {PLACES[0]: device_plugin_config.read_plugin_configs(configured)}
    declared_nodes = settings_of(entries).nodes if entries else ()
    return list(
        nodes.build_slices(
            [g4dn() if node is None else node],
            declared_nodes,
            lambda labels: device_plugin_config.select_plugin_config(labels, there),
        )
    )


def called(of: Model, on: list[Slice], **others: int) -> World:
    """A state with many queued requests for this Model."""
    at = world([of], gateways=[gateway(levels=[level(of.name, 32)])])
    seen = SlicesSeen(slices=tuple(on), others={slice_.counted: others["others"] for slice_ in on if others})
    return fold(at, (seen,), T0)[0]


def started(at: World) -> tuple[World, list[Replica]]:
    """The state after all planned starts are running, and the started replicas; one starts at a time."""
    begun: list[Replica] = []
    for now_s in (T0 + 0.25 * step for step in range(8)):  # a ready replica gets a moment to take requests
        actions = plan(at, now_s).actions
        new = [action.replica for action in actions if isinstance(action, StartReplica)]
        assert len(new) <= 1, "the device is one fault domain: one starts at a time"
        begun += new
        at, _ = fold(
            folded(at, actions, now_s), tuple(build_podless_observation(one, Seen.READY) for one in new), now_s
        )
    return at, begun


def unmet(at: World) -> tuple[str, bool]:
    """Why the next replica is not started, and whether that is permanent."""
    ((reason, never),) = {(one.reason, one.never) for one in plan(at, T0 + 2).unmet}
    return reason, never


LABELLED = {f"{GPU}.{name}": value for name, value in (
    ("sharing-strategy", "time-slicing"), ("replicas", "3"), ("count", "1"), ("memory", "16384"),
    ("product", "T4-SHARED"),
)}  # fmt: skip


@pytest.mark.parametrize(
    "on",
    [slices(), slices(DEVICE, config_map(default=CONFIG)), slices("", node=g4dn(**LABELLED))],
    ids=["configured in Settings", "configured in the ConfigMap", "reported by labels"],
)
def test_gpu_time_sliced_for_three_gets_three_replicas_and_no_fourth(on: list[Slice]) -> None:
    assert [one.id for one in on] == ["n/gpu0/s0", "n/gpu0/s1", "n/gpu0/s2"]
    assert {(one.device, one.product, one.isolation, one.taints) for one in on} == {
        ("n/gpu0", "T4", Isolation.NONE, ())
    }, "one fault domain; every engine tolerates its taint"
    assert sum(one.memory_bytes for one in on) <= 16 * GI
    a = model("a", 5, high=8)
    at, begun = started(called(a, on))
    assert sorted(one.resources.slices for one in begun) == [(one.id,) for one in on]
    assert unmet(at) == ("needs 5Gi on one device; the largest has 0 bytes free of 5.3Gi, held by a (busy)", False)
    for one in begun:
        pod_fields = slicers.build_pod_fields(one, at.nodes.slices)
        assert pod_fields is not None
        assert pod_fields.memory_fraction == 0.333, "nothing else keeps an engine from the memory of the others"
        spec = pods.build_pod_manifest(one, a, launch(a, "h", 1), "image", asks=pod_fields)["spec"]
        assert spec["containers"][0]["resources"]["limits"] == {GPU: "1"}
        assert spec["tolerations"] == [{"key": GPU, "operator": "Exists"}]


@pytest.mark.parametrize(
    ("requests", "reason"),
    [
        (model("a", 6), "needs 6Gi on one device; the largest has 5.3Gi"),
        (model("a", 0), "needs a whole device; every slice of that size is a part of a device"),
        (model("a", 5, gpu=Gpu(isolation="memory")), (
            "needs 5Gi on one device with memory isolation; every slice of that size is a part of a device without "
            "this isolation"
        )),
        (model("a", 5, gpu=Gpu(compute_percent=50)),
         "needs 5Gi and 50 % of compute on one device; the largest has 5.3Gi and 33 % of compute"),
    ],
    ids=["too large", "a whole one", "apart from others", "half of its time"],
)  # fmt: skip
def test_replica_that_one_gpu_time_slice_cannot_satisfy_is_never_placed(requests: Model, reason: str) -> None:
    at, begun = started(called(requests, slices()))
    assert begun == []
    assert unmet(at) == (reason, True)


def test_mps_slices_satisfy_memory_isolation() -> None:
    on = slices(SLICED.replace("timeslice", "mps"))
    at, begun = started(called(model("a", 5, gpu=Gpu(isolation="memory"), high=8), on))
    assert len(begun) == 3
    pod_fields = slicers.build_pod_fields(begun[0], at.nodes.slices)
    assert pod_fields is not None
    assert pod_fields.memory_fraction is None, "its server does"


def test_unknown_gpu_sharing_blocks_placement_and_reason_names_fix() -> None:
    at, begun = started(called(model("a", 5), slices(DEVICE)))
    assert begun == []
    reason, never = unmet(at)
    assert not never
    assert reason == (
        "needs 5Gi on one device; its node's device plug-in offers 3 nvidia.com/gpu of 1 device, and their sharing "
        "mode is not known: set `slicing` in Settings `nodes`, or correct `device.count` there if the "
        "number of devices is wrong"
    )


def test_pod_of_another_owner_takes_one_share_of_a_time_sliced_gpu() -> None:
    on, node = slices(), g4dn()
    limits = {"nvidia.com/gpu": "1"}
    foreign = other_pods.read_other_pod(
        {"spec": {"nodeName": "n", "containers": [{"name": "a", "resources": {"limits": limits}}]}}
    )
    assert foreign == OtherPod("n", {"nvidia.com/gpu": 1})
    assert nodes.count_taken_slices([node], on, [foreign]) == {"n nvidia.com/gpu": 1}
    at, begun = started(called(model("a", 5, high=8), on, others=1))
    assert [one.resources.slices for one in begun] == [("n/gpu0/s0",), ("n/gpu0/s1",)]
    assert OTHERS in unmet(at)[0]


def test_renamed_gpu_resource_is_requested_and_counted_in_other_pods() -> None:
    renamed = {**g4dn(**LABELLED).amounts, GPU: "0", "nvidia.com/gpu.shared": "3"}
    node = g4dn(**LABELLED)._replace(amounts=renamed)
    (first, *_) = on = slices("", node=node)
    assert len(on) == 3
    pod_fields = slicers.build_pod_fields(replica(model("a"), "r", [first.id]), {first.id: first})
    assert pod_fields is not None
    assert pod_fields.limits == {"nvidia.com/gpu.shared": "1"}
    container = {"name": "a", "resources": {"limits": {"nvidia.com/gpu.shared": "1"}}}
    foreign = other_pods.read_other_pod({"spec": {"nodeName": "n", "containers": [container]}})
    assert foreign == OtherPod("n", {"nvidia.com/gpu.shared": 1})
    assert nodes.count_taken_slices([node], on, [foreign]) == {"n nvidia.com/gpu.shared": 1}


# --- the plug-in's ConfigMap ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("label", "data", "shares"),
    [
        ("", {"only": CONFIG}, 3),
        ("", {"default": CONFIG, "other": "{version: v1}"}, 3),
        ("", {"one": CONFIG, "other": CONFIG}, 1),
        ("many", {"default": "{version: v1}", "many": CONFIG}, 3),
        ("gone", {"default": CONFIG}, 1),
        ("", {"default": "[a, list]"}, 1),
        ("", {"default": "a: {b"}, 1),
        ("", {}, 1),
    ],
    ids=["the only key", "the default", "no default", "by label", "no such key", "no mapping", "no YAML", "nothing"],
)
def test_device_plugin_config_key_of_a_node_determines_gpu_sharing(
    label: str, data: dict[str, str], shares: int
) -> None:
    labels = {device_plugin_config.CHOICE: label} if label else {}
    found = slices(DEVICE, config_map(**data), g4dn(**labels))
    assert (len(found), bool(found[0].closed)) == (shares, shares == 1)


def test_gpu_operator_config_applies_only_when_named_by_a_label() -> None:
    """For nodes without the label, the ClusterPolicy names the key."""
    configs = {PLACES[1]: device_plugin_config.read_plugin_configs(config_map(any=CONFIG))}
    assert device_plugin_config.select_plugin_config({}, configs) == {}
    assert device_plugin_config.select_plugin_config({device_plugin_config.CHOICE: "any"}, configs)["version"] == "v1"


def test_invalid_plugin_config_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert device_plugin_config.read_plugin_configs(config_map(good=CONFIG, bad="[]")).keys() == {"good"}
    assert "config_map=nvidia-device-plugin key=bad error=expected one mapping" in caplog.text


# --- sharing that changes while replicas run --------------------------------------------------------------------------


def test_gpu_with_changed_sharing_gets_no_replica_until_old_one_ends() -> None:
    """The old replica may hold all of the GPU's memory."""
    shut, lost = nodes.close_stale_slices(slices(), [SliceId("n/gpu0")])
    assert ({one.closed for one in shut}, lost) == ({nodes.RESLICED}, [])
    whole = slices("", node=g4dn("2"))
    back, lost = nodes.close_stale_slices(whole, [SliceId("n/gpu1/s2"), SliceId("n/gpu0")])
    assert ([one.closed for one in back], lost) == (["", nodes.RESLICED], [])
    assert nodes.close_stale_slices(whole, [SliceId("n/gpu0"), SliceId("n/gpu1")]) == (tuple(whole), [])


def test_slice_in_use_on_a_removed_device_reduces_free_slices_of_its_node() -> None:
    on = slices()
    same, lost = nodes.close_stale_slices(on, [SliceId("n/gpu7/s0"), SliceId("m/gpu0")])
    assert (same, lost) == (tuple(on), [OtherPod("n", lost=1), OtherPod("m", lost=1)])
    assert nodes.count_taken_slices([g4dn()], on, lost) == {"n nvidia.com/gpu": 1}


# --- the fault domain -------------------------------------------------------------------------------------------------


def test_all_shares_of_an_unhealthy_gpu_count_as_unhealthy() -> None:
    a, pod = model("a", 5), PodRef(namespace="engines", name="r", uid="u")
    at = world([a], slices(), [replica(a, "r", ["n/gpu0/s1"], pod=pod)])
    own = PodDevices(namespace="engines", name="r", devices=("GPU-a",))
    sick = DeviceReport(id="GPU-a", memory_bytes=16 * GI, used_bytes=0, healthy=False)
    report = NodeReport(node="n", boot="b", sequence=1, devices=(sick,), pods=(own,))
    assert list_unhealthy_slices(fold(at, (NodeReported(report=report),), T0)[0], T0) == {
        one.id: ILL for one in slices()
    }


def test_free_shares_of_an_unmapped_unhealthy_gpu_count_as_unhealthy() -> None:
    """The kubelet chooses which share a pod gets."""
    node = g4dn("6", **{**LABELLED, f"{GPU}.count": "2"})
    found = tuple(
        DeviceReport(id=id, memory_bytes=16 * GI, used_bytes=0, healthy=id == "GPU-a") for id in ("GPU-a", "GPU-b")
    )
    foreign = PodDevices(namespace="x", name="y", devices=("GPU-b",))
    report = NodeReport(node="n", boot="b", sequence=1, devices=found, pods=(foreign,))
    at = fold(world([], slices("", node=node)), (NodeReported(report=report),), T0)[0]
    assert sorted(list_unhealthy_slices(at, T0)) == ["n/gpu1/s1", "n/gpu1/s2"]
    noticed = replace_fields(at, slices={id: one for id, one in at.nodes.slices.items() if one.device == "n/gpu0"})
    assert list_unhealthy_slices(noticed, T0) == {}, "the device plug-in offers it no more"


# --- nodes that cannot be read ----------------------------------------------------------------------------------------


def test_declared_node_has_configured_gpu_shares_limited_by_quota() -> None:
    kinds = settings_of(SLICED).nodes
    found = declared_devices.build_declared_slices(kinds, (), {})
    assert [one.id for one in found] == ["nodes[0]/gpu0/s0", "nodes[0]/gpu0/s1", "nodes[0]/gpu0/s2"]
    assert {one.labels["node.kubernetes.io/instance-type"] for one in found} == {"g4dn.xlarge"}
    bounded = declared_devices.build_declared_slices(kinds, (resource_quotas.Quota("q", 2, 0),), {})
    assert [one.closed for one in bounded] == ["", ""]
