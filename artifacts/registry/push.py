"""Pushes blobs and manifests to a registry: mounted, in one request, or in resumable chunks. I/O.

Blobs are never read into memory as a whole, and content that the registry has is not sent. An upload that the registry
directs to another host goes there without the login.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Protocol

import msgspec
from yarl import URL

from artifacts.digest import Digest, compute_digest, is_digest_of, parse_digest
from artifacts.http.retry import Tries
from artifacts.http.transport import Answer
from artifacts.http.url_policy import resolve_location
from artifacts.oci.manifest import MANIFEST_BYTES_MAX, OCI_INDEX
from artifacts.registry import auth, blobs
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.referrers import Referrer, add_referrer, fetch_tagged_index, format_referrers_tag
from artifacts.registry_errors import BrokenError, MismatchError, PolicyError

PIECE_BYTES = 1 << 20
CHUNK_BYTES_MAX = 1 << 30
"""If a registry's minimum chunk is larger, the blob is sent in one request."""
BINARY = "application/octet-stream"
_UP_TO = re.compile(r"(?:bytes=)?0-([0-9]{1,19})")


class UploadSource(Protocol):
    """The bytes of a blob; read again after a failed attempt."""

    def read(self, first: int, end: int) -> AsyncIterator[bytes]:
        """Yield the bytes from `first` up to (excluding) `end`."""


class FileSource:
    """A file, read in threads."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def read(self, first: int, end: int) -> AsyncGenerator[bytes, None]:
        """Implements `UploadSource`. Raises MismatchError if the file has become shorter."""
        with await asyncio.to_thread(self._path.open, "rb") as file:
            await asyncio.to_thread(file.seek, first)
            while first < end:
                piece = await asyncio.to_thread(file.read, min(PIECE_BYTES, end - first))
                if not piece:
                    raise MismatchError(f"{self._path.name}: became shorter while it was pushed")
                first += len(piece)
                yield piece


class _Blob(msgspec.Struct, frozen=True, rename="camel"):
    digest: str = ""
    media_type: str = ""


class _Manifest(msgspec.Struct, frozen=True, rename="camel"):
    artifact_type: str = ""
    config: _Blob = _Blob()
    annotations: dict[str, str] | None = None
    subject: _Blob | None = None


async def push_blob(client: Client, blob: Blob, source: UploadSource, *, mount: str = "", chunk_bytes: int = 0) -> str:
    """Push a blob; return `exists`, `mounted` (from the repository `mount`) or `pushed`.

    `chunk_bytes`: 0 pushes in one request. Raises DeniedError, MismatchError, PolicyError, UnreachableError.
    """
    scopes = frozenset({auth.push_scope(blob.repository), *([auth.pull_scope(mount)] if mount else [])})
    if await blobs.has_blob(client, blob, scopes=scopes):
        return "exists"
    push = _Push(client, blob, source, scopes)
    tries = Tries(client.pace)
    while True:
        try:
            upload = await push.begin(mount)
            if upload is None:
                return "mounted"
            await (push.chunks(upload, chunk_bytes) if chunk_bytes else push.at_once(upload))
        except BrokenError as error:
            await tries.again(error)
            if await blobs.has_blob(client, blob, scopes=scopes):
                return "pushed"  # the upload succeeded, and only the response was lost
        else:
            return "pushed"


class _Push:
    """The upload of one blob."""

    def __init__(self, client: Client, blob: Blob, source: UploadSource, scopes: frozenset[str]) -> None:
        self._client = client
        self._repository = blob.repository
        self._source = source
        self._digest = parse_digest(blob.digest)
        self._size = blob.size
        self._scopes = scopes
        self._what = str(blob)
        self._chunk_bytes_min = 0

    async def begin(self, mount: str) -> URL | None:
        """Start the upload and return its URL; None if the blob was mounted."""
        query = f"mount={self._digest}&from={mount}" if mount else ""
        if mount:
            self._client.url(mount)  # validates the name
        url = self._client.url(f"{self._repository}/blobs/uploads/", query)
        async with await self._ask("POST", url, {"Content-Length": "0"}) as answer:
            if answer.status == 201 and mount:
                return None
            if answer.status != 202:
                raise await self._client.refused(answer, self._what)
            least = answer.headers.get("OCI-Chunk-Min-Length", "")
            self._chunk_bytes_min = int(least) if least.isascii() and least.isdigit() and len(least) < 19 else 0
            return resolve_location(answer.url, answer.headers.get("Location"))

    async def at_once(self, upload: URL) -> None:
        """Upload everything with one PUT."""
        headers = {"Content-Type": BINARY, "Content-Length": str(self._size)}
        await self._put(upload, headers, 0, self._size)

    async def chunks(self, upload: URL, chunk_bytes: int) -> None:
        """Upload in chunks; after a failure resume at the registry's offset."""
        step = max(chunk_bytes, self._chunk_bytes_min)
        if step > CHUNK_BYTES_MAX:
            await self.at_once(upload)
            return
        at, tries = 0, Tries(self._client.pace)
        while at < self._size:
            end = min(at + step, self._size)
            headers = {"Content-Type": BINARY, "Content-Length": str(end - at), "Content-Range": f"{at}-{end - 1}"}
            try:
                upload, at = await self._patch(upload, headers, at, end)
                tries.progressed()
            except BrokenError as error:
                await tries.again(error)
                upload, at = await self._where(upload)
        await self._put(upload, {"Content-Length": "0"}, self._size, self._size)

    async def _patch(self, upload: URL, headers: dict[str, str], first: int, end: int) -> tuple[URL, int]:
        """Upload a chunk; return the next URL and offset. Raises BrokenError if the chunk was not accepted."""
        async with await self._ask("PATCH", upload, headers, first, end) as answer:
            if answer.status not in {201, 202, 204, 416}:
                raise await self._client.refused(answer, self._what)
            if answer.status != 416:
                upload, at = self._after(answer, upload, end)
                if at > first:
                    return upload, at
        raise BrokenError(f"{self._client.said}: did not accept a chunk of {self._what}")

    async def _where(self, upload: URL) -> tuple[URL, int]:
        """Return the upload's URL and offset from the registry. Raises BrokenError if it must start over."""
        async with await self._ask("GET", upload, {}) as answer:
            if answer.status == 404:
                raise BrokenError(f"{self._client.said}: no longer knows the upload of {self._what}")
            if answer.status != 204:
                raise await self._client.refused(answer, self._what)
            return self._after(answer, upload, 0)

    def _after(self, answer: Answer, upload: URL, end: int) -> tuple[URL, int]:
        """Return the next URL and offset from a response."""
        given = _UP_TO.fullmatch(answer.headers.get("Range", "").strip())
        last = end - 1 if given is None else int(given[1])
        at = 0 if given is not None and last == 0 and end != 1 else last + 1  # 0-0 can also mean nothing received
        if at > self._size:
            raise MismatchError(f"{self._client.said}: reports more bytes of {self._what} than exist")
        location = answer.headers.get("Location")
        return (upload if location is None else resolve_location(answer.url, location)), at

    async def _put(self, upload: URL, headers: dict[str, str], first: int, end: int) -> None:
        mark = "&" if upload.raw_query_string else "?"
        url = URL(f"{upload}{mark}digest={self._digest}", encoded=True)  # keeps the existing query unchanged
        async with await self._ask("PUT", url, headers, first, end) as answer:
            if answer.status not in {201, 204}:
                raise await self._client.refused(answer, self._what)

    async def _ask(self, method: str, url: URL, headers: dict[str, str], first: int = 0, end: int = 0) -> Answer:
        async def body() -> AsyncIterator[bytes]:
            async for piece in self._source.read(first, end):
                yield piece

        given = body if end > first else None
        return await self._client.ask(
            method, url, self._repository, scopes=self._scopes, headers=headers, body=given, once=True
        )


