"""From a reference to a Copy, with an in-memory registry; artifacts are packed as by `weights pack`."""

from __future__ import annotations

import contextlib
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from aiohttp import web

from artifacts import digest as digests
from artifacts import reference
from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.digest import Digest
from artifacts.fetch import registry as obtain
from artifacts.fetch import registry_files
from artifacts.fetch.registry import Came, MirrorSite, Registries
from artifacts.http.transport import Site
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.pack.pack import Form
from artifacts.registry.client import Client
from artifacts.registry_errors import DeniedError, UnreachableError
from artifacts.store.copies import Copy
from artifacts.store.file_names import CopyKey
from artifacts.store.layout import ForbiddenError, NoRoomError
from artifacts.store.permission_cache import Permits
from artifacts.store.store import Store
from artifacts.store.stored_copy_check import verify_copy
from artifacts.store.tag_cache import Meanings
from tests.support.builders.artifacts import packed_models, tar_archives
from tests.support.builders.artifacts.packed_models import CONTENT, FILES, NAME, read_files
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.registry import PASSWORD, FakeRegistry, StillClock, keychain

pytestmark = pytest.mark.standard


class Node:
    """A registry with a model, and a node with a store."""

    def __init__(self, fake: FakeRegistry, store: Store, digest: Digest) -> None:
        self.fake, self.store, self.digest = fake, store, digest
        self.ways = Registries(pace=StillClock())
        self.came: list[Came] = []

    def of(self, what: str = f"{NAME}:v1") -> reference.Reference:
        return reference.parse_reference(f"oci://{self.fake.host}/{what}")

    async def obtain(self, what: str = f"{NAME}:v1", store: Store | None = None) -> Copy:
        return await obtain.fetch_from_registry(self.of(what), store or self.store, self.ways, self.came.append)

    async def kept(self, what: str = f"{NAME}:v1") -> dict[str, bytes] | None:
        """Return the files of the stored Copy, or None if there is none."""
        copy = await obtain.find_stored_copy(self.of(what), self.store, self.ways)
        if copy is None:
            return None
        with copy:
            return read_files(copy.folder)

    def image(self, *layers: tuple[str, bytes], config: dict[str, Any] | None = None, tag: str = "image") -> None:
        """Add an image with these layers, each a media type and its bytes."""
        raw = json.dumps(config or {}).encode()
        body = {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _blob(self.fake, "application/vnd.oci.image.config.v1+json", raw),
            "layers": [_blob(self.fake, kind, content) for kind, content in layers],
        }
        self.fake.manifest(NAME, tag, json.dumps(body).encode())


