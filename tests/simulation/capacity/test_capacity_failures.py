"""Reliability section 5 E in virtual time: Providers, nodes and fabrics that fail (cases 31 to 33).
Providers break their promises, nodes are removed, and a fabric fails to detach a device.
"""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.contract import ReplicaId
from autoscaler.spec.model import Model
from autoscaler.state.capacity import Lease
from autoscaler.state.lifecycle import ReplicaState as S
from autoscaler.state.world import Replica, World
from tests.simulation.case_harness import Stage, model, play, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.capacity_providers import ATTACH_S, CLOUD_S, CloudTown, RackTown
from tests.simulation.installations.installation import Journey
from tests.support.fakes import driver
from tests.support.fakes.provider import FakeProvider, Fate

LONG = Manners(start_s=(1.0, 1.0), serve_s=(200.0, 200.0))
BROKEN = {
    "accepts and never delivers": Fate(after_s=ATTACH_S, commits_s=1.0, never=True),
    "rejects": Fate(refused="no quota"),
    "delivers half": Fate(after_s=ATTACH_S, commits_s=1.0, half=True),
    "fails": Fate(fails_s=ATTACH_S / 2),
    "loses the order": Fate(deaf=True),
}
GIVEN_UP_S = 120.0
"""Three times the expected time, at least 30 s, plus the time for lists and retries."""
MODELS = (model("a", residency_s=600.0), model("b", residency_s=600.0))


def rack(stage: Stage) -> RackTown:
    assert isinstance(stage.town, RackTown)
    return stage.town


def cloud(stage: Stage) -> FakeProvider:
    assert isinstance(stage.town, CloudTown)
    return stage.town.cloud


def now(stage: Stage) -> World:
    """The `World` of the current leader."""
    return stage.loop.world


def leases(stage: Stage) -> list[Lease]:
    return [*now(stage).capacity.leases.values()]


def replicas(stage: Stage, name: str) -> dict[ReplicaId, Replica]:
    """The replicas of a Model."""
    return {id: one for id, one in now(stage).replicas.items() if one.model == name}


async def crowded(stage: Stage) -> Journey:
    """A request that occupies the only Device."""
    first = stage.town.call("a")
    await stage.until(lambda: first.first_byte_s is not None)
    return first


# --- case 31 ----------------------------------------------------------------------------------------------------------


@pytest.mark.case("31")
@pytest.mark.parametrize("how", sorted(BROKEN))
@simulated(*MODELS, manners=LONG, kind=CloudTown)
async def test_request_is_served_by_the_next_offer_if_an_order_fails(stage: Stage, how: str) -> None:
    town = rack(stage)
    town.rack.fate = lambda order: BROKEN[how]
    first = await crowded(stage)
    second = town.call("b")
    took_s = await stage.until(lambda: second.first_byte_s is not None, within_s=GIVEN_UP_S + CLOUD_S)
    assert took_s >= CLOUD_S
    assert cloud(stage).orders == 1
    assert town.rack.orders <= 4, "it is left alone for a while"
    await stage.until(lambda: not town.rack.alive, within_s=60.0)
    assert await stage.answered([first, second]) == {"completed": 2}
    await stage.until(lambda: not cloud(stage).alive and not leases(stage), within_s=3600.0, step_s=1.0)


@pytest.mark.case("31")
@pytest.mark.parametrize("how", sorted(BROKEN))
@simulated(*MODELS, manners=LONG, kind=RackTown, devices=0)
async def test_requests_fail_with_no_capacity_when_no_provider_delivers(stage: Stage, how: str) -> None:
    town = rack(stage)
    town.rack.fate = lambda order: BROKEN[how]
    call = town.call("b", wait_s=1000.0)
    await stage.until(lambda: bool(call.ended), within_s=GIVEN_UP_S)
    assert await stage.answered([call]) == {"no_capacity": 1}
    await stage.until(lambda: not town.rack.alive and not leases(stage), within_s=60.0)
    assert town.rack.orders <= 4, "one of which may be reported again"


@pytest.mark.case("31")
@pytest.mark.parametrize("again", [True, False])
@simulated(*MODELS, manners=LONG, kind=RackTown)
async def test_late_delivery_is_used_for_new_demand_or_returned_in_a_minute(stage: Stage, again: bool) -> None:
    town = rack(stage)
    town.rack.fate = lambda order: Fate(after_s=60.0, commits_s=50.0, late=True)
    first = await crowded(stage)
    second = town.call("b")
    await stage.until(lambda: bool(town.rack.alive))
    town.leave(second)
    await stage.until(lambda: town.rack.alive[0].cancelled, within_s=20.0)
    await stage.until(lambda: bool(town.rack.slices), within_s=60.0)
    if again:
        third = town.call("b")
        await stage.until(lambda: stage.replicas("b") == 1, within_s=5.0)
        assert len(town.rack.ever) == 1
        assert await stage.answered([first, third]) == {"completed": 2}
    await stage.until(lambda: not town.rack.alive, within_s=3600.0 if again else 60.0)
    assert not town.rack.disturbed


