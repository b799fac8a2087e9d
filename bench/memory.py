"""Memory of one queued request: the growth of the gateway with 2,000 of them, less the size of their bodies.

One figure, of proportional set size (PSS), for streams of 1 KiB to a Model whose engine never becomes ready.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench import kit
from bench.documents import body, fake, settings
from bench.kit import KIB, MIB, Figures, say
from loadtest.client import Client
from loadtest.result import Shot

CALLS = 2000
PARKED_S = 4.0
"""From the first request to the sample; shorter than the keep-alive interval, so that nothing has been sent back."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return kib_per_parked_call of the worst run."""
    runs = 2 if quick else 3
    kit.title(f"memory: {CALLS:,} streams of 1 KiB parked at one gateway, PSS")
    say(f"{'idle MiB':>9} {'parked MiB':>11} {'KiB per request over its body':>27}")
    found = [await _run(place / f"memory-{number}") for number in range(runs)]
    return {"kib_per_parked_call": max(found)}


async def _run(place: Path) -> float:
    ask = body("p", bytes_min=KIB)
    document = fake("p", "--fail", "never-ready", queue={"callsMax": 2 * CALLS})
    limits = settings(limits={"connectionsPerAddressMax": 2 * CALLS})
    async with kit.serving(place, [limits, document]) as one:
        await asyncio.sleep(2)
        before = kit.pss_bytes(one.gateways())
        client = Client(one.url)
        shots = [Shot(model="p", body=ask, at_s=i / CALLS, timeout_s=PARKED_S * 2) for i in range(CALLS)]
        sending = asyncio.create_task(client.run(shots))
        await asyncio.sleep(PARKED_S)
        after = kit.pss_bytes(one.gateways())
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    kib = ((after - before) / CALLS - len(ask)) / KIB
    say(f"{before / MIB:>9.1f} {after / MIB:>11.1f} {kib:>27.2f}   (at most 5)")
    return kib
