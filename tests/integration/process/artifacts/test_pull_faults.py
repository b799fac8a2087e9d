"""The real `pilotlight weights pull` on a disk that fills up, and killed midway: case 48 of the fault list."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from artifacts.digest import Digest
from artifacts.disk.durable_writes import Disk
from artifacts.download import progress_file
from artifacts.http.transport import Site
from artifacts.oci import blob_progress
from artifacts.registry.client import Client
from artifacts.store.store import Store
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import NAME
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.registry import FakeRegistry, digest_of, reply
from tests.support.harness.artifacts.weight_store import content, whole
from tests.support.harness.faults.full_disk import why_no_mount

PART = 8 << 20
SMALL, LARGE = {"a.gguf": as_gguf(content("a", 1 << 20))}, {"b.gguf": as_gguf(content("b", 2 * PART + (4 << 20)))}
BLOB = digest_of(LARGE["b.gguf"])


class Held:
    """A registry that sends a blob up to the last byte, and the rest when released."""

    def __init__(self, fake: FakeRegistry) -> None:
        self.fake = fake
        self.until = 1 << 62
        self.came = asyncio.Event()
        self.go_on = asyncio.Event()
        fake.always["GET", f"/v2/{NAME}/blobs/{BLOB}"] = self.answer

    def ranges(self) -> list[str]:
        return [one.headers.get("range", "") for one in self.fake.asked("GET", BLOB)]

    async def answer(self, request: web.Request) -> web.StreamResponse:
        blob = self.fake.blobs[BLOB]
        first, last = 0, len(blob) - 1
        if "Range" in request.headers:
            first, last = (int(one) for one in request.headers["Range"].removeprefix("bytes=").split("-"))
        headers = {"Content-Range": f"bytes {first}-{last}/{len(blob)}", "Content-Length": str(last + 1 - first)}
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200, headers=headers)
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            await answer.write(blob[first : min(last + 1, self.until)])
            if last + 1 > self.until:
                self.came.set()
                await self.go_on.wait()
                await answer.write(blob[max(first, self.until) : last + 1])
        return answer


@contextlib.asynccontextmanager
async def registry(tmp_path: Path) -> AsyncIterator[Held]:
    """Serve both models, raw, under the tags `small` and `large`."""
    async with FakeRegistry().serving() as fake:
        async with Client(Site(fake.host)) as client:
            for tag, files in (("small", SMALL), ("large", LARGE)):
                source = packed_models.model(tmp_path / tag / "model", files)
                await packed_models.push(
                    client, packed_models.packed(source, tmp_path / tag / "layout", "modelpack-raw"), tag=tag
                )
        held = Held(fake)
        try:
            yield held
        finally:
            held.go_on.set()


def reference(held: Held, tag: str) -> str:
    return f"oci://{held.fake.host}/{NAME}:{tag}"


@pytest.mark.point("13")
async def test_pull_resumes_after_a_full_disk_and_keeps_other_copies(tmp_path: Path) -> None:
    """The error is one line with the fix; no partial copy is visible; other copies are unchanged; a pull resumes."""
    if (able := why_no_mount()) is not None:
        pytest.skip(f"no mount namespace of its own here: {able}")
    disk = tmp_path / "disk"
    disk.mkdir()
    async with registry(tmp_path) as held:
        held.until = PART + (2 << 20)

        async def full(request: web.Request) -> web.StreamResponse:
            held.go_on.set()
            return await reply()(request)

        held.fake.always["GET", "/full"] = full
        words = (
            "-m",
            "tests.support.harness.faults.full_disk",
            str(disk),
            held.fake.host,
            *(reference(held, t) for t in ("small", "large")),
        )
        process = await asyncio.create_subprocess_exec(
            "unshare", "-m", sys.executable, *words, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        async with asyncio.timeout(240):
            out, error = await process.communicate()
        assert process.returncode == 0, error.decode()
        result = json.loads(out)
        ranges = held.ranges()
    assert result["first"][0] == 0
    code, reported = result["full"]
    assert (code, reported.count("\n")) == (1, 1), reported
    assert "the disk is full; free space or use a larger volume" in reported
    assert [one["artifact"] for one in result["copies"]] == [reference(held, "small")]
    assert result["verify"][0] == 0
    names = {path.rpartition("/")[2] for path in result["half"]}
    assert {one for one in names if not one.startswith("sha256-")} == {"a.gguf", "copy.json", "lease"}
    assert result["again"][0] == 0, result["again"]
    assert result["verify again"][0] == 0
    assert ranges[0] == ""
    first, last = (int(one) for one in ranges[1].removeprefix("bytes=").split("-"))
    assert 0 < first < 2 * PART  # the data on disk is kept; the socket buffers determine how much that is
    assert (len(ranges), last) == (2, len(LARGE["b.gguf"]) - 1)


@pytest.mark.case("48")
async def test_pull_killed_repeatedly_resumes_and_completes(tmp_path: Path) -> None:
    """SIGKILL before the first byte, within a part, between parts and before the last byte; one store for all.
    Each pull resumes where the sidecar reply, less than one mark behind the received data.
    """
    store = tmp_path / "store"
    size = len(LARGE["b.gguf"])
    there_bytes = 0
    async with registry(tmp_path) as held:
        words = ("-m", "pilotlight", "weights", "pull", reference(held, "large"), "--store", str(store))
        for at in (0, 3 << 19, PART + 1, 2 * PART + 5, size - 1):
            held.until = at
            held.came.clear()
            process = await asyncio.create_subprocess_exec(sys.executable, *words, stderr=subprocess.PIPE)
            async with asyncio.timeout(60):
                await held.came.wait()
                while at - _remembered_bytes(store, size) >= blob_progress.MARK_BYTES:
                    assert process.returncode is None
                    await asyncio.sleep(0.01)
            process.kill()
            await process.wait()
            assert held.ranges()[-1] == (f"bytes={there_bytes}-{size - 1}" if there_bytes else ""), at
            there_bytes = _remembered_bytes(store, size)
            assert whole(Store(store)) == {}, at
        held.until = size
        done = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=subprocess.PIPE)
        async with asyncio.timeout(60):
            assert await done.wait() == 0
        assert held.ranges()[-1] == f"bytes={there_bytes}-{size - 1}"
    there = Store(store).open()
    assert whole(there) == {reference(held, "large"): LARGE}
    assert not list(there.layout.partials.iterdir())
    assert 0 <= there.stored_bytes() - size < 4096  # its manifest and config are stored, too
    assert Digest(BLOB) in next(there.layout.records()).blobs


def _remembered_bytes(store: Path, size: int) -> int:
    """Return the number of bytes that the sidecar records."""
    reported = [
        progress_file.parse_progress(one.read_bytes(), Digest(BLOB), size, Disk().boot)
        for one in store.rglob("*.parts")
    ]
    return max((one.came for one in reported if one is not None), default=0)
