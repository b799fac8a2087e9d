"""MIG partitions as slices: both strategies of the device plug-in, partitions that share memory, repartitioning."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from autoscaler.slicing.mig import Mig, build_mig_config_map, build_mig_parted_config, build_mig_slice
from autoscaler.slicing.mig_geometry import GEOMETRIES, MigError, geometry_of
from autoscaler.slicing.slicer_protocol import NodeFacts, SliceShare
from autoscaler.state.resources import Isolation
from autoscaler.state.world import Slice
from tests.support.builders.slices import NODE, SINGLE, mig_node
from tests.support.golden import agrees, pod

MIB = 1 << 20
H100 = GEOMETRIES["H100-80"]


def slices(node: NodeFacts) -> tuple[Slice, ...]:
    return Mig().inventory(node) or ()


def test_each_mig_partition_of_a_node_becomes_a_slice_and_a_device() -> None:
    found = slices(mig_node(_1g_10gb="2", _3g_40gb="1"))
    assert [one.id for one in found] == ["node-1/mig-1g.10gb-0", "node-1/mig-1g.10gb-1", "node-1/mig-3g.40gb-0"]
    assert [str(one.device) for one in found] == [str(one.id) for one in found]
    small, _, large = found
    assert (small.memory_bytes, large.memory_bytes) == (
        H100.profile("1g.10gb").memory_bytes, H100.profile("3g.40gb").memory_bytes,
    )  # fmt: skip
    assert (small.compute_percent, large.compute_percent) == (14, 42)
    assert (small.isolation, small.shared, small.closed, small.kind) == (Isolation.HARDWARE, False, "", "mig")
    assert (small.product, small.handle) == ("NVIDIA-H100-80GB-HBM3", "nvidia.com/mig-1g.10gb")


def test_partition_size_in_node_labels_overrides_the_geometry_table() -> None:
    labels = {
        "nvidia.com/mig-1g.10gb.memory": "9984", "nvidia.com/mig-1g.10gb.count": "2",
        "nvidia.com/mig-1g.10gb.slices.gi": "2",
    }  # fmt: skip
    found = slices(mig_node(labels=labels, _1g_10gb="3"))
    assert [(one.memory_bytes, one.compute_percent) for one in found] == [(9984 * MIB, 28)] * 2


def test_slices_under_mig_strategy_single_are_requested_as_nvidia_gpu() -> None:
    found = slices(SINGLE)
    assert len(found) == 7
    one = found[0]
    assert (one.product, one.memory_bytes, one.compute_percent) == ("NVIDIA-A100-SXM4-40GB", 4864 * MIB, 14)
    assert Mig().fields("m", [SliceShare(one, one.memory_bytes, 14)]).limits == {"nvidia.com/gpu": "1"}


@pytest.mark.parametrize(
    "node",
    [
        NodeFacts(NODE, {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}, {}, {"nvidia.com/gpu": "8"}),
        mig_node(_1g_10gb="0"),
        mig_node(_1g_10gb="-1"),
        mig_node(_1g_10gb="9" * 5000),
    ],
    ids=["whole GPUs", "none", "negative", "huge"],
)
def test_node_without_partitions_is_ignored(node: NodeFacts) -> None:
    assert Mig().inventory(node) is None


def test_resource_name_of_a_media_engine_profile_has_a_dot_for_its_plus() -> None:
    (one,) = slices(mig_node(_1g_10gb_me="1"))
    assert (one.id, one.handle) == ("node-1/mig-1g.10gb+me-0", "nvidia.com/mig-1g.10gb.me")
    assert one.memory_bytes == H100.profile("1g.10gb+me").memory_bytes


def test_mig_profile_missing_from_the_table_is_sized_by_its_name() -> None:
    (one,) = slices(mig_node("NVIDIA-X1000", _2g_48gb="1"))
    assert (one.memory_bytes, one.compute_percent, one.closed) == (48 * 10**9 * 95 // 100, 28, "")


@pytest.mark.parametrize(
    ("node", "why"),
    [
        (mig_node(_1c_3g_40gb="3"), "MIG profile 1c.3g.40gb is a part of a larger one"),
        (mig_node(_1g_10gb_shared="4"), "offered to several pods"),
        (mig_node(_1g_10gb="4", labels={"nvidia.com/mig-1g.10gb.replicas": "2"}), "offered to several pods"),
        (mig_node("NVIDIA-A100-SXM4-40GB-MIG-1g.5gb-SHARED")._replace(allocatable={"nvidia.com/gpu": "4"}), "several"),
        (mig_node(_1g_10gb="1", labels={"nvidia.com/mig.config.state": "rebooting"}), "is rebooting"),
    ],
)
def test_shared_nested_or_reconfiguring_partition_is_unavailable(node: NodeFacts, why: str) -> None:
    found = slices(node)
    assert found
    assert all(why in one.closed for one in found)


def test_pod_requests_one_partition_of_its_profile() -> None:
    one, other = slices(mig_node(_1g_10gb="2"))
    fields = Mig().fields("m-1", [SliceShare(one, one.memory_bytes)])
    agrees("slicing/mig", [pod("m-1", fields)])
    with pytest.raises(ValueError, match="m-1: a program can use one MIG device, not 2"):
        Mig().fields("m-1", [SliceShare(one, 1), SliceShare(other, 1)])


def test_chosen_layout_is_written_as_a_mig_parted_configmap() -> None:
    wanted = {0: ("3g.40gb", "1g.10gb", "1g.10gb"), 1: ()}
    agrees(
        "slicing/mig-parted",
        [build_mig_config_map("pilotlight-mig", "gpu-operator", build_mig_parted_config("node-1", H100, wanted))],
    )
    (one,) = list(yaml.safe_load_all(yaml.safe_dump(build_mig_parted_config("node-1", H100, wanted))))
    assert one["mig-configs"]["node-1"][0]["mig-devices"] == {"1g.10gb": 2, "3g.40gb": 1}
    with pytest.raises(MigError, match=r"GPU 0: A30 has no MIG profile '3g\.40gb'"):
        build_mig_parted_config("node-1", GEOMETRIES["A30"], {0: ("3g.40gb",)})


@pytest.mark.parametrize("product", ["NVIDIA-A30", "NVIDIA-A100-SXM4-40GB", "NVIDIA-H100-80GB-HBM3", "NVIDIA-B200"])
def test_planned_partition_has_the_size_of_its_mig_profile(product: str) -> None:
    geometry = geometry_of(product)
    assert geometry is not None
    all_bytes = geometry.profiles[-1].memory_bytes
    for profile in geometry.profiles:
        made = build_mig_slice(NODE, product, profile.name)
        assert made.handle == "nvidia.com/mig-" + profile.name.replace("+", ".")
        assert made.id == f"{NODE}/mig-{profile.name}-0"
        assert made.compute_percent == max(1, 100 * profile.compute // geometry.compute)
        assert made.device_bytes == (all_bytes if profile.compute < geometry.compute else 0)


def test_gpu_has_more_memory_than_its_partition_even_with_a_wrong_label() -> None:
    """Even if a label exceeds the total in the table, or if no table contains the product."""
    for product in ("NVIDIA-H100-80GB-HBM3", "NVIDIA-X900"):
        labels = {"nvidia.com/gpu.product": product, "nvidia.com/mig-1g.10gb.memory": "200000"}
        (one,) = slices(NodeFacts(NODE, labels, {}, {"nvidia.com/mig-1g.10gb": "1"}))
        assert one.device_bytes > one.memory_bytes == 200000 << 20


@given(st.dictionaries(st.sampled_from(["nvidia.com/gpu.product", "nvidia.com/mig-1g.10gb.memory"]), st.text()),
       st.from_regex(r"[0-9a-z.+]{0,20}", fullmatch=True), st.text(max_size=12))  # fmt: skip
def test_malformed_data_of_a_mig_node_raises_no_error(labels: dict[str, str], profile: str, many: str) -> None:
    node = NodeFacts(NODE, labels, {}, {f"nvidia.com/mig-{profile}": many, "nvidia.com/gpu": many})
    for one in slices(node):
        assert one.memory_bytes > 0
        assert 0 < one.compute_percent <= 100
