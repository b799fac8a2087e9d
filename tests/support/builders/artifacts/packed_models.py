"""Models packed with `weights pack` and pushed to a fake or real registry, as input for tests of pulls."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from artifacts.digest import Digest
from artifacts.http.transport import Site
from artifacts.oci import manifest
from artifacts.oci.descriptor import Descriptor
from artifacts.oci.manifest import Index, Manifest
from artifacts.pack import oci_layout
from artifacts.pack.oci_layout import OciLayout
from artifacts.pack.pack import Form
from artifacts.registry import push as pushing
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from pilotlight.cli.weights.pack import plan_artifact
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.registry import FakeRegistry

NAME = "team/model"
STARTS_S_MAX = 90.0
"""Detects a hang only: a busy machine may pause this process for seconds."""
CONTENT = as_gguf(hashlib.shake_128(b"weights").digest(70_000))
FILES = {"model.gguf": CONTENT, "sub/adapter-a.gguf": CONTENT[:5000], "LICENSE": b"free\n"}


def model(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    """Creates a folder with these files."""
    for path, content in (FILES if files is None else files).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return folder


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the content of every file below the folder, by its path."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def packed(source: Path, to: Path, form: Form = "modelpack") -> OciLayout:
    """Packs the source folder into a layout."""
    oci_layout.write_layout(to, plan_artifact(source), form, "v1")
    return OciLayout(to)


async def push(client: Client, layout: OciLayout, repository: str = NAME, tag: str = "v1") -> Digest:
    """Pushes the whole layout under a tag; returns the artifact's digest."""
    top = layout.top()
    await _document(client, layout, repository, top, tag)
    return top.digest


async def _document(client: Client, layout: OciLayout, repository: str, of: Descriptor, asked: str) -> None:
    content = layout.document(of)
    found = manifest.parse_manifest(content, content_type=of.media_type, digest=of.digest)
    if isinstance(found, Index):
        for entry in found.entries:
            await _document(client, layout, repository, entry, entry.digest)
    else:
        await _blobs(client, layout, repository, found)
    await pushing.push_manifest(client, repository, asked, content, of.media_type)


async def _blobs(client: Client, layout: OciLayout, repository: str, of: Manifest) -> None:
    for one in {each.digest: each for each in (of.config, *of.layers)}.values():
        source = pushing.FileSource(layout.path(one.digest))
        await pushing.push_blob(client, Blob(repository, one.digest, one.size), source)


@contextlib.contextmanager
def served(layout: Path, seen: list[str] | None = None) -> Iterator[str]:
    """Runs a registry with the layout in a separate thread; yields HOST:PORT. `seen` records later requests."""
    hosts, ready = list[str](), threading.Event()
    ends = list[tuple[asyncio.AbstractEventLoop, Callable[[], None]]]()

    async def serve() -> None:
        async with FakeRegistry().serving() as fake:
            async with Client(Site(fake.host)) as client:
                await push(client, OciLayout(layout))
            if seen is not None:
                fake.judge = lambda request: seen.append(f"{request.method} {request.path}")
            end = asyncio.Event()
            ends.append((asyncio.get_running_loop(), end.set))
            hosts.append(fake.host)
            ready.set()
            await end.wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(STARTS_S_MAX)
        yield hosts[0]
    finally:
        for loop, end in ends:
            loop.call_soon_threadsafe(end)
        thread.join()
