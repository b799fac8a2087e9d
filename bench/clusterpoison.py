"""Cold starts of a healthy Model with and without 200 malformed objects on the API server, in turn.

Each round creates the objects, measures some cold starts, deletes the objects and measures the same number again; every
second round begins without them. The ratio of a round is that of its two medians. All objects are in their own
namespace, or cluster-wide, so only a watch of the whole cluster reports them.
"""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from statistics import median

import aiohttp

from bench import kit
from bench.clusterbed import Bed, bed
from bench.clusterhouse import House, house
from bench.clusterwake import HOPELESS_S, called, ours, zero
from bench.documents import settings
from bench.kit import BenchError, Figures, say, spread
from tests.integration.cluster.conftest import make_namespace
from tests.integration.cluster.support.control_plane import malformed_objects

OBJECTS = 200
NAMESPACE = "poison"
SETTLED_S = 1.0
"""The time for which the number of unreadable objects must be stable."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return poisoned, poison_exits, poison_ratio and poison_ratio_max."""
    rounds, starts = (2, 3) if quick else (8, 5)
    kit.title(f"cold start with {OBJECTS} poisoned objects, {rounds} rounds of 2 x {starts} starts")
    with_ms, without_ms, ratios, number = list[float](), list[float](), list[float](), 0
    async with bed(place) as one:
        await make_namespace(one.api, NAMESPACE)
        await malformed_objects.install(one.api)
        document = ours(place / "pod.jsonl")
        async with house(one, place / "house", [settings(devices=[], auth="none"), document]) as running:
            await took_ms(one, running, 1)
            for at in range(rounds):
                sides = dict[bool, list[float]]()
                for is_poisoned in (True, False) if at % 2 == 0 else (False, True):
                    if is_poisoned:
                        poisoned = await malformed_objects.create(one.api, NAMESPACE, f"r{at}", OBJECTS)
                        number = len(poisoned.paths)
                        await settled(running, is_any=True)
                        if at == 0:
                            say(f"{number} objects of {len(poisoned.kinds)} kinds: {await unreadable(running)}")
                    sides[is_poisoned] = await took_ms(one, running, starts)
                    if is_poisoned:
                        await malformed_objects.delete(one.api, poisoned)
                        await settled(running, is_any=False)
                with_ms += sides[True]
                without_ms += sides[False]
                ratios.append(median(sides[True]) / median(sides[False]))
                say(f"round {at + 1}: {median(sides[True]):6.0f} ms with, {median(sides[False]):6.0f} ms without")
            exits = sum(one.poll() is not None for one in (*(two.process for two in running.scalers), running.gateway))
    say(f"with    {spread(with_ms)} ms")
    say(f"without {spread(without_ms)} ms")
    say(f"ratio   {spread(ratios, 2)} (at most 1.2); {exits} processes exited (at most 0)")
    return {
        "poisoned": number, "poison_exits": exits, "poison_ratio": median(ratios), "poison_ratio_max": max(ratios),
    }  # fmt: skip


async def took_ms(one: Bed, running: House, starts: int) -> list[float]:
    """Measure consecutive cold starts. Raises BenchError if one fails."""
    took = list[float]()
    for _ in range(starts):
        await zero(one)
        took.append((await called(running.url, "pod")).took_ms)
    await zero(one)
    return took


async def unreadable(running: House) -> dict[str, int]:
    """Return kind -> number of unreadable objects."""
    async with aiohttp.ClientSession() as session, session.get(f"{running.operations[0]}/metrics") as answer:
        text = await answer.text()
    found = re.findall(r'^pilotlight_unreadable_objects\{kind="(\w+)"\} (\d+)', text, re.MULTILINE)
    return {kind: int(number) for kind, number in found}


async def settled(running: House, *, is_any: bool) -> None:
    """Wait until the autoscaler has processed all objects, or their deletion."""
    deadline_s, before, since_s = time.monotonic() + HOPELESS_S, dict[str, int](), time.monotonic()
    while time.monotonic() < deadline_s:
        found = await unreadable(running)
        if found != before or bool(found) != is_any:
            before, since_s = found, time.monotonic()
        elif time.monotonic() - since_s > SETTLED_S:
            return
        await asyncio.sleep(0.1)
    raise BenchError(f"the number of unreadable objects is not stable: {before}")
