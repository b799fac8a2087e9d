"""The four cases of Dynamic Device Scaling together with a fake Cluster Autoscaler that adds and removes nodes.
Also the demonstration that Fsas shows: a GPU is attached for GPU demand, a node is added for memory.

One autoscaler and one gateway as processes, a real API server and scheduler, nodes whose GPU count really changes.
"""

from __future__ import annotations

import asyncio
from math import inf

import pytest

from autoscaler.kubernetes.api import Api
from tests.integration.cluster.capacity.test_cluster_autoscaler import ranked
from tests.integration.cluster.support.controllers.fake_cluster_autoscaler import Group
from tests.integration.cluster.support.fabric.cluster import GPU, Rack, rack
from tests.integration.cluster.support.fabric.fixtures import Stream, ada, in_order, settings, slow
from tests.integration.cluster.support.installations.single_instance import model
from tests.support.harness.driver_events import WAIT_S_MAX

__all__ = ["rack"]
"""A fixture; pytest looks it up in this module."""


@pytest.mark.case("1")
@pytest.mark.standard
async def test_gpu_is_attached_before_any_pod_is_pending_so_no_node_is_added(
    rack: Rack, api: Api, namespace: str
) -> None:
    """Cluster Autoscaler runs and would add a node for any pending pod, but there is none."""
    rack.house.write(
        ada(), model("bob", idleSeconds=600, replicas={"max": 1}), **settings(rack, node_costs=9.0)
    )  # fmt: skip
    group = Group(rack, gpus=1, most=2)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        assert await rack.where() == {"ada": rack.own.name, "bob": rack.bare.name}
        assert rack.counts == [0, 1]
        assert not rack.waited
        assert not group.brought
        assert not group.nodes
        limits = {"resources": {"limits": {GPU: "1"}}}
        container = {"name": "a", "image": "a", "command": ["sleep", "600"], **limits}
        stranger = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
            "spec": {"containers": [container], "nodeSelector": {"group": namespace}},
        }  # fmt: skip
        await api.create(f"/api/v1/namespaces/{namespace}/pods", stranger)
        while not group.brought:
            await asyncio.sleep(0.1)
        assert group.brought == {"stranger": f"{namespace}-g0"}, "it was awake all the while"


@pytest.mark.case("2")
@pytest.mark.standard
async def test_gpu_is_attached_when_the_node_group_is_at_its_maximum(rack: Rack, api: Api, namespace: str) -> None:
    """The node would be cheaper, and is requested first."""
    rack.house.write(
        ada(), model("bob", idleSeconds=600, replicas={"max": 1}, queue={"waitSecondsMax": 300}),
        **settings(rack, node_costs=0.1),
    )  # fmt: skip
    group = Group(rack, gpus=1, most=0)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await rack.answered("bob")
        assert list(group.brought.values()) == [""], "it was asked, once, and had none"
        assert (await rack.where())["bob"] == rack.bare.name
        assert rack.counts == [0, 1]
        (rejected,) = (one for one in rack.diary if one.startswith("full"))
        (came,) = (one for one in rack.diary if one.startswith("attached"))
        assert rack.diary.index(rejected) < rack.diary.index(came)


