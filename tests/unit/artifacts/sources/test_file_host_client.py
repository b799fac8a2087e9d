"""Sources that are not registries: retried where that is useful, with error messages of our own."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from yarl import URL

from artifacts.digest import compute_digest
from artifacts.http.transport import Limits
from artifacts.registry.blobs import Blob
from artifacts.registry_errors import DeniedError, PolicyError, UnreachableError
from artifacts.sources.file_host_client import FileHost, Lone, Rules
from tests.support.fakes.registry import FakeRegistry, StillClock, reply

pytestmark = pytest.mark.standard


async def proof(_method: str, _url: URL, _headers: Mapping[str, str]) -> Mapping[str, str]:
    return {"Authorization": "the-proof"}


def place(fake: FakeRegistry, clock: StillClock) -> FileHost:
    return FileHost(URL(fake.url + "/"), proof, lambda *_: "ask for it", Rules(Limits(), clock))


async def test_request_to_a_busy_file_host_fails_after_6_tries() -> None:
    clock = StillClock()
    async with FakeRegistry().serving() as fake, place(fake, clock) as one:
        fake.always["GET", "/a"] = reply(200, b"yes")
        fake.answers["GET", "/a"].extend([reply(503, b"words of its own")] * 2)
        assert (await one.whole("GET", one.url("a"), bytes_max=9, what="a")).body == b"yes"
        assert len(clock.waits) == 2
        fake.always["GET", "/a"] = reply(503, b"words of its own")
        with pytest.raises(UnreachableError, match="given up after 6 tries"):
            await one.whole("GET", one.url("a"), bytes_max=9, what="a")


async def test_response_body_above_the_size_limit_is_rejected() -> None:
    async with FakeRegistry().serving() as fake, place(fake, StillClock()) as one:
        fake.always["GET", "/a"] = reply(200, b"x" * 10)
        fake.always["GET", "/b"] = reply(403, b"words of its own")
        with pytest.raises(PolicyError, match="larger than 9 bytes"):
            await one.whole("GET", one.url("a"), bytes_max=9, what="a")
        one.has(compute_digest(b"b"), one.url("b"))
        with pytest.raises(DeniedError, match=r"blob .* of m: answered 403; ask for it") as caught:
            async for _ in Lone(one).read(Blob("m", compute_digest(b"b"), 10)):
                pass
        assert "words" not in str(caught.value)


async def test_file_request_carries_its_if_match_and_authorization_headers() -> None:
    async with FakeRegistry().serving() as fake, place(fake, StillClock()) as one:
        fake.always["GET", "/b"] = reply(200, b"b" * 10, ETag='W/"e"')
        one.has(compute_digest(b"name"), one.url("b"), {"If-Match": '"e"'})
        one.also(compute_digest(b"name"), compute_digest(b"b" * 10))
        for name in (compute_digest(b"name"), compute_digest(b"b" * 10)):
            pieces = [piece async for piece in Lone(one).read(Blob("m", name, 10))]
            assert b"".join(pieces) == b"b" * 10
        assert {seen.headers["if-match"] for seen in fake.seen} == {'"e"'}
        assert {seen.headers["authorization"] for seen in fake.seen} == {"the-proof"}
