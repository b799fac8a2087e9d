"""The latency that a proxy adds at 200 requests a second, far below its limit: p50 and p99 over the engine alone.

One table. The load is open loop. The sides take turns with every single request (direct, Pilotlight, nginx, HAProxy,
direct, ...), each at 200 a second on its own connections, so that disturbances affect all sides alike. The engine
responds at once.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path

from bench import engine, kit, openloop, peers
from bench.documents import body
from bench.kit import KIB, Figures, quantile, say, spread
from bench.openloop import Sender
from bench.peers import AUTHORIZATION, OURS
from bench.streams import request
from loadtest.result import Shot

PER_S = 200
LINES = 8
DIRECT = "direct"


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return added_ms_p50 and added_ms_p99: the median of the differences of the rounds."""
    rounds, span_s = (5, 8) if quick else (10, 20)
    kit.title(f"latency: {PER_S} requests a second, {rounds} rounds of {span_s} s, ms from the write to the last byte")
    ask = body("t", stream=False, bytes_min=KIB)
    model = engine.document(place, module="bench.nginx", slots=128)
    shot = Shot(model="t", body=ask, stream=False, headers=(AUTHORIZATION,), timeout_s=10)
    runs: dict[str, list[list[float]]] = {}
    async with peers.sides(place, model, ("nginx", "HAProxy"), shot) as found:
        urls = {DIRECT: f"http://{engine.address(place)}"} | {side.name: side.url for side in found}
        for _ in range(rounds):
            for name, took_ms in (await measure_sides(urls, ask, span_s)).items():
                runs.setdefault(name, []).append(took_ms)
    return _report(runs)


async def measure_sides(urls: dict[str, str], ask: bytes, span_s: float) -> dict[str, list[float]]:
    """Return the milliseconds of each request by side, all sides in turn. Raises BenchError if a status is not 200."""
    senders = {name: Sender(url, request(url, ask)) for name, url in urls.items()}
    for sender in senders.values():
        await sender.open(LINES)
    apart_s = 1 / PER_S / len(senders)
    turns = [sender.run(PER_S, span_s, apart_s * turn) for turn, sender in enumerate(senders.values())]
    for answers in await asyncio.gather(*turns):
        openloop.all_good(answers)
    return {name: openloop.took_ms(sender.answers) for name, sender in senders.items()}


def _report(runs: dict[str, list[list[float]]]) -> Figures:
    """Print the table and return the figures."""
    say(f"{'side':<14} {'p50':<22} {'p99':<22} {'p50 added':<22} {'p99 added':<22}")
    added: dict[str, tuple[list[float], list[float]]] = {}
    for name, rounds in runs.items():
        p50, p99 = ([quantile(round_, share) for round_ in rounds] for share in (0.5, 0.99))
        more = [
            [mine - quantile(direct, share) for mine, direct in zip(values, runs[DIRECT], strict=True)]
            for values, share in ((p50, 0.5), (p99, 0.99))
        ]
        added[name] = (more[0], more[1])
        say(" ".join([f"{name:<14}", *(f"{spread(values, 3):<22}" for values in (p50, p99, *more))]))
    say("p50 added at most 0.3, p99 added at most 1")
    p50, p99 = added[OURS]
    return {"added_ms_p50": statistics.median(p50), "added_ms_p99": statistics.median(p99)}
