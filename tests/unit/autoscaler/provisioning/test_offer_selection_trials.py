"""Models that fit no offer do not prevent orders for the models behind them."""

from __future__ import annotations

from typing import Any  # passes on fields

import pytest

from autoscaler.planner.plan import plan
from autoscaler.provisioning.offer_selection import TRIALS_MAX
from autoscaler.spec.model import Gpu, Model
from autoscaler.spec.pod import Pod, Resources, Toleration
from autoscaler.state.actions import AcquireLease
from autoscaler.state.capacity_orders import Offer
from autoscaler.state.node_labels import Taint
from autoscaler.state.resources import HostResources
from autoscaler.state.world import NodeId, World
from tests.support.builders.capacity import acted, cloud, offer, offered
from tests.support.builders.worlds import T0, device, gateway, level, model, world

NODES = 64
CROWD = 2 * TRIALS_MAX // NODES
MEEK = (Toleration(key="team", operator="Exists"),)
A = model("a", 16, slots=1, pod=Pod(tolerations=MEEK))


def behind(*crowd: Model, **fields: Any) -> World:
    """A request for `a` is queued behind requests for these models."""
    calls = gateway(levels=[level(one.name, 1, wait_s=60.0) for one in (A, *crowd)])
    return world([A, *crowd], [device("cpu", 1, "w1")], gateways=[calls], leading_since_s=T0 - 500, **fields)


def rack(**fields: Any) -> list[Offer]:
    """One device each on many nodes that differ from each other."""
    taints = (Taint("team", "b", "NoSchedule"),)
    of = [({"team": "b", "at": str(at)}, f"n{at}") for at in range(NODES)]
    return [offer(name=at, node=at, devices_max=1, labels=labels, taints=taints, **fields) for labels, at in of]


def owners(of: World) -> list[str]:
    """The models that capacity is ordered for."""
    return [one.order.owner for one in plan(of, T0).actions if isinstance(one, AcquireLease)]


@pytest.mark.parametrize(
    "asks",
    [
        {"pod": Pod(node_selector={"team": "x"}, tolerations=MEEK)},
        {"pod": Pod(tolerations=MEEK), "gpu": Gpu(count=4)},
        {"pod": Pod(tolerations=MEEK), "gpu": Gpu(models=("*H200*",))},
        {},
    ],
)
def test_models_excluded_by_offer_attributes_do_not_use_up_trials(asks: dict[str, Any]) -> None:
    crowd = [model(f"c{number}", 16, priority=1, **asks) for number in range(CROWD)]
    assert owners(offered(behind(*crowd), *rack())) == [A.name]


def test_models_that_fit_no_offer_leave_trials_for_other_models() -> None:
    """Only a simulated placement shows that a node has no CPU left."""
    busy = Resources(requests={"cpu": "8"})
    crowd = [model(f"c{number}", 16, priority=1, pod=Pod(tolerations=MEEK, resources=busy)) for number in range(CROWD)]
    hosts = {NodeId(f"n{at}"): HostResources(8000, cpu_left_milli=1000 + at) for at in range(NODES)}
    assert owners(offered(behind(*crowd, hosts=hosts), *rack())) == [A.name]


def test_models_awaiting_ordered_capacity_do_not_block_later_models() -> None:
    crowd = [model(f"c{number}", 16, low=32, high=32, priority=1, gpu=Gpu(models=("*H200*",))) for number in range(3)]
    many = cloud(product="H200", many=96)
    at = offered(behind(*crowd), many, *rack())
    assert A.name not in owners(at), "those go first, so many in one Plan"
    at, done = acted(at, rounds=14)
    assert len(done) == 97
