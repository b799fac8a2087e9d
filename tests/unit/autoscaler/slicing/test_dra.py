"""ResourceSlices as inventory, claims that pin the chosen devices, and devices that claims were allocated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.slicing.dra import Dra, Got, find_whole_gpu, read_allocations
from autoscaler.slicing.dra_resource_slices import Policy, read_pools
from autoscaler.slicing.mig_geometry import Cut, MigError, build_layout
from autoscaler.slicing.slicer_protocol import NodeFacts, Object, SliceShare
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice
from tests.support.builders.resource_slices import DRIVER, H100, cut_name, gpu, many, partitionable, resource_slice
from tests.support.builders.slices import GIB, NODE, find_slice
from tests.support.golden import agrees, pod

MIB = 1 << 20


def node(*objects: Object, kept: Sequence[str] = ()) -> NodeFacts:
    return NodeFacts(NODE, devices=objects, kept=kept)


def slices(*objects: Object, kept: Sequence[str] = ()) -> tuple[Slice, ...]:
    return Dra().inventory(node(*objects, kept=kept)) or ()


def names(found: tuple[Slice, ...]) -> list[str]:
    return [one.id.removeprefix(f"{NODE}/") for one in found]


def entry(name: str) -> str:
    return f"{DRIVER}/{NODE}/{name}"


def test_pcie_root_attribute_sets_the_interconnect_of_a_slice() -> None:
    near = gpu(0)
    near["attributes"] |= {"resource.kubernetes.io/pcieRoot": {"string": "pci0000:5d"}}
    found = Dra().inventory(NodeFacts(NODE, devices=[resource_slice(NODE, "gpus", devices=[near, gpu(1)])]))
    assert [one.link for one in found or ()] == ["pci0000:5d", ""]


def test_whole_gpu_in_a_resource_slice_becomes_one_hardware_isolated_slice() -> None:
    one, other = slices(resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1)]))
    assert (one.id, one.device, one.product) == ("node-1/gpu-0", "node-1/GPU-0000", "NVIDIA-H100-80GB-HBM3")
    assert (one.memory_bytes, one.compute_percent, one.shared) == (81559 * MIB, 100, False)
    assert (one.isolation, one.kind, one.closed, other.id) == (Isolation.HARDWARE, "dra", "", "node-1/gpu-1")


def test_device_of_another_driver_node_or_type_is_ignored() -> None:
    other = resource_slice(NODE, "x", devices=[gpu(0)])
    other["spec"]["driver"] = "compute-domain.nvidia.com"
    vfio = gpu(1)
    vfio["attributes"]["type"] = {"string": "vfio"}
    objects = [other, resource_slice("node-2", "y", devices=[gpu(2)]), resource_slice(NODE, "z", devices=[vfio])]
    assert Dra().inventory(node(*objects)) is None
    assert Dra().inventory(node()) is None


@pytest.mark.parametrize(
    ("objects", "why"),
    [
        ([resource_slice(NODE, "a", count=2, devices=[gpu(0)])], "has 1 of 2 ResourceSlices"),
        ([resource_slice(NODE, "a", devices=[gpu(0), gpu(0)])], "names a device twice"),
        (
            [resource_slice(NODE, "a", devices=[
                gpu(0, taints=[{"key": "xid", "value": "79", "effect": "NoExecute"}])
            ])],
            "its driver tainted it xid=79:NoExecute",
        ),
        ([resource_slice(NODE, "a", devices=[gpu(0, bindingConditions=["FabricDeviceReady"])])], "FabricDeviceReady"),
        ([resource_slice(NODE, "a", devices=[gpu(0, attributes={})])], "no attribute that identifies the device"),
    ],
)  # fmt: skip
def test_incomplete_tainted_or_unbound_device_is_unavailable(objects: list[Object], why: str) -> None:
    found = slices(*objects)
    assert found
    assert all(why in one.closed for one in found)


def test_informational_taint_does_not_make_a_device_unavailable() -> None:
    (one,) = slices(resource_slice(NODE, "a", devices=[gpu(0, taints=[{"key": "k", "effect": "None"}])]))
    assert not one.closed


def test_devices_of_an_older_pool_generation_are_ignored() -> None:
    old = resource_slice(NODE, "a", generation=1, devices=[gpu(0), gpu(1)])
    assert names(slices(old, resource_slice(NODE, "b", generation=2, devices=[gpu(1)]))) == ["gpu-1"]


def test_partitions_offered_beside_an_allocated_one_fit_together() -> None:
    assert names(slices(*partitionable(NODE))) == ["gpu-0"]
    kept = (entry(cut_name("1g.10gb", 3)),)
    found = slices(*partitionable(NODE), kept=kept)
    there = {str(one.id): one for one in found}
    assert names(found) == sorted([
        cut_name("1g.10gb", 3), cut_name("3g.40gb", 4), cut_name("1g.20gb", 0), cut_name("1g.10gb", 2),
    ])  # fmt: skip
    assert {one.device for one in found} == {"node-1/GPU-0000"}
    small = there[f"node-1/{cut_name('1g.10gb', 3)}"]
    assert (small.memory_bytes, small.compute_percent) == (H100.profile("1g.10gb").memory_bytes, 14)


@settings(deadline=None)  # geometries are computed once
@given(st.lists(st.sampled_from([Cut(one.name, start) for one in H100.profiles for start in one.starts]), max_size=8))
def test_offered_partitions_never_overlap_and_include_those_in_valid_use(cuts: list[Cut]) -> None:
    """Offered slices never overlap, and each possible layout is offered exactly as kept."""
    kept = tuple(entry(cut_name(cut.profile, cut.start)) for cut in cuts)
    called = {name: cut for cuts in Dra().places(node(*partitionable(NODE))).values() for cut, name in cuts.items()}
    offered = [called[one] for one in map(entry, names(slices(*partitionable(NODE), kept=kept))) if one in called]
    assert len(build_layout(H100, offered)) == len(offered)
    try:
        build_layout(H100, cuts)
    except MigError:
        return
    assert set(cuts) <= set(offered)


@settings(deadline=None)  # geometries are computed once
@given(st.lists(st.sampled_from([Cut(one.name, start) for one in H100.profiles for start in one.starts]), max_size=8))
def test_each_partition_of_one_gpu_reports_the_same_whole_gpu(cuts: list[Cut]) -> None:
    """The shares of compute and memory differ: a 1g.20gb has a seventh of one and a quarter of the other."""
    (whole,) = slices(*partitionable(NODE))
    kept = tuple(entry(cut_name(cut.profile, cut.start)) for cut in cuts)
    parts = [one for one in slices(*partitionable(NODE), kept=kept) if one.device_bytes]
    assert {one.device_bytes for one in parts} <= {whole.memory_bytes}
    assert all(find_whole_gpu(one) == replace(whole, handle=entry("gpu-0")) for one in parts)


def test_each_mig_profile_and_start_maps_to_its_dra_device_name() -> None:
    ((device, cuts),) = Dra().places(node(*partitionable(NODE))).items()
    assert (device, cuts[Cut("3g.40gb", 4)]) == ("node-1/GPU-0000", entry(cut_name("3g.40gb", 4)))
    assert sum(len(one.starts) for one in H100.profiles) == len(cuts)


def test_claim_selects_gpu_by_uuid_and_partition_by_profile() -> None:
    whole = slices(resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1)]))
    two = Dra().fields("m-1", [SliceShare(one, one.memory_bytes) for one in whole])
    (part,) = [one for one in slices(*partitionable(NODE), kept=(entry(cut_name("3g.40gb", 4)),))
               if "3g40gb-9-4" in one.id]  # fmt: skip
    cut = Dra().fields("m-2", [SliceShare(part, part.memory_bytes)])
    agrees("slicing/dra-pinned", [*two.claims, pod("m-1", two), *cut.claims, pod("m-2", cut)])


def test_partition_is_selected_by_its_memory_slices_if_known() -> None:
    found = {one.device: one for one in read_pools(partitionable(NODE, places=True), NODE, DRIVER).entries}
    partition = found[cut_name("2g.20gb", 2)]
    assert "'memorySlice2' in device.capacity" in partition.where
    assert "!('memorySlice1' in device.capacity" in partition.where
    assert partition.start == 2
    parts = [one for one in found.values() if one.mig]
    assert len({one.where for one in parts}) == len(parts), "each alone"


def test_request_for_consumable_memory_is_rounded_up_to_whole_steps() -> None:
    (one,) = slices(resource_slice(NODE, "many", devices=[many(0, "1Gi")]))
    assert (one.shared, one.memory_bytes, one.isolation) == (True, 80 * GIB, Isolation.NONE)
    fields = Dra().fields("m-1", [SliceShare(one, 30 * GIB + 1)])
    asked = fields.claims[0]["spec"]["devices"]["requests"][0]["exactly"]["capacity"]["requests"]
    assert asked == {"memory": "31744Mi"}
    agrees("slicing/dra-consumable", [*fields.claims, pod("m-1", fields)])


@pytest.mark.parametrize(
    ("policy", "asked", "given"),
    [
        (Policy(), 5, 5), (Policy(10, 4), 3, 10), (Policy(10, 4), 11, 14), (Policy(10, 4), 14, 14),
        (Policy(values=(2, 8)), 3, 8), (Policy(values=(2, 8)), 9, 9),
    ],
)  # fmt: skip
def test_requested_capacity_is_rounded_up_as_by_the_scheduler(policy: Policy, asked: int, given: int) -> None:
    assert policy.given(asked) == given


def test_claim_with_more_than_eight_alternatives_is_rejected() -> None:
    whole = slices(resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1)]))
    fields = Dra().either("m-1", [SliceShare(one, one.memory_bytes) for one in whole])
    agrees("slicing/dra-either", [*fields.claims, pod("m-1", fields)])
    with pytest.raises(ValueError, match="m-1: a claim has 1 to 8 alternatives, not 9"):
        Dra().either("m-1", [SliceShare(whole[0], 1)] * 9)


def test_special_characters_of_a_uuid_are_escaped_in_the_claim_selector() -> None:
    odd = gpu(0)
    odd["attributes"]["uuid"] = {"string": '" || true || "\\'}
    (one,) = slices(resource_slice(NODE, "gpus", devices=[odd]))
    (claim,) = Dra().fields("m", [SliceShare(one, 1)]).claims
    expression = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"]
    assert expression.endswith(r'== "\" || true || \"\\"')


def claim(*results: Any) -> Object:
    return {"status": {"allocation": {"devices": {"results": list(results)}}}}


def result(device: str, **more: Any) -> Object:
    return {"request": "gpu-0", "driver": DRIVER, "pool": NODE, "device": device, **more}


def test_allocated_devices_and_capacity_are_read_from_claim_status() -> None:
    found = slices(resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1)]))
    reported = claim(
        result("gpu-1"), result("gpu-0", adminAccess=True), result("gpu-9", consumedCapacity={"memory": "30Gi"}), 7, {}
    )
    got = read_allocations(reported)
    assert got == (Got("gpu-0", entry("gpu-1"), None), Got("gpu-0", entry("gpu-9"), 30 * GIB))
    assert find_slice(got[0], found) is found[1]
    assert find_slice(got[1], found) is None


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["status", "allocation", "devices", "results", "spec", "pool", "driver", "name", "capacity"]),
        inner, max_size=4,
    ), max_leaves=12,
)  # fmt: skip


@given(ANYTHING)
def test_malformed_dra_objects_raise_no_error(said: Any) -> None:
    read_allocations(said)
    assert read_allocations(claim(said)) == ()
    Dra().inventory(node(said, resource_slice(NODE, "x", devices=said)))
    Dra().inventory(node(resource_slice(NODE, "x", devices=[{"name": "a", "capacity": said, "taints": said}])))
