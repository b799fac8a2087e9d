"""`pilotlight status` and `explain`: reads the operations port and shows it to a person, or prints its JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

TIMEOUT_S = 5.0
REFRESH_S = 0.5
PLAIN_COLUMNS = 240
"""Width of a table that goes into a file or a pipe: one line per Model, nothing cut."""
DURATION = re.compile(r"\b\d+(\.\d+)? (s|min|h)\b( \d+ (s|min)\b)?")
"""As `autoscaler.words.seconds` writes them."""
COLUMNS = ("model", "state", "replicas", "waiting", "running", "devices", "since", "why")

Row = Mapping[str, Any]  # JSON from another process, shown and not computed with


_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""No proxy of the environment stands between a machine and its own port."""


def fetch(
    ops: str, path: str, *, order: Mapping[str, object] | None = None, key: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Any:  # fmt: skip
    """GET of the operations port, or POST of an order. One clear error (exit 1) when nobody answers, or it says no."""
    ops = ops if ops.startswith(("http://", "https://")) else f"http://{ops}"
    body = None if order is None else json.dumps(order).encode()
    headers = {"content-type": "application/json"} if key is None else {
        "content-type": "application/json", "authorization": f"Bearer {key}"
    }  # fmt: skip
    try:
        request = urllib.request.Request(ops.rstrip("/") + quote(path), data=body, headers=headers)  # noqa: S310  above
        with _open(request, timeout=timeout_s) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise click.ClickException(said(error)) from None
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(
            f"no pilotlight answers at {ops} ({reason}); is `pilotlight serve` running?"
        ) from None


def said(error: urllib.error.HTTPError) -> str:
    """What the port says is wrong, or what its status means when it is not one of ours."""
    try:
        what = json.load(error)["error"]
        return what if isinstance(what, str) else "this is the inference port; --ops is for the operations port"
    except (ValueError, KeyError, TypeError):
        return f"{error.code} {error.reason}: is this pilotlight's operations port?"


def table(rows: Sequence[Row]) -> Table:
    """The live table."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        out.add_column(column, overflow="fold" if column == "why" else "ellipsis", no_wrap=column != "why")
    for row in rows:
        out.add_row(*(cell(row, column) for column in COLUMNS))
    return out


def cell(row: Row, column: str) -> str:
    """One cell as text, of a row of /api/v1/status (`autoscaler.explain.Row`)."""
    value = row.get("since_s" if column == "since" else column)
    if column == "model" and row.get("adapters"):
        return f"{row['model']} (+{', '.join(row['adapters'])})"
    if column == "replicas" and isinstance(value, Mapping):
        return ", ".join(f"{count} {state}" for state, count in value.items()) or "0"
    if column == "devices" and isinstance(value, list):
        return ", ".join(value)
    if column == "since" and isinstance(value, int | float):
        return ago(float(value))
    return "" if value is None else str(value)


def ago(seconds: float) -> str:
    """`3 s`, `4 min`, `2 h`, `5 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 1:.0f} s"


def rows(ops: str, model: str | None) -> list[Row]:
    """The rows of all Models, or the one of a Model by its name or an alias. One clear error when there is none."""
    found: list[Row] = fetch(ops, "/api/v1/status")
    if model is None:
        return found
    if not any(row["model"] == model for row in found):
        model = fetch(ops, f"/api/v1/models/{model}")["name"]
    return [row for row in found if row["model"] == model]


def status(ops: str, model: str | None, *, watch: bool, output: str) -> None:
    """Prints the rows of all Models or one; `watch` until interrupted."""
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            follow(ops, model, output)
    elif output == "json":
        click.echo(json.dumps(rows(ops, model), indent=2))
    else:
        plain().print(table(rows(ops, model)))
        say_off(ops, model)


def say_off(ops: str, model: str | None) -> None:
    """What does not work in this mode, where all Models are shown."""
    for sentence in fetch(ops, "/api/v1/off")["sentences"] if model is None else ():
        click.echo(f"off: {sentence}")


def follow(ops: str, model: str | None, output: str) -> None:
    """A live table on a terminal. Elsewhere a table at each change; as JSON one line at each, with all rows."""
    if output == "text" and sys.stdout.isatty():
        with Live(table(rows(ops, model)), console=Console(), auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(table(rows(ops, model)), refresh=True)
    console, told = plain(), None
    while True:
        found = rows(ops, model)
        known, told = told, [lasting(row) for row in found]
        if told != known:
            if output == "json":
                click.echo(json.dumps({"models": found}))
            else:
                console.print(table(found))
        time.sleep(REFRESH_S)


def plain() -> Console:
    """Where tables go: as wide as the terminal, or wide enough for a file."""
    return Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)


def lasting(row: Row) -> dict[str, Any]:
    """What of a row changes only when something happens: ages and remaining times are no news."""
    return {key: DURATION.sub("", value) if key == "why" else value for key, value in row.items() if key != "since_s"}


def explain(ops: str, path: str, output: str) -> None:
    """Prints an explanation as sentences."""
    found = fetch(ops, f"/api/v1/explain/{path}")
    if output == "json":
        click.echo(json.dumps(found, indent=2))
        return
    for sentence in found["sentences"] or ["Nothing was decided yet."]:
        click.echo(sentence)
