"""What a node serves to other nodes, over real connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from artifacts import digest
from artifacts.digest import Digest
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.peers import server
from artifacts.store.file_names import CopyKey
from artifacts.store.pull import CopySpec, Job
from artifacts.store.store import Caller, Store
from tests.support.harness.artifacts import peer_nodes
from tests.support.harness.artifacts.peer_nodes import TOKEN, Neighbour
from tests.support.harness.artifacts.weight_store import raw

pytestmark = pytest.mark.standard

CONTENT = bytes(range(256)) * 400
FILE = raw("x")._replace(digest=digest.compute_digest(CONTENT), size=len(CONTENT), path="x.gguf")
DOCUMENT = f'{{"schemaVersion": 2, "mediaType": "{MANIFEST}"}}'.encode()
KEY = CopyKey("registry.example", digest.compute_digest(DOCUMENT))
BLOB = f"/v2/{KEY.room}/team/model/blobs/{FILE.digest}"
LET_IN = {"Authorization": f"Bearer {TOKEN}"}


async def yes() -> bool:
    return True


async def filled(store: Store, *, private: bool = False) -> Store:
    """Fill the store with one Copy."""

    async def fetch(job: Job) -> None:
        await asyncio.to_thread(job.blob(FILE.digest).write_bytes, CONTENT)

    wanted = CopySpec("oci://registry.example/team/model:v1", KEY, (FILE,), documents=(DOCUMENT, b"{}"))
    (await store.ensure(wanted, fetch, Caller("me", yes) if private else None)).close()
    return store


@contextlib.asynccontextmanager
async def node(
    tmp_path: Path, *, private: bool = False, streams: int = 16, token: str | None = TOKEN
) -> AsyncIterator[tuple[Neighbour, aiohttp.ClientSession]]:
    """A node with the Copy, and a session that sends the token; `private`: the Copy was fetched with a login."""
    store = await filled(Store(tmp_path / "store", spare_bytes=0).open(), private=private)
    async with (
        peer_nodes.serving(store, private=token is not None, streams=streams, token=token) as one,
        aiohttp.ClientSession(one.url, headers=LET_IN) as session,
    ):
        yield one, session


@pytest.mark.parametrize(
    ("span", "status", "first", "last"),
    [
        (None, 200, 0, len(CONTENT) - 1),
        ("bytes=0-0", 206, 0, 0),
        ("bytes=1000-69999", 206, 1000, 69_999),
        (f"bytes=5-{len(CONTENT) - 1}", 206, 5, len(CONTENT) - 1),
    ],
)
async def test_blob_request_returns_the_whole_blob_or_the_requested_range(
    tmp_path: Path, span: str | None, status: int, first: int, last: int
) -> None:
    async with node(tmp_path) as (_, session):
        headers = {} if span is None else {"Range": span}
        for method in ("GET", "HEAD"):
            async with session.request(method, BLOB, headers=headers) as answer:
                assert answer.status == status
                assert answer.headers["ETag"] == f'"{FILE.digest}"'
                assert answer.headers["Content-Length"] == str(last + 1 - first)
                assert await answer.read() == (CONTENT[first : last + 1] if method == "GET" else b"")
                response = answer.headers.get("Content-Range")
                assert response == (None if span is None else f"bytes {first}-{last}/{len(CONTENT)}")


@pytest.mark.parametrize(
    "span", ["bytes=0-", "bytes=-5", f"bytes=0-{len(CONTENT)}", "bytes=5-4", "bytes=0-1,3-4", "lines=0-1", "bytes=0-1x"]
)
async def test_blob_request_with_an_unsupported_range_returns_416(tmp_path: Path, span: str) -> None:
    async with node(tmp_path) as (_, session), session.get(BLOB, headers={"Range": span}) as answer:
        assert answer.status == 416
        assert answer.headers["Content-Range"] == f"bytes */{len(CONTENT)}"
        assert await answer.read() == b""


@pytest.mark.parametrize(
    "path",
    [
        BLOB.replace(KEY.room, CopyKey("other.example", KEY.digest).room),
        BLOB.replace(KEY.room, ".."),
        BLOB[:-1],
        BLOB[:-64] + "../../copies",
        BLOB.replace("sha256:", "sha256-"),
        f"/v2/{KEY.room}/team/model/blobs/{digest.compute_digest(b'none')}",
        f"/v2/{KEY.room}/team/model/manifests/v1",
        f"/v2/{KEY.room}/team/model/manifests/{FILE.digest}",
        "/v2/",
        "/",
    ],
)
async def test_request_for_an_unknown_or_invalid_path_returns_404(tmp_path: Path, path: str) -> None:
    async with node(tmp_path) as (_, session), session.get(path) as answer:
        assert answer.status == 404


async def test_request_with_a_write_method_returns_405(tmp_path: Path) -> None:
    async with node(tmp_path) as (_, session):
        for method in ("PUT", "POST", "DELETE", "PATCH"):
            async with session.request(method, BLOB, data=b"x") as answer:
                assert answer.status == 405


async def test_manifest_request_for_a_private_model_returns_404(tmp_path: Path) -> None:
    manifest = f"/v2/{KEY.room}/team/model/manifests/{KEY.digest}"
    async with node(tmp_path / "public") as (_, session):
        async with session.get(manifest) as answer:
            assert (answer.status, answer.content_type, await answer.read()) == (200, MANIFEST, DOCUMENT)
        async with session.get(BLOB.replace(FILE.digest, digest.compute_digest(b"{}"))) as answer:
            assert await answer.read() == b"{}"
    async with node(tmp_path / "private", private=True) as (_, session):
        async with session.get(manifest) as answer:
            assert answer.status == 404
        async with session.get(BLOB) as answer:
            assert answer.status == 200


async def test_request_with_a_wrong_token_returns_401(tmp_path: Path) -> None:
    async with node(tmp_path / "a") as (_, session):
        for shown in ("", "Bearer ", f"Basic {TOKEN}", f"Bearer {TOKEN}x"):
            async with session.get(BLOB, headers={"Authorization": shown}) as answer:
                assert answer.status == 401
    async with node(tmp_path / "b", private=True, token=None) as (_, session), session.get(BLOB) as answer:
        assert answer.status == 404
    async with node(tmp_path / "c", token=None) as (_, session), session.get(BLOB) as answer:
        assert answer.status == 200


async def test_request_above_the_stream_limit_returns_429(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, sends = asyncio.Event(), server._send

    async def held(*given: object) -> None:
        await go.wait()
        await sends(*given)  # type: ignore[arg-type]  # passed on unchanged

    monkeypatch.setattr(server, "_send", held)
    async with node(tmp_path, streams=2) as (_, session):
        first = [await session.get(BLOB) for _ in range(2)]
        async with session.get(BLOB) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (429, "1")
        async with session.head(BLOB) as answer:
            assert answer.status == 200
        go.set()
        for one in first:
            async with one:
                assert await one.read() == CONTENT
        async with session.get(BLOB) as answer:
            assert await answer.read() == CONTENT


async def test_stalled_client_is_disconnected_and_frees_its_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "STEP_S_MAX", 0.05)
    blocked = asyncio.Event()

    async def never(*_: object) -> None:
        if not blocked.is_set():
            blocked.set()
            await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr(server, "_send", never)
        async with node(tmp_path, streams=1) as (_, session):
            with pytest.raises(aiohttp.ClientError):
                async with session.get(BLOB) as answer:
                    await answer.read()
            patch.undo()
            async with session.get(BLOB) as answer:
                assert await answer.read() == CONTENT


async def test_blob_is_served_without_sendfile_support(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def none(*_: object, **__: object) -> int:
        raise NotImplementedError

    monkeypatch.setattr(asyncio.get_running_loop(), "sendfile", none)
    monkeypatch.setattr(server, "PIECE_BYTES", 1000)
    async with node(tmp_path) as (_, session), session.get(BLOB, headers={"Range": "bytes=7-50000"}) as answer:
        assert await answer.read() == CONTENT[7:50_001]


async def test_blob_truncated_on_disk_is_served_with_its_actual_length(tmp_path: Path) -> None:
    async with node(tmp_path) as (one, session):
        path = one.store.layout.blob(KEY, Digest(FILE.digest))
        path.chmod(0o644)
        async with session.get(BLOB) as answer:
            await answer.read()
        with path.open("r+b") as file:
            file.truncate(1000)
        async with session.get(BLOB) as answer:
            assert answer.headers["Content-Length"] == "1000", "the client sees the different size"
