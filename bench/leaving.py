"""Client disconnects: the time until the engine's connection is closed, so that the engine can stop its work.

One table, with 100 concurrent streams whose clients disconnect one by one, 5 ms apart. There are three
situations. Prefill: the engine has the request and has not responded. Mid-stream: the engine sends 50 chunks a second
in each stream. Both are measured at the engine, which records the end of a connection; the machine has one monotonic
clock. Parked: the request is queued, the client closes its side of the connection, and the time until the gateway
closes the other side is measured. A parked request must never reach the engine.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from bench import engine, kit, streams
from bench.documents import body, key, settings, tenant
from bench.kit import Figures, quantile, say, spread
from bench.streams import Stream

STREAMS = 100
APART_S = 0.005
CHUNKS_MIN = 3
"""The number of chunks of a stream before its client disconnects."""
WAIT_S_MAX = 10.0
AT_MOST_MS = 5


async def measure(place: Path, *, quick: bool) -> Figures:
    """Return close_ms_p99: the worst of the three."""
    rounds = 3 if quick else 10
    kit.title(f"leaving: client leaves -> engine's connection closed, {rounds} rounds of {STREAMS} streams, ms")
    took_ms: dict[str, list[float]] = {"prefill": [], "mid": [], "parked": []}
    for name in took_ms:
        (place / name).mkdir()
    models = [
        engine.document(place / "prefill", "silent", name="prefill", slots=STREAMS),
        engine.document(place / "mid", "paced", "20", name="mid", slots=STREAMS),
        engine.document(place / "parked", "silent", name="parked", slots=1),
    ]
    async with kit.serving(place / "serve", [settings(), tenant("a"), *models], core=kit.PROXY_CORE) as one:
        for name in took_ms:
            await one.model_ready(name, key("a"))
        for number in range(rounds):
            took_ms["prefill"] += await _leave(one.url, place, "prefill", number)
            took_ms["mid"] += await _leave(one.url, place, "mid", number)
            took_ms["parked"] += await _leave_parked(one.url, place, number)
    p99_ms = {name: quantile(values, 0.99) for name, values in took_ms.items()}
    for name, values in took_ms.items():
        say(f"{name:<10} {spread(values, 2):<24} p99 {p99_ms[name]:6.2f}   (at most {AT_MOST_MS})")
    return {"close_ms_p99": max(p99_ms.values())}


async def _leave(url: str, place: Path, model: str, number: int) -> list[float]:
    """Start all streams, disconnect them; return the milliseconds until the engine's side was closed."""
    made, ids = await _running(url, model, STREAMS, f"{model}-{number}")
    notes = place / model / engine.NOTES
    await _until(lambda: set(ids) <= _noted(notes, "asked").keys(), "the engine has not received all requests")
    if model == "mid":
        await _until(lambda: all(stream.chunks >= CHUNKS_MIN for stream in made), "not all streams run")
    left_s = {}
    for id, stream in zip(ids, made, strict=True):
        left_s[id] = time.monotonic()
        stream.leave()
        await asyncio.sleep(APART_S)
    await _until(lambda: set(ids) <= _noted(notes, "ended").keys(), "the engine still has streams without a client")
    ended_s = _noted(notes, "ended")
    return [(ended_s[id] - left_s[id]) * 1e3 for id in ids]


async def _leave_parked(url: str, place: Path, number: int) -> list[float]:
    """One request has the only slot. The queued ones disconnect, then it does; none of them may reach the engine."""
    notes = place / "parked" / engine.NOTES
    first, ids = await _running(url, "parked", 1, f"first-{number}")
    await _until(lambda: ids[0] in _noted(notes, "asked"), "the engine has not received the first request")
    made, _ = await _running(url, "parked", STREAMS, f"parked-{number}")
    await asyncio.sleep(0.2)
    left: list[tuple[float, Stream]] = []
    for stream in made:
        left_s = time.monotonic()
        stream.half_close()
        await asyncio.sleep(APART_S)
        left.append((left_s, stream))
    await _until(lambda: all(stream.closed_s for stream in made), "the gateway keeps connections that were half-closed")
    first[0].leave()
    await asyncio.sleep(0.2)
    late = [id for id in _noted(notes, "asked") if id.startswith("parked")]
    if late:
        raise kit.BenchError(f"{len(late)} requests reached the engine after their clients had disconnected")
    return [(stream.closed_s - left_s) * 1e3 for left_s, stream in left]


async def _running(url: str, model: str, count: int, prefix: str) -> tuple[list[Stream], list[str]]:
    """Start this number of streams; return them with their request IDs."""
    made = await streams.connect(url, count)
    ids = [f"{prefix}-{number}" for number in range(count)]
    ask = body(model, tokens=1_000_000)
    for id, stream in zip(ids, made, strict=True):
        stream.ask(streams.request(url, ask, ("X-Request-Id", id)))
    return made, ids


def _noted(notes: Path, what: str) -> dict[str, float]:
    """Return request ID -> time."""
    rows = [line.split() for line in notes.read_text().splitlines()]
    return {id: float(at_s) for kind, at_s, id in rows if kind == what}


async def _until(holds: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S_MAX
    while not holds():
        if time.monotonic() > deadline_s:
            raise kit.BenchError(what)
        await asyncio.sleep(0.01)
