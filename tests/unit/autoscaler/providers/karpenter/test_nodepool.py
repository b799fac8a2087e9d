"""NodePools: which of the nodes described in Settings they can add, and how many more."""

from __future__ import annotations

from typing import Any

import pytest

from autoscaler.providers.karpenter import nodepool
from autoscaler.providers.karpenter.nodepool import NodePool, Variant
from autoscaler.providers.kubernetes_access import Object
from autoscaler.spec.quantity import Bytes
from autoscaler.spec.settings import NodeDevice, NodeKind
from tests.support.builders.node_templates import T4_NODES
from tests.support.builders.worlds import GI
from tests.support.fakes.kubernetes.karpenter import node_pool

TYPE, BOUGHT = "node.kubernetes.io/instance-type", "karpenter.sh/capacity-type"


def requirement(key: str, operator: str, *values: str) -> Object:
    return {"key": key, "operator": operator, "values": list(values)}


def pool(*requirements: Object, labels: dict[str, str] | None = None, **spec: Any) -> NodePool:
    template = {"requirements": list(requirements)}
    return nodepool.read_nodepool(node_pool(template=template, labels=labels or {}, **spec))


def kind(selector: dict[str, str], count: int = 1) -> NodeKind:
    return NodeKind(selector=selector, device=NodeDevice(model="A10G", memory_bytes=Bytes(24 * GI), count=count))


def claim(gpus: str, capacity: bool = True) -> Object:
    has = {"capacity": {"nvidia.com/gpu": gpus}} if capacity else {}
    return {"spec": {"resources": {"requests": {"nvidia.com/gpu": "1"}}}, "status": has}


def one(found: tuple[Variant, ...]) -> Variant:
    (variant,) = found
    return variant


def test_nodepool_offer_has_the_gpus_of_its_settings_entry() -> None:
    found = one(nodepool.list_variants(nodepool.read_nodepool(node_pool()), T4_NODES))
    assert (found.name, found.labels[BOUGHT]) == ("g4dn.xlarge/on-demand", "on-demand")
    assert found.shape == ("T4", 16 * GI, 1, 3, False, True)
    assert found.labels[TYPE] == "g4dn.xlarge"
    assert found.labels["karpenter.sh/nodepool"] == "g4-nodepool"


def test_nodepool_labels_define_the_gpus_of_nodes_missing_from_settings() -> None:
    gfd = {
        "nvidia.com/gpu.product": "NVIDIA-A10G-SHARED", "nvidia.com/gpu.memory": "24576", "nvidia.com/gpu.count": "4",
        "nvidia.com/gpu.replicas": "2",
    }  # fmt: skip
    assert one(nodepool.list_variants(pool(labels=gfd), ())).shape == ("NVIDIA-A10G", 24 * GI, 4, 2, False, True)
    assert not nodepool.list_variants(pool(), ())


@pytest.mark.parametrize(
    ("requirements", "labels", "admitted"),
    [
        ([requirement(TYPE, "In", "g5.xlarge", "g5.2xlarge")], {}, True),
        ([requirement(TYPE, "In", "g6.xlarge")], {}, False),
        ([requirement(TYPE, "In", "g5.xlarge")], {}, True),
        ([requirement(TYPE, "NotIn", "g5.xlarge")], {}, False),
        ([requirement(TYPE, "Exists")], {}, True),
        ([requirement(TYPE, "DoesNotExist")], {}, False),
        ([], {}, True),
        ([], {TYPE: "g6.xlarge"}, False),
    ],
)
def test_node_type_is_offered_only_if_nodepool_requirements_admit_it(
    requirements: list[Object], labels: dict[str, str], admitted: bool
) -> None:
    found = nodepool.list_variants(pool(*requirements, labels=labels), (kind({TYPE: "g5.xlarge"}),))
    assert bool(found) == admitted


def test_custom_selector_label_must_be_a_nodepool_label_or_requirement() -> None:
    assert not nodepool.list_variants(pool(), (kind({"team": "a"}),))
    assert nodepool.list_variants(pool(labels={"team": "a"}), (kind({"team": "a"}),))
    assert nodepool.list_variants(pool(requirement("team", "Exists")), (kind({"team": "a"}),))


def test_node_type_is_offered_if_its_label_meets_a_numeric_requirement() -> None:
    cpu = kind({"karpenter.k8s.aws/instance-cpu": "8"})
    for operator, bound, admitted in (("Gt", "7", True), ("Gt", "8", False), ("Lt", "9", True), ("Gte", "8", True)):
        found = nodepool.list_variants(pool(requirement("karpenter.k8s.aws/instance-cpu", operator, bound)), (cpu,))
        assert bool(found) == admitted, (operator, bound)


