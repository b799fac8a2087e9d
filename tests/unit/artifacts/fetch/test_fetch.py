"""Artifacts of every kind of source are fetched into the same store; some are never fetched."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from artifacts.fetch import fetch
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Registries
from artifacts.formats import gguf
from artifacts.http.transport import Transport
from artifacts.reference import BadReferenceError, Reference
from artifacts.registry_errors import PolicyError
from artifacts.signatures.policy import Policy
from artifacts.source_uri import Bucket, Hub
from artifacts.store.store import Store
from tests.support.builders.artifacts import packed_models
from tests.support.fakes.hub import FakeHub
from tests.support.fakes.registry import StillClock
from tests.support.fakes.s3 import FakeS3
from tests.unit.artifacts.formats.test_gguf import write

pytestmark = pytest.mark.standard


def test_remote_sources_are_parsed_and_local_files_rejected() -> None:
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


async def test_model_header_is_fetched_from_the_hub(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf").read_bytes()
    async with FakeHub({}, {"a.gguf": content}).both() as fake:
        ways = Ways(Registries(pace=StillClock()), fake.env(), tmp_path)
        assert await fetch.fetch_headers(Hub("acme/tiny"), ways, tmp_path / "headers") == ["a.gguf"]
        assert gguf.load_gguf_info(tmp_path / "headers" / "a.gguf") == gguf.load_gguf_info(tmp_path / "a.gguf")


async def test_model_header_is_fetched_from_a_bucket_without_checksums(tmp_path: Path) -> None:
    content = write(tmp_path / "a.gguf").read_bytes()
    async with FakeS3({"m/a.gguf": content}).serving() as fake:
        assert isinstance(fake, FakeS3)
        ways = Ways(Registries(pace=StillClock()), fake.env(), tmp_path)
        assert await fetch.fetch_headers(Bucket("models", "m/"), ways, tmp_path / "headers") == ["a.gguf"]
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
