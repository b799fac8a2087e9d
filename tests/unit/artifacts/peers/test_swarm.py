"""A pull among nodes: one registry, several stores that serve each other, real connections on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from artifacts import reference
from artifacts.credentials.keychain import Chain, Keychain
from artifacts.digest import Digest
from artifacts.fetch import registry
from artifacts.fetch.registry import Registries
from artifacts.http.transport import Limits, Site
from artifacts.oci import blob_progress
from artifacts.pack.pack import Form
from artifacts.peers.client import Peering
from artifacts.peers.selection import Peer
from artifacts.registry.client import Client
from artifacts.registry_errors import MismatchError, UnreachableError
from artifacts.store.copies import Copy
from artifacts.store.store import Store
from artifacts.store.stored_copy_check import verify_copy
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import CONTENT, FILES, NAME
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.registry import PASSWORD, FakeRegistry, StillClock, keychain, reply
from tests.support.harness.artifacts import peer_nodes
from tests.support.harness.artifacts.peer_nodes import TOKEN, Neighbour

pytestmark = pytest.mark.standard

QUICK = Limits(connect_s=1.0, head_s=1.0, read_s=0.2, whole_s=1.0, pace_s=10.0)
"""For a peer that hangs. In other tests, a machine without spare CPU would count as a slow peer."""
PATIENT = Limits(connect_s=20.0, head_s=20.0, read_s=20.0, whole_s=20.0, pace_s=20.0)


class Swarm:
    """A registry with a model, and nodes."""

    def __init__(self, fake: FakeRegistry, folder: Path, digest: Digest) -> None:
        self.fake, self.digest = fake, digest
        self._folder = folder
        self.keychain: Keychain = Chain()
        self.given: dict[str, int] = {}
        """Bytes received from each peer in the last pull."""

    def store(self, name: str) -> Store:
        return Store(self._folder / name, spare_bytes=0).open()

    def of(self, asked: str = ":v1") -> reference.Reference:
        return reference.parse_reference(f"oci://{self.fake.host}/{NAME}{asked}")

    async def pull(
        self,
        name: str,
        *peers: Neighbour,
        asked: str = ":v1",
        token: str = TOKEN,
        holds: bool = False,
        limits: Limits = PATIENT,
    ) -> Copy:
        """Pull on the node `name`; with `holds`, the first peer is known to have the artifact."""
        known = frozenset({self.digest}) if holds else frozenset[Digest]()
        none = frozenset[Digest]()
        them = [Peer(f"node-{number}", one.url, none if number else known) for number, one in enumerate(peers)]
        among = Peering(lambda: them, own=name, token=lambda: token, limits=limits)
        ways = Registries(self.keychain, pace=StillClock(), peering=among if peers else None)
        copy = await registry.fetch_from_registry(self.of(asked), self.store(name), ways)
        self.given = dict(among.given)
        return copy

    def blobs_asked(self) -> int:
        return len(self.fake.asked("GET", "/blobs/"))

    def egress(self) -> int:
        """Return the number of blob bytes that the registry served."""
        found = 0
        for seen in self.fake.asked("GET", "/blobs/"):
            span = seen.headers.get("range", "").removeprefix("bytes=")
            first, last = map(int, span.split("-")) if span else (0, 0)
            found += last + 1 - first if span else len(self.fake.blobs[seen.path.rpartition("/")[2]])
        return found


@contextlib.asynccontextmanager
async def swarm(
    tmp_path: Path, files: dict[str, bytes] | None = None, form: Form = "modelpack-raw"
) -> AsyncIterator[Swarm]:
    layout = packed_models.packed(packed_models.model(tmp_path / "model", files), tmp_path / "layout", form)
    async with FakeRegistry().serving() as fake:
        async with Client(Site(fake.host), pace=StillClock()) as client:
            digest = await packed_models.push(client, layout)
        fake.seen.clear()
        yield Swarm(fake, tmp_path, digest)


@contextlib.asynccontextmanager
async def with_peer(one: Swarm, name: str = "a", **how: object) -> AsyncIterator[Neighbour]:
    """A node that already has the artifact."""
    (await one.pull(name)).close()
    one.fake.seen.clear()
    async with peer_nodes.serving(one.store(name), **how) as peer:  # type: ignore[arg-type]  # parameters of `serving`
        yield peer


def whole(copy: Copy, files: dict[str, bytes] | None = None) -> bool:
    found = packed_models.read_files(copy.folder)
    return found == (files or FILES) and not list(verify_copy(copy.record, copy.folder))


def break_after(content: bytes, request: web.Request) -> web.StreamResponse | None:
    """Send the beginning of a blob, and close the connection."""
    if request.transport is None:
        return None
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(CONTENT)}\r\n\r\n".encode()
    request.transport.write(head + content)
    request.transport.close()
    return web.Response()


@pytest.mark.parametrize("form", ["modelpack-raw", "modelpack"])
async def test_pull_gets_blobs_from_a_peer_and_only_manifests_from_registry(tmp_path: Path, form: Form) -> None:
    async with swarm(tmp_path, form=form) as one, with_peer(one) as peer:
        with await one.pull("b", peer) as copy:
            assert whole(copy)
        assert one.blobs_asked() == 0
        assert all("/manifests/" in seen.path for seen in one.fake.seen), "of an image beside it there is an index"
        assert peer.asked("/blobs/", 200) == len(FILES) + 1  # and its config


async def test_blob_interrupted_by_a_peer_failure_resumes_at_the_registry(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        big = max(one.fake.blobs, key=lambda each: len(one.fake.blobs[each]))

        async def breaks(request: web.Request) -> web.StreamResponse | None:
            return break_after(CONTENT[:50_000], request) if big in request.path else None

        peer.judge = breaks
        with await one.pull("b", peer) as copy:
            assert whole(copy)
        ranges = [seen.headers.get("range") for seen in one.fake.asked("GET", big)]
        assert ranges == [f"bytes=50000-{len(CONTENT) - 1}"]


async def test_blobs_are_fetched_from_the_registry_if_the_peer_stalls(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        ended = asyncio.Event()

        async def hangs(_: web.Request) -> web.StreamResponse | None:
            await ended.wait()
            return None

        peer.judge = hangs
        with await one.pull("b", peer, limits=QUICK) as copy:
            assert whole(copy)
        ended.set()
        assert one.blobs_asked() >= len(FILES)


async def test_blob_is_not_requested_again_from_a_peer_that_sent_wrong_bytes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        big = Digest(max(one.fake.blobs, key=lambda each: len(one.fake.blobs[each])))
        blob = next(path for path in (tmp_path / "a/blobs").rglob("*") if path.name.endswith(big.partition(":")[2]))
        blob.chmod(0o644)
        with blob.open("r+b") as file:
            file.write(b"X")
        with await one.pull("b", peer) as copy:
            assert whole(copy)
        assert [seen.headers.get("range") for seen in one.fake.asked("GET", big)] == [None]
        assert peer.asked(big) == 1
        assert f"event=peer_lied peer=node-0 digest={big}" in caplog.text
        assert peer.url.removeprefix("http://") not in caplog.text


async def test_only_the_peer_that_sent_wrong_bytes_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as liar, peer_nodes.serving(one.store("empty")) as empty:
        big = max(one.fake.blobs, key=lambda each: len(one.fake.blobs[each]))
        breaks_first = True

        async def lies(request: web.Request) -> web.StreamResponse | None:
            nonlocal breaks_first
            if big not in request.path or not breaks_first:
                return None
            breaks_first = False
            return break_after(bytes(50_000), request)

        liar.judge = lies
        with await one.pull("b", liar, empty, holds=True) as copy:
            assert whole(copy)
        assert f"event=peer_lied peer=node-0 digest={big}" in caplog.text
        assert empty.asked(big, 404) == 1
        assert "peer=node-1" not in caplog.text


async def test_config_with_wrong_peer_bytes_is_fetched_from_the_registry(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:

        async def lies(request: web.Request) -> web.StreamResponse | None:
            found = one.fake.blobs[request.match_info["digest"]]
            return web.Response(body=found[:-1] + b"?") if len(found) < 2000 else None

        peer.judge = lies
        with await one.pull("b", peer) as copy:
            assert whole(copy)


async def test_blobs_are_fetched_from_the_registry_if_the_peer_is_busy(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one, streams=0) as peer:
        with await one.pull("b", peer) as copy:
            assert whole(copy)
        assert one.blobs_asked() == len(FILES) + 1
        assert peer.asked("/blobs/", 429) == peer.asked("/blobs/") == 1


@pytest.mark.parametrize("form", ["modelpack-raw", "modelpack"])
@pytest.mark.parametrize("asked", ["tag", "digest"])
async def test_peer_pull_during_a_registry_outage_succeeds_only_by_digest(
    tmp_path: Path, asked: str, form: Form
) -> None:
    async with swarm(tmp_path, form=form) as one, with_peer(one) as peer:
        one.fake.judge = lambda _: web.Response(status=503)
        if asked == "tag":
            with pytest.raises(UnreachableError):
                await one.pull("b", peer)
            assert peer.asked("/manifests/") == 0
        else:
            with await one.pull("b", peer, asked=f"@{one.digest}") as copy:
                assert whole(copy)


async def test_pull_from_a_peer_during_an_outage_records_no_permission(tmp_path: Path) -> None:
    """For a login that the registry has never checked, only the registry's answer is recorded."""
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        one.keychain = keychain(one.fake.host)
        one.fake.judge = lambda _: web.Response(status=503)
        (await one.pull("b", peer, asked=f"@{one.digest}")).close()
        assert len(one.store("b").permits) == 0
        with pytest.raises(UnreachableError):  # stored here, but no registry has allowed this caller
            await one.pull("b", peer, asked=f"@{one.digest}")
        one.fake.judge = lambda _: None
        (await one.pull("b", peer, asked=f"@{one.digest}")).close()
        assert len(one.store("b").permits) == 1


