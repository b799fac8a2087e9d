"""What a registry client sends to which host: points 9, 10, 11 and 15 (redirects, uploads, no secrets in text)."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import socket
import ssl
import traceback
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.abc import AbstractResolver, ResolveResult
from yarl import URL

from artifacts.digest import Digest
from artifacts.http import url_policy
from artifacts.http.safe_resolver import Resolver
from artifacts.http.transport import Site
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry import blobs, manifests, push
from artifacts.registry.blobs import Blob
from artifacts.registry.client import Client
from artifacts.registry_errors import MismatchError, PolicyError, RegistryError, UnreachableError
from tests.support.fakes.registry import (
    PASSWORD,
    FakeRegistry,
    StillClock,
    digest_of,
    keychain,
    part_of,
    raw,
    reply,
    whole_head,
)
from tests.support.net.certificates import OURS, THEIRS, leaf, write, write_authority

NAME = "team/model"
CONTENT = b"weights" * 1000


async def read(client: Client, digest: str) -> bytes:
    async with contextlib.aclosing(blobs.stream_blob(client, Blob(NAME, Digest(digest), len(CONTENT)))) as pieces:
        return b"".join([piece async for piece in pieces])


def to(url: str) -> dict[str, str]:
    return {"Location": url}


# --- 9: redirects ----------------------------------------------------------------------------------------------------


@pytest.mark.point("9")
async def test_redirect_to_another_port_sends_no_login_or_cookies() -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as store:
        digest = fake.blob(CONTENT)
        store.always["GET", "/bucket/x"] = reply(200, CONTENT)

        def judge(request: web.Request) -> web.StreamResponse | None:
            if "Authorization" not in request.headers:
                return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
            answer = web.Response(status=307, headers=to(f"{store.url}/bucket/x?X-Amz-Signature=a%2Bb%3D&s=%7E"))
            answer.set_cookie("session", "1")
            return answer

        fake.judge = judge
        site = Site(fake.host, headers={"X-Team": "red"})
        async with Client(site, keychain(fake.host), pace=StillClock()) as client:
            assert await read(client, digest) == CONTENT
            assert await read(client, digest) == CONTENT
        own, foreign = fake.seen[-1].headers, store.seen[-1]
        assert own["authorization"].startswith("Basic ")
        assert own["x-team"] == "red"
        assert "cookie" not in own
        assert not {"authorization", "x-team", "cookie", "referer"} & set(foreign.headers)
        assert foreign.query == "X-Amz-Signature=a%2Bb%3D&s=%7E"  # unchanged, as it was signed


@pytest.mark.point("9")
async def test_redirect_back_to_the_registry_sends_no_configured_headers() -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as store:
        digest = fake.blob(CONTENT)
        path = f"/v2/{NAME}/blobs/{digest}"
        fake.answers["GET", path].append(reply(307, Location=f"{store.url}/away"))
        store.always["GET", "/away"] = reply(302, Location=f"{fake.url}/back")
        fake.always["GET", "/back"] = reply(200, CONTENT)
        async with Client(Site(fake.host, headers={"X-Team": "red"}), pace=StillClock()) as client:
            assert await read(client, digest) == CONTENT
        assert "x-team" in fake.seen[0].headers
        assert "x-team" not in fake.seen[-1].headers


@pytest.mark.point("9")
async def test_redirect_loop_fails_after_10_redirects() -> None:
    async with FakeRegistry().serving() as fake:
        digest = fake.blob(CONTENT)
        path = f"/v2/{NAME}/blobs/{digest}"
        fake.always["GET", path] = reply(307, Location=path)
        async with Client(Site(fake.host), pace=StillClock()) as client:
            with pytest.raises(PolicyError, match="more than 10 redirects"):
                await read(client, digest)
        assert len(fake.seen) == 11


@pytest.mark.point("9")
@pytest.mark.parametrize(
    ("location", "message"),
    [
        ("http://registry.example/x", "from https to http"),
        ("file:///etc/passwd", "neither https nor http"),
        ("https://169.254.169.254/x", "link-local or metadata"),
        ("https://me:secret@other.example/x", "with a user name"),
        ("//2852039166/x", "unusual notation of an address"),
        ("https://other.example/a b", "not a URL"),
        ("https://other.example/\u043e", "not a URL"),
        ("", "redirects without a Location"),
        (None, "redirects without a Location"),
    ],
)
def test_unsafe_redirect_targets_are_rejected(location: str | None, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        url_policy.resolve_redirect(URL("https://registry.example/v2/"), location, "GET", 307, 0)


@pytest.mark.point("9")
def test_redirect_of_a_write_with_302_or_to_another_host_is_rejected() -> None:
    asked = URL("https://registry.example/v2/x")
    assert url_policy.resolve_redirect(asked, "/v2/y", "PUT", 307, 0).path == "/v2/y"
    for status, location in ((307, "https://other.example/"), (302, "/v2/y")):
        with pytest.raises(PolicyError, match="redirects a write"):
            url_policy.resolve_redirect(asked, location, "PUT", status, 0)


@pytest.mark.point("9")
async def test_client_certificate_is_sent_only_to_the_registry(tmp_path: Path) -> None:
    files = write(tmp_path, "client", leaf(THEIRS, "client.example"))
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=write_authority(tmp_path, THEIRS))
    leaf(OURS).configure_cert(server)
    server.verify_mode = ssl.CERT_OPTIONAL
    ca = write_authority(tmp_path, OURS)
    async with FakeRegistry().serving(server) as fake, FakeRegistry().serving(server) as store:
        digest = fake.blob(CONTENT)
        path = f"/v2/{NAME}/blobs/{digest}"
        fake.answers["GET", path].append(reply(307, Location=f"{store.url}/away"))
        store.always["GET", "/away"] = reply(200, CONTENT)
        site = Site(fake.host, plain_http=False, ca=ca, certificate=(files.cert, files.key))
        async with Client(site, pace=StillClock()) as client:
            assert await read(client, digest) == CONTENT
        assert fake.seen[0].certificate
        assert not store.seen[0].certificate
        fake.answers["GET", path].append(reply(307, Location=f"http://{store.host}/away"))
        async with Client(site, pace=StillClock()) as client:
            with pytest.raises(PolicyError, match="from https to http"):
                await read(client, digest)
        async with Client(Site(fake.host, plain_http=False), pace=StillClock()) as client:
            with pytest.raises(PolicyError, match="its certificate is not valid"):
                await read(client, digest)


@pytest.mark.point("9")
async def test_expired_presigned_url_is_renewed_during_a_blob_download() -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as store:
        digest = fake.blob(CONTENT)
        numbers = iter(range(9))

        async def sends(_: web.Request) -> web.StreamResponse:
            return web.Response(status=307, headers=to(f"{store.url}/{next(numbers)}"))

        async def rest(request: web.Request) -> web.StreamResponse:
            return part_of(request, CONTENT)

        fake.always["GET", f"/v2/{NAME}/blobs/{digest}"] = sends
        store.always["GET", "/0"] = raw(store, whole_head(len(CONTENT)) + CONTENT[:500])
        store.always["GET", "/1"] = reply(403)
        store.always["GET", "/2"] = rest
        async with Client(Site(fake.host), pace=StillClock()) as client:
            assert await read(client, digest) == CONTENT
        assert [one.path for one in store.seen] == ["/0", "/1", "/2"]
        assert {one.method for one in store.seen} == {"GET"}  # presigned for GET only


class Names(AbstractResolver):
    """A fake resolver with one address for each name."""

    def __init__(self, **addresses: str) -> None:
        self.addresses = addresses

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        found = self.addresses[host]
        return [{"hostname": host, "host": found, "port": port, "family": family, "proto": 0, "flags": 0}]

    async def close(self) -> None:
        pass


@pytest.mark.point("9")
async def test_hosts_in_private_networks_are_rejected_for_a_public_registry() -> None:
    names = Names(public="93.184.215.14", inner="10.0.0.7", store="10.0.0.8", local="127.0.0.1", meta="169.254.169.254")
    outside = Resolver(names, "public", frozenset({"store"}))
    await outside.resolve("public", 443)
    await outside.resolve("store", 443)  # explicitly allowed
    for host in ("inner", "local"):
        with pytest.raises(PolicyError, match="is in a private network, and the registry is not"):
            await outside.resolve(host, 443)
    names.addresses["public"] = "10.0.0.7"  # the registry moves to a private address: other names stay rejected
    await outside.resolve("public", 443)
    with pytest.raises(PolicyError, match="is in a private network"):
        await outside.resolve("inner", 443)
    inside = Resolver(names, "inner", frozenset())
    await inside.resolve("inner", 443)
    await inside.resolve("store", 443)
    for resolver in (outside, inside, Resolver(names, "meta", frozenset({"meta"}))):
        with pytest.raises(PolicyError, match="link-local or metadata"):
            await resolver.resolve("meta", 80)


@pytest.mark.point("9")
async def test_allowed_ipv6_host_with_a_port_matches_only_in_brackets() -> None:
    private, public = ipaddress.ip_address("fd00::8"), ipaddress.ip_address("93.184.215.14")
    for allowed, port, refused in (
        ("[fd00::8]:5000", 5000, False),
        ("[fd00::8]", 5000, False),
        ("fd00::8", 5000, False),
        ("[fd00::8]:5001", 5000, True),
        ("fd00::8:5000", 5000, True),
    ):
        resolver = Resolver(Names(), "public", frozenset({allowed}))
        resolver.judge("public", [public], 443)
        if refused:
            with pytest.raises(PolicyError, match="is in a private network"):
                resolver.judge("fd00::8", [private], port)
        else:
            resolver.judge("fd00::8", [private], port)


# --- 10, 11, 15 ------------------------------------------------------------------------------------------------------


@pytest.mark.point("10")
async def test_layer_urls_on_a_foreign_host_are_never_requested() -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as foreign:
        foreign.always["GET", "/layer"] = reply(200, CONTENT)
        layer = {"digest": digest_of(CONTENT), "size": len(CONTENT), "urls": [f"{foreign.url}/layer"]}
        fake.manifest(NAME, "v1", json.dumps({"mediaType": MANIFEST, "layers": [layer]}).encode())
        async with Client(Site(fake.host), pace=StillClock()) as client:
            await manifests.fetch_manifest(client, NAME, "v1")
            with pytest.raises(RegistryError, match="there is no blob"):
                await read(client, digest_of(CONTENT))
        assert not foreign.seen


class Bytes:
    """An in-memory upload source."""

    def __init__(self, content: bytes) -> None:
        self.content = content

    async def read(self, first: int, end: int) -> AsyncGenerator[bytes, None]:
        for at in range(first, end, 1000):
            yield self.content[at : min(at + 1000, end)]


@pytest.mark.point("11")
@pytest.mark.parametrize("chunk_bytes", [0, 3000])
async def test_upload_to_a_foreign_host_sends_no_login(chunk_bytes: int) -> None:
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as foreign:
        foreign.uploads["u"] = b""

        def judge(request: web.Request) -> web.StreamResponse | None:
            if "Authorization" not in request.headers:
                return web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
            if request.method == "POST":
                return web.Response(status=202, headers=to(f"{foreign.url}/v2/{NAME}/blobs/uploads/u"))
            return None

        fake.judge = judge
        blob = Blob(NAME, Digest(digest_of(CONTENT)), len(CONTENT))
        async with Client(Site(fake.host, headers={"X-Team": "red"}), keychain(fake.host), pace=StillClock()) as client:
            assert await push.push_blob(client, blob, Bytes(CONTENT), chunk_bytes=chunk_bytes) == "pushed"
        assert foreign.blobs == {blob.digest: CONTENT}
        assert not any({"authorization", "x-team"} & set(one.headers) for one in foreign.seen)


@pytest.mark.point("15")
async def test_logs_and_errors_of_failing_requests_contain_no_secrets(caplog: pytest.LogCaptureFixture) -> None:
    """Runs through the failures with a login, a token and presigned URLs, and checks all messages together."""
    caplog.set_level(logging.DEBUG)
    token, signature = "t0ken-of-somebody" * 4, "s1gnature-of-somebody"
    secrets = (PASSWORD, token, signature)
    words = [repr(keychain("x"))]
    async with FakeRegistry().serving() as fake, FakeRegistry().serving() as store:
        digest = fake.blob(CONTENT)
        path = f"/v2/{NAME}/blobs/{digest}"

        def judge(request: web.Request) -> web.StreamResponse | None:
            if "Authorization" in request.headers:
                return None
            return web.Response(status=401, headers={"WWW-Authenticate": f'Bearer realm="{fake.url}/token"'})

        fake.judge = judge
        fake.always["GET", "/token"] = reply(200, json.dumps({"token": token}).encode())
        echo = json.dumps({"errors": [{"code": "DENIED", "message": f"{token} {signature}"}]}).encode()
        away = reply(307, Location=f"{store.url}/x?X-Amz-Signature={signature}")
        warning = f'299 - "see https://x.example/?sig={signature} {token}"'
        answers = [
            reply(403, echo, Warning=warning),
            reply(307, Location=f"https://me:{PASSWORD}@169.254.169.254/?{signature}"),
            reply(307, Location=f"http://127.0.0.1:1/?X-Amz-Signature={signature}"),
            *[away] * 7,
        ]
        fake.answers["GET", path].extend(answers)
        store.always["GET", "/x"] = reply(403, echo)
        for _ in range(5):
            async with Client(Site(fake.host), keychain(fake.host), pace=StillClock()) as client:
                try:
                    await read(client, digest)
                except (PolicyError, UnreachableError, MismatchError, RegistryError) as error:
                    words += traceback.format_exception(error)
                words += [repr(client.transport.site), repr(client.tokens), repr(client)]
        assert any("given up" in one for one in words)
        assert any("DENIED" in one for one in words)
    words += [record.getMessage() for record in caplog.records if record.name.startswith("pilotlight")]
    assert any("registry_warning" in one for one in words)
    assert any("registry_retry" in one for one in words)
    for one in words:
        assert not any(secret in one for secret in secrets), one
