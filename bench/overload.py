"""Ten times as many requests as the engine can serve: the share of the peak goodput, and the time of rejections.

One table. 32 slots of 80 ms each serve 400 requests a second; the open-loop load is 4,000 a second. Goodput: 200
responses that ended within the span. Peak: goodput at 440 a second, just enough to fill all slots, before and after.
Rejections are timed from the write to the last byte. Memory: growth of the gateway's RSS from 3 s after the start to
the end.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NamedTuple

from bench import engine, kit
from bench.documents import body, key, settings, tenant
from bench.kit import KIB, MIB, Figures, quantile, say
from bench.openloop import Sender
from bench.streams import request
from bench.usage import rss_bytes

SLOTS, TAKES_MS = 32, 80
CAPACITY_PER_S = SLOTS * 1000 / TAKES_MS
QUEUE = {"callsMax": 200}
"""Half a second of work."""
PEAK_TIMES, OVERLOAD_TIMES = 1.1, 10
PEAK_S = 8
SETTLE_S = 3.0
LINES = 300


class Run(NamedTuple):
    """The result at one rate."""

    goodput_per_s: float
    refusal_ms: list[float]
    grown_mib: float


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return overload_goodput (relative to the peak), refusal_ms_p99 and rss_growth_mib."""
    span_s = 15 if quick else 60
    kit.title(f"overload: {OVERLOAD_TIMES} times the engine's {CAPACITY_PER_S:.0f} requests a second for {span_s} s")
    model = engine.document(place, "late", str(TAKES_MS), slots=SLOTS, queue=QUEUE)
    say(f"{'sent/s':>8} {'done/s':>8} {'refused':>9} {'p50 ms':>7} {'p99':>7} {'max':>7} {'broken':>7} {'late p99':>9}")
    async with kit.serving(place / "serve", [settings(), tenant("a"), model], core=kit.PROXY_CORE) as one:
        await one.model_ready("t", key("a"))
        before = await _run(one, PEAK_TIMES, PEAK_S)
        over = await _run(one, OVERLOAD_TIMES, span_s)
        after = await _run(one, PEAK_TIMES, PEAK_S)
    peak_per_s = max(before.goodput_per_s, after.goodput_per_s)
    figures: Figures = {
        "overload_goodput": over.goodput_per_s / peak_per_s,
        "refusal_ms_p99": quantile(over.refusal_ms, 0.99),
        "rss_growth_mib": over.grown_mib,
    }
    say(
        f"goodput {over.goodput_per_s / peak_per_s:.3f} of peak (at least 0.9); "
        f"refusals' p99 {figures['refusal_ms_p99']:.1f} ms (below 50); RSS grew {over.grown_mib:.2f} MiB"
    )
    return figures


async def _run(one: kit.Serving, times: float, span_s: int) -> Run:
    """Send at one rate for this time."""
    per_s = times * CAPACITY_PER_S
    sender = Sender(one.url, request(one.url, body("t", stream=False, bytes_min=KIB)))
    await sender.open(LINES)
    sending = asyncio.create_task(sender.run(per_s, span_s))
    await asyncio.sleep(SETTLE_S)
    gateways = one.gateways()
    at_first = rss_bytes(gateways)
    await asyncio.sleep(span_s - SETTLE_S)
    grown_mib = (rss_bytes(gateways) - at_first) / MIB
    answers = await sending
    begun_s = answers[0].sent_s
    good = [a for a in answers if a.status == 200 and begun_s + SETTLE_S <= a.sent_s + a.took_s <= begun_s + span_s]
    refused_ms = sorted(answer.took_s * 1e3 for answer in answers if answer.status in (429, 503))
    broken = sum(answer.status not in (200, 429, 503) for answer in answers) + sender.unsent
    quantiles = "".join(f"{quantile(refused_ms, share) if refused_ms else 0.0:>8.2f}" for share in (0.5, 0.99, 1.0))
    late_ms = quantile(sender.late_s, 0.99) * 1e3
    done_per_s = len(good) / (span_s - SETTLE_S)
    say(f"{per_s:>8.0f} {done_per_s:>8.1f} {len(refused_ms):>9,}{quantiles} {broken:>7} {late_ms:>9.2f}")
    return Run(done_per_s, refused_ms, grown_mib)