async def test_blob_bytes_received_from_a_peer_are_counted_for_that_peer(tmp_path: Path) -> None:
    """It includes interrupted transfers, whose bytes are kept."""
    async with swarm(tmp_path, {"a.gguf": CONTENT}) as one, with_peer(one) as peer:
        (await one.pull("b", peer)).close()
        blobs = [digest for digest in one.fake.blobs if f"/blobs/{digest}" in str(peer.seen)]
        assert one.given == {"node-0": sum(len(one.fake.blobs[digest]) for digest in blobs)}
        assert one.given["node-0"] > len(CONTENT)


def _asks_for_a_login(request: web.Request) -> web.StreamResponse | None:
    if request.headers.get("Authorization", "").startswith("Basic "):
        return None
    return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="x"'})


async def test_private_model_is_pulled_from_peers_only_if_the_registry_allows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    async with swarm(tmp_path) as one:
        one.fake.judge, one.keychain = _asks_for_a_login, keychain(one.fake.host)
        async with with_peer(one) as peer:
            with await one.pull("b", peer) as copy:
                assert whole(copy)
                assert copy.record.private
            assert one.blobs_asked() == 0
            assert not any(TOKEN in str(seen.headers) for seen in one.fake.seen)
            one.fake.judge = lambda _: web.Response(status=503)
            with pytest.raises(UnreachableError):
                await one.pull("c", peer, asked=f"@{one.digest}")
    assert TOKEN not in caplog.text
    assert PASSWORD not in caplog.text


