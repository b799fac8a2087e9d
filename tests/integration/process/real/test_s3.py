"""Real S3 servers fulfil the contract of the fake one, and support what only real servers can do."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from yarl import URL

from artifacts import digest, source_uri
from artifacts.credentials import sigv4
from artifacts.credentials.sigv4 import Asked, Scope
from artifacts.fetch import fetch
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Came, Registries
from artifacts.registry_errors import DeniedError
from artifacts.store.layout import ForbiddenError
from artifacts.store.store import Store
from tests.contracts.bucket import REGION, BucketContract
from tests.support.fakes.cloud_services import Services
from tests.support.net.certificates import OURS, write_authority
from tests.support.real_services import s3_servers
from tests.support.real_services.s3_servers import DOMAIN, RealRig, Server

CLIENT, SECRET = "models", "s3cretOfTheAuthority"
pytestmark = pytest.mark.xdist_group("s3")  # one server of each kind for all tests


@pytest.fixture(scope="module", params=["minio", "versitygw"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with s3_servers.serving(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


@pytest.fixture
async def rig(server: Server) -> RealRig:
    made = RealRig(server)
    await made.make()
    return made


class TestRealS3(BucketContract):
    """See BucketContract."""


@pytest.mark.parametrize("query", ["", "list-type=2&max-keys=10&prefix=a%20b%2B%2F"])
async def test_real_s3_server_accepts_the_signature_of_virtual_hosted_requests(rig: RealRig, query: str) -> None:
    """Requests have the form used for AWS; the address that a name resolves to does not affect the signature."""
    await rig.put("a b+/ü.txt", b"words")
    host, port = f"{rig.bucket}.{DOMAIN}", URL(rig.server.url).port
    path = f"/?{query}" if query else f"/{sigv4.encode_uri('a b+/ü.txt', path=True)}"
    asked = Asked("GET", URL(f"http://{host}:{port}{path}", encoded=True))
    headers = sigv4.sign_request(asked, rig.server.keys, Scope(REGION, "s3"), time.time())
    async with (
        aiohttp.ClientSession() as session,
        session.get(
            URL(f"{rig.server.url}{path}", encoded=True), headers=headers | {"Host": f"{host}:{port}"}
        ) as answer,
    ):
        text = await answer.read()
    assert answer.status == 200, text
    assert b"words" in text if not query else b"<KeyCount>1</KeyCount>" in text


async def test_stored_copy_is_denied_to_keys_that_cannot_read_every_object(rig: RealRig, tmp_path: Path) -> None:
    await rig.put("m/one.gguf", b"words")
    await rig.put("m/config.json", b"{}")
    some = await rig.session("m/config.json")
    of, store = source_uri.Bucket(rig.bucket, "m/"), Store(tmp_path / "store", spare_bytes=0).open()
    (await fetch.fetch_artifact(of, store, Ways(Registries(), rig.env()))).close()
    with pytest.raises(DeniedError, match=r"object m/one\.gguf: answered 403; .* may not read it \(AccessDenied\)"):
        await fetch.fetch_artifact(of, store, Ways(Registries(), some))
    with pytest.raises(ForbiddenError):
        await fetch.find_stored_copy(of, store, Ways(Registries(), some))
    both = await rig.session("m/*")
    (await fetch.fetch_artifact(of, store, Ways(Registries(), both))).close()


async def test_pull_resumes_after_the_object_store_restarts(rig: RealRig, tmp_path: Path) -> None:
    content = hashlib.shake_128(b"large").digest(48 << 20)
    await rig.put("one.gguf", content)
    seen = list[int]()

    def note_progress(came: Came) -> None:
        seen.append(came.bytes)
        if len(seen) == 1:
            rig.server.kill()
            rig.server.begin()

    of, store = source_uri.Bucket(rig.bucket, "one.gguf"), Store(tmp_path / "store", spare_bytes=0).open()
    with await fetch.fetch_artifact(of, store, Ways(Registries(), rig.env()), note_progress) as copy:
        assert [one.digest for one in copy.record.laid] == [digest.compute_digest(content)]
    assert seen[0] < len(content) == seen[-1]


async def test_web_identity_token_grants_the_access_of_its_role(tmp_path: Path) -> None:
    """The server's own STS issues keys for a token of an authority that it trusts, over TLS as tokens require."""
    async with Services().serving() as authority:
        authority.replies = {
            "/config": (200, {"issuer": authority.url, "jwks_uri": f"{authority.url}/keys"}),
            "/keys": (200, {"keys": []}),
        }
        more = {
            "MINIO_IDENTITY_OPENID_CONFIG_URL": f"{authority.url}/config",
            "MINIO_IDENTITY_OPENID_CLIENT_ID": CLIENT,
            "MINIO_IDENTITY_OPENID_CLIENT_SECRET": SECRET,
            "MINIO_IDENTITY_OPENID_ROLE_POLICY": "readonly",
        }
        with contextlib.ExitStack() as until:
            server = await asyncio.to_thread(
                until.enter_context, s3_servers.serving("minio", tmp_path, more, secure=True)
            )
            rig = RealRig(server)
            await rig.make()
            await rig.put("one.gguf", b"words")
            named = base64.urlsafe_b64encode(hashlib.sha1(CLIENT.encode(), usedforsecurity=False).digest())
            env = {
                "AWS_ENDPOINT_URL": server.url,
                "AWS_REGION": REGION,
                "AWS_ROLE_ARN": f"arn:minio:iam:{REGION}::role/{named.decode().rstrip('=')}",
                "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
            }
            store = Store(tmp_path / "store", spare_bytes=0).open()
            of, private = source_uri.Bucket(rig.bucket, "one.gguf"), Registries(ca=write_authority(tmp_path, OURS))
            (tmp_path / "token").write_text(_token(authority.url, SECRET))
            with await fetch.fetch_artifact(of, store, Ways(private, env)) as copy:
                assert (copy.folder / "one.gguf").read_bytes() == b"words"
            (tmp_path / "token").write_text(_token(authority.url, "of another"))
            with pytest.raises(DeniedError, match=r"returned no keys for the role in AWS_ROLE_ARN: 4\d\d [A-Z]"):
                await fetch.fetch_artifact(of, store, Ways(private, env))


def _token(issuer: str, secret: str) -> str:
    """Return an HS256 JSON web token, which the server recognises by its client."""
    claims = {"iss": issuer, "sub": "pod", "aud": CLIENT, "exp": int(time.time()) + 3600}
    parts = ({"alg": "HS256", "typ": "JWT", "kid": CLIENT}, claims)
    text = b".".join(_base64(json.dumps(one).encode()) for one in parts)
    return (text + b"." + _base64(hmac.digest(secret.encode(), text, "sha256"))).decode()


def _base64(content: bytes) -> bytes:
    return base64.urlsafe_b64encode(content).rstrip(b"=")
