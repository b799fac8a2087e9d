"""Interface of a cloud provider that issues short-lived logins for its registries, and their cache. I/O.

A login is requested once for all concurrent callers and renewed shortly before it expires. If the cloud is unreachable,
all callers that waited for that attempt fail. If the cloud refuses a login, callers get an anonymous login whose note
states the refusal. A login is used only for the host for which it was issued.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

import msgspec
from yarl import URL

from artifacts.credentials.docker_config import Login
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Limits, Site, Transport
from artifacts.http.url_policy import get_origin
from artifacts.registry_errors import BrokenError, DeniedError, RegistryError, UnreachableError

T = TypeVar("T")

EARLY_S, EARLY = 300.0, 0.2
"""A login is renewed `EARLY_S` seconds before it expires. If the share `EARLY` of its lifetime is less, it is renewed
that much earlier than its end."""
KEPT_MAX = 100
"""Maximum number of registries with a cached login; the oldest is dropped."""
ANSWER_BYTES_MAX = 64 << 10
ABSENT_S = 30.0
"""Cache time for a missing identity. It is short, since a new pod may start before its cloud's identity service."""


class Granted(NamedTuple):
    """A login and its lifetime; an anonymous login (`Login.anonymous`) carries a note instead of credentials."""

    login: Login
    lasts_s: float


class Cloud(Protocol):
    """One cloud provider."""

    def applies(self, host: str) -> bool:
        """Return whether the host is a registry of this cloud."""

    async def fetch(self, host: str) -> Granted:
        """Request a new login. Raises RegistryError, whose text names the cloud, the step and the fix."""


class Step(NamedTuple):
    """One request on the way to a login, as named in error messages."""

    said: str
    """The registry, the cloud and the operation."""
    fix: str


class Reply(NamedTuple):
    """A response that was read completely."""

    status: int
    headers: Mapping[str, str]
    text: bytes


class _Kept(NamedTuple):
    login: Login
    until_s: float
    """Time of renewal."""
    ends_s: float


class _Failed(NamedTuple):
    error: UnreachableError
    at_s: float


class Clouds:
    """A Keychain backed by the configured clouds."""

    def __init__(self, clouds: Sequence[Cloud], pace: Pace | None = None) -> None:
        self._clouds = clouds
        self._pace = pace or Pace()
        self._kept: dict[str, _Kept] = {}
        self._failed: dict[str, _Failed] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def login(self, host: str, repository: str) -> Login | None:  # noqa: ARG002 -- required by Keychain
        """See `Keychain.login`."""
        cloud = next((one for one in self._clouds if one.applies(host)), None)
        if cloud is None:
            return None
        asked_s = self._pace.monotonic_s()
        async with self._locks.setdefault(host, asyncio.Lock()):
            kept, failed = self._kept.get(host), self._failed.get(host)
            if kept is not None and self._pace.monotonic_s() < kept.until_s:
                return kept.login
            if failed is not None and asked_s < failed.at_s:
                raise UnreachableError(str(failed.error))
            return await self._fetched(cloud, host)

    async def _fetched(self, cloud: Cloud, host: str) -> Login:
        began_s = self._pace.monotonic_s()
        try:
            login, lasts_s = await cloud.fetch(host)
        except UnreachableError as error:
            kept = self._kept.get(host)
            if kept is not None and self._pace.monotonic_s() < kept.ends_s:
                return kept.login
            self._failed[host] = _Failed(error, self._pace.monotonic_s())
            raise
        except RegistryError as error:  # public content stays accessible without a login
            login, lasts_s = Login(note=str(error)), ABSENT_S
        self._failed.pop(host, None)
        while len(self._kept) >= KEPT_MAX and host not in self._kept:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest)
            self._failed.pop(oldest, None)
            self._locks.pop(oldest, None)
        self._kept[host] = _Kept(login, began_s + lasts_s - min(EARLY_S, EARLY * lasts_s), began_s + lasts_s)
        return login


def decode_reply(reply: Reply, kind: type[T], step: str, what: str = "a token") -> T:
    """Decode the JSON of a response. Raises DeniedError if it is invalid; the error does not contain the response."""
    try:
        return msgspec.json.decode(reply.text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise DeniedError(f"{step}: the response is not {what}") from None


async def post_request(url: URL, headers: Mapping[str, str], body: bytes, pace: Pace, step: Step) -> Reply:
    """Send a request with a secret to a cloud service over TLS, and return the response.

    Raises UnreachableError, PolicyError; redirects are not followed.
    """
    site = Site(str(get_origin(url)), plain_http=url.scheme == "http")
    tries = Tries(pace)
    try:
        async with Transport(site, Limits()) as transport:
            while True:
                try:
                    async with await transport.secret(url, headers=headers, body=body) as answer:
                        text = await answer.whole(ANSWER_BYTES_MAX, "its answer")
                        return Reply(answer.status, answer.headers, text)
                except BrokenError as error:
                    await tries.again(error)
    except RegistryError as error:
        raise type(error)(f"{step.said}: {error}; {step.fix}") from None
