"""Faults between the autoscaler and a capacity provider (issue "More capacity", Faults), in virtual time.
Providers that break their own promises are case 31 (`tests.simulation.capacity.test_capacity_failures`).
"""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.state.lifecycle import ReplicaState as S
from tests.simulation.capacity.test_capacity_failures import (
    GIVEN_UP_S,
    LONG,
    MODELS,
    cloud,
    crowded,
    leases,
    rack,
    replicas,
)
from tests.simulation.case_harness import Stage, model, play, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.capacity_providers import ATTACH_S, CLOUD_S, CloudTown, RackTown
from tests.support.fakes.provider import Fate

HOUR_S = 3600.0


@simulated(*MODELS, manners=LONG, kind=CloudTown)
async def test_device_delivered_to_another_node_is_used_there(stage: Stage) -> None:
    """The device is listed at its actual node: it counts there, and is released like any other."""
    town = rack(stage)
    town.rack.fate = lambda order: Fate(after_s=ATTACH_S, commits_s=1.0, elsewhere="w9")
    first = await crowded(stage)
    second = town.call("b")
    await stage.until(lambda: second.first_byte_s is not None, within_s=ATTACH_S + 300.0)
    (there,) = replicas(stage, "b").values()
    assert {one.partition("/")[0] for one in there.resources.slices} == {"w9"}
    assert await stage.answered([first, second]) == {"completed": 2}
    assert (town.rack.orders, cloud(stage).orders) == (1, 0)
    await stage.until(lambda: not town.rack.alive and not leases(stage), within_s=HOUR_S, step_s=1.0)


@simulated(*MODELS, manners=LONG, kind=CloudTown)
async def test_lost_reply_to_a_capacity_order_causes_no_second_order(stage: Stage) -> None:
    town = rack(stage)
    town.rack.fate = lambda order: Fate(after_s=ATTACH_S, commits_s=1.0, lost_reply=True)
    first = await crowded(stage)
    second = town.call("b")
    await stage.until(lambda: second.first_byte_s is not None, within_s=ATTACH_S + 300.0)
    assert await stage.answered([first, second]) == {"completed": 2}
    assert len(town.rack.ever) == 1
    assert not cloud(stage).ever
    await stage.until(lambda: not town.rack.alive and not leases(stage), within_s=HOUR_S, step_s=1.0)


@pytest.mark.parametrize("comes", [True, False])
@simulated(*MODELS, manners=LONG, kind=CloudTown)
async def test_request_is_served_despite_unreadable_replies_of_the_provider(stage: Stage, comes: bool) -> None:
    """The provider took the order, and its replies are unreadable.
    Delivered capacity is detected and serves; else the next Offer is used. Nothing is released while replies are bad.
    """
    town = rack(stage)
    town.rack.fate = lambda order: Fate(after_s=ATTACH_S, commits_s=1.0, never=not comes)
    first = await crowded(stage)
    town.rack.garbage = True
    second = town.call("b")
    await stage.until(lambda: second.first_byte_s is not None, within_s=GIVEN_UP_S + CLOUD_S)
    assert (len(town.rack.ever), cloud(stage).orders) == (1, 0 if comes else 1)
    assert await stage.answered([first, second]) == {"completed": 2}
    town.rack.garbage = False
    await stage.until(lambda: not town.rack.alive, within_s=HOUR_S, step_s=1.0)
    await stage.until(lambda: not cloud(stage).alive and not leases(stage), within_s=HOUR_S, step_s=1.0)
    assert len(town.rack.ever) == 1


