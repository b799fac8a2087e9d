"""Nodes added by Karpenter: the provider contract, and a simulated Karpenter's handling of our NodeClaims."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from autoscaler.providers.karpenter.provider import KarpenterNodes
from autoscaler.providers.kubernetes_access import AnswerError, Object
from autoscaler.providers.provider import Provider, RefusedError
from autoscaler.providers.release_checks import is_blocking_node_removal
from autoscaler.spec.installation_ownership import INSTALLATION, Ownership
from autoscaler.spec.pod import Pod, Resources
from autoscaler.spec.settings import NodeKind, Price
from autoscaler.state.world import World
from tests.contracts.provider import ProviderContract, one, order, owned, release
from tests.support.builders.node_templates import T4_NODES
from tests.support.builders.worlds import GI, world
from tests.support.fakes.kubernetes.karpenter import CLAIMS, NODES, POOLS, PlayedKarpenter, node_pool, played, pod
from tests.support.harness.async_tests import run_with

POOL = "g4-nodepool"


def nodes_of(
    karpenter: PlayedKarpenter, expected_s: float | None = None, prices: tuple[Price, ...] = (),
    nodes: tuple[NodeKind, ...] = T4_NODES, begin: World | None = None,
) -> KarpenterNodes:  # fmt: skip
    begin = begin or world()
    begin = replace(begin, settings=replace(begin.settings, nodes=nodes, prices=prices))
    return KarpenterNodes("g4", POOL, karpenter, lambda: begin, asyncio.get_running_loop().time, expected_s)


def begun(**spec: Any) -> PlayedKarpenter:
    karpenter = PlayedKarpenter()
    karpenter.put(f"{POOLS}/{POOL}", node_pool(**spec))
    return karpenter


class NodesRig:
    """A `Rig` in virtual time."""

    def __init__(self) -> None:
        self.karpenter: PlayedKarpenter

    def run(self, scenario: Coroutine[object, object, None]) -> None:
        async def whole() -> None:
            self.karpenter = begun()
            await scenario

        played(whole())

    def provider(self) -> Provider:
        return nodes_of(self.karpenter)

    async def until_here(self, name: str) -> None:
        while "node-of-" + name not in str(self.karpenter.objects) or not self._initialized(name):
            await asyncio.sleep(0.5)

    async def until_gone(self, name: str) -> None:
        while f"{CLAIMS}/{name}" in self.karpenter.objects:
            await asyncio.sleep(0.5)

    def use(self, name: str) -> None:
        self.karpenter.put("/api/v1/namespaces/n/pods/p", pod("p", f"node-of-{name}"))

    def leave_little(self) -> None:
        self.karpenter.change(f"{POOLS}/{POOL}", {"spec": {"limits": {"nvidia.com/gpu": "0"}}})

    def go_away(self) -> None:
        self.karpenter.away = True

    def _initialized(self, name: str) -> bool:
        conditions = self.karpenter.objects[f"{CLAIMS}/{name}"].get("status", {}).get("conditions", ())
        return any(found_conditions["type"] == "Initialized" for found_conditions in conditions)


class TestKarpenterNodes(ProviderContract):
    @pytest.fixture
    def rig(self) -> NodesRig:
        return NodesRig()


@run_with(played)
async def test_karpenter_offer_counts_one_node_less_after_an_order() -> None:
    karpenter = begun()
    provider = nodes_of(karpenter, 90.0, (Price(device="T4", per_hour=0.53),))
    (offer,) = await provider.offers()
    assert (offer.provider, offer.product, offer.node, offer.parts) == ("g4", "T4", "", 3)
    assert (offer.devices_min, offer.devices_max, offer.many) == (1, 1, 4)
    assert (offer.price_per_hour, offer.expected_s, offer.bought) == (0.53, 90.0, "on-demand")
    assert not offer.taints  # all our pods tolerate the GPU's taint
    await provider.acquire(order(offer))
    (offer,) = await provider.offers()
    assert offer.many == 3


@run_with(played)
async def test_node_claim_requests_the_cpu_and_memory_of_its_model() -> None:
    """Otherwise a paid node is added on which the owner cannot start."""
    karpenter = begun()
    provider = nodes_of(karpenter, begin=owned(resources=Resources(requests={"memory": "48Gi"}, limits={"cpu": 6})))
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    asked = karpenter.objects[f"{CLAIMS}/{made.id.name}"]["spec"]["resources"]["requests"]
    assert asked == {"cpu": "6000m", "memory": str(48 * GI), "nvidia.com/gpu": "1"}


@run_with(played)
async def test_node_claim_requires_the_models_zone_or_the_order_is_rejected() -> None:
    """Otherwise a node is added in another zone, stays idle, and another one is ordered."""
    zone, gpu = "topology.kubernetes.io/zone", "nvidia.com/gpu.present"
    karpenter = begun()
    provider = nodes_of(karpenter, begin=owned(pod=Pod(node_selector={zone: "b", gpu: "true"})))
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    asked = karpenter.objects[f"{CLAIMS}/{made.id.name}"]["spec"]["requirements"]
    assert {one["key"]: one["values"] for one in asked if one["key"] in {zone, gpu}} == {zone: ["b"]}
    await provider.release(release(made))
    requirements = [{"key": zone, "operator": "In", "values": ["a", "c"]}]
    karpenter.put(f"{POOLS}/{POOL}", node_pool(template={"requirements": requirements}))
    with pytest.raises(RefusedError, match=f"NodePool {POOL} adds no node with {zone}=b"):
        await provider.acquire(order(made.offer, 1))


@run_with(played)
async def test_repeated_order_creates_only_one_node_claim() -> None:
    karpenter = begun()
    provider = nodes_of(karpenter)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await provider.acquire(made)
    assert [path for path in karpenter.objects if path.startswith(CLAIMS)] == [f"{CLAIMS}/{made.id.name}"]
    assert not (await one(provider)).committed
    await asyncio.sleep(1.0)
    assert (await one(provider)).committed


@run_with(played)
async def test_release_if_uncommitted_keeps_a_launched_node() -> None:
    provider = nodes_of(begun())
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await asyncio.sleep(1.0)
    await provider.release(release(made, uncommitted=True))
    assert (await one(provider)).phase == "coming"


@run_with(played)
async def test_release_if_uncommitted_keeps_a_node_that_launches_meanwhile() -> None:
    karpenter = begun()
    provider = nodes_of(karpenter)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await asyncio.sleep(0.2)
    karpenter.before_write = lambda method, path: karpenter.conditions(made.id.name, "Launched")
    await provider.release(release(made, uncommitted=True))
    assert (await one(provider)).committed


@run_with(played)
async def test_order_with_the_name_of_a_foreign_node_claim_is_rejected() -> None:
    karpenter = begun()
    provider = nodes_of(karpenter)
    made = order((await provider.offers())[0])
    karpenter.put(f"{CLAIMS}/{made.id.name}", {"metadata": {"labels": {}}, "spec": {}})
    with pytest.raises(RefusedError, match="belongs to another owner"):
        await provider.acquire(made)
    await provider.release(release(made))
    assert f"{CLAIMS}/{made.id.name}" in karpenter.objects
    assert not await provider.list()


@run_with(played)
async def test_api_server_rejection_message_is_in_the_order_error() -> None:
    karpenter = begun()
    provider = nodes_of(karpenter)
    made = order((await provider.offers())[0])
    karpenter.refused["POST"] = AnswerError(403, "Forbidden", "may not create nodeclaims")
    with pytest.raises(RefusedError, match="may not create nodeclaims"):
        await provider.acquire(made)


@pytest.mark.parametrize(
    ("path", "message"), [(f"{POOLS}/{POOL}", "does not exist"), ("/apis/karpenter.sh", "not installed")]
)
@run_with(played)
async def test_missing_nodepool_or_karpenter_is_named_in_the_error(path: str, message: str) -> None:
    karpenter = begun()
    del karpenter.objects[path]
    with pytest.raises(RefusedError, match=message):
        await nodes_of(karpenter).offers()


@run_with(played)
async def test_unusable_nodepool_error_names_the_reason() -> None:
    karpenter = begun()
    pool = karpenter.objects[f"{POOLS}/{POOL}"]
    pool["spec"]["replicas"] = 2
    with pytest.raises(RefusedError, match="fixed number of nodes"):
        await nodes_of(karpenter).offers()
    del pool["spec"]["replicas"]
    with pytest.raises(RefusedError, match=f"the devices of NodePool {POOL} are unknown: add an entry for its nodes"):
        await nodes_of(karpenter, nodes=()).offers()


@run_with(played)
async def test_new_node_blocks_disruption_until_a_replica_runs_on_the_node() -> None:
    karpenter = begun()
    karpenter.owner = Ownership("home-1")
    provider, requested = nodes_of(karpenter), "karpenter.sh/do-not-disrupt"
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await asyncio.sleep(10.0)
    node, claim = f"{NODES}/node-of-{made.id.name}", f"{CLAIMS}/{made.id.name}"
    stranger = pod("p", node.rpartition("/")[2])
    karpenter.put("/api/v1/namespaces/n/pods/p", stranger)
    own = {"app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/intent": "1"}
    foreign = {**own, INSTALLATION: "other-1"}
    karpenter.put("/api/v1/namespaces/n/pods/r", pod("r", node.rpartition("/")[2], labels=foreign))
    await provider.list()
    assert all(karpenter.objects[path]["metadata"]["annotations"].get(requested) for path in (node, claim))
    karpenter.put("/api/v1/namespaces/n/pods/q", pod("q", node.rpartition("/")[2], labels=own))
    karpenter.refused["PATCH"] = AnswerError(403, "Forbidden", "may not patch")
    assert (await one(provider)).phase == "here"
    del karpenter.refused["PATCH"]
    await provider.list()
    assert not any(requested in karpenter.objects[path]["metadata"]["annotations"] for path in (node, claim))


@run_with(played)
async def test_released_node_is_listed_as_leaving_until_removed() -> None:
    karpenter = begun()
    provider = nodes_of(karpenter)
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await asyncio.sleep(10.0)
    await provider.release(release(made))
    assert (await one(provider)).phase == "leaving"
    with pytest.raises(TimeoutError):
        await provider.acquire(made)
    await asyncio.sleep(10.0)
    assert not await provider.list()


@run_with(played)
async def test_node_arrival_and_removal_after_an_outage_trigger_notifications() -> None:
    karpenter, notified_s = begun(), list[float]()
    provider, loop = nodes_of(karpenter), asyncio.get_running_loop()
    looking = asyncio.create_task(provider.attend(lambda: notified_s.append(loop.time())))
    await asyncio.sleep(30.0)
    assert not notified_s, "this installation owns nothing"
    made = order((await provider.offers())[0])
    await provider.acquire(made)
    await asyncio.sleep(12.0)
    assert notified_s, "it is seen at the next look"
    assert [one.phase for one in await provider.list()] == ["here"]
    assert notified_s[-1] - notified_s[0] <= 7.0
    karpenter.away = True
    await asyncio.sleep(20.0)
    karpenter.away, many = False, len(notified_s)
    await provider.release(release(made))
    await asyncio.sleep(15.0)
    assert len(notified_s) > many, "it is gone"
    looking.cancel()


OURS = {"app.kubernetes.io/managed-by": "pilotlight", "pilotlight.dev/intent": "1"}
NO_DEVICE: dict[str, Any] = {"containers": [{"name": "c"}]}
DAEMON: dict[str, Any] = {"ownerReferences": [{"kind": "DaemonSet", "name": "d", "controller": True}]}


@pytest.mark.parametrize(
    ("found", "keeps"),
    [
        (pod("a", "n"), True),
        (pod("a", "n", **NO_DEVICE), False),
        (pod("a", "n", **NO_DEVICE, labels=OURS), True),
        (pod("a", "n", **NO_DEVICE, metadata={"ownerReferences": []}), True),
        (pod("a", "n", **NO_DEVICE, metadata={"annotations": {"karpenter.sh/do-not-disrupt": "4h"}}), True),
        (
            pod(
                "a",
                "n",
                **NO_DEVICE,
                metadata={"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}},
            ),
            True,
        ),
        (pod("a", "n", **NO_DEVICE, resourceClaims=[{"name": "gpu"}]), True),
        (pod("a", "n", metadata=DAEMON), False),
        ({**pod("a", "n"), "status": {"phase": "Succeeded"}}, False),
        (pod("a", "n", metadata={"annotations": {"kubernetes.io/config.mirror": "1"}}), False),
    ],
)
def test_only_gpu_bare_or_protected_pods_block_node_removal(found: Object, keeps: bool) -> None:
    assert is_blocking_node_removal(found) == keeps
