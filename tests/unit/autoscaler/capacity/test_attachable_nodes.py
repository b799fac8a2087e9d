"""Which nodes devices can be attached to, and the properties of an attached device."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.capacity.attachable_nodes import (
    GPU_COUNT,
    AttachableNode,
    count_devices_on_node,
    find_device_memory,
    list_attachable_nodes,
    list_node_selectors,
)
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing, Settings
from autoscaler.state.node_labels_and_taints import Taint
from tests.support.builders.worlds import GI, device, world

T4 = NodeDevice(model="T4", memory_bytes=Bytes(16 * GI))


def node(**more: Any) -> dict[str, Any]:
    """A ready node whose annotation allows 8 GPUs."""
    metadata = {"name": "w1", "labels": {"rack": "1"}, "annotations": {GPU_COUNT: "8"}, **more.pop("metadata", {})}
    return {"metadata": metadata, "spec": {}, "status": {"conditions": [{"type": "Ready", "status": "True"}]}, **more}


def test_settings_override_the_device_count_annotation_of_a_node() -> None:
    rack = {"rack": "1"}
    assert list_attachable_nodes([node()], Settings()) == {"w1": AttachableNode("w1", 8, labels=rack)}
    kinds = (
        NodeKind(selector={"rack": "2"}, device=T4, devices_max=2),
        NodeKind(selector={"rack": "1"}, device=T4, devices_max=4, slicing=NodeSlicing(kind="timeslice", replicas=3)),
    )
    assert list_attachable_nodes([node()], Settings(nodes=kinds)) == {"w1": AttachableNode("w1", 4, 3, rack)}


def test_node_without_own_device_limit_uses_its_machine_group_limit() -> None:
    """Cluster API records the machine group in node annotations; otherwise the node labels identify it."""
    groups = {
        "MachineSet default/g": (4, {"rack": "1"}),
        "MachineSet other/g": (2, {}),
        "MachineSet default/h": (6, {}),
    }
    owner = {
        "cluster.x-k8s.io/cluster-namespace": "other", "cluster.x-k8s.io/owner-kind": "MachineSet",
        "cluster.x-k8s.io/owner-name": "g",
    }  # fmt: skip
    nodes = list_attachable_nodes([node(metadata={"annotations": owner})], Settings(), groups=groups)
    assert nodes["w1"].most == 2
    plain = node(metadata={"annotations": None})
    assert list_attachable_nodes([plain], Settings(), groups=groups)["w1"].most == 4
    assert list_attachable_nodes([node()], Settings(), groups=groups)["w1"].most == 8, "its own annotation goes before"
    declared = Settings(nodes=(NodeKind(selector={"rack": "1"}, device=T4, devices_max=3),))
    assert list_attachable_nodes([plain], declared, groups=groups)["w1"].most == 3
    stranger = node(metadata={"annotations": {**owner, "cluster.x-k8s.io/owner-name": "none"}})
    assert not list_attachable_nodes([stranger], Settings(), groups=groups)
    assert list_attachable_nodes([stranger], Settings(), 5, groups)["w1"].most == 5


def test_node_selectors_come_only_from_settings_nodes_with_a_device_limit() -> None:
    plain = NodeKind(selector={"a": "b"}, device=T4)
    assert list_node_selectors(Settings(nodes=(plain,))) == ("",)
    kinds = [NodeKind(selector=one, device=T4, devices_max=2) for one in ({"b": "1", "a": "2"}, {"rack": "1"})]
    assert list_node_selectors(Settings(nodes=(plain, *kinds, kinds[0]))) == ("a=2,b=1", "rack=1")


def test_attachable_node_keeps_only_taints_that_affect_placement() -> None:
    content = [
        {"key": "lab", "value": "chem", "effect": "NoSchedule"}, {"key": "nvidia.com/gpu", "effect": "NoSchedule"},
        {"key": "old", "effect": "PreferNoSchedule"},
    ]  # fmt: skip
    assert list_attachable_nodes([node(spec={"taints": content})], Settings())["w1"].taints == (
        Taint("lab", "chem", "NoSchedule"),
    )


@pytest.mark.parametrize(
    "other",
    [
        node(metadata={"annotations": {}}),
        node(metadata={"annotations": {GPU_COUNT: "many"}}),
        node(metadata={"annotations": {GPU_COUNT: "0"}}),
        node(metadata={"annotations": None}),
        node(metadata={"deletionTimestamp": "2026-11-23T00:00:00Z"}),
        node(spec={"unschedulable": True}),
        node(status={"conditions": [{"type": "Ready", "status": "Unknown"}]}),
        node(status={}),
    ],
)
def test_unavailable_node_or_node_without_device_count_is_not_attachable(other: Any) -> None:
    assert not list_attachable_nodes([other], Settings())


def test_device_memory_is_taken_from_slices_settings_or_the_product_name() -> None:
    name = "NVIDIA-A100-PCIE-40GB"
    there = world([], [device("a", 39, "w1", product=name)])
    assert find_device_memory(name, there) == 39 * GI
    kind = NodeKind(selector={}, device=NodeDevice(model=name, memory_bytes=Bytes(40 * GI)))
    assert find_device_memory(name, world([], settings=Settings(nodes=(kind,)))) == 40 * GI
    assert find_device_memory(name, world([])) == 40 * 10**9
    assert find_device_memory("NVIDIA-H100-80GB-HBM3", world([])) == 80 * 10**9
    assert find_device_memory("Tesla-T4", world([])) is None
    part = device("a", 20, "w1", product=name, device_bytes=40 * GI)
    assert find_device_memory(name, world([], [part])) == 40 * GI


def test_devices_on_a_node_are_counted_from_its_slices() -> None:
    assert (
        count_devices_on_node(world([], [device("a", 1, "w1"), device("b", 1, "w1"), device("c", 1, "w2")]), "w1") == 2
    )