# --- case 32 ----------------------------------------------------------------------------------------------------------

SPOT, CONSOLIDATED = "aws-node-termination-handler/spot-itn", "karpenter.sh/disrupted"


async def added(stage: Stage) -> tuple[Journey, Journey, str]:
    """A request on the existing device, one for which a node is added, and that node."""
    rack(stage).rack.closed = "nothing is free"
    rack(stage).rack.pool = 0
    first = await crowded(stage)
    second = stage.town.call("b")
    await stage.until(lambda: bool(cloud(stage).slices), within_s=2 * CLOUD_S)
    return first, second, cloud(stage).slices[0].node


@pytest.mark.case("32")
@pytest.mark.parametrize("key", [SPOT, CONSOLIDATED])
def test_node_disrupted_during_weight_loading_costs_at_most_one_more_start(key: str) -> None:
    async def act(stage: Stage) -> None:
        first, second, node = await added(stage)
        await stage.until(lambda: stage.replicas("b") == 1)
        await asyncio.sleep(5.0)
        rack(stage).taint(node, key)
        assert await stage.answered([second], within_s=2 * CLOUD_S + 300.0) == {"completed": 1}
        assert stage.starts("b") <= 2
        assert await stage.answered([first]) == {"completed": 1}

    slow = Manners(start_s=(15.0, 15.0), serve_s=(50.0, 50.0))
    play(act, *MODELS, manners=slow, kind=CloudTown, strict=False)


@pytest.mark.case("32")
@simulated(*MODELS, manners=Manners(start_s=(1.0, 1.0), serve_s=(25.0, 25.0)), kind=CloudTown, strict=False)
async def test_replica_on_a_reclaimed_spot_node_drains_within_two_seconds(stage: Stage) -> None:
    first, second, node = await added(stage)
    await stage.until(lambda: second.first_byte_s is not None)
    (old,) = replicas(stage, "b")
    rack(stage).taint(node, SPOT)
    await stage.until(lambda: replicas(stage, "b")[old].state is S.DRAINING, within_s=2.0)
    third = stage.town.call("b")
    await stage.until(lambda: third.first_byte_s is not None, within_s=2 * CLOUD_S + 60.0)
    assert old not in third.served_by
    assert await stage.answered([first, second, third]) == {"completed": 3}
    assert second.served_by == {old}


# --- case 33 ----------------------------------------------------------------------------------------------------------

SCRUBS_S = 90.0


@pytest.mark.case("33")
def test_device_is_detached_only_after_its_memory_is_free() -> None:
    async def act(stage: Stage) -> None:
        town = rack(stage)
        town.machine.fate = scrubs
        first = await crowded(stage)
        second = town.call("b")
        assert await stage.answered([first, second]) == {"completed": 2}
        ended_s = town.now()
        await stage.until(lambda: not town.rack.alive, within_s=3600.0, step_s=0.1)
        assert town.now() - ended_s > SCRUBS_S
        assert not town.rack.disturbed, "no replica used it"

    def scrubs(replica: Replica, of: Model) -> driver.Fate:
        del replica, of
        return driver.Fate(ready_after_s=1.0, stops_in_s=0.1, clean_after_s=SCRUBS_S)

    quick = (model("a", residency_s=600.0, idle_s=1.0), model("b", residency_s=600.0, idle_s=1.0))
    play(act, *quick, manners=Manners(start_s=(1.0, 1.0), serve_s=(16.0, 16.0)), kind=RackTown)


@pytest.mark.case("33")
@simulated(*MODELS, manners=Manners(start_s=(1.0, 1.0), serve_s=(16.0, 16.0)), kind=RackTown)
async def test_hanging_device_detach_is_retried_about_once_a_minute(stage: Stage) -> None:
    town = rack(stage)
    town.rack.stuck = True
    first = await crowded(stage)
    second = town.call("b")
    assert await stage.answered([first, second]) == {"completed": 2}
    await stage.until(lambda: bool(town.rack.releases), within_s=3600.0, step_s=1.0)
    await asyncio.sleep(3600.0)
    assert 55 <= town.rack.releases <= 65
    (lease,) = leases(stage)
    assert lease.owner == "b"
    assert lease.leaving
    town.rack.stuck = False
    await stage.until(lambda: not town.rack.alive and not leases(stage), within_s=120.0)
