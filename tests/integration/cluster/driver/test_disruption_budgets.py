"""PodDisruptionBudgets of users for our pods, as the real disruption controller evaluates them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.inventory.disruption_budgets import Disruptions
from autoscaler.state.events import DisruptionsSeen, Seen
from tests.integration.cluster.support.driver.node_fixture import Scene
from tests.support.harness.driver_events import WAIT_S_MAX, running

GROUP = "policy/v1"
TEAM = {"matchExpressions": [{"key": "team", "operator": "In", "values": ["ml"]}]}


class Received:
    """The last report."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.now: Mapping[ReplicaId, str] = {}

    def observe(self, batch: tuple[DisruptionsSeen, ...]) -> None:
        self.now = batch[-1].undisturbed
        self._changed.set()

    async def until(self, right: Callable[[Mapping[ReplicaId, str]], bool]) -> None:
        async with asyncio.timeout(WAIT_S_MAX):
            while not right(self.now):
                self._changed.clear()
                await self._changed.wait()


async def test_replica_is_reported_as_protected_if_its_pdb_allows_no_eviction(scene: Scene) -> None:
    budgets = f"/apis/{GROUP}/namespaces/{scene.namespace}/poddisruptionbudgets"
    wanted = {"minAvailable": 1, "selector": TEAM}
    protected, driver = Received(), scene.driver()
    watching = asyncio.create_task(Disruptions(scene.api, scene.namespace, protected.observe).run())
    try:
        async with running(driver) as observed:
            one, model = scene.engine("r1", labels={"team": "ml"})
            other, of_others = scene.engine("r2", gpu=1, labels={"team": "web"})
            for replica, its in ((one, model), (other, of_others)):
                driver.start(replica, its)
                await observed.until(replica.id, Seen.READY)
            body = {"apiVersion": GROUP, "kind": "PodDisruptionBudget", "metadata": {"name": "keep"}, "spec": wanted}
            await scene.api.create(budgets, body)
            await protected.until(lambda now: now == {one.id: "keep"})
            await scene.api.patch(f"{budgets}/keep", {"spec": {"minAvailable": 0}})
            await protected.until(lambda now: not now)
            status = (await scene.api.get(f"{budgets}/keep"))["status"]
            assert status["disruptionsAllowed"] == 1, "the controller counts a pod without an owner for minAvailable"
            await scene.api.patch(f"{budgets}/keep", {"spec": {"minAvailable": 1}})
            await protected.until(lambda now: now == {one.id: "keep"})
            await scene.api.delete(f"{budgets}/keep")
            await protected.until(lambda now: not now)
    finally:
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
