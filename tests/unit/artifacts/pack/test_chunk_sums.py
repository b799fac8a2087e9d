"""Digests of parts next to an artifact: pushed with large blobs, requested if bytes are wrong, and never a proof."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from artifacts import reference
from artifacts.digest import Digest
from artifacts.fetch import registry
from artifacts.fetch.registry import MirrorSite, Registries
from artifacts.http.transport import Site
from artifacts.pack import chunk_sums, push_artifact
from artifacts.registry.client import Client
from artifacts.registry.referrers import list_referrers
from artifacts.registry_errors import MismatchError
from artifacts.store.store import Store
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import NAME
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.registry import FakeRegistry, StillClock, part_of
from tests.support.harness.artifacts import registry_pull
from tests.support.harness.artifacts.registry_pull import small

pytestmark = pytest.mark.standard

CONTENT = as_gguf(registry_pull.CONTENT)
FILES = {"model.gguf": CONTENT}
BAD = 5
"""The corrupt part, of 16."""


@pytest.fixture(autouse=True)
def layout(monkeypatch: pytest.MonkeyPatch) -> None:
    small(monkeypatch)


class Pushed(NamedTuple):
    """A registry with a model of one large blob."""

    fake: FakeRegistry
    client: Client
    digest: Digest
    blob: str

    def ranges(self, fake: FakeRegistry | None = None) -> list[str]:
        seen = (fake or self.fake).asked("GET", self.blob)
        return sorted(one.headers.get("range", "") for one in seen)

    def lists(self) -> int:
        """Return how many times the list of digests was requested."""
        return len([one for one in self.fake.seen if one.method == "GET" and "referrers" in one.path])

    async def obtained(self, tmp_path: Path, *mirrors: FakeRegistry) -> dict[str, bytes]:
        self.fake.seen.clear()
        ways = Registries(pace=StillClock(), mirrors={"": [MirrorSite(one.host) for one in mirrors]})
        store = Store(tmp_path / "store", spare_bytes=0).open()
        with await registry.fetch_from_registry(
            reference.parse_reference(f"oci://{self.fake.host}/{NAME}:v1"), store, ways
        ) as copy:
            return {path: (copy.folder / path).read_bytes() for path in FILES}


def lying(blob: bytes, first: int) -> bytes:
    return blob[:first] + b"!" + blob[first + 1 :]


@contextlib.asynccontextmanager
async def pushed(tmp_path: Path, *, subjects: bool = False) -> AsyncIterator[Pushed]:
    layout = packed_models.packed(packed_models.model(tmp_path / "model", FILES), tmp_path / "layout", "modelpack-raw")
    async with FakeRegistry().serving() as fake, Client(Site(fake.host), pace=StillClock()) as client:
        fake.subjects = subjects
        digest = await push_artifact.push_layout(client, NAME, "v1", layout)
        blob = next(name for name, content in fake.blobs.items() if content == CONTENT)
        yield Pushed(fake, client, digest, blob)


async def test_chunk_sums_of_large_blobs_are_pushed_as_a_referrer(tmp_path: Path) -> None:
    async with pushed(tmp_path) as one:
        (found,) = await list_referrers(one.client, NAME, one.digest, chunk_sums.KIND)
        reported = json.loads(one.fake.manifests[NAME, found.digest][1])
        assert reported["subject"]["digest"] == one.digest
        assert reported["artifactType"] == reported["layers"][0]["mediaType"] == chunk_sums.KIND
        sums = await chunk_sums.fetch_chunk_sums(one.client, NAME, one.digest, Digest(one.blob), len(CONTENT))
        assert len(sums) == 16
        assert sums[BAD] == hashlib.sha256(CONTENT[BAD * 4096 : (BAD + 1) * 4096]).hexdigest()
        assert (
            await chunk_sums.fetch_chunk_sums(one.client, NAME, one.digest, Digest(one.blob), len(CONTENT) * 99999)
            == ()
        )


async def test_push_succeeds_if_chunk_sums_are_rejected_or_the_model_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuses(*_: object) -> None:
        raise MismatchError("registry.example: takes no such artifact")

    monkeypatch.setattr(chunk_sums, "push_chunk_sums", refuses)
    async with pushed(tmp_path) as one:
        assert (NAME, "v1") in one.fake.manifests
    monkeypatch.undo()
    async with pushed(tmp_path / "small") as one:
        assert await list_referrers(one.client, NAME, one.digest, chunk_sums.KIND) == []


async def test_only_the_corrupt_part_of_a_blob_is_fetched_again(tmp_path: Path) -> None:
    async with pushed(tmp_path) as one:
        lies = lying(CONTENT, BAD * 4096)
        span = f"bytes={BAD * 4096}-{BAD * 4096 + 4095}"

        async def first_it_lies(request: web.Request) -> web.StreamResponse:
            wrong = request.headers.get("Range") == span and one.ranges().count(span) == 1
            return part_of(request, lies if wrong else CONTENT)

        one.fake.always["GET", f"/v2/{NAME}/blobs/{one.blob}"] = first_it_lies
        assert await one.obtained(tmp_path) == FILES
        assert len(one.ranges()) == 17
        assert one.ranges().count(span) == 2
        assert one.lists() == 1


async def test_corrupt_mirror_part_is_fetched_from_the_registry(tmp_path: Path) -> None:
    async with pushed(tmp_path) as one, FakeRegistry().serving() as mirror:
        mirror.blobs = dict(one.fake.blobs) | {one.blob: lying(CONTENT, BAD * 4096)}
        assert await one.obtained(tmp_path, mirror) == FILES
        assert one.ranges() == [f"bytes={BAD * 4096}-{BAD * 4096 + 4095}"]


async def test_download_without_corruption_requests_no_chunk_sums(tmp_path: Path) -> None:
    async with pushed(tmp_path) as one:
        assert await one.obtained(tmp_path) == FILES
        assert one.lists() == 0


@pytest.mark.parametrize("message", ["nothing", "the wrong bytes", "noise"])
async def test_wrong_chunk_sums_never_validate_a_corrupt_blob(tmp_path: Path, message: str) -> None:
    """Only the digest of the whole blob counts: wrong bytes never become a Copy, whatever the list contains."""
    async with pushed(tmp_path) as one:
        lies = lying(CONTENT, BAD * 4096)
        (tmp_path / "lies").write_bytes(lies)
        listed = {
            "nothing": b'{"blobs":{}}',
            "the wrong bytes": chunk_sums.compute_chunk_sums({Digest(one.blob): tmp_path / "lies"}),
            "noise": b"\xff",
        }[message]
        (found,) = await list_referrers(one.client, NAME, one.digest, chunk_sums.KIND)
        document = json.loads(one.fake.manifests[NAME, found.digest][1])
        document["layers"][0] |= {"digest": one.fake.blob(listed), "size": len(listed)}
        changed = one.fake.manifest(NAME, "changed", json.dumps(document).encode())
        listing = f"sha256-{one.digest.partition(':')[2]}"
        body = one.fake.manifests[NAME, listing][1].replace(found.digest.encode(), changed.encode())
        one.fake.manifest(NAME, listing, body, "application/vnd.oci.image.index.v1+json")
        one.fake.blobs[one.blob] = lies
        with pytest.raises(MismatchError, match="its bytes do not match its digest"):
            await one.obtained(tmp_path)
        assert not list((tmp_path / "store" / "copies").rglob("*.gguf"))
        assert not [path for path in (tmp_path / "store" / "partial").rglob("*") if path.is_file()]
