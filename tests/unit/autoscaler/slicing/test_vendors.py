"""Devices of other vendors: whole devices by resource, shared cards of HAMi, and partitions of Ascend NPUs."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.documents.parse import parse_documents
from autoscaler.placement.model.bin_builder import list_whole_devices
from autoscaler.slicing import slicers
from autoscaler.slicing.hami import Hami, parse_allocations
from autoscaler.slicing.slicer_protocol import NodeFacts, SliceShare
from autoscaler.slicing.vendors import HAMI, NPUS, VENDORS, Ascend, WholeDevice, build_slicer_families
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice
from tests.support.builders.slices import GIB, NODE, card, npu_node
from tests.support.builders.worlds import model, replica
from tests.support.golden import agrees, pod

MIB = 1 << 20
ALL = [slicer for family in build_slicer_families() for slicer in family]
BY_KIND = {vendor.kind: vendor for vendor in VENDORS}
B2 = next(one for one in NPUS if one.word == "Ascend910B2")

TEMPLATED = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
- {selector: {}, device: {model: Ascend910B2, memory: 64Gi}, slicing: {kind: hami, template: vir06_1c_16g}}"""


def whole(kind: str, many: str = "2", declared: NodeKind | None = None, **labels: str) -> tuple[Slice, ...] | None:
    vendor = BY_KIND[kind]
    node_labels = {name.replace("__", "/").replace("_", "."): value for name, value in labels.items()}
    return WholeDevice(vendor).inventory(NodeFacts(NODE, node_labels, {}, {vendor.resource: many}, declared))


def test_amd_labels_set_product_and_memory() -> None:
    labels = {"amd.com/gpu.product-name": "AMD_Instinct_MI300X_OAM", "amd.com/gpu.vram": "192G"}
    one, other = WholeDevice(BY_KIND["amd"]).inventory(NodeFacts(NODE, labels, {}, {"amd.com/gpu": "2"})) or ()
    assert (one.product, one.memory_bytes, one.kind) == ("AMD_Instinct_MI300X_OAM", 192 * 10**9, "amd")
    assert (one.shared, one.isolation, other.id) == (False, Isolation.HARDWARE, "node-1/amd-1")


def test_intel_gpu_memory_is_inferred_from_the_product_label() -> None:
    one, _ = whole("intel-xe", gpu_intel_com__product="Max_1550") or ()
    assert 120 * GIB > one.memory_bytes > 110 * GIB
    (alone,) = whole("intel-i915", "1") or ()
    assert alone.memory_bytes == GIB, "the value is not reported"


def test_oversubscribed_intel_gpus_are_unavailable() -> None:
    labels = {"gpu.intel.com/product": "Max_1100", "gpu.intel.com/device.count": "2"}
    found = WholeDevice(BY_KIND["intel-xe"]).inventory(NodeFacts(NODE, labels, {}, {"gpu.intel.com/xe": "20"})) or ()
    assert len(found) == 2
    assert all("offered 20 times for 2 devices" in one.closed for one in found)


def test_settings_provide_product_and_memory_without_labels() -> None:
    device = NodeDevice(model="MTT-S4000", memory_bytes=Bytes(48 * GIB), count=1)
    (one,) = whole("biren", declared=NodeKind(selector={}, device=device)) or ()
    assert (one.product, one.memory_bytes) == ("MTT-S4000", 48 * GIB)


def test_shared_vendor_devices_are_one_unavailable_slice() -> None:
    for vendor in VENDORS:
        if vendor.parts:
            (one,) = WholeDevice(vendor).inventory(NodeFacts(NODE, {}, {}, {vendor.resource: "80"})) or ()
            assert one.closed


@pytest.mark.parametrize("vendor", VENDORS, ids=lambda one: one.kind)
def test_node_without_the_resource_or_with_hami_has_no_whole_devices(vendor: object) -> None:
    assert isinstance(vendor, tuple)
    one = BY_KIND[vendor[0]]
    assert WholeDevice(one).inventory(NodeFacts(NODE, {}, {}, {"cpu": "8"})) is None
    if one.register:
        assert WholeDevice(one).inventory(NodeFacts(NODE, {}, {one.register: "[]"}, {one.resource: "8"})) is None


def test_no_two_slicers_have_the_same_kind() -> None:
    assert len({one.kind for one in ALL}) == len(ALL) == len(VENDORS) + len(HAMI) + len(NPUS)


def test_pod_requests_the_number_of_whole_devices() -> None:
    found = [whole(kind) or () for kind in ("amd", "intel-xe", "ascend910b2")]
    pods = [
        pod(
            f"m-{at}",
            WholeDevice(BY_KIND[one.kind]).fields(
                "m", [SliceShare(one, one.memory_bytes), SliceShare(two, two.memory_bytes)]
            ),
        )
        for at, (one, two) in enumerate(found)
    ]
    agrees("slicing/vendors-whole", pods)


def test_hami_cards_of_other_vendors_use_their_own_resource_names() -> None:
    amd = Hami(HAMI[0])
    content = json.dumps([card("AMD-1", type="MI300X", devmem=196608)])
    (one,) = amd.inventory(NodeFacts(NODE, {}, {"hami.io/node-amd-register": content})) or ()
    assert (one.kind, one.memory_bytes, one.shared) == ("hami-amd", 192 * GIB, True)
    fields = amd.fields("m-1", [SliceShare(one, 48 * GIB)])
    assert fields.limits == {"amd.com/gpu": "1", "amd.com/gpumem": "49152", "amd.com/gpucores": "22"}
    agrees("slicing/vendors-hami", [pod("m-1", fields)])
    (held,) = parse_allocations({"hami.io/amd-devices-allocated": "AMD-1,AMD,49152,25:;"}, HAMI[0].allocated)
    assert (held.uuid, held.memory_bytes) == ("AMD-1", 48 * GIB)


