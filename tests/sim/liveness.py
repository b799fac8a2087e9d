"""What must happen in time (reliability, section 3: I7): who waits when the faults stop is served, and so is who calls
when all is quiet.

Owns both bounds, each derived from what may rightly come before a Call, and the probe. The bounds know the town's own
figures (how long starts and answers take at most) and nothing of how the product decides.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from autoscaler.spec.model import Model
from gateway.dispatch.call import CallState, Outcome
from tests.sim.checks import Watcher
from tests.sim.town import Journey, Town

WITHIN_S = 5.0
"""I7: beyond the longest start."""
SERVES_FIRST_S = 1.0
"""However short its residency, a Replica that has got ready stays so long for those who wait for it."""
TRY_AGAIN_S = 1.0
"""The longest pause before a failed start is tried again. A start that was drawn in the storm may die after it."""
SETTLED_S = 5.0
"""I4 holds again so long after everything is back: who leads has heard everybody."""
POLL_S = 0.1
PROBE_WAIT_S = 600.0
"""The deadline of a probe: far beyond its bound, so that no deadline hides a Call that starves."""
SLACK_S = 1.0
"""Of a probe's bound: reports, Routes, drains and stops on a network without faults."""


def whole(town: Town) -> bool:
    """Whether everything is back: an autoscaler leads, and every gateway lives and reaches it."""
    return town.autoscaler is not None and all(g.alive and g.link.reachable for g in town.gateways)


async def after_storm(town: Town, watcher: Watcher) -> list[str]:
    """I7: every Call that waits once everything is back is granted or ended within `bound_s` of its Model, and then
    none runs longer than an answer takes. From `SETTLED_S` on no Call waits beside a free Slot, either (I4).
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
    """The longest that a Call of the Model may wait when the storm is over: 5 s and a start, as I7 has it, and what may
    rightly come before it. In the worst case all Models take turns on one Device: its own Calls need so many rounds
    of answers; before each of them every other Model that still has Calls (before the first: every other one) may have
    a turn: its residency, its last answers, its stop and the next start. Starts of which a refused client was told are
    kept for twice its Retry-After, and one start of each Model may still die of the storm.
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
    """How long a start is still kept for those who were refused: until twice their Retry-After is over."""
    ends = (j.ended[0] for j in town.journeys.values() if j.call.model == model.name and j.ended)
    until = [e.at_s + 2.0 * (e.error.retry_after_s or 0.0) for e in ends if e.error is not None]
    return max(0.0, max(until, default=0.0) - town.now())


async def probe(town: Town) -> list[str]:
    """I7: when all is quiet, Models that fit on the Devices together are called at once, and those that do not, in
    turn: each answers all Calls of a small burst of both Tenants within a stated bound.
    """
    late = [journey for company in companies(town) for journey in await burst(town, company)]
    return [f"I7: at a quiet time {journey!r} was not completed in time" for journey in late]


def companies(town: Town) -> list[list[Model]]:
    """The Models in groups of which one Replica each fits: each into the first group with room on some Device."""
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
    """Calls each Model for all Slots of a Replica twice and once more; returns Calls that are not completed in time.

    In time: whoever is resident may stay its residency, one Model starts after another, and the answers follow each
    other in each Slot.
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
