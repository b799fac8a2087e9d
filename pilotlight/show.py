"""`pilotlight status` and `explain`: reads the operations port and shows it to a person, or prints its JSON."""

from __future__ import annotations

import contextlib
import http.client
import json
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
COLUMNS = ("model", "state", "replicas", "waiting", "running", "devices", "since", "why")

Row = Mapping[str, Any]  # JSON from another process, shown and not computed with


_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""No proxy of the environment stands between a machine and its own port."""


def fetch(ops: str, path: str) -> Any:
    """GET of the operations port. One clear error (exit 1) when nobody answers there, or it says no."""
    ops = ops if ops.startswith(("http://", "https://")) else f"http://{ops}"
    try:
        with _open(ops.rstrip("/") + quote(path), timeout=TIMEOUT_S) as response:
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
        return str(json.load(error)["error"])
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


def status(ops: str, model: str | None, *, watch: bool, output: str) -> None:
    """Prints the rows of all Models or one; `watch` until interrupted."""

    def rows() -> list[Row]:
        found = [row for row in fetch(ops, "/api/v1/status") if model in {None, row["model"]}]
        if model is not None and not found:
            raise click.ClickException(f"no model named {model}; `pilotlight status` lists all")
        return found

    if output == "json":
        click.echo(json.dumps(rows(), indent=2))
        return
    console = Console(width=None if sys.stdout.isatty() else PLAIN_COLUMNS)
    if not watch:
        console.print(table(rows()))
        return
    with contextlib.suppress(KeyboardInterrupt), Live(table(rows()), console=console, auto_refresh=False) as live:
        while True:
            time.sleep(REFRESH_S)
            live.update(table(rows()), refresh=True)


def explain(ops: str, path: str, output: str) -> None:
    """Prints an explanation as sentences."""
    found = fetch(ops, f"/api/v1/explain/{path}")
    if output == "json":
        click.echo(json.dumps(found, indent=2))
        return
    for sentence in found["sentences"]:
        click.echo(sentence)
