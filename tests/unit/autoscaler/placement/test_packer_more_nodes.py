"""Adding a node never displaces a waiting replica, with the exceptions that are tested here."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.residual_waste_tables import build_untrained_estimate
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import HostResources, Isolation
from autoscaler.state.world import Copy, NodeId
from tests.support.builders.placement_requests import change_request, placement_request
from tests.support.builders.worlds import GI, T0, device
from tests.support.example_budget import examples
from tests.unit.autoscaler.placement.test_packer import incumbents, shelf

NODES = [NodeId(f"n{at}") for at in range(7)]
TAUGHT = build_untrained_estimate({200: 1.0, 400: 2.0})
COPIES = frozenset(Copy(artifact="file:///a", node=node) for node in NODES[::2])


@st.composite
def nodes(draw: st.DrawFn) -> list[tuple[Bin, HostResources]]:
    """Nodes of one device each, with various sizes, products, prices and usage; the first one is the added node."""
    made: list[tuple[Bin, HostResources]] = []
    for at in range(draw(st.integers(2, 7))):
        zone = {"zone": draw(st.sampled_from(["x", "y"]))}
        slice_ = device(f"g{at}", draw(st.sampled_from([24, 24, 48])), NODES[at], labels=zone, labels_known=True)
        slice_ = replace(slice_, product=draw(st.sampled_from(["L4", "H100"])), shared=draw(st.integers(0, 3)) > 0)
        there: tuple[Occupant, ...] = draw(incumbents(at)) if slice_.shared else ()
        one = shelf(slice_, *there, locked=draw(st.integers(0, 5)) == 0)
        one.price = draw(st.sampled_from([0.0, 1.0]))
        cpu_milli = draw(st.sampled_from([1000, 4000]))
        made.append((one, HostResources(4000, 64 * GI, cpu_milli, 64 * GI)))
    return made


@st.composite
def wanted(draw: st.DrawFn) -> list[PlacementRequest]:
    """Placement requests for one device each."""
    return [
        placement_request(
            draw(st.sampled_from("abcdef")),
            ordinal,
            memory_bytes=draw(st.sampled_from([0, 2, 5, 9, 20, 30])) * GI,
            compute_percent=draw(st.sampled_from([0, 40])),
            isolation=draw(st.sampled_from([Isolation.NONE, Isolation.NONE, Isolation.HARDWARE])),
            products=draw(st.sampled_from([(), ("h100",), ("l4", "h100")])),
            priority=draw(st.integers(0, 2)),
            force=draw(st.sampled_from(list(EvictionLevel))),
            artifact=draw(st.sampled_from(["", "file:///a"])),
            selector=draw(st.sampled_from([(), (), (("zone", "x"),)])),
            cpu_milli=draw(st.sampled_from([0, 2000])),
        )
        for ordinal in range(draw(st.integers(1, 7)))
    ]


def packed(requests: Iterable[PlacementRequest], there: Iterable[tuple[Bin, HostResources]]) -> PackResult:
    there = list(there)
    yard = SliceIndex([one for one, _ in there], {one.slice.node: host for one, host in there}, TAUGHT)
    return pack(tuple(requests), yard, COPIES, RestartCosts(), T0)


def placed(packing: PackResult) -> set[int]:
    """The ordinals of the placed requests."""
    return {one.want.ordinal for one in packing.placements}


@settings(derandomize=True, deadline=None, max_examples=examples(120))
@given(wanted(), nodes())
def test_extra_node_keeps_all_placements_if_each_node_has_one_device(
    wants: list[PlacementRequest], there: list[tuple[Bin, HostResources]]
) -> None:
    """Holds in order of service: each device starts one replica at a time, so with the added node there is always
    one more device available, and a replica that uses it leaves its former device to another.
    """
    assert placed(packed(wants, there[1:])) <= placed(packed(wants, there))


def test_extra_node_may_displace_a_replica_queued_after_a_two_device_one() -> None:
    """With z both devices are free for `two`, which is served before `late`. Without z it had none, and `late` one.
    Order of service is more important than losing no placement: otherwise `two` could wait for ever.
    """
    node = [shelf(device("g0", 24, "n0")), shelf(device("g1", 24, "n0"))]
    small, two = (placement_request("small", 0, memory_bytes=2 * GI), placement_request("two", 1, devices=2))
    late = placement_request("late", 2, memory_bytes=20 * GI)
    requests = [change_request(small, priority=2), change_request(two, priority=1), late]
    assert names(requests, node) == {"small": ("g0",), "late": ("g1",)}
    assert names(requests, [*node, shelf(device("z", 10, "z"))]) == {"small": ("z",), "two": ("g0", "g1")}


def names(requests: Iterable[PlacementRequest], there: Iterable[Bin]) -> dict[str, tuple[str, ...]]:
    """Model -> the Slices on which it is placed."""
    made = pack(tuple(requests), SliceIndex(there, None, TAUGHT), frozenset(), RestartCosts(), T0)
    return {one.want.model: one.slices for one in made.placements}
