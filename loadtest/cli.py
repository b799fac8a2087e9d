"""The command line of load tests: `load coldstart` and `load run`.

Exit codes: 0: the verdict holds; 1: it does not hold, or the run could not continue; 2: wrong usage; 130: the run was
interrupted, and the verdict holds for the requests that were sent. Results go to stdout, progress to stderr: live on a
terminal, plain lines elsewhere. `client.py` measures.
"""

from __future__ import annotations

import asyncio
import functools
import math
import os
import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import click
import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from loadtest import arrivals
from loadtest.client import SHOTS_MAX, Client, LoadError, target_of
from loadtest.coldstart import INTERRUPTED, Beginning, ColdStarts
from loadtest.coldstart import measure_cold_starts as measure
from loadtest.report import coldstart as coldreport
from loadtest.report import report
from loadtest.result import Ending, Result, Shot
from loadtest.run_verdict import Spread, Verdict
from loadtest.stop_signals import EXIT_STATUS, Stop, stopped_by_signals

PLAIN_EVERY_S = 1.0
RATE_MAX = 1e6
SECONDS_MAX = 1e6
TOKENS_MAX = 1_000_000_000
PROMPT_BYTES_MAX = 64 << 20


class Finite(click.FloatRange):
    """A finite number in a range; click's own type accepts NaN."""

    def convert(self, value: float, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number. Raises click's usage error."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


@click.group(
    "load", epilog="Example:  pilotlight load run --url http://127.0.0.1:8080 --model ada --burst 200 --within 0.1"
)
def load() -> None:
    """Run load tests from the perspective of clients: measure responses and check that every request got one."""


def _url(_context: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    try:
        if value is not None:
            target_of(value)
    except LoadError as error:
        raise click.BadParameter(str(error)) from error
    return value


def _text(_context: click.Context, _parameter: click.Parameter, value: str) -> str:
    """Accept only names that can be encoded as JSON."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise click.BadParameter("not UTF-8") from None
    return value


def _texts(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(_text(context, parameter, one) for one in value)


def _from(_context: click.Context, _parameter: click.Parameter, value: str) -> Beginning:
    """Reject `asleep`: no version puts an engine to sleep yet."""
    if value == "asleep":
        raise click.UsageError("--from asleep is not supported yet in this version")
    return cast("Beginning", value)


def _page(_context: click.Context, _parameter: click.Parameter, value: Path | None) -> Path | None:
    """Check before the run that the report can be written, so that no run is wasted."""
    if value is None:
        return None
    if not os.path.isdir(value.parent):  # noqa: PTH112  Path's raises for a name that is too long
        raise click.BadParameter(f"{value.parent} is not a folder")
    if not os.access(value if os.path.exists(value) else value.parent, os.W_OK):  # noqa: PTH110  as above
        raise click.BadParameter(f"{value} is not writable")
    return value


_server = click.option(
    "--url", required=True, callback=_url, help="The address of the inference port, for example http://127.0.0.1:8080."
)
_key = click.option("--key-env", metavar="NAME", help="The environment variable with the API key.")
_timeout = click.option(
    "--timeout", "timeout_s", type=Finite(0, SECONDS_MAX, min_open=True), default=600.0, show_default=True,
    help="Seconds after which the client abandons a request.",
)  # fmt: skip
_report = click.option(
    "--report", "page", type=click.Path(dir_okay=False, writable=True, path_type=Path), callback=_page,
    help="Write the report to this HTML file.",
)  # fmt: skip
_output = click.option(
    "--output",
    type=click.Choice(["text", "json"]),
    default="text",
    show_default=True,
    help="The output format: text for people, json for programs.",
)


@load.command(
    "coldstart", epilog="Example:  pilotlight load coldstart --url http://127.0.0.1:8080 --model ada --rounds 5"
)
@_server
@click.option("--model", required=True, callback=_text, help="The Model to start.")
@click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="The number of cold starts.")
@click.option(
    "--from", "since", type=click.Choice(["zero", "gone", "cached", "asleep"]), default="zero", show_default=True,
    callback=_from, help="The state before each round. With zero, no replica runs. With gone, no replica runs and no "
    "node has the weights, which come from a registry. With cached, no replica runs, but a node has these weights. The "
    "values gone and cached require --ops. The value asleep is not supported yet.",
)  # fmt: skip
@click.option(
    "--ops",
    metavar="URL",
    callback=_url,
    help="The operations port. If set, each round waits until all replicas are removed.",
)
@_key
@_timeout
@_report
@_output
def coldstart(
    *,
    url: str,
    model: str,
    rounds: int,
    since: Beginning,
    ops: str | None,
    key_env: str | None,
    timeout_s: float,
    page: Path | None,
    output: str,
) -> None:
    """Measure cold starts: wait until MODEL is at zero, send one request, and report the phases; repeat."""
    key, stop = _key_from(key_env), Stop()
    if since != "zero" and ops is None:
        raise click.UsageError(f"--from {since} requires --ops, which reports where weights are")
    ask = functools.partial(
        measure, since=since, timeout_s=timeout_s, say=functools.partial(click.echo, err=True), stop=stop
    )

    async def starts_of() -> ColdStarts:
        with stopped_by_signals(stop):
            return await ask(url, model, rounds, ops, key)

    try:
        starts = asyncio.run(starts_of())
    except LoadError as error:
        raise click.ClickException(str(error)) from error
    if output == "json":
        _write_json(starts)
    else:
        _tell_starts(starts, rounds)
    if page is not None:
        _write(page, coldreport.as_html(url, rounds, starts))
    verdict = starts.verdict
    if starts.ended == INTERRUPTED:
        sys.exit(1 if verdict.failed or not verdict.holds else EXIT_STATUS)
    sys.exit(0 if verdict.holds and verdict.completed == rounds else 1)


@load.command(
    "run", epilog="Example:  pilotlight load run --url http://127.0.0.1:8080 --model ada --burst 200 --within 0.1"
)
@_server
@click.option(
    "--model",
    "models",
    required=True,
    multiple=True,
    callback=_texts,
    help="The Model to send requests to. Repeatable: the Models take turns.",
)
@click.option(
    "--arrivals",
    "process",
    type=click.Choice(["constant", "poisson"]),
    default="poisson",
    show_default=True,
    help="The arrival process of requests with --rate.",
)
@click.option("--rate", type=Finite(0, RATE_MAX, min_open=True), help="The number of requests per second.")
@click.option(
    "--seconds",
    type=Finite(0, SECONDS_MAX, min_open=True),
    default=10.0,
    show_default=True,
    help="The duration of the arrivals with --rate, in seconds.",
)
@click.option("--burst", type=click.IntRange(1, SHOTS_MAX), help="Send this number of requests instead of a rate.")
@click.option(
    "--within",
    type=Finite(0, SECONDS_MAX),
    default=0.1,
    show_default=True,
    help="The duration of the arrivals with --burst, in seconds.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="The seed of the random arrival times.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1, TOKENS_MAX),
    default=16,
    show_default=True,
    help="The maximum number of tokens per response.",
)
@click.option("--stream/--no-stream", default=True, show_default=True, help="Request streamed responses.")
@click.option(
    "--prompt-bytes",
    type=click.IntRange(1, PROMPT_BYTES_MAX),
    default=64,
    show_default=True,
    help="The size of each prompt, in bytes.",
)
@click.option("--reuse/--no-reuse", default=False, show_default=True, help="Reuse connections.")
@_key
@_timeout
@_report
@_output
def run(
    *,
    url: str,
    models: tuple[str, ...],
    process: str,
    rate: float | None,
    seconds: float,
    burst: int | None,
    within: float,
    seed: int,
    max_tokens: int,
    stream: bool,
    prompt_bytes: int,
    reuse: bool,
    key_env: str | None,
    timeout_s: float,
    page: Path | None,
    output: str,
) -> None:
    """Send requests at planned times, independent of earlier responses, and check that none is lost."""
    if burst is not None and rate is None:
        moments, plan = arrivals.burst_arrivals(burst, within), f"a burst of {burst} requests within {within:g} s"
    elif rate is not None and burst is None:
        if rate * seconds > SHOTS_MAX:
            raise click.UsageError(f"--rate x --seconds is more than {SHOTS_MAX} requests: run several shorter tests")
        draw = random.Random(seed).random  # noqa: S311 - a load, not a secret
        moments = (
            arrivals.poisson_arrivals(rate, seconds, draw)
            if process == "poisson"
            else arrivals.constant_arrivals(rate, seconds)
        )
        plan = f"{process} arrivals, {rate:g} requests/s for {seconds:g} s"
    else:
        raise click.UsageError("expected either --rate (with --seconds) or --burst (with --within)")
    key = _key_from(key_env)
    bodies = [request_body(model, max_tokens, prompt_bytes, stream=stream) for model in models]
    shots = [
        Shot(model=models[i % len(models)], body=bodies[i % len(models)], stream=stream, at_s=at_s, timeout_s=timeout_s)
        for i, at_s in enumerate(moments)
    ]
    client = Client(url, reuse=reuse, headers=(("Authorization", f"Bearer {key}"),) if key else ())
    try:
        results = _watched(client, shots)
    except LoadError as error:
        raise click.ClickException(str(error)) from error
    plan += f" to {', '.join(models)}, {max_tokens} tokens each"
    made = report.build_report(url, plan, len(shots), results, interrupted=client.stop.requested)
    if output == "json":
        _write_json(made)
    else:
        _tell_run(made)
    if page is not None:
        _write(page, report.as_html(made))
    sys.exit(1 if not made.verdict.holds else EXIT_STATUS if made.interrupted else 0)


def _write_json(made: msgspec.Struct) -> None:
    """Write a report to standard output, without the truncation of long lines. Raises click's error."""
    try:
        click.echo(report.as_json(made))
    except BrokenPipeError:
        raise
    except OSError as error:
        raise click.ClickException(f"the output cannot be written: {error.strerror}") from None


def _write(page: Path, text: str) -> None:
    """Write the report after the verdict was printed. Raises click's error, for example for a full disk."""
    try:
        page.write_text(text, encoding="utf-8")
    except OSError as error:
        raise click.ClickException(
            f"--report {page} cannot be written: {error.strerror}; the verdict above stays valid"
        ) from None


def request_body(model: str, max_tokens: int, prompt_bytes: int, *, stream: bool) -> bytes:
    """Return a chat completion's body with a prompt of `prompt_bytes` bytes."""
    prompt = ("wake up and say your sentence " * (prompt_bytes // 30 + 1))[:prompt_bytes]
    messages = [{"role": "user", "content": prompt}]
    return msgspec.json.encode({"model": model, "messages": messages, "max_tokens": max_tokens, "stream": stream})


def _key_from(name: str | None) -> str | None:
    if name is None:
        return None
    key = os.environ.get(name)
    if not key:
        raise click.UsageError(f"--key-env: the environment variable {name} is not set")
    if not (key.isascii() and key.isprintable()):
        raise click.UsageError(
            f"--key-env: the value of the environment variable {name} is not a key: expected printable ASCII"
        )
    return key


def _raise_open_files() -> None:
    """Raise the limit of open files, since each request may need a connection."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _watched(client: Client, shots: Sequence[Shot]) -> list[Result]:
    """Run with progress on stderr until all requests have ended or the run is interrupted."""
    _raise_open_files()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    not_completed = ended = 0
    said_s = time.monotonic()

    def count(result: Result) -> None:
        nonlocal not_completed, ended, said_s
        ended += 1
        not_completed += result.ending is not Ending.COMPLETED
        if console.is_terminal:
            progress.update(bar, completed=ended, bad=not_completed)
        elif time.monotonic() - said_s >= PLAIN_EVERY_S:
            said_s = time.monotonic()
            click.echo(f"{ended} of {len(shots)} requests ended, {not_completed} of them incomplete", err=True)

    async def sent() -> list[Result]:
        with stopped_by_signals(client.stop):
            return await client.run(shots, count)

    columns = (
        TextColumn("requests"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[bad]} not completed"),
    )
    progress = Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    progress.disable = not console.is_terminal
    with progress:
        bar = progress.add_task("calls", total=len(shots), bad=0)
        return asyncio.run(sent())


def _tell_run(made: report.Report) -> None:
    times = {"first byte": made.first_byte_s, "last byte": made.last_byte_s, "lateness": made.lateness_s}
    for name, found in times.items():
        if found is not None:
            click.echo(_row(name, found, 1000))
    click.echo(f"{made.completed_per_s:.1f} completed per second, {made.cold} waited for a start")
    if made.interrupted:
        click.echo(report.describe_interruption(made))
    _tell_verdict(made.verdict)


def _tell_starts(starts: ColdStarts, rounds: int) -> None:
    for name, found in starts.spreads_ms.items():
        click.echo(_row(name, found, 1))
    if starts.warm:
        click.echo(f"in {starts.warm} of {len(starts.rounds)} rounds, the response did not report a cold start")
    if starts.ended:
        click.echo(f"ended after {len(starts.rounds)} of {rounds} rounds: {starts.ended}")
    _tell_verdict(starts.verdict)


def _row(name: str, found: Spread, factor: float) -> str:
    values = {"min": found.min, "median": found.median, "p95": found.p95, "p99": found.p99, "max": found.max}
    return f"{name:12}" + "".join(f"{key:>8} {factor * value:9.1f}" for key, value in values.items()) + " ms"


def _tell_verdict(verdict: Verdict) -> None:
    for counts in (verdict.codes, verdict.broken):
        for reason, count in sorted(counts.items()):
            click.echo(f"  {count} x {reason}")
    good = "green" if verdict.admitted else "yellow"
    Console(highlight=False, soft_wrap=True, markup=False).print(
        verdict.line(), style=good if verdict.holds else "bold red"
    )
