"""Fabric planning on documents, without a service: offers, blocks chosen for an order, and listed orders.

`Any` is used where fields are passed on.
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.capacity.attachable_nodes import AttachableNode
from autoscaler.providers.redfish.planning import (
    BlockClaim,
    Fabric,
    LeaseProgress,
    build_offers,
    count_foreign_devices,
    list_attached_uuids,
    list_leases,
    plan_claim,
    plan_links,
)
from autoscaler.providers.redfish.schema import Block, BlockMark, ComputerSystem, RedfishGpu
from autoscaler.state.capacity import OFFERS_MAX, AcquireOrder, Offer
from tests.contracts.provider import OWNER, order
from tests.support.harness.providers.redfish_rig import terms

GIB = 1 << 30
OPEN = {"w1": AttachableNode("w1", 8)}
A100 = RedfishGpu("A100", 40 * GIB, "GPU-1", 250.0)


def block(path: str, **fields: Any) -> Block:
    plain = Block(path, "", "", "Unused", sound=True, reserved=False, processors=(), systems=(), zones=())
    return plain._replace(**fields)


def fabric(*pool: Block, marks: dict[str, BlockMark] | None = None, keeps: bool = True) -> Fabric:
    """A fabric with node w1, which has its own block and those that name its system."""
    own = block("own", systems=("s1",), zones=("z1",))
    blocks = {one.path: one for one in (own, *pool)}
    there = tuple(one.path for one in blocks.values() if "s1" in one.systems)
    gpus = {one.path: A100._replace(uuid=f"GPU-{one.path}") for one in pool}
    return Fabric(blocks, {"w1": ComputerSystem("s1", "", there)}, gpus, marks or {}, keeps)


def mark(name: str = "lease", *, removed: bool = False, devices: int = 1) -> BlockMark:
    return BlockMark(name, OWNER, 1, devices, "w1", "rack", gone=removed)


def wanted(devices: int = 1) -> AcquireOrder:
    of = Offer(provider="rack", name="w1/A100", product="A100", node="w1", memory_bytes=40 * GIB)
    return replace(order(of), devices=devices)


@pytest.mark.parametrize(
    "other",
    [
        block("b", systems=("s9",)),
        block("b", free_for="somebody"),
        block("b", reserved=True),
        block("b", state="Composing"),
        block("b", sound=False),
        block("b", zones=("z2",)),
    ],
    ids=["attached", "somebody's", "reserved", "under way", "broken", "of another zone"],
)
def test_only_free_healthy_blocks_in_the_zone_are_offered(other: Block) -> None:
    (offer,) = build_offers(fabric(block("a", zones=("z1", "z3")), other), terms(), OPEN)
    assert (offer.name, offer.node, offer.devices_max, offer.memory_bytes) == ("w1/A100", "w1", 1, 40 * GIB)
    assert (offer.bought, offer.price_per_hour, offer.watts, offer.expected_s) == ("fabric", 1.0, 250.0, 6.0)
    assert not build_offers(fabric(other), terms(), OPEN)


def test_offer_is_limited_by_the_free_slots_of_the_node() -> None:
    pool, full = fabric(block("a"), block("b")), {"w1": AttachableNode("w1", 1)}
    (offer,) = build_offers(pool, terms(), full)
    assert offer.devices_max == 1
    assert plan_claim(pool, wanted(2), terms(), full["w1"]).refused == "node w1 has room for 1, and the order needs 2"
    assert not build_offers(pool, terms()._replace(seen_on=lambda _: 1), full)
    assert not build_offers(fabric(block("a"), block("b"), marks={"a": mark()}), terms(), full), "one is on its way"
    assert not build_offers(pool, terms(), {}), "it is not open"


def test_offers_of_each_gpu_model_prefer_nodes_with_most_free_slots() -> None:
    names = [f"w{number:03}" for number in range(300)]
    pool = fabric(block("a"), block("b"), block("c"))
    pool = pool._replace(
        systems={name: ComputerSystem(f"s{name}", "", ()) for name in names},
        gpus={**pool.gpus, "c": A100._replace(product="L40S")},
    )
    there = {name: AttachableNode(name, 1 if number < 100 else 8) for number, name in enumerate(names)}
    found = build_offers(pool, terms(), there)
    assert len(found) == OFFERS_MAX
    assert found == build_offers(pool, terms(), dict(reversed(there.items())))
    by = {product: [one for one in found if one.product == product] for product in ("A100", "L40S")}
    assert [len(of) for of in by.values()] == [OFFERS_MAX // 2, OFFERS_MAX // 2]
    assert {one.devices_max for one in by["A100"]} == {2}
    assert [one.name for one in found] == sorted(one.name for one in found)


def test_order_without_device_uuids_requires_an_idle_node_for_release() -> None:
    a, b = block("a", systems=("s1",)), block("b", systems=("s1",))
    marks = {"a": mark("first")._replace(before=2), "b": mark("second")._replace(before=2)}
    first, second = list_leases(fabric(a, b, marks=marks), terms(), {})
    assert (first.device_ids, first.counted_from) == (("w1/GPU-a",), 2)
    assert (second.device_ids, second.counted_from) == (("w1/GPU-b",), 3)
    assert not first.alone
    assert list_leases(fabric(a, b, marks=marks), terms()._replace(reports_uuids=lambda _: False), {})[0].alone
    assert count_foreign_devices(fabric(a, b, marks=marks), "w1", terms()._replace(seen_on=lambda _: 4)) == 2
    assert count_foreign_devices(fabric(block("a")), "w1", terms()._replace(seen_on=lambda _: 4)) == 4


def test_attached_gpu_without_details_is_listed_with_an_empty_uuid() -> None:
    a, b = block("a", systems=("s1",)), block("b", systems=("s1",))
    there = fabric(a, b, marks={"a": mark(), "b": mark()})
    assert list_attached_uuids(there, "lease") == {"w1": ("GPU-a", "GPU-b")}
    assert list_attached_uuids(there._replace(gpus={"a": there.gpus["a"]}), "lease") == {"w1": ("GPU-a", "")}


def test_reversed_fabric_list_gives_the_same_blocks_for_an_order() -> None:
    names = [f"b{number}" for number in range(20)]
    there, turned = fabric(*map(block, names)), fabric(*map(block, reversed(names)))
    first = plan_claim(there, wanted(2), terms(), OPEN["w1"]).blocks
    assert first == plan_claim(turned, wanted(2), terms(), OPEN["w1"]).blocks
    other = replace(wanted(2), id=order(wanted().offer, 1).id)
    assert plan_claim(there, other, terms(), OPEN["w1"]).blocks != first


def test_partly_reserved_order_reserves_only_the_missing_blocks() -> None:
    name = wanted().id.name
    a, b = block("a"), block("b")
    assert plan_claim(fabric(a, b, marks={"a": mark(name)}), wanted(), terms(), OPEN["w1"]) == BlockClaim()
    assert plan_claim(fabric(a, b, marks={"a": mark(name)}), wanted(2), terms(), OPEN["w1"]) == BlockClaim(("b",))
    here = block("a", systems=("s1",))
    assert plan_claim(fabric(here, b, marks={"a": mark(name)}), wanted(2), terms(), OPEN["w1"]) == BlockClaim(), (
        "half of it has come"
    )
    assert plan_claim(
        fabric(here, b, marks={"a": mark(name, removed=True)}), wanted(), terms(), OPEN["w1"]
    ) == BlockClaim(("a",))


def test_order_for_unavailable_blocks_is_rejected_with_a_reason() -> None:
    assert (
        plan_claim(fabric(block("a")), wanted(2), terms(), OPEN["w1"]).refused
        == "node w1 has 1 x A100 available, and the order needs 2"
    )
    assert "cannot store" in plan_claim(fabric(block("a"), keeps=False), wanted(), terms(), OPEN["w1"]).refused
    assert (
        plan_claim(fabric(block("a")), wanted(), terms(), None).refused
        == "node w1 is not ready and schedulable, or has no system in this fabric"
    )


def test_attach_or_detach_keeps_the_blocks_linked_by_others() -> None:
    there = fabric(block("a", systems=("s1",)), block("b", systems=("s1",)), block("c"))
    assert plan_links(there, "w1", {"c"}, {"a"}) == ("own", "b", "c")
    assert plan_links(there, "w1", {"a"}, {"c"}) == ("own", "a", "b")


def test_released_block_is_listed_only_while_it_is_still_attached() -> None:
    removed = {"a": mark(removed=True)}
    assert not list_leases(fabric(block("a", free_for=mark(removed=True).text()), marks=removed), terms(), {})
    (late,) = list_leases(fabric(block("a", systems=("s1",)), marks=removed), terms(), {})
    assert (late.phase, late.device_ids) == ("here", ("w1/GPU-a",))
    assert len(build_offers(fabric(block("a", free_for=mark(removed=True).text()), marks=removed), terms(), OPEN)) == 1


def test_order_is_delivered_only_after_its_block_is_attached_and_ready() -> None:
    free, here = block("a"), block("a", systems=("s1",))

    def phase(one: Block, held: LeaseProgress) -> str:
        return next(
            (each.phase for each in list_leases(fabric(one, marks={"a": mark()}), terms(), {"lease": held})), ""
        )

    assert phase(free, LeaseProgress()) == "coming"
    assert phase(here, LeaseProgress()) == "here"
    assert phase(here._replace(state="Composing"), LeaseProgress()) == "coming"
    assert phase(here, LeaseProgress(leaving=True)) == "leaving"
    assert phase(free, LeaseProgress(failed="no")) == "failed"
    assert not phase(free, LeaseProgress(arrived=True)), "another client detached it"
