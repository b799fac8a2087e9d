"""Non-streaming requests: rate and CPU time per request of one gateway with all its functions, and of its peers.

The engine is an nginx that responds at once, so that the engine is not the bottleneck. wrk uses 64 connections and
1 KiB bodies. Proxies run on core 0, load and engine on core 1. Pilotlight performs all its functions: API key, limits,
queue, metrics, one event per request. Ratios are computed within a round, in which each side has one turn.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bench import engine, kit, peers, wrk
from bench.documents import Document, body
from bench.kit import KIB, Figures, say, spread
from bench.peers import AUTHORIZATION, OURS, PEERS, Side
from bench.picture import Series, picture
from bench.wrk import CONNECTIONS, Load
from loadtest.result import Shot

RATIOS = {
    "nginx": "ratio_nginx",
    "HAProxy": "ratio_haproxy",
    "vLLM router": "ratio_vllm_router",
    "SGLang router": "ratio_sglang_router",
    "aiohttp": "ratio_aiohttp",
    "LiteLLM": "ratio_litellm",
}
AT_LEAST = {"nginx": 0.5, "vLLM router": 1.5, "aiohttp": 3.5}
SLOW = "LiteLLM"
"""Omitted in quick runs."""
COLOURS = {OURS: 2, "nginx": 0, "HAProxy": 1, "vLLM router": 3, "SGLang router": 4, "aiohttp": 5}
"""The sides in the picture. LiteLLM is omitted, because its values would determine the scale."""


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return rps, us_per_call, cpu_ratio_nginx and the ratios of requests per second."""
    rounds, span_s = (5, 3) if quick else (10, 5)
    kit.title(f"calls: non-streaming, {CONNECTIONS} connections, 1 KiB, {rounds} rounds of {span_s} s")
    if not wrk.there():
        say(f"nothing is measured: {wrk.MISSING}")
        return {}
    script, model, shot = prepare(place)
    names = [peer.name for peer in PEERS if not (quick and peer.name == SLOW)]
    async with peers.sides(place, model, names, shot) as found:
        loads = await _rounds(found, script, rounds, span_s)
    return _report(loads)


def prepare(place: Path) -> tuple[Path, Document, Shot]:
    """Return the script of wrk, the Model of the nginx engine, and the request that each proxy must complete first."""
    ask = body("t", stream=False, bytes_min=KIB)
    model = engine.document(place, module="bench.nginx", slots=2 * CONNECTIONS)
    shot = Shot(model="t", body=ask, stream=False, headers=(AUTHORIZATION,), timeout_s=10)
    return wrk.script(place / "call.lua", ask), model, shot


async def _rounds(found: Sequence[Side], script: Path, rounds: int, span_s: int) -> dict[str, list[Load]]:
    """Return the loads by side. The sides rotate: each round begins with the next one."""
    loads: dict[str, list[Load]] = {side.name: [] for side in found}
    for number in range(-1, rounds):
        first = number % len(found)
        for side in (*found[first:], *found[:first]):
            load = await wrk.load(script, side.url, span_s if number >= 0 else 1, side.processes, side.others)
            if number >= 0:  # the first turn of each side is a warm-up
                loads[side.name].append(load)
    return loads


def _report(loads: dict[str, list[Load]]) -> Figures:
    """Print the table and return the figures."""
    say(f"{'proxy':<14} {'Requests/s':<30} {'CPU us per request':<22} {'others':<18} {'core':>5} {'not 2xx':>7}")
    for name, runs in loads.items():
        others = spread([run.us_others for run in runs]) if name == OURS else ""
        core, bad = statistics.median([run.core for run in runs]), sum(run.bad for run in runs)
        costs = spread([run.us_per_call for run in runs])
        say(f"{name:<14} {spread([run.per_s for run in runs]):<30} {costs:<22} {others:<18} {core:>5.2f} {bad:>7}")
    say("CPU of Pilotlight: of the gateway process. Column others: CPU of its supervisor and autoscaler.")
    say("Column core: the used share of CPU core 0, on which the proxies run.")
    ours = loads[OURS]
    figures: Figures = {
        "rps": statistics.median([run.per_s for run in ours]),
        "us_per_call": statistics.median([run.us_per_call for run in ours]),
    }
    for name, key in RATIOS.items():
        if name in loads:
            ratios = [mine.per_s / other.per_s for mine, other in zip(ours, loads[name], strict=True)]
            goal = f"   (at least {AT_LEAST[name]})" if name in AT_LEAST else ""
            say(f"Requests/s {kit.times(ratios)} {name}'s{goal}")
            figures[key] = statistics.median(ratios)
    if "nginx" in loads:
        costs_more = [mine.us_per_call / other.us_per_call for mine, other in zip(ours, loads["nginx"], strict=True)]
        say(f"CPU per request {kit.times(costs_more)} nginx's   (at most 1.9)")
        figures["cpu_ratio_nginx"] = statistics.median(costs_more)
    drawn = [
        Series(name, [(run.per_s / 1e3, run.us_per_call) for run in loads[name]], colour, dots=True)
        for name, colour in COLOURS.items()
        if name in loads
    ]
    picture("calls", "thousand requests a second", "CPU us per request", drawn)
    return figures
