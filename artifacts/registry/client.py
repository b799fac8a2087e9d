"""Requests to one registry: with its login, and again where that is worth it. I/O.

Owns when a 401 is answered and when a request is repeated; how it travels is `transport`'s, what it means is
`registry`'s, `blobs`' and `pushing`'s.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from types import TracebackType
from typing import NamedTuple, Self

import msgspec
from multidict import CIMultiDictProxy
from yarl import URL

from artifacts import digest as digests
from artifacts.credentials.keychain import Chain, Keychain
from artifacts.digest import Digest
from artifacts.errors import AbsentError, BrokenError, DeniedError, MismatchError, PolicyError, RegistryError
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Answer, Body, Limits, Site, Transport
from artifacts.registry.auth import Scopes, Tokens, pull_scope

LOGINS_MAX = 2
"""Of one request: a token that ended meanwhile, and one more where that one is refused, too."""
ERROR_BYTES_MAX = 64 << 10
WARNINGS_MAX = 100
WARNING_CHARS_MAX = 200
_PATH = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._:-]*(?:/[A-Za-z0-9_][A-Za-z0-9._:-]*)*/?")
"""Each part begins with a letter or digit: none is `..`."""
_CODE = re.compile(r"[A-Z]+(?:_[A-Z]+){0,4}")
_WARNING = re.compile(r'299 - "((?:[^"\\]|\\.)*)"')

log = logging.getLogger("pilotlight.registry")


class _Fault(msgspec.Struct, frozen=True):
    code: str = ""


class _Faults(msgspec.Struct, frozen=True):
    errors: list[_Fault] = []


class RegistryResponse(NamedTuple):
    """An answer that was read to its end."""

    status: int
    headers: CIMultiDictProxy[str]
    body: bytes


class Client:
    """Of one registry. Use as `async with`."""

    def __init__(
        self, site: Site, keychain: Keychain | None = None, *, limits: Limits | None = None, pace: Pace | None = None
    ) -> None:
        self.transport = Transport(site, limits)
        self.limits = limits or Limits()
        self.pace = pace or Pace()
        self.tokens = Tokens(self.transport, site.host, keychain or Chain(), self.pace)
        self.said = str(self.transport.own)
        """What errors call it."""
        self._warned: set[str] = set()

    async def __aenter__(self) -> Self:
        await self.transport.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.transport.__aexit__(kind, error, trace)

    def url(self, path: str, query: str = "") -> URL:
        """Of something under /v2/. Raises PolicyError where the path is none that may stand there."""
        if not _PATH.fullmatch(path):
            raise PolicyError(f"{self.said}: {path[:80]!r} is no repository, tag or digest")
        return URL(f"{self.transport.base}v2/{path}{'?' if query else ''}{query}", encoded=True)

    def blob_url(self, repository: str, digest: Digest) -> URL:
        """Of a blob. Raises PolicyError."""
        return self.url(f"{repository}/blobs/{digests.parse_digest(digest)}")

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
        """An answer that is neither a 401 nor worth another try. `once`: raises BrokenError instead of trying again."""
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
                raise DeniedError(f"{self.said}: refuses the login that there is for {self.transport.site.host}")
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
    ) -> RegistryResponse:
        """An answer with its body. Raises PolicyError where that is larger than `bytes_max`."""
        tries = Tries(self.pace)
        while True:
            answer = await self.ask(method, url, repository, scopes=scopes, headers=headers, body=body, tries=tries)
            try:
                async with answer:
                    if answer.status >= 300:
                        return RegistryResponse(answer.status, answer.headers, await _fault(answer))
                    text = b"" if method == "HEAD" else await answer.whole(bytes_max, what)
                    return RegistryResponse(answer.status, answer.headers, text)
            except BrokenError as error:
                await tries.again(error)

    def refusal(self, status: int, body: bytes, what: str) -> RegistryError:
        """The error for an answer that is none of those that were hoped for."""
        code = _code(body)
        said = f"{self.said}: {what}: answered {status}{' ' + code if code else ''}"
        if status == 404:
            return AbsentError(f"{self.said}: there is no {what}")
        if status in {401, 403}:
            return DeniedError(f"{said}; the login for {self.transport.site.host} has no right to it")
        if code in {"DIGEST_INVALID", "SIZE_INVALID"}:
            return MismatchError(said)
        return RegistryError(said)

    async def refused(self, answer: Answer, what: str) -> RegistryError:
        """As `refusal`, of an answer that is still open."""
        return self.refusal(answer.status, await _fault(answer), what)

    def _warn(self, answer: Answer) -> None:
        for header in answer.headers.getall("Warning", []):
            found = _WARNING.fullmatch(header.strip())
            if answer.foreign or found is None or len(self._warned) >= WARNINGS_MAX:
                continue
            text = found[1][:WARNING_CHARS_MAX]
            if text not in self._warned:
                self._warned.add(text)
                log.warning("event=registry_warning registry=%s text=%r", self.said, _shown(text))


async def _fault(answer: Answer) -> bytes:
    """The body of a refusal; nothing where it is too large or breaks: the status says enough."""
    try:
        return await answer.whole(ERROR_BYTES_MAX, "an error")
    except (BrokenError, PolicyError):
        return b""


def _code(body: bytes) -> str:
    """The specification's word, where there is one; the message beside it is the server's own, and not shown."""
    try:
        found = msgspec.json.decode(body, type=_Faults).errors
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return found[0].code if found and len(found[0].code) < 40 and _CODE.fullmatch(found[0].code) else ""


def _shown(text: str) -> str:
    """Without what may be a query of a URL, or a long secret."""
    return re.sub(r"\?\S*|[A-Za-z0-9._~+/=-]{40,}", "...", text)
