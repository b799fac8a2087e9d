"""The port of a node for its peers: which certificates are accepted, and what is served."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import aiohttp
import pytest

from artifacts import reference
from artifacts.fetch import registry
from artifacts.fetch.registry import Registries
from artifacts.http.transport import Site
from artifacts.peers.selection import Board
from artifacts.registry.client import Client
from artifacts.store.store import Store
from pilotlight.agent.weights import peer_sharing
from pilotlight.agent.weights.peer_sharing import build_peer_access
from pilotlight.net.contract_access import Access
from pilotlight.net.file_reload import Files
from pilotlight.net.listen import Address
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.weight_file_headers import as_gguf
from tests.support.fakes.registry import FakeRegistry, StillClock
from tests.support.net.certificates import OURS, THEIRS, leaf, write, write_authority
from tests.unit.artifacts.peers.test_server import BLOB, CONTENT, filled

TOKEN = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("with_token", "private", "status"),
    [(True, True, 200), (True, False, 200), (False, False, 200), (False, True, 404)],
)
async def test_peer_port_without_token_serves_only_public_weights(
    tmp_path: Path, with_token: bool, private: bool, status: int
) -> None:
    await filled(Store(tmp_path / "store", spare_bytes=0).open(), private=private)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    shown = build_peer_access(token if with_token else None, None, None, None)
    runner = await peer_sharing.open_port(tmp_path / "store", Address("127.0.0.1", 0), shown, Files())
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}{BLOB}"
        async with aiohttp.ClientSession() as session:
            async with session.get(url, headers={"Authorization": f"Bearer {TOKEN}"}) as answer:
                assert answer.status == status
                assert await answer.read() == (CONTENT if status == 200 else b"")
            async with session.get(url) as answer:
                assert answer.status == (401 if with_token else status)
    finally:
        await runner.cleanup()


def test_duplicate_peer_urls_are_merged_into_one_peer() -> None:
    urls = ["https://a:1", "https://b:1", "https://a:1"]
    found = peer_sharing.build_static_peering(urls, build_peer_access(None, None, None, None)).peers()
    assert [(one.name, one.url) for one in found] == [("peer-1", "https://a:1"), ("peer-2", "https://b:1")]


def test_host_with_the_same_name_as_a_peer_still_uses_that_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "peer-1")
    made = peer_sharing.build_static_peering(["https://a:1"], build_peer_access(None, None, None, None))
    assert [one.url for one in Board(made.peers(), made.own).peers] == ["https://a:1"]


WEIGHTS = {"model.gguf": as_gguf(os.urandom(9 << 20)), "LICENSE": b"free"}
"""Larger than one chunk of a response."""


class Shown(NamedTuple):
    """Which certificate a side presents (empty: none), and which authority it trusts."""

    by: str
    believes: str


@contextlib.asynccontextmanager
async def filled_node(tmp_path: Path) -> AsyncIterator[tuple[FakeRegistry, reference.Reference]]:
    """A registry with a model, and a node that has the model in `a`."""
    layout = packed_models.packed(
        packed_models.model(tmp_path / "model", WEIGHTS), tmp_path / "layout", "modelpack-raw"
    )
    async with FakeRegistry().serving() as fake:
        async with Client(Site(fake.host), pace=StillClock()) as client:
            await packed_models.push(client, layout)
        of = reference.parse_reference(f"oci://{fake.host}/{packed_models.NAME}:v1")
        (
            await registry.fetch_from_registry(
                of, Store(tmp_path / "a", spare_bytes=0).open(), Registries(pace=StillClock())
            )
        ).close()
        fake.seen.clear()
        yield fake, of


@pytest.mark.parametrize(
    ("node", "other", "token", "left"),
    [
        (Shown(OURS, ""), Shown("", OURS), True, ""),
        (Shown(OURS, OURS), Shown(OURS, OURS), False, ""),
        (Shown(OURS, OURS), Shown(OURS, OURS), True, ""),
        (Shown(OURS, ""), Shown("", THEIRS), True, "its certificate"),
        (Shown(OURS, OURS), Shown("", OURS), False, "."),
        (Shown(OURS, OURS), Shown(THEIRS, OURS), False, "."),
    ],
    ids=["a token", "certificates", "both", "whom we do not believe", "nobody", "a stranger"],
)
async def test_weights_are_shared_over_tls_only_between_trusted_nodes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, node: Shown, other: Shown, *, token: bool, left: str
) -> None:
    async with filled_node(tmp_path) as (fake, of):
        shown = tmp_path / "token"
        shown.write_text(TOKEN)
        shown.chmod(0o600)

        def side(name: str, of_side: Shown) -> Access:
            cert, key = write(tmp_path, name, leaf(of_side.by)) if of_side.by else (None, None)
            ca = write_authority(tmp_path, of_side.believes) if of_side.believes else None
            return build_peer_access(shown if token else None, cert, key, ca)

        runner = await peer_sharing.open_port(tmp_path / "a", Address("127.0.0.1", 0), side("node", node), Files())
        try:
            url = f"https://127.0.0.1:{runner.addresses[0][1]}"
            among = replace(peer_sharing.build_static_peering([url], side("other", other)), own="b")
            ways = Registries(pace=StillClock(), peering=among)
            with await registry.fetch_from_registry(of, Store(tmp_path / "b", spare_bytes=0).open(), ways) as copy:
                assert {path: (copy.folder / path).read_bytes() for path in WEIGHTS} == WEIGHTS
        finally:
            await runner.cleanup()
        blobs = len(fake.asked("GET", "/blobs/"))
        if not left:
            assert blobs == 0, "the manifest alone is the registry's"
            assert among.given["peer-1"] > sum(map(len, WEIGHTS.values()))
            assert "peer_failed" not in caplog.text
        else:
            assert blobs > len(WEIGHTS)
            assert not any(among.given.values())
            assert "event=peer_failed peer=peer-1" in caplog.text
            assert left in caplog.text
        assert url not in caplog.text
        assert "127.0.0.1" not in caplog.text
        assert TOKEN not in caplog.text
