"""The command `pilotlight weights verify`: reads stored weights again and compares them with their digests. I/O."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import click

from artifacts.store.layout import StoreError
from artifacts.store.store import Row, Store
from artifacts.store.stored_copy_check import Bad, verify_copy
from autoscaler.text import format_size
from pilotlight.cli.weights.store import COPIES, open_store, resolve_copies, shorten_digest
from pilotlight.options import output_option, store_option
from pilotlight.safe_output import write_json
from pilotlight.tables import build_progress_bar


@click.command("verify", epilog="Example: pilotlight weights verify --drop")
@click.argument("names", metavar="[DIGEST|ARTIFACT]...", nargs=-1)
@click.option("--drop", is_flag=True, help="Remove corrupt copies. The next pull fetches them again.")
@store_option
@output_option
def verify_(names: tuple[str, ...], drop: bool, store: Path, output: str) -> None:
    """Read all or the named copies again and compare them with their manifests. Exit 1 if one is corrupt."""
    rows, verdicts, kept = list[Row](), list[dict[str, object]](), 0
    with open_store(store) as there:
        rows, rest = resolve_copies(there, names) if names else (there.rows(), False)
        if rest:
            raise click.ClickException(f"at least one of the names matches no copy in this store; {COPIES}")
        with build_progress_bar("reading", quiet=output == "json") as progress:
            task = progress.add_task("reading", total=sum(row.record.bytes for row in rows))
            for row in rows:
                bad = _read_again(there, row, lambda count: progress.advance(task, count))
                dropped = bool(bad) and drop and _dropped(there, row, bad)
                kept += bool(bad) and not dropped
                verdicts.append(_verdict(row, bad, dropped=dropped))
    if output == "json":
        write_json(verdicts)
    elif not rows:
        click.echo("the store has no copies")
    for row, verdict in zip(rows, verdicts, strict=True) if output != "json" else ():
        _say_verdict(row, verdict)
    if any(one["bad"] for one in verdicts):
        hint = "; --drop removes them" if kept and not drop else ""
        raise click.ClickException(
            f"{sum(bool(one['bad']) for one in verdicts)} of {len(verdicts)} copies are corrupt{hint}"
        )


def _read_again(store: Store, row: Row, moved: Callable[[int], None]) -> list[Bad]:
    copy = store.find(row.record.key)
    if copy is None:
        return []  # evicted meanwhile
    with copy:
        return list(verify_copy(copy.record, copy.folder, moved))


def _dropped(store: Store, row: Row, bad: Sequence[Bad]) -> bool:
    try:
        store.evict(row.record.key, [one.digest for one in bad if one.digest is not None])
    except StoreError as error:
        click.echo(f"pilotlight: {error}", err=True)
        return False
    return True


def _verdict(row: Row, bad: Sequence[Bad], *, dropped: bool) -> dict[str, object]:
    wrong = [{"path": one.path, "reason": one.why} for one in bad]
    return {"artifact": row.record.reference, "digest": row.record.digest, "bad": wrong, "dropped": dropped}


def _say_verdict(row: Row, verdict: dict[str, object]) -> None:
    found = verdict["bad"]
    if not isinstance(found, list) or not found:
        click.echo(
            f"{row.record.reference}: {shorten_digest(row.record.digest)}, {format_size(row.record.bytes)}: intact"
        )
        return
    for one in found:
        click.echo(f"{row.record.reference}: {one['path'] or shorten_digest(row.record.digest)}: {one['reason']}")
    if verdict["dropped"]:
        click.echo(f"{row.record.reference}: {shorten_digest(row.record.digest)} is removed")
