"""Routes as one gateway applies them: versions, allocations, replica choice, suspect replicas and a silent leader."""

from __future__ import annotations

import pytest

from autoscaler.contract import LEADER_SILENT_S, ModelName, ModelRoute, ReplicaId, Route, RoutesDelta
from gateway.dispatch.routing_table import Changes, Routes
from gateway.dispatch.slots import SUSPECT_S, Hold, ModelRoutes

MODEL = ModelName("llama")
LIMIT_S = 600.0


def route(
    replica: str, hold: int, *, granted: int = 1, state: str = "ready", slots: int = 8, address: str = "h:1"
) -> Route:
    return Route(
        replica=ReplicaId(replica), model=MODEL, state=state, address=address, slots=slots, hold=hold, granted=granted
    )


def apply(
    routes: Routes, *replicas: Route, epoch: int = 1, version: int = 1, now_s: float = 0.0, gateways: int = 1
) -> Changes | None:
    delta = RoutesDelta(epoch=epoch, version=version, replicas=replicas, gateways=gateways)
    return routes.apply(delta, now_s)


def llama(*replicas: Route, gateways: int = 1) -> tuple[Routes, ModelRoutes]:
    routes = Routes()
    apply(routes, *replicas, gateways=gateways)
    return routes, routes.of(MODEL)


def take(part: ModelRoutes, now_s: float = 0.0) -> str | None:
    hold = part.choose(now_s)
    if hold is None:
        return None
    hold.take(now_s)
    return hold.replica


def held(routes: Routes, replica: str) -> int:
    return routes.holds[ReplicaId(replica)].held


def test_replica_with_most_free_slots_is_chosen_first() -> None:
    _, part = llama(route("r2", 2), route("r1", 2), route("r3", 4))
    assert [take(part) for _ in range(9)] == ["r3", "r3", "r1", "r2", "r3", "r1", "r2", "r3", None]


def test_starting_or_draining_replica_gets_no_requests() -> None:
    _, part = llama(route("r1", 2, state="starting"), route("r2", 2, state="draining"))
    assert not part.ready
    assert take(part) is None


def test_older_routes_are_ignored_and_same_version_resets_leader_timeout() -> None:
    routes, _ = llama()
    apply(routes, route("r1", 2, granted=7), epoch=2, version=7)
    assert apply(routes, route("r1", 5, granted=9), epoch=1, version=9) is None
    assert apply(routes, route("r1", 5, granted=6), epoch=2, version=6) is None
    assert held(routes, "r1") == 2
    assert apply(routes, epoch=2, version=7, now_s=3.0) is not None
    assert routes.silent_at_s == 3.0 + LEADER_SILENT_S


def test_returned_slots_are_restored_only_by_a_newer_allocation() -> None:
    routes, part = llama()
    part = routes.of(MODEL)
    apply(routes, route("r1", 4, granted=3), version=3)
    assert routes.give_back(part, waiting=0)
    assert held(routes, "r1") == 0
    apply(routes, route("r1", 4, granted=3), version=5)
    assert held(routes, "r1") == 0, "this was on its way before the hold was lowered"
    apply(routes, route("r1", 3, granted=6), version=6)
    assert held(routes, "r1") == 3


def test_new_leader_without_allocations_leaves_gateway_slots_unchanged() -> None:
    routes, _ = llama(route("r1", 4))
    changes = apply(routes, route("r1", 0, granted=0), epoch=2, version=1)
    assert changes is not None
    assert changes.acknowledge
    assert held(routes, "r1") == 4
    apply(routes, route("r1", 1, granted=2), epoch=2, version=2)
    assert held(routes, "r1") == 1


def test_lowered_slot_allocation_blocks_new_but_not_running_requests() -> None:
    routes, part = llama(route("r1", 2))
    assert [take(part), take(part)] == ["r1", "r1"]
    changes = apply(routes, route("r1", 1, granted=2), version=2)
    assert changes is not None
    assert changes.acknowledge
    hold = routes.holds[ReplicaId("r1")]
    assert (hold.in_use, hold.held) == (2, 1)
    routes.release(hold, 0.0, 0.0)
    assert take(part) is None
    routes.release(hold, 0.0, 0.0)
    assert take(part) == "r1"


def test_removed_replica_is_reported_until_its_last_request_ends() -> None:
    routes, part = llama(route("r1", 2))
    take(part)
    routes.apply(RoutesDelta(epoch=1, version=2, full=True), 0.0)
    assert take(part) is None
    assert [(use.replica, use.hold, use.in_use) for use in routes.uses(0.0, {})] == [("r1", 0, 1)]
    routes.release(routes.holds[ReplicaId("r1")], 0.0, 0.0)
    assert not routes.holds
    assert not part.holds


@pytest.mark.parametrize(
    ("holds", "slots", "gateways", "allowed"),
    [((3,), 8, 4, [3]), ((1,), 8, 4, [2]), ((0,), 2, 4, [1]), ((0, 1), 2, 4, [0, 1]), ((0, 0), 1, 2, [1, 1])],
)
def test_gateway_uses_larger_of_its_slots_and_equal_share_if_leader_silent(
    holds: tuple[int, ...], slots: int, gateways: int, allowed: list[int]
) -> None:
    """max(hold, floor(slots / gateways), 1 if this gateway holds no slot of the model): interfaces, section 6."""
    routes, part = llama(*(route(f"r{n}", hold, slots=slots) for n, hold in enumerate(holds)), gateways=gateways)
    assert routes.fall_silent().models == {MODEL}
    assert [hold.allowed for hold in part.holds.values()] == allowed
    apply(routes, version=2, gateways=gateways)
    assert [hold.allowed for hold in part.holds.values()] == list(holds), "heard again: only what is held"