@pytest.mark.parametrize("busy", [True, pytest.param(False, marks=pytest.mark.deep)])
@simulated(*MODELS, model("c", residency_s=600.0), manners=LONG, kind=CloudTown)
async def test_provider_outage_of_an_hour_loses_no_request_and_no_order(stage: Stage, busy: bool) -> None:
    """Its delivered capacity keeps serving, and is released after the outage; meanwhile others deliver new capacity."""
    town = rack(stage)
    first = await crowded(stage)
    second = town.call("b")
    await stage.until(lambda: second.first_byte_s is not None, within_s=ATTACH_S + 300.0)
    assert len(town.rack.alive) == 1
    town.rack.away = True
    if busy:
        await asyncio.sleep(300.0)
        assert await stage.answered([first, second]) == {"completed": 2}
        assert await stage.answered([town.call("a"), town.call("b")]) == {"completed": 2}
        assert town.rack.orders == 1, "what is here serves"
    await asyncio.sleep(HOUR_S)
    assert await stage.answered([town.call("a"), town.call("b"), town.call("c")]) == {"completed": 3}
    assert town.rack.orders == 1
    assert not town.rack.disturbed
    town.rack.away = False
    await stage.until(lambda: not town.rack.alive, within_s=HOUR_S, step_s=1.0)
    await stage.until(lambda: not cloud(stage).alive and not leases(stage), within_s=HOUR_S, step_s=1.0)


@simulated(*MODELS, manners=Manners(start_s=(1.0, 1.0), serve_s=(16.0, 16.0)), kind=RackTown)
async def test_manually_detached_device_is_noticed_and_another_is_ordered(stage: Stage) -> None:
    """The device is idle: its Lease disappears with the next lists, and the next surge orders a new one."""
    town = rack(stage)
    first = await crowded(stage)
    second = town.call("b")
    assert await stage.answered([first, second]) == {"completed": 2}
    await stage.until(lambda: stage.replicas("b") == 0, within_s=HOUR_S, step_s=1.0)
    (held,) = town.rack.alive
    town.rack.detach(held.order.id.name)
    await stage.until(lambda: not leases(stage), within_s=120.0)
    assert town.rack.releases == 0, "there is nothing to give back"
    third = await crowded(stage)
    fourth = town.call("b")
    assert await stage.answered([third, fourth]) == {"completed": 2}
    assert len(town.rack.ever) == 2
    await stage.until(lambda: not town.rack.alive and not leases(stage), within_s=HOUR_S, step_s=1.0)


@simulated(*MODELS, manners=LONG, kind=RackTown, strict=False)
async def test_manual_detach_under_a_replica_fails_only_its_running_request(stage: Stage) -> None:
    town = rack(stage)
    first = await crowded(stage)
    second = town.call("b")
    await stage.until(lambda: second.first_byte_s is not None, within_s=ATTACH_S + 300.0)
    (old,) = replicas(stage, "b")
    (held,) = town.rack.alive
    town.rack.detach(held.order.id.name)
    town.machine.kill(old)
    await stage.until(lambda: bool(second.ended), within_s=60.0)
    await stage.until(lambda: old not in replicas(stage, "b"), within_s=60.0)
    third = town.call("b")
    await stage.until(lambda: third.first_byte_s is not None, within_s=GIVEN_UP_S)
    assert old not in third.served_by
    assert await stage.answered([first, third]) == {"completed": 2}
    assert len(town.rack.ever) == 2
    await stage.until(lambda: not town.rack.alive and not leases(stage), within_s=HOUR_S, step_s=1.0)


def test_node_lost_while_weights_load_costs_one_extra_start() -> None:
    """The node is lost without notice."""

    async def act(stage: Stage) -> None:
        town = rack(stage)
        town.rack.closed, town.rack.pool = "nothing is free", 0
        first = await crowded(stage)
        second = town.call("b")
        await stage.until(lambda: any(one.state is S.STARTING for one in replicas(stage, "b").values()), 2 * CLOUD_S)
        await asyncio.sleep(5.0)
        (old,) = replicas(stage, "b")
        (held,) = cloud(stage).alive
        cloud(stage).detach(held.order.id.name)
        town.machine.kill(old)
        assert await stage.answered([second], within_s=2 * CLOUD_S + 300.0) == {"completed": 1}
        assert stage.starts("b") == 2
        assert cloud(stage).orders == 2
        assert await stage.answered([first]) == {"completed": 1}

    slow = Manners(start_s=(15.0, 15.0), serve_s=(50.0, 50.0))
    play(act, *MODELS, manners=slow, kind=CloudTown, strict=False)
