"""The client against a real registry on loopback: push, pull, ranges and mounts, with passwords and with tokens."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.digest import Digest
from artifacts.http.transport import Site
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry import blobs, manifests, push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry.referrers import list_referrers
from artifacts.registry_errors import AbsentError, DeniedError, MismatchError
from tests.support.fakes.registry import digest_of
from tests.support.real_services import docker_registry

NAME, OTHER = "team/model", "team/copy"
SIZE = (3 << 20) + 12345


@contextlib.asynccontextmanager
async def served(folder: Path, manner: str) -> AsyncIterator[tuple[Site, docker_registry.Realm]]:
    async with docker_registry.Realm().serving() as realm:
        auth = docker_registry.tokens(folder, realm.url) if manner == "token" else docker_registry.htpasswd(folder)
        async with docker_registry.registry(folder, auth) as host:
            yield Site(host, allowed=frozenset({f"127.0.0.1:{realm.port}"})), realm


def login(site: Site, password: str = docker_registry.PASSWORD) -> Known:
    return Known(site.host, Login(docker_registry.USER, password))


@pytest.fixture
def weights(tmp_path: Path) -> tuple[Path, Blob]:
    path = tmp_path / "model.safetensors"
    path.write_bytes(random.Random(7).randbytes(SIZE))
    return path, Blob(NAME, Digest(digest_of(path.read_bytes())), SIZE)


async def read(client: Client, blob: Blob, first: int = 0, end: int | None = None) -> bytes:
    async with contextlib.aclosing(blobs.stream_blob(client, blob, first, end)) as pieces:
        return b"".join([piece async for piece in pieces])


@pytest.mark.parametrize("manner", ["password", "token"])
async def test_blob_pushed_to_a_real_registry_is_read_back_unchanged(
    tmp_path: Path, weights: tuple[Path, Blob], manner: str
) -> None:
    path, blob = weights
    content, source = path.read_bytes(), push.FileSource(path)
    async with served(tmp_path, manner) as (site, realm), Client(site, login(site)) as client:
        with pytest.raises(AbsentError):
            await manifests.fetch_manifest(client, NAME, "v1")
        assert await push.push_blob(client, blob, source, chunk_bytes=1 << 20) == "pushed"
        assert await push.push_blob(client, blob, source) == "exists"
        copy = blob._replace(repository=OTHER)
        assert await push.push_blob(client, copy, source, mount=NAME) == "mounted"
        again = Blob("team/once", blob.digest, blob.size)
        assert await push.push_blob(client, again, source) == "pushed"

        for one in (blob, copy, again):
            assert await read(client, one) == content
        assert await read(client, blob, 1000, 2_000_000) == content[1000:2_000_000]
        assert await read(client, blob, SIZE - 1) == content[-1:]
        with pytest.raises(MismatchError, match=f"expected {SIZE + 1}"):
            await read(client, blob._replace(size=SIZE + 1), SIZE - 5)

        layer = {"mediaType": "application/vnd.cncf.model.weight.v1.raw", "digest": blob.digest, "size": SIZE}
        config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
        (tmp_path / "config").write_bytes(b"{}")
        empty = Blob(NAME, Digest(digest_of(b"{}")), 2)
        assert await push.push_blob(client, empty, push.FileSource(tmp_path / "config")) == "pushed"
        document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer]}
        body = json.dumps(document).encode()
        digest = await push.push_manifest(client, NAME, "v1", body, MANIFEST)
        assert (await manifests.fetch_manifest(client, NAME, "v1")).digest == digest
        assert (await manifests.fetch_manifest(client, NAME, digest, len(body))).body == body
        assert await manifests.can_pull_manifest(client, NAME, digest)

        subject = {"mediaType": MANIFEST, "digest": digest, "size": len(body)}
        signature = json.dumps({**document, "layers": [], "subject": subject}).encode()
        signed = await push.push_manifest(client, NAME, digest_of(signature), signature, MANIFEST)
        assert [one.digest for one in await list_referrers(client, NAME, digest)] == [signed]
    assert manner == "password" or ["repository:team/copy:pull,push", "repository:team/model:pull"] in realm.scopes


@pytest.mark.parametrize("manner", ["password", "token"])
async def test_manifest_fetch_with_a_wrong_or_no_password_is_denied(tmp_path: Path, manner: str) -> None:
    async with served(tmp_path, manner) as (site, _):
        for keychain, expected in (
            (login(site, "wrong"), "rejects the login"),
            (None, "requires a login|none is stored for"),
        ):
            async with Client(site, keychain) as client:
                with pytest.raises(DeniedError, match=expected):
                    await manifests.fetch_manifest(client, NAME, "v1")