async def test_peer_without_a_configured_token_serves_only_public_models(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one:
        async with with_peer(one, private=False, token=None) as open_to_all:
            with await one.pull("b", open_to_all) as copy:
                assert whole(copy)
            assert one.blobs_asked() == 0
        one.fake.judge, one.keychain = _asks_for_a_login, keychain(one.fake.host)
        async with with_peer(one, "c", private=False, token=None) as shut:
            (await one.pull("d", shut)).close()
            assert shut.asked("/blobs/", 200) == 0
            assert one.blobs_asked() > 0


async def test_pull_with_a_wrong_peer_token_falls_back_to_the_registry(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        with await one.pull("b", peer, token="wr0ng-token-of-this-node") as copy:
            assert whole(copy)
        assert "event=peer_failed peer=node-0" in caplog.text
        assert "wr0ng" not in caplog.text
        assert one.blobs_asked() == len(FILES) + 1


async def test_peer_serves_no_blob_to_a_pull_from_another_registry(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer, FakeRegistry().serving() as other:
        other.manifests = dict(one.fake.manifests)  # but none of the blobs
        one.fake = other
        with pytest.raises(Exception, match="there is no blob"):
            await one.pull("b", peer)
        assert peer.asked("/blobs/", 200) == 0


async def test_blob_parts_refused_by_peers_are_fetched_from_the_registry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_progress, "WHOLE_BYTES_MAX", 10_000)
    monkeypatch.setattr(blob_progress, "PART_BYTES", 7_000)
    async with swarm(tmp_path) as one, with_peer(one) as peer, with_peer(one, "b") as second:
        count = 0

        async def now_and_then(request: web.Request) -> web.StreamResponse | None:
            nonlocal count
            count += "Range" in request.headers
            return web.Response(status=503) if "Range" in request.headers and count % 2 else None

        peer.judge = second.judge = now_and_then
        with await one.pull("c", peer, second) as copy:
            assert whole(copy)
        big = max(one.fake.blobs, key=lambda each: len(one.fake.blobs[each]))
        assert 0 < len(one.fake.asked("GET", big)) < 10
        assert peer.asked(big, 206) > 0
        assert second.asked(big, 206) > 0


async def test_no_copy_is_stored_when_peer_and_registry_bytes_are_wrong(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        big = max(one.fake.blobs, key=lambda each: len(one.fake.blobs[each]))
        one.fake.blobs[big] = one.fake.blobs[big][:-1] + b"!"

        async def lies(request: web.Request) -> web.StreamResponse | None:
            return web.Response(body=CONTENT[::-1]) if big in request.path else None

        peer.judge = lies
        with pytest.raises(MismatchError):
            await one.pull("b", peer)
        assert list(one.store("b").layout.records()) == []


async def test_peer_redirect_is_not_followed(tmp_path: Path) -> None:
    async with swarm(tmp_path) as one, with_peer(one) as peer:
        peer.judge = reply(307, Location=f"{one.fake.url}/elsewhere")
        with await one.pull("b", peer) as copy:
            assert whole(copy)
        assert one.fake.asked("GET", "/elsewhere") == []


def _spread(count: int, size: int) -> dict[str, bytes]:
    return {f"m-{number:05}-of-{count:05}.gguf": as_gguf(bytes([number]) * size) for number in range(1, count + 1)}


ONE_FILE = {"m.gguf": as_gguf(bytes(1 << 20))}


@pytest.mark.parametrize("files", [_spread(24, 20_000), ONE_FILE], ids=["many files", "one file"])
async def test_four_nodes_fetch_at_most_twice_the_model_size_from_registry(
    tmp_path: Path, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_progress, "WHOLE_BYTES_MAX", 100_000)
    monkeypatch.setattr(blob_progress, "PART_BYTES", 16 << 10)
    async with swarm(tmp_path, files) as one, contextlib.AsyncExitStack() as stack:
        names = ["a", "b", "c", "d"]
        nodes = [await stack.enter_async_context(peer_nodes.serving(one.store(name))) for name in names]
        others = [[node for node in nodes if node is not own] for own in nodes]
        copies = await asyncio.gather(*(one.pull(name, *them) for name, them in zip(names, others, strict=True)))
        for copy in copies:
            with copy:
                assert whole(copy, files)
        size = sum(map(len, files.values()))
        assert size <= one.egress() <= 2 * size, f"{one.egress() / size:.2f} times its size"
        print(f"{one.egress() / size:.2f} times its size")
