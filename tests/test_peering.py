"""A node's port for its peers: who is let in by which files, and what they get."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest

from artifacts.peers import Board
from artifacts.store import Store
from pilotlight import peering
from pilotlight.listen import Address
from pilotlight.peering import access_of
from pilotlight.renewal import Files
from tests.test_serving import BLOB, CONTENT, filled

TOKEN = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("with_token", "private", "status"),
    [(True, True, 200), (True, False, 200), (False, False, 200), (False, True, 404)],
)
async def test_without_a_token_only_what_needed_no_login_is_given(
    tmp_path: Path, with_token: bool, private: bool, status: int
) -> None:
    await filled(Store(tmp_path / "store", spare_bytes=0).open(), private=private)
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    shown = access_of(token if with_token else None, None, None, None)
    runner = await peering.open_port(tmp_path / "store", Address("127.0.0.1", 0), shown, Files())
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


def test_each_address_is_one_peer_and_its_name_shows_none() -> None:
    urls = ["https://a:1", "https://b:1", "https://a:1"]
    found = peering.among(urls, access_of(None, None, None, None)).peers()
    assert [(one.name, one.url) for one in found] == [("peer-1", "https://a:1"), ("peer-2", "https://b:1")]


def test_a_machine_that_is_called_as_a_peer_asks_that_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "peer-1")
    made = peering.among(["https://a:1"], access_of(None, None, None, None))
    assert [one.url for one in Board(made.peers(), made.own).peers] == ["https://a:1"]
