"""Properties and prices of nodes that could be added."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.providers.future_nodes import OfferTerms, Shape, build_node_kind_offers, build_offer, infer_node_shape
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind, NodeSlicing, Price, Settings
from autoscaler.state.capacity import Offer
from autoscaler.state.node_labels_and_taints import Taint
from tests.support.builders.worlds import GI

QUEUED = OfferTerms(2, 300.0, bought="spot")


def kind(count: int = 1, model: str = "A10G", selector: dict[str, str] | None = None, **slicing: Any) -> NodeKind:
    how = NodeSlicing(**slicing) if slicing else None
    device = NodeDevice(model=model, memory_bytes=Bytes(24 * GI), count=count)
    return NodeKind(selector=selector or {}, device=device, slicing=how)


def queued(*kinds: NodeKind, selector: dict[str, str] | None = None, terms: OfferTerms = QUEUED) -> list[Offer]:
    prices = (Price(device="T4", per_hour=0.2, bought="spot"), Price(device="T4", per_hour=0.5))
    return [*build_node_kind_offers("queue", selector or {}, terms, Settings(nodes=kinds, prices=prices))]


@pytest.mark.parametrize(
    ("slicing", "parts", "shared", "counted"),
    [
        ({}, 1, False, True),
        ({"kind": "whole"}, 1, False, True),
        ({"kind": "mps", "replicas": 4}, 4, False, True),
        ({"kind": "hami"}, 1, True, True),
        ({"kind": "dra"}, 1, False, False),
        ({"kind": "dra", "sharing": "mps"}, 1, True, False),
    ],
)
def test_offered_node_has_the_gpu_shares_of_its_slicing_setting(
    slicing: dict[str, Any], parts: int, shared: bool, counted: bool
) -> None:
    found = infer_node_shape({}, kind(**slicing))
    assert found is not None
    assert (found.parts, found.shared, found.counted) == (parts, shared, counted)


def test_new_node_with_mig_or_dra_partitions_is_not_offered() -> None:
    assert infer_node_shape({}, kind(kind="mig")) is None
    assert infer_node_shape({}, kind(kind="dra", cut=True)) is None


def test_gpu_node_labels_override_the_settings_entry() -> None:
    labels = {"nvidia.com/gpu.product": "NVIDIA-A10G", "nvidia.com/gpu.memory": "23028", "nvidia.com/gpu.count": "4"}
    assert infer_node_shape(labels, kind(2)) == ("NVIDIA-A10G", 23028 << 20, 4, 1, False, True)
    assert infer_node_shape({"nvidia.com/gpu.memory": "much", "nvidia.com/gpu.count": "-1"}, None) is None


def test_spot_offer_has_the_spot_price_and_a_lower_certainty() -> None:
    settings = Settings(prices=(
        Price(device="A10G", per_hour=0.4, bought="spot"), Price(device="A10G", per_hour=1.0),
        Price(device="A10G", per_hour=0.6, bought="committed"), Price(device="A10G", per_hour=0.8, bought="flex"),
    ))  # fmt: skip
    taints = (
        Taint("nvidia.com/gpu", "true", "NoSchedule"), Taint("team", "a", "NoSchedule"),
        Taint("b", "", "PreferNoSchedule"),
    )  # fmt: skip
    of = Shape("A10G", 24 * GI, 4)
    spot = build_offer(
        "g5", "g5/spot", of, {"karpenter.sh/capacity-type": "spot"}, OfferTerms(3, taints=taints), settings
    )
    there = build_offer("g5", "g5/on-demand", of, {}, OfferTerms(3), settings)
    assert (spot.price_per_hour, there.price_per_hour) == (0.4, 1.0)
    paid = {"pilotlight.dev/class": "committed"}
    assert build_offer("g5", "paid", of, paid, OfferTerms(3), settings).price_per_hour == 0.6
    assert build_offer("g5", "flex", of, paid, OfferTerms(3, bought="flex"), settings).price_per_hour == 0.8, (
        "the provider decides that"
    )
    assert spot.confidence < there.confidence
    assert spot.taints == (Taint("team", "a", "NoSchedule"),)
    assert (spot.devices_min, spot.devices_max, spot.many, spot.node) == (4, 4, 3, "")


def test_settings_entries_with_conflicting_labels_are_not_offered() -> None:
    t4, a100, l4 = (
        kind(model="T4", selector={"zone": "a"}),
        kind(selector={"pool": "a100"}),
        kind(selector={"zone": "b"}),
    )
    found = queued(t4, a100, l4, selector={"pool": "t4"})
    assert [one.labels for one in found] == [{"zone": "a", "pool": "t4"}, {"zone": "b", "pool": "t4"}]


def test_settings_entry_shadowed_by_an_earlier_match_is_not_offered() -> None:
    t4, l4 = kind(model="T4", selector={"pool": "t4"}), kind(model="L4", selector={"zone": "b"})
    assert [one.product for one in queued(t4, l4, selector={"pool": "t4"})] == ["T4"]


def test_queue_offers_no_node_with_labels_of_two_products() -> None:
    """Each label exists, but never both on one node: the other entries of `nodes` determine that."""
    h100, l4 = kind(8, "H100", {"pool": "dws"}), kind(model="L4", selector={"gpu": "l4"})
    assert [one.product for one in queued(h100, l4, selector={"gpu": "l4"})] == ["L4"]
    assert [one.product for one in queued(h100, l4, selector={"pool": "dws"})] == ["H100"]
    shared = kind(8, "H100", {"pool": "dws", "share": "yes"}, kind="timeslice", replicas=2)
    assert [one.parts for one in queued(shared, h100, selector={"pool": "dws"})] == [2, 1], "of one, shared and not"
    others = kind(model="T4")
    assert [one.product for one in queued(h100, others, selector={"zone": "a"})] == ["H100", "T4"], "all that are left"


def test_offer_name_does_not_depend_on_the_sequence_of_settings_entries() -> None:
    one, other = kind(2, "NVIDIA L4", {"pool": "l4"}), kind(1, "T4", {"pool": "t4"})
    names = {offer.product: offer.name for offer in queued(one, other)}
    assert names == {offer.product: offer.name for offer in queued(other, one)}
    assert names["NVIDIA L4"].startswith("nvidia-l4-x2-")


def test_queue_offer_has_the_price_of_its_capacity_type_and_owned_is_free() -> None:
    assert [one.price_per_hour for one in queued(kind(model="T4"))] == [0.2]
    assert [one.price_per_hour for one in queued(kind(model="T4"), terms=QUEUED._replace(bought="owned"))] == [0.0]


def test_booking_on_an_existing_node_is_offered_for_any_device_count() -> None:
    (node,), (room,) = queued(kind(4)), queued(kind(4), terms=QUEUED._replace(whole=False))
    assert (node.devices_min, node.devices_max) == (4, 4)
    assert (room.devices_min, room.devices_max) == (1, 4)
    assert room.watts == 0.0 < node.watts


@pytest.mark.parametrize("slicing", [{"kind": "mig"}, {"kind": "dra"}])
def test_queue_offers_nothing_for_mig_or_dra_slicing(slicing: dict[str, Any]) -> None:
    assert queued(kind(**slicing)) == []


def test_queue_offer_has_the_device_shares_of_its_settings_entry() -> None:
    (timeslice,), (hami,) = queued(kind(kind="timeslice", replicas=3)), queued(kind(kind="hami"))
    assert ((timeslice.parts, timeslice.shared), (hami.parts, hami.shared)) == ((3, False), (1, True))
