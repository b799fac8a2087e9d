"""Artifacts of every kind of source are fetched into the same store; some are never fetched."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from artifacts import digest
from artifacts.fetch import fetch
from artifacts.fetch import fetch as bring
from artifacts.fetch.fetch import Lies, Ways
from artifacts.fetch.registry import Registries
from artifacts.formats import gguf
from artifacts.http.transport import Transport
from artifacts.peers.client import Peering
from artifacts.peers.selection import Peer
from artifacts.reference import BadReferenceError, Reference
from artifacts.registry_errors import DeniedError, PolicyError
from artifacts.signatures.policy import Policy
from artifacts.source_uri import Bucket, Hub
from artifacts.store.copies import Copy
from artifacts.store.store import Store
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.hub import TOKEN as HUBS
from tests.support.fakes.hub import FakeHub
from tests.support.fakes.registry import StillClock, reply
from tests.support.fakes.s3 import FakeS3
from tests.support.harness.artifacts.peer_nodes import TOKEN, Neighbour, serving
from tests.unit.artifacts.formats.test_gguf import write

pytestmark = pytest.mark.standard


def test_oci_hf_and_s3_uris_are_remote_sources_and_file_uris_are_rejected() -> None:
    assert (
        fetch.parse_remote_source("ghcr.io/a/b:c")
        == fetch.parse_remote_source("oci://ghcr.io/a/b:c")
        == Reference("ghcr.io", "a/b", "c")
    )
    assert fetch.parse_remote_source("hf://a/b@c") == Hub("a/b", "c")
    assert fetch.parse_remote_source("s3://abc/d") == Bucket("abc", "d")
    with pytest.raises(BadReferenceError, match="it is a local path"):
        fetch.parse_remote_source("file:///a.gguf")


def test_source_origins_differ_by_endpoint_and_bucket(tmp_path: Path) -> None:
    ways = Ways(env={}, home=tmp_path)
    mirror = Ways(
        env={"HF_ENDPOINT": "https://mirror.example/hf", "AWS_ENDPOINT_URL": "http://minio:9000"}, home=tmp_path
    )
    names = [
        fetch.format_source_origin(of, by)
        for of in (Hub("a/b"), Bucket("abc", "d"), Bucket("abd", "d"))
        for by in (ways, mirror)
    ]
    assert names == [
        "hf huggingface.co/", "hf mirror.example/hf/",
        "s3 amazonaws.com abc", "s3 minio:9000 abc", "s3 amazonaws.com abd", "s3 minio:9000 abd",
    ]  # fmt: skip


async def test_enforced_signature_policy_rejects_hugging_face_sources(tmp_path: Path) -> None:
    async with FakeHub({}, {"a.gguf": b"GGUF"}).both() as fake:
        store = Store(tmp_path / "store", spare_bytes=0).open()
        free = Ways(Registries(pace=StillClock()), fake.env(), tmp_path)
        (await fetch.fetch_artifact(Hub("acme/tiny"), store, free)).close()
        strict = Ways(Registries(signatures=Policy("enforce", ())), fake.env(), tmp_path)
        for ask in (fetch.fetch_artifact, fetch.find_stored_copy):
            with pytest.raises(PolicyError, match="only weights in a registry have signatures"):
                await ask(Hub("acme/tiny"), store, strict)


@pytest.mark.parametrize("scheme", ["hf", "s3"])
async def test_gguf_header_is_fetched_from_hugging_face_or_an_s3_bucket(tmp_path: Path, scheme: str) -> None:
    content = write(tmp_path / "a.gguf").read_bytes()
    hub, s3 = FakeHub({}, {"a.gguf": content}), FakeS3({"m/a.gguf": content})
    async with hub.both(), s3.serving():
        env, of = (hub.env(), Hub("acme/tiny")) if scheme == "hf" else (s3.env(), Bucket("models", "m/"))
        ways = Ways(Registries(pace=StillClock()), env, tmp_path)
        assert await fetch.fetch_headers(of, ways, tmp_path / "headers") == ["a.gguf"]
    assert gguf.load_gguf_info(tmp_path / "headers" / "a.gguf") == gguf.load_gguf_info(tmp_path / "a.gguf")


@pytest.mark.parametrize("scheme", ["oci", "hf"])
async def test_cancellation_while_connections_close_releases_the_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scheme: str
) -> None:
    closed = Transport.__aexit__

    async def cancelled(self: Transport, *error: Any) -> None:
        await closed(self, *error)
        raise asyncio.CancelledError

    async with contextlib.AsyncExitStack() as stack:
        fake = await stack.enter_async_context(FakeHub({}, {"a.gguf": b"GGUF"}).both())
        of: fetch.Lies = Hub("acme/tiny")
        if scheme == "oci":
            packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout")
            host = stack.enter_context(packed_models.served(tmp_path / "layout"))
            of = fetch.parse_remote_source(f"oci://{host}/{packed_models.NAME}:v1")
        store = Store(tmp_path / "store", spare_bytes=0).open()
        ways = Ways(Registries(pace=StillClock()), fake.env(), tmp_path)
        with monkeypatch.context() as patched:
            patched.setattr(Transport, "__aexit__", cancelled)
            with pytest.raises(asyncio.CancelledError):
                await fetch.fetch_artifact(of, store, ways)
        (row,) = store.rows()
        assert not row.in_use


# --- from other nodes ------------------------------------------------------------------------------------------------

CONTENT = as_gguf(hashlib.shake_128(b"weights").digest(300_000))
DIGEST = digest.compute_digest(CONTENT)


class Place(NamedTuple):
    """A source with an artifact, and a node that has it."""

    of: Lies
    fake: FakeHub | FakeS3
    folder: Path
    peer: Neighbour

    async def bring(self, name: str, env: dict[str, str] | None = None) -> Copy:
        """Fetch it to another node."""
        pace = StillClock()
        among = Peering(lambda: [Peer("node-0", self.peer.url)], own=name, token=lambda: TOKEN)
        ways = Ways(Registries(pace=pace, peering=among), self.fake.env() if env is None else env, self.folder)
        return await bring.fetch_artifact(self.of, Store(self.folder / name, spare_bytes=0).open(), ways)

    def gave(self) -> int:
        """Return how many times the source served its bytes."""
        if isinstance(self.fake, FakeHub):
            return sum(one.method == "GET" for one in self.fake.cdn.seen)
        return sum(one.method == "GET" and "a.gguf" in one.path for one in self.fake.seen)


@contextlib.asynccontextmanager
async def place(folder: Path, scheme: str, *, summed: bool = True) -> AsyncIterator[Place]:
    hub, s3 = FakeHub({}, {"a.gguf": CONTENT}), FakeS3({"m/a.gguf": CONTENT})
    s3.summed = summed
    store = Store(folder / "store", spare_bytes=0).open()
    async with hub.both(), s3.serving():
        fake, of = (hub, Hub("acme/tiny")) if scheme == "hf" else (s3, Bucket("models", "m/"))
        (await bring.fetch_artifact(of, store, Ways(Registries(pace=StillClock()), fake.env(), folder))).close()
        async with serving(store) as peer:
            yield Place(of, fake, folder, peer)


@pytest.mark.parametrize("scheme", ["hf", "s3"])
async def test_hub_or_bucket_weights_are_downloaded_from_a_peer_that_has_them(tmp_path: Path, scheme: str) -> None:
    async with place(tmp_path, scheme) as one:
        before = one.gave()
        with await one.bring("b") as copy:
            assert (copy.folder / "a.gguf").read_bytes() == CONTENT
        assert one.gave() == before
        assert one.peer.asked(DIGEST, 200) + one.peer.asked(DIGEST, 206) > 0


@pytest.mark.parametrize("scheme", ["hf", "s3"])
async def test_file_is_fetched_from_its_source_if_peer_sends_bad_bytes_or_404(tmp_path: Path, scheme: str) -> None:
    async with place(tmp_path, scheme) as one:
        for name, judge in (("b", reply(200, bytes(len(CONTENT)))), ("c", reply(404))):
            one.peer.judge, before = judge, one.gave()
            with await one.bring(name) as copy:
                assert (copy.folder / "a.gguf").read_bytes() == CONTENT
            assert one.gave() > before
            assert one.peer.asked(DIGEST) > 0


async def test_file_without_a_known_checksum_is_not_requested_from_peers(tmp_path: Path) -> None:
    async with place(tmp_path, "s3", summed=False) as one:
        with await one.bring("b") as copy:
            assert (copy.folder / "a.gguf").read_bytes() == CONTENT
        assert not one.peer.seen


async def test_pull_denied_by_hugging_face_sends_no_request_to_peers(tmp_path: Path) -> None:
    async with place(tmp_path, "hf") as one:
        assert isinstance(one.fake, FakeHub)
        one.fake.private = True
        with pytest.raises(DeniedError):
            await one.bring("b", one.fake.env())
        assert not one.peer.seen
        (await one.bring("c", one.fake.env(HUBS))).close()
        assert one.peer.asked(DIGEST) > 0