def test_each_capacity_type_is_offered_separately_and_default_is_on_demand() -> None:
    both = pool(requirement(BOUGHT, "In", "spot", "on-demand"))
    found = nodepool.list_variants(both, (kind({TYPE: "g5.xlarge"}),))
    assert {variant.labels[BOUGHT] for variant in found} == {"spot", "on-demand"}
    assert one(nodepool.list_variants(pool(), (kind({TYPE: "a"}),))).labels[BOUGHT] == "on-demand"


def test_first_matching_settings_entry_defines_the_devices_per_node() -> None:
    kinds = (kind({TYPE: "g5.xlarge"}, count=2), kind({}, count=9))
    found = nodepool.list_variants(pool(requirement(TYPE, "In", "g5.xlarge")), kinds)
    assert [variant.shape.devices for variant in found] == [2]
    kinds = (kind({"team": "a"}, count=2), kind({TYPE: "g5.xlarge"}, count=9))
    found = nodepool.list_variants(pool(requirement(TYPE, "In", "g5.xlarge", "g6.xlarge"), labels={"team": "a"}), kinds)
    assert [variant.shape.devices for variant in found] == [2], "such a node would be read as the first"


def left(limits: dict[str, str], *claims: Object, used: dict[str, str] | None = None) -> int:
    found = nodepool.read_nodepool({**node_pool(limits=limits), "status": {"resources": used or {}}})
    return nodepool.count_remaining_nodes(found, one(nodepool.list_variants(found, T4_NODES)).shape, claims)


def test_nodepool_limits_count_the_higher_of_status_and_node_claim_usage() -> None:
    gpus = {"nvidia.com/gpu": "4"}
    assert left(gpus) == 4
    assert left(gpus, used={"nvidia.com/gpu": "3"}) == 1
    assert left(gpus, claim("1"), claim("1", capacity=False), used={"nvidia.com/gpu": "1"}) == 2
    assert left({"nvidia.com/gpu": "9"}, claim("3")) == 2
    assert left({"nodes": "2"}, claim("1")) == 1
    assert left({"cpu": "8"}, used={"cpu": "8"}) == 0
    assert left({"nvidia.com/gpu": "3", "nodes": "9"}) == 3
    assert left({}) == nodepool.MANY_MAX


def launched(cpu: str, gpus: str = "1") -> Object:
    return {"spec": {}, "status": {"capacity": {"cpu": cpu, "memory": "16Gi", "nvidia.com/gpu": gpus}}}


@pytest.mark.parametrize("limits", [{"cpu": "96"}, {"memory": "1Ti"}, {"cpu": "96", "memory": "1Ti"}])
def test_unknown_node_size_allows_only_one_pending_node(limits: dict[str, str]) -> None:
    coming = claim("1", capacity=False)
    assert left(limits) == 1
    assert [left(limits, *[coming] * many) for many in (1, 2, 7)] == [0, 0, 0]
    assert left(limits, launched("4")) > 1
    assert left({"cpu": "0"}) == 0


def test_pending_node_counts_toward_limits_like_the_largest_launched_node() -> None:
    coming = claim("1", capacity=False)
    assert left({"cpu": "40"}, launched("8"), launched("4")) == 3
    assert left({"cpu": "40"}, launched("8"), launched("4"), coming, coming) == 1
    assert left({"cpu": "40"}, launched("8"), coming, used={"cpu": "32"}) == 1
    assert left({"cpu": "40", "nvidia.com/gpu": "3"}, launched("8"), coming) == 1


def test_pending_node_size_is_not_inferred_from_nodes_with_fewer_gpus() -> None:
    coming: Object = {"spec": {"resources": {"requests": {"nvidia.com/gpu": "8"}}}}
    assert left({"cpu": "400"}, launched("4"), coming) == 0
    assert left({"cpu": "400"}, launched("4"), launched("96", "8"), coming) == 2
    assert left({"cpu": "400"}, launched("4", "0")) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {"metadata": {"deletionTimestamp": "2027-01-01T00:00:00Z"}},
        {"spec": {"replicas": 2}},
        {"status": {"conditions": [{"type": "Ready", "status": "False", "message": "no node class"}]}},
    ],
)
def test_deleted_static_or_unready_nodepool_allows_no_more_nodes(changes: dict[str, Any]) -> None:
    pool_object = node_pool()
    for part, more in changes.items():
        pool_object[part] = {**pool_object.get(part, {}), **more}
    found = nodepool.read_nodepool(pool_object)
    assert found.closed
    assert nodepool.count_remaining_nodes(found, one(nodepool.list_variants(found, T4_NODES)).shape, ()) == 0


def test_nodepool_of_version_v1beta1_is_read_with_its_node_expiry() -> None:
    pool_object = node_pool()
    pool_object["apiVersion"] = "karpenter.sh/v1beta1"
    del pool_object["spec"]["template"]["spec"]["expireAfter"]
    pool_object["spec"]["disruption"] = {"expireAfter": "24h"}
    found = nodepool.read_nodepool(pool_object)
    assert (found.version, found.expire_after) == ("v1beta1", "24h")
