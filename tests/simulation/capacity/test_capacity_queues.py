"""Capacity requests that wait in a queue, and requests that do not wait for them, in virtual time."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from autoscaler.spec.model import ReplicaRange
from autoscaler.state.capacity import Offer
from tests.simulation.capacity.test_capacity_failures import cloud, leases, now, rack
from tests.simulation.case_harness import Stage, model, play
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.capacity_providers import ADDED, GIB, CloudTown
from tests.support.fakes.provider import Fate

OPEN_S = 900.0
"""How long the order stays open.
Tests that simulate less use three days (`tests/unit/autoscaler/provisioning/test_provisioner.py`).
"""
QUICK = Manners(start_s=(1.0, 1.0), serve_s=(16.0, 16.0))
DWS = Offer(
    provider="rack", name="dws", product="H100", memory_bytes=80 * GIB, many=4, bought="flex", price_per_hour=0.5,
    expected_s=None,
)  # fmt: skip
"""A cloud's queue: the cheapest offer, without a delivery time."""
AT_ONCE_S = 1.0


def test_requests_fail_at_once_while_a_long_capacity_order_is_open() -> None:
    """Meanwhile other Models are served by other offers, and requests for this Model fail at once."""

    async def act(stage: Stage) -> None:
        town = rack(stage)
        town.rack.could = (DWS,)
        town.rack.fate = lambda order: Fate(after_s=OPEN_S, commits_s=OPEN_S)
        await stage.until(lambda: town.rack.orders > 0 or bool(leases(stage)), within_s=120.0)
        began_s = town.now()
        while town.now() < began_s + OPEN_S - 200.0:
            waits, first, second = town.call("big", wait_s=3600.0), town.call("a"), town.call("b")
            # mypy infers no type for a default of a lambda, which binds this iteration's request
            await stage.until(lambda one=waits: bool(one.ended), within_s=AT_ONCE_S)  # type: ignore[misc]
            assert await stage.answered([waits, first, second]) == {"no_capacity": 1, "completed": 2}
            await asyncio.sleep(60.0)
            assert town.rack.alive == town.rack.ever[:1], "what was asked for the others is taken back"
        assert cloud(stage).ever, "another rung served meanwhile"
        await stage.until(lambda: stage.replicas("big") == 1, within_s=OPEN_S, step_s=1.0)
        assert await stage.answered([town.call("big")]) == {"completed": 1}
        assert [(one.order.owner, one.phase) for one in town.rack.alive] == [("big", "here")]

    big = model("big", memory_gib=60, residency_s=600.0)
    big = replace(big, spec=replace(big.spec, replicas=ReplicaRange(min=1, max=1)))
    play(act, model("a", residency_s=600.0), model("b", residency_s=600.0), big, manners=QUICK, kind=CloudTown)


def test_request_with_short_deadline_fails_at_once_if_capacity_comes_later() -> None:
    """The expected delivery takes ten minutes; a Model whose requests may wait for that long waits."""

    async def act(stage: Stage) -> None:
        town = rack(stage)
        town.rack.pool = 0
        cloud(stage).could = (replace(ADDED, expected_s=600.0),)
        cloud(stage).fate = lambda order: Fate(after_s=600.0, commits_s=1.0)
        first = town.call("a")
        await stage.until(lambda: first.first_byte_s is not None)
        hasty = town.call("b", wait_s=60.0)
        await stage.until(lambda: bool(hasty.ended), within_s=AT_ONCE_S)
        assert await stage.answered([hasty]) == {"no_capacity": 1}
        assert now(stage).capacity.leases, "it is ordered all the same"

    slow = Manners(start_s=(1.0, 1.0), serve_s=(50.0, 50.0))
    play(act, model("a", residency_s=600.0), model("b", residency_s=600.0), manners=slow, kind=CloudTown)
