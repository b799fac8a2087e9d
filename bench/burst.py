"""2,000 requests within 100 ms for a Model at zero, compared with the same requests sent directly to a warm engine.

Runs with 1 and 4 gateways and without a gateway alternate. The engine is the tiny real one with 4 slots. Each
request uses a new connection and streams 8 tokens. A request counts as answered if its stream is complete and has the
expected sentence.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from autoscaler.spec.model import Queue
from autoscaler.spec.settings import Limits
from bench import kit
from bench.documents import SENTENCE, body, real, settings
from bench.kit import Figures, quantile, say
from bench.picture import Series, picture
from loadtest.client import Client
from loadtest.result import Ending, Result, Shot

CALLS = 2000
SPAN_S = 0.1
QUEUE = {"callsMax": 4000}
CONNECTIONS_MAX = 2 * CALLS
"""The limit of connections per address, because all requests come from one address. The default limit equals the
number of requests.
"""
GATEWAYS = (1, 4)


async def measure(place: Path, weights: Path, *, quick: bool) -> Figures:
    """Return burst_p99_ratio_direct, calls, lost and starts: the worst of all runs through Pilotlight."""
    rounds = 1 if quick else 3
    kit.title(f"burst: {CALLS:,} requests in {SPAN_S * 1000:.0f} ms at a Model at zero, first byte, {rounds} rounds")
    say(
        f"Pilotlight with raised limits: connectionsPerAddressMax {CONNECTIONS_MAX:,} "
        f"(default {Limits().connections_per_address_max:,}), queue.callsMax {QUEUE['callsMax']:,} "
        f"(default {Queue().calls_max:,})"
    )
    say(
        f"{'side':<12} {'answered':>8} {'lost':>5} {'starts':>6} {'sent in':>8} {'p50':>7} {'p99':>7} {'last byte':>10}"
    )
    ratios, answered, lost, starts = list[float](), list[int](), list[int](), list[int]()
    drawn: dict[str, Series] = {}
    for number in range(rounds):
        direct = await _direct(place / f"direct-{number}", weights)
        drawn["direct, warm"] = _curve("direct, warm", direct, 0)
        for colour, gateways in enumerate(GATEWAYS, 1):
            results, began = await _through(place / f"burst-{number}-{gateways}", weights, gateways)
            name = f"{gateways} gateway{'s' * (gateways > 1)}"
            good = _row(name, results, began)
            drawn[name] = _curve(name, results, colour)
            ratios.append(_p99_s(results) / _p99_s(direct))
            answered.append(good)
            lost.append(CALLS - good)
            starts.append(began)
            say(f"{'':<12} first byte p99 {ratios[-1]:.3f} x direct   (at most 0.4)")
    picture("burst", "first byte, s", "Requests answered", list(drawn.values()))
    return {
        "burst_p99_ratio_direct": max(ratios),
        "calls": min(answered),
        "lost": max(lost),
        "starts": max(starts),
    }


def shots(model: str) -> list[Shot]:
    """Return the burst, spread evenly over its duration."""
    return [Shot(model=model, body=body(model), at_s=SPAN_S * i / CALLS) for i in range(CALLS)]


def whole(result: Result) -> bool:
    """Return whether the response is complete."""
    return result.ending is Ending.COMPLETED and result.text.strip() == SENTENCE


async def _direct(place: Path, weights: Path) -> list[Result]:
    place.mkdir()
    subject = kit.model_of(real("b", weights))
    port = kit.free_port()
    launch = kit.launch_of(subject, port)
    with kit.by_hand(launch, place / "engine.log"):
        await kit.engine_ready(launch, port)
        url = f"http://{kit.HOST}:{port}"
        await Client(url).send(Shot(model="b", body=body("b")))
        results = await Client(url).run(shots("b"))
    _row("direct, warm", results, None)
    return results


async def _through(place: Path, weights: Path, gateways: int) -> tuple[list[Result], int]:
    document = real("b", weights, queue=QUEUE, idleSeconds=30)
    limits = settings(limits={"connectionsPerAddressMax": CONNECTIONS_MAX})
    async with kit.serving(place, [limits, document], gateways=gateways) as one:
        await asyncio.sleep(1)  # exclude the start of the gateways
        results = await Client(one.url).run(shots("b"))
        return results, await one.starts()


def _row(name: str, results: Sequence[Result], starts: int | None) -> int:
    """Print one run; return the number of complete responses."""
    good = [result for result in results if whole(result)]
    first_s = [result.first_byte_s or 0.0 for result in good]
    last_s = max((result.last_byte_s or 0.0 for result in good), default=0.0)
    sent_s = max(result.at_s + (result.sent_s or 0.0) for result in results)
    shown_starts = "" if starts is None else str(starts)
    say(
        f"{name:<12} {len(good):>8} {CALLS - len(good):>5} {shown_starts:>6} {sent_s:>7.2f}s"
        f" {statistics.median(first_s):>6.2f}s {_p99_s(results):>6.2f}s {last_s:>9.2f}s"
    )
    bad = [result for result in results if not whole(result)]
    if bad:
        say(f"{'':<12} not answered: {sorted({f'{r.status} {r.code} {r.broken}'.strip() for r in bad})[:5]}")
    return len(good)


def _p99_s(results: Sequence[Result]) -> float:
    """Return the p99 over requests that got a first byte. The others count as lost."""
    return quantile([result.first_byte_s for result in results if result.first_byte_s is not None], 0.99)


def _curve(name: str, results: Sequence[Result], colour: int) -> Series:
    firsts_s = sorted(result.first_byte_s for result in results if result.first_byte_s is not None)
    every = 20  # all 2,000 points would make the picture large
    return Series(name, [(at_s, float(count)) for count, at_s in enumerate(firsts_s, 1)][::every], colour)
