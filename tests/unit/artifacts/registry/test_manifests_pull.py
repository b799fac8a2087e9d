"""Faulty registries, one for each point of the fault list, tested with the whole of `pilotlight weights pull`.

Each rejection has its own test elsewhere; here: one line, exit 1, no Copy, nothing outside the store, no login sent.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gzip
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from aiohttp import web
from click.testing import CliRunner

from artifacts.oci.manifest import OCI_INDEX as INDEX
from artifacts.oci.manifest import OCI_MANIFEST as MANIFEST
from pilotlight.cli.main import cli
from tests.support.builders.artifacts.tar_archives import END, header, honest, member
from tests.support.fakes.registry import PASSWORD, FakeRegistry, digest_of, reply

NAME = "team/model"
GOOD = b"GGUF" + b"weights" * 4999 + b"end"
CONFIG = "application/vnd.cncf.model.config.v1+json"
RAW = "application/vnd.cncf.model.weight.v1.raw"
TAR = "application/vnd.cncf.model.weight.v1.tar"


class Lie(NamedTuple):
    """How a registry misbehaves, and the expected error."""

    misbehave: Callable[[FakeRegistry, FakeRegistry], None]
    """Called with the registry and a second one."""
    message: str


def described(fake: FakeRegistry, kind: str, content: bytes, path: str = "", **keys: object) -> dict[str, object]:
    notes = {"annotations": {"org.cncf.model.filepath": path}} if path else {}
    return {"mediaType": kind, "digest": fake.blob(content), "size": len(content), **notes, **keys}


def offered(fake: FakeRegistry, *layers: dict[str, object], **keys: object) -> str:
    """Add a ModelPack with these layers under the tag; return its digest."""
    document = {"schemaVersion": 2, "mediaType": MANIFEST, "config": described(fake, CONFIG, b"{}"), **keys}
    return fake.manifest(NAME, "v1", json.dumps({**document, "layers": list(layers)}).encode())


def good(fake: FakeRegistry, **keys: object) -> str:
    return offered(fake, described(fake, RAW, GOOD, "model.gguf", **keys))


def blob(content: bytes) -> Callable[[FakeRegistry, FakeRegistry], None]:
    def misbehave(fake: FakeRegistry, _: FakeRegistry) -> None:
        good(fake)
        fake.always["GET", f"/v2/{NAME}/blobs/{digest_of(GOOD)}"] = reply(200, content)

    return misbehave


def layer(*content: bytes, path: str = "model.gguf", kind: str = RAW) -> Callable[[FakeRegistry, FakeRegistry], None]:
    def misbehave(fake: FakeRegistry, _: FakeRegistry) -> None:
        offered(fake, *(described(fake, kind, one, path if kind == RAW else "") for one in content))

    return misbehave


def manifest(body: bytes, kind: str = MANIFEST) -> Callable[[FakeRegistry, FakeRegistry], None]:
    return lambda fake, _: (fake.manifest(NAME, "v1", body, kind), None)[1]


def digest_that_is_none(fake: FakeRegistry, _: FakeRegistry) -> None:
    good(fake, digest="sha256:../../../etc/passwd")


def realm_elsewhere(fake: FakeRegistry, other: FakeRegistry) -> None:
    fake.judge = lambda _: web.Response(
        status=401, headers={"WWW-Authenticate": f'Bearer realm="{other.url}/token",service="x"'}
    )


def redirected_for_ever(fake: FakeRegistry, _: FakeRegistry) -> None:
    good(fake)
    path = f"/v2/{NAME}/blobs/{digest_of(GOOD)}"
    fake.always["GET", path] = reply(307, b"", Location=f"{fake.url}{path}")


def foreign_urls(fake: FakeRegistry, other: FakeRegistry) -> None:
    """The registry lacks the blob and names another host that has it."""
    good(fake, urls=[f"{other.url}/model.gguf"])
    other.always["GET", "/model.gguf"] = reply(200, GOOD)
    del fake.blobs[digest_of(GOOD)]


def substituted(fake: FakeRegistry, _: FakeRegistry) -> None:
    """An index names one manifest, and a different one of the same size is stored under its digest."""
    named = good(fake)
    _kind, body = fake.manifests[NAME, named]
    entry = {"mediaType": MANIFEST, "digest": named, "size": len(body)}
    fake.manifest(
        NAME, "v1", json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": [entry]}).encode(), INDEX
    )
    fake.manifests[NAME, named] = (MANIFEST, body.replace(b"model.gguf", b"other.gguf"))


LINK = header(b"x.gguf", 0, b"2", link=b"../../../outside") + member(b"x.gguf", b"pwned") + END
BOMB = gzip.compress(honest({"model.gguf": bytes(64 << 20)}))
PICKLE = b"\x80\x02}q\x00X\x07\x00\x00\x00weightsq\x01]q\x02s."
LIES = {
    "00 a pickle that is called GGUF": Lie(layer(PICKLE), r"model\.gguf: it is not a GGUF file"),
    "00 a pickle that is called safetensors": Lie(
        layer(PICKLE, path="a/model.safetensors"), r"a/model\.safetensors: it is not a safetensors file"
    ),
    "00 a pickle in an archive": Lie(layer(honest({"m.gguf": PICKLE}), kind=TAR), r"m\.gguf: it is not a GGUF file"),
    "00 an archive of zeros": Lie(layer(bytes(10240), kind=TAR), "the archive is empty: it contains no file"),
    "01 bytes that are others": Lie(blob(bytes(len(GOOD))), "its bytes do not match its digest"),
    "01 fewer bytes": Lie(blob(GOOD[:-1]), "the registry has 34999 bytes of it, expected 35000"),
    "01 more bytes": Lie(blob(GOOD + b"!"), "the registry has 35001 bytes of it, expected 35000"),
    "02 a manifest that was substituted": Lie(substituted, "its bytes do not match its digest"),
    "03 a digest that is a path": Lie(digest_that_is_none, "is not a digest: expected sha256"),
    "04 a path that leads out": Lie(layer(GOOD, path="../outside.gguf"), "or .. in it"),
    "04 a path from the root": Lie(layer(GOOD, path="/etc/model.gguf"), "is absolute"),
    "04 two files of one name": Lie(layer(GOOD, b"others"), "is a duplicate"),
    "05 a link in an archive": Lie(layer(LINK, kind=TAR), "is a link"),
    "06 a bomb": Lie(
        layer(BOMB, kind=f"{TAR}+gzip"), "the archive is a decompression bomb: expanded more than 100 times"
    ),
    "07 a manifest without end": Lie(manifest(b"{" + b" " * (5 << 20) + b"}"), "is larger than 4194304 bytes"),
    "07 both kinds at once": Lie(
        manifest(json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, "layers": [], "manifests": []}).encode()),
        "is both a manifest and an index",
    ),
    "08 a realm of somebody else": Lie(realm_elsewhere, "no login is sent there"),
    "09 a redirect that never ends": Lie(redirected_for_ever, "more than 10 redirects"),
    "10 urls of somebody else": Lie(foreign_urls, "there is no blob"),
    "16 a pickle": Lie(
        layer(GOOD, path="pytorch_model.bin"), "can run programs when they are loaded; --allow-unsafe accepts it"
    ),
}


@contextlib.contextmanager
def registries() -> Iterator[tuple[FakeRegistry, FakeRegistry]]:
    """Two registries, in a thread of their own."""
    ready, ends = threading.Event(), list[tuple[asyncio.AbstractEventLoop, asyncio.Event]]()
    both = (FakeRegistry(), FakeRegistry())

    async def serve() -> None:
        async with both[0].serving(), both[1].serving():
            ends.append((asyncio.get_running_loop(), asyncio.Event()))
            ready.set()
            await ends[0][1].wait()

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        assert ready.wait(20)
        yield both
    finally:
        for loop, end in ends:
            loop.call_soon_threadsafe(end.set)
        thread.join()


@pytest.mark.parametrize("name", LIES)
def test_pull_from_a_faulty_registry_fails_and_stores_no_copy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.http.retry.TRIES_MAX", 2)
    lie, store = LIES[name], tmp_path / "in" / "a" / "store"
    with registries() as (fake, other):
        lie.misbehave(fake, other)
        auth = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        (tmp_path / "auth.json").write_text(json.dumps({"auths": {fake.host: {"auth": auth}}}))
        monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "auth.json"))
        words = ["weights", "pull", f"oci://{fake.host}/{NAME}:v1", "--store", str(store)]
        done = CliRunner().invoke(cli, words, prog_name="pilotlight")
        assert other.seen == [], "no other host gets a request, and none gets the login"
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.output
    assert PASSWORD not in done.output
    assert re.search(lie.message, done.stderr), done.stderr
    left = [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "auth.json"]
    assert [
        path for path in left if path.is_relative_to(store / "copies") or path.is_relative_to(store / "blobs")
    ] == []
    assert [path for path in left if not path.is_relative_to(store)] == []


def test_pull_of_a_valid_model_exits_with_code_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The valid model that the faulty registries above misrepresent."""
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))
    with registries() as (fake, _):
        good(fake)
        words = ["weights", "pull", f"oci://{fake.host}/{NAME}:v1", "--store", str(tmp_path / "store")]
        assert CliRunner().invoke(cli, words, prog_name="pilotlight").exit_code == 0
