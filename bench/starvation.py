"""Model B is called while Model A, on the same Device, is always busy: how long B's first byte takes, and A's streams.

Owns one table. More closed loops than Slots keep A busy with streams of about a second; the Device holds one Model.
Bound of a wait: A's residency, A's longest stream, B's start. Nothing of A may be cut.
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
"""B is called when A has been back for so long, at least and at most: within A's residency and after it."""
GOLDEN = 0.618
"""Its multiples, modulo 1, fall evenly on all phases of A's streams."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """starved_s_max: the longest wait for B's first byte, in seconds."""
    rounds = 5 if quick else 12
    kit.title(f"starvation: A always busy ({LOOPS} loops, {SLOTS} slots), B called {rounds} times, seconds")
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
    """One closed loop at A."""
    client = Client(url, reuse=True)
    shot = Shot(model="a", body=body("a", tokens=TOKENS), timeout_s=60)
    while not stop.is_set():
        results.append(await client.send(shot))
    client.close()


async def _first_byte_s(url: str, name: str) -> float:
    result = await Client(url).send(Shot(model=name, body=body(name), timeout_s=60))
    if result.ending is not Ending.COMPLETED or result.first_byte_s is None:
        raise kit.BenchError(f"a Call did not complete: {result}")
    return result.first_byte_s
