"""`pilotlight status` and `explain`: reads the operations port and shows it to a person, or prints its JSON."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table

TIMEOUT_S = 5.0
REFRESH_S = 0.5
COLUMNS = ("model", "state", "replicas", "waiting", "running", "device", "since", "why")

Row = Mapping[str, Any]  # JSON from another process, shown and not computed with


def fetch(ops: str, path: str) -> Any:
    """GET of the operations port. One clear error (exit 1) when nobody answers there, or it says no."""
    try:
        with urllib.request.urlopen(ops.rstrip("/") + path, timeout=TIMEOUT_S) as response:  # noqa: S310  http by type
            return json.load(response)
    except urllib.error.HTTPError as error:
        message = json.load(error).get("error", error.reason)
        raise click.ClickException(str(message)) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise click.ClickException(
            f"no pilotlight answers at {ops} ({reason}); is `pilotlight serve` running?"
        ) from None


def table(rows: Sequence[Row]) -> Table:
    """The live table."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        out.add_column(column, overflow="fold" if column == "why" else "ellipsis", no_wrap=column != "why")
    for row in rows:
        out.add_row(*(cell(row, column) for column in COLUMNS))
    return out


def cell(row: Row, column: str) -> str:
    """One cell as text; `replicas` is a mapping of state to count, `since` a number of seconds."""
    value = row.get(column)
    if column == "replicas" and isinstance(value, Mapping):
        return " ".join(f"{count} {state}" for state, count in value.items()) or "0"
    if column == "since" and isinstance(value, int | float):
        return ago(float(value))
    return "" if value is None else str(value)


def ago(seconds: float) -> str:
    """`3 s`, `4 min`, `2 h`, `5 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


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
    console = Console()
    if not watch:
        console.print(table(rows()))
        return
    with Live(table(rows()), console=console, auto_refresh=False) as live:
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
