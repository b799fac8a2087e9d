"""What a cloud is to a pull: it knows its registries by their hosts, and gives a login for them that ends. I/O.

Owns the keeping: a login is asked for once, however many want it at that moment, and again shortly before it ends; that
a cloud is away counts for those who waited for it, and that it refuses is the note of a login that is none. Promises: a
login goes to nobody but the host that it was asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from yarl import URL

from artifacts.credentials.docker_config import Login
from artifacts.errors import BrokenError, RegistryError, UnreachableError
from artifacts.http.origin import get_origin
from artifacts.http.retry import Pace, Tries
from artifacts.http.transport import Limits, Site, Transport

EARLY_S, EARLY = 300.0, 0.2
"""A login is renewed so long before its end, and no longer than that part of its time before."""
KEPT_MAX = 100
"""Registries with a login; the oldest is forgotten."""
ANSWER_BYTES_MAX = 64 << 10
ABSENT_S = 30.0
"""For so long it is believed that this machine has no identity: a new pod may be there before its cloud's service."""


class Granted(NamedTuple):
    """A login, or that there is none (`Login.anonymous`, with its note)."""

    login: Login
    lasts_s: float


class Cloud(Protocol):
    """One of them."""

    def applies(self, host: str) -> bool:
        """The host is a registry of this cloud."""

    async def fetch(self, host: str) -> Granted:
        """A new login. Raises RegistryError, whose text names the cloud, the step and the fix."""


class Step(NamedTuple):
    """One question on the way to a login, as errors say it."""

    said: str
    """For whom, which cloud, and what is asked."""
    fix: str


class Reply(NamedTuple):
    """An answer that was read to its end."""

    status: int
    headers: Mapping[str, str]
    text: bytes


class _Kept(NamedTuple):
    login: Login
    until_s: float
    """From then on there should be another."""
    ends_s: float


class _Failed(NamedTuple):
    error: UnreachableError
    at_s: float


class Clouds:
    """A Keychain of those that there are."""

    def __init__(self, clouds: Sequence[Cloud], pace: Pace | None = None) -> None:
        self._clouds = clouds
        self._pace = pace or Pace()
        self._kept: dict[str, _Kept] = {}
        self._failed: dict[str, _Failed] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    async def login(self, host: str, repository: str) -> Login | None:  # noqa: ARG002 -- a Keychain's
        """As Keychain."""
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
        except RegistryError as error:  # what is public is so for those, too, whom the cloud refuses
            login, lasts_s = Login(note=str(error)), ABSENT_S
        self._failed.pop(host, None)
        while len(self._kept) >= KEPT_MAX and host not in self._kept:
            oldest = next(iter(self._kept))
            self._kept.pop(oldest)
            self._failed.pop(oldest, None)
            self._locks.pop(oldest, None)
        self._kept[host] = _Kept(login, began_s + lasts_s - min(EARLY_S, EARLY * lasts_s), began_s + lasts_s)
        return login


async def post_request(url: URL, headers: Mapping[str, str], body: bytes, pace: Pace, step: Step) -> Reply:
    """What a cloud's service answers to a request with a secret, over TLS.

    Raises UnreachableError, PolicyError; no redirects are followed.
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
