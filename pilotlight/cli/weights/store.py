"""`pilotlight weights ls`, `pin`, `unpin` and `evict`: lists and manages the copies in a node's store.

Resolves names to copies and prints the table. The store decides what may be evicted. All commands work on the folder
itself, also while an agent uses it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import JustifyMethod
from rich.table import Table

from artifacts.digest import BadDigestError, Digest, parse_digest
from artifacts.reference import BadReferenceError, parse_reference
from artifacts.store.file_names import CopyKey
from artifacts.store.layout import StoreError
from artifacts.store.store import Row, Store
from artifacts.store.tag_cache import Meanings
from autoscaler.spec.quantity import parse_bytes
from autoscaler.text import format_size
from pilotlight.cli import status
from pilotlight.options import output_option, store_option
from pilotlight.safe_output import write_json
from pilotlight.tables import build_console

COLUMNS = ("artifact", "digest", "size", "age", "last used", "held")
SHORT_DIGITS = 12
COPIES = "`pilotlight weights ls` lists them"
_BEGIN = re.compile(r"(?:sha(?:256|512):)?[0-9a-f]{6,}")
names_argument = click.argument("names", metavar="DIGEST|ARTIFACT...", nargs=-1, required=True)


@click.command("ls", epilog="Example: pilotlight weights ls --output json")
@store_option
@output_option
def list_(store: Path, output: str) -> None:
    """List all copies with their size and age, and whether they are pinned or in use; last used first."""
    with open_store(store) as opened:
        rows, stored_bytes = opened.rows(), opened.stored_bytes()
    if output == "json":
        write_json([_said(row) for row in rows])
        return
    build_console().print(_table(rows, time.time()))
    count = "1 Copy" if len(rows) == 1 else f"{len(rows)} Copies"
    click.echo(f"{count}, {format_size(stored_bytes)} with shared files counted once")


@click.command(epilog="Example: pilotlight weights pin oci://ghcr.io/acme/llama:8b")
@names_argument
@store_option
def pin(names: tuple[str, ...], store: Path) -> None:
    """Keep weights on this node regardless of other demand for space. A full DIGEST can be pinned
    before it is pulled.
    """
    with open_store(store) as opened:
        for digest in resolve_digests(opened, names):
            opened.pin(digest)
            click.echo(f"{shorten_digest(digest)} is pinned")


@click.command(epilog="Example: pilotlight weights unpin oci://ghcr.io/acme/llama:8b")
@names_argument
@store_option
def unpin(names: tuple[str, ...], store: Path) -> None:
    """Allow the eviction of weights again."""
    with open_store(store) as opened:
        for digest in resolve_digests(opened, names):
            opened.unpin(digest)
            click.echo(f"{shorten_digest(digest)} may be evicted when space is needed")


@click.command(epilog="Example: pilotlight weights evict --free 40Gi")
@click.argument("names", metavar="[DIGEST|ARTIFACT]...", nargs=-1)
@click.option(
    "--free", metavar="SIZE", help="Evict the least valuable copies instead of named ones, until this size is freed."
)
@store_option
def evict(names: tuple[str, ...], free: str | None, store: Path) -> None:
    """Remove copies now, except those that are pinned or in use."""
    if bool(names) == (free is not None):
        raise click.UsageError("expected either names of copies or --free SIZE")
    with open_store(store) as opened:
        if free is not None:
            _free(opened, free)
            return
        rows, rest = resolve_copies(opened, names)
        for row in rows:
            opened.evict(row.record.key)
            click.echo(f"{row.record.reference}: {shorten_digest(row.record.digest)} is evicted")
        if rest:
            raise click.ClickException(f"at least one of the names matches no copy in this store; {COPIES}")


def _free(store: Store, text: str) -> None:
    try:
        needed_bytes = parse_bytes(text)
    except ValueError as error:
        raise click.UsageError(f"--free {text}: {error}") from None
    found = store.free(needed_bytes)
    if found.lacking_bytes:
        raise click.ClickException(
            f"nothing was evicted: {format_size(found.lacking_bytes)} could not be freed, with "
            f"{format_size(found.in_use_bytes)} in "
            f"use and {format_size(found.pinned_bytes)} pinned"
        )
    click.echo(f"evicted: {len(found.gone)}, freed: {format_size(found.freed_bytes)}")


@contextlib.contextmanager
def open_store(path: Path) -> Iterator[Store]:
    """Open an existing store; raise its errors as click's."""
    store = Store(path)
    if not store.layout.copies.is_dir():
        raise click.UsageError(f"--store {path}: no weights store exists there; `pilotlight weights pull` creates one")
    try:
        yield store
    except StoreError as error:
        raise click.ClickException(str(error)) from None
    except OSError as error:
        why = error.strerror or type(error).__name__
        raise click.ClickException(f"--store {path}: {why}; run the command as the owner of the store") from None


