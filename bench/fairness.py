"""Tenant A has 500 requests waiting at gateway 1; tenant B sends one to gateway 2: which tenant gets the next slot?

One figure: the number of the released slot that B gets. Slots that are released from 50 ms after B sends its request
are counted from 1. The figure is 0 if B got a slot earlier, or if one was free then. It is derived from the log of the
engine: B got the first released slot after which A did not have all slots again before the request of B started.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench import kit
from bench.documents import body, fake, key, settings, tenant
from bench.fleet import fleet
from bench.kit import Figures, Serving, say, spread
from loadtest.client import Client
from loadtest.result import Ending, Shot

CALLS = 500
GRACE_S = 0.05
SECONDS_OF_A_CALL = 0.15
TOKENS = 15
GAP_S = 0.3
GOLDEN = 0.618
"""Before each request, B pauses for GAP_S plus a fraction of the duration of a request of A. The fractions are the
multiples of GOLDEN, modulo 1, which cover all phases evenly.
"""


class Stay(NamedTuple):
    """One request in the engine. Times are Unix seconds."""

    began_s: float
    ended_s: float
    tokens: int


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return fair_releases_max over 4 slots and 1 slot."""
    kit.title(f"fairness: A has {CALLS} requests waiting at gateway 1, B's single requests arrive at gateway 2")
    say(f"{'slots':>5} {'B: calls':>9} {'B granted at release (0, 1, 2, ... times)':<42} {'B waited, ms':<24}")
    worst = 0
    for slots in (4, 1):
        tries = (12 if quick else 24) if slots == 4 else (8 if quick else 16)
        stays, sent_s = await _run(place / f"fairness-{slots}", slots, tries)
        mine = [stay for stay in stays if stay.tokens == 1]
        others = [stay for stay in stays if stay.tokens != 1]
        releases = [
            releases_before(others, arrived, stay.began_s, slots) for arrived, stay in zip(sent_s, mine, strict=True)
        ]
        waited_ms = [(stay.began_s - arrived) * 1e3 for arrived, stay in zip(sent_s, mine, strict=True)]
        counts = "  ".join(f"{count}: {releases.count(count)}x" for count in sorted(set(releases)))
        say(f"{slots:>5} {len(mine):>9} {counts:<42} {spread(waited_ms):<24}   (expected: release 0 or 1)")
        worst = max(worst, *releases)
    return {"fair_releases_max": worst}


async def _run(place: Path, slots: int, tries: int) -> tuple[list[Stay], list[float]]:
    """Return the engine's log, in the order of starts, and the times at which B's requests were sent."""
    transcript = place.with_suffix(".jsonl")
    knobs = ("--tokens-per-s", str(TOKENS / SECONDS_OF_A_CALL), "--transcript", str(transcript))
    # A request of B has one token, so it is short and identifiable.
    documents = [settings(), fake("f", *knobs, slots=slots), tenant("a"), tenant("b")]
    sent_s: list[float] = []
    async with fleet(place, documents, gateways=2) as one:
        await _one(one, 1, "b")  # warm-up
        client = Client(one.urls[0], headers=_key("a"))
        crowd = asyncio.create_task(client.run([_shot(TOKENS)] * CALLS))
        await asyncio.sleep(1)
        await _one(one, 1, "b")  # both Tenants have been served
        for number in range(tries):
            await asyncio.sleep(GAP_S + (number * GOLDEN) % 1 * SECONDS_OF_A_CALL)
            sent_s.append(await _one(one, 1, "b"))
        crowd.cancel()
        await asyncio.gather(crowd, return_exceptions=True)
    rows = [json.loads(line) for line in transcript.read_text().splitlines()]
    stays = [Stay(row["time"] + row["queued_s"], row["time"] + row["after_s"], _tokens(row)) for row in rows]
    stays.sort()
    mine = [stay for stay in stays if stay.tokens == 1][2:]
    return [*(stay for stay in stays if stay.tokens != 1), *mine], sent_s


def releases_before(others: Sequence[Stay], arrived_s: float, granted_s: float, slots: int) -> int:
    """Return the number of the release after `arrived_s` + GRACE_S that gave the slot at `granted_s`; 0: none."""
    from_s = arrived_s + GRACE_S
    busy = sum(stay.began_s <= from_s < stay.ended_s for stay in others)
    if granted_s <= from_s or busy < slots:
        return 0
    moments = [(stay.ended_s, -1) for stay in others] + [(stay.began_s, 1) for stay in others]
    released = needed = 0
    for _, step in sorted(moment for moment in moments if from_s < moment[0] < granted_s):
        busy += step
        released += step < 0
        if busy >= slots:
            needed = released
    return needed + 1


def _tokens(row: dict[str, object]) -> int:
    headers = row["headers"]
    return 1 if isinstance(headers, dict) and headers.get("x-request-id") == "b" else TOKENS


def _key(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {key(tenant)}"),)


def _shot(tokens: int, **headers: str) -> Shot:
    more = tuple((name.replace("_", "-"), value) for name, value in headers.items())
    return Shot(model="f", body=body("f", tokens=tokens), headers=more, timeout_s=120)


async def _one(one: Serving, gateway: int, tenant: str) -> float:
    """Send one short request; return the time at which it was sent (Unix seconds)."""
    client = Client(one.urls[gateway], headers=_key(tenant))
    await client.open(1)
    sent_s = time.time()
    result = await client.send(_shot(1, X_Request_Id="b"))
    if result.ending is not Ending.COMPLETED:
        raise kit.BenchError(f"a request did not complete: {result}")
    return sent_s
