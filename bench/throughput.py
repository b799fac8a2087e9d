"""Non-streaming requests a second through one gateway with all its functions, and through a plain aiohttp proxy.

One table. The proxy runs on core 0, engine and load on core 1 (for both sides); wrk with 64 connections and 1 KiB
bodies, or our own client without wrk. Pilotlight performs all its functions: key, limits, queue, metrics, one event per
request; its autoscaler and supervisor also run on core 0.
"""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

import psutil

from bench import kit, wrk
from bench.documents import ROOT, Document, body, key, model, settings, tenant
from bench.kit import KIB, Figures, say, spread
from bench.wrk import CONNECTIONS, Load
from loadtest.client import Client
from loadtest.result import Ending, Shot


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return ratio_aiohttp: the median of the ratios of the rounds."""
    rounds, span_s = (5, 3) if quick else (8, 4)
    kit.title(f"throughput: non-streaming, one gateway, {CONNECTIONS} connections, {rounds} rounds of {span_s} s")
    if not wrk.there():
        say(f"{wrk.MISSING}: the load generator is this benchmark's own client")
        say("if `core` is well below 1, the client is the bottleneck: the true ratio is higher than the measured one")
    script = wrk.script(place / "call.lua", _ask())
    documents: list[Document] = [settings(), tenant("a"), _engine()]
    ours, peer = list[Load](), list[Load]()
    async with kit.serving(place / "throughput", documents, core=kit.PROXY_CORE) as one:
        engine = await _woken(one)
        port = kit.free_port()
        command = [*kit.on_core(kit.PROXY_CORE), sys.executable, "-m", "bench.aiohttp_proxy", str(port), engine]
        with kit.running(command, place / "aiohttp.log") as process:
            rival = f"http://{kit.HOST}:{port}"
            await kit.answers(rival, process, place / "aiohttp.log")
            sides = [(ours, one.url, one.processes()), (peer, rival, [psutil.Process(process.pid)])]
            for _, url, processes in sides:
                await wrk.load(script, url, 1, processes)
            for _ in range(rounds):
                for kept, url, processes in sides:
                    kept.append(await wrk.load(script, url, span_s, processes))
                sides.reverse()
    say(f"{'proxy':<10} {'load':<15} {'Requests/s':<32} {'CPU us per request':<24} {'core':>5} {'not 2xx':>7}")
    for name, loads in (("Pilotlight", ours), ("aiohttp", peer)):
        rates, costs = (spread(values) for values in ([one.per_s for one in loads], [one.us_per_call for one in loads]))
        core, bad = statistics.median([one.core for one in loads]), sum(one.bad for one in loads)
        say(f"{name:<10} {wrk.name():<15} {rates:<32} {costs:<24} {core:>5.2f} {bad:>7}")
    ratios = [mine.per_s / other.per_s for mine, other in zip(ours, peer, strict=True)]
    cheaper = [other.us_per_call / mine.us_per_call for mine, other in zip(ours, peer, strict=True)]
    say(f"Requests/s {kit.times(ratios)} aiohttp's (at least 1.7 x); CPU: aiohttp's is {kit.times(cheaper)} ours")
    return {"ratio_aiohttp": statistics.median(ratios)}


def _ask() -> bytes:
    return body("t", stream=False, bytes_min=KIB)


def _engine() -> Document:
    command = [*kit.on_core(kit.LOAD_CORE), sys.executable, "-m", "bench.upstream", "{port}"]
    return model("t", engine="command", command=command, readinessPath="/", slots=2 * CONNECTIONS, idleSeconds=3600,
                 env={"PYTHONPATH": str(ROOT)})  # fmt: skip


async def _woken(one: kit.Serving) -> str:
    """Return the engine's own URL, once it runs."""
    shot = Shot(model="t", body=_ask(), stream=False, headers=(("Authorization", f"Bearer {key('a')}"),))
    result = await Client(one.url).send(shot)
    if result.ending is not Ending.COMPLETED:
        raise kit.BenchError(f"a request did not complete: {result}")
    (engine,) = [p for p in psutil.Process(one.process.pid).children(recursive=True) if "bench.upstream" in p.cmdline()]
    return f"http://{kit.HOST}:{engine.cmdline()[-1]}"
