"""GPUs offered whole and partitioned by ResourceSlices, and claims that name alternative devices."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.documents.document_types import DocumentError
from autoscaler.documents.parse import parse_documents
from autoscaler.drivers.kubernetes.inventory import node_cordons, resource_claims
from autoscaler.drivers.kubernetes.inventory.inventory import Inventory
from autoscaler.drivers.kubernetes.objects import node_slices
from autoscaler.drivers.kubernetes.objects.node_slices import NodeSeen
from autoscaler.kubernetes.api import Api, Object
from autoscaler.kubernetes.constants import NODES
from autoscaler.slicing.actual_slices import resolve_actual_slices
from autoscaler.slicing.dra import Dra, Got, list_alternatives
from autoscaler.slicing.slicer_protocol import NodeFacts, PodFields, SliceShare
from autoscaler.spec.settings import Settings
from autoscaler.state.world import Slice, SliceId
from tests.support.builders.resource_slices import DRIVER, H100, cut_name, gpu, many, partitionable, resource_slice
from tests.support.builders.slices import GIB, NODE
from tests.support.builders.worlds import model, replica
from tests.support.fakes.kubernetes.api_server import Event, Server
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
    found = node_slices.build_slices(
        [NodeSeen(NODE, {}, usable=True, lost=False)], declared, lambda _: {}, published, kept
    )
    return {one.id.rpartition("/")[2]: one for one in found}


def claimed(requested: PodFields) -> tuple[str, str]:
    """The DeviceClass and the profile in the selector; the profile is empty if only the UUID is selected."""
    (claim,) = requested.claims
    (request,) = claim["spec"]["devices"]["requests"]
    expression = request["exactly"]["selectors"][0]["cel"]["expression"]
    profile = expression.partition('["profile"] == "')[2].partition('"')[0]
    return request["exactly"]["deviceClassName"], profile


@pytest.mark.parametrize(
    ("memory_gib", "percent", "profile"),
    [(5, 0, "1g.10gb"), (15, 0, "1g.20gb"), (15, 20, "2g.20gb"), (30, 0, "3g.40gb"), (5, 50, "4g.40gb"),
     (70, 0, ""), (5, 80, ""), (0, 0, "")],
)  # fmt: skip
def test_demand_on_a_partitionable_gpu_claims_the_smallest_fitting_device(
    memory_gib: int, percent: int, profile: str
) -> None:
    whole = slices()["gpu-0"]
    pod_fields = Dra().fields("m-1", [SliceShare(whole, memory_gib * GIB, percent)])
    assert claimed(pod_fields) == ("mig.nvidia.com" if profile else "gpu.nvidia.com", profile)
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
    pod_fields = Dra().fields("m-1", [SliceShare(slices()["gpu-0"], 15 * GIB)])
    agrees("slicing/dra-cut", [*pod_fields.claims, pod("m-1", pod_fields)])


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
    expression = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"]
    assert '"3g.40gb"' in expression, "a part is what it is: no claim could tell where in it"


@pytest.mark.parametrize("places", [False, True])
def test_small_demand_claims_a_small_profile_in_the_last_free_partition(places: bool) -> None:
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
    expression = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"][0]["cel"]["expression"]
    assert "'memorySlice4' in" in expression
    assert "!('memorySlice3' in" in expression


HEAD = "apiVersion: pilotlight.dev/v1alpha1\nkind: Settings\n"
NAMED = (
    HEAD
    + """nodes:
