"""Registries that fail or send wrong data: points 1, 2, 7 and 12 of the fault list (bytes, manifests, responses)."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from artifacts.digest import Digest
from artifacts.http.retry import TRIES_MAX
from artifacts.http.transport import Limits, Site
from artifacts.oci.manifest import OCI_INDEX as INDEX
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry import blobs, manifests
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry_errors import AbsentError, MismatchError, PolicyError, RegistryError, UnreachableError
from tests.support.fakes.registry import Answer, FakeRegistry, StillClock, digest_of, raw, reply, whole_head
from tests.support.harness.artifacts.registry_pull import answer_part

CONTENT = bytes(range(256)) * 64
NAME = "team/model"
WRONG = bytes(reversed(CONTENT))


class Place:
    """A registry with one blob, and a client that never waits."""

    def __init__(self, fake: FakeRegistry, client: Client, clock: StillClock) -> None:
        self.fake = fake
        self.client = client
        self.clock = clock
        self.blob = Blob(NAME, Digest(fake.blob(CONTENT)), len(CONTENT))
        self.path = f"/v2/{NAME}/blobs/{self.blob.digest}"

    def next(self, *answers: Answer) -> None:
        """Queue the responses to the next requests for the blob."""
        self.fake.answers["GET", self.path].extend(answers)

    async def read(self, first: int = 0, end: int | None = None) -> bytes:
        async with contextlib.aclosing(blobs.stream_blob(self.client, self.blob, first, end)) as pieces:
            return b"".join([piece async for piece in pieces])

    def ranges(self) -> list[str | None]:
        return [one.headers.get("range") for one in self.fake.asked("GET", "/blobs/")]


@contextlib.asynccontextmanager
async def place(limits: Limits | None = None) -> AsyncIterator[Place]:
    clock = StillClock()
    async with (
        FakeRegistry().serving() as fake,
        Client(Site(fake.host), limits=limits or Limits(), pace=clock) as client,
    ):
        yield Place(fake, client, clock)


async def test_partial_blob_read_sends_a_closed_range_header() -> None:
    async with place() as one:
        assert await one.read() == CONTENT
        assert await one.read(100, 5000) == CONTENT[100:5000]
        assert await one.read(16000) == CONTENT[16000:]
        assert await one.read(5, 5) == b""
        assert one.ranges() == [None, "bytes=100-4999", "bytes=16000-16383"]


@pytest.mark.point("1")
@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (reply(200, WRONG), MismatchError, "its bytes do not match"),
        (reply(200, CONTENT[:-1]), MismatchError, "expected 16384"),
        (reply(200, CONTENT + b"x"), MismatchError, "has 16385 bytes of it"),
        (reply(200, b""), MismatchError, "has 0 bytes of it"),
        (reply(404), AbsentError, "there is no blob"),
    ],
    ids=["flipped", "truncated", "longer", "empty", "absent"],
)
async def test_read_of_a_blob_with_wrong_bytes_wrong_size_or_status_404_fails(
    answer: Answer, error: type[RegistryError], message: str
) -> None:
    async with place() as one:
        one.next(answer)
        with pytest.raises(error, match=message):
            await one.read()


@pytest.mark.point("1")
@pytest.mark.parametrize("change", [-1, 1])
async def test_chunked_response_of_wrong_length_is_rejected(change: int) -> None:
    async def chunked(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.enable_chunked_encoding()
        await response.prepare(request)
        await response.write(CONTENT[:-1] if change < 0 else CONTENT + b"x")
        return response

    async with place() as one:
        one.next(chunked)
        with pytest.raises(MismatchError, match="returned fewer bytes" if change < 0 else "returned more bytes"):
            await one.read()


@pytest.mark.point("1")
async def test_read_of_a_short_response_body_fails_after_all_retries() -> None:
    async with place() as one:
        one.fake.always["GET", one.path] = raw(one.fake, whole_head(len(CONTENT)) + CONTENT[:1000])
        with pytest.raises(UnreachableError, match=f"given up after {TRIES_MAX} tries"):
            await one.read()


@pytest.mark.point("1")
async def test_blob_with_wrong_bytes_after_a_resumed_read_is_rejected() -> None:
    async with place() as one:
        one.next(raw(one.fake, whole_head(len(CONTENT)) + CONTENT[:1000], "close"))
        one.next(lambda request: answer_part(request, WRONG))
        with pytest.raises(MismatchError, match="its bytes do not match"):
            await one.read()


# --- manifests -------------------------------------------------------------------------------------------------------

BODY = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": []}).encode()


async def test_manifest_is_fetched_by_tag_and_by_digest() -> None:
    async with place() as one:
        digest = one.fake.manifest(NAME, "v1", BODY)
        for asked in ("v1", digest):
            found = await manifests.fetch_manifest(one.client, NAME, asked, len(BODY))
            assert (found.digest, found.media_type, found.body) == (digest, MANIFEST, BODY)
        accept = one.fake.asked("GET", "/manifests/")[0].headers["accept"]
        assert MANIFEST in accept
        assert INDEX in accept
        assert await manifests.can_pull_manifest(one.client, NAME, Digest(digest))


@pytest.mark.point("2")
async def test_fetched_manifest_that_does_not_match_its_digest_is_rejected() -> None:
    async with place() as one:
        digest = one.fake.manifest(NAME, "v1", BODY)
        other = BODY.replace(b"[]", b"[ ]")
        one.fake.manifests[NAME, digest] = (MANIFEST, other)
        with pytest.raises(MismatchError, match="its bytes do not match its digest"):
            await manifests.fetch_manifest(one.client, NAME, digest)
        path = f"/v2/{NAME}/manifests/{digest}"  # a header is no proof
        reported = reply(200, other, Content_Type=MANIFEST, Docker_Content_Digest=digest)
        one.fake.answers["GET", path].append(reported)
        with pytest.raises(MismatchError):
            await manifests.fetch_manifest(one.client, NAME, digest)


@pytest.mark.point("2")
async def test_manifest_digest_is_computed_from_the_body_not_the_header() -> None:
    async with place() as one:
        one.fake.manifest(NAME, "v1", BODY)
        moved = BODY.replace(b"[]", b"[ ]")
        path = f"/v2/{NAME}/manifests/v1"
        one.fake.answers["GET", path].append(
            reply(200, moved, Content_Type=MANIFEST, Docker_Content_Digest=digest_of(BODY))
        )
        found = await manifests.fetch_manifest(one.client, NAME, "v1")
        assert (found.digest, found.body) == (digest_of(moved), moved)
        one.fake.manifest(NAME, "v1", moved)
        with pytest.raises(MismatchError, match=f"has {len(moved)} bytes, expected {len(BODY)}"):
            await manifests.fetch_manifest(one.client, NAME, "v1", len(BODY))


@pytest.mark.point("7")
@pytest.mark.parametrize("sized", [True, False], ids=["says its size", "says nothing"])
async def test_fetched_manifest_above_4_mib_is_rejected(*, sized: bool) -> None:
    async def large(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": MANIFEST})
        if sized:
            response.content_length = 64 << 20
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                await response.write(bytes(1 << 20))
        return response

    async with place() as one:
        one.fake.answers["GET", f"/v2/{NAME}/manifests/v1"].append(large)
        with pytest.raises(PolicyError, match="larger than 4194304 bytes"):
            await manifests.fetch_manifest(one.client, NAME, "v1")


@pytest.mark.point("7")
@pytest.mark.parametrize(
    ("body", "header", "message"),
    [
        (BODY, INDEX, "its Content-Type and its mediaType differ"),
        (BODY, "text/html", "has an unknown type"),
        (b"[" * 100_000, MANIFEST, "is not a JSON object"),
        (b"[]", MANIFEST, "is not a JSON object"),
        (b"\xff", MANIFEST, "is not a JSON object"),
    ],
    ids=["index", "page", "deep", "list", "bytes"],
)
async def test_fetched_manifest_of_an_invalid_type_or_form_is_rejected(body: bytes, header: str, message: str) -> None:
    async with place() as one:
        one.fake.manifest(NAME, "v1", body, header)
        with pytest.raises(MismatchError, match=message):
            await manifests.fetch_manifest(one.client, NAME, "v1")


# --- responses -------------------------------------------------------------------------------------------------------


@pytest.mark.point("12")
@pytest.mark.parametrize(
    ("header", "waits"),
    [
        ("7", [7.0]),
        ("Sun, 06 Nov 1994 08:49:49 GMT", [12.0]),
        ("Sun, 06 Nov 1994 08:49:07 GMT", [0.25]),
        ("86400", [60.0]),
        ("9" * 40, [60.0]),
        ("soon", [0.125]),
        ("", [0.125]),
    ],
)
@pytest.mark.parametrize("status", [408, 429, 503])
async def test_registry_is_retried_after_its_retry_after_delay_up_to_60_s(
    status: int, header: str, waits: list[float]
) -> None:
    async with place() as one:
        one.next(reply(status, Retry_After=header))
        assert await one.read() == CONTENT
        assert one.clock.waits == waits


@pytest.mark.point("12")
async def test_read_from_a_busy_registry_fails_after_the_retry_limit() -> None:
    async with place() as one:
        one.fake.always["GET", one.path] = reply(429, Retry_After="86400")
        with pytest.raises(UnreachableError, match=r"answered 429, and asks to wait 86400 s; given up after 4 tries"):
            await one.read()
        assert one.clock.waits == [60.0, 60.0, 60.0]
        one.fake.always["GET", one.path] = reply(502)
        with pytest.raises(UnreachableError, match=f"answered 502; given up after {TRIES_MAX} tries"):
            await one.read()


@pytest.mark.point("12")
@pytest.mark.parametrize("end", ["close", "reset"])
async def test_blob_read_resumes_after_a_broken_connection(end: str) -> None:
    async with place() as one:
        one.next(raw(one.fake, whole_head(len(CONTENT)) + CONTENT[:1000], end), reply(500))
        assert await one.read() == CONTENT
        first, second, third = one.ranges()
        assert first is None
        assert second == third
        assert end == "reset" or second == "bytes=1000-16383"


@pytest.mark.point("12")
async def test_stalled_response_is_retried_from_the_last_received_byte() -> None:
    async with place(Limits(read_s=0.5)) as one:
        one.next(raw(one.fake, whole_head(len(CONTENT)) + CONTENT[:1000], "hang"))
        assert await one.read() == CONTENT
        assert one.ranges()[1] == "bytes=1000-16383"
    async with place(Limits(connect_s=0.0, head_s=0.5)) as one:
        one.next(raw(one.fake, b"HTTP/1.1 200 OK\r\nContent-", "hang"))
        assert await one.read() == CONTENT
    async with place() as one:
        one.clock.tick_s = 31.0  # each read takes longer than the minimum pace of a blob allows
        one.fake.always["GET", one.path] = raw(one.fake, whole_head(len(CONTENT)) + b"x", "hang")
        with pytest.raises(UnreachableError, match=r"sent only 1 bytes in 31 s; given up"):
            await one.read()


@pytest.mark.point("12")
async def test_full_response_to_a_range_request_yields_the_requested_range() -> None:
    async with place() as one:
        one.next(reply(200, CONTENT), reply(200, CONTENT))
        assert await one.read(100, 200) == CONTENT[100:200]
        assert await one.read(16000) == CONTENT[16000:]


@pytest.mark.point("12")
@pytest.mark.parametrize(
    ("headers", "message"),
    [
        ({"Content-Range": "bytes 0-99/16384"}, "another part"),
        ({"Content-Range": "bytes 100-199/99999"}, "has 99999 bytes of it"),
        ({"Content-Range": "bytes=100-199/16384"}, "another part"),
        ({"Content-Range": f"bytes 100-{'9' * 5000}/16384"}, "another part"),
        ({}, "another part"),
        ({"Content-Range": "bytes 100-199/16384", "Content-Type": "multipart/byteranges; boundary=x"}, "several parts"),
    ],
)
async def test_partial_response_with_wrong_content_range_is_rejected(headers: dict[str, str], message: str) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.Response(status=206, body=CONTENT[100:200], headers=headers)

    async with place() as one:
        one.next(answer)
        with pytest.raises(MismatchError, match=message):
            await one.read(100, 200)


@pytest.mark.point("12")
async def test_unrequested_or_wrong_length_partial_response_is_rejected() -> None:
    async with place() as one:
        one.next(reply(206, CONTENT[100:150], Content_Range="bytes 100-199/16384"))
        with pytest.raises(MismatchError, match="part is 50 bytes long, not 100"):
            await one.read(100, 200)
        one.next(reply(206, CONTENT, Content_Range="bytes 0-16383/16384"))
        with pytest.raises(MismatchError, match="that was not requested"):
            await one.read()


@pytest.mark.point("12")
async def test_whole_blob_is_requested_after_status_416() -> None:
    async with place() as one:
        one.next(reply(416))
        assert await one.read(100, 200) == CONTENT[100:200]
        assert one.ranges() == ["bytes=100-199", None]
        one.next(reply(416), reply(200, CONTENT[:150]))
        with pytest.raises(MismatchError, match="expected 16384"):
            await one.read(100, 200)


@pytest.mark.point("12")
@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity"])
async def test_registry_response_with_a_content_encoding_is_rejected(encoding: str) -> None:
    async with place() as one:
        one.next(reply(200, CONTENT, Content_Encoding=encoding))
        with pytest.raises(PolicyError, match="has a Content-Encoding"):
            await one.read()
        one.fake.answers["GET", f"/v2/{NAME}/manifests/v1"].append(
            reply(200, BODY, Content_Type=MANIFEST, Content_Encoding=encoding)
        )
        with pytest.raises(PolicyError, match="has a Content-Encoding"):
            await manifests.fetch_manifest(one.client, NAME, "v1")
        assert {each.headers["accept-encoding"] for each in one.fake.seen} == {"identity"}


@pytest.mark.point("12")
async def test_unreachable_registry_raises_unreachable_error() -> None:
    async with Client(Site("127.0.0.1:1"), pace=StillClock()) as client:
        with pytest.raises(UnreachableError, match=r"127.0.0.1:1: does not answer \(Connect"):
            await manifests.fetch_manifest(client, NAME, "v1")
