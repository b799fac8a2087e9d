"""HTTP client of one registry, with authentication and retries. I/O.

Decides when to answer a 401 and when to retry. `artifacts.http.transport` sends the requests; `manifests`, `blobs` and
`push` interpret the responses.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Self

import msgspec
from yarl import URL

from artifacts.credentials.keychain import Chain, Keychain
from artifacts.digest import Digest, parse_digest
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Answer, Body, CompleteResponse, Limits, Site, Transport
from artifacts.registry.auth import Scopes, Tokens, pull_scope
from artifacts.registry_errors import AbsentError, BrokenError, DeniedError, MismatchError, PolicyError, RegistryError

LOGINS_MAX = 2
"""Maximum logins per request: one for a token that just expired, and one more if the new token is rejected."""
WARNINGS_MAX = 100
WARNING_CHARS_MAX = 200
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_][A-Za-z0-9._:-]*)*/?")
"""Each component begins with a letter, a digit or _, so none is `..`."""
_CODE = re.compile(r"[A-Z]+(?:_[A-Z]+){0,4}")
_WARNING = re.compile(r'299 - "((?:[^"\\]|\\.)*)"')

log = logging.getLogger("pilotlight.artifacts.registry")


class _Fault(msgspec.Struct, frozen=True):
    code: str = ""


class _Faults(msgspec.Struct, frozen=True):
    errors: list[_Fault] = []


class Client:
    """The client of one registry. Use as an async context manager."""

    def __init__(
        self, site: Site, keychain: Keychain | None = None, *, limits: Limits | None = None, pace: Pace | None = None
    ) -> None:
        self.transport = Transport(site, limits)
        self.limits = limits or Limits()
        self.pace = pace or Pace()
        self.tokens = Tokens(self.transport, site.host, keychain or Chain(), self.pace)
        self.said = str(self.transport.own)
        """Name used in errors."""
        self._warned: set[str] = set()

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.transport.__aexit__(*error)

    def url(self, path: str, query: str = "") -> URL:
        """Build a URL below /v2/. Raises PolicyError if the path is invalid."""
        if not _PATH.fullmatch(path):
            raise PolicyError(f"{self.said}: {path[:80]!r} is not a repository, tag or digest")
        return URL(f"{self.transport.base}v2/{path}{'?' if query else ''}{query}", encoded=True)

    def blob_url(self, repository: str, digest: Digest) -> URL:
        """Build the URL of a blob. Raises PolicyError."""
        return self.url(f"{repository}/blobs/{parse_digest(digest)}")

    async def ask(
        self,
        method: str,
        url: URL,
        repository: str,
        *,
        scopes: Scopes | None = None,
        headers: Mapping[str, str] | None = None,
        body: Body | None = None,
        tries: Tries | None = None,
        once: bool = False,
    ) -> Answer:
        """Return a response that is no 401 and not worth a retry. `once`: raise BrokenError instead of retrying."""
        tries, logins = tries or Tries(self.pace), 0
        scopes = frozenset({pull_scope(repository)}) if scopes is None else scopes
        sent = self.tokens.header(scopes)
        while True:
            own = {} if sent is None else {"Authorization": sent}
            try:
                answer = await self.transport.ask(method, url, own=own, headers=headers, body=body)
            except BrokenError as error:
                if once:
                    raise
                await tries.again(error)
                sent = self.tokens.header(scopes)
                continue
            self._warn(answer)
            if answer.status != 401 or answer.foreign:
                return answer
            async with answer:
                asked = answer.headers.getall("WWW-Authenticate", [])
            logins += 1
            if logins > LOGINS_MAX:
                raise DeniedError(f"{self.said}: rejects the login for {self.transport.site.host}")
            sent = await self.tokens.answer(asked, scopes, repository, sent)

    async def whole(
        self,
        method: str,
        url: URL,
        repository: str,
        *,
        bytes_max: int,
        what: str,
        scopes: Scopes | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> CompleteResponse:
        """Return a response with its body. Raises PolicyError if the body is larger than `bytes_max`."""
        tries = Tries(self.pace)
        while True:
            answer = await self.ask(method, url, repository, scopes=scopes, headers=headers, body=body, tries=tries)
            try:
                async with answer:
                    if answer.status >= 300:
                        return CompleteResponse(answer.status, answer.headers, await answer.fault())
                    text = b"" if method == "HEAD" else await answer.whole(bytes_max, what)
                    return CompleteResponse(answer.status, answer.headers, text)
            except BrokenError as error:
                await tries.again(error)

    def refusal(self, status: int, body: bytes, what: str) -> RegistryError:
        """Build the error for an unexpected status."""
        code = _code(body)
        said = f"{self.said}: {what}: answered {status}{' ' + code if code else ''}"
        if status == 404:
            return AbsentError(f"{self.said}: there is no {what}")
        if status in {401, 403}:
            return DeniedError(f"{said}; the login for {self.transport.site.host} has no permission for it")
        if code in {"DIGEST_INVALID", "SIZE_INVALID"}:
            return MismatchError(said)
        return RegistryError(said)

    async def refused(self, answer: Answer, what: str) -> RegistryError:
        """As `refusal`, for a response that is still open."""
        return self.refusal(answer.status, await answer.fault(), what)

    def _warn(self, answer: Answer) -> None:
        for header in answer.headers.getall("Warning", []):
            found = _WARNING.fullmatch(header.strip())
            if answer.foreign or found is None or len(self._warned) >= WARNINGS_MAX:
                continue
            text = found[1][:WARNING_CHARS_MAX]
            if text not in self._warned:
                self._warned.add(text)
                log.warning("event=registry_warning registry=%s message=%r", self.said, _shown(text))


def _code(body: bytes) -> str:
    """Return the specification's error code, if any; the server's own message is not shown."""
    try:
        found = msgspec.json.decode(body, type=_Faults).errors
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return found[0].code if found and len(found[0].code) < 40 and _CODE.fullmatch(found[0].code) else ""


def _shown(text: str) -> str:
    """Remove what may be a URL query or a long secret."""
    return re.sub(r"\?\S*|[A-Za-z0-9._~+/=-]{40,}", "...", text)
