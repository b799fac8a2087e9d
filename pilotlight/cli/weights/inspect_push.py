"""`pilotlight weights inspect` and `push`: inspects artifacts locally or remotely, and pushes them to registries.

Defines the commands and their output. `artifacts.dialects.artifact_contents` decides what an artifact consists of, and
what of it is accepted.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import click
from rich.progress import Progress, TaskID

from artifacts.dialects.artifact_contents import Contents, RefusedError, explain_contents, read_contents
from artifacts.fetch.fetch import SourceListing, Ways, open_source, parse_remote_source
from artifacts.fetch.registry import Came
from artifacts.http.transport import Site
from artifacts.oci.descriptor import BadManifestError
from artifacts.pack import oci_layout, push_artifact
from artifacts.pack.oci_layout import LayoutEntry, OciLayout
from artifacts.pack.pack import PackError
from artifacts.reference import BadReferenceError, Reference, parse_reference
from artifacts.registry import push as pushing
from artifacts.registry import resolve
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirrored
from artifacts.registry_errors import RegistryError
from artifacts.source_uri import Bucket, Hub
from artifacts.store.store import Store
from autoscaler.spec.quantity import parse_bytes
from pilotlight.cli.weights.pack import plan_artifact
from pilotlight.cli.weights.pull import convert_pull_errors, pull_to_store
from pilotlight.models.registry_access import build_fetch_access, build_keychain
from pilotlight.options import is_path_too_long, output_option, registry_options, store_option
from pilotlight.safe_output import write_json
from pilotlight.tables import build_progress_bar

CHUNK_BYTES_MIN = 1 << 20
"""Minimum chunk size: smaller chunks cost more requests than they save."""


class How(NamedTuple):
    """How blobs are uploaded."""

    mount: str
    """A repository to mount existing blobs from; empty: none."""
    chunk_bytes: int
    """Chunk size; 0: upload each blob in one request."""


@click.command("inspect", epilog="Example: pilotlight weights inspect oci://registry.example/models/llama:v1 --explain")
@click.argument("what", metavar="REFERENCE|FOLDER")
@click.option("--explain", is_flag=True, help="Explain each layer: its role, and why it is rejected.")
@click.option(
    "--allow-unsafe", is_flag=True, help="Accept code and pickled weights, as a Model with `allowUnsafe: true` does."
)
@registry_options
@output_option
def inspect(  # noqa: PLR0917  click passes by keyword
    what: str, explain: bool, allow_unsafe: bool, ca_file: Path | None, plain_http: bool, output: str
) -> None:
    """Show the contents of an artifact, and whether it would be accepted. Weights are not fetched."""
    try:
        if is_path_too_long(Path(what)):
            raise click.UsageError(f"{what}: File name too long")
        if Path(what).is_file():
            raise click.UsageError(
                f"{what} is a file: convert it to an artifact with `pilotlight weights pack {what} --to FOLDER`"
            )
        lies = None if Path(what).is_dir() else parse_remote_source(what)
        if isinstance(lies, Hub | Bucket):
            shown = asyncio.run(_seen(lies, build_fetch_access(plain_http, ca_file), allow_unsafe=allow_unsafe))
            _say_seen(shown, output)
            return
        found = _entry(what, ca_file, plain_http=plain_http)
        read = read_contents(found.manifest, found.config, allow_unsafe=allow_unsafe)
    except (BadManifestError, BadReferenceError, RegistryError) as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        write_json(_summary(found, read))
        return
    click.echo(f"digest: {found.top}")
    if found.digest != found.top:
        click.echo(f"manifest: {found.digest} of this index")
    if explain:
        click.echo("\n".join(explain_contents(read)))
    else:
        click.echo(f"dialect: {read.dialect}")
        for layer in read.layers:
            path = layer.file.path or "(the archive contains the file names)"
            click.echo(f"{layer.file.size:>14}  {layer.file.role:<9}  {path}")
    refusal = _refusal(read)
    click.echo(f"refused: {refusal}" if refusal else "would be accepted")


@click.command("push", epilog="Example: pilotlight weights push ./llama-oci oci://registry.example/models/llama:v1")
@click.argument("what", metavar="FOLDER|hf://...|s3://...")
@click.argument("ref", metavar="REFERENCE")
@click.option(
    "--mount-from",
    metavar="REPOSITORY",
    default="",
    help="A repository of the same registry from which the registry copies existing blobs.",
)
@click.option(
    "--chunk-bytes",
    metavar="SIZE",
    help="Upload blobs in chunks of this size, for example 64Mi. Default: one request per blob.",
)
@store_option
@registry_options
@output_option
def push(  # noqa: PLR0917  click passes by keyword
    what: str, ref: str, mount_from: str, chunk_bytes: str | None, store: Path, ca_file: Path | None, plain_http: bool,
    output: str,
) -> None:  # fmt: skip
    """Push a model to a registry, from a folder of `weights pack` or from hf:// or s3://.

    A remote source is first pulled into this node's store and packed; until the push ends, it uses twice its size on
    disk. Blobs that the registry already has are not uploaded.
    """
    how = How(mount_from, _chunk_bytes(chunk_bytes))
    try:
        to = parse_reference(ref)
        if to.digest is not None:
            raise click.UsageError("REFERENCE must have a tag and no digest: remove the text from @ on")
        with _layout(what, store, build_fetch_access(False, ca_file)) as layout:
            _send(layout, to, _site(to, ca_file, plain_http=plain_http), output, how)
    except (BadManifestError, BadReferenceError, PackError) as error:
        raise click.ClickException(str(error)) from None


@contextlib.contextmanager
def _layout(what: str, store: Path, by: Ways) -> Iterator[OciLayout]:
    """Open the folder, or a temporary one with the contents of a remote source."""
    if "://" not in what:
        if is_path_too_long(Path(what)):
            raise click.UsageError(f"{what}: File name too long")
        yield OciLayout(Path(what))
        return
    of = parse_remote_source(what)
    if isinstance(of, Reference):
        raise click.UsageError(
            f"{what} is already in a registry: copy it to another one with a tool such as `oras copy`"
        )
    with convert_pull_errors(), contextlib.ExitStack() as stack:
        with build_progress_bar("pulling", quiet=False) as progress:
            task = progress.add_task("pulling", total=None)
            report = partial(_moved, progress, task)
            copy = stack.enter_context(asyncio.run(pull_to_store(of, Store(store), by, report)))
        folder = stack.enter_context(Store(store).aside())
        oci_layout.write_layout(folder / "layout", plan_artifact(copy.folder), "modelpack")
        yield OciLayout(folder / "layout")


def _moved(progress: Progress, task: TaskID, now: Came) -> None:
    progress.update(task, total=now.total_bytes, completed=now.bytes)


def _send(layout: OciLayout, to: Reference, site: Site, output: str, how: How) -> None:
    try:
        whole = layout.whole()
        with build_progress_bar("pushing", quiet=output == "json") as progress:
            task = progress.add_task("pushing", total=sum(one.size for one in whole.blobs))
            digest = asyncio.run(_push(site, to, layout, lambda count: progress.advance(task, count), how))
    except (BadManifestError, BadReferenceError, RegistryError) as error:
        raise click.ClickException(str(error)) from None
    summary = {"reference": str(to._replace(tag=to.asked)), "digest": digest}
    if output == "json":
        write_json(summary)
    else:
        click.echo(f"pushed oci://{summary['reference']}@{digest}")


async def _seen(of: Hub | Bucket, by: Ways, *, allow_unsafe: bool) -> SourceListing:
    async with open_source(of, by) as there:
        return await there.look(allow_unsafe=allow_unsafe)


def _say_seen(found: SourceListing, output: str) -> None:
    """Print what would be accepted, and each file's checksum as its source states it."""
    listing = found.listing
    rows = [
        {"path": one.entry.path, "role": one.role, "bytes": one.entry.size, "said": one.entry.claim}
        for one in listing.taken
    ]
    left = [{"path": path, "reason": why} for path, why in listing.left]
    if output == "json":
        summary = {"digest": listing.digest, "revision": found.revision, "files": rows, "left": left}
        write_json(summary)
        return
    click.echo(f"digest: {listing.digest}")
    click.echo(f"revision: {found.revision or 'none: a bucket has no history'}")
    for one in listing.taken:
        click.echo(f"{one.entry.size:>14}  {one.role:<9}  {one.entry.path}")
    for path, why in listing.left:
        click.echo(f"left out: {path}: {why}")
    click.echo("would be accepted")


