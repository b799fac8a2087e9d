"""The contract for S3-compatible stores, as tests. It runs against the fake store and real servers, so neither drifts.

class TestMine(BucketContract):
    @pytest.fixture
    def rig(self) -> Rig: ...
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import CliRunner

from artifacts import digest, source_uri
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.fetch import fetch
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Registries
from artifacts.http.retry import Pace
from artifacts.registry.blobs import Blob
from artifacts.registry_errors import AbsentError, DeniedError, MismatchError, RegistryError
from artifacts.sources import s3 as bucket
from artifacts.sources.file_host_client import FileHost, Lone
from artifacts.sources.file_selection import Listing
from artifacts.store.copies import Copy
from artifacts.store.layout import ForbiddenError
from artifacts.store.store import Store
from artifacts.store.stored_copy_check import verify_copy
from pilotlight.cli.main import cli
from tests.support.builders.artifacts.weight_file_headers import as_gguf, as_safetensors
from tests.support.fakes.registry import FakeRegistry

REGION = "eu-test-1"
NAMES = ("a b+c.txt", "ünï/日本語.txt", "100%25 &=?#;,@$!'()*[].txt", "~-._/x.txt", "deep/er/<&amp;>.txt")
"""Object names. Other names cannot be used as file paths (`artifacts.safe_paths`)."""
WEIGHTS = as_gguf(hashlib.shake_128(b"weights").digest(300_000))
OTHERS = as_gguf(WEIGHTS[::-1])
MANY = 1003
"""Number of objects: more than one page holds."""

WRONG = (
    ("AWS_SECRET_ACCESS_KEY", "wrong", r"AWS_SECRET_ACCESS_KEY .*\(SignatureDoesNotMatch\)"),
    ("AWS_ACCESS_KEY_ID", "nobody", r"AWS_ACCESS_KEY_ID .*\(InvalidAccessKeyId\)"),
    ("AWS_ACCESS_KEY_ID", "", "a caller without keys may not read it"),
)
"""(changed environment variable, its value, expected message)."""


class Rig(Protocol):
    """A store with a private bucket that belongs to this test, in REGION."""

    bucket: str

    def env(self) -> dict[str, str]:
        """The environment of the bucket's owner, with keys that do not expire."""

    async def session(self) -> dict[str, str]:
        """The environment of the bucket's owner, with temporary keys."""

    async def put(self, key: str, content: bytes, *, summed: bool = False) -> None:
        """Writes an object. `summed`: with its sha256, which the store keeps."""

    async def put_parts(self, key: str, parts: Sequence[bytes]) -> None:
        """Writes an object in parts, each but the last of 5 MiB or more, so that its ETag is not an MD5."""

    async def show_all(self) -> None:
        """Makes the bucket public: anyone may list and read it."""


class Late(Pace):
    """The clock of a machine that is one hour behind."""

    def unix_s(self) -> float:
        """Implements Pace."""
        return super().unix_s() - 3600


