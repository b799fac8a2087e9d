"""Example nodes for each kind of Slice: a table for the tests of each kind and for those of all kinds."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from autoscaler.slicing.dra import Dra, Got, dra_device_name
from autoscaler.slicing.hami import Hami, Volcano
from autoscaler.slicing.kai import Kai
from autoscaler.slicing.mig import Mig
from autoscaler.slicing.slicer_protocol import NodeFacts, Slicer
from autoscaler.slicing.vendors import HAMI, NPUS, VENDORS, Ascend, Npu, WholeDevice
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing
from autoscaler.state.world import NodeId, Slice
from tests.support.builders.resource_slices import gpu, many, partitionable, resource_slice

NODE = NodeId("node-1")
GIB = 1 << 30


class Example(NamedTuple):
    """A node, the reader for it, and the expected result."""

    slicer: Slicer
    node: NodeFacts
    slices: int
    open: int


def card(uuid: str = "GPU-aaaa", **more: Any) -> dict[str, Any]:
    """A card as HAMi 2.10 registers it."""
    return {
        "id": uuid, "index": 0, "count": 10, "devmem": 81920, "devcore": 100, "type": "NVIDIA A100-SXM4-80GB",
        "mode": "hami-core", "health": True, **more,
    }  # fmt: skip


def hami_node(*cards: dict[str, Any], labels: Mapping[str, str] | None = None, **annotations: str) -> NodeFacts:
    """A node with these cards; the annotations are keyed by their last word."""
    notes = {f"hami.io/{name.replace('_', '-')}": value for name, value in annotations.items()}
    return NodeFacts(NODE, labels or {}, {"hami.io/node-nvidia-register": json.dumps(cards), **notes})


def npu_node(*uuids: str, npu: Npu = NPUS[1], template: str = "") -> NodeFacts:
    """A node with Ascend NPUs as HAMi registers them, and the template that Settings name."""
    cards = [card(uuid, devmem=npu.memory_mib, type=npu.word, devcore=npu.cores) for uuid in uuids]
    device = NodeDevice(npu.word, Bytes(npu.memory_mib << 20), len(uuids))
    kind = NodeKind(selector={}, device=device, slicing=NodeSlicing("hami", template=template))
    return NodeFacts(NODE, {}, {npu.register: json.dumps(cards)}, declared=kind)


def mig_node(product: str = "NVIDIA-H100-80GB-HBM3", labels: Mapping[str, str] | None = None, **cuts: str) -> NodeFacts:
    """A node with that many of each profile as extended resources: `1g_10gb`."""
    allocatable = {f"nvidia.com/mig-{name.strip('_').replace('_', '.')}": many for name, many in cuts.items()}
    return NodeFacts(NODE, {"nvidia.com/gpu.product": product, **(labels or {})}, {}, allocatable)


SINGLE = NodeFacts(
    NODE, {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb", "nvidia.com/gpu.memory": "4864"}, {},
    {"nvidia.com/gpu": "7"},
)  # fmt: skip
KAI = NodeKind(selector={}, device=NodeDevice("T4", Bytes(16 * GIB), 2), slicing=NodeSlicing("kai"))
VOLCANO = {"volcano.sh/node-vgpu-register": "GPU-a,10,15360,NVIDIA-Tesla T4,true,hami-core:GPU-b,10,15360,T4,true,mig:"}
EXAMPLES = {
    "KAI: two GPUs": Example(Kai(), NodeFacts(NODE, allocatable={"nvidia.com/gpu": "2"}, declared=KAI), 2, 2),
    "Volcano: two cards, one of which it cuts by MIG": Example(Volcano(), NodeFacts(NODE, {}, VOLCANO), 2, 1),
    "HAMi: two cards": Example(Hami(), hami_node(card(), card("GPU-bbbb")), 2, 2),
    "HAMi: one is cordoned": Example(
        Hami(), hami_node(card(), card("GPU-bbbb"), device_cordon="GPU-cccc, GPU-bbbb,"), 2, 1
    ),
    "HAMi: not readable": Example(Hami(), NodeFacts(NODE, {}, {"hami.io/node-nvidia-register": "[{"}), 1, 0),
    "MIG: mixed": Example(Mig(), mig_node(_1g_10gb="4", _3g_40gb="2"), 6, 6),
    "MIG: single": Example(Mig(), SINGLE, 7, 7),
    "MIG: shared": Example(Mig(), mig_node(_1g_10gb_shared="8", labels={"nvidia.com/mig-1g.10gb.replicas": "4"}), 2, 0),
    "DRA: whole": Example(
        Dra(), NodeFacts(NODE, devices=[resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1)])]), 2, 2
    ),
    "DRA: partitionable": Example(Dra(), NodeFacts(NODE, devices=partitionable(NODE)), 1, 1),
    "DRA: consumable": Example(Dra(), NodeFacts(NODE, devices=[resource_slice(NODE, "m", devices=[many(0)])]), 1, 1),
    "DRA: not whole": Example(
        Dra(), NodeFacts(NODE, devices=[resource_slice(NODE, "gpus", count=2, devices=[gpu(0)])]), 1, 0
    ),
    "other: AMD": Example(
        WholeDevice(VENDORS[0]), NodeFacts(NODE, {"amd.com/gpu.vram": "64G"}, {}, {"amd.com/gpu": "4"}), 4, 4
    ),
    "other: AMD by HAMi": Example(
        Hami(HAMI[0]), NodeFacts(NODE, {}, {HAMI[0].register: json.dumps([card("AMD-1")])}), 1, 1
    ),
    "other: Ascend in parts": Example(Ascend(NPUS[1]), npu_node("NPU-1", template="vir12_3c_32g"), 2, 2),
    "other: Ascend whole": Example(Ascend(NPUS[1]), npu_node("NPU-1", "NPU-2"), 2, 2),
    "other: Ascend, by a template of another": Example(Ascend(NPUS[1]), npu_node("NPU-1", template="vir16"), 1, 0),
}


def find_slice(got: Got, slices: Iterable[Slice]) -> Slice | None:
    """Return the slice of an allocation; None if it is not offered."""
    return next((one for one in slices if one.kind == "dra" and dra_device_name(one) == got.entry), None)
