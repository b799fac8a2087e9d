"""`make bench-clients`: what clients and proxies in front of the gateway observe.

Runs all parts, or those named on the command line; the last line is one JSON object. `QUICK=1` uses fewer rounds.

* `proxies`: the additional delay of tokens through nginx, HAProxy and Caddy with their default settings. In each round,
  streams of one token per 50 ms run at the same time through each proxy and directly to the gateway. Each token
  contains the time of its write. The figure is the median of the rounds' p95 of (delay of a token through the proxy -
  delay of the same token of the paired direct stream).
* `timeouts`: requests that engines received twice after a timeout of the gateway or of a proxy in front of it.
* `forms`: forms of ten client libraries that the gateway reads differently from two other parsers.
* `cells`: the pairs of client and behaviour that the tests of the client matrix recorded in MATRIX.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import cast

import aiohttp

from bench import engine, kit, parts
from bench.documents import ROOT, body, key, settings, tenant
from bench.kit import BenchError, Figures, quantile, say, spread
from bench.peers import AUTHORIZATION
from bench.streams import request
from loadtest.client import target_of
from tests.support.net.client_forms import CLIENTS
from tests.support.net.default_proxies import DEFAULTS, default_proxy
from tests.support.net.origin_client import program
from tests.wire.bodies.test_form_parsers import PROGRAM, count_disagreements

KEYS = (
    "proxy_gap_ms_p95_nginx", "proxy_gap_ms_p95_haproxy", "proxy_gap_ms_p95_caddy", "asked_twice", "forms_disagree",
    "client_cells_passed", "client_cells_limited", "client_cells_failed",
)  # fmt: skip
MATRIX = ROOT / "build" / "client-matrix.json"
"""Written by a complete run of the client matrix: an object with the numbers `passed`, `limited` and `failed`."""
EVERY_MS = 50
STREAMS = 4
"""Streams of each side in a round."""
GAP_MS_MAX = 20
END_S_MAX = 60.0
ENGINE_S, PROXY_S = 2, 1
"""The timeouts of the gateway and of the proxies in the part `timeouts`."""
REQUESTS = 10
"""Of each side, with and without streaming."""
FORMS, FORMS_QUICK = 2_000, 200
DIRECT = "direct"

_STAMP = re.compile(rb"@(\d+\.\d{6})")
_STAMP_BYTES_MAX = 64


class Arrivals(asyncio.Protocol):
    """One stream of the engine's behaviour `stamped`: the delay of each token in milliseconds."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._rest = b""
        self._transport: asyncio.Transport | None = None
        self.delays_ms: list[float] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Record the delays of the tokens in these bytes."""
        now_s = time.monotonic()
        data, at = self._rest + data, 0
        for stamp in _STAMP.finditer(data):
            self.delays_ms.append((now_s - float(stamp[1])) * 1e3)
            at = stamp.end()
        self._rest = data[max(at, len(data) - _STAMP_BYTES_MAX) :]

    def close(self) -> None:
        """Disconnect."""
        if self._transport is not None:
            self._transport.abort()


@contextlib.asynccontextmanager
async def sides(place: Path, gateway: str, timeout_s: int | None = None) -> AsyncIterator[dict[str, str]]:
    """Run the installed proxies in front of a gateway; yield the URLs by name, with that of the gateway."""
    urls = {DIRECT: gateway}
    with contextlib.ExitStack() as stack:
        for name in DEFAULTS:
            if program(name) is None:
                say(f"{name} is omitted: it is not installed (Debian: apt install {name})")
                continue
            (place / name).mkdir()
            proxy = default_proxy(name, place / name, target_of(gateway).port, timeout_s)
            try:
                urls[name] = f"http://{kit.HOST}:{await asyncio.to_thread(stack.enter_context, proxy)}"
            except AssertionError as error:
                raise BenchError(f"{name}: {error}") from None
        yield urls


async def proxies(place: Path, *, quick: bool) -> Figures:
    """Return proxy_gap_ms_p95_NAME for each installed proxy."""
    rounds, tokens = (5, 40) if quick else (15, 100)
    kit.title(f"proxies: {STREAMS} streams of {tokens} tokens through each proxy, {rounds} rounds, delay minus direct")
    model = engine.document(place, "stamped", str(EVERY_MS), slots=128)
    p95_ms: dict[str, list[float]] = {}
    async with kit.serving(place / "serve", [settings(), tenant("a"), model]) as one:
        await one.model_ready("t", key("a"))
        async with sides(place, one.url) as urls:
            for _ in range(rounds):
                delays = await _delays_ms(urls, tokens)
                direct = delays.pop(DIRECT)
                for name, found in delays.items():
                    gaps = [mine - base for mine, base in zip(found, direct, strict=True)]
                    p95_ms.setdefault(name, []).append(quantile(gaps, 0.95))
    for name, found in p95_ms.items():
        say(f"{name:<10} p95 of the additional delay {spread(found, 2)} ms (at most {GAP_MS_MAX})")
    return {f"proxy_gap_ms_p95_{name}": statistics.median(found) for name, found in p95_ms.items()}


async def _delays_ms(urls: dict[str, str], tokens: int) -> dict[str, list[float]]:
    """Return the delays of all tokens by side, those of its streams one after the other."""
    loop, asked = asyncio.get_running_loop(), body("t", tokens=tokens)
    streams: dict[str, list[Arrivals]] = {name: [] for name in urls}
    try:
        for _ in range(STREAMS):
            for name, url in urls.items():
                target, sent = target_of(url), request(url, asked)
                _, stream = await loop.create_connection(partial(Arrivals, sent), target.host, target.port)
                streams[name].append(stream)
        begun_s = time.monotonic()
        while any(len(one.delays_ms) < tokens for some in streams.values() for one in some):
            if time.monotonic() - begun_s > END_S_MAX:
                raise BenchError(f"at least one stream has not all of its {tokens} tokens after {END_S_MAX:.0f} s")
            await asyncio.sleep(0.05)
    finally:
        for some in streams.values():
            for one in some:
                one.close()
    return {name: [delay for one in some for delay in one.delays_ms] for name, some in streams.items()}


async def timeouts(place: Path, *, quick: bool) -> Figures:
    """Return asked_twice: requests of which an engine received more than one copy."""
    del quick
    kit.title(f"timeouts: {REQUESTS} streams and {REQUESTS} other requests per side to engines that do not respond")
    model = engine.document(place, "silent", slots=64, firstByteSecondsMax=ENGINE_S, responseSecondsMax=ENGINE_S)
    cast("dict[str, object]", model["spec"])["replicas"] = {"min": 2, "max": 2}
    statuses: Counter[str] = Counter()
    async with kit.serving(place / "serve", [settings(stream={"keepaliveSeconds": 0}), tenant("a"), model]) as one:
        await one.model_ready("t", key("a"))
        async with sides(place, one.url, PROXY_S) as urls, aiohttp.ClientSession() as session:

            async def send(name: str, number: int, *, stream: bool) -> None:
                headers = dict([AUTHORIZATION]) | {
                    "Content-Type": "application/json", "X-Request-Id": f"{name}-{stream}-{number}",
                }  # fmt: skip
                url = f"{urls[name]}/v1/chat/completions"
                async with session.post(url, data=body("t", stream=stream), headers=headers) as answer:
                    statuses[f"{name} {answer.status}"] += 1
                    await answer.read()

            async with asyncio.TaskGroup() as group:
                for name in urls:
                    for number in range(REQUESTS):
                        for stream in (True, False):
                            group.create_task(send(name, number, stream=stream))
            await asyncio.sleep(ENGINE_S)  # a copy that is sent after the response would arrive now
    notes = [line.split() for line in (place / engine.NOTES).read_text().splitlines()]
    copies = Counter(id for what, _, id in notes if what == "asked")
    twice = sum(number > 1 for number in copies.values())
    say(f"responses: {', '.join(f'{what}: {number}' for what, number in sorted(statuses.items()))}")
    say(f"{len(copies)} requests reached an engine, {twice} of them twice (at most 0)")
    if len(copies) != sum(statuses.values()):
        raise BenchError(f"{len(copies)} of {sum(statuses.values())} requests reached an engine")
    return {"asked_twice": twice}


async def forms(place: Path, *, quick: bool) -> Figures:
    """Return forms_disagree, null without Go."""
    number = FORMS_QUICK if quick else FORMS
    kit.title(f"forms: {number} of each of {len(CLIENTS)} clients, read by the gateway, by werkzeug and by Go")
    if shutil.which("go") is None:
        say("omitted: go is not installed (Debian: apt install golang)")
        return {}
    reader = place / "goform"
    subprocess.run(["go", "build", "-o", reader, PROGRAM], check=True, capture_output=True)
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        counted = pool.map(partial(count_disagreements, reader, count=number), CLIENTS)
        found = dict(zip(CLIENTS, counted, strict=True))
    say(", ".join(f"{client}: {disagree}" for client, disagree in found.items()))
    return {"forms_disagree": sum(found.values())}


async def cells(place: Path, *, quick: bool) -> Figures:
    """Return client_cells_*, null without MATRIX."""
    del place, quick
    kit.title("cells: pairs of client and behaviour")
    if not MATRIX.exists():
        say(f"omitted: the tests of the client matrix have not written {MATRIX.relative_to(ROOT)}")
        return {}
    matrix = json.loads(MATRIX.read_text())
    say(f"{matrix['passed']} pass, {matrix['limited']} are limited by the client, {matrix['failed']} fail")
    return {f"client_cells_{name}": matrix[name] for name in ("passed", "limited", "failed")}


PARTS: dict[str, parts.Part] = {"proxies": proxies, "timeouts": timeouts, "forms": forms, "cells": cells}


if __name__ == "__main__":
    parts.main("clients", __doc__, KEYS, PARTS)
