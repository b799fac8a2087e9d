"""Cloud logins are cached until shortly before expiry, fetched once for concurrent requests, and sent to one host."""

from __future__ import annotations

import asyncio

import pytest

from artifacts.credentials.clouds.cloud import ABSENT_S, KEPT_MAX, Clouds, Granted
from artifacts.credentials.docker_config import Login
from artifacts.fetch.registry import fingerprint_login
from artifacts.http.transport import Site
from artifacts.registry import manifests
from artifacts.registry.client import Client
from artifacts.registry_errors import DeniedError, UnreachableError
from tests.support.fakes.registry import FakeRegistry, StillClock, reply


class Fake:
    """A fake cloud for all hosts that begin with `own`."""

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.lasts_s = 3600.0
        self.fails: Exception | None = None
        self.go = asyncio.Event()
        self.go.set()

    def applies(self, host: str) -> bool:
        return host.startswith("own")

    async def fetch(self, host: str) -> Granted:
        self.hosts.append(host)
        await self.go.wait()
        if self.fails is not None:
            raise self.fails
        return Granted(Login("u", f"token-{len(self.hosts)}"), self.lasts_s)


async def waiting(fake: Fake, clouds: Clouds, count: int) -> list[asyncio.Task[str]]:
    """Start this many requests for a login; return once the first one waits for the cloud."""
    fake.go.clear()
    requests = [asyncio.create_task(password(clouds)) for _ in range(count)]
    while not fake.hosts:
        await asyncio.sleep(0)
    return requests


async def password(clouds: Clouds, host: str = "own.example") -> str:
    found = await clouds.login(host, "x")
    return "-" if found is None else found.password


async def test_cloud_login_is_cached_separately_for_each_host() -> None:
    fake = Fake()
    clouds = Clouds([fake], StillClock())
    assert await password(clouds, "evil.example") == "-"
    assert [await password(clouds, host) for host in ("own.a", "own.b", "own.a")] == ["token-1", "token-2", "token-1"]
    assert fake.hosts == ["own.a", "own.b"]


@pytest.mark.parametrize(("lasts_s", "good_s"), [(3600.0, 3300.0), (100.0, 80.0)])
async def test_cloud_login_is_renewed_shortly_before_its_expiry(lasts_s: float, good_s: float) -> None:
    fake, clock = Fake(), StillClock()
    fake.lasts_s = lasts_s
    clouds = Clouds([fake], clock)
    assert await password(clouds) == "token-1"
    clock.now_s += good_s - 1
    assert await password(clouds) == "token-1"
    clock.now_s += 2
    assert await password(clouds) == "token-2"


async def test_concurrent_cloud_logins_share_one_token_fetch() -> None:
    fake = Fake()
    requests = await waiting(fake, Clouds([fake], StillClock()), 20)
    fake.go.set()
    assert set(await asyncio.gather(*requests)) == {"token-1"}
    assert len(fake.hosts) == 1


async def test_waiting_login_request_fetches_a_token_if_the_first_is_cancelled() -> None:
    fake = Fake()
    first, second = await waiting(fake, Clouds([fake], StillClock()), 2)
    first.cancel()
    fake.go.set()
    assert await second == "token-2"


async def test_failed_cloud_login_fails_all_waiting_requests_and_is_not_cached() -> None:
    fake, clock = Fake(), StillClock()
    clock.tick_s = 0.001
    fake.fails = UnreachableError("no")
    clouds = Clouds([fake], clock)
    requests = await waiting(fake, clouds, 20)
    fake.go.set()
    assert [str(one) for one in await asyncio.gather(*requests, return_exceptions=True)] == ["no"] * 20
    assert len(fake.hosts) == 1
    fake.fails = None
    assert await password(clouds) == "token-2"
    fake.fails, clock.now_s = UnreachableError("away"), clock.now_s + 4000
    with pytest.raises(UnreachableError, match="away"):
        await password(clouds)


async def test_cached_login_is_used_until_expiry_while_the_cloud_is_unreachable() -> None:
    fake, clock = Fake(), StillClock()
    clouds = Clouds([fake], clock)
    await password(clouds)
    fake.fails = UnreachableError("away")
    clock.now_s += 3500
    assert await password(clouds) == "token-1"
    clock.now_s += 101
    with pytest.raises(UnreachableError, match="away"):
        await password(clouds)


async def test_denied_cloud_login_is_cached_with_its_reason_until_expiry() -> None:
    fake, clock = Fake(), StillClock()
    fake.fails = DeniedError("own.example: AWS: refused; the keys need a right")
    clouds = Clouds([fake], clock)
    for _ in range(2):
        found = await clouds.login("own.example", "x")
        assert found == Login(note="own.example: AWS: refused; the keys need a right")
    fake.fails, clock.now_s = None, clock.now_s + ABSENT_S
    assert await password(clouds) == "token-2"


async def test_oldest_login_is_evicted_when_the_cache_is_full() -> None:
    fake = Fake()
    clouds = Clouds([fake], StillClock())
    for number in range(KEPT_MAX + 1):
        await password(clouds, f"own{number}")
    await password(clouds, f"own{KEPT_MAX}")
    assert len(fake.hosts) == KEPT_MAX + 1
    await password(clouds, "own0")
    assert len(fake.hosts) == KEPT_MAX + 2


@pytest.mark.standard
async def test_denied_anonymous_pull_error_names_the_missing_cloud_identity() -> None:
    class Nobody(Fake):
        def applies(self, host: str) -> bool:
            return True

        async def fetch(self, host: str) -> Granted:
            return Granted(Login(note="Cloud: no identity was found; do this"), 30.0)

    async with FakeRegistry().serving() as fake:
        fake.manifest("team/open", "v1", b"{}")
        async with Client(Site(fake.host), Clouds([Nobody()])) as client:
            assert (await manifests.fetch_manifest(client, "team/open", "v1")).body == b"{}"
            refusal = reply(401, WWW_Authenticate='Basic realm="x"')
            fake.always["GET", "/v2/team/private/manifests/v1"] = refusal
            with pytest.raises(DeniedError, match=r"none is stored for .*\(Cloud: no identity was found; do this\)"):
                await manifests.fetch_manifest(client, "team/private", "v1")
            bearer = reply(401, WWW_Authenticate=f'Bearer realm="{fake.url}/token",service="x"')
            fake.always["GET", "/v2/team/private/manifests/v1"] = bearer
            fake.always["GET", "/token"] = reply(403)
            with pytest.raises(DeniedError, match=r"requires a login \(403\) \(Cloud: no identity"):
                await manifests.fetch_manifest(client, "team/private", "v1")
        assert all("authorization" not in one.headers for one in fake.seen)


KEY = b"of the store"


def test_login_fingerprint_ignores_the_secret_if_the_login_has_an_owner() -> None:
    assert fingerprint_login(Login("u", "one", whose="me"), KEY) == fingerprint_login(
        Login("u", "two", whose="me"), KEY
    )
    assert fingerprint_login(Login("u", "one", whose="me"), KEY) != fingerprint_login(
        Login("u", "one", whose="you"), KEY
    )
    assert fingerprint_login(Login("u", "one"), KEY) != fingerprint_login(Login("u", "two"), KEY)
    assert fingerprint_login(Login("me", "one"), KEY) != fingerprint_login(Login(whose="me"), KEY)
