"""Invariants at the end of a run (reliability, section 3: I1 to I3, I8, I12).

These checks inspect the whole history of a run and the state that remains after the last request. They return the
violations, one line each, which starts with the invariant.
"""

from __future__ import annotations

import asyncio

from gateway.dispatch.call import Outcome
from tests.simulation.environment.virtual_loop import VirtualLoop
from tests.simulation.installations.installation import Town

TASKS_MAX = (8, 7)
"""I12: maximum number of tasks at a quiet time: base, and per gateway (five for its sync, and two streams)."""
TIMERS_MAX = (8, 4)
"""I12: maximum number of timers at a quiet time: base, and per gateway."""
CALM_CODES = frozenset({"queue_full", "model_starting", "overloaded"})
"""Error codes that are allowed in a run without faults: no room, or no slot before the deadline."""
STORM_CODES = frozenset({"model_start_failed", "upstream_error"})
STARTS_MAX, PEAKS_MAX, BOOTS_MAX = 32, 13, 8
"""I12: maximum number of recorded starts and peaks per Model, and of dead boots per gateway."""


def everybody_was_answered(town: Town) -> list[str]:
    """I1 to I3: one Outcome per request, completed only after the engine finished, bytes from one replica only."""
    broken = []
    for journey in town.journeys.values():
        if len(journey.ended) != 1:
            broken.append(f"I1: {journey!r} has {len(journey.ended)} outcomes")
        elif journey.ended[0].outcome == Outcome.COMPLETED and journey.first_byte_s is None:
            broken.append(f"I2: {journey!r} completed without a byte")
        if len(journey.served_by) > 1:
            broken.append(f"I3: {journey!r} got bytes from {sorted(journey.served_by)}")
        error = journey.ended[0].error if journey.ended else None
        if error is not None and error.status in {429, 503} and error.retry_after_s is None:
            broken.append(f"one clear error: {journey!r} got {error!r} without Retry-After")
    return broken


def only_such_errors(town: Town, *, calm: bool) -> list[str]:
    """In a run without faults no request fails, and no request is rejected because an existing Model does not exist."""
    known = CALM_CODES if calm else CALM_CODES | STORM_CODES
    errors = ((j, j.ended[0].error) for j in town.journeys.values() if j.ended)
    return [f"one clear error: {j!r}" for j, error in errors if error is not None and error.code not in known]


def nothing_is_left(town: Town) -> list[str]:
    """I8: no process, replica, or waiting or running request remains, and the `World` agrees."""
    broken = [f"I8: {e.replica.id} is left" for e in town.machine.engines.values()]
    assert town.autoscaler is not None
    world = town.autoscaler.loop.world
    broken += [f"I8: the World still has {r!r}" for r in world.replicas.values()]
    broken += [f"I8: the World still has {load!r} of {model}" for model, load in world.loads.items()]
    for gateway in town.gateways:
        broken += [f"I8: {w} wait and {r} run at {gateway.id}" for _, w, r in gateway.dispatch.counts() if w or r]
    return broken


def nothing_has_grown(town: Town) -> list[str]:
    """I12, at a quiet time: tasks, timers and the leader's records of Models and gateways are within their bounds."""
    assert town.autoscaler is not None
    loop, world, many = asyncio.get_running_loop(), town.autoscaler.loop.world, len(town.gateways)
    assert isinstance(loop, VirtualLoop)
    attained = world.learned.attained
    sizes = [
        ("tasks", len(asyncio.all_tasks()), TASKS_MAX[0] + TASKS_MAX[1] * many + town.further_tasks),
        ("timers", loop.timers(), TIMERS_MAX[0] + TIMERS_MAX[1] * many + town.further_tasks),
        ("known gateways", len(world.gateways), many),
        ("histories", len(world.learned.histories), len(town.models)),
        ("accounts of Tenants", sum(map(len, attained.values())), len(town.models) * max(1, len(town.tenants))),
    ]
    for model, history in world.learned.histories.items():
        sizes += [(f"starts of {model}", len(history.starts_s), STARTS_MAX)]
        sizes += [(f"peaks of {model}", len(history.peaks), PEAKS_MAX)]
    for gateway in world.gateways.values():
        sizes += [(f"dead boots of {gateway.id}", len(gateway.boots_before), BOOTS_MAX)]
        sizes += [(f"grants to {gateway.id}", len(gateway.grants), 0), (f"uses by {gateway.id}", len(gateway.uses), 0)]
    return [f"I12: {size} {what}, {bound} at most" for what, size, bound in sizes if size > bound]
