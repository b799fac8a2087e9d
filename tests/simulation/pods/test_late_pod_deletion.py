"""Case 18 of reliability section 5 in virtual time: a pod is gone, and the watch reports it late or never.

Loop, Kubernetes driver, watches and gateways are the real ones; two autoscalers, one of which leads.
"""

from __future__ import annotations

import asyncio
import itertools

import pytest
from msgspec.structs import replace

from autoscaler.contract import ReplicaId
from autoscaler.drivers.kubernetes.proof_of_clean import FORCED_S
from autoscaler.spec.model import ReplicaRange
from gateway.dispatch.call import Outcome
from gateway.dispatch.slots import SUSPECT_S
from tests.simulation.case_harness import Stage, model
from tests.simulation.environment.api_server import PODS
from tests.simulation.installations.cluster import Cluster, Kubelet, play
from tests.simulation.installations.gateway import SimGateway
from tests.simulation.installations.installation import Journey

ROUTES_S_MAX = 30.0
"""Time limit until a vanished replica is in no gateway's Routes."""
CUT_EVERY_S = 10.0
FREE_S_MAX = FORCED_S + 100.0
"""Time limit until the device of a force-deleted pod counts as free, without an agent, grace included."""
ENDS = (PODS, "DELETED")
COUNT = 2
ONE = model("a", slots=4, replicas=COUNT)
A = replace(ONE, spec=replace(ONE.spec, replicas=ReplicaRange(min=COUNT, max=COUNT)))


def held(town: Cluster, replica: ReplicaId) -> bool:
    """Whether a gateway has the replica in its Routes for new requests."""
    return any(use.replica == replica for one in town.gateways for use in one.dispatch.report(town.now()).replicas)


def all_ready(town: Cluster) -> bool:
    """Whether the expected number of engines is ready."""
    return sum(engine.ready for engine in town.machine.engines.values()) == COUNT


def tries(calls: list[Journey], gateway: SimGateway, replica: ReplicaId, since_s: float) -> list[float]:
    """The times at which a gateway sent requests to a Replica."""
    granted = [
        each for one in calls if one.gateway is gateway for each in zip(one.granted_s, one.granted_to, strict=True)
    ]
    return sorted(at_s for at_s, to in granted if to == replica and at_s > since_s)


def goes(town: Cluster, how: str, replica: ReplicaId) -> None:
    """Remove that replica with all its requests."""
    assert isinstance(town.machine, Kubelet)
    if how == "evicted":
        town.machine.evict(replica)
    else:
        town.machine.delete_by_force(replica)


async def calls_all_the_time(town: Cluster, calls: list[Journey]) -> None:
    """Usually fewer at once than one replica has Slots."""
    while True:
        calls.append(town.call("a"))
        await asyncio.sleep(town.rng.uniform(0.05, 0.2))


async def cuts(town: Cluster) -> None:
    """Cut all watches repeatedly."""
    while True:
        town.server.cut()
        await asyncio.sleep(CUT_EVERY_S)


@pytest.mark.case("18")
@pytest.mark.parametrize("how", ["its end is not reported", "watches are cut", "evicted"])
@pytest.mark.parametrize("seed", range(1, 6))
def test_unanswered_requests_of_a_vanished_pod_move_to_another_replica(how: str, seed: int) -> None:
    """No request without a first byte is lost, and one replica is started as replacement.
    A gateway whose connect failed retries the replica only rarely. We delete evicted pods, again without an event.
    """

    async def act(stage: Stage, town: Cluster) -> None:
        town.server.loses = lambda collection, event: how != "watches are cut" and (collection, event) == ENDS
        await stage.until(lambda: all_ready(town))
        calls = list[Journey]()
        loading = town.task(calls_all_the_time(town, calls))
        await asyncio.sleep(town.rng.uniform(1.0, 5.0))
        victim = town.rng.choice(list(town.machine.engines))
        await stage.until(lambda: town.used(victim) > 0)
        cutting = town.task(cuts(town)) if how == "watches are cut" else None
        gone_s = town.now()
        goes(town, how, victim)
        await stage.until(lambda: not held(town, victim), ROUTES_S_MAX)
        left_s = town.now()
        await stage.until(lambda: all_ready(town), ROUTES_S_MAX)
        await asyncio.sleep(CUT_EVERY_S)
        loading.cancel()
        await stage.answered(calls)
        for gateway in town.gateways:
            tried_s = tries(calls, gateway, victim, gone_s)
            assert all(later - sooner >= SUSPECT_S for sooner, later in itertools.pairwise(tried_s)), tried_s
            assert all(at_s <= left_s for at_s in tried_s)
        cut = [one for one in calls if one.ended[0].outcome != Outcome.COMPLETED]
        assert {replica for one in cut for replica in one.served_by} <= {victim}
        assert all(one.first_byte_s is not None and one.first_byte_s <= gone_s for one in cut), "or it would have moved"
        await stage.until(lambda: victim not in town.leader.loop.world.replicas, FREE_S_MAX, step_s=1.0)
        if cutting is not None:
            cutting.cancel()
        assert (stage.starts(), len(town.epochs), len(town.server.objects[PODS])) == (COUNT + 1, 1, COUNT)

    play(act, A, seed=seed, gpus=COUNT + 1)
