"""Streams blobs from a registry: ranges, resumption after failures, and verification. I/O.

Returns exactly the requested bytes or an error. A whole blob is verified against its digest, so nothing may be used
before the stream ends without an error. Each attempt starts at the registry, so that an expired presigned URL does no
harm. `urls` in descriptors are never contacted.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import NamedTuple, Protocol

from yarl import URL

from artifacts.digest import Digest, get_algorithm, get_hex
from artifacts.http.ranges import Part, validate_range_response
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Answer, DetachedBody, Limits
from artifacts.registry.client import Client
from artifacts.registry_errors import BrokenError, MismatchError, RegistryError

PROGRESS_BYTES = 1 << 20
"""After this much progress in one attempt the retry counter is reset."""
ENDED = frozenset({400, 401, 403, 410})
"""Statuses with which storage services answer expired presigned URLs."""


class Blob(NamedTuple):
    """A blob in a repository, as a descriptor states it."""

    repository: str
    digest: Digest
    size: int

    def __str__(self) -> str:
        """Format the blob as named in errors."""
        return f"blob {self.digest} of {self.repository}"


class Moved(NamedTuple):
    """How many bytes of a body were moved, and the failure; empty if the body is complete."""

    came: int
    broken: str = ""


class Giver(Protocol):
    """A provider of blobs: the client of a registry or of another source."""

    said: str
    """Name used in errors."""
    limits: Limits
    pace: Pace

    def blob_url(self, repository: str, digest: Digest) -> URL:
        """Return the URL of a blob. Raises PolicyError."""
        ...

    async def ask(
        self, method: str, url: URL, repository: str, *, headers: Mapping[str, str] | None = None, tries: Tries
    ) -> Answer:
        """See `Client.ask`."""
        ...

    async def refused(self, answer: Answer, what: str) -> RegistryError:
        """See `Client.refused`."""
        ...


class Sink(Protocol):
    """Receives bodies directly, bypassing `stream_blob`, and verifies the bytes itself."""

    async def move(self, at: int, body: DetachedBody) -> Moved:
        """Move a body that starts at byte `at` of the blob; closes it."""
        ...

    def broke(self, error: BrokenError) -> None:
        """Called after a failed attempt, which may be retried."""
        ...


async def has_blob(client: Client, blob: Blob, *, scopes: frozenset[str] | None = None) -> bool:
    """Whether the registry has this blob in this repository."""
    url = client.blob_url(blob.repository, blob.digest)
    found = await client.whole("HEAD", url, blob.repository, bytes_max=0, what="a blob", scopes=scopes)
    if found.status == 404:
        return False
    if found.status != 200:
        raise client.refusal(found.status, found.body, str(blob))
    return True


class BlobSource(Protocol):
    """A source of blobs: a registry with its mirrors, or another one."""

    @property
    def lonely(self) -> bool:
        """Whether there is only one place to fetch from."""
        ...

    @property
    def limits(self) -> Limits:
        """Timeouts of responses."""
        ...

    def doubted(self, blob: Blob) -> BlobSource:
        """Return the source to use after the blob's digest did not match."""
        ...

    def order(self, what: str, count: int) -> list[int]:
        """Return the order in which `count` blobs, or parts of one, are requested; `what` names them."""
        ...

    def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """See `stream_blob`."""
        ...


