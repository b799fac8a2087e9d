"""Answers a registry's 401 with a password or with a token from its realm; tokens are cached until they expire. I/O.

Provides the Authorization header for a set of scopes of one registry. Logins are sent only to the registry and to a
realm accepted by `challenge.parse_realm`, whose redirects are not followed. Concurrent requests for the same scopes
share one token request. The response is bounded and checked before it is used in a header.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple

import msgspec
from yarl import URL

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Keychain
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import REDIRECT_STATUSES, Answer, Transport
from artifacts.registry import challenge
from artifacts.registry.challenge import Challenge
from artifacts.registry_errors import BrokenError, DeniedError, PolicyError

TOKEN_BYTES_MAX = 64 << 10
LASTS_S, LASTS_S_MAX = 60.0, 3600.0
"""Lifetime of a token that states none (from the specification), and the maximum."""
EARLY = 0.1
"""A token is renewed when this share of its lifetime remains."""
KEPT_MAX = 1000
"""Maximum sets of scopes with a cached token; the oldest is dropped."""
CLIENT = "pilotlight"
HOW = "log in with `pilotlight weights login`, in a cluster set a pullSecret"
_B64TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

Scopes = frozenset[str]


class _Kept(NamedTuple):
    header: str
    until_s: float


class _Said(msgspec.Struct, frozen=True):
    token: str = ""
    access_token: str = ""
    expires_in: float = 0.0


def pull_scope(repository: str) -> str:
    """Return the scope for pulling from a repository."""
    return f"repository:{repository}:pull"


def push_scope(repository: str) -> str:
    """Return the scope for pushing to a repository."""
    return f"repository:{repository}:pull,push"


class Tokens:
    """The credentials cache of one registry."""

    def __init__(self, transport: Transport, host: str, keychain: Keychain, pace: Pace) -> None:
        self._transport = transport
        self._host = host
        """Host as written in login files."""
        self._keychain = keychain
        self._pace = pace
        self._kept: dict[Scopes, _Kept] = {}
        self._locks: dict[Scopes, asyncio.Lock] = {}

    def header(self, scopes: Scopes) -> str | None:
        """Return the cached, still valid header to send preemptively, or None."""
        found = self._kept.get(scopes)
        return found.header if found is not None and self._pace.monotonic_s() < found.until_s else None

    async def answer(self, headers: list[str], scopes: Scopes, repository: str, refused: str | None) -> str:
        """Return the header to answer a 401; `refused`: the rejected one, if any. Raises DeniedError, PolicyError."""
        async with self._locks.setdefault(scopes, asyncio.Lock()):
            kept = self.header(scopes)
            if kept is not None and kept != refused:
                return kept  # another request renewed it meanwhile
            self._kept.pop(scopes, None)
            found = await self._obtained(challenge.parse_challenges(headers), scopes, repository)
            if found.header == refused:
                raise DeniedError(f"{self._transport.own}: rejects the login for {self._host}")
            while len(self._kept) >= KEPT_MAX:
                oldest = next(iter(self._kept))
                self._kept.pop(oldest)
                self._locks.pop(oldest, None)
            self._kept[scopes] = found
            return found.header

    async def _obtained(self, asked: list[Challenge], scopes: Scopes, repository: str) -> _Kept:
        login = await self._keychain.login(self._host, repository)
        note, login = (f" ({login.note})", None) if login is not None and login.anonymous else ("", login)
        ways = {one.scheme: one for one in reversed(asked)}  # the first challenge of each scheme
        if "bearer" in ways:
            if login is not None and login.registry_token:
                return _Kept("Bearer " + self._token(login.registry_token), self._until_s(LASTS_S))
            return await self._bearer(ways["bearer"], login, scopes, note)
        if "basic" not in ways:
            raise DeniedError(f"{self._transport.own}: requires an unsupported kind of login (not Bearer or Basic)")
        if login is None or not login.user:
            raise DeniedError(
                f"{self._transport.own}: requires a password, and none is stored for {self._host}{note}; {HOW}"
            )
        return _Kept(login.basic, self._until_s(LASTS_S_MAX))

    async def _bearer(self, way: Challenge, login: Login | None, scopes: Scopes, note: str) -> _Kept:
        own = self._transport.own
        realm = challenge.parse_realm(
            way.parameters.get("realm", ""), self._transport.base, self._transport.site.allowed
        )
        service = way.parameters.get("service", "")
        tries, asked_s = Tries(self._pace), self._pace.monotonic_s()
        while True:
            try:
                async with await self._asked(realm, service, login, scopes) as answer:
                    text = await answer.whole(TOKEN_BYTES_MAX, "its response to a login")
                break
            except BrokenError as error:
                await tries.again(error)
                asked_s = self._pace.monotonic_s()
        if answer.status in REDIRECT_STATUSES:
            raise PolicyError(f"{own}: its realm redirects; a login is not forwarded")
        if answer.status != 200:
            what = f"rejects the login for {self._host}" if login else "requires a login"
            raise DeniedError(f"{own}: its realm {what} ({answer.status}){note}" + ("" if login else f"; {HOW}"))
        try:
            said = msgspec.json.decode(text, type=_Said)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise DeniedError(f"{own}: the response of its realm is not a token") from None
        lasts_s = min(max(said.expires_in, 0.0), LASTS_S_MAX) or LASTS_S
        header = "Bearer " + self._token(said.token or said.access_token)
        return _Kept(header, asked_s + lasts_s * (1 - EARLY))

    async def _asked(self, realm: URL, service: str, login: Login | None, scopes: Scopes) -> Answer:
        if login is not None and login.identity_token:
            form = {"grant_type": "refresh_token", "client_id": CLIENT, "service": service}
            form |= {"scope": " ".join(sorted(scopes)), "refresh_token": login.identity_token}
            body = URL.build(query=form).raw_query_string.encode()
            return await self._transport.secret(
                realm, headers={"Content-Type": "application/x-www-form-urlencoded"}, body=body
            )
        query = [("service", service)] if service else []
        url = realm.extend_query([*query, *(("scope", one) for one in sorted(scopes))])
        return await self._transport.secret(url, headers={"Authorization": login.basic} if login and login.user else {})

    def _token(self, text: str) -> str:
        if len(text) > TOKEN_BYTES_MAX or not _B64TOKEN.fullmatch(text):
            raise DeniedError(f"{self._transport.own}: its token has characters that are invalid in a header")
        return text

    def _until_s(self, lasts_s: float) -> float:
        return self._pace.monotonic_s() + lasts_s
