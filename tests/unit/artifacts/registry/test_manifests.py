"""A client of well-behaved registries: logins and tokens, tags, referrers, pushing, mirrors."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import parse_qs

import pytest
from aiohttp import web

from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.digest import Digest
from artifacts.http.retry import FIRST_S, LONGEST_S, TRIES_MAX, WAIT_S_MAX, wait_s
from artifacts.http.transport import Site
from artifacts.oci.manifest import OCI_INDEX as INDEX
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from artifacts.registry import blobs, manifests, push
from artifacts.registry.blobs import Blob
from artifacts.registry.challenge import Challenge, parse_challenges
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirror, Mirrored
from artifacts.registry.referrers import PAGES_MAX, format_referrers_tag, list_referrers
from artifacts.registry_errors import AbsentError, DeniedError, MismatchError, PolicyError
from tests.support.fakes.registry import Answer, FakeRegistry, StillClock, digest_of, index, raw, reply, whole_head

NAME = "team/model"
CONTENT = b"weights!" * 2000
BODY = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": []}).encode()


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        (['Basic realm="a, b"'], [Challenge("basic", {"realm": "a, b"})]),
        (
            ['Bearer realm="https://r/t",service="s",scope="repository:a:pull,push"'],
            [Challenge("bearer", {"realm": "https://r/t", "service": "s", "scope": "repository:a:pull,push"})],
        ),
        (
            ['Basic realm="x", BEARER Realm="https://r/\\"t" , service = s'],
            [Challenge("basic", {"realm": "x"}), Challenge("bearer", {"realm": 'https://r/"t', "service": "s"})],
        ),
        (["Negotiate", "Basic realm=x"], [Challenge("negotiate", {}), Challenge("basic", {"realm": "x"})]),
        (["Negotiate YWJj==, Basic realm=x"], [Challenge("negotiate", {}), Challenge("basic", {"realm": "x"})]),
        (['Bearer realm="one",realm="two"'], [Challenge("bearer", {"realm": "one"})]),
        (['Bearer realm="no end'], [Challenge("bearer", {})]),
        (["", ",,", "=", '"'], []),
    ],
)
def test_www_authenticate_headers_are_parsed_into_challenges(headers: list[str], found: list[Challenge]) -> None:
    read = parse_challenges(headers)
    if headers == ['Bearer realm="no end']:
        assert read[0] == found[0]
    else:
        assert read == found


def test_retry_delays_double_until_the_retry_limit() -> None:
    assert [wait_s(tries, 0.0, None, 1.0) for tries in range(1, TRIES_MAX)] == [0.25, 0.5, 1.0, 2.0, 4.0]
    assert wait_s(1, 0.0, None, 0.0) == FIRST_S / 2
    assert wait_s(TRIES_MAX, 0.0, None, 0.0) is None
    assert wait_s(1, WAIT_S_MAX, None, 0.0) is None
    assert wait_s(2, 0.0, 5.0, 1.0) == 5.25  # never earlier than requested
    assert wait_s(5, 0.0, None, 1.0) is not None
    assert LONGEST_S <= WAIT_S_MAX


class TokenPlace:
    """A registry whose realm issues tokens, each valid while it is in `good`."""

    def __init__(self, fake: FakeRegistry) -> None:
        self.fake = fake
        self.good: set[str] = set()
        self.asked: list[dict[str, list[str]]] = []
        self.logins: list[str | None] = []
        self.lasts_s = 300
        fake.judge = self._judge
        fake.always["GET", "/token"] = fake.always["POST", "/token"] = self._give

    def _judge(self, request: web.Request) -> web.StreamResponse | None:
        if request.headers.get("Authorization", "").removeprefix("Bearer ") in self.good:
            return None
        challenge = f'Bearer realm="{self.fake.url}/token?kept=1",service="reg"'
        return web.Response(status=401, headers={"WWW-Authenticate": challenge})

    async def _give(self, request: web.Request) -> web.StreamResponse:
        text = (await request.read()).decode() if request.method == "POST" else request.query_string
        self.asked.append(parse_qs(text))
        self.logins.append(request.headers.get("Authorization"))
        token = f"token-{len(self.asked)}"
        self.good.add(token)
        return web.json_response({"access_token": token, "expires_in": self.lasts_s})


@contextlib.asynccontextmanager
async def with_tokens(login: Login | None = None) -> AsyncIterator[tuple[TokenPlace, Client, StillClock]]:
    clock = StillClock()
    async with FakeRegistry().serving() as fake:
        fake.manifest(NAME, "v1", BODY)
        place = TokenPlace(fake)
        async with Client(Site(fake.host), Known(fake.host, login) if login else None, pace=clock) as client:
            yield place, client, clock


async def read(client: Client | Mirrored, blob: Blob) -> bytes:
    source = client.read(blob) if isinstance(client, Mirrored) else blobs.stream_blob(client, blob)
    async with contextlib.aclosing(source) as pieces:
        return b"".join([piece async for piece in pieces])


async def test_token_is_requested_once_and_renewed_before_expiry() -> None:
    async with with_tokens(Login("me", "pw")) as (place, client, clock):
        await asyncio.gather(*(manifests.fetch_manifest(client, NAME, "v1") for _ in range(5)))
        assert place.asked == [{"kept": ["1"], "service": ["reg"], "scope": [f"repository:{NAME}:pull"]}]
        assert place.logins[0] is not None
        assert place.logins[0].startswith("Basic ")
        clock.now_s += 269
        await manifests.fetch_manifest(client, NAME, "v1")
        assert len(place.asked) == 1
        clock.now_s += 2
        await manifests.fetch_manifest(client, NAME, "v1")
        assert len(place.asked) == 2
        place.fake.manifest("team/other", "v1", BODY)
        await manifests.fetch_manifest(client, "team/other", "v1")
        assert place.asked[-1]["scope"] == ["repository:team/other:pull"]


@pytest.mark.point("12")
async def test_token_that_expires_during_a_pull_is_renewed() -> None:
    async with with_tokens(Login("me", "pw")) as (place, client, _):
        blob = Blob(NAME, Digest(place.fake.blob(CONTENT)), len(CONTENT))

        async def breaks(request: web.Request) -> web.StreamResponse:
            place.good.clear()
            return await raw(place.fake, whole_head(len(CONTENT)) + CONTENT[:700])(request)

        await manifests.fetch_manifest(client, NAME, "v1")
        place.fake.answers["GET", f"/v2/{NAME}/blobs/{blob.digest}"].append(breaks)
        assert await read(client, blob) == CONTENT
        assert len(place.asked) == 2
        assert [one.headers["authorization"] for one in place.fake.asked("GET", "/blobs/")] == [
            "Bearer token-1",
            "Bearer token-1",
            "Bearer token-2",
        ]


async def test_identity_token_is_posted_without_a_basic_auth_header() -> None:
    async with with_tokens(Login(identity_token="r+/=")) as (place, client, _):
        await manifests.fetch_manifest(client, NAME, "v1")
        assert place.asked[0]["grant_type"] == ["refresh_token"]
        assert place.asked[0]["refresh_token"] == ["r+/="]
        assert place.logins == [None]
    async with with_tokens() as (place, client, _):
        await manifests.fetch_manifest(client, NAME, "v1")
        assert place.logins == [None]


async def test_pull_with_a_rejected_or_missing_login_fails_with_the_reason() -> None:
    async with with_tokens(Login("me", "pw")) as (place, client, _):
        place.fake.always["GET", "/token"] = reply(401)
        with pytest.raises(DeniedError, match=f"its realm rejects the login for {client.said}"):
            await manifests.fetch_manifest(client, NAME, "v1")
        place.fake.always["GET", "/token"] = reply(200, b'{"token": "never-good"}')
        with pytest.raises(DeniedError, match="rejects the login"):
            await manifests.fetch_manifest(client, NAME, "v1")
    async with FakeRegistry().serving() as fake:
        fake.judge = lambda _: web.Response(status=401, headers={"WWW-Authenticate": 'Basic realm="r"'})
        async with Client(Site(fake.host), pace=StillClock()) as client:
            with pytest.raises(DeniedError, match=r"none is stored for .*; log in with `pilotlight weights login`"):
                await manifests.fetch_manifest(client, NAME, "v1")
        async with Client(Site(fake.host), Known(fake.host, Login("a", "b"))) as client:
            with pytest.raises(DeniedError, match="rejects the login"):
                await manifests.fetch_manifest(client, NAME, "v1")


# --- lists -----------------------------------------------------------------------------------------------------------


async def test_referrer_pages_are_followed_only_on_the_registry_host() -> None:
    def page(*digits: str, link: str = "") -> Answer:
        rows = [{"mediaType": MANIFEST, "digest": f"sha256:{one * 64}", "size": 1} for one in digits]
        body = json.dumps({"manifests": rows}).encode()
        return reply(200, body, **{"Content-Type": INDEX}, **({"Link": link} if link else {}))

    subject = Digest(f"sha256:{'0' * 64}")
    async with FakeRegistry().serving() as fake:
        path = f"/v2/{NAME}/referrers/{subject}"
        more = f'<{path}?n=2&last=b>; rel="next"'
        fake.answers["GET", path].extend([page("a", "b", link=more), page("c")])
        async with Client(Site(fake.host), pace=StillClock()) as client:
            found = await list_referrers(client, NAME, subject)
            assert [one.digest[-1] for one in found] == ["a", "b", "c"]
            fake.answers["GET", path].append(page("a", link='<http://localhost:1/v2/x>; rel="next"'))
            with pytest.raises(PolicyError, match="its next page is on another host"):
                await list_referrers(client, NAME, subject)
            fake.always["GET", path] = page("a", link=more)
            assert len(await list_referrers(client, NAME, subject)) == PAGES_MAX  # an endless list
            with pytest.raises(PolicyError, match="is not a repository"):
                await list_referrers(client, "../../admin", subject)


SIGNATURE = "application/vnd.dev.sigstore.bundle.v0.3+json"


def attached(subject: str, artifact_type: str = SIGNATURE, n: int = 0) -> bytes:
    descriptor = {"mediaType": MANIFEST, "digest": subject, "size": len(BODY)}
    return json.dumps(
        {"mediaType": MANIFEST, "artifactType": artifact_type, "layers": [], "subject": descriptor, "n": n}
    ).encode()


async def test_referrers_are_listed_with_and_without_the_referrers_api() -> None:
    async with FakeRegistry().serving() as fake, Client(Site(fake.host), pace=StillClock()) as client:
        subject = Digest(fake.manifest(NAME, "v1", BODY))
        assert await list_referrers(client, NAME, subject) == []
        for n in range(2):
            body = attached(subject, n=n)
            await push.push_manifest(client, NAME, digest_of(body), body, MANIFEST)
        other = attached(subject, "application/other")
        await push.push_manifest(client, NAME, digest_of(other), other, MANIFEST)
        await push.push_manifest(client, NAME, digest_of(other), other, MANIFEST)  # not listed twice
        found = await list_referrers(client, NAME, subject)
        assert [one.digest for one in found][-1] == digest_of(other)
        assert len(found) == 3
        assert {one.artifact_type for one in await list_referrers(client, NAME, subject, SIGNATURE)} == {SIGNATURE}
        assert fake.manifests[NAME, format_referrers_tag(subject)][0] == INDEX

        path = f"/v2/{NAME}/referrers/{subject}"  # a registry with the API, but without filtering
        one = {"mediaType": MANIFEST, "digest": digest_of(b"1"), "size": 1, "artifactType": SIGNATURE}
        listed = json.dumps(index(one, {**one, "artifactType": "x"})).encode()
        fake.always["GET", path] = reply(200, listed, Content_Type=INDEX)
        assert [each.digest for each in await list_referrers(client, NAME, subject, SIGNATURE)] == [one["digest"]]
        fake.always["GET", path] = reply(
            200, json.dumps(index({**one, "digest": "sha256:../x"})).encode(), Content_Type=INDEX
        )
        with pytest.raises(MismatchError, match="is not a digest"):
            await list_referrers(client, NAME, subject)


async def test_registry_with_referrer_support_gets_no_referrers_tag() -> None:
    async with FakeRegistry().serving() as fake, Client(Site(fake.host), pace=StillClock()) as client:
        fake.subjects = True
        subject = Digest(fake.manifest(NAME, "v1", BODY))
        await push.push_manifest(client, NAME, "sig", attached(subject), MANIFEST)
        assert (NAME, format_referrers_tag(subject)) not in fake.manifests


# --- pushing ---------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pushed(tmp_path: Path) -> AsyncIterator[tuple[FakeRegistry, Client, Blob, push.FileSource]]:
    path = tmp_path / "model.gguf"
    path.write_bytes(CONTENT)
    blob = Blob(NAME, Digest(digest_of(CONTENT)), len(CONTENT))
    async with FakeRegistry().serving() as fake, Client(Site(fake.host), pace=StillClock()) as client:
        yield fake, client, blob, push.FileSource(path)


@pytest.mark.parametrize("chunk_bytes", [0, 3000, 1 << 20])
async def test_blob_already_in_the_registry_is_not_pushed_again(tmp_path: Path, chunk_bytes: int) -> None:
    async with pushed(tmp_path) as (fake, client, blob, source):
        assert await push.push_blob(client, blob, source, chunk_bytes=chunk_bytes) == "pushed"
        assert fake.blobs == {blob.digest: CONTENT}
        assert await push.push_blob(client, blob, source) == "exists"
        put = fake.asked("PUT", "/uploads/")[0]
        assert put.query == f"_state=a%2Bb%3D&digest={blob.digest}"  # the existing query is unchanged
        assert "transfer-encoding" not in put.headers


async def test_blob_is_mounted_when_the_registry_allows_the_mount(tmp_path: Path) -> None:
    async with pushed(tmp_path) as (fake, client, blob, source):
        fake.blob(CONTENT)
        fake.answers["HEAD", f"/v2/{NAME}/blobs/{blob.digest}"].extend([reply(404), reply(404)])
        assert await push.push_blob(client, blob, source, mount="shared") == "mounted"
        assert await push.push_blob(client, blob, source, mount="else/where") == "pushed"
        fake.answers["HEAD", f"/v2/{NAME}/blobs/{blob.digest}"].append(reply(404))
        with pytest.raises(PolicyError, match="is not a repository"):
            await push.push_blob(client, blob, source, mount="a&digest=x")


async def test_lost_chunk_is_sent_again_from_the_registry_offset(tmp_path: Path) -> None:
    async with pushed(tmp_path) as (fake, client, blob, source):
        path = f"/v2/{NAME}/blobs/uploads/upload-0"

        async def half(request: web.Request) -> web.StreamResponse:
            fake.uploads["upload-0"] += (await request.read())[:1234]
            return await raw(fake, b"", "reset")(request)

        fake.answers["PATCH", path].extend([half, reply(503), reply(416)])
        assert await push.push_blob(client, blob, source, chunk_bytes=5000) == "pushed"
        assert fake.blobs == {blob.digest: CONTENT}
        spans = [one.headers["content-range"] for one in fake.asked("PATCH", "/uploads/")]
        assert spans[:4] == ["0-4999", "1234-6233", "1234-6233", "1234-6233"]


async def test_single_request_push_succeeds_after_a_502_and_a_lost_response(tmp_path: Path) -> None:
    async with pushed(tmp_path) as (fake, client, blob, source):
        fake.answers["PUT", f"/v2/{NAME}/blobs/uploads/upload-0"].append(reply(502))

        async def lost(request: web.Request) -> web.StreamResponse:
            fake.blob(await request.read())
            return await raw(fake, b"", "reset")(request)

        fake.answers["PUT", f"/v2/{NAME}/blobs/uploads/upload-1"].append(lost)
        assert await push.push_blob(client, blob, source) == "pushed"
        assert len(fake.asked("POST", "/uploads/")) == 2


async def test_file_that_changes_during_a_push_is_rejected(tmp_path: Path) -> None:
    async with pushed(tmp_path) as (_, client, blob, source):
        (tmp_path / "model.gguf").write_bytes(bytes(len(CONTENT)))
        with pytest.raises(MismatchError, match="answered 400 DIGEST_INVALID"):
            await push.push_blob(client, blob, source)
        (tmp_path / "model.gguf").write_bytes(CONTENT[:-1])
        with pytest.raises(MismatchError, match=r"model.gguf: became shorter"):
            await push.push_blob(client, blob, source)


# --- mirrors ---------------------------------------------------------------------------------------------------------


async def test_mirror_content_is_used_only_if_it_matches_its_digest() -> None:
    clock = StillClock()
    async with (
        FakeRegistry().serving() as own,
        FakeRegistry().serving() as near,
        Client(Site(own.host), pace=clock) as client,
        Client(Site(near.host), pace=clock) as mirror,
        Client(Site("127.0.0.1:1"), pace=clock) as away,
    ):
        blob = Blob(NAME, Digest(own.blob(CONTENT)), len(CONTENT))
        digest = own.manifest(NAME, "v1", BODY)
        both = Mirrored(client, [Mirror(away), Mirror(mirror, "hub/")])
        near.manifest(f"hub/{NAME}", "v1", BODY.replace(b"[]", b"[ ]"))
        assert (await both.manifest(NAME, "v1")).digest == digest  # the registry decides what a tag means
        near.manifests[f"hub/{NAME}", digest] = (MANIFEST, b"{}")
        assert (await both.manifest(NAME, digest)).body == BODY  # a wrong response costs one attempt
        near.manifest(f"hub/{NAME}", "v1", BODY)
        seen = len(own.seen)
        assert (await both.manifest(NAME, digest)).body == BODY
        near.blob(CONTENT)
        assert await read(both, blob) == CONTENT
        assert len(own.seen) == seen  # the mirror served both
        near.always["GET", f"/v2/hub/{NAME}/blobs/{blob.digest}"] = reply(200, CONTENT[:-1])
        assert await read(both, blob) == CONTENT
        with pytest.raises(AbsentError):
            await both.manifest(NAME, "v2")


async def test_bytes_kept_from_a_broken_mirror_must_match_the_blob_digest() -> None:
    clock = StillClock()
    async with (
        FakeRegistry().serving() as own,
        FakeRegistry().serving() as near,
        Client(Site(own.host), pace=clock) as client,
        Client(Site(near.host), pace=clock) as mirror,
    ):
        blob = Blob(NAME, Digest(own.blob(CONTENT)), len(CONTENT))
        both, path = Mirrored(client, [Mirror(mirror)]), f"/v2/{NAME}/blobs/{blob.digest}"
        near.always["GET", path] = reply(404)
        for beginning in (CONTENT[:5000], b"x" * 5000):
            near.answers["GET", path].append(raw(near, whole_head(len(CONTENT)) + beginning))
            if beginning == CONTENT[:5000]:
                assert await read(both, blob) == CONTENT
            else:
                with pytest.raises(MismatchError, match="from more than one source"):
                    await read(both, blob)
        assert len(own.asked("GET", path)) == 2


async def test_login_check_without_a_repository_requests_an_unscoped_token() -> None:
    async with with_tokens(Login("me", "pw")) as (place, client, _):
        assert await manifests.is_login_accepted(client)
        assert place.asked == [{"kept": ["1"], "service": ["reg"]}]
        place.fake.always["GET", "/token"] = reply(401)
        async with Client(Site(place.fake.host), Known(place.fake.host, Login("me", "no"))) as other:
            with pytest.raises(DeniedError, match="rejects the login"):
                await manifests.is_login_accepted(other)
        place.fake.judge = lambda _: None
        async with Client(Site(place.fake.host)) as third:
            assert not await manifests.is_login_accepted(third)
