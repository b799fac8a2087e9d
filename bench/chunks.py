"""Streaming: CPU time per chunk at 25,000 chunks a second, and the maximum rate, compared with nginx.

Paced: 500 streams of 50 chunks a second, which the engine spreads over 20 beats of one millisecond. Blast: 64 streams
of 25,000 chunks each, as fast as the proxy accepts them, measured until the last one has ended; the engine writes
blocks of 256 chunks. A chunk contains one SSE event of 180 bytes. Every stream must end completely.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench import engine, kit, peers, streams
from bench.documents import Document, body
from bench.kit import Figures, say, spread
from bench.peers import AUTHORIZATION, OURS, Side
from bench.streams import Stream
from bench.usage import ran_us
from loadtest.result import Shot

STREAMS, EVERY_MS = 500, 20
SETTLE_S = 1.0
"""The pause between the requests and the first sample, and between the last sample and the end."""
BLAST_STREAMS, BLAST_CHUNKS = 64, 25_000
RIVALS = ("nginx", "HAProxy")

Measure = Callable[[Side], Awaitable["Flow"]]


class Flow(NamedTuple):
    """The result of one run."""

    per_s: float
    us_per_chunk: float
    core: float
    whole: int
    chunks: int
    """The number of chunks received in the measured time."""


async def paced(place: Path, *, quick: bool) -> Figures:
    """Return us_per_chunk and chunk_cpu_ratio_nginx."""
    rounds, span_s = (4, 4.0) if quick else (8, 8.0)
    per_s = STREAMS * 1000 // EVERY_MS
    kit.title(f"chunks: {STREAMS} streams, {per_s:,} chunks a second, {rounds} rounds of {span_s:g} s")
    words = ("paced", str(EVERY_MS))
    flows = await _rounds(place, words, STREAMS, rounds, lambda side: paced_flow(side, span_s, STREAMS))
    _table(flows)
    figures: Figures = {"us_per_chunk": statistics.median([flow.us_per_chunk for flow in flows[OURS]])}
    if "nginx" in flows:
        pairs = zip(flows[OURS], flows["nginx"], strict=True)
        ratios = [ours.us_per_chunk / other.us_per_chunk for ours, other in pairs]
        say(f"CPU per chunk {kit.times(ratios)} nginx's   (at most 1.1)")
        figures["chunk_cpu_ratio_nginx"] = statistics.median(ratios)
    return figures


async def blast(place: Path, *, quick: bool) -> Figures:
    """Return blast_chunks_per_s and blast_ratio_nginx."""
    rounds = 4 if quick else 12
    kit.title(
        f"blast: {BLAST_STREAMS} streams of {BLAST_CHUNKS:,} chunks as fast as they are accepted, {rounds} rounds"
    )
    flows = await _rounds(place, ("blast",), BLAST_STREAMS, rounds, blast_flow)
    _table(flows)
    say("if a proxy used much less than all of core 0, the engine and the client on core 1 were the limit")
    figures: Figures = {"blast_chunks_per_s": statistics.median([flow.per_s for flow in flows[OURS]])}
    if "nginx" in flows:
        ratios = [ours.per_s / other.per_s for ours, other in zip(flows[OURS], flows["nginx"], strict=True)]
        say(f"chunks/s {kit.times(ratios)} nginx's   (at least 1.0)")
        figures["blast_ratio_nginx"] = statistics.median(ratios)
    return figures


def prepare(place: Path, manner: Sequence[str], count: int) -> tuple[Document, Shot]:
    """Return the Model of an engine for `count` streams, and the request that each proxy must complete first."""
    model = engine.document(place, *manner, slots=2 * count)
    return model, Shot(model="t", body=body("t", tokens=1), headers=(AUTHORIZATION,), timeout_s=10)


async def _rounds(
    place: Path, manner: Sequence[str], count: int, rounds: int, measure: Measure
) -> dict[str, list[Flow]]:
    """Return the flows by side. The sides rotate: each round begins with the next one."""
    model, one = prepare(place, manner, count)
    async with peers.sides(place, model, RIVALS, one) as found:
        flows: dict[str, list[Flow]] = {side.name: [] for side in found}
        for number in range(rounds):
            first = number % len(found)
            for side in (*found[first:], *found[:first]):
                flows[side.name].append(await measure(side))
    return flows


async def paced_flow(side: Side, span_s: float, count: int) -> Flow:
    """Measure `count` streams for `span_s`, while all of them run."""
    chunks = int((span_s + 2 * SETTLE_S) * 1000 / EVERY_MS)
    made = await streams.connect(side.url, count, chunks)
    _ask(side, made, chunks)
    await asyncio.sleep(SETTLE_S)
    begun_s, before_us, before = time.monotonic(), ran_us(side.processes), _moved(made)
    await asyncio.sleep(span_s)
    took_s, used_us, moved = time.monotonic() - begun_s, ran_us(side.processes) - before_us, _moved(made) - before
    whole = await streams.ended(made, side.name)
    return Flow(moved / took_s, used_us / moved, used_us / took_s / 1e6, whole, moved)


async def blast_flow(side: Side) -> Flow:
    """Measure from the first request to the end of the last stream."""
    made = await streams.connect(side.url, BLAST_STREAMS, BLAST_CHUNKS)
    begun_s, before_us = time.monotonic(), ran_us(side.processes)
    _ask(side, made, BLAST_CHUNKS)
    whole = await streams.ended(made, side.name)
    took_s, used_us = time.monotonic() - begun_s, ran_us(side.processes) - before_us
    moved = _moved(made)
    return Flow(moved / took_s, used_us / moved, used_us / took_s / 1e6, whole, moved)


def _ask(side: Side, made: Sequence[Stream], chunks: int) -> None:
    asked = streams.request(side.url, body("t", tokens=chunks))
    for stream in made:
        stream.ask(asked)


def _moved(made: Sequence[Stream]) -> int:
    return sum(stream.chunks for stream in made)


def _table(flows: dict[str, list[Flow]]) -> None:
    say(f"{'proxy':<14} {'chunks/s':<36} {'CPU us per chunk':<22} {'core':>5} {'whole':>7}")
    for name, runs in flows.items():
        cost = spread([flow.us_per_chunk for flow in runs], 2)
        core, whole = statistics.median([flow.core for flow in runs]), sum(flow.whole for flow in runs)
        say(f"{name:<14} {spread([flow.per_s for flow in runs]):<36} {cost:<22} {core:>5.2f} {whole:>7}")
