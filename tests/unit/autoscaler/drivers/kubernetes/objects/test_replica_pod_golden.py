"""The complete pod and claims of a replica on every kind of slice, as reviewed golden files."""

from __future__ import annotations

import re

import pytest

from autoscaler.contract import ModelName
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.objects import pod_manifest
from autoscaler.kubernetes.api import Object
from autoscaler.queries.granted_memory import compute_engine_limits
from autoscaler.slicing import slicers
from autoscaler.slicing.slicer_protocol import NodeFacts
from autoscaler.spec.model import Gpu, Model, ModelSpec
from pilotlight.processes.cluster import build_pod_launch
from tests.support.builders import slices as sliced
from tests.support.builders.worlds import replica
from tests.support.golden import agrees

GIB = 1 << 30
EMITTED = {name: one.node for name, one in sliced.EXAMPLES.items() if one.open} | {
    "whole: two GPUs": NodeFacts(
        sliced.NODE,
        {"nvidia.com/gpu.product": "NVIDIA-L4", "nvidia.com/gpu.memory": "23034"},
        {},
        {"nvidia.com/gpu": "2"},
    ),
    "other: Intel": NodeFacts(sliced.NODE, {"gpu.intel.com/product": "Max_1550"}, {}, {"gpu.intel.com/xe": "2"}),
}
"""Name -> node of that kind with at least one open slice."""


def emitted(node: NodeFacts, devices: int = 1) -> list[Object]:
    """The pod of a vLLM replica on the first open slices, as the driver builds it, and its claims."""
    slices = {one.id: one for one in slicers.list_slices(node)}
    on = [one for one in slices.values() if not one.closed][:devices]
    memory_bytes = min(12 * GIB, on[0].memory_bytes) if on[0].shared and devices == 1 else on[0].memory_bytes
    spec = ModelSpec(engine="vllm", artifact="hf://org/qwen@main", image="vllm:1", gpu=Gpu(count=devices))
    of = Model(name=ModelName("qwen"), spec=spec, memory_bytes=memory_bytes, slots=64)
    one = replica(of, "qwen-1", on=[each.id for each in on], memory_bytes=memory_bytes)
    pod_fields = slicers.build_pod_fields(one, slices)
    assert pod_fields is not None
    started = build_pod_launch(
        of,
        pod_manifest.HOST,
        pod_manifest.assign_engine_port(one.id),
        compute_engine_limits(of, one, pod_fields.memory_fraction),
    )
    return [
        pod_manifest.build_pod_manifest(one, of, started, spec.image, asks=pod_fields),
        *resource_claims.build_claims(one, pod_fields),
    ]


@pytest.mark.parametrize("name", EMITTED)
def test_pod_on_each_slice_kind_matches_its_golden_file(name: str) -> None:
    made = emitted(EMITTED[name])
    agrees(f"pods/{re.sub('[^a-z0-9]+', '-', name.lower())}", made)
    on = made[0]["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert sliced.NODE in str(on), "it is pinned to the node that the plan chose"


@pytest.mark.parametrize("name", ["whole: two GPUs", "HAMi: two cards", "KAI: two GPUs", "other: AMD", "other: Intel"])
def test_pod_on_two_devices_requests_and_uses_both(name: str) -> None:
    made = emitted(EMITTED[name], devices=2)
    agrees(f"pods/two-{re.sub('[^a-z0-9]+', '-', name.lower())}", made)
    (container,) = made[0]["spec"]["containers"]
    assert "2" in container["resources"]["limits"].values()
    assert container["command"][container["command"].index("--tensor-parallel-size") + 1] == "2"
