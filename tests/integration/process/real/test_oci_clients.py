"""Independent clients in both directions, over a real registry: skopeo, oras-py and oras-go, byte for byte.

They pull what we push, and we pull what they push into the store. Clients that are not installed are skipped.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from artifacts import reference
from artifacts.credentials.docker_config import Login
from artifacts.credentials.keychain import Known
from artifacts.fetch import registry
from artifacts.fetch.registry import Registries
from artifacts.http.transport import Site
from artifacts.pack import push_artifact
from artifacts.pack.oci_layout import OciLayout
from artifacts.pack.pack import Form
from artifacts.registry.client import Client
from artifacts.store.store import Store
from scripts.gates import ROOT
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import FILES, NAME
from tests.support.real_services import docker_registry

FLAT = {path.replace("/", "-"): content for path, content in FILES.items()}
"""oras-py does not support folders."""
ORAS_GO = ROOT / "bench" / "weights" / "oras"
SECONDS_MAX = 240.0


def login(host: str) -> Known:
    return Known(host, Login(docker_registry.USER, docker_registry.PASSWORD))


def layout(tmp_path: Path, form: Form, files: dict[str, bytes] | None = None) -> OciLayout:
    return packed_models.packed(packed_models.model(tmp_path / "model", files), tmp_path / "layout", form)


async def pulled(tmp_path: Path, host: str, tag: str) -> tuple[str, dict[str, bytes]]:
    """Pull into a new store; return the digest and all files."""
    store = Store(tmp_path / "store", spare_bytes=0).open()
    of = reference.parse_reference(f"oci://{host}/{NAME}:{tag}")
    with await registry.fetch_from_registry(of, store, Registries(login(host))) as copy:
        return copy.record.digest, below(copy.folder)


async def pushed(host: str, from_: OciLayout, chunk_bytes: int = 0) -> str:
    async with Client(Site(host), login(host)) as client:
        return await push_artifact.push_layout(client, NAME, "ours", from_, chunk_bytes=chunk_bytes)


def below(folder: Path) -> dict[str, bytes]:
    return {one.relative_to(folder).as_posix(): one.read_bytes() for one in folder.rglob("*") if one.is_file()}


async def ran(*words: str | Path) -> str:
    """Run a program, which must succeed."""
    done = await asyncio.to_thread(
        subprocess.run, words, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def skopeo() -> str:
    found = os.environ.get("PILOTLIGHT_SKOPEO") or shutil.which("skopeo")
    if found is None:
        pytest.skip("skopeo is not installed (Debian: apt install skopeo)")
    return found


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
async def test_artifact_copied_with_skopeo_is_pulled_with_the_same_files(tmp_path: Path, form: Form) -> None:
    """Skopeo rewrites an index without artifact types; all other content is unchanged."""
    program, own, rewritten = skopeo(), layout(tmp_path, form), form == "modelpack"
    creds = f"{docker_registry.USER}:{docker_registry.PASSWORD}"
    copy = (program, "--insecure-policy", "copy", "--all", *([] if rewritten else ["--preserve-digests"]))
    async with docker_registry.registry(tmp_path, docker_registry.htpasswd(tmp_path)) as host:
        digest = await pushed(host, own)
        there, foreign = f"docker://{host}/{NAME}", f"oci:{tmp_path}/theirs:v1"
        as_given = ("--src-tls-verify=false", "--dest-oci-accept-uncompressed-layers")
        await ran(*copy, *as_given, "--src-creds", creds, f"{there}:ours", foreign)
        before, after = below(tmp_path / "layout" / "blobs"), below(tmp_path / "theirs" / "blobs")
        assert [name for name in before if after.get(name) != before[name]] == (
            [digest.replace(":", "/")] if rewritten else []
        )
        await ran(*copy, "--dest-tls-verify=false", "--dest-creds", creds, foreign, f"{there}:theirs")
        found, files = await pulled(tmp_path, host, "theirs")
        assert files == FILES
        assert rewritten or found == digest


async def test_artifact_copied_with_oras_py_is_pulled_with_the_same_files(tmp_path: Path) -> None:
    own = layout(tmp_path, "modelpack-raw", FLAT)
    async with docker_registry.registry(tmp_path, docker_registry.htpasswd(tmp_path)) as host:
        await pushed(host, own, chunk_bytes=32 << 10)

        def theirs() -> None:
            oras = importlib.import_module("oras.client")  # it has no types
            client = oras.OrasClient(hostname=host, insecure=True, auth_backend="basic")
            client.auth.set_basic_auth(docker_registry.USER, docker_registry.PASSWORD)
            client.pull(f"{host}/{NAME}:ours", outdir=str(tmp_path / "theirs"))
            files = [f"{tmp_path}/model/{path}" for path in FLAT]
            client.push(f"{host}/{NAME}:theirs", files=files, disable_path_validation=True, quiet=True)

        await asyncio.to_thread(theirs)
        assert below(tmp_path / "theirs") == FLAT
        assert (await pulled(tmp_path, host, "theirs"))[1] == FLAT


async def test_artifact_copied_with_oras_go_is_pulled_with_the_same_files(tmp_path: Path) -> None:
    if shutil.which("go") is None:
        pytest.skip("go is not installed, which builds oras-go's client (Debian: apt install golang)")
    program = tmp_path / "oras"
    built = await asyncio.to_thread(
        subprocess.run, ["go", "build", "-o", str(program), "."], cwd=ORAS_GO, capture_output=True, text=True,
        timeout=SECONDS_MAX, check=False,
    )  # fmt: skip
    if built.returncode:
        pytest.skip(f"oras-go cannot be built here: {built.stderr.strip().splitlines()[-1]}")
    own = layout(tmp_path, "modelpack-raw", FLAT)
    async with docker_registry.registry(tmp_path) as host:
        await pushed(host, own)
        await ran(program, f"{host}/{NAME}:ours", tmp_path / "theirs")
        assert below(tmp_path / "theirs") == FLAT
        await ran(program, "push", f"{host}/{NAME}:theirs", tmp_path / "theirs")
        assert (await pulled(tmp_path, host, "theirs"))[1] == FLAT
