"""`pilotlight weights inspect` and `push`: artifacts in registries and in folders, looked at and pushed.

Owns how these commands are typed, and what they print. What an artifact consists of, and what of it is taken, is
`artifacts.contents`'.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from artifacts import contents, reference, remote
from artifacts.client import Client
from artifacts.contents import Contents
from artifacts.descriptors import BadManifestError, Platform
from artifacts.ocilayout import Entry, Layout
from artifacts.reference import BadReferenceError, Reference
from artifacts.refusals import RegistryError
from artifacts.transport import Site
from pilotlight.keychain import keychain
from pilotlight.options import output_option
from pilotlight.pulling import registry_options

_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@click.command("inspect", epilog="Example: pilotlight weights inspect oci://registry.example/models/llama:v1 --explain")
@click.argument("what", metavar="REF|LAYOUT")
@click.option("--explain", is_flag=True, help="Each layer: what it is taken for, and why it is refused.")
@click.option("--allow-unsafe", is_flag=True, help="As a Model with allowUnsafe: true would take it.")
@registry_options
@output_option
def inspect(  # noqa: PLR0917  click passes by keyword
    what: str, explain: bool, allow_unsafe: bool, ca_file: Path | None, plain_http: bool, output: str
) -> None:
    """What an artifact consists of, and whether it would be taken. No weights are fetched."""
    try:
        found = _entry(what, ca_file, plain_http=plain_http)
        read = contents.read(found.manifest, found.config, allow_unsafe=allow_unsafe)
    except (BadManifestError, BadReferenceError, RegistryError) as error:
        raise click.ClickException(str(error)) from None
    if output == "json":
        click.echo(json.dumps(_told(found, read), indent=2))
        return
    click.echo(f"digest: {found.digest}")
    if explain:
        click.echo("\n".join(contents.explain(read)))
        return
    click.echo(f"dialect: {read.dialect}")
    for layer in read.layers:
        click.echo(f"{layer.file.size:>14}  {layer.file.role:<9}  {layer.file.path or '(names are in the archive)'}")
    refusal = _refusal(read)
    click.echo(f"refused: {refusal}" if refusal else "would be taken")


@click.command("push", epilog="Example: pilotlight weights push ./llama-oci oci://registry.example/models/llama:v1")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), metavar="LAYOUT")
@click.argument("ref")
@registry_options
@output_option
def push(folder: Path, ref: str, ca_file: Path | None, plain_http: bool, output: str) -> None:
    """Push what `weights pack` has made to a registry. What is there already is not sent."""
    try:
        to = _reference(ref)
        if to.digest is not None:
            raise click.UsageError("REF is pushed under a tag: leave out what follows @")
        layout = Layout(folder)
        whole = layout.whole()
        columns = (TextColumn("pushing"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        console = Console(stderr=True)
        off = output == "json" or not console.is_terminal
        with Progress(*columns, console=console, disable=off, transient=True) as progress:
            task = progress.add_task("pushing", total=sum(one.size for one in whole.blobs))
            site = _site(to, ca_file, plain_http=plain_http)
            digest = asyncio.run(_push(site, to, layout, lambda count: progress.advance(task, count)))
    except (BadManifestError, BadReferenceError, RegistryError) as error:
        raise click.ClickException(str(error)) from None
    told = {"reference": str(to._replace(tag=to.asked)), "digest": digest}
    click.echo(json.dumps(told, indent=2) if output == "json" else f"pushed {told['reference']}@{digest}")


def _entry(what: str, ca_file: Path | None, *, plain_http: bool) -> Entry:
    """The model in a folder, or behind a reference."""
    platform = Platform("linux", _ARCHITECTURES.get(os.uname().machine, os.uname().machine))
    if Path(what).is_dir():
        return Layout(Path(what)).entry(platform)
    ref = _reference(what)
    return asyncio.run(_look(_site(ref, ca_file, plain_http=plain_http), ref, platform))


def _reference(text: str) -> Reference:
    return reference.parse(text)


def _site(ref: Reference, ca_file: Path | None, *, plain_http: bool) -> Site:
    return Site(ref.host, plain_http=True if plain_http else None, ca=ca_file)


async def _look(site: Site, ref: Reference, platform: Platform) -> Entry:
    async with Client(site, keychain(plain_http=site.plain_http is True)) as client:
        return await remote.look(client, ref.repository, ref.asked, platform)


async def _push(site: Site, ref: Reference, layout: Layout, moved: Callable[[int], None]) -> str:
    async with Client(site, keychain(plain_http=site.plain_http is True)) as client:
        return await remote.send(client, ref.repository, ref.asked, layout, moved)


def _refusal(read: Contents) -> str:
    try:
        read.files()
    except contents.RefusedError as error:
        return str(error)
    return ""


def _told(found: Entry, read: Contents) -> dict[str, object]:
    rows = [
        {
            "path": layer.file.path, "role": layer.file.role, "encoding": layer.file.encoding,
            "bytes": layer.file.size, "digest": layer.file.digest, "note": layer.note, "refusal": layer.refusal,
        }
        for layer in read.layers
    ]  # fmt: skip
    return {"digest": found.digest, "dialect": read.dialect, "refusal": _refusal(read), "layers": rows}
