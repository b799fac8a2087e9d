"""Cold starts while an admission webhook for pods is slow, and while it is away, on a real API server.

A start cannot be faster than the webhook, so the figure is the time of the request beyond that of the webhook.
"""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from statistics import median

import aiohttp

from bench import kit
from bench.clusterbed import bed
from bench.clusterhouse import house
from bench.clusterwake import HOPELESS_S, ours, zero
from bench.documents import body, settings
from bench.kit import BenchError, Figures, say, spread
from tests.cluster.webhook import webhook

SLOW_S, AWAY_S = 20.0, 2.0


async def measure(place: Path, *, quick: bool) -> Figures:
    """webhook_slow_s, webhook_away_s."""
    slow_s, rounds = (3.0, 1) if quick else (SLOW_S, 3)
    kit.title(f"cold start with a webhook that takes {slow_s:.0f} s, and one that is away for {AWAY_S:.0f} s")
    slow, away = list[float](), list[float]()
    async with bed(place) as one:
        document = ours(place / "pod.jsonl")
        async with house(one, place / "house", [settings(devices=[], auth="none"), document]) as running:
            await answered_s(running.url)
            for _ in range(rounds):
                await zero(one)
                async with webhook(one.api, one.namespace, place, delay_s=slow_s):
                    slow.append(await answered_s(running.url) - slow_s)
                await zero(one)
                async with webhook(one.api, one.namespace, place, listens=False) as listen:
                    start = asyncio.create_task(answered_s(running.url))
                    await asyncio.sleep(AWAY_S)
                    await listen()
                    away.append(await start)
    say(f"beyond a webhook of {slow_s:.0f} s: {spread(slow, 2)} s (at most 2)")
    say(f"webhook away for {AWAY_S:.0f} s: answered after {spread(away, 2)} s (at most 4)")
    return {"webhook_slow_s": median(slow), "webhook_away_s": median(away)}


async def answered_s(url: str) -> float:
    """Of one call that does not stream, because a stream that waits has bytes before its answer. Raises BenchError."""
    started_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(HOPELESS_S)
    async with (
        aiohttp.ClientSession(timeout=timeout, headers={"Content-Type": "application/json"}) as session,
        session.post(f"{url}/v1/chat/completions", data=body("pod", stream=False)) as answer,
    ):
        await answer.read()
        if answer.status != 200:
            raise BenchError(f"the call was answered {answer.status}")
    return time.perf_counter() - started_s