@pytest.mark.parametrize(("slots", "gateways"), [(1, 4), (4, 4), (5, 2), (16, 3)])
def test_slot_overcommit_is_limited_while_the_leader_is_silent(slots: int, gateways: int) -> None:
    """One gateway held all slots, the others none: at most slots + max(slots, gateways) - 1 in total."""
    total = 0
    for hold in (slots, *[0] * (gateways - 1)):
        routes, part = llama(route("r1", hold, slots=slots), gateways=gateways)
        routes.fall_silent()
        total += sum(each.allowed for each in part.holds.values())
    assert total <= slots + max(slots, gateways) - 1


def test_suspect_replica_gets_one_request_per_second_until_it_responds() -> None:
    routes, part = llama(route("r1", 4))
    hold = routes.holds[ReplicaId("r1")]
    hold.suspect(0.0)
    assert part.ready, "suspect is not cold"
    assert take(part, 0.5) is None
    assert part.probe_s() == SUSPECT_S
    assert [take(part, SUSPECT_S), take(part, SUSPECT_S)] == ["r1", None]
    assert next(routes.uses(1.0, {})).connect_failures == 1
    assert hold.heard(granted_s=SUSPECT_S, now_s=1.1)
    assert [take(part, 1.1) for _ in range(4)] == ["r1", "r1", "r1", None]
    assert next(routes.uses(1.1, {})).connect_failures == 0


def test_state_change_clears_a_suspect_replica_but_slot_change_does_not() -> None:
    """Otherwise every delta would retry a dead replica: the failed connect itself makes the leader move allocations."""
    routes, part = llama(route("r1", 4))
    hold = routes.holds[ReplicaId("r1")]
    hold.suspect(0.0)
    apply(routes, route("r1", 6, granted=2), version=2)
    assert (take(part), hold.held) == (None, 6)
    apply(routes, route("r1", 6, granted=2, state="unready"), version=3)
    apply(routes, route("r1", 6, granted=2), version=4)
    assert take(part) == "r1", "it was seen unready, and ready again"
    hold.suspect(0.0)
    apply(routes, route("r1", 6, granted=2, address="h:2"), version=5)
    assert take(part) == "r1", "it listens elsewhere"
    hold.suspect(0.0)
    apply(routes, route("r1", 0, granted=0, address="h:2"), epoch=2, version=1)
    assert take(part) == "r1", "a new leader has looked at it itself"


def test_unused_slots_are_returned_unless_local_requests_wait() -> None:
    routes, part = llama(route("r1", 4), route("r2", 2))
    take(part)
    assert not routes.give_back(part, waiting=1)
    assert routes.give_back(part, waiting=0)
    assert (held(routes, "r1"), held(routes, "r2")) == (1, 0)
    assert not routes.give_back(part, waiting=0)


def test_no_slots_are_returned_while_the_leader_is_silent() -> None:
    routes, part = llama(route("r1", 4))
    routes.fall_silent()
    assert not routes.give_back(part, waiting=0)
    assert held(routes, "r1") == 4


def test_wait_estimate_counts_down_only_during_a_start() -> None:
    routes, part = llama()
    from_zero = RoutesDelta(epoch=1, version=2, models=(ModelRoute(model=MODEL, expected_wait_s=20.0),))
    routes.apply(from_zero, 10.0)
    assert part.expected_wait_s(15.0) == 20.0
    starting = ModelRoute(model=MODEL, state="starting", expected_wait_s=20.0)
    routes.apply(RoutesDelta(epoch=1, version=3, models=(starting,)), 10.0)
    assert part.expected_wait_s(15.0) == 15.0
    assert part.expected_wait_s(40.0) == 0.0


def silent_hold() -> Hold:
    """A replica with two requests, which began at 0. The limit is LIMIT_S."""
    _, part = llama(route("r1", 8))
    part.silent_s_max = LIMIT_S
    hold = part.holds[ReplicaId("r1")]
    hold.take(0.0)
    hold.take(0.0)
    return hold


def test_replica_is_stalled_when_two_requests_get_no_byte_until_the_limit() -> None:
    hold = silent_hold()
    assert [hold.stalled(LIMIT_S - 0.1), hold.stalled(LIMIT_S)] == [False, True]


def test_replica_is_not_stalled_by_one_request_alone() -> None:
    hold = silent_hold()
    hold.give(10.0, byte_s=9.0)
    assert not hold.stalled(10 * LIMIT_S)


def test_byte_for_any_request_restarts_the_stall_timeout() -> None:
    hold = silent_hold()
    hold.heard(0.0, LIMIT_S)
    assert [hold.stalled(2 * LIMIT_S - 0.1), hold.stalled(2 * LIMIT_S)] == [False, True]


def test_stall_time_includes_ended_silent_requests_but_not_idle_time() -> None:
    hold = silent_hold()
    hold.give(20.0)
    hold.give(50.0)
    assert not hold.stalled(50_000.0)
    hold.take(50_000.0)
    assert [hold.stalled(50_000.0 + LIMIT_S - 51.0), hold.stalled(50_000.0 + LIMIT_S - 50.0)] == [False, True]


def test_byte_sent_by_an_ended_request_restarts_the_stall_timeout() -> None:
    hold = silent_hold()
    hold.give(100.0)
    hold.give(100.0, byte_s=99.9)
    hold.take(200.0)
    hold.take(200.0)
    assert [hold.stalled(200.0 + LIMIT_S - 1.0), hold.stalled(200.0 + LIMIT_S)] == [False, True]
