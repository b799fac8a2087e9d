"""Cold start: first byte through Pilotlight at zero, compared with the same engine started by hand and called directly.

One table. For each additional start time of the engine, both sides run in every round, in alternating order; llama-swap
is a third side if it is installed. Both times begin when the request is due and end at the first body byte. The by-hand
side has its port and command ready by then, and polls readiness every 2 ms. Both sides have the same engine command
(except for the port), environment and cores; each round compares the commands. A round begins when nothing of the
previous one is left. The overhead is the median of the differences of the rounds. It is less sensitive than the
difference of the two medians to other load, which slows some starts by half.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from autoscaler.spec.model import Model
from bench import kit, llamaswap
from bench.documents import Document, body, model, real, settings
from bench.kit import Figures, quantile, say, spread
from bench.picture import Series, picture
from loadtest.client import Client
from loadtest.result import Ending, Shot

ROUNDS = {0.0: (60, 40), 0.3: (45, 30), 1.3: (30, 16)}
"""Additional start time of the engine in seconds -> rounds in full and with QUICK. Short starts have more rounds."""
IDLE_S = 0.05
RIVAL, RIVAL_EVERY = "llama-swap", 3
"""llama-swap takes part in every third round, because a few rounds show a difference of about a second."""
SETTLE_S = 0.15
"""The pause after everything of a round has been removed, so that cleaning up does not slow the next start."""

Side = Callable[[], Awaitable[float]]
Taken = dict[int, float]
"""Round -> milliseconds to the first byte."""


async def measure(place: Path, weights: Path, *, quick: bool) -> Figures:
    """Return overhead_ms_median and _p95 (worst over the start times), and llama_swap_overhead_ms_median (likewise)."""
    documents = [delayed(f"m{number}", weights, delay_s) for number, delay_s in enumerate(ROUNDS)]
    rival = llamaswap.binary()
    counts = [row[quick] for row in ROUNDS.values()]
    kit.title(f"cold start: first byte, ms, rounds {counts}, alternating order; llama-swap: {rival or 'null'}")
    if rival is None:
        say(llamaswap.MISSING)
    say(f"{'engine':<8} {'side':<12} {'median [min-max]':<26} {'p95':>8}  {'overhead [quartiles]':<24} {'of p95':>8}")
    medians, p95s, rivals = list[float](), list[float](), list[float]()
    drawn: list[Series] = []
    async with contextlib.AsyncExitStack() as stack:
        one = await stack.enter_async_context(kit.serving(place / "cold", [settings(), *documents]))
        swap = None
        if rival is not None:
            swap = await stack.enter_async_context(llamaswap.serving(place / "swap", rival, documents))
        for document, delay_s, rounds in zip(documents, ROUNDS, counts, strict=True):
            subject = kit.model_of(document)
            sides: dict[str, Side] = {
                "by hand": _by_hand(subject, place / "by-hand.log"),
                "Pilotlight": _through(one.url, subject, one.zero),
            }
            if swap is not None:
                sides[RIVAL] = _through(swap.url, subject, swap.unload)
            took = await _rounds(sides, rounds)
            for name, taken in took.items():
                overhead_ms, p95_ms = _row(f"+{delay_s:g} s", name, taken, took["by hand"])
                if name == "Pilotlight":
                    medians.append(overhead_ms)
                    p95s.append(p95_ms)
                elif name == RIVAL:
                    rivals.append(overhead_ms)
            if not delay_s:
                drawn = [Series(name, list(v.items()), n, dots=True) for n, (name, v) in enumerate(took.items())]
    picture("cold-start", "round", "first byte, ms (engine as it is)", drawn)
    return {
        "overhead_ms_median": max(medians),
        "overhead_ms_p95": max(p95s),
        "llama_swap_overhead_ms_median": max(rivals, default=None),
    }


def delayed(name: str, weights: Path, delay_s: float) -> Document:
    """Return a Model of the tiny real engine, or of a script that sleeps for this time and then becomes the engine."""
    plain = real(name, weights, idleSeconds=IDLE_S, residencySeconds=0)
    if not delay_s:
        return plain
    mark = 65_432
    words = ["{port}" if word == str(mark) else word for word in kit.launch_of(kit.model_of(plain), mark).argv]
    command = ["/bin/sh", "-c", f'sleep {delay_s}; exec "$@"', "sh", *words]
    return model(name, engine="command", command=command, idleSeconds=IDLE_S, residencySeconds=0)


async def _rounds(sides: dict[str, Side], rounds: int) -> dict[str, Taken]:
    """Measure each side in every round. The order changes from round to round."""
    took: dict[str, Taken] = {name: {} for name in sides}
    order = list(sides)
    for number in range(rounds):
        for name in order:
            if name == RIVAL and number % RIVAL_EVERY:
                continue
            await asyncio.sleep(SETTLE_S)
            took[name][number] = await sides[name]() * 1000
        order.append(order.pop(0))
    return took


def _row(engine: str, name: str, taken: Taken, bare: Taken) -> tuple[float, float]:
    """Print one row; return the median of the differences to the engine by hand, and the difference of the p95."""
    values = list(taken.values())
    differences = sorted(value - bare[number] for number, value in taken.items())
    overhead = statistics.median(differences)
    p95 = quantile(values, 0.95) - quantile(list(bare.values()), 0.95)
    half = (
        ""
        if taken is bare
        else f"{overhead:+.1f} [{quantile(differences, 0.25):+.1f} {quantile(differences, 0.75):+.1f}]"
    )
    say(f"{engine:<8} {name:<12} {spread(values):<26} {quantile(values, 0.95):>8.1f}  {half:<24} {p95:>+8.1f}")
    return overhead, p95


async def _first_byte_s(client: Client, subject: Model, planned_s: float) -> float:
    """Send one request; return the seconds from `planned_s` to the first body byte."""
    result = await client.send(Shot(model=subject.name, body=body(subject.name)), planned_s)
    if result.ending is not Ending.COMPLETED or result.first_byte_s is None:
        raise kit.BenchError(f"a request did not complete: {result}")
    return result.first_byte_s


def _by_hand(subject: Model, log: Path) -> Side:
    async def side() -> float:
        port = kit.free_port()
        launch = kit.launch_of(subject, port)
        client = Client(f"http://{kit.HOST}:{port}")
        began_s = time.monotonic()
        with kit.by_hand(launch, log):
            await kit.engine_ready(launch, port)
            return await _first_byte_s(client, subject, began_s)

    return side


def _through(url: str, subject: Model, back_to_zero: Callable[[], Awaitable[None]]) -> Side:
    async def side() -> float:
        client = Client(url)
        await client.open(1)
        took_s = await _first_byte_s(client, subject, time.monotonic())
        await back_to_zero()
        return took_s

    return side
