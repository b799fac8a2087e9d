"""Liveness (reliability, section 3: I7): after faults, and at a quiet time, requests are served in time.

Contains both time bounds, each derived from the work that may legitimately precede a request, and the probe. The bounds
use the town's own parameters (longest start and response times) and none of the product's decisions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from autoscaler.spec.model import Model
from gateway.dispatch.call import CallState, Outcome
from tests.simulation.checks.continuous_invariants import Watcher
from tests.simulation.installations.installation import Journey, Town

WITHIN_S = 5.0
"""I7: allowance beyond the longest start."""
SERVES_FIRST_S = 1.0
"""Minimum time that a ready replica stays for its waiting requests, however short its residency."""
TRY_AGAIN_S = 1.0
"""The longest pause before a failed start is retried. A start that was drawn in the storm may die after it."""
SETTLED_S = 5.0
"""I4 holds again this long after recovery: the leader has received reports from all gateways."""
POLL_S = 0.1
PROBE_WAIT_S = 600.0
"""The deadline of a probe: far beyond its bound, so that no deadline hides a starving request."""
SLACK_S = 1.0
"""Allowance in a probe's bound for reports, Routes, drains and stops on a network without faults."""


def whole(town: Town) -> bool:
    """Whether everything has recovered: an autoscaler leads, and every gateway lives and reaches it."""
    return town.autoscaler is not None and all(g.alive and g.link.reachable for g in town.gateways)


async def after_storm(town: Town, watcher: Watcher) -> list[str]:
    """I7: every request that waits after recovery is granted or ended within `bound_s` of its Model.
    Then none runs longer than a response takes, and from `SETTLED_S` on none waits while a slot is free (I4).
    """
    while not whole(town):
        await asyncio.sleep(POLL_S)
    began_s = town.now()
    waiting = [j for j in town.open.values() if j.call.state == CallState.PARKED]
    bounds_s = {model.name: bound_s(town, model) for model in town.models}
    late: list[Journey] = []
    while waiting:
        await asyncio.sleep(POLL_S)
        past_s = town.now() - began_s
        watcher.conserve = watcher.conserve or past_s >= SETTLED_S
        waiting = [j for j in waiting if j.call.state == CallState.PARKED]
        late += [j for j in waiting if past_s > bounds_s[j.call.model]]
        waiting = [j for j in waiting if past_s <= bounds_s[j.call.model]]
    await asyncio.sleep(max(town.machine.manners.serve_s[1] + SLACK_S, began_s + SETTLED_S - town.now()))
    watcher.conserve = True
    broken = [
        f"I7: {j!r} waits {town.now() - began_s:.1f} s after the storm, {bounds_s[j.call.model]:.1f} s at most"
        for j in late
    ]
    return broken + [f"I7: {j!r} has not ended, long after the storm" for j in town.open.values() if j not in late]


def bound_s(town: Town, model: Model) -> float:
    """The longest that a request of the Model may wait after the storm.
    That is 5 s and a start, as in I7, plus the work that may legitimately precede it. In the worst case all Models take
    turns on one Device. Before each round of its own responses every other Model with requests (before the first: every
    other Model) may have a turn: its residency, last responses, stop and next start. Starts announced to a rejected
    client are kept for twice its Retry-After, and one start of each Model may still die of the storm.
    """
    manners = town.machine.manners
    start_s, serve_s, swap_s = manners.start_s[1], manners.serve_s[1], manners.start_s[1] + 2 * manners.stop_s[1]
    calls = Counter(journey.call.model for journey in town.open.values())
    rounds = {m.name: -(-calls[m.name] // m.slots) for m in town.models}
    mine, bound = rounds[model.name], WITHIN_S + 2 * start_s + TRY_AGAIN_S
    for other in town.models:
        if other.name != model.name:
            turns = min(mine, max(1, rounds[other.name]))
            stays_s = max(other.residency_s(None), SERVES_FIRST_S)
            bound += turns * (stays_s + serve_s + 2 * swap_s) + start_s + TRY_AGAIN_S + owed_s(town, other)
    return bound + mine * serve_s


def owed_s(town: Town, model: Model) -> float:
    """How long a start is still kept for rejected clients: twice their Retry-After."""
    ends = (j.ended[0] for j in town.journeys.values() if j.call.model == model.name and j.ended)
    until = [e.at_s + 2.0 * (e.error.retry_after_s or 0.0) for e in ends if e.error is not None]
    return max(0.0, max(until, default=0.0) - town.now())


async def probe(town: Town) -> list[str]:
    """I7: at a quiet time, call Models that fit on the devices together at once, and the groups in turn.
    Each answers all requests of a small burst of both Tenants within a stated bound.
    """
    late = [journey for company in companies(town) for journey in await burst(town, company)]
    return [f"I7: at a quiet time {journey!r} was not completed in time" for journey in late]


def companies(town: Town) -> list[list[Model]]:
    """Groups of Models of which one replica each fits: each Model joins the first group with room on some Device."""
    groups: list[tuple[list[Model], list[int]]] = []
    for model in sorted(town.models, key=lambda model: -model.memory_bytes):
        size = model.memory_bytes
        fitting = (group for group in groups if max(group[1]) >= size)
        group, free = next(fitting, None) or ([], [slice_.memory_bytes for slice_ in town.machine.slices])
        if not group:
            groups.append((group, free))
        room = min(bytes_ for bytes_ in free if bytes_ >= size)
        free[free.index(room)] -= size
        group.append(model)
    return [group for group, _ in groups]


async def burst(town: Town, models: Sequence[Model]) -> list[Journey]:
    """Send each Model two requests per slot of a replica and one more; return those that are not completed in time.

    The time limit: a resident replica may stay for its residency, Models start one after another, and the responses
    follow each other in each Slot.
    """
    manners, began_s = town.machine.manners, town.now()
    residency_s = max(other.residency_s(None) for other in town.models)
    waits: dict[str, float] = {}
    journeys: list[Journey] = []
    for model in models:
        count = min(2 * model.slots + 1, model.spec.queue.calls_max)
        waits[model.name] = -(-count // model.slots) * manners.serve_s[1]
        journeys += [town.call(model.name, ("acme", "lab")[number % 2], wait_s=PROBE_WAIT_S) for number in range(count)]
    within_s = residency_s + len(models) * manners.start_s[1] + max(waits.values()) + SLACK_S
    while any(not j.ended for j in journeys) and town.now() < began_s + within_s:
        await asyncio.sleep(POLL_S)
    late = [j for j in journeys if not j.ended or j.ended[0].outcome != Outcome.COMPLETED]
    for journey in late:
        town.leave(journey)
    return late