async def push_manifest(client: Client, repository: str, asked: str, body: bytes, media_type: str) -> Digest:
    """Push a manifest by tag or digest. If it has a subject, it is also added to the subject's referrers, even if the
    registry lacks the referrers API. Raises as `push_blob`.
    """
    if len(body) > MANIFEST_BYTES_MAX:
        raise PolicyError(f"manifest {asked} for {repository}: larger than {MANIFEST_BYTES_MAX >> 20} MiB")
    digest, what = compute_digest(body), f"manifest {asked} for {repository}"
    if ":" in asked and not is_digest_of(parse_digest(asked), body):
        raise MismatchError(f"{what}: its bytes do not match its digest")
    found = await client.whole(
        "PUT",
        client.url(f"{repository}/manifests/{asked}"),
        repository,
        scopes=frozenset({auth.push_scope(repository)}),
        headers={"Content-Type": media_type},
        body=body,
        bytes_max=MANIFEST_BYTES_MAX,
        what=what,
    )
    if found.status not in {201, 202}:
        raise client.refusal(found.status, found.body, what)
    said = found.headers.get("Docker-Content-Digest", "")
    if said.startswith("sha256:") and said != digest:
        raise MismatchError(f"{client.said}: {what}: the registry stores it under another digest")
    if "OCI-Subject" not in found.headers:
        await _list(client, repository, digest, body, media_type)
    return digest


async def _list(client: Client, repository: str, digest: Digest, body: bytes, media_type: str) -> None:
    """Add the manifest to its subject's tagged referrers index, for a registry without the API."""
    try:
        read = msgspec.json.decode(body, type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise MismatchError(f"manifest {digest} for {repository}: is not a manifest") from None
    if read.subject is None:
        return
    subject = parse_digest(read.subject.digest)
    kind = read.artifact_type or read.config.media_type
    one = Referrer(media_type, digest, len(body), kind, read.annotations or {})
    was = await fetch_tagged_index(client, repository, subject)
    said = f"{client.said}: tag {format_referrers_tag(subject)} of {repository}"
    await push_manifest(client, repository, format_referrers_tag(subject), add_referrer(was, one, said), OCI_INDEX)
