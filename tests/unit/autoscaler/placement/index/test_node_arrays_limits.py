"""Capacity limits of a node, and what a request takes from a node."""

from __future__ import annotations

import pytest

from autoscaler.placement.index.node_search import (
    LANES_MAX,
    PERCENT_MAX,
    NodeCapacity,
    RequestUsage,
    compute_request_usage,
    validate_node,
)
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, RequestShape, ResourceAmount, SliceClass


def lanes(*sizes: int) -> tuple[SliceClass, ...]:
    return tuple(map(SliceClass, sizes))


def test_two_device_replica_uses_both_devices_whole_and_its_cpu_and_memory() -> None:
    node = NodeCapacity("a", (SliceClass(1000, "x"), SliceClass(2000, "y"), SliceClass(1000, "y")))
    kind = RequestShape(memory_bytes=300, devices=2, cpu_milli=7, host_bytes=9)
    assert compute_request_usage(kind, node, (1, 2)) == RequestUsage(
        (ResourceAmount(2000, 100), ResourceAmount(1000, 100)), 7, 9
    ), "whole ones"
    with pytest.raises(ValueError, match="does not fit on node a, even if it is empty"):
        compute_request_usage(RequestShape(memory_bytes=1001), node, (1, 2))


def test_node_at_the_maximum_capacity_is_valid() -> None:
    validate_node(
        NodeCapacity(
            "a", (SliceClass(BYTES_MAX, compute_percent=PERCENT_MAX, price=0.0),) * LANES_MAX, CPU_MAX, BYTES_MAX
        )
    )
    validate_node(NodeCapacity("a", (), 0, 0))


@pytest.mark.parametrize(
    "node",
    [
        NodeCapacity("a", lanes(0)),
        NodeCapacity("a", lanes(-1)),
        NodeCapacity("a", lanes(BYTES_MAX + 1)),
        NodeCapacity("a", lanes(1) * (LANES_MAX + 1)),
        NodeCapacity("a", lanes(1), cpu_milli=-1),
        NodeCapacity("a", lanes(1), cpu_milli=CPU_MAX + 1),
        NodeCapacity("a", lanes(1), host_bytes=-1),
        NodeCapacity("a", (SliceClass(1, compute_percent=-1),)),
        NodeCapacity("a", (SliceClass(1, compute_percent=PERCENT_MAX + 1),)),
        NodeCapacity("a", (SliceClass(1, price=-0.1),)),
        NodeCapacity("a", (SliceClass(1, price=float("nan")),)),
        NodeCapacity("a", (SliceClass(1, price=float("inf")),)),
    ],
)
def test_invalid_node_capacity_is_rejected_with_the_node_name(node: NodeCapacity) -> None:
    with pytest.raises(ValueError, match=r"^node a is out of bounds: "):
        validate_node(node)
