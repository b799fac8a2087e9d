"""Two installations that share a cluster are upgraded from a version whose capacity orders name no installation.

Each Model names the installation that serves it. The orders wait for nodes that never join.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from operator import sub

import msgspec
import pytest

from autoscaler.contract import ModelName
from autoscaler.kubernetes import leader_election
from autoscaler.providers.cluster_autoscaler.placeholder_pods import build_pods
from autoscaler.providers.future_nodes import NodeRequirements
from autoscaler.providers.order_annotations import OWNER
from autoscaler.spec.capacity import ClusterAutoscaler, ProviderSettings
from autoscaler.spec.installation_ownership import CLAIM_S, INSTALLATION, installation_id, installation_title
from autoscaler.spec.settings import Settings
from autoscaler.state.capacity import AcquireOrder, LeaseId, Offer
from pilotlight.processes.cluster import ClusterOptions
from tests.simulation.environment import process
from tests.simulation.environment.virtual_loop import run
from tests.simulation.installations.cluster import Skewed
from tests.simulation.installations.shared_cluster import MODELS, Installed, SharedCluster
from tests.support.builders.node_templates import T4_NODES

ENGINES = "town"
PODS = f"/api/v1/namespaces/{ENGINES}/pods"
GROUP = ClusterAutoscaler(node_labels={"node.kubernetes.io/instance-type": "g4dn.xlarge"})
ORDERING = Settings(nodes=T4_NODES, capacity=(ProviderSettings(name="g4", cluster_autoscaler=GROUP),))
ONE, TWO = installation_id(ENGINES, "one"), installation_id(ENGINES, "two")
SERVES = {"ada": "one", "bob": "two"}
GONE = "gone"
"""A Model that was deleted."""


def put_order(cluster: SharedCluster, owner: str) -> None:
    """Store the two pods of an order that waits for a node, as an earlier version created them."""
    offer = Offer(provider="g4", name="node", product="T4", memory_bytes=16 << 30)
    order = AcquireOrder(
        id=LeaseId("g4", f"order-{owner}"), offer=offer, devices=1, owner=ModelName(owner), epoch=1, due_s=0.0
    )
    for pod in build_pods(order, GROUP, (), NodeRequirements()):
        name = pod["metadata"]["name"]
        pod["metadata"] |= {"namespace": ENGINES, "uid": name, "creationTimestamp": "2026-01-01T00:00:00Z"}
        cluster.server.put(PODS, pod, "ADDED")


def owners(cluster: SharedCluster) -> dict[str, set[str]]:
    """By Model, the installations in the labels of its order's pods. Empty: without a label."""
    found: dict[str, set[str]] = {}
    for pod in cluster.pods():
        metadata = pod["metadata"]
        found.setdefault(metadata["annotations"][OWNER], set()).add(metadata["labels"].get(INSTALLATION, ""))
    return found


async def upgraded(with_provider: Collection[str], *at_s: float) -> list[dict[str, set[str]]]:
    """The owners at these times after both installations were started, of which some have the capacity provider."""
    process.install()
    cluster = SharedCluster(dict.fromkeys(SERVES, ENGINES))
    for name, lease in SERVES.items():
        found = cluster.server.objects[MODELS.format(ENGINES)][name]
        found["spec"]["installation"] = installation_title(ENGINES, lease)
    for owner in (*SERVES, GONE):
        put_order(cluster, owner)
    shown: list[dict[str, set[str]]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leader_election, "datetime", Skewed)
        installed = [
            Installed(
                cluster, msgspec.convert({"namespace": ENGINES, "lease": lease}, ClusterOptions), processes=1,
                settings=ORDERING if lease in with_provider else Settings(),
            )
            for lease in SERVES.values()
        ]  # fmt: skip
        for after_s in map(sub, at_s, (0.0, *at_s)):
            await asyncio.sleep(after_s)
            shown.append(owners(cluster))
        for one in installed:
            await one.close()
    assert cluster.breaches == [], "no pod is deleted by another installation"
    return shown


def test_installation_claims_unlabelled_capacity_orders_of_its_models() -> None:
    (shown,) = run(upgraded(["one", "two"], 60.0))
    assert (shown["ada"], shown["bob"]) == ({ONE}, {TWO})
    assert shown[GONE] in ({ONE}, {TWO}), "it has one owner, which will release it"


def test_order_unclaimed_for_ten_minutes_is_claimed_by_other_installation() -> None:
    before, after = run(upgraded(["one"], CLAIM_S - 10.0, CLAIM_S + 60.0))
    assert before == {"ada": {ONE}, GONE: {ONE}, "bob": {""}}
    assert after == {"ada": {ONE}, GONE: {ONE}, "bob": {ONE}}
