"""Fetching blobs into a folder: points 1, 10, 12 and 13 of the fault list, for each way of receiving a body."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import gc
import hashlib
import itertools
import os
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk, DiskError
from artifacts.download import concurrency
from artifacts.download.blob_download import BlobTarget, fetch_blobs
from artifacts.http.retry import TRIES_MAX
from artifacts.http.transport import Limits, Site
from artifacts.oci import blob_progress as parts
from artifacts.registry.blobs import Blob, Sink
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirror, Mirrored
from artifacts.registry_errors import AbsentError, MismatchError, PolicyError, RegistryError, UnreachableError
from tests.support.fakes.registry import Answer, FakeRegistry, StillClock, keychain, part_of, raw, reply, whole_head
from tests.support.harness.artifacts.registry_pull import (
    CONTENT,
    NAME,
    PATH,
    WAYS,
    Place,
    answer_part,
    breaking,
    go,
    leave,
    place,
    small,
)

pytestmark = pytest.mark.standard

WRONG = bytes(reversed(CONTENT))


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


@pytest.fixture(params=WAYS)
def way(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Each way of moving a body from the socket into the file."""
    go(request.param, monkeypatch, tmp_path_factory.mktemp("authority"))
    return str(request.param)


@pytest.fixture
def one_span(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blob is fetched in a single request, for each way."""
    assert way
    monkeypatch.setattr(parts, "WHOLE_BYTES_MAX", 1 << 20)


async def test_large_blob_is_fetched_in_ranges_and_a_small_blob_in_one_request(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        short, empty = one.wanted(CONTENT[:10_000], Path("b")), one.wanted(b"", Path("c/d/e"))
        await one.fetch(one.wanted(), short, empty)
        assert one.file() == CONTENT
        assert (tmp_path / "b").read_bytes() == CONTENT[:10_000]
        assert (tmp_path / "c/d/e").read_bytes() == b""
        assert one.left() == []
        spans = {f"bytes={at}-{at + 4095}" for at in range(0, len(CONTENT), 4096)}
        assert set(one.ranges()) == {*spans, None}  # the smaller one in a single request, without a range
        assert len(one.ranges()) == 17
        assert one.received[-1] > 0


async def test_blob_that_does_not_match_its_sha512_digest_is_rejected(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        digest = Digest(f"sha512:{hashlib.sha512(CONTENT).hexdigest()}")
        one.fake.blobs[digest] = CONTENT
        await one.fetch(BlobTarget(Blob(NAME, digest, len(CONTENT)), PATH))
        assert one.file() == CONTENT
        one.fake.blobs[digest] = WRONG
        with pytest.raises(MismatchError, match="its bytes do not match"):
            await one.fetch(BlobTarget(Blob(NAME, digest, len(CONTENT)), Path("other")))
        assert not (tmp_path / "other").exists()


@pytest.mark.point("1")
@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        (reply(200, WRONG), MismatchError, "its bytes do not match"),
        (reply(200, CONTENT[:-1]), MismatchError, "expected 65536"),
        (reply(200, CONTENT + b"x"), MismatchError, "has 65537 bytes of it"),
        (reply(200, b""), MismatchError, "has 0 bytes of it"),
        (reply(404), AbsentError, "there is no blob"),
        (reply(200, CONTENT, Content_Encoding="gzip"), PolicyError, "Content-Encoding, which a proxy must have added"),
    ],
    ids=["flipped", "truncated", "longer", "empty", "absent", "gzip"],
)
async def test_wrong_or_missing_blob_response_fails_one_fetch_but_not_the_next(
    tmp_path: Path, one_span: None, answer: Answer, error: type[RegistryError], message: str
) -> None:
    async with place(tmp_path) as one:
        one.next(answer)
        with pytest.raises(error, match=message):
            await one.fetch()
        assert one.file() is None
        await one.fetch()  # no wrong bytes are kept
        assert one.file() == CONTENT


@pytest.mark.point("1")
async def test_blob_with_a_corrupt_part_is_discarded_without_chunk_sums(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        one.fake.always[one.url()] = lambda request: answer_part(request, CONTENT[:40_000] + b"?" + CONTENT[40_001:])
        with pytest.raises(MismatchError, match="its bytes do not match its digest; nothing is kept"):
            await one.fetch()
        assert one.left() == []
        assert one.file() is None
        del one.fake.always[one.url()]
        await one.fetch()
        assert one.file() == CONTENT


@pytest.mark.point("1")
async def test_fetch_of_a_short_response_body_fails_after_all_retries(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted(CONTENT[:9000])
        text = whole_head(9000) + CONTENT[:1000]
        one.fake.always[one.url(CONTENT[:9000])] = raw(one.fake, text)
        with pytest.raises(UnreachableError, match=f"given up after {TRIES_MAX} tries"):
            await one.fetch(wanted)
        assert one.file() is None


@pytest.mark.point("10")
async def test_redirected_blob_request_sends_no_login_to_the_target(tmp_path: Path, way: str) -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as store:
        fake.judge = lambda request: (
            None
            if request.headers.get("Authorization")
            else web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        )
        store.always["GET", "/bucket"] = lambda request: answer_part(request, CONTENT)
        url = f"http://localhost:{store.port}/bucket?sig=s3cret"
        async with Client(Site(fake.host), keychain(fake.host), pace=StillClock()) as client:
            one = Place(fake, client, tmp_path)
            wanted = one.wanted()
            fake.always[one.url()] = lambda request: _redirect(fake, request, url)
            await one.fetch(wanted)
            assert one.file() == CONTENT
        assert len(store.seen) == 16
        assert all("authorization" not in seen.headers for seen in store.seen)
        assert {seen.path for seen in fake.seen} == {one.url()[1]}


async def _redirect(fake: FakeRegistry, request: web.Request, url: str) -> web.StreamResponse:
    return fake.judge(request) or web.Response(status=307, headers={"Location": url})


# --- 12: broken responses --------------------------------------------------------------------------------------------


@pytest.mark.point("12")
@pytest.mark.parametrize("end", ["close", "reset", "hang"])
async def test_part_resumes_after_its_last_received_byte_if_a_connection_breaks(
    tmp_path: Path, way: str, end: str
) -> None:
    async with place(tmp_path, Limits(read_s=1.0 if end == "hang" else 30.0)) as one:
        one.next(*(breaking(one, end) for _ in range(4)))
        await one.fetch()
        assert one.file() == CONTENT
        again = [span for span in one.ranges() if span is not None and int(span[6:].partition("-")[0]) % 4096]
        assert len(again) <= 4
        if end != "reset":  # a reset may discard received bytes
            assert {int(span[6:].partition("-")[0]) % 4096 % 1000 for span in again} == {0}


@pytest.mark.point("12")
async def test_token_that_expires_during_a_blob_download_is_renewed(tmp_path: Path, way: str) -> None:
    async with FakeRegistry().serving() as fake:
        tokens, good = itertools.count(), set[str]()

        async def token(_: web.Request) -> web.StreamResponse:
            good.add(f"token-{next(tokens)}")
            return web.json_response({"token": max(good, key=len), "expires_in": 300})

        asked = itertools.count()

        def judge(request: web.Request) -> web.StreamResponse | None:
            if next(asked) == 9:
                good.clear()
            if request.headers.get("Authorization", "").removeprefix("Bearer ") in good:
                return None
            challenge = f'Bearer realm="{fake.url}/token",service="reg"'
            return web.Response(status=401, headers={"WWW-Authenticate": challenge})

        fake.always["GET", "/token"], fake.judge = token, judge
        async with Client(Site(fake.host), keychain(fake.host), pace=StillClock()) as client:
            one = Place(fake, client, tmp_path)
            await one.fetch()
            assert one.file() == CONTENT
            assert next(tokens) >= 2


@pytest.mark.point("12")
@pytest.mark.parametrize("status", [429, 500, 503])
async def test_busy_registry_is_retried_after_the_requested_delay(tmp_path: Path, way: str, status: int) -> None:
    async with place(tmp_path) as one:
        one.next(reply(206), *(reply(status, Retry_After="7") for _ in range(3)))
        one.fake.answers[one.url()].popleft()
        await one.fetch()
        assert one.file() == CONTENT
        clock = one.client.pace
        assert isinstance(clock, StillClock)
        assert [wait for wait in clock.waits if wait] == [7.0, 7.0, 7.0]
        assert len(one.ranges()) == 19


@pytest.mark.point("12")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (reply(206, CONTENT[:4096], Content_Range="bytes 4096-8191/65536"), "returned another part"),
        (reply(206, CONTENT[:4096]), "returned another part"),
        (reply(206, CONTENT[:4096], Content_Range="bytes 0-4095/70000"), "has 70000 bytes of it"),
        (reply(206, CONTENT[:4000], Content_Range="bytes 0-4095/65536"), "part is 4000 bytes long, not 4096"),
        (reply(206, CONTENT, Content_Type="multipart/byteranges"), "several parts"),
    ],
    ids=["elsewhere", "silent", "another whole", "short", "several"],
)
async def test_partial_response_of_another_range_or_length_fails_the_fetch(
    tmp_path: Path, way: str, answer: Answer, message: str
) -> None:
    async with place(tmp_path) as one:
        one.fake.always[one.url()] = answer
        with pytest.raises(MismatchError, match=message):
            await one.fetch()
        assert one.file() is None


@pytest.mark.point("12")
@pytest.mark.parametrize("answer", [reply(200, CONTENT), reply(416)], ids=["the whole", "416"])
async def test_blob_is_fetched_whole_if_the_registry_supports_no_ranges(
    tmp_path: Path, way: str, answer: Answer
) -> None:
    async def whole(request: web.Request) -> web.StreamResponse:
        return await answer(request) if "Range" in request.headers else web.Response(body=CONTENT)

    async with place(tmp_path) as one:
        one.fake.always[one.url()] = whole
        await one.fetch()
        assert one.file() == CONTENT


@pytest.mark.point("12")
async def test_stalled_connection_is_replaced_by_another(
    tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other connections keep their rate. Time is virtual: one second passes at each reading of the clock."""
    monkeypatch.setattr(concurrency, "WINDOW_S", 2.0)
    seconds = itertools.count()

    async def drips(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(0.02)
        return part_of(request, CONTENT)

    async with place(tmp_path) as one:
        one.next(breaking(one, "hang"))
        one.fake.always[one.url()] = drips
        await fetch_blobs([one.wanted()], one.source, tmp_path, clock=lambda: float(next(seconds)))
        assert one.file() == CONTENT
        spliced = "bytes=1000-4095" in one.ranges()
        # Unwritten bytes are fetched again, and once more if the machine is so slow that this looks stalled.
        assert spliced or one.ranges().count("bytes=0-4095") >= 2


# --- mirrors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", [False, True], ids=["wrong bytes", "broken transfer"])
async def test_blob_of_a_faulty_mirror_is_completed_from_the_registry(
    tmp_path: Path, way: str, *, broken: bool
) -> None:
    async with place(tmp_path) as one, FakeRegistry().serving() as other:
        wanted = one.wanted()
        other.blobs[wanted.blob.digest] = WRONG
        if broken:
            other.always[one.url()] = breaking(one, "close")
        async with Client(Site(other.host), pace=StillClock()) as mirror:
            one.source = Mirrored(one.client, [Mirror(mirror)])
            await one.fetch(wanted)
        assert one.file() == CONTENT
        assert broken or len(other.seen) == len(one.fake.seen) == 16


async def test_requesting_a_blob_twice_in_one_fetch_raises_value_error(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        with pytest.raises(ValueError, match="requested twice"):
            await one.fetch(one.wanted(), one.wanted())


async def test_fetch_after_a_cancelled_fetch_completes_the_blob(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        one.fake.answers[one.url()].extend([lambda request: answer_part(request, CONTENT)] * 5)
        one.fake.always[one.url()] = breaking(one, "hang")
        running = asyncio.create_task(one.fetch())
        while not any(came >= 5 * 4096 for came in one.received):
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert one.file() is None
        del one.fake.always[one.url()]
        before = len(one.ranges())
        await one.fetch()
        assert one.file() == CONTENT
        assert len(one.ranges()) - before <= 16


# --- disks that fail, fill up, or have files of an earlier process ---------------------------------------------------


def failing(kind: str, error: int, after: int = 0) -> Disk:
    """Return a disk on which every step of this kind fails after the first `after` ones."""
    left = after

    def step(what: str, path: Path) -> None:
        nonlocal left
        if what == kind:
            left -= 1
            if left < 0:
                raise OSError(error, os.strerror(error), path)

    return Disk(step)


@pytest.mark.point("13")
@pytest.mark.parametrize(
    ("disk", "message"),
    [
        (lambda: failing("put", errno.ENOSPC, 9), "the disk is full; free space"),
        (lambda: failing("put", errno.EDQUOT, 9), "the quota is used up"),
        (lambda: failing("sync", errno.EIO, 1), "the disk failed"),
        (lambda: failing("rename", errno.EROFS), "the file system is read-only; mount it writable"),
    ],
    ids=["full", "quota", "broken", "read-only"],
)
async def test_fetch_after_a_disk_error_completes_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk: Callable[[], Disk], message: str
) -> None:
    go("through us", monkeypatch, tmp_path)
    async with place(tmp_path) as one:
        with pytest.raises(DiskError, match=message) as raised:
            await one.fetch(disk=disk())
        assert len(str(raised.value).splitlines()) == 1
        assert one.file() is None
        before = len(one.ranges())
        await one.fetch()
        assert one.file() == CONTENT
        if "full" in message or "quota" in message:
            assert len(one.ranges()) - before < 16


@pytest.mark.point("13")
async def test_write_and_request_that_fail_concurrently_log_no_loop_error(tmp_path: Path) -> None:
    """The request's failure is raised; the event loop logs nothing about the other one."""
    loop, refused, messages = asyncio.get_running_loop(), asyncio.Event(), list[object]()
    loop.set_exception_handler(lambda _, context: messages.append(context["message"]))

    def step(what: str, path: Path) -> None:
        if what == "put":
            loop.call_soon_threadsafe(refused.set)
            raise OSError(errno.ENOSPC, "full", path)

    class Ending(Mirrored):
        async def read(
            self, blob: Blob, first: int = 0, end: int | None = None, sink: Sink | None = None
        ) -> AsyncGenerator[bytes, None]:
            yield CONTENT[first:end]
            await refused.wait()
            raise UnreachableError("gone")

    async with place(tmp_path) as one:
        one.source = Ending(one.client)
        with pytest.raises((UnreachableError, DiskError)):
            await one.fetch(disk=Disk(step))
    gc.collect()
    await asyncio.sleep(0)
    assert messages == []


@pytest.mark.point("13")
async def test_fetch_without_enough_disk_space_fails_before_any_request(tmp_path: Path) -> None:
    class Full(Disk):
        def free_bytes(self, folder: Path) -> int:
            return len(CONTENT) - 1

    async with place(tmp_path) as one:
        with pytest.raises(DiskError, match=r"65536 bytes are required in .* which has 65535"):
            await one.fetch(disk=Full())
        assert one.ranges() == []


@pytest.mark.point("13")
async def test_fetch_fails_while_another_process_fetches_the_blob(tmp_path: Path) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted()
        (tmp_path / "partial").mkdir()
        with (tmp_path / "partial" / wanted.blob.digest).open("wb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            with pytest.raises(DiskError, match=r"is being fetched into .* by another process"):
                await one.fetch(wanted)
        await one.fetch(wanted)
        assert one.file() == CONTENT


@pytest.mark.point("13")
async def test_parts_of_an_earlier_fetch_are_not_fetched_again(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted()
        leave(tmp_path, wanted.blob, CONTENT, range(14))
        await one.fetch(wanted)
        assert one.file() == CONTENT
        assert sorted(str(span) for span in one.ranges()) == ["bytes=57344-61439", "bytes=61440-65535"]


@pytest.mark.point("13")
async def test_corrupt_partial_file_is_dropped_and_fetched_again(tmp_path: Path, way: str) -> None:
    async with place(tmp_path) as one:
        wanted = one.wanted()
        leave(tmp_path, wanted.blob, WRONG, range(16))
        await one.fetch(wanted)
        assert one.file() == CONTENT
        assert len(one.ranges()) == 16
        assert one.left() == []


@pytest.mark.point("13")
async def test_completed_parts_are_recorded_before_the_fetch_ends(tmp_path: Path, way: str) -> None:
    """The progress file lists them before the fetch ends, so that they survive if the process is killed."""
    async with place(tmp_path) as one:
        wanted = one.wanted()
        one.fake.answers[one.url()].extend([lambda request: answer_part(request, CONTENT)] * 5)
        one.fake.always[one.url()] = breaking(one, "hang")
        running = asyncio.create_task(one.fetch(wanted))
        path = tmp_path / "partial" / f"{wanted.blob.digest}.parts"
        async with asyncio.timeout(90):
            while not path.exists() or path.read_bytes().count(b"\n") < 5:
                await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