def resolve_digests(store: Store, names: tuple[str, ...]) -> list[Digest]:
    """Resolve names to digests: whole digests, prefixes of stored ones, or artifacts as they were requested."""
    rows, found = store.rows(), dict[Digest, None]()
    for name in names:
        with contextlib.suppress(BadDigestError):
            found[parse_digest(name)] = None
            continue
        mine = {key.digest for key in _keys(store, name, rows)}
        if len(mine) != 1:
            what = f"matches {len(mine)} digests" if mine else "matches no copy"
            raise click.UsageError(f"{name[:80]!r}: {what}; {COPIES}")
        found[mine.pop()] = None
    return list(found)


def resolve_copies(store: Store, names: tuple[str, ...]) -> tuple[list[Row], bool]:
    """Return the copies that the names match, and whether a digest has no copy here. Raises click's usage error.

    A copy from another registry does not match a requested artifact, even if it has the same digest.
    """
    digests_ = resolve_digests(store, names)
    there = store.rows()
    keys = {key for name in names for key in _keys(store, name, there)}
    rows = [row for row in there if row.record.key in keys]
    return rows, bool(set(digests_) - {row.record.key.digest for row in rows})


def _keys(store: Store, name: str, rows: list[Row]) -> set[CopyKey]:
    """Return matching stored copies; one fetched under several tags is listed under one, but each tag matches."""
    there = {row.record.key for row in rows}
    found = {row.record.key for row in rows if _means(name, row)}
    with contextlib.suppress(BadReferenceError):
        recalled = None if found else Meanings(store).recall(parse_reference(name))
        return {recalled} & there if recalled is not None else found
    return found


def _means(name: str, row: Row) -> bool:
    digest = row.record.digest
    begins = digest.startswith(name) or digest.partition(":")[2].startswith(name)
    return row.record.reference == name or (_BEGIN.fullmatch(name) is not None and begins)


def shorten_digest(digest: str) -> str:
    """Shorten a digest to a length that people can still recognize."""
    algorithm, _, digits = digest.partition(":")
    return f"{algorithm}:{digits[:SHORT_DIGITS]}"


def _table(rows: list[Row], now_unix_s: float) -> Table:
    out = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        # on a narrow terminal only names wrap; nothing is truncated
        wraps = column == COLUMNS[0]
        justify: JustifyMethod = "right" if column == "size" else "left"
        out.add_column(column, no_wrap=not wraps, overflow="fold", justify=justify)
    for row in rows:
        held = ", ".join(word for word, holds in (("pinned", row.pinned), ("in use", row.in_use)) if holds)
        age, used = (
            status.format_age(max(now_unix_s - at, 0.0)) for at in (row.record.fetched_unix_s, row.used_unix_s)
        )
        out.add_row(
            row.record.reference, shorten_digest(row.record.digest), format_size(row.record.bytes), age, used, held
        )
    return out


def _said(row: Row) -> dict[str, object]:
    """Return a row for JSON output."""
    record = row.record
    return {
        "artifact": record.reference,
        "origin": record.origin,
        "digest": record.digest,
        "bytes": record.bytes,
        "files": len(record.laid),
        "fetched_unix_s": record.fetched_unix_s,
        "fetch_s": record.fetch_s,
        "used_unix_s": row.used_unix_s,
        "pinned": row.pinned,
        "in_use": row.in_use,
        "private": record.private,
    }