def _entry(what: str, ca_file: Path | None, *, plain_http: bool) -> LayoutEntry:
    """Return the model in a folder or behind a reference."""
    if Path(what).is_dir():
        return OciLayout(Path(what)).entry(resolve.detect_platform())
    ref = parse_reference(what)
    return asyncio.run(_look(_site(ref, ca_file, plain_http=plain_http), ref))


def _site(ref: Reference, ca_file: Path | None, *, plain_http: bool) -> Site:
    return Site(ref.host, plain_http=True if plain_http else None, ca=ca_file)


async def _look(site: Site, ref: Reference) -> LayoutEntry:
    async with Client(site, build_keychain(plain_http=site.plain_http is True)) as client:
        found = await resolve.resolve_reference(Mirrored(client), ref, resolve.detect_platform())
    return LayoutEntry(found.chosen, found.manifest, found.documents[-1], found.digest)


async def _push(site: Site, ref: Reference, layout: OciLayout, moved: Callable[[int], None], how: How) -> str:
    async with Client(site, build_keychain(plain_http=site.plain_http is True)) as client:
        return await push_artifact.push_layout(
            client, ref.repository, ref.asked, layout, moved, mount=how.mount, chunk_bytes=how.chunk_bytes
        )


def _chunk_bytes(text: str | None) -> int:
    """Return the chunk size; 0: one request per blob."""
    if text is None:
        return 0
    try:
        found = parse_bytes(text)
    except ValueError as error:
        raise click.UsageError(f"--chunk-bytes {text}: {error}") from None
    if not CHUNK_BYTES_MIN <= found <= pushing.CHUNK_BYTES_MAX:
        raise click.UsageError(f"--chunk-bytes {text}: expected a size from 1Mi to 1Gi")
    return found


def _refusal(read: Contents) -> str:
    try:
        read.files()
    except RefusedError as error:
        return str(error)
    return ""


def _summary(found: LayoutEntry, read: Contents) -> dict[str, object]:
    rows = [
        {
            "path": layer.file.path, "role": layer.file.role, "encoding": layer.file.encoding,
            "bytes": layer.file.size, "digest": layer.file.digest, "note": layer.note, "refusal": layer.refusal,
        }
        for layer in read.layers
    ]  # fmt: skip
    return {
        "digest": found.top,
        "manifest": found.digest,
        "dialect": read.dialect,
        "refusal": _refusal(read),
        "layers": rows,
    }
