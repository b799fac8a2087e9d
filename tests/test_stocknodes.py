"""What a node is like, and what a request takes of it."""

from __future__ import annotations

import pytest

from autoscaler.placement.index.arrays import LANES_MAX, PERCENT_MAX, Load, Node, checked, load_of
from autoscaler.state.resources import BYTES_MAX, CPU_MAX, Kind, Lane, Room


def lanes(*sizes: int) -> tuple[Lane, ...]:
    return tuple(map(Lane, sizes))


def test_a_request_takes_of_each_of_its_lanes_and_beside_them() -> None:
    node = Node("a", (Lane(1000, "x"), Lane(2000, "y"), Lane(1000, "y")))
    kind = Kind(memory_bytes=300, devices=2, cpu_milli=7, host_bytes=9)
    assert load_of(kind, node, (1, 2)) == Load((Room(2000, 100), Room(1000, 100)), 7, 9), "whole ones"
    with pytest.raises(ValueError, match="can never be on node a"):
        load_of(Kind(memory_bytes=1001), node, (1, 2))


def test_what_a_node_may_have_at_most_it_may_have() -> None:
    checked(Node("a", (Lane(BYTES_MAX, compute_percent=PERCENT_MAX, price=0.0),) * LANES_MAX, CPU_MAX, BYTES_MAX))
    checked(Node("a", (), 0, 0))


@pytest.mark.parametrize(
    "node",
    [
        Node("a", lanes(0)), Node("a", lanes(-1)), Node("a", lanes(BYTES_MAX + 1)),
        Node("a", lanes(1) * (LANES_MAX + 1)),
        Node("a", lanes(1), cpu_milli=-1), Node("a", lanes(1), cpu_milli=CPU_MAX + 1),
        Node("a", lanes(1), host_bytes=-1), Node("a", (Lane(1, compute_percent=-1),)),
        Node("a", (Lane(1, compute_percent=PERCENT_MAX + 1),)), Node("a", (Lane(1, price=-0.1),)),
        Node("a", (Lane(1, price=float("nan")),)), Node("a", (Lane(1, price=float("inf")),)),
    ],
)  # fmt: skip
def test_what_no_node_is_like_is_one_clear_error(node: Node) -> None:
    with pytest.raises(ValueError, match=r"^node a: lanes are 1 to "):
        checked(node)