async def stream_blob(
    client: Giver,
    blob: Blob,
    first: int = 0,
    end: int | None = None,
    sink: Sink | None = None,
    *,
    check: bool = True,
) -> AsyncGenerator[bytes, None]:
    """Yield the bytes from `first` up to (excluding) `end` of a blob; close it (`contextlib.aclosing`) to stop.

    A `sink` receives the bodies that can be moved, and only the bytes of other bodies are yielded. A whole blob is
    verified, except with a `sink`, or if `check` is false because the digest is a placeholder. Raises AbsentError,
    DeniedError, MismatchError, PolicyError, UnreachableError.
    """
    repository, digest, size = blob
    wanted = Part(first, size if end is None else end, size)
    if not 0 <= wanted.first <= wanted.end <= size:
        raise ValueError(f"bytes {wanted.first} to {wanted.end} are not a part of {size}")
    url, said = client.blob_url(repository, digest), f"{client.said}: {blob}"
    summed = hashlib.new(get_algorithm(digest)) if wanted.whole and sink is None and check else None
    tries, at, in_parts = Tries(client.pace, None if sink is None else sink.broke), wanted.first, True
    while at < wanted.end:
        part = Part(at, wanted.end, size)
        asks = in_parts and not part.whole
        headers = {"Range": part.header} if asks else {}
        answer = await client.ask("GET", url, repository, headers=headers, tries=tries)
        try:
            async with answer:
                if asks and answer.status == 416:
                    in_parts = False  # no range support, or the blob is shorter: the full response shows which
                    continue
                await _judge(client, answer, blob)
                skip = validate_range_response(part, answer.status, answer.headers, asks, said)
                exact = (answer.status == 206 or part.whole) and "Content-Length" in answer.headers
                body = answer.take() if sink is not None and exact else None
                if sink is not None and body is not None:
                    moved = await sink.move(at, body)
                    at += moved.came
                    if at - part.first >= PROGRESS_BYTES:
                        tries.progressed()
                    _unbroken(answer, moved)
                    continue
                async with (
                    aclosing(answer.chunks()) as chunks,
                    aclosing(_in_time(client, answer, chunks)) as timed,
                    aclosing(_kept(timed, part, skip, answer.status, said)) as pieces,
                ):
                    async for piece in pieces:
                        at += len(piece)
                        if at - part.first >= PROGRESS_BYTES:
                            tries.progressed()
                        if summed is not None:
                            summed.update(piece)
                        yield piece
        except BrokenError as error:
            await tries.again(error)
    if summed is not None and summed.hexdigest() != get_hex(digest):
        raise MismatchError(f"{said}: its bytes do not match its digest; nothing is kept")


def _unbroken(answer: Answer, moved: Moved) -> None:
    if moved.broken:
        raise BrokenError(f"{answer.said}: {moved.broken}")


async def _judge(client: Giver, answer: Answer, blob: Blob) -> None:
    if answer.status in {200, 206}:
        return
    if answer.foreign and answer.status in ENDED:
        raise BrokenError(f"{answer.said}: answered {answer.status} after a redirect by the registry")
    raise await client.refused(answer, str(blob))


async def _kept(
    chunks: AsyncIterator[bytes], part: Part, skip: int, status: int, said: str
) -> AsyncGenerator[bytes, None]:
    """Yield the part's bytes from a response that starts `skip` bytes before it."""
    left = part.end - part.first
    goes_on = status == 200 and part.end < part.size
    async for chunk in chunks:
        if skip >= len(chunk):
            skip -= len(chunk)
            continue
        piece, skip = chunk[skip:], 0
        if len(piece) > left:
            if not goes_on:
                raise MismatchError(f"{said}: the registry returned more bytes than expected")
            piece = piece[:left]
        left -= len(piece)
        if piece:
            yield piece
        if not left and goes_on:
            return  # a response without ranges continues after the part
    if left:
        raise MismatchError(f"{said}: the registry returned fewer bytes than expected ({left} bytes are missing)")


async def _in_time(client: Giver, answer: Answer, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield chunks; only the time spent waiting for the registry counts, not the reader's. Raises BrokenError."""
    limits = client.limits
    waited_s, came = 0.0, 0
    while True:
        asked_s = client.pace.monotonic_s()
        chunk = await anext(chunks, None)
        if chunk is None:
            return
        waited_s += client.pace.monotonic_s() - asked_s
        came += len(chunk)
        if waited_s >= limits.pace_s:
            if came < limits.pace_bytes:
                raise BrokenError(f"{answer.said}: sent only {came} bytes in {waited_s:.0f} s")
            waited_s, came = 0.0, 0
        yield chunk
