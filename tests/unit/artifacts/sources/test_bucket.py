"""Models from an S3 store on loopback: signed requests, paged listings, and objects read as they were listed."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from artifacts import digest, source_uri
from artifacts.credentials.aws_keys import AwsKeys
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.fetch import fetch as bring
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Registries
from artifacts.http import xml
from artifacts.registry_errors import AbsentError, DeniedError, MismatchError, PolicyError, RegistryError
from artifacts.sources.s3 import BucketAccess
from artifacts.store.copies import Copy
from artifacts.store.layout import ForbiddenError, NoRoomError
from artifacts.store.permission_cache import Permits
from artifacts.store.store import Store
from artifacts.store.stored_copy_check import verify_copy
from tests.support.builders.artifacts.packed_models import read_files
from tests.support.builders.artifacts.weight_file_headers import as_gguf, as_safetensors
from tests.support.fakes.registry import StillClock, reply
from tests.support.fakes.s3 import SECRET, FakeS3

pytestmark = pytest.mark.standard

WEIGHTS = as_safetensors(hashlib.shake_128(b"s3").digest(200_000))
OBJECTS = {
    "llama/8b/model.safetensors": WEIGHTS,
    "llama/8b/config.json": b"{}",
    "llama/8b/sub/a b+c.txt": b"words",
    "llama/8b/empty.txt": b"",
    "llama/8b/": b"",
    "llama/8bx/other.gguf": as_gguf(b"not wanted"),
    "one.gguf": as_gguf(WEIGHTS[:5000]),
}
BELOW = {
    path.removeprefix("llama/8b/"): content
    for path, content in OBJECTS.items()
    if path.startswith("llama/8b/") and path != "llama/8b/"
}
PREFIX = "s3://models/llama/8b/"


class Node:
    """An object store, and a node with a weight store."""

    def __init__(self, fake: FakeS3, store: Store, home: Path) -> None:
        self.fake, self.store, self.home = fake, store, home

    def ways(self, secret: str = SECRET) -> Ways:
        return Ways(Registries(pace=StillClock()), self.fake.env(secret), self.home)

    async def bring(self, text: str = PREFIX, secret: str = SECRET) -> Copy:
        return await bring.fetch_artifact(_of(text), self.store, self.ways(secret))

    async def kept(self, text: str = PREFIX, secret: str = SECRET) -> Copy | None:
        return await bring.find_stored_copy(_of(text), self.store, self.ways(secret))


def _of(text: str) -> bring.Lies:
    found = source_uri.parse_source_uri(text)
    assert not isinstance(found, source_uri.Local)
    return found


@contextlib.asynccontextmanager
async def node(tmp_path: Path, objects: dict[str, bytes] | None = None) -> AsyncIterator[Node]:
    fake = FakeS3(dict(OBJECTS) if objects is None else objects)
    async with fake.serving():
        yield Node(fake, Store(tmp_path / "store", spare_bytes=0).open(), tmp_path)


@pytest.mark.parametrize(("summed", "listed"), [(False, False), (True, False), (True, True)])
async def test_second_pull_of_a_prefix_downloads_no_objects(tmp_path: Path, summed: bool, listed: bool) -> None:
    async with node(tmp_path) as one:
        one.fake.lists_sums = listed
        one.fake.summed = one.fake.encodes = summed
        with await one.bring() as copy:
            assert read_files(copy.folder) == BELOW
            assert {file.path: file.digest for file in copy.record.laid} == {
                path: digest.compute_digest(content) for path, content in BELOW.items()
            }
            assert len(copy.record.unpacked) == (0 if summed else len(BELOW))
            assert list(verify_copy(copy.record, copy.folder)) == []
        assert len([seen for seen in one.fake.asked("GET", "/models/") if "list-type" in seen.query]) > 2  # in pages
        one.fake.seen.clear()
        (await one.bring()).close()
        assert not [seen for seen in one.fake.asked("GET", "/models/") if "list-type" not in seen.query]


async def test_source_uri_of_a_single_object_pulls_only_that_object(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        with await one.bring("s3://models/one.gguf") as copy:
            assert read_files(copy.folder) == {"one.gguf": OBJECTS["one.gguf"]}
            assert copy.record.private


async def test_pull_with_missing_or_wrong_keys_is_denied(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        for secret, code in (("", "AccessDenied"), ("wrong", "SignatureDoesNotMatch")):
            with pytest.raises(DeniedError, match=rf"\({code}\)") as caught:
                await one.bring(secret=secret)
            assert "words of its own" not in str(caught.value)
        (await one.bring()).close()
        for secret in ("", "wrong"):
            with pytest.raises(ForbiddenError):
                await one.kept(secret=secret)
        found = await one.kept()
        assert found is not None
        found.close()


async def test_stored_copy_of_a_public_bucket_needs_no_keys_or_request(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.open = True
        (await one.bring(secret="")).close()
        assert not [seen for seen in one.fake.seen if "authorization" in seen.headers]
        one.fake.seen.clear()
        found = await one.kept(secret="")
        assert found is not None
        found.close()
        assert one.fake.seen == []


async def test_object_changed_during_a_pull_is_rejected(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        ordinary, key = one.fake._ordinary, "llama/8b/config.json"

        async def changed(request: web.Request) -> web.StreamResponse:
            if request.method == "GET" and request.path.endswith("config.json"):
                one.fake.objects[key] = b'{"other": 1}'
            return await ordinary(request)

        one.fake._ordinary = changed  # type: ignore[method-assign]  # in this test only
        with pytest.raises(MismatchError, match=r"config\.json changed while it was pulled"):
            await one.bring()
        assert not one.store.rows()
        with await one.bring() as copy:
            assert read_files(copy.folder)["config.json"] == b'{"other": 1}'


@pytest.mark.parametrize("headers", [{"ETag": '"another"'}, {}])
async def test_wrong_or_missing_response_etag_is_rejected(tmp_path: Path, headers: dict[str, str]) -> None:
    """Otherwise an object overwritten during the pull could be stored as a mix of both versions."""
    async with node(tmp_path) as one:
        one.fake.always["GET", "/models/one.gguf"] = reply(200, b"x" * 5000, **headers)
        with pytest.raises(MismatchError, match="the file changed while it was pulled; pull again"):
            await one.bring("s3://models/one.gguf")
        assert not one.store.rows()


async def with_wrong_bytes(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"x" * 5000, headers={"ETag": request.headers["If-Match"]})


async def test_repeated_pull_with_different_bytes_for_the_same_etag_is_rejected(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        with await one.bring("s3://models/one.gguf") as copy:
            key = copy.record.key
        one.store.evict(key)
        one.fake.answers["GET", "/models/one.gguf"].extend([with_wrong_bytes] * 2)
        with pytest.raises(MismatchError, match="do not match"):
            await one.bring("s3://models/one.gguf")
        one.fake.answers.clear()
        with await one.bring("s3://models/one.gguf") as copy:
            assert copy.record.key == key
            assert read_files(copy.folder) == {"one.gguf": OBJECTS["one.gguf"]}


async def test_object_that_does_not_match_its_s3_checksum_is_rejected(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.summed = True
        one.fake.answers["GET", "/models/one.gguf"].extend([with_wrong_bytes] * 2)
        with pytest.raises(MismatchError, match="do not match"):
            await one.bring("s3://models/one.gguf")


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("s3://models/nothing.gguf", AbsentError, "there is no object nothing.gguf"),
        ("s3://models/nothing/", RefusedError, "there are no weights"),
        ("s3://other/llama/8b/", AbsentError, "the bucket does not exist"),
    ],
)
async def test_missing_object_prefix_or_bucket_fails_the_pull(
    tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    async with node(tmp_path) as one:
        with pytest.raises(kind, match=message):
            await one.bring(text)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"<a", "cannot be read"),
        (b'<!DOCTYPE a [<!ENTITY x "y">]><a>&x;</a>', "document type"),
        (b"<a><Contents><Key>k</Key><Size>1</Size></Contents></a>", "without name, ETag or size"),
        (b'<a><Contents><Key>k</Key><ETag>"e"</ETag><Size>-1</Size></Contents></a>', "without name, ETag or size"),
    ],
)
async def test_invalid_bucket_listing_is_rejected(tmp_path: Path, body: bytes, message: str) -> None:
    async with node(tmp_path) as one:
        one.fake.answers["GET", "/models/"].append(reply(200, body))
        with pytest.raises(RegistryError, match=message):
            await one.bring()


async def test_endless_bucket_listing_is_rejected_at_the_size_limit(tmp_path: Path) -> None:
    async with node(tmp_path) as one:

        async def endless(request: web.Request) -> web.StreamResponse:
            answer = web.StreamResponse()
            await answer.prepare(request)
            with contextlib.suppress(ConnectionError):
                while True:
                    await answer.write(b" " * (1 << 20))
            return answer

        one.fake.always["GET", "/models/"] = endless
        with pytest.raises(PolicyError, match=f"is larger than {xml.BYTES_MAX} bytes"):
            await one.bring()


@pytest.mark.parametrize("text", [PREFIX, "s3://models/one.gguf"])
async def test_redirect_of_a_bucket_request_is_not_followed(tmp_path: Path, text: str) -> None:
    async with node(tmp_path) as one, FakeS3({}).serving() as other:
        one.fake.token = "t0ken"
        one.fake.judge = lambda _: web.Response(status=307, headers={"Location": f"{other.url}/models/one.gguf"})
        with pytest.raises(RegistryError):
            await one.bring(text)
        assert other.seen == []


async def test_wrong_region_error_names_the_aws_region_to_set(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.answers["GET", "/models/"].append(reply(301, x_amz_bucket_region="ap-south-1"))
        with pytest.raises(RegistryError, match="set AWS_REGION=ap-south-1"):
            await one.bring()


async def test_bucket_url_is_built_from_region_and_endpoint_settings(tmp_path: Path) -> None:
    async def base(name: str, **env: str) -> str:
        return str(await BucketAccess(env, AwsKeys(env, tmp_path)).base(name))

    assert await base("models") == "https://models.s3.us-east-1.amazonaws.com/"
    assert await base("my.models", AWS_REGION="eu-west-1") == "https://s3.eu-west-1.amazonaws.com/my.models/"
    assert await base("m-1", AWS_REGION="cn-north-1") == "https://m-1.s3.cn-north-1.amazonaws.com.cn/"
    assert await base("models", AWS_ENDPOINT_URL="http://minio:9000") == "http://minio:9000/models/"
    both = {"AWS_ENDPOINT_URL": "http://x", "AWS_ENDPOINT_URL_S3": "https://s3.example/"}
    assert await base("models", **both) == "https://s3.example/models/"
    with pytest.raises(PolicyError, match="AWS_ENDPOINT_URL is not a URL"):
        await base("models", AWS_ENDPOINT_URL="minio:9000")


async def test_pull_above_the_store_size_limit_fetches_no_objects(tmp_path: Path) -> None:
    async with node(tmp_path, {"m/a.gguf": as_gguf(b"w" * (1 << 20))}) as one:
        one.store = Store(tmp_path / "store", bytes_max=1 << 20, spare_bytes=0).open()
        with pytest.raises(NoRoomError):
            await one.bring("s3://models/m/")
        assert not [seen for seen in one.fake.asked("GET", "/models/") if "list-type" not in seen.query]


async def test_stored_copy_is_denied_if_access_to_any_object_is_denied(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        (await one.bring()).close()
        asked = list[str]()

        def judge(request: web.Request) -> web.StreamResponse | None:
            if request.method == "HEAD":
                asked.append(request.path.rpartition("/")[2])
                return web.Response(status=403) if request.path.endswith(".safetensors") else None
            return None

        one.fake.judge = judge
        one.store = Store(tmp_path / "store", spare_bytes=0, permits=Permits(tmp_path / "new-permits"))
        for ask, kind in ((one.bring, DeniedError), (one.kept, ForbiddenError)):
            asked.clear()
            with pytest.raises(kind):
                await ask()
            assert set(asked) == {path.rpartition("/")[2] for path in BELOW}


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("summed", [False, True])
async def test_pull_after_access_was_revoked_is_denied_despite_a_stored_copy(
    tmp_path: Path, method: str, summed: bool
) -> None:
    """It holds for whichever request is denied first."""
    async with node(tmp_path) as one:
        one.fake.summed = summed
        (await one.bring()).close()
        one.fake.judge = lambda request: web.Response(status=403) if request.method == method else None
        with pytest.raises(DeniedError):
            await one.bring()
        one.fake.judge = lambda request: web.Response(status=403)
        with pytest.raises(ForbiddenError):
            await one.kept()
