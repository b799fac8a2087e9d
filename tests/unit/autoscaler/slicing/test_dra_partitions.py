"""A GPU that ResourceSlices offer whole and partitioned, if Settings allow it: each replica claims what it needs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.documents.load import parse_documents
from autoscaler.drivers.kubernetes.inventory import resource_claims
from autoscaler.drivers.kubernetes.objects import node_facts
from autoscaler.drivers.kubernetes.objects.node_facts import NodeSeen
from autoscaler.slicing.base import PodFields, SliceShare
from autoscaler.slicing.device_usage import resolve_actual_slices
from autoscaler.slicing.dra import Dra, Got
from autoscaler.state.world import Slice
from tests.support.builders.resource_slices import DRIVER, H100, cut_name, partitionable
from tests.support.builders.slices import GIB, NODE
from tests.support.golden import agrees, pod

SETTINGS = """
apiVersion: pilotlight.dev/v1alpha1
kind: Settings
nodes:
- {selector: {}, device: {model: H100, memory: 80Gi}, slicing: {kind: dra, cut: %s}}"""


def slices(*kept: str, cut: bool = True, places: bool = False) -> dict[str, Slice]:
    """The slices of a node with one H100, as the driver builds them."""
    declared = parse_documents([("a.yaml", SETTINGS % str(cut).lower())]).settings.nodes
    published = resource_claims.group_slices_by_node(partitionable(NODE, places=places))
    found = node_facts.build_slices(
        [NodeSeen(NODE, {}, usable=True, lost=False)], declared, lambda _: {}, published, kept
    )
    return {one.id.rpartition("/")[2]: one for one in found}


def claimed(asks: PodFields) -> tuple[str, str]:
    """The DeviceClass and the profile in the selector; the profile is empty if only the UUID is selected."""
    (claim,) = asks.claims
    (request,) = claim["spec"]["devices"]["requests"]
    said = request["exactly"]["selectors"][0]["cel"]["expression"]
    profile = said.partition('["profile"] == "')[2].partition('"')[0]
    return request["exactly"]["deviceClassName"], profile


@pytest.mark.parametrize(
    ("memory_gib", "percent", "profile"),
    [(5, 0, "1g.10gb"), (15, 0, "1g.20gb"), (15, 20, "2g.20gb"), (30, 0, "3g.40gb"), (5, 50, "4g.40gb"),
     (70, 0, ""), (5, 80, ""), (0, 0, "")],
)  # fmt: skip
def test_small_demand_claims_the_smallest_sufficient_partition(memory_gib: int, percent: int, profile: str) -> None:
    whole = slices()["gpu-0"]
    asks = Dra().fields("m-1", [SliceShare(whole, memory_gib * GIB, percent)])
    assert claimed(asks) == ("mig.nvidia.com" if profile else "gpu.nvidia.com", profile)
    kept = slices(cut=False)["gpu-0"]
    assert claimed(Dra().fields("m-1", [SliceShare(kept, memory_gib * GIB, percent)])) == ("gpu.nvidia.com", "")


@settings(deadline=None)  # the first example computes the best placements on a GPU
@given(st.integers(1, 80 * GIB), st.integers(0, 100), st.booleans())
def test_claimed_partition_is_never_below_the_demand(memory_bytes: int, percent: int, places: bool) -> None:
    _, profile = claimed(Dra().fields("m", [SliceShare(slices(places=places)["gpu-0"], memory_bytes, percent)]))
    if profile:
        of = H100.profile(profile)
        assert (of.memory_bytes >= memory_bytes, 100 * of.compute // 7 >= percent) == (True, True)


def test_partition_claim_matches_the_golden_file() -> None:
    asks = Dra().fields("m-1", [SliceShare(slices()["gpu-0"], 15 * GIB)])
    agrees("slicing/dra-cut", [*asks.claims, pod("m-1", asks)])


def test_claimed_partition_is_used_and_the_rest_of_the_gpu_is_offered() -> None:
    whole = slices()["gpu-0"]
    given_to = f"{DRIVER}/{NODE}/{cut_name('1g.10gb', 0)}"
    assert slices(given_to, given_to).keys() == slices(given_to).keys(), "a claim has it, and it was chosen"
    there = slices(given_to, f"{DRIVER}/{NODE}/gpu-0")
    assert "gpu-0" not in there, "all of it cannot be had any more"
    own = there[cut_name("1g.10gb", 0)]
    known = {one.id: one for one in there.values()}
    assert resolve_actual_slices([whole.id], NODE, known, got=[Got("gpu-0", given_to, None)]) == (own.id,)
    assert cut_name("3g.40gb", 4) in there
    assert {one.device for one in there.values()} == {whole.device}
    (claim,) = Dra().fields("m-2", [SliceShare(there[cut_name("3g.40gb", 4)], 5 * GIB)]).claims
    said = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"]
    assert '"3g.40gb"' in said, "a part is what it is: no claim could tell where in it"


@pytest.mark.parametrize("places", [False, True])
def test_small_demand_claims_a_smaller_profile_of_the_last_free_partition(places: bool) -> None:
    """No other place is left then; if several are left, only with a driver that publishes placements."""
    given_to = f"{DRIVER}/{NODE}/{cut_name('3g.40gb', 0)}"
    left = slices(given_to, places=places)[cut_name("3g.40gb", 4)]
    assert claimed(Dra().fields("m", [SliceShare(left, 5 * GIB)])) == ("mig.nvidia.com", "1g.10gb")
    assert claimed(Dra().fields("m", [SliceShare(left, 15 * GIB, 20)])) == ("mig.nvidia.com", "2g.20gb")
    assert claimed(Dra().fields("m", [SliceShare(left, 30 * GIB)])) == ("mig.nvidia.com", "3g.40gb")
    given_to = f"{DRIVER}/{NODE}/{cut_name('1g.10gb', 0)}"
    several = slices(given_to, places=places)[cut_name("3g.40gb", 4)]
    profile = "1g.10gb" if places else "3g.40gb"
    assert claimed(Dra().fields("m", [SliceShare(several, 5 * GIB)])) == ("mig.nvidia.com", profile)
    assert claimed(Dra().fields("m", [SliceShare(slices(given_to)[cut_name("1g.10gb", 1)], 5 * GIB)])) == (
        "mig.nvidia.com", "1g.10gb",
    )  # fmt: skip


def test_small_partition_of_an_idle_gpu_keeps_the_first_half_free() -> None:
    """If the driver publishes placements: the first half is the only place of the largest profile."""
    (claim,) = Dra().fields("m", [SliceShare(slices(places=True)["gpu-0"], 5 * GIB)]).claims
    said = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"]
    assert "'memorySlice4' in" in said
    assert "!('memorySlice3' in" in said
