"""The real registry (Debian's docker-registry, the CNCF's distribution) as a process on loopback, with its logins.

`docker-registry` or `registry` is searched on the PATH, unless PILOTLIGHT_REGISTRY names the program; without one the
test is skipped. With `realm` it accepts the tokens that `tokens_of` issues.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils

from tests.support.net.certificates import OURS, authority, leaf, write_authority
from tests.support.net.ports import free_port

USER, PASSWORD = "me", "pa55word"
HTPASSWD = "me:$2b$05$fudgSD1DpVSTW6phsFIFvOrucSFOmP..vG.qZSODuhsCNbM1sJmrW\n"
"""That user with that password, hashed with bcrypt."""
ISSUER, SERVICE = "tests", "registry"
STARTS_S_MAX = 90.0


def program() -> str:
    named = os.environ.get("PILOTLIGHT_REGISTRY")
    found = named or shutil.which("docker-registry") or shutil.which("registry")
    if found is None:
        pytest.skip("docker-registry is not installed (Debian: apt install docker-registry)")
    return found


@contextlib.asynccontextmanager
async def registry(folder: Path, auth: dict[str, Any] | None = None) -> AsyncIterator[str]:
    """Runs a registry with its own folder until the context ends; yields HOST:PORT."""
    found = program()
    host = f"127.0.0.1:{free_port()}"
    document = {
        "version": 0.1,
        "log": {"level": "error", "accesslog": {"disabled": True}},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}, "delete": {"enabled": True}},
        "http": {"addr": host, "secret": secrets.token_hex()},
        **({"auth": auth} if auth else {}),
    }
    path = folder / "registry.json"  # YAML is a superset of JSON
    path.write_text(json.dumps(document))
    with (folder / "registry.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(found, "serve", str(path), stdout=log, stderr=log)
    try:
        await _listens(host, process, folder / "registry.log")
        yield host
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _listens(host: str, process: asyncio.subprocess.Process, log: Path) -> None:
    until_s = time.monotonic() + STARTS_S_MAX
    async with aiohttp.ClientSession() as session:
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"http://{host}/v2/"):
                    return
            assert process.returncode is None, log.read_text()
            assert time.monotonic() < until_s, log.read_text()
            await asyncio.sleep(0.02)


def htpasswd(folder: Path) -> dict[str, Any]:
    """Configures logins by password."""
    path = folder / "htpasswd"
    path.write_text(HTPASSWD)
    return {"htpasswd": {"realm": "tests", "path": str(path)}}


def tokens(folder: Path, realm: str) -> dict[str, Any]:
    """Configures logins with tokens of a realm, signed by our authority."""
    bundle = write_authority(folder, OURS)
    return {"token": {"realm": realm, "service": SERVICE, "issuer": ISSUER, "rootcertbundle": str(bundle)}}


class Realm:
    """Issues tokens to the one user for all requested scopes, valid for `lasts_s`."""

    def __init__(self, lasts_s: int = 300) -> None:
        self.lasts_s = lasts_s
        self.scopes: list[list[str]] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/token"

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[Realm]:
        application = web.Application()
        application.router.add_get("/token", self._give)
        runner = web.AppRunner(application, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = runner.addresses[0][1]
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _give(self, request: web.Request) -> web.StreamResponse:
        given = aiohttp.BasicAuth.decode(request.headers.get("Authorization", "Basic Og=="))
        if (given.login, given.password) != (USER, PASSWORD):
            return web.Response(status=401)
        self.scopes.append(request.query.getall("scope"))
        access = [
            {"type": kind, "name": name, "actions": actions.split(",")}
            for kind, name, actions in (scope.split(":") for scope in self.scopes[-1])
        ]
        return web.json_response({"token": signed(access, self.lasts_s), "expires_in": self.lasts_s})


def signed(access: list[dict[str, Any]], lasts_s: int) -> str:
    """A JSON web token in the form that the registry accepts: ES256, with the chain to its authority embedded."""
    certificate = leaf(OURS)
    key = serialization.load_pem_private_key(certificate.private_key_pem.bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert authority(OURS)
    chain = ["".join(part.bytes().decode().strip().splitlines()[1:-1]) for part in certificate.cert_chain_pems]
    now = int(time.time())
    claims: dict[str, object] = {
        "iss": ISSUER,
        "sub": USER,
        "aud": SERVICE,
        "exp": now + lasts_s,
        "nbf": now - 5,
        "iat": now,
    }
    claims |= {"jti": secrets.token_hex(8), "access": access}
    text = b".".join(_part(one) for one in ({"typ": "JWT", "alg": "ES256", "x5c": chain}, claims))
    r, s = utils.decode_dss_signature(key.sign(text, ec.ECDSA(hashes.SHA256())))
    return (text + b"." + _base64(r.to_bytes(32, "big") + s.to_bytes(32, "big"))).decode()


def _part(document: object) -> bytes:
    return _base64(json.dumps(document).encode())


def _base64(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")
