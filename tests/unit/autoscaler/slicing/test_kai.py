"""GPUs allocated by KAI or Volcano: the pods' annotations, and the shares of other pods."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import TenantName
from autoscaler.drivers.kubernetes.objects import node_slices as nodes
from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.placement.model.tenant_isolation import domain_of, has_tenant_conflict
from autoscaler.slicing import slicers
from autoscaler.slicing.hami import Volcano
from autoscaler.slicing.kai import KAI_RESERVES, Kai
from autoscaler.slicing.slicer_protocol import NodeFacts, SliceShare
from autoscaler.state.resources import Isolation
from autoscaler.state.world import NodeId, Slice
from tests.support.builders.slices import EXAMPLES, GIB, KAI, NODE, VOLCANO
from tests.support.golden import agrees, pod

GPU = "nvidia.com/gpu"


def kai() -> tuple[Slice, ...]:
    found = Kai().inventory(EXAMPLES["KAI: two GPUs"].node)
    assert found is not None
    return found


def test_pod_on_kai_requests_a_memory_share_of_one_gpu_or_whole_gpus() -> None:
    one, other = kai()
    assert (one.shared, one.memory_bytes, one.isolation, one.handle) == (True, 16 * GIB, Isolation.NONE, GPU)
    part = Kai().fields("m-1", [SliceShare(one, 4 * GIB + 1)])
    assert (dict(part.annotations), dict(part.limits)) == ({"gpu-memory": "4097"}, {}), (
        "no GPU resource may be set next to it"
    )
    assert (part.scheduler, part.memory_fraction) == ("kai-scheduler", 0.25), (
        "the engine gets the limit, because no other component enforces it"
    )
    whole = Kai().fields("m-2", [SliceShare(one, one.memory_bytes), SliceShare(other, other.memory_bytes)])
    assert (dict(whole.limits), dict(whole.annotations), whole.memory_fraction) == ({GPU: "2"}, {}, None)
    agrees("slicing/kai", [pod("m-1", part), pod("m-2", whole)])
    with pytest.raises(ValueError, match="m-3: KAI gives a part of one GPU"):
        Kai().fields("m-3", [SliceShare(one, GIB), SliceShare(other, GIB)])


def test_node_without_a_kai_settings_entry_has_no_kai_slices() -> None:
    assert Kai().inventory(NodeFacts(NODE, allocatable={GPU: "2"})) is None
    assert Kai().inventory(NodeFacts(NODE, allocatable={GPU: "2"}, declared=replace(KAI, slicing=None))) is None


def test_gpus_of_one_node_under_kai_are_one_tenant_isolation_domain() -> None:
    one, other = kai()
    assert has_tenant_conflict((TenantName("a"),), (TenantName("b"),))
    assert domain_of(one) == domain_of(other) == (NodeId(NODE), None)


def others_pod(namespace: str = "team", gpus: int = 0, **annotations: str) -> other_pods.OtherPod:
    notes = {name.replace("_", "-"): value for name, value in annotations.items()}
    limits = {GPU: str(gpus)} if gpus else {}
    found = other_pods.read_other_pod({
        "metadata": {"name": "p", "namespace": namespace, "annotations": notes},
        "spec": {"nodeName": NODE, "containers": [{"name": "a", "resources": {"limits": limits}}]},
    })  # fmt: skip
    assert found is not None
    return found


def test_gpu_that_foreign_pods_share_through_kai_counts_once_as_used() -> None:
    node = nodes.read_node({
        "metadata": {"name": NODE}, "spec": {}, "status": {"allocatable": {GPU: "2"}},
    })  # fmt: skip
    keeper, sharer = others_pod(KAI_RESERVES, gpus=1), others_pod(gpu_fraction="0.5")
    assert nodes.count_taken_slices([node], kai(), [keeper, sharer]) == {f"{NODE} {GPU}": 1}
    assert nodes.count_taken_slices([node], kai(), [keeper]) == {}, "it keeps the GPU whose parts Pilotlight's pods use"
    assert nodes.count_taken_slices([node], kai(), [others_pod(gpu_memory="100", gpu_fraction_num_devices="2")]) == {
        f"{NODE} {GPU}": 2
    }
    assert nodes.count_taken_slices([node], kai(), [others_pod(gpus=1)]) == {f"{NODE} {GPU}": 1}
    whole = [replace(one, kind="whole", shared=False) for one in kai()]
    assert nodes.count_taken_slices([node], whole, [keeper, sharer]) == {f"{NODE} {GPU}": 1}, (
        "elsewhere it is the keeper's"
    )


def test_pod_on_volcano_requests_its_card_and_share() -> None:
    found = Volcano().inventory(NodeFacts(NODE, {}, VOLCANO))
    assert found is not None
    one = found[0]
    assert domain_of(one) == (NODE, None), "an older one takes any card of the node"
    assert (one.handle, one.memory_bytes, one.isolation, one.product) == (
        "GPU-a", 15 * GIB, Isolation.MEMORY, "NVIDIA-Tesla-T4",
    )  # fmt: skip
    fields = Volcano().fields("m-1", [SliceShare(one, 4 * GIB, 30)])
    assert fields.scheduler == "volcano"
    assert fields.limits == {
        "volcano.sh/vgpu-number": "1", "volcano.sh/vgpu-memory": "4096", "volcano.sh/vgpu-cores": "29",
    }  # fmt: skip
    assert fields.annotations == {"volcano.sh/vgpu-use-gpuuuid": "GPU-a"}
    agrees("slicing/volcano", [pod("m-1", fields)])


def test_volcano_annotation_of_another_pod_counts_as_card_usage() -> None:
    held = slicers.parse_hami_allocations({"volcano.sh/vgpu-ids-new": "GPU-a,NVIDIA,3000,50:;"})
    assert [(one.uuid, one.memory_bytes, one.cores) for one in held] == [("GPU-a", 3000 << 20, 50)]
