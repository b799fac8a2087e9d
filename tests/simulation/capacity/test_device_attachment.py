"""A Device is attached for requests without room, serves them, and is released, with only the fabric simulated."""

from __future__ import annotations

import asyncio

from tests.simulation.case_harness import Stage, model, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.capacity_providers import ATTACH_S, RackTown
from tests.support.fakes.provider import Fate, Held

LONG = Manners(start_s=(1.0, 1.0), serve_s=(16.0, 16.0))


def held(stage: Stage) -> list[Held]:
    """Capacity that the fabric has delivered or is about to deliver."""
    assert isinstance(stage.town, RackTown)
    return stage.town.rack.alive


def rack(stage: Stage) -> RackTown:
    assert isinstance(stage.town, RackTown)
    return stage.town


@simulated(model("a", residency_s=600.0), model("b", residency_s=600.0), manners=LONG, kind=RackTown)
async def test_surge_attaches_one_device_at_once_and_detaches_it_when_idle(stage: Stage) -> None:
    town = rack(stage)
    first = town.call("a")
    await stage.until(lambda: first.first_byte_s is not None)
    began_s, second = town.now(), town.call("b")
    await stage.until(lambda: bool(held(stage)), within_s=0.1)
    assert town.now() - began_s <= 0.1, "from the Call to the order"
    await stage.until(lambda: stage.replicas("b") == 1, within_s=ATTACH_S + 2.0)
    assert await stage.answered([first, second]) == {"completed": 2}
    assert town.rack.orders == 1
    await stage.until(lambda: not held(stage), within_s=5.0 * ATTACH_S + 120.0)
    assert not town.rack.disturbed, "no replica used it"
    assert stage.replicas("a") == stage.replicas("b") == 0


@simulated(model("a", residency_s=600.0), model("b", residency_s=600.0), manners=LONG, kind=RackTown)
async def test_capacity_order_is_cancelled_when_its_client_disconnects(stage: Stage) -> None:
    town = rack(stage)
    town.rack.fate = lambda order: Fate(after_s=60.0, commits_s=40.0)
    first = town.call("a")
    await stage.until(lambda: first.first_byte_s is not None)
    second = town.call("b")
    await stage.until(lambda: bool(held(stage)))
    town.leave(second)
    await stage.until(lambda: not held(stage), within_s=15.0)
    assert stage.starts("b") == 0
    assert await stage.answered([first]) == {"completed": 1}


@simulated(model("a", residency_s=600.0), model("b", residency_s=600.0), manners=LONG, kind=RackTown)
async def test_attached_device_serves_the_next_surge_without_another_order(stage: Stage) -> None:
    town = rack(stage)
    first, second = town.call("a"), town.call("b")
    assert await stage.answered([first, second]) == {"completed": 2}
    await stage.until(lambda: stage.replicas("a") == stage.replicas("b") == 0)
    assert len(held(stage)) == 1, "it stays for a while"
    assert await stage.answered([town.call("a"), town.call("b")]) == {"completed": 2}
    assert town.rack.orders == 1


@simulated(model("a", residency_s=600.0), model("b", residency_s=600.0), manners=LONG, strict=False, kind=RackTown)
async def test_new_leader_does_not_repeat_an_open_capacity_order(stage: Stage) -> None:
    town = rack(stage)
    first, second = town.call("a"), town.call("b")
    await stage.until(lambda: bool(held(stage)))
    town.crash_autoscaler()
    await asyncio.sleep(1.0)
    town.start_autoscaler()
    assert await stage.answered([first, second]) == {"completed": 2}
    assert town.rack.orders == 1
    await stage.until(lambda: not held(stage), within_s=5.0 * ATTACH_S + 120.0)
