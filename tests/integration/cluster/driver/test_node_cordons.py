"""Cordons, stored on the Node: an operator's cordon survives restarts, and `kubectl cordon` counts as well."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from pytest_aiohttp import AiohttpClient

from autoscaler.drivers.driver import CordonError
from autoscaler.drivers.kubernetes.inventory.node_cordons import ANNOTATION, NodeCordons
from autoscaler.explain.decision_log import Log
from autoscaler.kubernetes.api import Api, ApiError
from autoscaler.kubernetes.constants import NODES
from autoscaler.kubernetes.kubeconfig import load_api_access
from autoscaler.server.ops import OperationsServer
from autoscaler.server.order_handlers import Commands
from autoscaler.state.events import CordonsSeen
from autoscaler.state.world import Cordon, CordonTarget
from tests.integration.cluster.support.installations.leader_change import Fenced, Moment, Write
from tests.support.builders.worlds import device, world
from tests.support.harness.manual_loop import SteppedLoop

WAIT_S_MAX = 90.0
LATE_S_MAX = 30.0
"""The server's time is read from its responses, which a busy machine may deliver late."""


class Seen:
    """The orders of one node as observed last."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._changed = asyncio.Event()
        self.orders: dict[CordonTarget, Cordon] = {}

    def observe(self, batch: tuple[CordonsSeen, ...]) -> None:
        self.orders = {one.place: one for one in batch[-1].cordons if one.node == self._node}
        self._changed.set()

    async def until(self, right: Callable[[dict[CordonTarget, Cordon]], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not right(self.orders):
                self._changed.clear()
                await self._changed.wait()


@pytest.fixture
async def name(api: Api) -> AsyncIterator[str]:
    """A node without a kubelet."""
    made = f"cordon-{uuid.uuid4().hex[:8]}"
    await api.create(NODES, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": made}})
    yield made
    await api.delete(f"{NODES}/{made}")


@contextlib.asynccontextmanager
async def watching(api: Api, seen: Seen) -> AsyncIterator[NodeCordons]:
    one = NodeCordons(api, api, seen.observe)
    task = asyncio.create_task(one.run())
    yield one
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


async def test_cordon_is_stored_on_the_node_and_read_by_another_autoscaler(api: Api, name: str) -> None:
    node, gpu = CordonTarget("node", name), CordonTarget("device", f"{name}/gpu0")
    first, second = Seen(name), Seen(name)
    async with watching(api, first) as one:
        await one.put(Cordon(place=node, node=name, since_s=1.0, drain=True, force=True))
        await one.put(Cordon(place=gpu, node=name, since_s=1.0))
        await first.until(lambda orders: orders.keys() == {node, gpu})
        assert (await api.get(f"{NODES}/{name}"))["spec"]["unschedulable"] is True
    async with watching(api, second) as other:
        await second.until(lambda orders: orders.keys() == {node, gpu})
        kept = second.orders[node]
        assert (kept.drain, kept.force, second.orders[gpu].drain) == (True, True, False)
        assert abs(kept.since_s - 1.0) < LATE_S_MAX, "moments survive, though clocks differ"
        await other.lift(node)
        await second.until(lambda orders: orders.keys() == {gpu})
        await other.lift(gpu)
        await second.until(lambda orders: not orders)
        left = await api.get(f"{NODES}/{name}")
        assert ANNOTATION not in left["metadata"].get("annotations", {})
        assert not left["spec"].get("unschedulable")


async def test_kubectl_cordon_adds_a_node_cordon_and_uncordon_removes_it(api: Api, name: str) -> None:
    node, seen = CordonTarget("node", name), Seen(name)
    async with watching(api, seen) as one:
        await api.patch(f"{NODES}/{name}", {"spec": {"unschedulable": True}})
        await seen.until(lambda orders: node in orders)
        await one.put(Cordon(place=node, node=name, since_s=1.0, drain=True))
        await seen.until(lambda orders: orders[node].drain)
        await api.patch(f"{NODES}/{name}", {"spec": {"unschedulable": None}})
        await seen.until(lambda orders: not orders)


async def test_concurrent_cordons_on_one_node_are_all_kept(api: Api, name: str) -> None:
    gpus = [CordonTarget("device", f"{name}/gpu{number}") for number in range(4)]
    seen = Seen(name)
    await api.patch(f"{NODES}/{name}", {"metadata": {"annotations": {ANNOTATION: "{"}}})
    async with watching(api, seen) as one:
        await asyncio.gather(*(one.put(Cordon(place=gpu, node=name, since_s=1.0)) for gpu in gpus))
        await seen.until(lambda orders: orders.keys() == set(gpus))


@pytest.mark.case("26")
@pytest.mark.parametrize("moment", Moment)
@pytest.mark.standard
async def test_failed_cordon_write_of_a_former_leader_keeps_a_newer_cordon(
    api: Api, name: str, kubeconfig: Path, moment: Moment
) -> None:
    """The sender gets an error that the cordon may not be in effect; a late write reverts nothing ordered since."""
    node, gpu, seen = CordonTarget("node", name), CordonTarget("device", f"{name}/gpu0"), Seen(name)
    async with Fenced(await load_api_access(kubeconfig)) as first, watching(api, seen) as second:
        first.leads = True
        first.end_at(Write("PATCH", f"/nodes/{name}"), moment)
        with pytest.raises(CordonError, match="try again"):
            await NodeCordons(first, api, seen.observe).put(Cordon(place=node, node=name, since_s=1.0))
        await second.put(Cordon(place=gpu, node=name, since_s=1.0))
        if moment is Moment.LATE:
            assert await first.release() == "Conflict"
        kept = {node, gpu} if moment is Moment.AFTER else {gpu}
        await seen.until(lambda orders: orders.keys() == kept)
        assert (await api.get(f"{NODES}/{name}"))["spec"].get("unschedulable", False) is (moment is Moment.AFTER)


async def test_cordon_of_a_nonexistent_node_fails_with_not_found(api: Api, name: str) -> None:
    removed = f"{name}-gone"
    with pytest.raises(CordonError, match="NotFound"):
        await NodeCordons(api, api, Seen(removed).observe).put(
            Cordon(place=CordonTarget("node", removed), node=removed, since_s=0.0)
        )
    with pytest.raises(ApiError):
        await api.get(f"{NODES}/{removed}")


async def test_http_cordon_makes_the_node_and_its_devices_unschedulable(
    api: Api, name: str, aiohttp_client: AiohttpClient
) -> None:
    """Composed as in a cluster's autoscaler: commands, the orders on Nodes, and the loop that observes them."""
    loop = SteppedLoop(world([], [device(f"{name}/gpu0", node=name)])).loop
    kept = NodeCordons(api, api, loop.observe)
    task = asyncio.create_task(kept.run())
    server = OperationsServer(loop, Log(), lambda: b"", tuple, commands=Commands(loop, kept))
    client = await aiohttp_client(server.application())
    message = f"node {name} is cordoned by an operator"
    for verb, closed, unschedulable in (("cordon", message, True), ("uncordon", "", None)):
        answer = await client.post(f"/api/v1/nodes/{name}/{verb}", json={})
        assert answer.status == 200, await answer.text()
        async with asyncio.timeout(WAIT_S_MAX):
            while True:
                loop.step()
                (shown,) = await (await client.get("/api/v1/devices")).json()
                if shown["closed"] == closed:
                    break
                await asyncio.sleep(0.01)
        assert (await api.get(f"{NODES}/{name}"))["spec"].get("unschedulable") is unschedulable
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
