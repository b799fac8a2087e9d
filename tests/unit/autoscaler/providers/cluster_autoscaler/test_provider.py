"""Nodes added by Cluster Autoscaler: the provider contract, and a simulated autoscaler's handling of our objects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.drivers.kubernetes.objects import other_pods
from autoscaler.providers.cluster_autoscaler.placeholder_pods import KEEPS, PATIENCE_S, REFUSED, TRIGGERED, keeper_name
from autoscaler.providers.cluster_autoscaler.provider import NodeGroup
from autoscaler.providers.karpenter.provider import NODES
from autoscaler.providers.order_annotations import WRITER
from autoscaler.providers.provider import Provider, RefusedError
from autoscaler.spec.capacity import ClusterAutoscaler
from autoscaler.spec.installation_ownership import INSTALLATION
from autoscaler.spec.pod import MANAGED_BY, PLACE, Pod, Resources, Toleration
from autoscaler.spec.settings import Price
from autoscaler.state.world import World
from tests.contracts.provider import ProviderContract, one, order, owned, release
from tests.simulation.environment.virtual_loop import run
from tests.support.builders.node_templates import T4_NODES
from tests.support.builders.worlds import GI, world
from tests.support.fakes.kubernetes.cluster_autoscaler import FULL, NODE_S, PODS, PlayedAutoscaler
from tests.support.fakes.kubernetes.karpenter import pod
from tests.support.harness.async_tests import run_with

GROUP = ClusterAutoscaler(
    node_labels={"node.kubernetes.io/instance-type": "g4dn.xlarge", "cloud.google.com/gke-spot": "true"}, nodes_max=2
)

ENGINE = {MANAGED_BY: WRITER, "pilotlight.dev/intent": "i"}


def group_of(server: PlayedAutoscaler, begin: World | None = None, **fields: Any) -> NodeGroup:
    begin = begin or world()
    tolerations = (Toleration(key="team", operator="Equal", value="a", effect="NoSchedule"),)
    settings = replace(begin.settings, nodes=T4_NODES, pod=Pod(tolerations=tolerations), **fields)
    begin = replace(begin, settings=settings)
    return NodeGroup("t4", GROUP, server, "engines", lambda: begin)


class GroupRig:
    """A `Rig` in virtual time."""

    def __init__(self) -> None:
        self.server: PlayedAutoscaler

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        async def whole() -> None:
            self.server = PlayedAutoscaler()
            await scenario

        run(whole())

    def provider(self) -> Provider:
        return group_of(self.server)

    async def until_here(self, name: str) -> None:
        while not self.server.objects[f"{PODS}/{keeper_name(name)}"]["spec"].get("nodeName"):
            await asyncio.sleep(1.0)

    async def until_gone(self, name: str) -> None:
        """Do nothing: the pods are gone at once."""

    def use(self, name: str) -> None:
        self.server.put("/api/v1/namespaces/n/pods/p", pod("p", f"node-of-{name}"))

    def leave_little(self) -> None:
        """Simulate other pending orders."""
        for number in range(GROUP.nodes_max):
            labels = {"pilotlight.dev/provider": "t4", KEEPS: f"other-{number}"}
            self.server.put(f"{PODS}/other-{number}", {"metadata": {"labels": labels}, "spec": {}})

    def go_away(self) -> None:
        self.server.away = True


class TestNodeGroup(ProviderContract):
    @pytest.fixture
    def rig(self) -> GroupRig:
        return GroupRig()


@run_with(run)
async def test_offer_of_a_node_group_has_its_labels_and_the_price_from_settings() -> None:
    prices = (Price(device="T4", per_hour=0.16, bought="spot"), Price(device="T4", per_hour=0.53))
    (offer,) = await group_of(PlayedAutoscaler(), prices=prices).offers()
    assert (offer.product, offer.parts, offer.many, offer.node) == ("T4", 3, 2, "")
    assert (offer.bought, offer.price_per_hour) == ("spot", 0.16)
    assert offer.labels == GROUP.node_labels


@run_with(run)
async def test_order_creates_a_placeholder_pod_and_a_pod_that_blocks_scale_down() -> None:
    server = PlayedAutoscaler()
    provider = group_of(server)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    place, keeper = (server.objects[f"{PODS}/{name}"] for name in (made.id.name, keeper_name(made.id.name)))
    assert place["spec"]["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "3"}
    assert place["spec"]["priorityClassName"] == "pilotlight-placeholder"
    assert place["metadata"]["labels"][PLACE] == made.id.name
    assert "annotations" not in place["spec"]
    for one_of in (place, keeper):
        assert one_of["spec"]["nodeSelector"] == GROUP.node_labels
        assert {"key": "team", "operator": "Equal", "value": "a", "effect": "NoSchedule"} in one_of["spec"][
            "tolerations"
        ]
        assert one_of["metadata"]["annotations"]["pilotlight.dev/owner"] == "llama-8b"
    assert keeper["metadata"]["annotations"]["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
    assert "cluster-autoscaler.kubernetes.io/safe-to-evict" not in place["metadata"]["annotations"]
    (term,) = keeper["spec"]["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["labelSelector"]["matchLabels"] == {PLACE: made.id.name}


@run_with(run)
async def test_order_pods_select_the_zone_of_the_model_but_not_driver_labels() -> None:
    """Driver labels are not part of the description of a node group."""
    zone, gpu = "topology.kubernetes.io/zone", "nvidia.com/gpu.present"
    server = PlayedAutoscaler()
    provider = group_of(server, owned(pod=Pod(node_selector={zone: "b", gpu: "true"})))
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    for name in (made.id.name, keeper_name(made.id.name)):
        chosen = server.objects[f"{PODS}/{name}"]["spec"]["nodeSelector"]
        assert chosen[zone] == "b"
        assert gpu not in chosen


@run_with(run)
async def test_placeholder_pod_requests_the_cpu_and_memory_of_its_model() -> None:
    """Otherwise a node is added on which its owner cannot start."""
    server = PlayedAutoscaler()
    provider = group_of(server, owned(resources=Resources(requests={"cpu": "1500m", "memory": "48Gi"})))
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    place, keeper = (server.objects[f"{PODS}/{name}"] for name in (made.id.name, keeper_name(made.id.name)))
    asked = place["spec"]["containers"][0]["resources"]["requests"]
    assert asked == {"cpu": "1500m", "memory": str(48 * GI)}
    assert keeper["spec"]["containers"][0]["resources"] == {"requests": {"cpu": "1m", "memory": "8Mi"}}


@run_with(run)
async def test_order_is_committed_once_its_scale_up_is_triggered() -> None:
    provider = group_of(PlayedAutoscaler())
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    assert not (await one(provider)).committed
    await asyncio.sleep(15.0)
    assert ((await one(provider)).committed, (await one(provider)).phase) == (True, "coming")
    await asyncio.sleep(NODE_S)
    assert ((await one(provider)).phase, (await one(provider)).node) == ("here", f"node-of-{made.id.name}")


@run_with(run)
async def test_group_at_maximum_size_fails_the_order_with_the_reported_reason() -> None:
    provider = group_of(PlayedAutoscaler(size_max=0))
    await provider.acquire(order((await provider.offers())[0]))
    await asyncio.sleep(15.0)
    assert ((await one(provider)).phase, (await one(provider)).says) == ("coming", FULL)
    await asyncio.sleep(40.0)
    assert (await one(provider)).phase == "failed"


@pytest.mark.parametrize("message", [TRIGGERED, REFUSED])
@run_with(run)
async def test_events_of_an_earlier_pod_with_the_same_name_are_ignored(message: str) -> None:
    """Names of orders are reused, and events are kept for an hour."""
    server = PlayedAutoscaler()
    provider = group_of(server)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    server.tell(made.id.name, message, FULL)
    assert (await one(provider)).committed is (message == TRIGGERED)
    assert ((await one(provider)).says == FULL) is (message == REFUSED)
    for path in [path for path in server.objects if path.startswith(PODS)]:
        await server.delete(path)
    server.silent = True
    await provider.acquire(made)
    for _ in range(2):
        assert ((await one(provider)).phase, (await one(provider)).committed) == ("coming", False)
        assert not (await one(provider)).says
        await asyncio.sleep(PATIENCE_S + 1.0)
    await provider.release(release(made, uncommitted=True))
    assert not await provider.list(), "nothing of it is bought yet"


@run_with(run)
async def test_order_stays_delivered_when_a_replica_preempts_its_placeholder() -> None:
    server = PlayedAutoscaler()
    provider = group_of(server)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await asyncio.sleep(NODE_S + 20.0)
    bound = server.objects[f"{PODS}/{made.id.name}"]
    assert other_pods.read_other_pod(bound) is None, "what it has is free for Replicas"
    await server.delete(f"{PODS}/{made.id.name}")  # the scheduler preempts it
    assert (await one(provider)).phase == "here"


@run_with(run)
async def test_order_fails_when_the_pod_that_blocks_its_scale_down_is_evicted() -> None:
    """The kubelet evicts pods under memory pressure, and keeps the pod object."""
    rig = GroupRig()
    rig.server = PlayedAutoscaler()
    provider = rig.provider()
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await rig.until_here(made.id.name)
    rig.server.objects[f"{PODS}/{keeper_name(made.id.name)}"]["status"] = {"phase": "Failed", "reason": "Evicted"}
    (shown,) = await provider.list()
    assert (shown.phase, shown.says) == (
        "failed",
        f"the pod that keeps node {shown.node} from removal (keeper) has terminated",
    )
    await provider.release(release(made))
    assert not await provider.list()


@pytest.mark.parametrize(
    ("labels", "own"), [(ENGINE, True), ({}, False), ({**ENGINE, INSTALLATION: "other-1"}, False)],
    ids=["ours", "not-an-engine", "other-installation"],
)  # fmt: skip
@run_with(run)
async def test_order_is_uncommitted_only_if_own_replica_uses_its_new_node_first(
    labels: dict[str, str], own: bool
) -> None:
    """The scheduler tries the pod again only some seconds after its last attempt."""
    server = PlayedAutoscaler()
    provider = group_of(server)
    made = order((await provider.offers())[0])
    await server.create(NODES, {"metadata": {"name": "before", "labels": GROUP.node_labels}})
    server.put("/api/v1/pods/old", pod("old", "before", labels=ENGINE))
    await asyncio.sleep(5.0)
    await provider.acquire(made)
    await asyncio.sleep(15.0)
    assert (await one(provider)).committed, "the earlier node is not reported"
    await server.create(NODES, {"metadata": {"name": "new", "labels": GROUP.node_labels}})
    server.put("/api/v1/pods/first", pod("first", "new", labels=labels))
    assert (await one(provider)).committed is not own
    await provider.release(release(made, uncommitted=True))
    assert any(path.startswith(PODS) for path in server.objects) is not own


@run_with(run)
async def test_order_fails_if_its_placeholder_is_deleted_before_node_arrival() -> None:
    server = PlayedAutoscaler()
    provider = group_of(server)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await server.delete(f"{PODS}/{made.id.name}")
    assert not await provider.list(), "it may be that it is just being made"
    await asyncio.sleep(31.0)
    assert (await one(provider)).phase == "failed"
    await provider.release(release(made))
    assert not [path for path in server.objects if path.startswith(PODS)]


@run_with(run)
async def test_order_is_rejected_if_a_foreign_pod_has_its_name() -> None:
    server = PlayedAutoscaler()
    provider = group_of(server)
    made = order((await provider.offers())[0])
    server.put(f"{PODS}/{made.id.name}", {"metadata": {"labels": {}}, "spec": {}})
    with pytest.raises(RefusedError, match="belongs to another owner"):
        await provider.acquire(made)
    await provider.release(release(made))
    assert f"{PODS}/{made.id.name}" in server.objects
