"""Peer-to-peer transfer: which peers are used, which are admitted, and the registry as the fallback."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import msgspec
import pytest
from aiohttp import web

from artifacts import digest as digests
from artifacts import reference
from artifacts.digest import Digest
from artifacts.fetch import registry
from artifacts.fetch.registry import Registries
from artifacts.store.store import Store
from autoscaler.weights.peers import NodePeer, NodePeers
from pilotlight.agent.autoscaler_client import ANSWER_BYTES_MAX, HttpWay
from pilotlight.agent.weights.metrics import StoreMetrics
from pilotlight.agent.weights.peers import CERTIFIED, Neighbours, PeerOptions
from pilotlight.net.certificates import Identity
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.listen import Address
from tests.support.builders.artifacts import packed_models
from tests.support.net.certificates import OURS, THEIRS, leaf, write, write_authority
from tests.unit.artifacts.peers.test_server import BLOB, CONTENT, filled

LOOPBACK = Address("127.0.0.1", 0)
ADA = "oci://registry.example/team/model:v1"


class Autoscaler:
    """A fake autoscaler that returns peers and records requests."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "contract.sock"
        self.raw_response: bytes = b""
        self.peers: tuple[NodePeer, ...] = ()
        self.asked: list[dict[str, str]] = []
        self.slowly = False

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append(dict(request.query))
        body = self.raw_response or msgspec.json.encode(NodePeers(peers=self.peers))
        if not self.slowly:
            return web.Response(body=body)
        answer = web.StreamResponse()
        await answer.prepare(request)
        for piece in (body[:10], body[10:]):
            await answer.write(piece)
            for _ in range(50):  # time for a reader to read it
                await asyncio.sleep(0)
        return answer

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[HttpWay]:
        app = web.Application()
        app.router.add_get("/v1/peers", self._answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.UnixSite(runner, str(self.path)).start()
        way = HttpWay(f"unix:{self.path}", None, None)
        yield way
        await way.close()
        await runner.cleanup()


def shown(folder: Path, name: str = OURS, certified: str = CERTIFIED) -> Access:
    """The files of an agent; `name`: the authority that issued its certificate."""
    pair = write(folder, f"agent-{name}-{certified}", leaf(name, certified))
    return Access(identity=Identity(cert=pair.cert, key=pair.key, ca=write_authority(folder, OURS)))


@contextlib.asynccontextmanager
async def agent(
    node: str, way: HttpWay, store: Path, access: Access, *, metrics: StoreMetrics | None = None
) -> AsyncIterator[Neighbours]:
    one = Neighbours(node, [way], PeerOptions(listen=LOOPBACK, access=access), Files(), metrics or StoreMetrics())
    runner = await one.open(store)
    try:
        yield one
    finally:
        await runner.cleanup()


async def test_peer_serves_private_weights_only_to_agent_certificates(tmp_path: Path) -> None:
    await filled(Store(tmp_path / "store", spare_bytes=0).open(), private=True)
    own, stranger = shown(tmp_path), shown(tmp_path, THEIRS)
    async with Autoscaler(tmp_path).running() as way, agent("n1", way, tmp_path / "store", own) as one:
        assert one.url.startswith("https://127.0.0.1:")
        trusts = ssl.create_default_context(cafile=own.identity.ca)
        for identity in (None, stranger.identity, own.identity):
            if identity is not None and identity.cert is not None:
                trusts.load_cert_chain(identity.cert, identity.key)
            async with aiohttp.ClientSession() as session:
                asked = session.get(f"{one.url}{BLOB}", ssl=trusts, server_hostname=CERTIFIED)
                if identity is not own.identity:
                    with pytest.raises((aiohttp.ClientError, OSError)):
                        await asked
                    continue
                async with asked as answer:
                    assert (answer.status, await answer.read()) == (200, CONTENT)


@pytest.mark.parametrize(("certified", "from_peer"), [(CERTIFIED, True), ("127.0.0.1", False)])
async def test_pull_uses_only_peers_that_present_an_agent_certificate(
    tmp_path: Path, certified: str, *, from_peer: bool
) -> None:
    seen, gives = list[str](), StoreMetrics()
    packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout")
    scaler = Autoscaler(tmp_path)
    with packed_models.served(tmp_path / "layout", seen) as host:
        of = reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1")
        (await registry.fetch_from_registry(of, Store(tmp_path / "one").open(), Registries())).close()
        before = sum("/blobs/" in line for line in seen)
        assert before
        async with (
            scaler.running() as way,
            agent("n1", way, tmp_path / "one", shown(tmp_path, certified=certified), metrics=gives) as one,
            agent("n2", way, tmp_path / "two", shown(tmp_path)) as two,
        ):
            scaler.peers = (NodePeer(node="n1", url=one.url), NodePeer(node="n2", url=two.url))
            peering = await two.peering(f"oci://{of}")
            assert scaler.asked == [{"node": "n2", "artifact": f"oci://{of}"}]
            ways = Registries(peering=peering)
            (await registry.fetch_from_registry(of, Store(tmp_path / "two", spare_bytes=0).open(), ways)).close()
            assert (sum("/blobs/" in line for line in seen) == before) is from_peer
    size = sum(row.record.bytes for row in Store(tmp_path / "two").rows())
    came = peering.given.total()
    assert _of(gives, "pilotlight_peer_bytes_total") == came
    assert (came >= size) is from_peer


async def test_invalid_peer_urls_and_digests_are_ignored(tmp_path: Path) -> None:
    scaler, digest = Autoscaler(tmp_path), digests.compute_digest(b"x")
    async with scaler.running() as way:
        one = Neighbours("n2", [way, way], PeerOptions(listen=LOOPBACK), Files(), StoreMetrics())
        scaler.peers = (
            NodePeer(node="a", url="https://10.0.0.1:1", digest=digest),
            NodePeer(node="clear", url="http://10.0.0.1:1"),
            NodePeer(node="none", url="file:///etc/passwd"),
            NodePeer(node="b", url="https://[fd00::1]:1", digest="../../x"),
        )
        found = (await one.peering(ADA)).peers()
        assert [(one.name, one.holds) for one in found] == [("a", frozenset({digest})), ("b", frozenset[Digest]())]


@pytest.mark.parametrize(
    "url",
    [
        "http://127.0.0.1:8080", "https://127.0.0.1:8080", "http://localhost:1", "https://a.localhost:1",
        "http://[::1]:1", "https://[::ffff:127.0.0.1]:1", "http://127.9.9.9:1", "https://169.254.169.254:80",
        "https://[fe80::1]:1", "https://0.0.0.0:1", "https://224.0.0.1:1",
    ],
)  # fmt: skip
async def test_local_peer_address_is_ignored_unless_own_address_is_local(tmp_path: Path, url: str) -> None:
    scaler = Autoscaler(tmp_path)
    scaler.peers = (NodePeer(node="evil", url=url), NodePeer(node="b", url="https://10.0.0.1:1"))
    async with scaler.running() as way:
        far = PeerOptions(listen=LOOPBACK, advertised=Address("10.0.0.2", 1), access=shown(tmp_path))
        one = Neighbours("n2", [way], far, Files(), StoreMetrics())
        assert [one.name for one in (await one.peering(ADA)).peers()] == ["b"], "it has no port yet"
        runner = await one.open(tmp_path / "store")
        assert [one.name for one in (await one.peering(ADA)).peers()] == ["b"]
        await runner.cleanup()
        async with agent("n3", way, tmp_path / "store", shown(tmp_path)) as near:
            assert near.url.startswith("https://127.0.0.1")
            assert {one.name for one in (await near.peering(ADA)).peers()} == {"evil", "b"}


async def test_peer_list_over_the_size_limit_is_ignored(tmp_path: Path) -> None:
    scaler = Autoscaler(tmp_path)
    scaler.slowly = True
    async with scaler.running() as way:
        one = Neighbours("n2", [way], PeerOptions(listen=LOOPBACK), Files(), StoreMetrics())
        scaler.peers = (NodePeer(node="a", url="https://10.0.0.1:1"),)
        assert [one.name for one in (await one.peering(ADA)).peers()] == ["a"]
        scaler.peers = (NodePeer(node="a", url="https://10.0.0.1:1", digest="x" * ANSWER_BYTES_MAX),)
        assert (await one.peering(ADA)).peers() == []


async def test_invalid_or_missing_peer_list_yields_no_peers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    scaler = Autoscaler(tmp_path)
    async with scaler.running() as way:
        one = Neighbours("n2", [way], PeerOptions(listen=LOOPBACK), Files(), StoreMetrics())
        scaler.raw_response = b"[]"
        assert [(await one.peering(ADA)).peers() for _ in range(2)] == [[], []]
        assert caplog.text.count("event=peers_unknown") == 1
    unreachable = HttpWay("unix:/nonexistent", None, None)
    one = Neighbours("n2", [unreachable], PeerOptions(listen=LOOPBACK), Files(), StoreMetrics())
    assert (await one.peering(ADA)).peers() == [], "no peer responds"
    await unreachable.close()


async def test_agent_without_a_tls_certificate_has_no_peer_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POD_IP", "10.0.0.7")
    async with Autoscaler(tmp_path).running() as way:
        async with agent("n1", way, tmp_path / "store", Access()) as one:
            assert one.url == "", "in clear it is for this machine alone"
        async with agent("n1", way, tmp_path / "store", shown(tmp_path)) as one:
            assert one.url.startswith("https://10.0.0.7:")


def _of(metrics: StoreMetrics, name: str) -> float:
    (line,) = [one for one in metrics.text().decode().splitlines() if one.startswith(f"{name} ")]
    return float(line.partition(" ")[2])
