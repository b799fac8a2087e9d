"""Node groups that others scale (MachineSet, with its real definition), besides a fabric and nodes that we request.
Growing capacity is not ordered again, and the group states the maximum number of GPUs per node.
"""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.capacity.attachable_nodes import GPU_COUNT, OWNER_KIND, OWNER_NAME, OWNER_NAMESPACE
from autoscaler.kubernetes.api import Api
from tests.integration.cluster.capacity.test_cluster_autoscaler import ranked
from tests.integration.cluster.support.controllers.fake_cluster_autoscaler import LABELS, Group, machine_set, resize
from tests.integration.cluster.support.fabric.cluster import Rack, rack
from tests.integration.cluster.support.fabric.fixtures import ada, settings
from tests.integration.cluster.support.installations.single_instance import model
from tests.support.harness.driver_events import WAIT_S_MAX

__all__ = ["rack"]
"""A fixture; pytest looks it up in this module."""


async def test_growing_machine_set_is_awaited_instead_of_attaching_a_gpu(rack: Rack, api: Api, namespace: str) -> None:
    """A user raises it."""
    rack.house.write(
        ada(), model("bob", idleSeconds=600, replicas={"max": 1}), **settings(rack, node_costs=9.0)
    )  # fmt: skip
    await machine_set(api, namespace, {LABELS: f"group={namespace}"})
    async with ranked(api, namespace), rack.running(), asyncio.timeout(4 * WAIT_S_MAX), asyncio.TaskGroup() as tasks:
        await rack.answered("ada")
        await resize(api, namespace, 1, 0)
        coming = f'pilotlight_machines_coming{{group="MachineSet {namespace}/{namespace}"}} 1.0'
        while coming not in await rack.ops("metrics"):
            await asyncio.sleep(0.1)
        calling = tasks.create_task(rack.answered("bob"))
        while f"waiting for 1 x T4 from MachineSet {namespace}/{namespace}" not in await rack.explained("bob"):
            assert not calling.done(), rack.counts
            await asyncio.sleep(0.1)
        async with rack.node("g", 1, group=namespace).running():
            await resize(api, namespace, 1, 1)
            await calling
            while coming in await rack.ops("metrics"):
                await asyncio.sleep(0.1)
            assert (await rack.where())["bob"] == f"{namespace}-g"
            assert rack.counts == [0]
            assert not await rack.requests()
            assert not any(one.startswith("pilotlight-") for one in rack.waited), "no node was asked for"


async def test_two_models_with_placeholder_pods_get_one_new_node_each(rack: Rack, api: Api, namespace: str) -> None:
    """Two Models need two nodes: the one that is added for the first placeholder does not count for the second."""
    rack.nodes, names = [rack.own], ("bob", "eve")
    documents = settings(rack, node_costs=0.1)
    rack.house.write(ada(), *(model(one, idleSeconds=600, replicas={"max": 1}) for one in names), **documents)
    group = Group(rack, gpus=1, most=3, machines=True)
    async with ranked(api, namespace), rack.running(), group.running(), asyncio.timeout(4 * WAIT_S_MAX):
        await rack.answered("ada")
        await asyncio.gather(*map(rack.answered, names))
        where = await rack.where()
        assert {where[one] for one in names} == set(group.nodes)
        assert len(group.nodes) == 2


@pytest.mark.parametrize("who", ["the Settings", "the node", "its MachineSet"])
async def test_attached_gpus_do_not_exceed_the_stated_maximum_of_the_node(
    rack: Rack, api: Api, namespace: str, who: str
) -> None:
    """`devicesMax`, or Cluster Autoscaler's annotation; Cluster API annotates a node with its MachineSet."""
    settings = rack.settings(most=2)
    assert isinstance(settings["nodes"], list)
    if who != "the Settings":
        del settings["nodes"][0]["devicesMax"]
    two = model("two", idleSeconds=600, gpu={"count": 2}, replicas={"max": 1})
    rack.house.write(two, model("three", gpu={"count": 3}, replicas={"max": 1}), **settings)
    if who == "its MachineSet":
        await machine_set(api, namespace, {GPU_COUNT: "2"})
        rack.notes = {OWNER_KIND: "MachineSet", OWNER_NAME: namespace, OWNER_NAMESPACE: namespace}
    elif who == "the node":
        rack.notes = {GPU_COUNT: "2"}
    async with rack.running(), asyncio.timeout(4 * WAIT_S_MAX):
        while (await rack.house.call("two"))[0] != 200:
            assert rack.counts in ([0], [0, 1], [0, 1, 2])
        assert rack.counts == [0, 1, 2]
        status, why = await rack.house.call("three")
        assert status == 503, why
        assert rack.counts == [0, 1, 2]
