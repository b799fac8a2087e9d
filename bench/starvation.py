"""Model B is requested while Model A, on the same device, is always busy: the time to B's first byte, and A's streams.

One table. More closed loops than slots keep A busy with streams of about a second; the device fits one Model. A wait is
bounded by A's residency, A's longest stream and B's start. No stream of A may be cut.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench import kit
from bench.documents import body, fake, settings
from bench.kit import Figures, say
from loadtest.client import Client
from loadtest.result import Ending, Result, Shot

LOOPS = 6
SLOTS = 4
TOKENS, TOKENS_PER_S = 100, 100
RESIDENCY_S = 2.0
BUSY_S = (0.4, 3.0)
"""The minimum and maximum pause before a request for B. A runs again in the pause: the minimum ends within A's
residency, the maximum after it.
"""
GOLDEN = 0.618
"""Its multiples, modulo 1, cover all phases of A's streams evenly."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return starved_s_max: the longest wait for B's first byte, in seconds."""
    rounds = 5 if quick else 12
    kit.title(f"starvation: A always busy ({LOOPS} loops, {SLOTS} slots), B requested {rounds} times, seconds")
    knobs = ("--tokens", str(TOKENS), "--tokens-per-s", str(TOKENS_PER_S))
    device = [{"name": "gpu0", "model": "bench", "memory": "100Mi"}]
    documents = [
        settings(devices=device),
        fake("a", *knobs, residencySeconds=RESIDENCY_S, idleSeconds=30),
        fake("b", "--tokens-per-s", "0", residencySeconds=RESIDENCY_S, idleSeconds=0.2),
    ]
    async with kit.serving(place / "starvation", documents) as one:
        start_s = await _first_byte_s(one.url, "b")
        await one.zero()
        results: list[Result] = []
        stop = asyncio.Event()
        loops = [asyncio.create_task(_busy(one.url, stop, results)) for _ in range(LOOPS)]
        waits_s = list[float]()
        for number in range(rounds):
            await asyncio.sleep(BUSY_S[0] + (number * GOLDEN) % 1 * (BUSY_S[1] - BUSY_S[0]))
            waits_s.append(await _first_byte_s(one.url, "b"))
        stop.set()
        await asyncio.gather(*loops)
    streams = [(r.last_byte_s or 0.0) - (r.first_byte_s or 0.0) for r in results if r.ending is Ending.COMPLETED]
    cut = sum(result.ending is not Ending.COMPLETED for result in results)
    bound_s = RESIDENCY_S + max(streams) + start_s
    say(f"waits {'  '.join(f'{wait_s:.2f}' for wait_s in waits_s)}")
    say(
        f"worst {max(waits_s):.2f}   (at most {bound_s:.2f} = residency {RESIDENCY_S:g} + A's longest stream "
        f"{max(streams):.2f} + B's start {start_s:.2f})"
    )
    say(f"A's streams: {len(results)}, cut or failed: {cut}")
    return {"starved_s_max": max(waits_s)}


async def _busy(url: str, stop: asyncio.Event, results: list[Result]) -> None:
    """Run one closed loop of requests for A."""
    client = Client(url, reuse=True)
    shot = Shot(model="a", body=body("a", tokens=TOKENS), timeout_s=60)
    while not stop.is_set():
        results.append(await client.send(shot))
    client.close()


async def _first_byte_s(url: str, name: str) -> float:
    result = await Client(url).send(Shot(model=name, body=body(name), timeout_s=60))
    if result.ending is not Ending.COMPLETED or result.first_byte_s is None:
        raise kit.BenchError(f"a request did not complete: {result}")
    return result.first_byte_s
