"""A key is removed from the documents of a running `serve`: case 46 of reliability, G."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import signal
from functools import partial
from pathlib import Path

import pytest
import yaml

from tests.support.harness.serve.client_load import Crowd, chat, counted
from tests.support.harness.serve.serve import API, Document, fake, serving, settings
from tests.support.net.canary import occurrences
from tests.support.waiting import until

REVOKED_S_MAX = 35.0
"""The case promises 10 s. A busy machine may pause a process for 20 s."""
TRIES = 8
"""Number of connections, so that almost certainly both gateways are reached."""


def tenant(*keys: str) -> Document:
    """Return the Tenant document with these keys."""
    entries = [{"name": f"k{n}", "sha256": hashlib.sha256(key.encode()).hexdigest()} for n, key in enumerate(keys)]
    return {"apiVersion": API, "kind": "Tenant", "metadata": {"name": "acme"}, "spec": {"keys": entries}}


def contents(*folders: Path) -> list[bytes] | None:
    """Return the contents of all files below the folders; None if one of them was replaced meanwhile."""
    try:
        return [path.read_bytes() for folder in folders for path in folder.rglob("*") if path.is_file()]
    except FileNotFoundError:
        return None


@pytest.mark.case("46")
@pytest.mark.standard
async def test_revoked_api_key_is_rejected_by_every_gateway_after_a_reload(tmp_path: Path) -> None:
    """Soon after SIGHUP; another key of the Tenant still works, as does a stream started with the revoked key.

    A key in the query is rejected before and after, and no key appears in any file or line of the installation.
    """
    kept, taken = (f"pl-{secrets.token_urlsafe(32)}" for _ in range(2))
    ada = fake(tmp_path, "ada", "--tokens-per-s", "20", "--tokens", "200", slots=8)
    options = ("--gateways", "2")
    async with serving(tmp_path, ada, tenant(kept, taken), settings(), options=options) as one, Crowd(one) as crowd:
        assert one.process is not None

        async def refused(key: str) -> int:
            request = chat("ada", key=key, close=True, max_tokens=1)
            answers = [await crowd.ask(request) for _ in range(TRIES)]
            return sum(answer.startswith(b"HTTP/1.1 401 ") for answer in answers)

        in_query = chat("ada", key="", close=True).replace(b"completions ", f"completions?api_key={kept} ".encode())
        assert (await crowd.ask(in_query)).startswith(b"HTTP/1.1 401 ")
        assert await refused(taken) == 0
        running = await crowd.connect()
        running.writer.write(chat("ada", key=taken, stream=True, max_tokens=60))
        await running.reader.readuntil(b"data: ")
        one.config.write_text(yaml.safe_dump_all([ada, tenant(kept), settings()]))
        one.process.send_signal(signal.SIGHUP)
        async with asyncio.timeout(REVOKED_S_MAX):
            while await refused(taken) < TRIES:
                pass
        assert await refused(kept) == 0
        assert b"data: [DONE]" in await running.reader.readuntil(b"0\r\n\r\n")
        assert counted(one, "pilotlight_calls_total", 'code="invalid_api_key"') > TRIES
        files = await until("no file is replaced meanwhile", partial(contents, one.state, tmp_path))
        assert files is not None
        assert occurrences(b"\n".join(files), kept, taken) == []
