"""Models from a Hub on loopback: pinned, verified, gated; its token is sent to no other host."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import web

from artifacts import digest, source_uri
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.fetch import fetch as bring
from artifacts.fetch.fetch import Ways
from artifacts.fetch.registry import Came, Registries
from artifacts.http.transport import Limits
from artifacts.registry_errors import AbsentError, DeniedError, MismatchError, PolicyError, RegistryError
from artifacts.sources import huggingface
from artifacts.sources.file_host_client import Rules
from artifacts.sources.huggingface import HubAccess
from artifacts.store.copies import Copy
from artifacts.store.layout import ForbiddenError, NoRoomError
from artifacts.store.store import Store
from artifacts.store.stored_copy_check import verify_copy
from tests.support.builders.artifacts.packed_models import read_files
from tests.support.builders.artifacts.weight_file_headers import as_gguf, as_safetensors
from tests.support.fakes.hub import COMMIT, TOKEN, FakeHub
from tests.support.fakes.registry import Answer, StillClock, reply

pytestmark = pytest.mark.standard

SMALL = {"config.json": b'{"a": 1}', "sub/vocab.txt": b"v" * 999, "README.md": b"# tiny", ".gitattributes": b"x"}
LARGE = {"model.safetensors": as_safetensors(hashlib.shake_128(b"w").digest(300_000))}
OPEN = {"config.json", "sub/vocab.txt", "README.md", "model.safetensors"}
"""The files that are selected."""


class Node:
    """A Hub, and a node with a store."""

    def __init__(self, fake: FakeHub, store: Store, home: Path) -> None:
        self.fake, self.store, self.home = fake, store, home
        self.came: list[Came] = []

    def ways(self, token: str = "") -> Ways:
        return Ways(Registries(pace=StillClock()), self.fake.env(token), self.home)

    async def bring(self, text: str = "hf://acme/tiny", token: str = "") -> Copy:
        return await bring.fetch_artifact(_of(text), self.store, self.ways(token), self.came.append)

    async def kept(self, text: str = "hf://acme/tiny", token: str = "") -> Copy | None:
        return await bring.find_stored_copy(_of(text), self.store, self.ways(token))


def _of(text: str) -> bring.Lies:
    found = source_uri.parse_source_uri(text)
    assert not isinstance(found, source_uri.Local)
    return found


@contextlib.asynccontextmanager
async def node(
    tmp_path: Path, small: dict[str, bytes] | None = None, large: dict[str, bytes] | None = None
) -> AsyncIterator[Node]:
    fake = FakeHub(SMALL if small is None else small, LARGE if large is None else large)
    async with fake.both():
        yield Node(fake, Store(tmp_path / "store", spare_bytes=0).open(), tmp_path)


async def test_second_pull_of_a_repository_downloads_no_files(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        with await one.bring() as copy:
            everything = SMALL | LARGE
            assert read_files(copy.folder) == {path: everything[path] for path in OPEN}
            sums = {file.path: file.digest for file in copy.record.laid}
            assert sums == {path: digest.compute_digest(everything[path]) for path in OPEN}
            assert {file.path: file.role for file in copy.record.laid}["model.safetensors"] == "weight"
            assert list(verify_copy(copy.record, copy.folder)) == []
            assert not copy.record.private
            assert copy.record.reference == "hf://acme/tiny"
        assert one.came[-1].bytes >= len(LARGE["model.safetensors"])
        one.fake.seen.clear()
        one.fake.cdn.seen.clear()
        (await one.bring()).close()
        assert not one.fake.asked("GET", "/resolve/")
        assert one.fake.cdn.seen == []


async def test_files_of_a_hub_branch_are_fetched_at_its_current_commit(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        (await one.bring("hf://acme/tiny@main")).close()
        assert {seen.path.split("/")[4] for seen in one.fake.asked("GET", "/resolve/")} == {COMMIT}
        assert {seen.path.split("/")[-1] for seen in one.fake.asked("GET", "/tree/")} == {COMMIT}
        assert len(one.fake.asked("GET", "/tree/")) > 1  # in pages
        one.fake.seen.clear()
        (await one.bring("hf://acme/tiny@refs/pr/4")).close()
        assert one.fake.asked("GET", "/revision/refs")


async def test_stored_hub_model_is_found_without_a_hub_request(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        assert await one.kept() is None
        (await one.bring()).close()
        one.fake.seen.clear()
        found = await one.kept()
        assert found is not None
        found.close()
        assert one.fake.seen == []
        assert await one.kept("hf://acme/tiny@other") is None


async def test_hub_token_is_not_sent_to_redirect_targets(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.private = True
        (await one.bring(token=TOKEN)).close()
        assert {seen.headers.get("authorization") for seen in one.fake.seen} == {f"Bearer {TOKEN}"}
        assert one.fake.cdn.seen
        assert not [seen for seen in one.fake.cdn.seen if TOKEN in str(seen)]


async def test_gated_repository_is_denied_to_a_token_without_access(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.gated = "manual"
        with pytest.raises(DeniedError, match=r"gated: accept its terms .* HF_TOKEN"):
            await one.bring()
        with await one.bring(token=TOKEN) as copy:
            assert copy.record.private
        with pytest.raises(ForbiddenError):
            await one.kept()
        with pytest.raises(ForbiddenError) as caught:
            await one.kept(token="hf_other")
        assert "hf_other" not in str(caught.value)
        (await one.bring(token=TOKEN)).close()


@pytest.mark.parametrize(
    ("text", "kind", "message"),
    [
        ("hf://acme/tiny@nowhere", AbsentError, "no such revision"),
        ("hf://acme/other", DeniedError, "not exist, or is private: set HF_TOKEN"),
    ],
)
async def test_missing_revision_or_repository_is_named_in_the_error(
    tmp_path: Path, text: str, kind: type[Exception], message: str
) -> None:
    async with node(tmp_path) as one:
        with pytest.raises(kind, match=message) as caught:
            await one.bring(text)
        assert "words of its own" not in str(caught.value)


@pytest.mark.parametrize("path", ["model.safetensors", "config.json"])
async def test_hub_file_that_does_not_match_its_digest_is_not_stored(tmp_path: Path, path: str) -> None:
    async with node(tmp_path) as one:
        where = one.fake.large if path in LARGE else one.fake.small
        good = where[path]
        wrong = reply(200, bytes([good[0] ^ 1]) + good[1:])
        one.fake.answers["GET", f"/acme/tiny/resolve/{COMMIT}/{path}"].extend([wrong] * 3)
        with pytest.raises(MismatchError, match="do not match"):
            await one.bring()
        assert not list(one.store.rows())
        one.fake.answers.clear()
        with await one.bring() as copy:
            assert read_files(copy.folder)[path] == good


async def test_repository_that_is_no_longer_gated_is_available_to_any_caller(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.gated = "auto"
        (await one.bring(token=TOKEN)).close()
        one.fake.gated = False
        for token in ("", "hf_other"):
            (await one.bring(token=token)).close()
            found = await one.kept(token=token)
            assert found is not None
            found.close()


async def test_pull_after_a_failed_pull_reuses_the_files_already_received(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        come = f"sha256-{hashlib.sha256(LARGE['model.safetensors']).hexdigest()}"

        async def broken(request: web.Request) -> web.StreamResponse:
            while not list(one.store.layout.partials.rglob(come)):
                await asyncio.sleep(0.01)
            return web.Response(status=404)

        one.fake.answers["GET", f"/acme/tiny/resolve/{COMMIT}/sub/vocab.txt"].append(broken)
        with pytest.raises(AbsentError, match=r"sub/vocab\.txt"):
            await one.bring()
        assert not one.store.rows()
        one.fake.cdn.seen.clear()
        with await one.bring() as copy:
            assert read_files(copy.folder)["sub/vocab.txt"] == SMALL["sub/vocab.txt"]
        assert one.fake.cdn.seen == []


async def test_concurrent_pulls_fetch_each_file_once(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        copies = await asyncio.gather(*(one.bring() for _ in range(4)))
        assert len({copy.folder for copy in copies}) == 1
        for copy in copies:
            copy.close()
        assert len(one.fake.asked("GET", "/resolve/")) == len(OPEN)


async def test_pull_above_the_store_size_limit_fetches_no_files(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.store = Store(tmp_path / "store", bytes_max=1 << 20, spare_bytes=0).open()
        one.fake.large["model.safetensors"] = as_safetensors(b"w" * (1 << 20))
        with pytest.raises(NoRoomError):
            await one.bring()
        assert not one.fake.asked("GET", "/resolve/")


async def test_renamed_gated_repository_is_checked_under_its_new_name(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.gated = "auto"
        (await one.bring(token=TOKEN)).close()
        old = "/acme/tiny/resolve/main/model.safetensors"
        one.fake.always["HEAD", old] = reply(307, Location=old.replace("main", COMMIT))
        with pytest.raises(ForbiddenError):
            await one.kept(token="hf_other")
        found = await one.kept(token=TOKEN)
        assert found is not None
        found.close()


async def test_hub_redirect_that_names_no_commit_grants_no_access_to_a_copy(tmp_path: Path) -> None:
    """A mirror may redirect unknown callers to a login page."""
    async with node(tmp_path) as one:
        one.fake.gated = "auto"
        (await one.bring(token=TOKEN)).close()
        to_login_page = reply(302, Location="https://login.example/?next=model")
        one.fake.always["HEAD", "/acme/tiny/resolve/main/model.safetensors"] = to_login_page
        with pytest.raises(RegistryError, match="redirected, but not to the file"):
            await one.kept(token="hf_other")


async def test_pickle_or_code_matched_by_an_include_pattern_is_rejected(tmp_path: Path) -> None:
    large = LARGE | {"pytorch_model.bin": b"p" * 100}
    async with node(tmp_path, SMALL | {"modeling.py": b"import os"}, large) as one:
        with await one.bring() as copy:
            assert set(read_files(copy.folder)) == OPEN
        with pytest.raises(RefusedError, match=r"pytorch_model\.bin: weights in this format"):
            await one.bring("hf://acme/tiny?include=*.bin,*.json")
        with pytest.raises(RefusedError, match=r"modeling\.py: code is not accepted"):
            await one.bring("hf://acme/tiny?include=*")
    async with node(tmp_path / "b", {}, {"pytorch_model.bin": b"p"}) as one:
        with pytest.raises(RefusedError, match=r"no weights .* left out: pytorch_model\.bin"):
            await one.bring()


async def test_include_pattern_selects_one_of_several_quantizations(tmp_path: Path) -> None:
    large = {f"tiny-{q}.gguf": as_gguf(q.encode() * 50) for q in ("Q4_K_M", "Q8_0", "F16")}
    async with node(tmp_path, SMALL, large) as one:
        with pytest.raises(RefusedError, match=r"\?include=PATTERN: tiny-F16\.gguf, tiny-Q4_K_M\.gguf, tiny-Q8_0"):
            await one.bring()
        with pytest.raises(RefusedError, match=r"'\*Q5\*' matches no file; its weights are tiny-F16"):
            await one.bring("hf://acme/tiny?include=*Q5*")
        one.fake.cdn.seen.clear()
        with await one.bring("hf://acme/tiny?include=*Q4_K_M.gguf") as copy:
            assert read_files(copy.folder) == {"tiny-Q4_K_M.gguf": large["tiny-Q4_K_M.gguf"]}
        assert len(one.fake.cdn.seen) == 1


async def test_invalid_hub_responses_are_rejected(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        at = "/api/models/acme/tiny/revision/main"
        for body in (b"[]", b'{"sha": "main"}', b"{"):
            one.fake.answers["GET", at].append(_saying(body))
            with pytest.raises(RegistryError):
                await one.bring()
        tree = f"/api/models/acme/tiny/tree/{COMMIT}"
        for body in (
            b'[{"type":"file","path":"a.gguf","size":1}]',
            b'[{"type":"file","path":"a","oid":"x","size":-1}]',
        ):
            one.fake.answers["GET", tree].append(_saying(body))
            with pytest.raises(RegistryError, match="no checksum"):
                await one.bring()
        oid = "a" * 40
        one.fake.answers["GET", tree].append(
            _saying(b'[{"type":"file","path":"../a.gguf","oid":"%s","size":1}]' % oid.encode())
        )
        with pytest.raises(RefusedError):
            await one.bring()
        elsewhere = {"Link": '<http://localhost:1/x>; rel="next"'}
        one.fake.answers["GET", tree].append(_saying(b"[]", **elsewhere))
        with pytest.raises(PolicyError, match="next page is on another host"):
            await one.bring()


async def test_caller_without_access_gets_no_stored_part_of_a_gated_model(tmp_path: Path) -> None:
    async with node(tmp_path) as one:
        one.fake.gated = "manual"
        (await one.bring(token=TOKEN)).close()
        part = "hf://acme/tiny?include=model.safetensors"
        with pytest.raises(DeniedError, match="gated: accept its terms"):
            await one.bring(part, token="hf_other")
        one.fake.cdn.seen.clear()
        (await one.bring(part, token=TOKEN)).close()
        assert one.fake.cdn.seen == [], "it was here"


async def test_endless_hub_listing_is_rejected_at_the_row_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface, "ROWS_MAX", 5)
    async with node(tmp_path) as one:
        tree = f"/api/models/acme/tiny/tree/{COMMIT}"
        more = {"Link": f'<{one.fake.url}{tree}>; rel="next"'}
        row = b'{"type":"directory","path":"x"}'
        one.fake.answers["GET", tree].extend([_saying(b"[%s,%s]" % (row, row), **more)] * 9)
        with pytest.raises(RegistryError, match="too many files"):
            await one.bring()
        assert len(one.fake.asked("GET", "/tree/")) == 3


def _saying(body: bytes, **headers: str) -> Answer:
    return reply(200, body, Content_Type="application/json", **headers)


async def test_hub_token_in_the_environment_takes_precedence_over_the_login_file(tmp_path: Path) -> None:
    assert await HubAccess({}, tmp_path).token() is None
    (tmp_path / ".cache" / "huggingface").mkdir(parents=True)
    (tmp_path / ".cache" / "huggingface" / "token").write_text("hf_file\n")
    assert await HubAccess({}, tmp_path).token() == "hf_file"
    assert await HubAccess({"HF_TOKEN": "hf_env"}, tmp_path).token() == "hf_env"
    (tmp_path / "t").write_text("hf_other")
    assert await HubAccess({"HF_TOKEN_PATH": str(tmp_path / "t")}, tmp_path).token() == "hf_other"
    with pytest.raises(PolicyError, match="characters"):
        await HubAccess({"HF_TOKEN": "a\r\nb"}, tmp_path).token()


def test_hub_token_is_rejected_for_a_plain_http_endpoint(tmp_path: Path) -> None:
    access = HubAccess({"HF_ENDPOINT": "http://mirror.example"}, tmp_path)
    with pytest.raises(PolicyError, match="plain HTTP"):
        access.place("hf_x", Rules(Limits(), StillClock()))
    assert str(access.endpoint()) == "http://mirror.example/"
    with pytest.raises(PolicyError, match="HF_ENDPOINT is not a URL"):
        HubAccess({"HF_ENDPOINT": "mirror"}, tmp_path).endpoint()
    below = replace(access, env={"HF_ENDPOINT": "https://mirror.example/api/hf"})
    assert str(below.place(None, Rules(Limits(), StillClock())).url("x/y")) == "https://mirror.example/api/hf/x/y"
    assert huggingface.ENDPOINT == "https://huggingface.co"
