"""A registry, its client and a folder for fetched blobs, with small layouts (see the `artifacts/download` tests)."""

from __future__ import annotations

import contextlib
import hashlib
import ssl
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk
from artifacts.download import blob_download, partial_file, progress_file
from artifacts.download.blob_download import BlobTarget, fetch_blobs
from artifacts.http.transport import Answer as ClientAnswer
from artifacts.http.transport import Limits, Site
from artifacts.oci import blob_progress
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirrored
from tests.support.fakes.registry import Answer, FakeRegistry, StillClock, digest_of, part_of, raw
from tests.support.net.certificates import OURS, leaf, write_authority

NAME = "team/model"
CONTENT = b"".join(hashlib.sha256(b"%d" % n).digest() for n in range(2048))
"""64 KiB: 16 parts of 4 KiB."""
WRONG = bytes(reversed(CONTENT))
PATH = Path("models/a.gguf")


def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets up layouts like those of large blobs: spans of one part each, and a line in the sidecar for each."""
    monkeypatch.setattr(blob_progress, "WHOLE_BYTES_MAX", 16384)
    monkeypatch.setattr(blob_progress, "SMALL_PART_BYTES", 4096)
    monkeypatch.setattr(blob_progress, "PART_BYTES", 4096)
    monkeypatch.setattr(partial_file, "CHECKPOINT_BYTES", 4096)
    monkeypatch.setattr(partial_file, "LAG_BYTES", 4096)
    monkeypatch.setattr(blob_download, "TICK_S", 0.01)
    monkeypatch.setattr(blob_download, "BATCH_BYTES", 3000)


_over: list[tuple[ssl.SSLContext, Callable[[str], Site]]] = []


WAYS = ("spliced", "through us", "unsealed")
"""All ways to copy a body from the socket into the file."""


def go(way: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Selects the way in which bodies are copied; a TLS authority may be created in the folder."""
    if way == "through us":
        monkeypatch.setattr(ClientAnswer, "take", lambda _: None)
    if way != "unsealed":
        return
    served = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    leaf(OURS).configure_cert(served)
    authority = write_authority(folder, OURS)
    monkeypatch.setattr(
        sys.modules[__name__], "_over", [(served, lambda host: Site(host, plain_http=False, ca=authority))]
    )


class Place:
    """A registry, a client of it that never waits, and a folder."""

    def __init__(self, fake: FakeRegistry, client: Client, folder: Path) -> None:
        self.fake = fake
        self.client = client
        self.folder = folder
        self.source = Mirrored(client)
        self.received: list[int] = []

    def wanted(self, content: bytes = CONTENT, path: Path = PATH) -> BlobTarget:
        return BlobTarget(Blob(NAME, Digest(self.fake.blob(content)), len(content)), path)

    def url(self, content: bytes = CONTENT) -> tuple[str, str]:
        return "GET", f"/v2/{NAME}/blobs/{digest_of(content)}"

    def next(self, *answers: Answer) -> None:
        self.fake.answers[self.url()].extend(answers)

    async def fetch(self, *wanted: BlobTarget, disk: Disk | None = None) -> None:
        await fetch_blobs(
            wanted or [self.wanted()],
            self.source,
            self.folder,
            lambda _, came: self.received.append(came),
            file_system=disk,
        )

    def file(self) -> bytes | None:
        path = self.folder / PATH
        return path.read_bytes() if path.exists() else None

    def ranges(self) -> list[str | None]:
        return [one.headers.get("range") for one in self.fake.asked("GET", "/blobs/")]

    def left(self) -> list[str]:
        return sorted(path.name for path in (self.folder / "partial").iterdir())


@contextlib.asynccontextmanager
async def place(folder: Path, limits: Limits | None = None) -> AsyncIterator[Place]:
    over, site = _over[0] if _over else (None, Site)
    async with (
        FakeRegistry().serving(over) as fake,
        Client(site(fake.host), limits=limits or Limits(), pace=StillClock()) as client,
    ):
        yield Place(fake, client, folder)


async def answer_part(request: web.Request, content: bytes) -> web.StreamResponse:
    return part_of(request, content)


def breaking(one: Place, end: str) -> Answer:
    async def answer(request: web.Request) -> web.StreamResponse:
        first, last = (int(text) for text in request.headers["Range"].removeprefix("bytes=").split("-"))
        head = (
            f"HTTP/1.1 206 OK\r\nContent-Length: {last + 1 - first}\r\n"
            f"Content-Range: bytes {first}-{last}/{len(CONTENT)}\r\n\r\n"
        )
        return await raw(one.fake, head.encode() + CONTENT[first : first + 1000], end)(request)

    return answer


def leave(folder: Path, blob: Blob, content: bytes, done: range) -> None:
    """Creates the files that an earlier process left."""
    (folder / "partial").mkdir(exist_ok=True)
    (folder / "partial" / blob.digest).write_bytes(content)
    text = progress_file.format_header(blob.digest, blob.size, 4096) + progress_file.format_parts(done)
    (folder / "partial" / f"{blob.digest}.parts").write_bytes(text)
