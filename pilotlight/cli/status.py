"""`pilotlight status` and `explain`: reads the operations port and shows the response as text or JSON."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import click
import msgspec
from msgspec.structs import replace
from rich.live import Live
from rich.table import Table

from autoscaler.queries.response_types import DocumentsView, ModelView, OffView, Row, Sentences
from pilotlight.net.ops_client import fetch
from pilotlight.safe_output import one_line, write_document, write_json
from pilotlight.tables import Console, build_console

if TYPE_CHECKING:
    from autoscaler.explain.fit import Fit
    from autoscaler.explain.model import Explanation

REFRESH_S = 0.5
DURATION = re.compile(r"\b\d+(\.\d+)? (s|min|h)\b( \d+ (s|min)\b)?")
"""Matches the output of `autoscaler.text.format_duration`."""
Explained = TypeVar("Explained", "Explanation", "Fit", Sentences)
COLUMNS = ("model", "state", "replicas", "waiting", "running", "devices", "since", "why")


def build_table(rows: Sequence[Row]) -> Table:
    """Return the live table."""
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        out.add_column(column, overflow="fold" if column == "why" else "ellipsis", no_wrap=column != "why")
    for row in rows:
        out.add_row(*(format_cell(row, column) for column in COLUMNS))
    return out


def format_cell(row: Row, column: str) -> str:
    """Return one cell as text."""
    match column:
        case "model":
            return f"{row.model} (+{', '.join(row.adapters)})" if row.adapters else row.model
        case "replicas":
            return ", ".join(f"{count} {state}" for state, count in row.replicas.items()) or "0"
        case "devices":
            return ", ".join(row.devices)
        case "since":
            return "" if row.since_s is None else format_age(row.since_s)
        case _:
            return str(getattr(row, column))


def format_age(seconds: float) -> str:
    """Return the age as `3 s`, `4 min`, `2 h` or `5 d`."""
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{seconds // 1:.0f} s"


def fetch_rows(ops: str, model: str | None) -> tuple[Row, ...]:
    """Return the rows of all Models, or of one by name or alias. Raises click's error if it does not exist."""
    found = fetch(ops, "/api/v1/status", tuple[Row, ...])
    if model is None:
        return found
    if not any(row.model == model for row in found):
        model = fetch(ops, f"/api/v1/models/{model}", ModelView).name
    return tuple(row for row in found if row.model == model)


def print_status(ops: str, model: str | None, *, watch: bool, output: str) -> None:
    """Print the rows of all Models or one; with `watch`, until interrupted."""
    if watch:
        with contextlib.suppress(KeyboardInterrupt):
            watch_status(ops, model, output)
    elif output == "json":
        write_json(fetch_rows(ops, model))
    else:
        build_console().print(build_table(fetch_rows(ops, model)))
        if model is None:
            print_notes(ops)


def print_notes(ops: str) -> None:
    """Print features that are disabled in this mode, and whether the last reload of the documents failed."""
    off = fetch(ops, "/api/v1/off", OffView)
    for sentence in off.sentences:
        click.echo(one_line(f"off: {sentence}"))
    if off.degraded:
        click.echo(one_line(f"degraded: an internal error occurred, and the failed part is retried: {off.degraded}"))
    problem = fetch(ops, "/api/v1/documents", DocumentsView).problem
    if problem:
        click.echo(one_line(f"documents: {problem}"))


def watch_status(ops: str, model: str | None, output: str) -> None:
    """Show a live table on a terminal, otherwise a table per change, or with JSON one line with all rows per change."""
    if output == "text" and sys.stdout.isatty():
        with Live(build_table(fetch_rows(ops, model)), console=Console(), auto_refresh=False) as live:
            while True:
                time.sleep(REFRESH_S)
                live.update(build_table(fetch_rows(ops, model)), refresh=True)
    console, shown = build_console(), None
    while True:
        found = fetch_rows(ops, model)
        # ages and remaining times alone are no change
        known, shown = shown, [replace(row, since_s=None, why=DURATION.sub("", row.why)) for row in found]
        if shown != known:
            if output == "json":
                write_document(json.dumps({"models": msgspec.to_builtins(found)}))
            else:
                console.print(build_table(found))
        time.sleep(REFRESH_S)


def print_explanation(ops: str, path: str, kind: type[Explained], output: str) -> None:
    """Print an explanation as sentences or JSON."""
    found = fetch(ops, f"/api/v1/explain/{path}", kind)
    if output == "json":
        write_json(found)
        return
    for sentence in found.sentences or ("Nothing was decided yet.",):
        indent = " " * (len(sentence) - len(sentence.lstrip(" ")))
        click.echo(indent + one_line(sentence))
