"""`pilotlight weights pull`: fetches weights into the store of the node.

Defines the commands, the sources of logins, and the progress bars. `artifacts.fetch.fetch` does the fetching, and
`artifacts.store.stored_copy_check` the verification.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import click

from artifacts import file_policy
from artifacts.disk.durable_writes import DiskError
from artifacts.fetch.fetch import Lies, Ways, fetch_artifact, parse_remote_source
from artifacts.fetch.registry import Came
from artifacts.oci.descriptor import BadManifestError
from artifacts.reference import BadReferenceError, Reference
from artifacts.registry_errors import RegistryError
from artifacts.store.copies import Copy
from artifacts.store.layout import StoreError
from artifacts.store.store import Store
from autoscaler.text import format_size
from pilotlight.agent.weights import peer_sharing
from pilotlight.cli.weights.store import shorten_digest
from pilotlight.models.registry_access import build_fetch_access
from pilotlight.options import output_option, registry_options, store_option
from pilotlight.safe_output import write_json
from pilotlight.tables import build_progress_bar

FAILURES = (RegistryError, BadManifestError, StoreError, DiskError)
"""Errors that end a pull with a one-line message."""


@click.command("pull", epilog="Example: pilotlight weights pull oci://ghcr.io/acme/llama:8b")
@click.argument("artifact", metavar="REFERENCE")
@click.option(
    "--allow-unsafe",
    is_flag=True,
    help="Also accept code and pickled weights. Such a copy is only used where they are allowed.",
)
@store_option
@registry_options
@peer_sharing.peer_option
@peer_sharing.peer_options
@output_option
def pull(  # noqa: PLR0917  click passes by keyword
    artifact: str, allow_unsafe: bool, store: Path, plain_http: bool, ca_file: Path | None, peers: tuple[str, ...],
    peer_token_file: Path | None, peer_cert_file: Path | None, peer_key_file: Path | None, peer_ca_file: Path | None,
    output: str,
) -> None:  # fmt: skip
    """Pull weights into this node's store and verify them. Stored weights are not fetched again.

    REFERENCE: oci://..., hf://owner/name@revision?include=PATTERN, or s3://bucket/key. Credentials
    come from `weights login`, Docker, Podman, the cloud identity of this machine, HF_TOKEN, and the AWS variables for
    keys. A tag or a revision is always resolved again.
    """
    access = peer_sharing.build_peer_access(peer_token_file, peer_cert_file, peer_key_file, peer_ca_file)
    among = peer_sharing.build_static_peering(peers, access) if peers else None
    of, began_s = _parsed(artifact), time.monotonic()
    with convert_pull_errors(), build_progress_bar("pulling", quiet=output == "json") as progress:
        task, came = progress.add_task("pulling", total=None), Came(0, 0, 0.0)

        def report(now: Came) -> None:
            nonlocal came
            came = now
            progress.update(task, total=now.total_bytes, completed=now.bytes)

        by = build_fetch_access(plain_http, ca_file, among)
        copy = asyncio.run(pull_to_store(of, Store(store), by, report, allow_unsafe=allow_unsafe))
    with copy:
        given = {} if among is None else {name: count for name, count in sorted(among.given.items()) if count}
        asked = f"oci://{of}" if isinstance(of, Reference) else str(of)  # the copy may be stored under another name
        _print_pulled(asked, copy, came, time.monotonic() - began_s, given, output=output)


async def pull_to_store(
    of: Lies, store: Store, by: Ways, report: Callable[[Came], None], *, allow_unsafe: bool = False
) -> Copy:
    """Fetch an artifact and return its copy; files that are left out are reported."""

    def left(path: str, why: str) -> None:
        click.echo(f"pilotlight: left out: {path}: {why}", err=True)

    opened = await asyncio.to_thread(store.open)
    return await fetch_artifact(of, opened, by, report, left, allow_unsafe=allow_unsafe)


def _print_pulled(asked: str, copy: Copy, came: Came, took_s: float, given: Mapping[str, int], *, output: str) -> None:
    """Print the result of a pull. `given`: bytes received per peer."""
    record = copy.record
    if output == "json":
        summary = {
            "artifact": asked,
            "digest": record.digest,
            "folder": str(copy.folder),
            "bytes": record.bytes,
            "files": [one.path for one in record.laid],
            "fetched_bytes": came.bytes,
            "peer_bytes": given,
            "bytes_per_s": round(came.bytes_per_s),
            "took_s": took_s,
        }
        write_json(summary)
        return
    how = f"{format_size(came.bytes)} in {took_s:.1f} s" if came.bytes else "already stored"
    if given:
        how += f", from {', '.join(f'{name} {format_size(count)}' for name, count in given.items())}"
    files = "1 file" if len(record.laid) == 1 else f"{len(record.laid)} files"
    click.echo(f"{asked}: {shorten_digest(record.digest)}, {files}, {format_size(record.bytes)}; {how}")
    click.echo(str(copy.folder))


def _parsed(text: str) -> Lies:
    try:
        return parse_remote_source(text)
    except BadReferenceError as error:
        raise click.UsageError(str(error)) from None


@contextlib.contextmanager
def convert_pull_errors() -> Iterator[None]:
    """Raise errors that end a pull as click's."""
    try:
        yield
    except FAILURES as error:
        raise click.ClickException(str(error).replace(file_policy.ALLOW, "--allow-unsafe accepts it")) from None
    except OSError as error:
        raise click.ClickException(f"{error.filename or 'the store'}: {error.strerror}") from None
