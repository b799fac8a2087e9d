"""Non-streaming Calls a second through one gateway with all its work, against a plain aiohttp proxy, in the same run.

Owns one table. Proxy on core 0, engine and load on core 1 (both sides alike); wrk, 64 connections, 1 KiB bodies. Ours
does its full work: key, limits, queue, metrics, one event per Call; its autoscaler and supervisor share core 0 with it.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from bench import kit
from bench.documents import ROOT, Document, body, key, model, settings, tenant
from bench.kit import KIB, Figures, say, spread
from loadtest.client import Client
from loadtest.result import Ending, Shot

CONNECTIONS = 64
PROXY_CORE, LOAD_CORE = 0, 1
MISSING = "ratio_aiohttp is not measured: there is no wrk on the PATH (Debian: apt install wrk)"


class Load(NamedTuple):
    """One run of wrk."""

    per_s: float
    us_per_call: float
    bad: int


async def measure(place: Path, *, quick: bool) -> Figures:
    """ratio_aiohttp: the median of the rounds' ratios."""
    rounds, span_s = (5, 3) if quick else (8, 4)
    kit.title(f"throughput: non-streaming, one gateway, {CONNECTIONS} connections, {rounds} rounds of {span_s} s")
    if shutil.which("wrk") is None:
        say(MISSING)
        return {"ratio_aiohttp": None}
    script = place / "call.lua"
    script.write_text(
        f'wrk.method = "POST"\nwrk.path = "/v1/chat/completions"\nwrk.body = [==[{_ask().decode()}]==]\n'
        f'wrk.headers["Content-Type"] = "application/json"\nwrk.headers["Authorization"] = "Bearer {key("a")}"\n'
    )
    documents: list[Document] = [settings(), tenant("a"), _engine()]
    ours, peer = list[Load](), list[Load]()
    async with kit.serving(place / "throughput", documents, core=PROXY_CORE) as one:
        engine = await _woken(one)
        port = kit.free_port()
        command = [*kit.on_core(PROXY_CORE), sys.executable, "-m", "bench.aiohttp_proxy", str(port), engine]
        with kit.running(command, place / "aiohttp.log") as process:
            rival = f"http://{kit.HOST}:{port}"
            await kit.answers(rival, process, place / "aiohttp.log")
            sides = [(ours, one.url, one.processes()), (peer, rival, [psutil.Process(process.pid)])]
            await _load(script, one.url, 1, sides[0][2])
            await _load(script, rival, 1, sides[1][2])
            for _ in range(rounds):
                for kept, url, processes in sides:
                    kept.append(await _load(script, url, span_s, processes))
                sides.reverse()
    say(f"{'proxy':<10} {'Calls/s':<32} {'CPU us per Call':<24} {'not 2xx':>7}")
    for name, loads in (("Pilotlight", ours), ("aiohttp", peer)):
        costs = spread([load.us_per_call for load in loads])
        say(f"{name:<10} {spread([load.per_s for load in loads]):<32} {costs:<24} {sum(load.bad for load in loads):>7}")
    ratios = [mine.per_s / other.per_s for mine, other in zip(ours, peer, strict=True)]
    cheaper = [other.us_per_call / mine.us_per_call for mine, other in zip(ours, peer, strict=True)]
    say(f"Calls/s {_times(ratios)} aiohttp's (at least 1.7 x); CPU per Call: aiohttp's is {_times(cheaper)} ours")
    return {"ratio_aiohttp": statistics.median(ratios)}


def _ask() -> bytes:
    return body("t", stream=False, bytes_min=KIB)


def _engine() -> Document:
    command = [*kit.on_core(LOAD_CORE), sys.executable, "-m", "bench.upstream", "{port}"]
    return model("t", engine="command", command=command, readinessPath="/", slots=2 * CONNECTIONS, idleSeconds=3600,
                 env={"PYTHONPATH": str(ROOT)})  # fmt: skip


async def _woken(one: kit.Serving) -> str:
    """The engine's own URL, once it runs."""
    shot = Shot(model="t", body=_ask(), stream=False, headers=(("Authorization", f"Bearer {key('a')}"),))
    result = await Client(one.url).send(shot)
    if result.ending is not Ending.COMPLETED:
        raise kit.BenchError(f"a Call did not complete: {result}")
    (engine,) = [p for p in psutil.Process(one.process.pid).children(recursive=True) if "bench.upstream" in p.cmdline()]
    return f"http://{kit.HOST}:{engine.cmdline()[-1]}"


async def _load(script: Path, url: str, span_s: int, processes: Sequence[psutil.Process]) -> Load:
    """Runs wrk for so long; what it counted, and what the proxy's processes used meanwhile."""
    command = [*kit.on_core(LOAD_CORE), "wrk", "-t1", f"-c{CONNECTIONS}", f"-d{span_s}s", "-s", str(script), url]
    before_s = kit.cpu_s(processes)
    made = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    told = (await made.communicate())[0].decode()
    used_s = kit.cpu_s(processes) - before_s
    calls, per_s = re.search(r"(\d+) requests in", told), re.search(r"Requests/sec:\s+([\d.]+)", told)
    bad = re.search(r"Non-2xx or 3xx responses: (\d+)", told)
    if calls is None or per_s is None or not int(calls[1]):
        raise kit.BenchError(f"wrk got no answers from {url}: {told.strip()}")
    return Load(float(per_s[1]), used_s / int(calls[1]) * 1e6, int(bad[1]) if bad else 0)


def _times(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} [{min(ratios):.2f}-{max(ratios):.2f}] x"