class BucketContract:
    """The contract of `artifacts.sources.s3` with a store."""

    async def test_pull_of_a_bucket_prefix_fetches_all_objects_below_it(self, rig: Rig, tmp_path: Path) -> None:
        below = {"model.safetensors": as_safetensors(WEIGHTS), "empty.txt": b""} | {
            name: name.encode() for name in NAMES
        }
        for name, content in below.items():
            await rig.put(f"llama 8b/{name}", content)
        await rig.put("llama 8b/", b"")
        await rig.put("llama 8bx/other.gguf", b"not wanted")
        with await _bring(rig, tmp_path, "llama 8b/") as copy:
            assert _held(copy) == below
            assert list(verify_copy(copy.record, copy.folder)) == []
            assert copy.record.private

    @pytest.mark.parametrize("name", ["one.gguf", "a b+c/ünï %25&=?#'().gguf"])
    async def test_pull_of_one_bucket_object_fetches_only_that_object(
        self, rig: Rig, tmp_path: Path, name: str
    ) -> None:
        await rig.put(name, WEIGHTS)
        with await _bring(rig, tmp_path, name) as copy:
            assert _held(copy) == {name.rpartition("/")[2]: WEIGHTS}

    async def test_bucket_listing_longer_than_a_page_returns_all_objects(self, rig: Rig) -> None:
        names = [f"part {at:04}.txt" for at in range(MANY)]
        for at in range(0, MANY, 16):
            await asyncio.gather(*(rig.put(f"many/{name}", b"x") for name in names[at : at + 16]))
        await rig.put("many/model.gguf", WEIGHTS)
        async with _looked(rig, "many/") as (found, _):
            assert [one.entry.path for one in found.taken] == ["model.gguf", *names]

    async def test_byte_range_read_of_a_bucket_object_returns_exactly_its_bytes(self, rig: Rig) -> None:
        await rig.put("one.gguf", WEIGHTS)
        async with _looked(rig, "one.gguf") as (found, place):
            size = len(WEIGHTS)
            for first, end in ((0, None), (1000, 200_000), (size - 1, None), (0, 1)):
                assert await _read(place, found, first, end) == WEIGHTS[first : end or size]

    async def test_read_of_an_object_that_changed_after_its_listing_fails(self, rig: Rig) -> None:
        await rig.put("one.gguf", WEIGHTS)
        async with _looked(rig, "one.gguf") as (found, place):
            await rig.put("one.gguf", OTHERS)
            for first, end in ((0, None), (1000, 2000)):
                with pytest.raises(MismatchError, match="changed while it was pulled; pull again"):
                    await _read(place, found, first, end)

    async def test_object_changed_between_pulls_gets_a_copy_with_another_key(self, rig: Rig, tmp_path: Path) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        with await _bring(rig, tmp_path, "m/") as copy:
            first = copy.record.key
        await rig.put("m/one.gguf", WEIGHTS)
        with await _bring(rig, tmp_path, "m/") as copy:
            assert copy.record.key == first
        await rig.put("m/one.gguf", OTHERS)
        with await _bring(rig, tmp_path, "m/") as copy:
            assert copy.record.key != first
            assert _held(copy) == {"one.gguf": OTHERS}
            assert [one.digest for one in copy.record.laid] == [digest.compute_digest(OTHERS)]

    async def test_bucket_object_pulled_again_has_the_digest_of_the_first_pull(self, rig: Rig, tmp_path: Path) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        with await _bring(rig, tmp_path, "m/") as copy:
            key, unpacked = copy.record.key, copy.record.unpacked
        Store(tmp_path / "store", spare_bytes=0).open().evict(key)
        with await _bring(rig, tmp_path, "m/") as copy:
            assert copy.record.key == key
            assert [one.digest for one in unpacked] == [one.digest for one in copy.record.laid]
            assert not copy.record.unpacked, "it is known by its sum now"

    async def test_checksum_stored_in_the_bucket_is_used_as_digest_of_the_object(
        self, rig: Rig, tmp_path: Path
    ) -> None:
        await rig.put("m/one.gguf", WEIGHTS, summed=True)
        for key in ("m/", "m/one.gguf"):
            async with _looked(rig, key) as (found, _):
                assert [one.entry.claim for one in found.taken] == [digest.compute_digest(WEIGHTS)]
            with await _bring(rig, tmp_path, key) as copy:
                assert not copy.record.unpacked

    async def test_bucket_object_uploaded_in_parts_is_fetched_completely(self, rig: Rig, tmp_path: Path) -> None:
        parts = [as_gguf(hashlib.shake_128(b"part").digest(5 << 20)), b"the rest"]
        await rig.put_parts("m/one.gguf", parts)
        for name in ("m/", "m/one.gguf"):
            async with _looked(rig, name) as (found, _):
                (only,) = found.taken
                assert only.entry.claim.endswith('-2"'), "an ETag of parts"
                assert only.entry.digest is None
        with await _bring(rig, tmp_path, "m/") as copy:
            assert _held(copy) == {"one.gguf": b"".join(parts)}
            assert [one.digest for one in copy.record.laid] == [digest.compute_digest(b"".join(parts))]

    @pytest.mark.parametrize("key", ["m/", "m/one.gguf"])
    @pytest.mark.parametrize(("name", "value", "message"), WRONG)
    async def test_bucket_access_with_wrong_keys_fails_with_a_one_line_error(
        self, rig: Rig, key: str, name: str, value: str, message: str
    ) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        env = rig.env() | {name: value}
        with pytest.raises(DeniedError, match=message) as caught:
            async with _looked(rig, key, env):
                pass
        _one_line(caught.value, env)

    async def test_stored_copy_is_available_only_with_valid_keys(self, rig: Rig, tmp_path: Path) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        (await _bring(rig, tmp_path, "m/")).close()
        of, store = source_uri.Bucket(rig.bucket, "m/"), Store(tmp_path / "store", spare_bytes=0).open()
        for name, value, _ in WRONG:
            with pytest.raises(ForbiddenError):
                await fetch.find_stored_copy(of, store, Ways(Registries(), rig.env() | {name: value}))
        found = await fetch.find_stored_copy(of, store, Ways(Registries(), rig.env()))
        assert found is not None
        found.close()

    @pytest.mark.parametrize("key", ["m/", "m/one.gguf"])
    async def test_wrong_region_error_names_the_bucket_region(self, rig: Rig, key: str) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        with pytest.raises(RegistryError, match=f"set AWS_REGION={REGION}") as caught:
            async with _looked(rig, key, rig.env() | {"AWS_REGION": "us-west-2"}):
                pass
        _one_line(caught.value, rig.env())

    @pytest.mark.parametrize("key", ["m/", "m/one.gguf"])
    async def test_bucket_access_with_a_wrong_local_clock_fails_with_that_reason(self, rig: Rig, key: str) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        with pytest.raises(DeniedError, match="the clock of this machine is wrong"):
            async with _looked(rig, key, pace=Late()):
                pass

    async def test_temporary_bucket_keys_without_their_session_token_are_rejected(
        self, rig: Rig, tmp_path: Path
    ) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        env = await rig.session()
        with await _bring(rig, tmp_path, "m/", env) as copy:
            assert _held(copy) == {"one.gguf": WEIGHTS}
        for token in ("", "wrong"):
            changed = env | {"AWS_SESSION_TOKEN": token}
            with pytest.raises(RegistryError, match=r"AWS_SESSION_TOKEN|AWS_ACCESS_KEY_ID") as caught:
                await _bring(rig, tmp_path, "m/", changed)
            _one_line(caught.value, changed)

    @pytest.mark.parametrize(
        ("key", "message"),
        [("m", "there is no object m; to use all objects below it, end it with /"), ("n/", "there are no weights")],
    )
    async def test_pull_of_a_missing_bucket_object_or_prefix_fails_with_the_reason(
        self, rig: Rig, key: str, message: str
    ) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        with pytest.raises((AbsentError, RefusedError), match=message):
            async with _looked(rig, key):
                pass

    @pytest.mark.parametrize(("key", "missing"), [("m/", "list of objects below .*"), ("one.gguf", "object one.gguf")])
    async def test_pull_from_a_missing_bucket_fails_with_that_reason(self, rig: Rig, key: str, missing: str) -> None:
        rig.bucket = "no-such-bucket"
        with pytest.raises(AbsentError, match=f"there is no {missing}; the bucket does not exist"):
            async with _looked(rig, key):
                pass

    async def test_public_bucket_is_read_without_keys(self, rig: Rig, tmp_path: Path) -> None:
        await rig.put("m/one.gguf", WEIGHTS)
        await rig.show_all()
        with await _bring(rig, tmp_path, "m/", rig.env() | {"AWS_ACCESS_KEY_ID": ""}) as copy:
            assert _held(copy) == {"one.gguf": WEIGHTS}
            assert not copy.record.private

    async def test_push_of_a_bucket_model_stores_its_files_in_the_registry(self, rig: Rig, tmp_path: Path) -> None:
        await rig.put("m 1/one é.gguf", WEIGHTS)
        await rig.put("m 1/LICENSE", b"free")
        no_login = {"HOME": str(tmp_path), "REGISTRY_AUTH_FILE": str(tmp_path / "none.json")}
        env, store = no_login | rig.env(), ("--store", str(tmp_path / "store"))
        async with FakeRegistry().serving() as to:
            ref = f"{to.host}/team/m:v1"
            for words in (("push", f"s3://{rig.bucket}/m 1/", ref, *store), ("pull", ref, *store)):
                run = CliRunner(env=env).invoke
                done = await asyncio.to_thread(run, cli, ["weights", *words], prog_name="pilotlight")
                assert done.exit_code == 0, done.output
                assert env["AWS_SECRET_ACCESS_KEY"] not in done.output
            assert any(WEIGHTS in content for content in to.blobs.values())