- {selector: {}, device: {model: H100, memory: 80Gi}, slicing: {kind: dra, alternatives: %d}}"""
)


class Paths(Server):
    """A fake API server with these objects by path."""

    def __init__(self, there: Mapping[str, list[Object]]) -> None:
        super().__init__()
        self.there = there

    async def watch(
        self, path: str, version: str | None, query: Mapping[str, str], *, initial: bool = False, silent_s: float = 0
    ) -> AsyncIterator[Event]:
        self.truth = {str(at): one for at, one in enumerate(self.there.get(path, []))}
        async for event in super().watch(path, version, query, initial=initial, silent_s=silent_s):
            yield event


def meta(one: Object, **more: Any) -> Object:
    return {**one, "metadata": {"resourceVersion": "1", **one["metadata"], **more}}


def theirs(device: str) -> Object:
    result = {"request": "gpu", "driver": DRIVER, "pool": NODE, "device": device}
    return {
        "metadata": {"name": "theirs", "namespace": "other", "resourceVersion": "1"},
        "status": {"allocation": {"devices": {"results": [result]}}},
    }


async def asked(
    *chosen: str, held: tuple[str, ...] = (), closed: str = "", removed: str = "", alternatives: int = 7
) -> PodFields:
    """The fields of the pod of a replica on these slices, on a node with five GPUs."""
    node: Object = {"metadata": {"name": NODE, "resourceVersion": "1"}, "spec": {}, "status": {"conditions": [
        {"type": "Ready", "status": "True"},
    ]}}  # fmt: skip
    order = f'[{{"place": ["device", "{closed}"], "node": "{NODE}", "since_unix_s": 1}}]'
    node["metadata"]["annotations"] = {node_cordons.ANNOTATION: order} if closed else {}
    published = resource_slice(NODE, "gpus", devices=[gpu(0), gpu(1), gpu(2), gpu(3), many(4)])
    there = {
        NODES: [node],
        resource_claims.PUBLISHED: [meta(published)],
        resource_claims.CLAIMS: [theirs(removed)] if removed else [],
    }
    settings = parse_documents([("a.yaml", NAMED % alternatives)]).settings if alternatives else Settings()
    inventory = Inventory(
        cast("Api", Paths(there)), "n", lambda: settings, is_ours=lambda _: False,
        held=lambda: [SliceId(f"{NODE}/{one}") for one in held], changed=lambda _: None,
        hosts_changed=lambda: None,
    )  # fmt: skip
    async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_begun(inventory))
        while not inventory.knows([SliceId(f"{NODE}/{one}") for one in chosen]):
            await asyncio.sleep(0)
            inventory.look()
        pod_fields = inventory.fields(replica(model("a"), "m-1", [f"{NODE}/{one}" for one in chosen]), None)
        watching.cancel()
    assert pod_fields is not None
    return pod_fields


async def _begun(inventory: Inventory) -> None:
    async with asyncio.TaskGroup() as tasks:
        await inventory.begin(tasks)


def uuids(requested: PodFields) -> list[str]:
    """UUIDs of the GPUs that its claim admits, in order of preference."""
    ((request,),) = [one["spec"]["devices"]["requests"] for one in requested.claims]
    wishes = request.get("firstAvailable") or [request["exactly"]]
    return [one["selectors"][0]["cel"]["expression"].rpartition('"GPU-')[2].strip('"') for one in wishes]


async def test_claim_lists_equivalent_devices_after_the_chosen_one() -> None:
    assert uuids(await asked("gpu-2")) == ["0002", "0000", "0001", "0003"], "but none that is shared"
    assert uuids(await asked("gpu-2", alternatives=1)) == ["0002", "0000"]
    assert uuids(await asked("gpu-2", alternatives=0)) == ["0002"], "unless Settings say so"


async def test_used_or_cordoned_devices_are_not_alternatives() -> None:
    assert uuids(await asked("gpu-2", held=("gpu-2", "gpu-0"))) == ["0002", "0001", "0003"]
    assert uuids(await asked("gpu-2", removed="gpu-1")) == ["0002", "0000", "0003"]
    assert uuids(await asked("gpu-2", closed=f"{NODE}/GPU-0003")) == ["0002", "0000", "0001"]


async def test_multiple_or_shared_devices_have_no_alternatives() -> None:
    (claim,) = (await asked("gpu-1", "gpu-2")).claims
    assert ["exactly" in one for one in claim["spec"]["devices"]["requests"]] == [True, True]
    assert uuids(await asked("gpu-4")) == ["0004"]


def cuts(*kept: tuple[str, int, int]) -> dict[str, Slice]:
    """The slices of two H100s with these partitions (profile, start, GPU), and the partitions that still fit."""
    pools = partitionable(NODE), partitionable(NODE, 1)
    counters = [one for counted, _ in pools for one in counted["spec"]["sharedCounters"]]
    devices = [one for _, published in pools for one in published["spec"]["devices"]]
    both = [
        resource_slice(NODE, "counters", count=2, sharedCounters=counters),
        resource_slice(NODE, "devices", count=2, devices=devices),
    ]
    names = [f"{DRIVER}/{NODE}/{cut_name(*one)}" for one in kept]
    found = Dra().inventory(NodeFacts(NODE, devices=both, kept=names)) or ()
    return {one.id.rpartition("/")[2]: one for one in found}


def test_partition_claim_lists_one_alternative_of_equal_size_per_gpu() -> None:
    """No claim can distinguish two partitions of a GPU that do not exist yet: it admits both anyway."""
    kept = [("3g.40gb", 0, 0), ("3g.40gb", 4, 0), ("3g.40gb", 0, 1), ("1g.10gb", 4, 1)]
    there = cuts(*kept)
    own, other = there[cut_name("3g.40gb", 4)], there[cut_name("3g.40gb", 0, 1)]
    found = list(list_alternatives(own, there.values(), {own.id}))
    assert found == [other]
    assert list(list_alternatives(own, there.values(), {other.id})) == []
    assert list(list_alternatives(own, [replace(other, closed="no")], ())) == []
    assert list(list_alternatives(own, [replace(other, healthy=False)], ())) == []
    fields = Dra().either("m-1", [part_of(own), part_of(other)])
    agrees("slicing/dra-alternatives", [*fields.claims, pod("m-1", fields)])
    got = Got("gpu/choice-1", f"{DRIVER}/{NODE}/{cut_name('3g.40gb', 0, 1)}", None)
    assert resolve_actual_slices([own.id], NODE, {one.id: one for one in there.values()}, got=[got]) == (other.id,), (
        "it is charged"
    )


def part_of(one: Slice) -> SliceShare:
    return SliceShare(one, one.memory_bytes)


@pytest.mark.parametrize(
    ("slicing", "line"),
    [
        (
            "{kind: mig, alternatives: 2}",
            "nodes[0].slicing.alternatives: requires slicing kind dra: remove it, or change the kind",
        ),
        (
            "{kind: dra, alternatives: 8}",
            "nodes[0].slicing.alternatives: expected a whole number, at least 0 and at most 7",
        ),
    ],
)
def test_invalid_alternatives_setting_is_rejected(slicing: str, line: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents(
            [("a.yaml", f"{HEAD}nodes: [{{selector: {{}}, device: {{model: T4, memory: 1Gi}}, slicing: {slicing}}}]")]
        )
    assert str(caught.value) == f"a.yaml: Settings: {line}"
