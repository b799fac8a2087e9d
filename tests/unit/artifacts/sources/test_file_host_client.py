"""Sources that are not registries: retried where that is useful, with error messages of our own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from aiohttp import web
from yarl import URL

from artifacts.digest import compute_digest
from artifacts.http.transport import Limits
from artifacts.registry.blobs import Blob
from artifacts.registry_errors import DeniedError, PolicyError, UnreachableError
from artifacts.sources.file_host_client import FileHost, Lone, Rules
from tests.support.fakes.registry import FakeRegistry, StillClock

pytestmark = pytest.mark.standard


async def proof(_method: str, _url: URL, _headers: Mapping[str, str]) -> Mapping[str, str]:
    return {"Authorization": "the-proof"}


def place(fake: FakeRegistry, clock: StillClock) -> FileHost:
    return FileHost(URL(fake.url + "/"), proof, lambda *_: "ask for it", Rules(Limits(), clock))


def busy(status: int = 503) -> web.Response:
    return web.Response(status=status, text="words of its own")


async def test_file_host_that_stays_busy_fails_after_6_tries() -> None:
    clock = StillClock()
    async with FakeRegistry().serving() as fake, place(fake, clock) as one:

        async def twice(_request: web.Request) -> web.StreamResponse:
            return busy() if len(fake.seen) < 3 else web.Response(body=b"yes")

        fake.always["GET", "/a"] = twice
        assert (await one.whole("GET", one.url("a"), bytes_max=9, what="a")).body == b"yes"
        assert len(clock.waits) == 2

        async def always(_request: web.Request) -> web.StreamResponse:
            return busy()

        fake.always["GET", "/a"] = always
        with pytest.raises(UnreachableError, match="given up after 6 tries"):
            await one.whole("GET", one.url("a"), bytes_max=9, what="a")


async def test_response_body_above_the_size_limit_is_rejected() -> None:
    async with FakeRegistry().serving() as fake, place(fake, StillClock()) as one:

        async def large(_request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"x" * 10)

        async def refusing(_request: web.Request) -> web.StreamResponse:
            return busy(403)

        fake.always["GET", "/a"], fake.always["GET", "/b"] = large, refusing
        with pytest.raises(PolicyError, match="larger than 9 bytes"):
            await one.whole("GET", one.url("a"), bytes_max=9, what="a")
        one.has(compute_digest(b"b"), one.url("b"))
        with pytest.raises(DeniedError, match=r"blob .* of m: answered 403; ask for it") as caught:
            async for _ in Lone(one).read(Blob("m", compute_digest(b"b"), 10)):
                pass
        assert "words" not in str(caught.value)


async def test_file_request_carries_its_if_match_and_authorization_headers() -> None:
    async with FakeRegistry().serving() as fake, place(fake, StillClock()) as one:

        async def content(_request: web.Request) -> web.StreamResponse:
            return web.Response(body=b"b" * 10, headers={"ETag": 'W/"e"'})

        fake.always["GET", "/b"] = content
        one.has(compute_digest(b"name"), one.url("b"), {"If-Match": '"e"'})
        one.also(compute_digest(b"name"), compute_digest(b"b" * 10))
        for name in (compute_digest(b"name"), compute_digest(b"b" * 10)):
            pieces = [piece async for piece in Lone(one).read(Blob("m", name, 10))]
            assert b"".join(pieces) == b"b" * 10
        assert {seen.headers["if-match"] for seen in fake.seen} == {'"e"'}
        assert {seen.headers["authorization"] for seen in fake.seen} == {"the-proof"}
