"""The contract of every kind of slice: ids, shares, availability, and robustness against malformed input."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.slicing import nvidia_device_plugin as sharing
from autoscaler.slicing import slicers
from autoscaler.slicing.nvidia_device_plugin import GPU_SHARED, Mps, TimeSlice, WholeGpu
from autoscaler.slicing.slicer_protocol import NodeFacts, Slicer, SliceShare
from autoscaler.spec.pod import GPU
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing
from autoscaler.state.resources import Isolation
from autoscaler.state.world import NodeId, Slice
from tests.support.builders import slices as sliced
from tests.support.builders.worlds import GI, model, replica
from tests.support.example_budget import examples

N = NodeId("n")


class Example(NamedTuple):
    """A node that a slicer recognizes, and the expected result."""

    name: str
    slicer: Slicer
    node: NodeFacts
    slices: tuple[str, ...]
    """Their ids."""
    device_bytes: int
    isolation: Isolation
    limits: Mapping[str, str]
    """Limits of a pod on the first of them."""


def shares(*devices: str, of: int) -> tuple[str, ...]:
    return tuple(f"n/{device}/s{number}" for device in devices for number in range(of))


def gfd(strategy: str = "", replicas: str = "", **more: str) -> dict[str, str]:
    """Labels of GPU feature discovery."""
    gpu_labels = {"sharing-strategy": strategy, "replicas": replicas, **more}
    return {f"{GPU}.{name}": value for name, value in gpu_labels.items() if value}


def declared(count: int = 1, slicing: NodeSlicing | None = None) -> NodeKind:
    return NodeKind(selector={}, device=NodeDevice("T4", Bytes(16 * GI), count), slicing=slicing)


def plugin(**sharing: Any) -> dict[str, Any]:
    return {"version": "v1", "sharing": sharing}


def replicated(many: object, name: str = GPU) -> dict[str, Any]:
    return {"resources": [{"name": name, "replicas": many}]}


T4 = gfd(product="Tesla-T4", memory="15360", count="1")
THREE = {GPU: "3"}
EXAMPLES = (
    Example("whole, by labels", WholeGpu(), NodeFacts(N, {**T4, **gfd("none", "1", count="2")}, allocatable={GPU: "2"}),
            ("n/gpu0", "n/gpu1"), 15 * GI, Isolation.HARDWARE, {GPU: "1"}),
    Example("whole, of unknown sharing mode", WholeGpu(), NodeFacts(N, allocatable={GPU: "2"}),
            ("n/gpu0", "n/gpu1"), sharing.UNKNOWN_BYTES, Isolation.HARDWARE, {GPU: "1"}),
    Example("whole, because the Settings say so", WholeGpu(),
            NodeFacts(N, allocatable=THREE, declared=declared(slicing=NodeSlicing("whole"))),
            ("n/gpu0",), 16 * GI, Isolation.HARDWARE, {GPU: "1"}),
    Example("time slices, by labels", TimeSlice(), NodeFacts(N, {**T4, **gfd("time-slicing", "3")}, allocatable=THREE),
            shares("gpu0", of=3), 15 * GI, Isolation.NONE, {GPU: "1"}),
    Example("time slices, by labels of before there was MPS", TimeSlice(),
            NodeFacts(N, {**T4, **gfd(replicas="3", product="Tesla-T4-SHARED")}, allocatable=THREE),
            shares("gpu0", of=3), 15 * GI, Isolation.NONE, {GPU: "1"}),
    Example("time slices of two devices, renamed", TimeSlice(),
            NodeFacts(N, {**T4, **gfd("time-slicing", "2", count="2")}, allocatable={GPU: "0", GPU_SHARED: "4"}),
            shares("gpu0", "gpu1", of=2), 15 * GI, Isolation.NONE, {GPU_SHARED: "1"}),
    Example("time slices, one device ill", TimeSlice(),
            NodeFacts(N, {**T4, **gfd("time-slicing", "3", count="2")}, allocatable=THREE),
            shares("gpu0", of=3), 15 * GI, Isolation.NONE, {GPU: "1"}),
    Example("time slices, by the plug-in's ConfigMap", TimeSlice(),
            NodeFacts(N, allocatable=THREE, declared=declared(), plugin=plugin(timeSlicing=replicated(3))),
            shares("gpu0", of=3), 16 * GI, Isolation.NONE, {GPU: "1"}),
    Example("time slices, by the ConfigMap, as labels cannot be right", TimeSlice(),
            NodeFacts(N, {**T4, **gfd("none", "1")}, allocatable=THREE,
                      plugin=plugin(timeSlicing=replicated(3, "gpu"))),
            shares("gpu0", of=3), 15 * GI, Isolation.NONE, {GPU: "1"}),
    Example("time slices, by the Settings", TimeSlice(),
            NodeFacts(N, allocatable=THREE, declared=declared(slicing=NodeSlicing("timeslice", 3))),
            shares("gpu0", of=3), 16 * GI, Isolation.NONE, {GPU: "1"}),
    Example("MPS by its label, regardless of the other labels", Mps(),
            NodeFacts(N, {**T4, **gfd("mps", "4")}, allocatable={GPU: "4"}, plugin=plugin(timeSlicing=replicated(2)),
                      declared=declared(slicing=NodeSlicing("timeslice", 2))),
            shares("gpu0", of=4), 15 * GI, Isolation.MEMORY, {GPU: "1"}),
    Example("MPS, by the ConfigMap before the Settings", Mps(),
            NodeFacts(N, allocatable={GPU: "4"}, plugin=plugin(mps=replicated(2), timeSlicing=replicated(4)),
                      declared=declared(2, NodeSlicing("timeslice", 4))),
            shares("gpu0", "gpu1", of=2), 16 * GI, Isolation.MEMORY, {GPU: "1"}),
    Example("MPS, by the Settings", Mps(),
            NodeFacts(N, allocatable={GPU: "2"}, declared=declared(slicing=NodeSlicing("mps", 2))),
            shares("gpu0", of=2), 16 * GI, Isolation.MEMORY, {GPU: "1"}),
)  # fmt: skip
every_example = pytest.mark.parametrize("one", EXAMPLES, ids=lambda one: one.name)


def made(one: Example) -> tuple[Slice, ...]:
    found = one.slicer.inventory(one.node)
    assert found is not None
    return found


def by_device(slices: tuple[Slice, ...]) -> Iterator[list[Slice]]:
    for device in {one.device for one in slices}:
        yield [one for one in slices if one.device == device]


@every_example
def test_whole_time_sliced_or_mps_node_has_slices_of_its_own_slicer_only(one: Example) -> None:
    found = made(one)
    assert tuple(slice_.id for slice_ in found) == one.slices
    assert {slice_.isolation for slice_ in found} == {one.isolation}
    assert {slice_.kind for slice_ in found} == {one.slicer.kind}
    assert not any(slice_.closed for slice_ in found)
    knowing = [slicer.kind for slicer in slicers.SLICERS if slicer.inventory(one.node)]
    assert knowing[0] == one.slicer.kind
    assert slicers.list_slices(one.node) == found


every_node = pytest.mark.parametrize("one", sliced.EXAMPLES.values(), ids=sliced.EXAMPLES)
"""Parametrizes a test over the nodes in `sliced`, which cover the other kinds too."""


@every_node
def test_mig_dra_hami_or_vendor_node_has_slices_of_its_own_slicer_only(one: sliced.Example) -> None:
    found = one.slicer.inventory(one.node) or ()
    assert (len(found), sum(not slice_.closed for slice_ in found)) == (one.slices, one.open)
    there = slicers.list_slices(one.node)
    assert there == slicers.BY_KIND[one.slicer.kind].inventory(one.node)
    assert {slice_.kind for slice_ in there} == {one.slicer.kind}


@every_node
def test_pod_limits_on_all_open_slices_do_not_exceed_node_allocatable(one: sliced.Example) -> None:
    there, asked = slicers.list_slices(one.node), Counter[str]()
    known = {slice_.id: slice_ for slice_ in there}
    assert len(known) == len(there)
    for slice_ in there:
        assert slice_.id.split("/")[0] == slice_.node == one.node.name
        whole = replace(
            replica(model("a"), "r", [slice_.id]),
            resources=replace(
                replica(model("a"), "r", [slice_.id]).resources, memory_bytes=slice_.memory_bytes, compute_percent=100
            ),
        )
        if not slice_.closed:
            pod_fields = slicers.build_pod_fields(whole, known)
            assert pod_fields is not None
            assert pod_fields.limits or pod_fields.claims
            asked.update({name: int(many) for name, many in pod_fields.limits.items()})
    assert all(many <= int(one.node.allocatable[name]) for name, many in asked.items() if name in one.node.allocatable)


@every_node
def test_gpus_managed_by_another_slicer_are_not_offered_twice(one: sliced.Example) -> None:
    """A device plug-in counts these GPUs nevertheless. ResourceSlices apply only if no plug-in counts the GPUs."""
    with_gpus = one.node._replace(allocatable={GPU: "10", **one.node.allocatable})
    kinds = {slice_.kind for slice_ in slicers.list_slices(with_gpus)}
    maker = one.slicer.kind
    nvidias = maker in {"hami", "mig", "volcano", "kai"}
    assert kinds == ({maker} if nvidias else {"whole"} if maker == "dra" else {maker, "whole"})


@pytest.mark.parametrize(
    ("kind", "node"),
    [("dra", sliced.EXAMPLES["DRA: whole"].node), ("hami", sliced.hami_node(sliced.card())),
     ("hami", NodeFacts(N)), ("volcano", NodeFacts(N)),
     ("volcano", NodeFacts(N, {}, sliced.VOLCANO)),
     ("mig", sliced.mig_node(_1g_10gb="4")), ("mig", NodeFacts(N))],
)  # fmt: skip
def test_devices_are_unavailable_until_the_node_has_the_declared_slicing(
    kind: Literal["dra", "hami", "mig", "volcano"], node: NodeFacts
) -> None:
    node = node._replace(allocatable={GPU: "10", **node.allocatable}, declared=declared(10, NodeSlicing(kind)))
    own = slicers.BY_KIND[kind].inventory(node)
    if own is not None:
        assert slicers.list_slices(node) == own
        return
    found = slicers.list_slices(node)
    why = f"Settings `nodes` declare its devices as {kind}, but its node {slicers.UNDETECTED_REASONS[kind]}"
    assert [one.closed for one in found] == [why] * 10
    assert slicers.list_slices(NodeFacts(N, declared=declared(10, NodeSlicing(kind)))) == (), "it has no devices yet"


@every_example
def test_shares_of_a_device_do_not_exceed_its_size(one: Example) -> None:
    for parts in by_device(made(one)):
        assert 0 < sum(part.memory_bytes for part in parts) <= one.device_bytes
        assert sum(part.compute_percent for part in parts) <= 100


@every_example
def test_id_of_each_slice_is_unique_and_starts_with_its_node_and_device(one: Example) -> None:
    found = made(one)
    assert len({slice_.id for slice_ in found}) == len(found)
    for slice_ in found:
        assert slice_.node == one.node.name
        assert slice_.id.split("/")[0] == slice_.node, "a pod goes to the node in its Slice's id"
        assert f"{slice_.id}/".startswith(f"{slice_.device}/")


@every_example
def test_slice_ids_of_a_renamed_node_differ_only_in_the_node_name(one: Example) -> None:
    assert made(one) == made(one)
    other = one.slicer.inventory(
        one.node._replace(name=NodeId("m"), labels=dict(sorted(one.node.labels.items(), reverse=True)))
    )
    assert other is not None
    assert [slice_.id.replace("m/", "n/", 1) for slice_ in other] == list(one.slices)


@every_example
def test_total_pod_limits_of_all_slices_do_not_exceed_node_allocatable(one: Example) -> None:
    """Requesting each slice once never exceeds the allocatable resources of the node."""
    found = made(one)
    asked = Counter[str]()
    for slice_ in found:
        asked.update({name: int(many) for name, many in one.slicer.fields("r", [SliceShare(slice_, 1)]).limits.items()})
    assert one.slicer.fields("r", [SliceShare(found[0], 1)]).limits == one.limits
    assert all(many <= int(one.node.allocatable[name]) for name, many in asked.items() if name in one.node.allocatable)
    every = replica(model("a"), "r", [slice_.id for slice_ in found])
    known = {slice_.id: slice_ for slice_ in found}
    assert slicers.build_pod_fields(every, known) == one.slicer.fields(
        "r", [SliceShare(slice_, every.resources.memory_bytes) for slice_ in found]
    )
    assert slicers.build_pod_fields(every, {}) is None, "they were there once"


HOSTILE = (
    "",
    "no number",
    "-1",
    "0",
    "1",
    "2",
    "7",
    "1.5",
    "3k",
    "١٢",
    "9" * 9,
    "9" * 40,
    "9" * 5000,
    "\x00",
    "none",
    "mps",
)
"""Malformed values of labels and amounts."""


@every_example
@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_malformed_node_data_never_yields_more_slices_than_allocatable(one: Example, data: st.DataObject) -> None:
    def spoilt(texts: Mapping[str, str]) -> dict[str, str]:
        chosen = {name: data.draw(st.sampled_from((value, *HOSTILE)), name) for name, value in sorted(texts.items())}
        return {name: value for name, value in chosen.items() if data.draw(st.integers(0, 9), name)}

    labels = spoilt({f"{GPU}.{name}": "3" for name in ("memory", "count", "replicas", "sharing-strategy", "product")})
    node = one.node._replace(
        labels={**one.node.labels, **labels}, annotations=spoilt(one.node.annotations),
        allocatable=spoilt(one.node.allocatable),
    )  # fmt: skip
    found = slicers.list_slices(node)
    _, offered = sharing.read_offered_gpus(node.allocatable)
    assert len(found) <= offered <= sharing.SLICES_MAX
    assert len({slice_.id for slice_ in found}) == len(found)
    mib = labels.get(sharing.MEMORY_MIB, one.node.labels.get(sharing.MEMORY_MIB, ""))
    largest = max(one.device_bytes, 16 * GI, sharing.parse_number(mib) << 20)
    for parts in by_device(found):
        assert sum(part.memory_bytes for part in parts) <= largest
        assert sum(part.compute_percent for part in parts) <= 100


# --- detection of sharing ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "node",
    [
        NodeFacts(N, allocatable=THREE, declared=declared()),
        NodeFacts(N, T4, allocatable=THREE),
        NodeFacts(N, {**T4, **gfd("none", "1")}, allocatable=THREE, plugin={"version": "v1"}),
        NodeFacts(N, {**T4, **gfd("time-slicing", "many")}, allocatable=THREE),
        NodeFacts(N, {**T4, **gfd("some-day", "3")}, allocatable=THREE),
        NodeFacts(N, T4, allocatable=THREE, plugin=plugin(timeSlicing=replicated("3"))),
        NodeFacts(N, T4, allocatable=THREE, plugin=plugin(timeSlicing=replicated(3, "nvidia.com/mig-1g.10gb"))),
        NodeFacts(N, T4, allocatable={GPU_SHARED: "1"}),
    ],
    ids=["Settings without slicing", "no word", "both say none", "no number", "a strategy of the future", "a text",
         "of MIG", "the name shows that it is shared"],
)  # fmt: skip
def test_gpu_with_unknown_sharing_is_unavailable_with_instructions(node: NodeFacts) -> None:
    (found,) = slicers.list_slices(node)
    assert (found.kind, found.isolation) == ("whole", Isolation.NONE)
    resource, many = sharing.read_offered_gpus(node.allocatable)
    assert found.closed.startswith(
        f"its node's device plug-in offers {many} {resource} of 1 device, and their sharing mode is"
    )
    assert "set `slicing` in Settings `nodes`" in found.closed


@pytest.mark.parametrize(
    "broken",
    [
        {"sharing": None}, {"sharing": []}, {"sharing": {"timeSlicing": 3}}, {"sharing": {"mps": {"resources": 3}}},
        plugin(mps={"resources": [3, None, {"name": [GPU], "replicas": 2}, {"name": GPU, "replicas": [2]}]}),
        plugin(timeSlicing=replicated(-3)), plugin(timeSlicing=replicated(1 << 70)), plugin(mps=replicated(2.5)),
    ],
)  # fmt: skip
def test_gpu_is_unavailable_if_the_plugin_configuration_is_invalid(broken: dict[str, Any]) -> None:
    (found,) = slicers.list_slices(NodeFacts(N, T4, allocatable=THREE, plugin=broken))
    assert found.closed


def test_node_without_gpus_has_no_slices() -> None:
    assert slicers.list_slices(NodeFacts(N, {**T4, **gfd("mps", "4")}, allocatable={"example.com/nic": "2"})) == ()


def test_product_name_of_a_shared_gpu_omits_the_shared_suffix() -> None:
    """`gpu.models` globs and prices match this name."""
    shared = NodeFacts(N, {**T4, **gfd("time-slicing", "3", product="Tesla-T4-SHARED")}, allocatable=THREE)
    assert {one.product for one in slicers.list_slices(shared)} == {"Tesla-T4"}


@every_node
def test_slices_of_any_node_have_unique_ids_with_its_node_and_device(one: sliced.Example) -> None:
    """If it is unknown which GPU a MIG partition is on, it is its own device; DRA ids are the names of entries."""
    found = slicers.list_slices(one.node)
    assert len({slice_.id for slice_ in found}) == len(found)
    for slice_ in found:
        assert slice_.node == one.node.name
        assert slice_.id.split("/")[0] == slice_.device.split("/")[0] == slice_.node
        if slice_.kind != "dra":
            assert slice_.id.startswith(slice_.device)


@every_node
def test_renamed_node_with_reordered_labels_has_equally_named_slices(one: sliced.Example) -> None:
    """A ResourceSlice names its node itself: with DRA, another node gets no slices from it."""
    found, other = slicers.list_slices(one.node), NodeId("m")
    assert slicers.list_slices(one.node) == found
    mixed = one.node._replace(
        name=other, labels=dict(sorted(one.node.labels.items(), reverse=True)),
        annotations=dict(sorted(one.node.annotations.items(), reverse=True)),
        allocatable=dict(sorted(one.node.allocatable.items(), reverse=True)),
        devices=[renamed(each, one.node.name, other) for each in one.node.devices],
    )  # fmt: skip
    there = slicers.list_slices(mixed)
    assert [slice_.id.replace(other, one.node.name, 1) for slice_ in there] == [slice_.id for slice_ in found]
    assert {slice_.node for slice_ in there} == {other}
    if one.node.devices:
        assert slicers.list_slices(one.node._replace(name=other)) == ()


def renamed(what: Any, before: str, after: str) -> Any:
    """A copy of an API object that belongs to another node."""
    if isinstance(what, dict):
        return {key: renamed(each, before, after) for key, each in what.items()}
    if isinstance(what, list):
        return [renamed(each, before, after) for each in what]
    return after if what == before else what


@every_node
def test_open_slices_of_any_node_do_not_exceed_their_device(one: sliced.Example) -> None:
    """If only the partitions of a device are known, the size of the device is the one that they report."""
    for parts in by_device(tuple(slice_ for slice_ in slicers.list_slices(one.node) if not slice_.closed)):
        most = max(slice_.device_bytes or slice_.memory_bytes for slice_ in parts)
        assert 0 < sum(slice_.memory_bytes for slice_ in parts) <= most
        assert sum(slice_.compute_percent for slice_ in parts) <= 100


@every_node
@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_slices_of_a_node_with_malformed_data_are_closed_or_have_a_size(
    one: sliced.Example, data: st.DataObject
) -> None:
    """Other programs write annotations, and a device has the size that they report, so no bound is checked here."""

    def spoilt(texts: Mapping[str, str]) -> dict[str, str]:
        chosen = {name: data.draw(st.sampled_from((value, value, *HOSTILE))) for name, value in sorted(texts.items())}
        return {name: value for name, value in chosen.items() if data.draw(st.integers(0, 9))}

    def spoilt_object(what: Any) -> Any:
        if data.draw(st.integers(0, 19)) == 0:
            return data.draw(st.sampled_from((None, [], {}, 7, -1, *HOSTILE)))
        if isinstance(what, dict):
            return {key: spoilt_object(each) for key, each in what.items()}
        return [spoilt_object(each) for each in what] if isinstance(what, list) else what

    node = one.node._replace(
        labels=spoilt(one.node.labels), annotations=spoilt(one.node.annotations),
        allocatable=spoilt(one.node.allocatable), devices=[spoilt_object(each) for each in one.node.devices[:2]],
    )  # fmt: skip
    found = slicers.list_slices(node)
    assert len({slice_.id for slice_ in found}) == len(found)
    for slice_ in found:
        assert slice_.node == node.name
        assert slice_.closed or (slice_.memory_bytes > 0 and slice_.compute_percent > 0)
