"""Measures cold starts from outside: waits until a Model is at zero, sends one streaming request, records its phases.

With the operations port, each round waits until no replica is left in any state and the weights are where the round
begins; without it, until the Model's entry on the inference port reports zero. If the measurement ends early, the
completed rounds are reported. It never forces a Model to zero, since it measures what users experience.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Literal

import aiohttp
import msgspec

from loadtest.client import Client, LoadError
from loadtest.result import Ending, Result, Shot
from loadtest.run_verdict import Spread, Verdict, compute_spread, judge_run
from loadtest.stop_signals import Stop

POLL_S = 0.1
ANSWER_S_MAX = 10.0
ENTRY_BYTES_MAX = 1 << 20
"""Maximum size of a Model's entry on either port."""
ZERO_S_MAX = 1800.0
"""How long a round waits for zero."""
SAY_EVERY_S = 2.0
IDLE_S, IDLE_S_MAX = 60.0, 900.0
"""Shortest and longest idle time with `idleSeconds: auto`, the default; each round doubles the time up to the longest
(docs/reference/configuration.md).
"""
SHORTEN = "for a quicker test: fewer --rounds, or a shorter idle timeout of the Model, such as `idleSeconds: 2`"
KEPT = "set a short `idleSeconds` and no `replicas.min` in its document"
INTERRUPTED = "interrupted"
Beginning = Literal["zero", "gone", "cached"]
"""zero: no replica is left. gone: in addition, no node has the remote weights. cached: no replica is left, but a
node has the remote weights.
"""
STAY = "a node still has the model's weights: remove them there (`pilotlight weights evict`), or use --from cached"
AWAY = "no node has the model's weights: send the model one request, so that a node fetches them, and then repeat"
FAILED = "the model failed to start, and its back-off has not ended; `pilotlight explain` shows the reason"


class Round(msgspec.Struct, frozen=True, kw_only=True):
    """One cold start, in milliseconds. The client measures `first_byte_ms` and `total_ms`, the server the phases.

    With the operations port, parts of a phase are included: `place.write` is a part of `place`.
    """

    waited_s: float
    ending: Ending
    code: str = ""
    cold: bool = False
    first_byte_ms: float | None = None
    total_ms: float | None = None
    phases_ms: dict[str, float] = {}


class ColdStarts(msgspec.Struct, frozen=True, kw_only=True):
    """The completed rounds, and the spread of each phase."""

    model: str
    rounds: tuple[Round, ...]
    warm: int
    """Rounds not marked cold by the server: another client woke the Model, or the server does not mark requests."""
    spreads_ms: dict[str, Spread]
    verdict: Verdict
    ended: str = ""
    """Why fewer rounds were made than requested; empty if all were made."""


class _Pilotlight(msgspec.Struct, frozen=True):
    state: str | None = None
    expected_wait_seconds: float | None = None


class _Entry(msgspec.Struct, frozen=True):
    """A Model's entry on either port."""

    pilotlight: _Pilotlight = _Pilotlight()
    replicas: dict[str, int] | None = None
    last_start_seconds: float | None = None
    last_start_phases: dict[str, float] = {}
    idle_seconds: float | None = None
    idle_auto: bool = False
    weights: str = ""
    """here, absent or failed; empty: the Model has no remote weights. Only on the operations port."""


