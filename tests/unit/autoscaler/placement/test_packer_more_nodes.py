"""More nodes never leave out who was placed: for Replicas that wait, as far as it is true, and where it is not."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from autoscaler.contract import ModelName
from autoscaler.placement.index.index import SliceIndex
from autoscaler.placement.index.residual_waste import build_untrained_estimate
from autoscaler.placement.model.types import Bin, EvictionLevel, Occupant, PackResult, PlacementRequest, RestartCosts
from autoscaler.placement.packer import pack
from autoscaler.state.resources import HostResources, Isolation
from autoscaler.state.world import Copy, NodeId
from tests.kit.budget import examples
from tests.kit.worlds import GI, T0, device
from tests.unit.autoscaler.placement.test_packer import incumbents, shelf

NODES = [NodeId(f"n{at}") for at in range(7)]
TAUGHT = build_untrained_estimate({200: 1.0, 400: 2.0})
COPIES = frozenset(Copy(artifact="file:///a", node=node) for node in NODES[::2])


@st.composite
def nodes(draw: st.DrawFn) -> list[tuple[Bin, HostResources]]:
    """Of one Device each, of several sizes, products and prices, in part use; the first is the one that is added."""
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
    """Of one Device each."""
    return [
        PlacementRequest(
            model=draw(st.sampled_from([ModelName(name) for name in "abcdef"])),
            ordinal=ordinal,
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


def packed(wants: Iterable[PlacementRequest], there: Iterable[tuple[Bin, HostResources]]) -> PackResult:
    there = list(there)
    yard = SliceIndex([one for one, _ in there], {one.slice.node: host for one, host in there}, TAUGHT)
    return pack(tuple(wants), yard, COPIES, RestartCosts(), T0)


def placed(packing: PackResult) -> set[int]:
    """By their numbers."""
    return {one.want.ordinal for one in packing.placements}


@settings(derandomize=True, deadline=None, max_examples=examples(120))
@given(wanted(), nodes())
def test_extra_node_displaces_no_replica_if_nodes_have_one_device(
    wants: list[PlacementRequest], there: list[tuple[Bin, HostResources]]
) -> None:
    """Of all who wait, in the order in which they go: with the node there is always one Device more to be had than
    without it, since one starts at a time on each; who takes that leaves the one that it had before instead.
    """
    assert placed(packed(wants, there[1:])) <= placed(packed(wants, there))


def test_extra_node_may_displace_a_replica_behind_a_multi_device_one() -> None:
    """With z there is room for both Devices of `two`, which goes before `late` and had none; `late` had one of these.
    Order of service counts more than that nobody loses: to promise both would be to keep `two` waiting for ever.
    """
    node = [shelf(device("g0", 24, "n0")), shelf(device("g1", 24, "n0"))]
    small, two = (
        PlacementRequest(ModelName("small"), 0, memory_bytes=2 * GI),
        PlacementRequest(ModelName("two"), 1, devices=2),
    )
    late = PlacementRequest(ModelName("late"), 2, memory_bytes=20 * GI)
    wants = [small._replace(priority=2), two._replace(priority=1), late]
    assert names(wants, node) == {"small": ("g0",), "late": ("g1",)}
    assert names(wants, [*node, shelf(device("z", 10, "z"))]) == {"small": ("z",), "two": ("g0", "g1")}


def names(wants: Iterable[PlacementRequest], there: Iterable[Bin]) -> dict[str, tuple[str, ...]]:
    """Who is placed where."""
    made = pack(tuple(wants), SliceIndex(there, None, TAUGHT), frozenset(), RestartCosts(), T0)
    return {one.want.model: one.slices for one in made.placements}
