"""A capacity order as a NodeClaim: its fields, and the meaning of its conditions."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.providers.karpenter import nodeclaim, nodepool
from autoscaler.providers.kubernetes_access import Object
from autoscaler.state.capacity import Listed
from tests.support.builders.node_templates import T4_NODES, t4_order
from tests.support.fakes.kubernetes.karpenter import node_pool
from tests.support.fakes.kubernetes.kube_objects import stamp

CREATED, NOW = 1_800_000_000.0, 5_000.0


def claim(*conditions: Object, **fields: Any) -> Object:
    """One of our NodeClaims as created, a minute old."""
    pool = nodepool.read_nodepool(node_pool())
    (variant,) = nodepool.list_variants(pool, T4_NODES)
    made = nodeclaim.build_nodeclaim(t4_order(), pool, variant, {})
    made["metadata"] |= {"creationTimestamp": stamp(CREATED), "resourceVersion": "1", **fields.pop("metadata", {})}
    return {**made, "status": {"conditions": list(conditions), **fields}}


def condition(kind: str, status: str = "True", reason: str = "", message: str = "", at_s: float = CREATED) -> Object:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": stamp(at_s)}


def listed(of: Object, after_s: float = 60.0) -> Listed:
    return nodeclaim.read_lease(of, "g4", CREATED + after_s, NOW)


LAUNCHED, REGISTERED, INITIALIZED = (condition(kind) for kind in ("Launched", "Registered", "Initialized"))


def test_order_is_written_as_a_node_claim_with_the_fields_of_its_nodepool() -> None:
    pool_object = node_pool(labels={"team": "a"})
    pool_object["metadata"]["annotations"] = {
        "karpenter.sh/nodepool-hash": "1",
        "karpenter.sh/nodepool-hash-version": "v3",
    }
    pool = nodepool.read_nodepool(pool_object)
    (variant,) = nodepool.list_variants(pool, T4_NODES)
    made, order = nodeclaim.build_nodeclaim(t4_order(), pool, variant, {}), t4_order()
    metadata, spec = made["metadata"], made["spec"]
    assert metadata["name"] == order.id.name
    assert metadata["labels"] | {
        "app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/provider": "g4", "team": "a",
        "karpenter.sh/nodepool": "g4-nodepool", "karpenter.kwok.sh/kwoknodeclass": "default",
    } == metadata["labels"]  # fmt: skip
    notes = metadata["annotations"]
    assert (notes["pilotlight.dev/owner"], notes["pilotlight.dev/epoch"]) == ("llama-8b", "3")
    assert (notes["karpenter.sh/nodepool-hash"], notes["karpenter.sh/nodepool-hash-version"]) == ("1", "v3")
    assert notes["karpenter.sh/do-not-disrupt"] == "true"
    assert [(one["kind"], one["uid"]) for one in metadata["ownerReferences"]] == [("NodePool", "uid-of-g4-nodepool")]
    assert spec["resources"] == {"requests": {"nvidia.com/gpu": "1"}}
    assert spec["expireAfter"] == "720h"
    asked = {one["key"]: (one["operator"], one["values"]) for one in spec["requirements"]}
    assert len(asked) == len(spec["requirements"])
    assert asked["node.kubernetes.io/instance-type"] == ("In", ["g4dn.xlarge"])


def test_node_claim_is_read_back_as_the_same_order() -> None:
    one, order = listed(claim()), t4_order()
    assert (one.name, one.offer, one.devices, one.owner, one.epoch) == (
        order.id.name, order.offer, 1, order.owner, 3,
    )  # fmt: skip
    assert (one.phase, one.committed, one.node) == ("coming", False, "")


def test_node_claim_with_malformed_annotations_is_still_an_order() -> None:
    spoilt = claim(metadata={"annotations": {"pilotlight.dev/offer": "{", "pilotlight.dev/epoch": "x"}})
    one = listed(spoilt)
    assert (one.devices, one.epoch, one.offer.product) == (1, 0, "")


@pytest.mark.parametrize(
    ("conditions", "node", "phase", "committed"),
    [
        ((), "", "coming", False),
        ((condition("Launched", "Unknown"),), "", "coming", False),
        ((LAUNCHED,), "", "coming", True),
        ((LAUNCHED, REGISTERED), "n1", "coming", True),
        ((LAUNCHED, REGISTERED, INITIALIZED), "n1", "here", True),
        ((LAUNCHED, REGISTERED, INITIALIZED), "", "coming", True),
    ],
)
def test_order_phase_and_commitment_follow_the_node_claim_conditions(
    conditions: tuple[Object, ...], node: str, phase: str, committed: bool
) -> None:
    one = listed(claim(*conditions, nodeName=node))
    assert (one.phase, one.committed, one.node) == (phase, committed, node)


def test_launch_failure_reason_is_reported_with_the_order() -> None:
    one = listed(claim(condition("Launched", "Unknown", "LaunchFailed", "no capacity in zone a")))
    assert one.says == "LaunchFailed: no capacity in zone a"


def test_node_without_gpu_fails_600_s_after_registration() -> None:
    reported = condition("Initialized", "Unknown", "ResourceNotRegistered", 'Resource "nvidia.com/gpu" was requested')
    joined = claim(LAUNCHED, REGISTERED, reported, nodeName="n1")
    assert listed(joined, 599.0).phase == "coming"
    assert listed(joined, 600.0).phase == "failed"
    late = claim(LAUNCHED, condition("Registered", at_s=CREATED + 500), reported, nodeName="n1")
    assert listed(late, 1099.0).phase == "coming"


def test_node_claim_expiry_sets_the_order_end() -> None:
    assert listed(claim()).ends_s == NOW + 720 * 3600 - 60
    never = claim()
    never["spec"]["expireAfter"] = "Never"
    assert listed(never).ends_s is None
    del never["spec"]["expireAfter"]
    assert nodeclaim.read_lease(never, "g4", CREATED + 60, NOW, "1h30m").ends_s == NOW + 5400 - 60


def test_disrupted_order_ends_now_and_deleted_node_claim_is_leaving() -> None:
    taken = condition("DisruptionReason", "True", "Underutilized")
    one = listed(claim(LAUNCHED, REGISTERED, INITIALIZED, taken, nodeName="n1"))
    assert (one.phase, one.ends_s, one.says) == ("here", NOW, "Karpenter is removing it: Underutilized")
    removed = claim(LAUNCHED, REGISTERED, INITIALIZED, nodeName="n1", metadata={"deletionTimestamp": stamp(CREATED)})
    assert (listed(removed).phase, listed(removed).ends_s) == ("leaving", NOW)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("720h", 2_592_000.0),
        ("1h30m10s", 5410.0),
        ("Never", None),
        ("", None),
        ("5 h", None),
        ("9" * 5000 + "h", None),
        ("9" * 400 + "h", None),
        ("2562048h", None),
        ("2562047h", 9_223_369_200.0),
    ],
)
def test_karpenter_duration_is_converted_to_seconds_or_none_if_unusable(text: str, seconds: float | None) -> None:
    assert nodeclaim.parse_duration_s(text) == seconds