async def measure_cold_starts(
    url: str,
    model: str,
    rounds: int,
    ops: str | None = None,
    key: str | None = None,
    *,
    since: Beginning = "zero",
    timeout_s: float = 600.0,
    say: Callable[[str], None] = lambda _: None,
    stop: Stop | None = None,
) -> ColdStarts:
    """Measure `rounds` cold starts of a Model behind `url`, each starting from the state `since`; every state except
    `zero` requires `ops`. `say` receives progress lines, the first with the expected duration; `stop` ends the
    measurement early.

    Raises LoadError if no round could be made.
    """
    headers = (("Authorization", f"Bearer {key}"),) if key else ()
    body = {"model": model, "messages": [{"role": "user", "content": "wake"}], "max_tokens": 16, "stream": True}
    shot = Shot(model=model, body=msgspec.json.encode(body), timeout_s=timeout_s)
    base = url.rstrip("/").removesuffix("/v1")
    entry = f"{ops.rstrip('/')}/api/v1/models/{model}" if ops else f"{base}/v1/models/{model}"
    stop = Stop() if stop is None else stop
    made: list[Round] = []
    results: list[Result] = []
    ended = ""
    limit = aiohttp.ClientTimeout(total=ANSWER_S_MAX)
    async with aiohttp.ClientSession(headers=None if ops else dict(headers), timeout=limit) as session:
        while len(made) < rounds and not ended:
            try:
                async with stop.within(None):
                    first = 0 if made else rounds
                    waited_s = await _wait_for_zero(session, entry, say, since if ops else None, rounds=first)
                result = await Client(url, headers=headers, stop=stop).send(shot)
            except TimeoutError:
                ended = INTERRUPTED
                break
            except LoadError as error:
                if not made:
                    raise
                ended = str(error)
                break
            results.append(result)
            parts = await _parts(session, entry) if ops and result.cold else {}
            made.append(_round(waited_s, result, parts))
            say(f"round {len(made)} of {rounds}: {_sentence(made[-1])}")
            if len(made) < rounds:
                ended = INTERRUPTED if stop.requested else FAILED if result.code == "model_start_failed" else ""
    return ColdStarts(
        model=model,
        rounds=tuple(made),
        warm=sum(not one.cold for one in made),
        spreads_ms=compute_phase_spreads(made),
        verdict=judge_run(len(made), results),
        ended=ended,
    )


def compute_phase_spreads(rounds: Sequence[Round]) -> dict[str, Spread]:
    """Return the spread of each phase, then of first byte and total, over the completed rounds."""
    good = [one for one in rounds if one.ending is Ending.COMPLETED]
    names = dict.fromkeys(name for one in good for name in one.phases_ms)
    values = {name: [one.phases_ms[name] for one in good if name in one.phases_ms] for name in names}
    values["first byte"] = [one.first_byte_ms for one in good if one.first_byte_ms is not None]
    values["total"] = [one.total_ms for one in good if one.total_ms is not None]
    found = {name: compute_spread(of_name) for name, of_name in values.items()}
    return {name: one for name, one in found.items() if one is not None}


async def _wait_for_zero(
    session: aiohttp.ClientSession, entry: str, say: Callable[[str], None], since: Beginning | None, *, rounds: int
) -> float:
    """Wait until the Model is at zero and as `since` requires, and return the seconds waited; report first how long
    `rounds` will take. Without `since`, read the inference port. Raises LoadError if it will not get there.
    """
    began_s = said_s = time.monotonic()
    while True:
        found = await _read(session, entry)
        at_zero, state = _state(entry, found, since)
        now_s = time.monotonic()
        if found.pilotlight.state == "failed" and since is None:
            raise LoadError(FAILED)
        if rounds:
            for line in _outlook(rounds, found, at_zero=at_zero):
                say(line)
            rounds = 0
        if at_zero:
            return now_s - began_s
        if state == AWAY:
            raise LoadError(AWAY)
        if now_s - began_s > ZERO_S_MAX:
            why = state if state == STAY else f"{state}: {KEPT}"
            raise LoadError(f"not at zero after {ZERO_S_MAX:.0f} s, {why}")
        if now_s - said_s >= SAY_EVERY_S:
            said_s = now_s
            say(f"waiting for zero for {now_s - began_s:.0f} s, {state}")
        await asyncio.sleep(POLL_S)


def _outlook(rounds: int, found: _Entry, *, at_zero: bool) -> tuple[str, ...]:
    """Return how long the rounds will take, and how to shorten that."""
    start_s = found.last_start_seconds or found.pilotlight.expected_wait_seconds
    known, auto = found.idle_seconds is not None, found.idle_seconds is None or found.idle_auto
    idle_s = IDLE_S if found.idle_seconds is None else found.idle_seconds
    waits = rounds - at_zero
    windows_s = [min(idle_s * 2.0 ** min(i, 16), max(idle_s, IDLE_S_MAX)) if auto else idle_s for i in range(waits)]
    total = f"about {_about(sum(windows_s) + rounds * (start_s or 0.0))}"
    total += "" if start_s else " and the starts"
    a_start = "one start" + (f" ({start_s:.1f} s)" if start_s else "")
    if not waits:
        return (f"1 round, {total}: {a_start}" if start_s else "1 round: one start",)
    window = f"{idle_s:g} s without a request"
    window += ", longer in each further round with `idleSeconds: auto`" if auto else ""
    window += "" if known else "; this is the default, --ops reads the model's own value"
    many = "1 round" if rounds == 1 else f"{rounds} rounds"
    return (f"{many}, {total}: each round waits until no replica is left ({window}), then for {a_start}", SHORTEN)


