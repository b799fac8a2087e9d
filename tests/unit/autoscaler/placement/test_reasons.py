"""Reasons for unmet placement requests: they name the missing resource and nothing else."""

from __future__ import annotations

import pytest

from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.model.types import Bin, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import HostResources, Isolation, ResourceAmount
from autoscaler.state.world import NodeId
from tests.support.builders.placement_requests import change_request
from tests.support.builders.worlds import GI, T0, device
from tests.unit.autoscaler.placement.test_packer import on, run, shelf, want

TWO = want("a", 20, devices=2)
KEPT = on("x", 20, kept=True)
HALF = on("x", 4, 50, kept=True)


def part(name: str, memory_gi: int, isolation: Isolation = Isolation.NONE) -> Bin:
    """A part of a device."""
    made = shelf(device(name, memory_gi, isolation=isolation, compute_percent=50))
    return Bin(
        slice=made.slice, whole=False, incumbents=(), free=made.free, coming=ResourceAmount(0, 0), locked=False
    )  # fmt: skip


NOW = [
    (
        TWO,
        [shelf(device("g0")), shelf(device("g1"), KEPT), shelf(device("g2", node="n1"))],
        (
            "needs 2 whole devices of 20Gi on one node; the node with the most free devices has 1: g1 is held by x "
            "(idle, kept by replicas.min)"
        ),
    ),
    (
        change_request(TWO, devices=5),
        [shelf(device(f"g{number}"), *[KEPT] * (number > 0)) for number in range(6)],
        "needs 5 whole devices of 20Gi on one node; the node with the most free devices has 1: "
        + ", ".join(f"g{number} is held by x (idle, kept by replicas.min)" for number in (1, 2, 3))
        + ", 2 more are not free",
    ),
    (
        TWO,
        [shelf(device("g0")), shelf(device("g1", healthy=False))],
        "needs 2 whole devices of 20Gi on one node; no node has that many healthy devices",
    ),
    (
        want("a", 4, compute_percent=60),
        [shelf(device("g0"), HALF)],
        (
            "needs 4Gi and 60 % of compute on one device; the largest has 20Gi and 50 % of compute free of 24Gi and "
            "100 %, held by x (idle, kept by replicas.min)"
        ),
    ),
]
NEVER = [
    (
        want("a", 4, compute_percent=60),
        [part("g0", 8)],
        "needs 4Gi and 60 % of compute on one device; the largest has 8Gi and 50 % of compute",
    ),
    (want("a", 0), [part("g0", 8)], "needs a whole device; every slice of that size is a part of a device"),
    (
        change_request(TWO, memory_bytes=4 * GI),
        [part("g0", 8), part("g1", 8)],
        "needs 2 whole devices of 4Gi; every slice of that size is a part of a device",
    ),
    (
        want("a", 4, isolation=Isolation.HARDWARE),
        [part("g0", 8, Isolation.MEMORY)],
        (
            "needs 4Gi on one device with hardware isolation; every slice of that size is a part of a device without "
            "this isolation"
        ),
    ),
    (
        want("a", 9, isolation=Isolation.HARDWARE),
        [part("g0", 8, Isolation.MEMORY)],
        "needs 9Gi on one device with hardware isolation; the largest has 8Gi",
    ),
]


@pytest.mark.parametrize(("asked", "there", "reason"), NOW)
def test_reason_for_an_unplaced_replica_names_the_scarce_resource(
    asked: PlacementRequest, there: list[Bin], reason: str
) -> None:
    (missing,) = run([asked], there).unmet
    assert (missing.reason, missing.never) == (reason, False)


@pytest.mark.parametrize(("asked", "there", "reason"), NEVER)
def test_reason_names_a_requirement_that_no_device_meets(
    asked: PlacementRequest, there: list[Bin], reason: str
) -> None:
    (missing,) = run([asked], there).unmet
    assert (missing.reason, missing.never) == (reason, True)


def test_reason_names_the_cpu_shortage_of_a_node_with_free_devices() -> None:
    yard = SliceIndex(
        [shelf(device("g0")), shelf(device("g1"))], {NodeId("n0"): HostResources(8000, 64 * GI, 2000, 64 * GI)}
    )
    (missing,) = pack([change_request(TWO, cpu_milli=4000)], yard, frozenset(), RestartCosts(), T0).unmet
    assert missing.reason == (
        "needs 2 whole devices of 20Gi on one node, with 4 cores; node n0 has too little CPU: 2 cores left of 8 cores"
    )
