"""Files of a Hub or a bucket also come from other nodes, if their digest is known in advance."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web

from artifacts import digest
from artifacts.fetch import fetch as bring
from artifacts.fetch.fetch import Lies, Ways
from artifacts.fetch.registry import Registries
from artifacts.peers.client import Peering
from artifacts.peers.selection import Peer
from artifacts.registry_errors import DeniedError
from artifacts.source_uri import Bucket, Hub
from artifacts.store.publish import Copy
from artifacts.store.store import Store
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.hub import TOKEN as HUBS
from tests.support.fakes.hub import FakeHub
from tests.support.fakes.registry import StillClock
from tests.support.fakes.s3 import FakeS3
from tests.support.harness.artifacts.peer_nodes import TOKEN, Neighbour, serving

pytestmark = pytest.mark.standard

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
async def test_weights_from_a_hub_or_bucket_are_fetched_from_a_peer(tmp_path: Path, scheme: str) -> None:
    async with place(tmp_path, scheme) as one:
        before = one.gave()
        with await one.bring("b") as copy:
            assert (copy.folder / "a.gguf").read_bytes() == CONTENT
        assert one.gave() == before
        assert one.peer.asked(DIGEST, 200) + one.peer.asked(DIGEST, 206) > 0


@pytest.mark.parametrize("scheme", ["hf", "s3"])
async def test_corrupt_or_empty_peer_falls_back_to_the_source(tmp_path: Path, scheme: str) -> None:
    async def lies(request: web.Request) -> web.StreamResponse:
        return web.Response(body=bytes(len(CONTENT)))

    async def lacks(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async with place(tmp_path, scheme) as one:
        for name, judge in (("b", lies), ("c", lacks)):
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


async def test_caller_denied_by_the_hub_gets_nothing_from_peers(tmp_path: Path) -> None:
    async with place(tmp_path, "hf") as one:
        assert isinstance(one.fake, FakeHub)
        one.fake.private = True
        with pytest.raises(DeniedError):
            await one.bring("b", one.fake.env())
        assert not one.peer.seen
        (await one.bring("c", one.fake.env(HUBS))).close()
        assert one.peer.asked(DIGEST) > 0
