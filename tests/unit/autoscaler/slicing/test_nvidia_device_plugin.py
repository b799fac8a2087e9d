"""Pods on GPUs of the device plug-in (whole, time slices, MPS), from the document to the complete pod."""

from __future__ import annotations

import pytest

from autoscaler import engines
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.queries.granted_memory import compute_engine_limits
from autoscaler.slicing import slicers
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind
from autoscaler.state.world import NodeId
from tests.support.builders.worlds import replica
from tests.support.golden import agrees

DOCUMENT = """
apiVersion: pilotlight.dev/v1alpha1
kind: Model
metadata: {name: llama}
spec:
  engine: vllm
  artifact: hf://org/llama
  gpu: {GPU}"""
SHARED = "{memory: 4Gi}"


def node(many: int, resource: str = "nvidia.com/gpu", **labels: str) -> NodeFacts:
    """A node with T4 GPUs and the labels of GPU feature discovery."""
    gpu_labels = {
        "product": "Tesla-T4",
        "memory": "15360",
        **{name.replace("_", "-"): reported for name, reported in labels.items()},
    }
    return NodeFacts(
        NodeId("node-1"),
        {f"nvidia.com/gpu.{name}": reported for name, reported in gpu_labels.items()},
        {},
        {resource: str(many)},
    )


@pytest.mark.parametrize(
    ("name", "on", "gpu"),
    [
        ("whole", node(2, count="2", replicas="1"), "{count: 2}"),
        ("timeslice", node(3, count="1", replicas="3", sharing_strategy="time-slicing"), SHARED),
        ("timeslice-renamed", node(3, "nvidia.com/gpu.shared", count="1", replicas="3"), SHARED),
        ("mps", node(3, count="1", replicas="3", sharing_strategy="mps"), SHARED),
    ],
)  # fmt: skip
def test_pod_on_each_kind_of_gpu_share_matches_its_golden_file(name: str, on: NodeFacts, gpu: str) -> None:
    """One resource per slice; with time slices the engine also gets its share, since nothing else enforces it."""
    (of,) = parse_documents([("a.yaml", DOCUMENT.replace("{GPU}", gpu))]).models
    there = slicers.list_slices(on)
    assert {one.kind for one in there} == {name.partition("-")[0]}
    has = replica(of, "llama-1", [one.id for one in there[: of.spec.gpu.count]], memory_bytes=of.memory_bytes)
    pod_fields = slicers.build_pod_fields(has, {one.id: one for one in there})
    assert pod_fields is not None
    part = compute_engine_limits(of, has, pod_fields.memory_fraction)
    launch = engines.build_launch_command(
        of, None, pod_manifest.HOST, pod_manifest.assign_engine_port(has.id), {"vllm": "vllm"}, gpus=True, given=part
    )
    agrees(f"slicing/{name}", [pod_manifest.build_pod_manifest(has, of, launch, "engine:1", asks=pod_fields)])


@pytest.mark.parametrize(
    ("on", "most", "many"),
    [
        (node(3, count="1", replicas="1"), 4, 3),
        (node(6, count="1", replicas="3"), 4, 6),
        (node(3, count="1"), None, 0),
        (node(3, count="1"), 4, 0),
        (node(3, count="1", replicas="1"), 2, 0),
        (node(3), 4, 3),
    ],
)
def test_extra_devices_are_used_if_sharing_is_known_and_the_limit_allows(
    on: NodeFacts, most: int | None, many: int
) -> None:
    """Labels contain the earlier count; more devices are new ones only if it is known that they are not shared."""
    kind = NodeKind(selector={}, device=NodeDevice(model="T4", memory_bytes=Bytes(1 << 34)), devices_max=most)
    there = slicers.list_slices(on._replace(declared=kind))
    assert sum(not one.closed for one in there) == many