def _blob(fake: FakeRegistry, media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": fake.blob(content), "size": len(content)}


LAYER = "application/vnd.oci.image.layer.v1.tar"


@contextlib.asynccontextmanager
async def node(tmp_path: Path, form: Form = "modelpack") -> AsyncIterator[Node]:
    layout = packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout", form)
    async with FakeRegistry().serving() as fake:
        async with Client(Site(fake.host), pace=StillClock()) as client:
            digest = await packed_models.push(client, layout)
        fake.seen.clear()
        yield Node(fake, Store(tmp_path / "store", spare_bytes=0).open(), digest)


def left(store: Store) -> list[Path]:
    """Return the non-empty files that a pull left in the store outside of Copies."""
    return [path for path in store.layout.partials.rglob("*") if path.is_file() and path.stat().st_size]


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
async def test_pulled_model_has_identical_files_and_is_not_fetched_again(tmp_path: Path, form: Form) -> None:
    async with node(tmp_path, form) as one:
        with await one.obtain() as copy:
            assert read_files(copy.folder) == FILES
            assert copy.record.digest == one.digest
            assert {file.path: file.digest for file in copy.record.laid} == {
                path: digests.compute_digest(content) for path, content in FILES.items()
            }
            assert {file.path: file.role for file in copy.record.laid}["model.gguf"] == "weight"
            assert list(verify_copy(copy.record, copy.folder)) == []
        assert left(one.store) == []
        last = one.came[-1]
        assert last.bytes == last.total_bytes > len(CONTENT)
        one.fake.seen.clear()
        with await one.obtain() as again:
            assert read_files(again.folder) == FILES
        assert one.fake.asked("GET", "/blobs/") == one.fake.asked("GET", "/blobs/")[:1]  # at most its config


async def test_stored_copy_is_found_without_contacting_the_registry(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        assert await one.kept() is None
        (await one.obtain()).close()
        one.fake.seen.clear()
        for what in (f"{NAME}:v1", f"{NAME}@{one.digest}"):
            assert await one.kept(what) == FILES
        assert one.fake.seen == []
        assert await one.kept(f"{NAME}:v2") is None
        one.store.evict(CopyKey(one.fake.host, one.digest))
        assert await one.kept() is None


async def test_moved_tag_resolves_to_the_stored_copy_until_the_next_pull(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        (await one.obtain()).close()
        other = packed_models.packed(
            packed_models.model(tmp_path / "new", {"b.gguf": as_gguf(b"other")}), tmp_path / "other"
        )
        async with Client(Site(one.fake.host), pace=StillClock()) as client:
            await packed_models.push(client, other)
        assert await one.kept() == FILES
        (await one.obtain()).close()
        assert await one.kept() == {"b.gguf": as_gguf(b"other")}


@pytest.mark.parametrize("packer", [gzip.compress, zstandard.compress], ids=["gzip", "zstd"])
async def test_image_pull_stores_only_the_models_folder(
    tmp_path: Path, packer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {gzip.compress: "gzip", zstandard.compress: "zstd"}[packer]
    much = as_gguf(bytes(2 << 20))
    software = tar_archives.honest({"etc/passwd": b"root", "bin/sh": b"#!"})
    model = tar_archives.honest({"models/m.gguf": much, "models/config.json": b"{}"})
    async with node(tmp_path) as one:
        one.image((LAYER, software), (f"{LAYER}+{kind}", packer(model)))
        with await one.obtain(f"{NAME}:image") as copy:
            assert read_files(copy.folder) == {"m.gguf": much, "config.json": b"{}"}
        small = Store(tmp_path / "small", bytes_max=2 << 20, spare_bytes=0).open()
        monkeypatch.setattr(registry_files, "_laid", lambda *_: pytest.fail("written before there was room for it"))
        with pytest.raises(NoRoomError, match="no room for"):
            await one.obtain(f"{NAME}:image", small)
        assert list(small.layout.records()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            tar_archives.honest({"m.gguf": b"GGUF", "load.py": b"import os"}),
            "load.py: code is not accepted from a registry",
        ),
        (tar_archives.member(b"../m.gguf", b"x") + tar_archives.END, "in the archive: its path"),
    ],
)
async def test_pull_of_an_archive_with_code_or_an_outside_path_stores_nothing(
    tmp_path: Path, content: bytes, message: str
) -> None:
    async with node(tmp_path) as one:
        one.image((LAYER, content))
        with pytest.raises(RefusedError, match=message):
            await one.obtain(f"{NAME}:image")
        assert list(one.store.layout.records()) == []
        assert left(one.store) == []


@pytest.mark.parametrize("inside", [True, False], ids=["in an archive", "as a layer"])
async def test_code_is_served_only_to_callers_that_allow_unsafe_files(tmp_path: Path, *, inside: bool) -> None:
    """A Copy that was fetched for one caller does not bypass the check for another."""
    files = {"m.gguf": b"GGUF", "load.py": b"import os"}
    async with node(tmp_path) as one:
        if inside:
            one.image((LAYER, tar_archives.honest(files)))
        else:
            kinds = {"m.gguf": "weight.v1.raw", "load.py": "code.v1.raw"}
            layers = [
                _blob(one.fake, f"application/vnd.cncf.model.{kinds[path]}", content)
                | {"annotations": {"org.cncf.model.filepath": path}}
                for path, content in files.items()
            ]
            kind = "application/vnd.cncf.model.config.v1+json"
            document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": _blob(one.fake, kind, b"{}")}
            one.fake.manifest(NAME, "image", json.dumps({**document, "layers": layers}).encode())
        of = one.of(f"{NAME}:image")
        with await obtain.fetch_from_registry(of, one.store, one.ways, allow_unsafe=True) as copy:
            assert read_files(copy.folder) == files
            assert copy.record.unsafe
        for again in (one.obtain(f"{NAME}:image"), one.kept(f"{NAME}:image")):
            with pytest.raises(RefusedError, match="code"):
                await again
        assert not one.store.rows()[0].in_use
        with await obtain.fetch_from_registry(one.of(), one.store, one.ways, allow_unsafe=True) as harmless:
            assert not harmless.record.unsafe
        assert await one.kept() == FILES


async def test_blobs_of_a_failed_pull_are_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with node(tmp_path) as one:

        async def breaks(*_: object) -> None:
            raise UnreachableError("the machine went away")

        with monkeypatch.context() as patch:
            patch.setattr(registry_files, "_take_apart", breaks)
            with pytest.raises(UnreachableError):
                await one.obtain()
        one.fake.seen.clear()
        with await one.obtain() as copy:
            assert read_files(copy.folder) == FILES
        assert len(one.fake.asked("GET", "/blobs/")) == 1  # only its config


async def test_stored_private_model_is_denied_without_a_login(tmp_path: Path) -> None:
    async with node(tmp_path) as one:

        def judge(request: web.Request) -> web.StreamResponse | None:
            if request.headers.get("Authorization") is not None:
                return None
            return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})

        one.fake.judge = judge
        with pytest.raises(DeniedError):
            await one.obtain()
        one.ways = Registries(keychain(one.fake.host), pace=StillClock())
        with await one.obtain() as copy:
            assert copy.record.private
        stored = [path.read_bytes() for path in tmp_path.joinpath("store").rglob("*") if path.is_file()]
        assert not any(PASSWORD.encode() in text for text in stored)
        one.ways = Registries(pace=StillClock())
        with pytest.raises(ForbiddenError, match="fetched with a login"):
            await one.kept()


