"""The effect of hostile clients (fault cases 35 to 37) on a well-behaved client: the p99 at 200 requests a second.

In each round the client sends once without an attack and once during each attack (`bench.attackers`): clients that
hardly read their streams, heads and bodies that trickle, idle connections, thousands of simultaneous connects. Each
round begins with the next attack. A ratio compares the p99 during an attack with the p99 without one of the same round.
The same number of requests is sent directly to the engine, in turn: their delay is caused by the load and the machine,
not by the gateway. All timeouts and limits of the gateway are the defaults.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

from bench import attackers, engine, kit
from bench.documents import body, key, settings, tenant
from bench.kit import KIB, Figures, quantile, say, spread
from bench.latency import PER_S, measure_sides

NO_ATTACK = "no attack"
ATTACKS = {
    "slow_readers": "case 35: clients read 500 streams at 1 B/s, 100 never",
    "slow_heads": "case 36: 2,000 request heads and 2,000 bodies, sent at 1 B/s",
    "idle": "case 36: 20,000 idle connections, or what fits",
    "connects": "case 37: 5,000 connects at once, every 5 s",
}
RATIOS_MAX = {"slow_readers": 1.2, "slow_heads": 1.2, "idle": 1.2, "connects": 1.5}
SETTLE_S = 1.0
"""The pause after all clients have connected, and after all have disconnected."""
CONNECT_S_MAX = 60.0
OURS, DIRECT = "ours", "direct"


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return attack_NAME_p99_ratio, the median over all rounds, and the highest of them as attacked_p99_ratio."""
    rounds, span_s = (3, 5) if quick else (9, 5)  # 5 s: one burst of the attack `connects`
    kit.title(
        f"attacks: {PER_S} requests a second during attacks of hostile clients, {rounds} rounds of {span_s} s each"
    )
    flood = place / attackers.FLOOD
    flood.mkdir()
    models = [
        engine.document(place, module="bench.nginx", slots=128),
        engine.document(flood, "flood", name=attackers.FLOOD, slots=2 * (attackers.READERS + attackers.SILENT)),
    ]
    runs: dict[str, dict[str, list[float]]] = {name: {OURS: [], DIRECT: []} for name in (NO_ATTACK, *ATTACKS)}
    counts_by_attack: dict[str, dict[str, int]] = {}
    async with kit.serving(place / "serve", [settings(), tenant("a"), *models], core=kit.PROXY_CORE) as one:
        for name in ("t", attackers.FLOOD):
            await one.model_ready(name, key("a"))
        urls = {OURS: one.url, DIRECT: f"http://{engine.address(place)}"}
        for number in range(rounds):
            first = number % len(runs)
            for name in [*runs, *runs][first : first + len(runs)]:
                async with _attack(name, one.url, place / "attackers.log") as counts:
                    for side, found in (await _p99_ms(urls, span_s)).items():
                        runs[name][side].append(found)
                counts_by_attack[name] = counts
    return _report(runs, counts_by_attack)


@contextlib.asynccontextmanager
async def _attack(name: str, url: str, log: Path) -> AsyncIterator[dict[str, int]]:
    """Run all attackers of an attack, none for NO_ATTACK; yield the counts that they print at the end."""
    counts: dict[str, int] = {}
    if name == NO_ATTACK:
        yield counts
        return
    command = [*kit.on_core(kit.LOAD_CORE), sys.executable, "-m", "bench.attackers", url, name]
    with kit.running(command, log) as process:
        deadline_s = time.monotonic() + CONNECT_S_MAX
        while attackers.THERE not in log.read_text():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise kit.BenchError(f"at least one attacker ({name}) is not connected: {log.read_text()[-400:]!r}")
            await asyncio.sleep(0.05)
        await asyncio.sleep(SETTLE_S)
        yield counts
        if process.poll() is not None:
            raise kit.BenchError(f"the attackers ({name}) exited early: {log.read_text()[-400:]!r}")
    counts |= json.loads(log.read_text().splitlines()[-1])
    await asyncio.sleep(SETTLE_S)


async def _p99_ms(urls: dict[str, str], span_s: float) -> dict[str, float]:
    """Return the p99 of each side, in milliseconds. Raises BenchError for a status other than 200."""
    took_ms = await measure_sides(urls, body("t", stream=False, bytes_min=KIB), span_s)
    return {side: quantile(values, 0.99) for side, values in took_ms.items()}


def _report(runs: dict[str, dict[str, list[float]]], counts_by_attack: dict[str, dict[str, int]]) -> Figures:
    """Print the table and return the figures."""
    say("ratio: the p99 relative to that without an attack; direct: of requests that are sent directly to the engine")
    say(f"{'attack':<60} {'held':>6} {'cut':>6} {'p99 ms':<22} {'ratio':<20} {'added ms':<22} direct, ratio")
    figures: Figures = {}
    added = list[float]()
    for name, p99_ms in runs.items():
        of_peace = {
            side: [mine / calm for mine, calm in zip(values, runs[NO_ATTACK][side], strict=True)]
            for side, values in p99_ms.items()
        }
        more_ms = [mine - calm for mine, calm in zip(p99_ms[OURS], runs[NO_ATTACK][OURS], strict=True)]
        if name != NO_ATTACK:
            figures[f"attack_{name}_p99_ratio"] = statistics.median(of_peace[OURS])
            added.append(statistics.median(more_ms))
        counts = counts_by_attack[name]
        say(
            f"{ATTACKS.get(name, 'no attack'):<60} {counts.get('held', 0):>6,} {counts.get('cut', 0):>6,}"
            f" {spread(p99_ms[OURS], 2):<22} {spread(of_peace[OURS], 2):<20} {spread(more_ms, 2):<22}"
            f" {spread(of_peace[DIRECT], 2)}"
        )
    worst = max(value for value in figures.values() if value is not None)
    say("at most: " + ", ".join(f"{name} {limit}" for name, limit in RATIOS_MAX.items()))
    return figures | {"attacked_p99_ratio": worst, "attacked_added_ms_p99": max(added)}