@given(st.lists(st.integers(1, 81920), min_size=1, max_size=10))
def test_replicas_that_fit_the_memory_of_an_amd_card_fit_its_cores(mib: list[int]) -> None:
    """AMD and Hygon tasks that request no cores would get all of them."""
    amd = Hami(HAMI[0])
    (one,) = amd.inventory(NodeFacts(NODE, {}, {"hami.io/node-amd-register": json.dumps([card()])})) or ()
    fitting = [each for at, each in enumerate(mib) if sum(mib[: at + 1]) <= 81920]
    cores = [int(amd.fields("m", [SliceShare(one, each * MIB)]).limits["amd.com/gpucores"]) for each in fitting]
    assert sum(cores) <= 100
    assert all(cores)


def test_npu_is_whole_without_a_template_and_partitioned_with_one() -> None:
    all_, _ = Ascend(B2).inventory(npu_node("NPU-1", "NPU-2")) or ()
    assert (all_.memory_bytes, all_.compute_percent, all_.shared) == (64 * GIB, 100, False)
    parts = Ascend(B2).inventory(npu_node("NPU-1", "NPU-2", template="vir06_1c_16g")) or ()
    assert [one.id for one in parts] == [f"node-1/NPU-{npu}-{at}" for npu in (1, 2) for at in range(4)]
    assert (parts[0].device, parts[0].memory_bytes, parts[0].compute_percent) == ("node-1/NPU-1", 16 * GIB, 25)
    (wrong,) = Ascend(B2).inventory(npu_node("NPU-1", template="vir16")) or ()
    assert wrong.closed == (
        "Settings `nodes` set template vir16, but an Ascend910B2 has vir03_1c_8g, vir06_1c_16g, vir12_3c_32g"
    )


def test_npu_partition_is_never_a_whole_device() -> None:
    """Ascend910A has room for a single vir16: a Model that needs a whole device is still not placed on it."""
    found = slicers.list_slices(npu_node("NPU-1", npu=NPUS[0], template="vir16"))
    assert (len(found), list_whole_devices(found)) == (1, set())
    assert list_whole_devices(slicers.list_slices(npu_node("NPU-1", npu=NPUS[0])))


def test_settings_template_partitions_an_npu_for_a_pod() -> None:
    """From the document to the pod: only Settings name the template."""
    (kind,) = parse_documents([("settings.yaml", TEMPLATED)]).settings.nodes
    node = npu_node("NPU-1")._replace(declared=kind)
    parts = {one.id: one for one in slicers.list_slices(node)}
    assert [one.memory_bytes for one in parts.values()] == [16 * GIB] * 4
    last = list(parts)[-1]
    pod_fields = slicers.build_pod_fields(
        replace(
            replica(model("a"), "r", [last]),
            resources=replace(replica(model("a"), "r", [last]).resources, memory_bytes=12 * GIB),
        ),
        parts,
    )
    assert pod_fields is not None
    assert pod_fields.limits == {"huawei.com/Ascend910B2": "1", "huawei.com/Ascend910B2-memory": "16384"}
    assert (pod_fields.annotations, pod_fields.scheduler) == (
        {"hami.io/use-Ascend910B2-uuid": "NPU-1"},
        "hami-scheduler",
    )


@pytest.mark.parametrize("npu", NPUS, ids=lambda one: one.word)
def test_npu_partitions_do_not_exceed_their_npu(npu: object) -> None:
    one = next(each for each in NPUS if each == npu)
    for template in one.templates:
        found = Ascend(one).inventory(npu_node("NPU-1", npu=one, template=template.name)) or ()
        assert found
        assert sum(each.memory_bytes for each in found) <= one.memory_mib * MIB
        assert len(found) * template.cores <= one.cores


def test_pod_requests_an_npu_partition_by_memory() -> None:
    slicer = Ascend(B2)
    cut, uncut = (npu_node("NPU-1", "NPU-2", template=one) for one in ("vir06_1c_16g", ""))
    parts, two = ([SliceShare(one, one.memory_bytes) for one in slicer.inventory(node) or ()] for node in (cut, uncut))
    agrees("slicing/vendors-ascend", [
        pod("m-1", slicer.fields("m-1", parts[:1])), pod("m-2", slicer.fields("m-2", two)),
    ])  # fmt: skip
    with pytest.raises(ValueError, match="m-3: HAMi gives one part of an Ascend910B2"):
        slicer.fields("m-3", parts[:2])


@given(st.text(max_size=100), st.text(max_size=8))
def test_malformed_data_of_a_vendor_node_raises_no_error(said: str, many: str) -> None:
    for slicer in ALL:
        names = [one.register for one in (*NPUS, *HAMI)]
        node = NodeFacts(NODE, {one.memory_label: said for one in VENDORS}, dict.fromkeys(names, said))
        slicer.inventory(node)
        slicer.inventory(node._replace(annotations={}, allocatable={one.resource: many for one in VENDORS}))