@pytest.mark.case("3")
@pytest.mark.standard
async def test_gpus_are_detached_before_an_unneeded_node_is_removed(rack: Rack, api: Api, namespace: str) -> None:
    """The GPU would be kept for long, since it is expensive to reorder: it is detached because its node is removed."""
    documents = rack.settings(expected_s=300)
    rack.house.write(ada(), model("bob", idleSeconds=600, replicas={"max": 1}), **documents)
    rack.nodes, group = [rack.own], Group(rack, gpus=0, most=1, least=1, unneeded_s=inf, shared_fabric=True)
    async with group.running(), rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        (node,) = group.nodes
        await rack.answered("ada")
        await rack.answered("bob")
        assert (await rack.where())["bob"] == node
        (came,) = (one for one in rack.diary if one.startswith("attached"))
        rack.house.tell(ada(), model("bob", idleSeconds=5, replicas={"max": 1}), **documents)
        removed = came.replace("attached", "detached")
        while removed not in rack.diary:
            await asyncio.sleep(0.1)
        assert in_order(rack.diary, came, f"candidate {node}", removed), (
            "it was taken for unneeded, and no more than that"
        )
        group.unneeded_s = 0.0
        while group.nodes:
            await asyncio.sleep(0.1)
        (pod,) = (one for one in rack.diary if one.startswith("gone"))
        assert in_order(rack.diary, came, pod, removed, f"closed {node}", f"removed {node}")
        await rack.until_gone()
        await rack.answered("ada")


@pytest.mark.case("4")
@pytest.mark.standard
async def test_only_the_idle_gpu_of_an_unremovable_node_is_detached(rack: Rack, api: Api, namespace: str) -> None:
    """The pod of another owner keeps the node. Eve is on another of its GPUs, which ResourceSlices distinguish.
    Her minimum residency lasts, so that bob cannot evict her while an attached GPU would take longer.
    """
    rack.dra, rack.nodes = {}, [rack.own]
    rack.house.write(
        ada(), model("bob", idleSeconds=1, replicas={"max": 1}), slow("eve", 2000, residencySeconds=600),
        **rack.settings(slicing={"kind": "dra"}),
    )  # fmt: skip
    group = Group(rack, gpus=0, most=1, least=1, unneeded_s=inf, shared_fabric=True)
    async with group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        (node,) = group.nodes
        stranger = {
            "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "stranger"},
            "spec": {"nodeName": node, "containers": [{"name": "a", "image": "a", "command": ["sleep", "600"]}]},
        }  # fmt: skip
        await api.create(f"/api/v1/namespaces/{namespace}/pods", stranger)
        while group.candidates:
            await asyncio.sleep(0.05)
        group.unneeded_s = 0.0
        async with rack.running():
            await rack.answered("ada")
            async with Stream(rack, "eve") as stream:
                await stream.goes_on()
                await rack.answered("bob")
                of_eve, of_bob = (one.removeprefix("attached ") for one in rack.diary if one.startswith("attached"))
                while f"detached {of_bob}" not in rack.diary:
                    await asyncio.sleep(0.1)
                await stream.goes_on()
                assert f"detached {of_eve}" not in rack.diary
            assert rack.counts == [0, 1, 2, 1]
            assert group.nodes == [node]
            assert not group.candidates
            assert await rack.where() == {"ada": rack.own.name, "eve": node}


async def test_gpu_is_attached_for_gpu_demand_and_a_node_added_for_memory(rack: Rack, api: Api, namespace: str) -> None:
    """Two nodes, each with one GPU in use and capacity for another."""
    nodes = [rack.node(name, 1, fabric=rack.name) for name in ("n1", "n2")]
    rack.nodes, rack.may_have = nodes, {one.name: one for one in nodes}
    rack.has, rack.counts = {one.name: 1 for one in nodes}, [2]
    full = (model(name, replicas={"min": 1, "max": 1}) for name in ("ada", "eve"))
    large = {"requests": {"memory": "400Gi"}}
    rack.house.write(
        *full, model("bob", idleSeconds=600, replicas={"max": 1}),
        model("big", idleSeconds=600, replicas={"max": 1}, resources=large), **settings(rack, node_costs=9.0),
    )  # fmt: skip
    group = Group(rack, gpus=1, most=2, memory="512Gi")
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        for name in ("ada", "eve", "bob"):
            await rack.answered(name)
        assert rack.counts == [2, 3]
        assert not group.brought
        assert not rack.waited, "no pod has waited for a node"
        await rack.answered("big")
        assert rack.counts == [2, 3], "nothing was attached for it"
        (node,) = group.nodes
        assert (await rack.where())["big"] == node
