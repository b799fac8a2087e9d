"""HTTP client for file hosts that are not registries, which exposes their files as blobs. I/O.

Handles retries and sends credentials through the common transport. Authentication, file URLs and the meaning of errors
are specific to each host (`artifacts.sources.huggingface`, `artifacts.sources.s3`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple, Self

from yarl import URL

from artifacts.digest import Digest
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Answer, CompleteResponse, Limits, Site, Transport
from artifacts.http.url_policy import get_origin
from artifacts.registry import blobs
from artifacts.registry.blobs import Blob, Sink
from artifacts.registry_errors import AbsentError, BrokenError, DeniedError, MismatchError, RegistryError

Prove = Callable[[str, URL, Mapping[str, str]], Awaitable[Mapping[str, str]]]
"""(method, URL, headers) -> the headers that are sent only to the host itself, such as credentials."""
Explain = Callable[[int, Mapping[str, str], bytes], str]
"""(status, headers, body) of an error -> its meaning and the fix, without the host's own text."""


class Rules(NamedTuple):
    """How a host is accessed."""

    limits: Limits
    pace: Pace
    ca: Path | None = None
    """CA certificates trusted in addition to the system's."""


class FileHost:
    """A host at one origin; implements `blobs.Giver`. Use as an async context manager."""

    def __init__(self, base: URL, prove: Prove, explain: Explain, rules: Rules) -> None:
        """`base`: its origin and path prefix, checked by the caller."""
        self.base = base
        self.limits, self.pace, ca = rules
        self._prove, self._explain = prove, explain
        self.transport = Transport(Site(str(get_origin(base)), plain_http=base.scheme == "http", ca=ca), self.limits)
        self.said = str(self.transport.own)
        self._files: dict[Digest, URL] = {}
        self._belongs: dict[URL, Mapping[str, str]] = {}
        self.follow = True

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.transport.__aexit__(*error)

    def url(self, path: str, query: str = "") -> URL:
        """Build a URL below the base; path and query must be encoded."""
        return URL(f"{str(self.base).rstrip('/')}/{path}{'?' if query else ''}{query}", encoded=True)

    def blob_url(self, repository: str, digest: Digest) -> URL:  # noqa: ARG002 -- required by Giver
        """See `Giver.blob_url`."""
        return self._files[digest]

    def has(self, digest: Digest, url: URL, headers: Mapping[str, str] | None = None) -> None:
        """Register the URL and request headers of the blob with this digest."""
        self._files[digest] = url
        self._belongs[url] = headers or {}

    def also(self, digest: Digest, name: Digest) -> None:
        """Register `name` as another name of a registered blob."""
        self._files[name] = self._files[digest]

    async def ask(
        self,
        method: str,
        url: URL,
        repository: str,  # noqa: ARG002 -- required by Giver
        *,
        headers: Mapping[str, str] | None = None,
        tries: Tries | None = None,
        follow: bool | None = None,
    ) -> Answer:
        """See `Giver.ask`."""
        tries = tries or Tries(self.pace)
        sent = {**(headers or {}), **self._belongs.get(url, {})}
        while True:
            own = await self._prove(method, url, sent)
            try:
                follows = self.follow if follow is None else follow
                answer = await self.transport.ask(method, url, own=own, headers=sent, follow=follows)
            except BrokenError as error:
                await tries.again(error)
                continue
            if answer.status in {200, 206} and sent.get("If-Match", "") != _etag(answer, sent):
                async with answer:  # some stores ignore If-Match
                    raise MismatchError(f"{self.said}: the file changed while it was pulled; pull again")
            return answer

    async def whole(
        self, method: str, url: URL, *, bytes_max: int, what: str, headers: Mapping[str, str] | None = None
    ) -> CompleteResponse:
        """Return a response with its body, of any status. Raises PolicyError if the body is larger than `bytes_max`."""
        tries = Tries(self.pace)
        while True:
            answer = await self.ask(
                method, url, "", headers=headers, tries=tries, follow=self.follow and method == "GET"
            )
            try:
                async with answer:
                    if answer.status >= 300:
                        return CompleteResponse(answer.status, answer.headers, await answer.fault())
                    body = b"" if method == "HEAD" else await answer.whole(bytes_max, what)
                    return CompleteResponse(answer.status, answer.headers, body)
            except BrokenError as error:
                await tries.again(error)

    def refusal(self, found: CompleteResponse, what: str) -> RegistryError:
        """Build the error for an unexpected status."""
        why = self._explain(found.status, found.headers, found.body)
        said = f"{self.said}: {what}: answered {found.status}{'; ' if why else ''}{why}"
        if found.status == 412:
            return MismatchError(f"{self.said}: {what} changed while it was pulled; pull again")
        if found.status in {401, 403}:
            return DeniedError(said)
        if found.status == 404:
            return AbsentError(f"{self.said}: there is no {what}{'; ' if why else ''}{why}")
        return RegistryError(said)

    async def refused(self, answer: Answer, what: str) -> RegistryError:
        """See `Giver.refused`."""
        return self.refusal(CompleteResponse(answer.status, answer.headers, await answer.fault()), what)


class Lone:
    """A `blobs.BlobSource` with a single host."""

    def __init__(self, place: FileHost) -> None:
        self._place = place

    @property
    def lonely(self) -> bool:
        """See `BlobSource.lonely`."""
        return True

    @property
    def limits(self) -> Limits:
        """See `BlobSource.limits`."""
        return self._place.limits

    def doubted(self, blob: Blob) -> Lone:
        """See `BlobSource.doubted`."""
        del blob
        return self

    def order(self, what: str, count: int) -> list[int]:
        """See `BlobSource.order`."""
        del what
        return list(range(count))

    async def read(
        self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
    ) -> AsyncGenerator[bytes, None]:
        """Like `blobs.stream_blob` without `check`, since the digest may be a placeholder here."""
        async with aclosing(blobs.stream_blob(self._place, blob, first, end, sink, check=False)) as pieces:
            async for piece in pieces:
                yield piece


def _etag(answer: Answer, sent: Mapping[str, str]) -> str:
    """Return the response's ETag if the request had If-Match, ignoring weakness added by a compressing proxy."""
    return answer.headers.get("ETag", "none").removeprefix("W/") if "If-Match" in sent else ""
