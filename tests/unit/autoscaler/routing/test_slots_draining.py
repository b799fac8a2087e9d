"""Allocation of the slots of ready replicas while another replica drains."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from autoscaler.contract import GatewayId, ReplicaId
from autoscaler.routing import slots
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.world import Gateway, World
from tests.support.builders.worlds import T0, device, gateway, level, model, replica, use, world

M = model("m", 4, slots=2, high=2)


def town(*gateways: Gateway) -> World:
    """One replica drains, one with two slots is ready, and no slots are allocated."""
    old, new = replica(M, "old", state=ReplicaState.DRAINING), replica(M, "new", created_s=T0)
    made = world([M], [device()], [old, new], gateways, handed_over=True)
    return replace(made, undivided=frozenset({M.name}))


def given(made: World) -> dict[str, int]:
    answer = slots.divide_slots(made, T0)
    assert answer is not None
    assert all(on == "new" for _, on, _ in answer.holds)
    return {id: hold for id, _, hold in answer.holds}


def test_request_on_a_draining_replica_needs_no_slot_on_another_replica() -> None:
    """`lab` is due one of two slots, but its request is on the old replica: it would return the slot repeatedly."""
    made = town(
        gateway("g1", [level("m", 0, 1, tenant="lab")], [use("old", 1)]),
        gateway("g2", [level("m", 1, wait_s=2.0)]),
        gateway("g3", [level("m", 1, 1, wait_s=1.0)], [replace(use("new", 1), hold=0)]),
    )
    assert given(made) == {"g2": 1, "g3": 1}


@pytest.mark.parametrize(("waiting", "holds"), [(0, {"g2": 2}), (1, {"g1": 1, "g2": 1})])
def test_queued_requests_get_slots_despite_one_on_a_draining_replica(waiting: int, holds: dict[str, int]) -> None:
    one = gateway("g1", [level("m", waiting, 1, wait_s=9.0, tenant="lab")], [use("old", 1)])
    assert given(town(one, gateway("g2", [level("m", 5, wait_s=2.0)]))) == holds


def test_lowest_priority_request_is_assumed_on_the_draining_replica() -> None:
    levels = [replace(level("m", 0, 1), priority=5), level("m", 2, 1)]
    made = town(gateway("g1", levels, [use("old", 1), use("new", 1)]))
    left = slots._on_ready(made.gateways[GatewayId("g1")], M.name, [made.replicas[ReplicaId("new")]])
    assert {(each.priority, each.waiting, each.running) for each in left} == {(5, 0, 1), (0, 2, 0)}
