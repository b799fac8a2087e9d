"""Reliability section 5 C in virtual time: repartitioned nodes (case 24)."""

from __future__ import annotations

import asyncio

import pytest

from autoscaler.contract import ModelName
from autoscaler.explain.decision_log import Log
from autoscaler.explain.model import explain_model
from autoscaler.queries import mig_status
from autoscaler.queries.mig_status import TRIES_MAX
from autoscaler.rearrange.mig_repartition import EVERY_S, WAIT_S
from tests.simulation.case_harness import Stage, model, simulated
from tests.simulation.environment.machine import Manners
from tests.simulation.installations.mig_nodes import CUT_S, CutTown

MANNERS = Manners(start_s=(0.5, 0.5), serve_s=(0.1, 0.2))
RETRY_S, CUT_S_MAX = (100.0, 150.0), 240.0
"""The times of `autoscaler.queries.mig_status`, shortened: nothing else depends on them."""
SMALL, BIG = model("small", memory_gib=5, idle_s=60.0), model("big", memory_gib=30, idle_s=60.0)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mig_status, "RETRY_S", RETRY_S)
    monkeypatch.setattr(mig_status, "CUT_S_MAX", CUT_S_MAX)


def town_of(stage: Stage) -> CutTown:
    assert isinstance(stage.town, CutTown)
    return stage.town


def explanation(stage: Stage, name: str = "big") -> str:
    """The reason that `explain` gives for a Model."""
    loop = stage.loop
    return " ".join(explain_model(loop.world, loop.plan, Log(), ModelName(name), stage.town.now()).sentences)


def orders(stage: Stage) -> dict[str, int]:
    """Number of orders by node."""
    return {name: len(node.orders) for name, node in town_of(stage).nodes.items()}


@pytest.mark.case("24")
@pytest.mark.parametrize("whose", ["ours", "others"])
@simulated(SMALL, BIG, manners=MANNERS, kind=CutTown)
async def test_mig_node_in_use_is_repartitioned_only_when_it_is_idle(stage: Stage, whose: str) -> None:
    """One node is in use by a replica that has requests, one by a pod of another owner.
    `explain` has the reason; waiting requests are not rejected. The first idle node is repartitioned; all are served.
    """
    town = town_of(stage)
    town.others = {"n2 nvidia.com/mig-1g.10gb": 1}
    town.show()
    await stage.answered([town.call("small")])
    (there,) = town.machine.engines.values()
    assert there.replica.resources.slices[0].startswith("n1/")
    waiting = town.call("big")
    for _ in range(120):
        await stage.answered([town.call("small")])
        await asyncio.sleep(1.0)
    assert orders(stage) == {"n1": 0, "n2": 0}
    assert not waiting.ended, "it is not rejected for lack of a device"
    assert "could be repartitioned for it, once it is idle" in explanation(stage)
    if whose == "others":
        town.others = {}
        town.show()
    within_s = EVERY_S + CUT_S + 10.0 + (0 if whose == "others" else 60.0)
    assert await stage.answered([waiting], within_s=within_s) == {"completed": 1}
    assert orders(stage) == ({"n1": 0, "n2": 1} if whose == "others" else {"n1": 1, "n2": 0})
    assert await stage.answered([town.call("small"), town.call("big")], within_s=30) == {"completed": 2}
    assert town.harmed == []


@pytest.mark.case("24")
@simulated(SMALL, BIG, manners=MANNERS, kind=CutTown)
async def test_node_with_failing_repartitioning_is_excluded_after_max_tries(stage: Stage) -> None:
    town = town_of(stage)
    town.nodes["n1"].fate = lambda tries: "failed"
    town.others = {"n2 nvidia.com/mig-1g.10gb": 1}
    town.show()
    waiting = town.call("big", wait_s=3600.0)
    await stage.until(lambda: orders(stage)["n1"] == TRIES_MAX, within_s=sum(RETRY_S) + 2 * WAIT_S)
    await asyncio.sleep(max(RETRY_S))
    assert orders(stage) == {"n1": TRIES_MAX, "n2": 0}
    configs = [one.config for one in town.nodes["n1"].orders]
    assert len({*configs}) == TRIES_MAX, "the same order has no effect"
    assert await stage.answered([town.call("small") for _ in range(3)]) == {"completed": 3}
    assert town.on_node("n1") == [], "nothing is placed on it"
    assert len(town.on_node("n2")) == 1, "others are unaffected"
    assert "n1/mig-1g.10gb-0: its node could not be repartitioned in 3 attempts" in explanation(stage)
    assert "node n2 could be repartitioned for it, once it is idle" in explanation(stage)
    await stage.until(lambda: town.on_node("n2") == [])
    town.others = {}
    town.show()
    assert await stage.answered([waiting], within_s=CUT_S + EVERY_S + WAIT_S) == {"completed": 1}
    assert orders(stage) == {"n1": TRIES_MAX, "n2": 1}
    assert town.harmed == []


@pytest.mark.case("24")
@pytest.mark.parametrize("ends", ["up again", "never"])
@simulated(SMALL, BIG, manners=MANNERS, kind=CutTown)
async def test_second_node_is_repartitioned_only_if_the_first_stays_in_reboot(stage: Stage, ends: str) -> None:
    """mig-manager had the machine rebooted. It comes back repartitioned, or never does."""
    town = town_of(stage)
    town.nodes["n1"].fate = lambda tries: "rebooting"
    waiting = town.call("big", wait_s=2 * CUT_S_MAX)
    await stage.until(lambda: orders(stage)["n1"] == 1, within_s=WAIT_S + 5.0)
    assert await stage.answered([town.call("small")]) == {"completed": 1}
    assert len(town.on_node("n2")) == 1, "others are unaffected"
    await stage.until(lambda: town.nodes["n1"].state == "rebooting", within_s=CUT_S + 5.0)
    await asyncio.sleep(CUT_S)
    assert town.on_node("n2") == []
    assert orders(stage) == {"n1": 1, "n2": 0}, "no other node is cut for the same"
    if ends == "up again":
        node = town.nodes["n1"]
        assert node.order is not None
        node.state, node.cuts = "success", node.order.cuts[0]
        town.show()
        assert await stage.answered([waiting], within_s=5.0) == {"completed": 1}
        assert orders(stage) == {"n1": 1, "n2": 0}
    else:
        assert await stage.answered([waiting], within_s=CUT_S_MAX + EVERY_S + CUT_S) == {"completed": 1}
        assert orders(stage) == {"n1": 1, "n2": 1}, "one that did not fail comes first"
    assert town.harmed == []


@pytest.mark.case("24")
@simulated(SMALL, BIG, manners=MANNERS, kind=CutTown)
async def test_new_leader_does_not_repeat_a_running_repartitioning(stage: Stage) -> None:
    town = town_of(stage)
    waiting = town.call("big")
    await stage.until(lambda: sum(orders(stage).values()) == 1, within_s=WAIT_S + 5.0)
    town.crash_autoscaler()
    town.managers.clear()
    await asyncio.sleep(2.0)
    town.start_autoscaler()
    assert await stage.answered([waiting], within_s=CUT_S + 30.0) == {"completed": 1}
    assert sum(orders(stage).values()) == 1
    assert town.harmed == []
