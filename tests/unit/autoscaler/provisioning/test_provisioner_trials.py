"""Simulations by the provisioner: each is run once per plan, and no more than the orders need."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any  # passes on the arguments of a patched function

import pytest
from msgspec.structs import replace

from autoscaler.controller.loop import Loop
from autoscaler.placement.model.types import PlacementRequest
from autoscaler.placement.simulate import SimulationContext, devices_for
from autoscaler.planner.plan import plan
from autoscaler.provisioning import provisioner
from autoscaler.provisioning.provisioner import ORDERS_MAX
from autoscaler.spec.model import ReplicaRange, ReplicaWindow
from autoscaler.spec.pod import Pod, Resources
from autoscaler.state.capacity_orders import AcquireOrder, Offer, ReleaseOrder
from autoscaler.state.events import ClockSeen
from autoscaler.state.resources import HostResources
from autoscaler.state.world import NodeId
from tests.support.builders.capacity import cloud, offer, offered, orders, surge, told
from tests.support.builders.worlds import T0, device, gateway, level, model, world
from tests.support.harness.manual_loop import IdleDriver


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the simulated offers, in order."""
    found: list[str] = []

    def counted(ground: SimulationContext, want: PlacementRequest, of: Offer) -> int | None:
        found.append(of.name)
        return devices_for(ground, want, of)

    monkeypatch.setattr("autoscaler.provisioning.offer_selection.devices_for", counted)
    return found


def test_offer_is_tried_once_per_plan_for_identical_demand(asked: list[str]) -> None:
    tiny = [offer(name=f"n{number}", node=f"n{number}", devices_max=1) for number in range(3)]
    greedy = model("a", 16, high=4, slots=1, pod=Pod(resources=Resources(requests={"cpu": "8"})))
    begin = surge(*tiny, waiting=4, hosts={NodeId(f"n{at}"): HostResources(cpu_left_milli=1000) for at in range(3)})
    assert not orders(plan(replace(begin, models={greedy.name: greedy}), T0).actions)
    assert sorted(asked) == ["n0", "n1", "n2"]


def test_plan_for_a_scheduled_replica_evaluates_at_most_two_offers(asked: list[str]) -> None:
    """Otherwise models with queued requests would be reported as having no offer."""
    many = [offer(name=f"n{number}", node=f"n{number}") for number in range(9)]
    ahead = ReplicaWindow(cron="0 9 * * *", seconds=28_800.0)
    later = model("a", 16, high=4, slots=1)
    later = replace(later, spec=replace(later.spec, replicas=ReplicaRange(max=4, schedule=(ahead,))))
    begin = world([later], [device("cpu", 1, "w1")], leading_since_s=T0 - 500)
    nine_s = datetime(2027, 1, 11, 9, tzinfo=UTC).timestamp()
    begin = offered(told(begin, ClockSeen(unix_offset_s=nine_s - 3000.0 - T0)), *many, cloud("dws", expected_s=None))
    plan(begin, T0)
    assert len(asked) <= 2


class Orders:
    """A capacity supplier that records the owners of orders."""

    def __init__(self) -> None:
        self.acquired: list[str] = []

    def acquire(self, order: AcquireOrder) -> None:
        self.acquired.append(order.owner)

    def release(self, order: ReleaseOrder) -> None:
        raise AssertionError(order)


@pytest.mark.parametrize(("many", "plans"), [(1, 1), (ORDERS_MAX - 1, 1), (ORDERS_MAX + 1, 2)])
def test_capacity_above_the_order_limit_of_a_plan_is_ordered_in_two_plans(
    monkeypatch: pytest.MonkeyPatch, many: int, plans: int
) -> None:
    names = [f"m{number:02}" for number in range(many)]
    reporting = gateway(levels=[level(name, 1, wait_s=60.0) for name in names])
    models = [model(name, 16, high=1) for name in names]
    begin = world(models, [device("cpu", 1, "w1")], gateways=[reporting], leading_since_s=T0 - 500)
    settled: list[int] = []

    def counted(*given: Any) -> provisioner.ProvisioningResult:
        settled.append(1)
        return settle(*given)

    settle = provisioner.provision_capacity
    monkeypatch.setattr(provisioner, "provision_capacity", counted)
    sent = Orders()
    Loop(offered(begin, offer(devices_max=many, shared=False)), IdleDriver(), lambda: T0, supplier=sent).step()
    assert (sorted(sent.acquired), len(settled)) == (names, plans)


@pytest.mark.parametrize("calls", [False, True])
def test_hedging_second_order_is_placed_only_if_requests_are_waiting(calls: bool) -> None:
    """Capacity for `replicas.min` can arrive later if the first order fails, so two orders are not paid for."""
    unsure = offer(expected_s=60.0, confidence=0.8), cloud(expected_s=60.0, confidence=0.8)
    kept = model("a", 16, low=1, high=4, slots=1)
    reporting = [gateway(levels=[level("a", 1, wait_s=1.0)] if calls else [])]
    begin = world([kept], [device("cpu", 1, "w1")], gateways=reporting, leading_since_s=T0 - 500)
    done = orders(plan(offered(begin, *unsure, hedges=("cloud", "rack")), T0).actions)
    assert sorted(done) == ([("cloud", 1), ("rack", 1)] if calls else [("rack", 1)])