@pytest.mark.point("14")
async def test_pull_permission_survives_a_restart_during_a_registry_outage(tmp_path: Path) -> None:
    """During the outage, the same login gets the Copy from a newly opened store, and another login does not."""
    async with node(tmp_path) as one:
        own, others = keychain(one.fake.host), Known(one.fake.host, Login("other-user", PASSWORD))
        one.ways = Registries(own, pace=StillClock())
        (await one.obtain()).close()
        one.fake.judge = lambda _: web.Response(status=503)
        one.store = Store(tmp_path / "store", spare_bytes=0).open()
        one.store.permits = Permits(tmp_path / "store" / "permits", fresh_s=0.0)
        one.ways = Registries(own, pace=StillClock())
        assert await one.kept() == FILES
        assert one.fake.asked("HEAD", "/manifests/")
        one.ways = Registries(others, pace=StillClock())
        with pytest.raises(UnreachableError):
            await one.kept()


def test_different_logins_have_different_fingerprints() -> None:
    logins = [Login(*parts) for parts in (("a", "bc"), ("ab", "c"), ("a", "b"), ("a", "b"))]
    assert len({obtain.fingerprint_login(login, b"key") for login in logins}) == 3
    assert obtain.fingerprint_login(logins[0], b"key") != obtain.fingerprint_login(logins[0], b"another")


async def test_blobs_are_fetched_from_the_mirror_and_tags_from_the_registry(tmp_path: Path) -> None:
    async with node(tmp_path) as one, FakeRegistry().serving() as mirror:
        mirror.blobs = dict(one.fake.blobs)
        one.ways = Registries(pace=StillClock(), mirrors={one.fake.host: [MirrorSite(mirror.host)]})
        with await one.obtain() as copy:
            assert read_files(copy.folder) == FILES
        assert len(mirror.asked("GET", "/blobs/")) >= len(FILES)
        assert one.fake.asked("GET", "/blobs/") == []
        assert mirror.asked("GET", "/manifests/v1") == []


async def test_tag_cache_is_bounded_and_unreadable_entries_are_ignored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.store.tag_cache.MEANINGS_MAX", 2)
    async with node(tmp_path) as one:
        (await one.obtain()).close()
        known, copy = Meanings(one.store), one.store.find(CopyKey(one.fake.host, one.digest))
        assert copy is not None
        with copy:
            for tag in ("a", "b", "c"):
                known.remember(one.of(f"{NAME}:{tag}"), copy.record.key)
            there = sorted((tmp_path / "store/meanings").iterdir())
            assert len(there) == 2
            assert known.recall(one.of(f"{NAME}:c")) == copy.record.key
            for path in there:
                path.write_bytes(b"{")
            assert known.recall(one.of(f"{NAME}:c")) is None
