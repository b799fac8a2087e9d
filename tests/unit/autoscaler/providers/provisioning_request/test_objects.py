"""ProvisioningRequest objects: which order a node belongs to, when the order ends, and why it failed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from autoscaler.contract import ModelName
from autoscaler.providers import order_annotations
from autoscaler.providers.provisioning_request import objects
from autoscaler.providers.provisioning_request.objects import (
    ATOMIC,
    CHECK,
    CONSUMED,
    GKE,
    Booking,
    CandidateNode,
    RequestCondition,
    assign_nodes,
    booking_to_lease,
)
from autoscaler.state.capacity import Offer
from autoscaler.state.world import NodeId

GRANTED = RequestCondition(holds=True, reason="CapacityIsProvisioned", message="", since_unix_s=100.0)


def booking(name: str = "a", **fields: Any) -> Booking:
    offer = Offer(provider="queue", name="l4", product="L4", memory_bytes=1, labels={"pool": "l4"})
    given = {"conditions": {"Provisioned": GRANTED}, "details": {}, "class_name": ATOMIC, "created_unix_s": 50.0}
    common = {"provider": "queue", "offer": offer, "devices": 1, "owner": ModelName("m"), "epoch": 1, "version": "1"}
    return Booking(**{"name": name, **common, "leaving": False, "node": "", **given, **fields})


def node(
    name: str = "n", created_unix_s: float = 120.0, gpus: int = 1, labels: Mapping[str, str] | None = None
) -> CandidateNode:
    return CandidateNode(NodeId(name), {"pool": "l4", **(labels or {})}, created_unix_s, gpus)


def whose(some: list[Booking], *nodes: CandidateNode, **bound: str) -> dict[str, str]:
    return assign_nodes(some, {one.name: one for one in nodes}, bound)


def test_earliest_provisioned_request_gets_the_oldest_node() -> None:
    later = booking("a", conditions={"Provisioned": GRANTED._replace(since_unix_s=110.0)})
    assert whose([later, booking("b")], node("n2", 130.0), node("n1", 120.0)) == {"b": "n1", "a": "n2"}


@pytest.mark.parametrize(
    ("one", "at"),
    [
        (booking(conditions={}), node()),
        (booking(conditions={"Provisioned": GRANTED._replace(holds=False)}), node()),
        (booking(class_name=CHECK), node()),
        (booking(details={"ResizeRequestName": "rr"}), node()),
        (booking(leaving=True), node()),
        (booking(), node(created_unix_s=49.0)),
        (booking(), node(labels={"pool": "h100"})),
    ],
    ids=[
        "not granted",
        "refused",
        "none is added",
        "the cloud reports the owner",
        "leaving",
        "was there before",
        "another pool",
    ],
)
def test_node_is_assigned_only_to_a_provisioned_request_that_matches_it(one: Booking, at: CandidateNode) -> None:
    assert whose([one], at) == {}


def test_order_uses_its_recorded_node_before_a_pod_node_or_labeled_node() -> None:
    named = {"autoscaling.gke.io/provisioning-request": "rr"}
    there = [node("n1"), node("n2"), node("n3", labels=named)]
    of_cloud = booking(details={"ResizeRequestName": "rr"}, class_name=GKE)
    assert whose([of_cloud], *there) == {"a": "n3"}
    assert whose([of_cloud], *there, a="n2") == {"a": "n2"}
    assert whose([of_cloud._replace(node="n1")], *there, a="n2") == {"a": "n1"}


def test_node_recorded_for_a_request_is_not_assigned_to_another_request() -> None:
    assert whose([booking("a", node="n"), booking("b")], node()) == {"a": "n"}


def test_expired_booking_fails_unless_consumed_or_its_node_exists() -> None:
    expired = RequestCondition(holds=True, reason="CapacityReservationTimeExpired", message="", since_unix_s=1.0)
    late = booking(conditions={"Provisioned": GRANTED, "BookingExpired": expired})
    assert booking_to_lease(late, None, "", None).phase == "failed"
    used = booking(conditions={"Provisioned": GRANTED, "BookingExpired": expired._replace(reason=CONSUMED)})
    assert booking_to_lease(used, None, "", None).phase == "coming"
    assert booking_to_lease(late, node(), "n", None).phase == "here"


def test_provisioned_request_is_committed_unless_it_only_checks_capacity() -> None:
    assert booking_to_lease(booking(), None, "", None).committed
    assert not booking_to_lease(booking(class_name=CHECK), None, "", None).committed
    assert not booking_to_lease(booking(conditions={}), None, "", None).committed


def test_provisioning_request_that_is_not_accepted_fails_its_order() -> None:
    refused = RequestCondition(holds=False, reason="BadClass", message="no such class", since_unix_s=1.0)
    shown = booking_to_lease(booking(conditions={"Accepted": refused}), None, "", None)
    assert (shown.phase, shown.says) == ("failed", "its request was not accepted (BadClass: no such class)")


def test_exhausted_quota_is_detected_in_reason_or_message() -> None:
    for reason, message in (("QUOTA_EXCEEDED", ""), ("Waiting", "GCE: quota 'GPUS_ALL_REGIONS' exceeded")):
        reported = RequestCondition(holds=False, reason=reason, message=message, since_unix_s=1.0)
        one = booking(conditions={"Provisioned": reported})
        assert objects.is_quota_exhausted(one)
        assert booking_to_lease(one, None, "", None).says.startswith("the quota of the cloud is used up (")


def test_order_ends_after_the_offer_duration_or_at_revocation() -> None:
    offer = Offer(provider="queue", name="l4", product="L4", memory_bytes=1, lasts_s=60.0)
    assert objects.ends_unix_s(booking()) is None
    assert objects.ends_unix_s(booking(offer=offer)) == 160.0
    assert objects.ends_unix_s(booking(offer=offer, conditions={})) is None
    revoked = RequestCondition(holds=True, reason="Preempted", message="", since_unix_s=120.0)
    both = {"Provisioned": GRANTED, "CapacityRevoked": revoked}
    assert objects.ends_unix_s(booking(offer=offer, conditions=both)) == 120.0


def test_invalid_or_long_provider_name_becomes_a_valid_label_value() -> None:
    assert order_annotations.provider_label_value("team/queue:1") == "team-queue-1"
    assert len(order_annotations.provider_label_value("q" * 253)) == 63