def _about(duration_s: float) -> str:
    """Format a duration as `40 s`, `20 min` or `3 h 25 min`."""
    minutes = round(duration_s / 60)
    if duration_s < 100:
        return f"{duration_s:.0f} s"
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


async def _read(session: aiohttp.ClientSession, entry: str) -> _Entry:
    """Read the Model's entry. Raises LoadError."""
    try:
        async with session.get(entry, allow_redirects=False) as response:
            body = await _bounded(response)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise LoadError(
            f"cannot read {entry}: {type(error).__name__}; check that the server runs and that the URL is correct"
        ) from error
    if response.status != 200:
        hint = {401: "set a key with --key-env", 404: "no such model", 421: "use 127.0.0.1 or localhost"}
        raise LoadError(f"{entry} answered {response.status}: {hint.get(response.status, 'is this Pilotlight?')}")
    try:
        return msgspec.json.decode(body, type=_Entry)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise LoadError(f"{entry} does not return the description of a model: {error}") from error


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """Return the body. Raises LoadError if it exceeds ENTRY_BYTES_MAX."""
    body = b""
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > ENTRY_BYTES_MAX:
            raise LoadError(f"{response.url} sent more than {ENTRY_BYTES_MAX >> 20} MiB; is this Pilotlight?")
    return body


def _state(entry: str, found: _Entry, since: Beginning | None) -> tuple[bool, str]:
    """Return whether a round can begin, and the current state in words. The operations port lists replicas in every
    state, and the weights.
    """
    if since is not None:
        if found.replicas is None:
            raise LoadError(f"{entry} does not contain the model's replicas; is --ops the operations port?")
        left = {state: count for state, count in found.replicas.items() if count}
        if not left and since == "gone" and found.weights == "here":
            return False, STAY
        if not left and since == "cached" and found.weights not in {"here", ""}:
            return False, AWAY
        return not left, f"its replicas: {', '.join(f'{count} {state}' for state, count in left.items()) or 'none'}"
    if found.pilotlight.state is None:
        raise LoadError(
            f"{entry} does not contain the state of the model; check that the URL is that of a Pilotlight gateway"
        )
    return found.pilotlight.state == "zero", f"the model is {found.pilotlight.state}"


async def _parts(session: aiohttp.ClientSession, entry: str) -> dict[str, float]:
    """Return the parts of phases (`place.write`) of the last start in milliseconds, from the operations port."""
    try:
        found = await _read(session, entry)
    except LoadError:
        return {}  # the next read reports the error
    return {name: 1000 * took_s for name, took_s in found.last_start_phases.items() if "." in name}


def _with_parts(phases_ms: dict[str, float], parts_ms: dict[str, float]) -> dict[str, float]:
    """Return each phase followed by its parts."""
    ordered: dict[str, float] = {}
    for name, took_ms in phases_ms.items():
        ordered[name] = took_ms
        ordered |= {part: part_ms for part, part_ms in parts_ms.items() if part.startswith(f"{name}.")}
    return ordered


def _round(waited_s: float, result: Result, parts_ms: dict[str, float]) -> Round:
    def ms(seconds: float | None) -> float | None:
        return None if seconds is None else 1000 * seconds

    return Round(
        waited_s=waited_s,
        ending=result.ending,
        code=result.code or result.broken,
        cold=result.cold,
        first_byte_ms=ms(result.first_byte_s),
        total_ms=ms(result.last_byte_s),
        phases_ms=_with_parts(result.server_timing, parts_ms),
    )


def _sentence(one: Round) -> str:
    waited = f"waited {one.waited_s:.1f} s for zero, "
    if one.ending is not Ending.COMPLETED or one.first_byte_ms is None:
        return f"{waited}{one.ending} ({one.code})"
    warm = "" if one.cold else ", the response did not report a cold start"
    return f"{waited}first byte after {one.first_byte_ms:.1f} ms{warm}"
