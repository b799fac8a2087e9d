"""Blobs as streams: in parts, on after breaks, checked. I/O.

Owns the reading of one blob or a part of it. Promises: exactly the bytes asked for, or an error; of a whole blob also
that its digest holds, so that nothing may be used before the stream has ended without one; each try begins at the
registry, so that a presigned URL that has ended does no harm. `urls` of descriptors are never asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from typing import NamedTuple, Protocol

from yarl import URL

from artifacts import digest as digests
from artifacts.digest import Digest
from artifacts.errors import BrokenError, MismatchError, RegistryError
from artifacts.http import ranges
from artifacts.http.ranges import Part
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Answer, DetachedBody, Limits
from artifacts.registry.client import Client

PROGRESS_BYTES = 1 << 20
"""So much in one try, and the tries are counted anew."""
ENDED = frozenset({400, 401, 403, 410})
"""What stores answer to a presigned URL whose time is over."""


class Blob(NamedTuple):
    """A descriptor's claim about bytes in a repository."""

    repository: str
    digest: Digest
    size: int

    def __str__(self) -> str:
        """As errors call it."""
        return f"blob {self.digest} of {self.repository}"


class Moved(NamedTuple):
    """How many bytes of a body went where they belong, and why no more; empty: all of it did."""

    came: int
    broken: str = ""


class Giver(Protocol):
    """Who gives blobs: the client of a registry, or of what is none."""

    said: str
    """What errors call it."""
    limits: Limits
    pace: Pace

    def blob_url(self, repository: str, digest: Digest) -> URL:
        """Where it has it. Raises PolicyError."""
        ...

    async def ask(
        self, method: str, url: URL, repository: str, *, headers: Mapping[str, str] | None = None, tries: Tries
    ) -> Answer:
        """As `Client.ask`."""
        ...

    async def refused(self, answer: Answer, what: str) -> RegistryError:
        """As `Client.refused`."""
        ...


class Sink(Protocol):
    """Somebody who sums the bytes itself, and can move a body without their going through `stream_blob`."""

    async def move(self, at: int, body: DetachedBody) -> Moved:
        """A body that begins at byte `at` of the blob; closes it."""
        ...

    def broke(self, error: BrokenError) -> None:
        """A try failed; another may follow."""
        ...


async def has_blob(client: Client, blob: Blob, *, scopes: frozenset[str] | None = None) -> bool:
    """The registry has this blob in this repository."""
    url = client.blob_url(blob.repository, blob.digest)
    found = await client.whole("HEAD", url, blob.repository, bytes_max=0, what="a blob", scopes=scopes)
    if found.status == 404:
        return False
    if found.status != 200:
        raise client.refusal(found.status, found.body, str(blob))
    return True


class BlobSource(Protocol):
    """Where blobs come from: a registry with its mirrors, or something else that has them."""

    @property
    def lonely(self) -> bool:
        """There is one place only."""
        ...

    @property
    def limits(self) -> Limits:
        """How long answers may take."""
        ...

    def doubted(self, blob: Blob) -> BlobSource:
        """Bytes of this blob were others than its digest says: whom to ask for all of it now."""
        ...

    def order(self, what: str, count: int) -> list[int]:
        """In which order so many blobs, or parts of one, are asked for; `what` names them."""
        ...

    def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """As `blobs.stream_blob`."""
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
    """Bytes `first` up to, and without, `end` of a blob; close it (`contextlib.aclosing`) to stop.

    With a `sink`, bodies that it can move go there and only the others' bytes come here, and nothing is summed; neither
    without `check`, for a digest that is only a name.
    Raises AbsentError, DeniedError, MismatchError, PolicyError, UnreachableError.
    """
    repository, digest, size = blob
    wanted = Part(first, size if end is None else end, size)
    if not 0 <= wanted.first <= wanted.end <= size:
        raise ValueError(f"bytes {wanted.first} to {wanted.end} are no part of {size}")
    url, said = client.blob_url(repository, digest), f"{client.said}: {blob}"
    summed = hashlib.new(digests.get_algorithm(digest)) if wanted.whole and sink is None and check else None
    tries, at, in_parts = Tries(client.pace, None if sink is None else sink.broke), wanted.first, True
    while at < wanted.end:
        part = Part(at, wanted.end, size)
        asks = in_parts and not part.whole
        headers = {"Range": part.header} if asks else {}
        answer = await client.ask("GET", url, repository, headers=headers, tries=tries)
        try:
            async with answer:
                if asks and answer.status == 416:
                    in_parts = False  # it gives no parts, or has less: the whole of it shows which
                    continue
                await _judge(client, answer, blob)
                skip = ranges.validate_range_response(part, answer.status, answer.headers, asks, said)
                body = answer.take() if sink is not None and _exact(part, answer) else None
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
    if summed is not None and summed.hexdigest() != digests.get_hex(digest):
        raise MismatchError(f"{said}: its bytes are others than its digest says; nothing of it is kept")


def _exact(part: Part, answer: Answer) -> bool:
    """The answer is the part and nothing else: it says its length, which was judged."""
    return (answer.status == 206 or part.whole) and "Content-Length" in answer.headers


def _unbroken(answer: Answer, moved: Moved) -> None:
    if moved.broken:
        raise BrokenError(f"{answer.said}: {moved.broken}")


async def _judge(client: Giver, answer: Answer, blob: Blob) -> None:
    if answer.status in {200, 206}:
        return
    if answer.foreign and answer.status in ENDED:
        raise BrokenError(f"{answer.said}: answered {answer.status} to what the registry sent us to")
    raise await client.refused(answer, str(blob))


async def _kept(
    chunks: AsyncIterator[bytes], part: Part, skip: int, status: int, said: str
) -> AsyncGenerator[bytes, None]:
    """The part's bytes out of an answer that begins `skip` bytes before it."""
    left = part.end - part.first
    goes_on = status == 200 and part.end < part.size
    async for chunk in chunks:
        if skip >= len(chunk):
            skip -= len(chunk)
            continue
        piece, skip = chunk[skip:], 0
        if len(piece) > left:
            if not goes_on:
                raise MismatchError(f"{said}: the registry gives more of it than there should be")
            piece = piece[:left]
        left -= len(piece)
        if piece:
            yield piece
        if not left and goes_on:
            return  # an answer without ranges has more behind the part
    if left:
        raise MismatchError(f"{said}: the registry has less of it than there should be ({left} bytes are missing)")


async def _in_time(client: Giver, answer: Answer, chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Chunks; only the time that the registry takes counts, not the reader's. Raises BrokenError."""
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
                raise BrokenError(f"{answer.said}: gives only {came} bytes in {waited_s:.0f} s")
            waited_s, came = 0.0, 0
        yield chunk
