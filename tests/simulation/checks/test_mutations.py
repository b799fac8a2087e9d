"""Mutation tests of the checks: each fault injected into the product violates the expected invariant in some seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from autoscaler.contract import RoutesDelta
from autoscaler.controller import loop
from autoscaler.demand import idle_timeout, residency
from autoscaler.fold import indices
from autoscaler.placement.model import bin_builder
from autoscaler.queries import gateway_reports, overcommitted_slices
from autoscaler.routing import slots
from autoscaler.spec.model import Model
from autoscaler.state.lifecycle import ReplicaState
from autoscaler.state.resources import ResourceAmount
from autoscaler.state.world import Replica, Slice, World
from gateway.dispatch.fair_queue import Queue
from tests.simulation.installations.gateway import SimGateway
from tests.simulation.scenario import play

SEEDS = range(1, 31)
"""Upper bound of the search; each fault is found long before."""
DEAF_S = 30.0


def deaf_gateways(patch: pytest.MonkeyPatch) -> None:
    """A restarted gateway ignores Routes for 30 s although it receives them from its leader."""
    routes = SimGateway.routes

    def later(gateway: SimGateway, delta: RoutesDelta) -> None:
        born_s, boots, loop = gateway.started_s, gateway.boots, asyncio.get_running_loop()
        if boots == 1 or loop.time() >= born_s + DEAF_S:
            routes(gateway, delta)
            return
        gateway.heard_s = loop.time()
        loop.call_at(born_s + DEAF_S, lambda: routes(gateway, delta) if gateway.boots == boots else None)

    patch.setattr(SimGateway, "routes", later)


def stops_without_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gateway_reports, "_holds", lambda _gateway, _replica: "")


def demand_that_never_expires(patch: pytest.MonkeyPatch) -> None:
    for module in (gateway_reports, indices):
        patch.setattr(module, "REPORT_EXPIRY_S", 1e9)


def unknown_that_is_zero(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(gateway_reports, "list_silent_gateways", lambda _world, _now_s: ())


def no_residency(patch: pytest.MonkeyPatch) -> None:
    evictable_s = residency.evictable_s

    def at_once(world: World, replica: Replica, model: Model, calls: int) -> float:
        return evictable_s(world, replica, model, calls) if replica.times.ready_s is None else replica.times.ready_s

    patch.setattr(bin_builder, "evictable_s", at_once)


def bytes_without_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Queue, "full", lambda queue, _call, limits: queue.waiting >= limits.calls_max)


def only_the_newest_grant_counts(patch: pytest.MonkeyPatch) -> None:
    """Holds are raised before their previous owners have acknowledged, while requests still use them."""
    patch.setattr(slots, "compute_claimed_slots", slots.read_latest_hold)


def free_before_it_is_clean(patch: pytest.MonkeyPatch) -> None:
    room = overcommitted_slices.room_of

    def gone(replica: Replica, slice_: Slice) -> ResourceAmount:
        return ResourceAmount(0, 0) if replica.state is ReplicaState.SCRUBBING else room(replica, slice_)

    patch.setattr(bin_builder, "room_of", gone)


def every_model_is_blamed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "find_culprits", lambda names, _works: tuple(names))


def never_idle(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(idle_timeout, "idle_window_s", lambda _model, _history: 1e9)


def idle_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(idle_timeout, "idle_window_s", lambda _model, _history: 0.0)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (deaf_gateways, "I7: <Journey"),
        (deaf_gateways, "I4:"),
        (stops_without_acknowledgement, "I2:"),
        (demand_that_never_expires, "demand expires:"),
        (unknown_that_is_zero, "unknown is not zero:"),
        (only_the_newest_grant_counts, "hold rule:"),
        (free_before_it_is_clean, "I5:"),
        pytest.param(no_residency, "I6:", marks=pytest.mark.deep),
        (idle_at_once, "I6:"),
        (never_idle, "I8:"),
        (bytes_without_bound, "I12:"),
        (every_model_is_blamed, "I14:"),
    ],
)
def test_fault_injected_into_the_product_is_detected_by_a_simulation_check(
    fault: Callable[[pytest.MonkeyPatch], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    assert any(line.startswith(message) for seed in SEEDS for line in play(seed).broken)
