"""Properties of every kind of slice: node, ids, names, shares, and robustness against malformed input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from autoscaler.slicing import slicer_families
from autoscaler.state.world import NodeId
from tests.support.builders import slices
from tests.support.example_budget import examples
from tests.unit.autoscaler.slicing.test_slicers import HOSTILE, by_device, every_node


@every_node
def test_slices_of_any_node_have_unique_ids_with_its_node_and_device(one: slices.Example) -> None:
    """If it is unknown which GPU a MIG partition is on, it is its own device; DRA ids are the names of entries."""
    found = slicer_families.list_slices(one.node)
    assert len({slice_.id for slice_ in found}) == len(found)
    for slice_ in found:
        assert slice_.node == one.node.name
        assert slice_.id.split("/")[0] == slice_.device.split("/")[0] == slice_.node
        if slice_.kind != "dra":
            assert slice_.id.startswith(slice_.device)


@every_node
def test_renamed_node_with_reordered_labels_has_equally_named_slices(one: slices.Example) -> None:
    """A ResourceSlice names its node itself: with DRA, another node gets no slices from it."""
    found, other = slicer_families.list_slices(one.node), NodeId("m")
    assert slicer_families.list_slices(one.node) == found
    mixed = one.node._replace(
        name=other, labels=dict(sorted(one.node.labels.items(), reverse=True)),
        annotations=dict(sorted(one.node.annotations.items(), reverse=True)),
        allocatable=dict(sorted(one.node.allocatable.items(), reverse=True)),
        devices=[renamed(each, one.node.name, other) for each in one.node.devices],
    )  # fmt: skip
    there = slicer_families.list_slices(mixed)
    assert [slice_.id.replace(other, one.node.name, 1) for slice_ in there] == [slice_.id for slice_ in found]
    assert {slice_.node for slice_ in there} == {other}
    if one.node.devices:
        assert slicer_families.list_slices(one.node._replace(name=other)) == ()


def renamed(what: Any, before: str, after: str) -> Any:
    """A copy of an API object that belongs to another node."""
    if isinstance(what, dict):
        return {key: renamed(each, before, after) for key, each in what.items()}
    if isinstance(what, list):
        return [renamed(each, before, after) for each in what]
    return after if what == before else what


@every_node
def test_open_slices_of_any_node_do_not_exceed_their_device(one: slices.Example) -> None:
    """If only the partitions of a device are known, the size of the device is the one that they report."""
    for parts in by_device(tuple(slice_ for slice_ in slicer_families.list_slices(one.node) if not slice_.closed)):
        most = max(slice_.device_bytes or slice_.memory_bytes for slice_ in parts)
        assert 0 < sum(slice_.memory_bytes for slice_ in parts) <= most
        assert sum(slice_.compute_percent for slice_ in parts) <= 100


@every_node
@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(data=st.data())
def test_node_with_malformed_data_raises_no_error_and_has_sized_slices(
    one: slices.Example, data: st.DataObject
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
    found = slicer_families.list_slices(node)
    assert len({slice_.id for slice_ in found}) == len(found)
    for slice_ in found:
        assert slice_.node == node.name
        assert slice_.closed or (slice_.memory_bytes > 0 and slice_.compute_percent > 0)