def _one_line(error: Exception, env: Mapping[str, str]) -> None:
    """Checks that the message has one line and contains no credentials."""
    assert "\n" not in str(error)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        assert len(env.get(name, "")) < 8 or env[name] not in str(error)


async def _bring(rig: Rig, folder: Path, key: str, env: Mapping[str, str] | None = None) -> Copy:
    ways = Ways(Registries(), env or rig.env(), folder)
    return await fetch.fetch_artifact(
        source_uri.Bucket(rig.bucket, key), Store(folder / "store", spare_bytes=0).open(), ways
    )


@contextlib.asynccontextmanager
async def _looked(
    rig: Rig, key: str, env: Mapping[str, str] | None = None, pace: Pace | None = None
) -> AsyncIterator[tuple[Listing, FileHost]]:
    """Returns what the lookup finds, and where it can be read."""
    of, ways = source_uri.Bucket(rig.bucket, key), Ways(Registries(pace=pace or Pace()), env or rig.env())
    async with fetch.open_source(of, ways) as there:
        yield await bucket.list_bucket(there.place, of), there.place


async def _read(place: FileHost, found: Listing, first: int, end: int | None) -> bytes:
    (only,) = found.taken
    blob = Blob(found.place, only.entry.name, only.entry.size)
    async with contextlib.aclosing(Lone(place).read(blob, first, end)) as pieces:
        return b"".join([piece async for piece in pieces])


def _held(copy: Copy) -> dict[str, bytes]:
    files = (path for path in copy.folder.rglob("*") if path.is_file())
    return {path.relative_to(copy.folder).as_posix(): path.read_bytes() for path in files}
