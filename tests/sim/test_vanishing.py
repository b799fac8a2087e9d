"""Case 18 of reliability section 5 in virtual time: a pod is gone, and the watch does not tell, or not at once.

Loop, Kubernetes driver, watches and gateways are the real ones; two autoscalers, of which one leads.
"""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.model import ReplicaRange
from gateway.call import Outcome
from tests.sim.cluster import Cluster, Kubelet, play
from tests.sim.objects import PODS
from tests.sim.stage import Stage, model
from tests.sim.town import Journey

ROUTES_S_MAX = 30.0
"""Within which a Replica that is gone is in no gateway's Routes."""
CUT_EVERY_S = 10.0
COUNT = 2
ONE = model("a", slots=4, replicas=COUNT)
A = replace(ONE, spec=replace(ONE.spec, replicas=ReplicaRange(min=COUNT, max=COUNT)))


def held(town: Cluster, replica: ReplicaId) -> bool:
    """Whether a gateway has it in its Routes, for Calls."""
    return any(use.replica == replica for one in town.gateways for use in one.dispatch.report(town.now()).replicas)


def goes(town: Cluster, how: str, replica: ReplicaId) -> None:
    """That Replica, with all its Calls."""
    assert isinstance(town.machine, Kubelet)
    if how == "evicted":
        town.machine.evict(replica)
        return
    if how == "watches are cut":
        town.server.cut()
    town.machine.delete_by_force(replica)


async def cuts(town: Cluster) -> None:
    """All watches, again and again."""
    while True:
        await asyncio.sleep(CUT_EVERY_S)
        town.server.cut()


@pytest.mark.parametrize("how", ["its end is not told", "watches are cut", "evicted"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_case_18_a_pod_that_is_gone_leaves_routes_and_its_calls_move(how: str, seed: int) -> None:
    """No Call is lost that had no byte yet; another takes its place, once. What is evicted is deleted, and that is not
    told either.
    """

    async def act(stage: Stage, town: Cluster) -> None:
        town.server.loses = lambda collection, event: how != "watches are cut" and (collection, event) == (PODS, "DELETED")
        cutting = town.task(cuts(town)) if how == "watches are cut" else None
        calls = list[Journey]()

        async def load() -> None:
            while True:
                calls.append(town.call("a"))
                await asyncio.sleep(town.rng.uniform(0.05, 0.2))

        await stage.until(lambda: sum(one.ready for one in town.machine.engines.values()) == COUNT, 60.0)
        loading = town.task(load())
        await asyncio.sleep(town.rng.uniform(1.0, 11.0))
        victim = town.rng.choice(list(town.machine.engines))
        await stage.until(lambda: town.used(victim) > 0)
        gone_s = town.now()
        goes(town, how, victim)
        a = await stage.until(lambda: not held(town, victim), ROUTES_S_MAX)
        b = await stage.until(lambda: sum(one.ready for one in town.machine.engines.values()) == COUNT, 60.0)
        c = await stage.until(lambda: victim not in town.leader.loop.world.replicas, ROUTES_S_MAX)
        await asyncio.sleep(20.0)
        loading.cancel()
        if cutting is not None:
            cutting.cancel()
        await stage.answered(calls)
        late = [j for j in calls for r, s in zip(j.granted_to, j.granted_s) if r == victim and s > gone_s]
        cut = [j for j in calls if j.ended[0].outcome != Outcome.COMPLETED]
        print(how, seed, a, b, c, len(calls), len(cut), [j.gateway.id for j in late], stage.starts(), town.machine.engines.keys())
        for journey in cut:
            assert journey.served_by == {victim}, journey
        assert (stage.starts(), len(town.epochs)) == (COUNT + 1, 1)

    play(act, A, seed=seed, gpus=COUNT + 1)
