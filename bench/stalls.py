"""Prompts of 1 MiB, 50 a second, and of 8 MiB, 2 a second, with small requests on one core: the longest callback of the
event loop, and the effect on the small requests.

One table. The gateway measures the thread's CPU time of every callback of its event loop (`bench.timed`). Small
requests are sent at 200 a second through it and, in turn, directly to the engine, so the added latency is the
difference of two p99 of the same seconds. The engine reads the whole prompt before it responds.
"""

from __future__ import annotations

import asyncio
import json
import signal
import statistics
from pathlib import Path

import psutil

from bench import engine, kit, openloop
from bench.documents import body, key, settings, tenant
from bench.fleet import fleet
from bench.kit import KIB, MIB, Figures, quantile, say
from bench.openloop import Sender
from bench.streams import request

LARGE_PER_S, HUGE_PER_S, SMALL_PER_S = 50, 2, 200
LINES = 8
WARM_S = 1
TOLD_S_MAX = 5.0
MODULE = "bench.timed"


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return stall_cpu_ms_max, the worst of all rounds, and small_added_ms_p99, the median of the rounds."""
    rounds, span_s = (4, 6) if quick else (8, 15)
    kit.title(
        f"stalls: {LARGE_PER_S} prompts of 1 MiB a second, {HUGE_PER_S} of 8 MiB, {SMALL_PER_S} small requests,"
        f" {rounds} rounds of {span_s} s"
    )
    path = place / "longest.json"
    documents = [settings(), tenant("a"), engine.document(place, "late", "0", slots=256)]
    longest_ms, added_ms = list[float](), list[float]()
    say(
        f"{'longest ms':>10} {'callbacks':>10} {'small p99 ms':>13} {'direct':>8} {'added':>8} {'1 MiB p99':>10}"
        f" {'8 MiB p99':>10}"
    )
    async with fleet(place / "fleet", documents, 1, core=kit.PROXY_CORE, runs=(MODULE, str(path))) as one:
        await one.model_ready("t", key("a"))
        (gateway,) = [p for p in psutil.Process().children() if MODULE in p.cmdline()]
        await _round(one.url, place, WARM_S)
        for _ in range(rounds):
            await _longest(gateway, path)
            large, huge, small, direct = await _round(one.url, place, span_s)
            found = await _longest(gateway, path)
            longest_ms.append(float(found["longest_ms"]))
            added_ms.append(small - direct)
            say(
                f"{longest_ms[-1]:>10.2f} {found['calls']:>10} {small:>13.2f} {direct:>8.2f} {added_ms[-1]:>8.2f}"
                f" {large:>10.2f} {huge:>10.2f}   {found['where']}"
            )
    added = statistics.median(added_ms)
    say(f"longest callback {max(longest_ms):.2f} ms (at most 5); added p99 of small requests {added:.2f} (at most 10)")
    return {"stall_cpu_ms_max": max(longest_ms), "small_added_ms_p99": added}


async def _round(url: str, place: Path, span_s: int) -> tuple[float, float, float, float]:
    """Return the p99 in milliseconds of large, huge and small requests, and of those sent directly to the engine."""
    direct = f"http://{engine.address(place)}"
    asks = [(url, MIB, LARGE_PER_S), (url, 8 * MIB, HUGE_PER_S), (url, KIB, SMALL_PER_S), (direct, KIB, SMALL_PER_S)]
    senders = [Sender(where, request(where, body("t", stream=False, bytes_min=size))) for where, size, _ in asks]
    for sender in senders:
        await sender.open(LINES)
    apart_s = 1 / SMALL_PER_S / len(asks)
    turns = [
        sender.run(per_s, span_s, apart_s * turn)
        for turn, (sender, (_, _, per_s)) in enumerate(zip(senders, asks, strict=True))
    ]
    p99_ms = []
    for answers in await asyncio.gather(*turns):
        openloop.all_good(answers)
        p99_ms.append(quantile(openloop.took_ms(answers), 0.99))
    return p99_ms[0], p99_ms[1], p99_ms[2], p99_ms[3]


async def _longest(gateway: psutil.Process, path: Path) -> dict[str, float | int | str]:
    """Return the gateway's measurements since the last call."""
    path.unlink(missing_ok=True)
    gateway.send_signal(signal.SIGUSR1)
    async with asyncio.timeout(TOLD_S_MAX):
        while not path.exists():
            await asyncio.sleep(0.01)
    found: dict[str, float | int | str] = json.loads(path.read_text())
    return found
