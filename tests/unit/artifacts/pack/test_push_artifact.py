"""Pushing whole artifacts: blobs first and the tag last, then checked; errors name the fix."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner, Result

from artifacts import reference
from artifacts.http.transport import Site
from artifacts.oci.descriptor import BadManifestError, Platform
from artifacts.pack import oci_layout, pack, push_artifact
from artifacts.pack.oci_layout import LayoutEntry, OciLayout
from artifacts.pack.pack import About, Form, Offered
from artifacts.registry import resolve
from artifacts.registry.client import Client
from artifacts.registry.mirrored_registry import Mirrored
from artifacts.registry_errors import DeniedError
from pilotlight.cli.main import cli
from tests.support.fakes.registry import FakeRegistry, StillClock, reply

pytestmark = pytest.mark.standard

NAME = "team/llama"
FILES = {"model.safetensors": b"w" * 5000, "config.json": b"{}", "LICENSE": b"MIT"}
AMD = Platform("linux", "amd64")


class Rig(NamedTuple):
    """A registry, a client of it, and an artifact to push."""

    fake: FakeRegistry
    client: Client
    layout: OciLayout
    folder: Path

    @property
    def ref(self) -> str:
        return f"oci://{self.fake.host}/{NAME}:v1"


def made(to: Path, form: Form = "modelpack") -> OciLayout:
    offered = [Offered(path, len(content), content=content) for path, content in FILES.items()]
    oci_layout.write_layout(to, pack.build_plan(offered, About(name="llama")), form, "v1")
    return OciLayout(to)


@contextlib.asynccontextmanager
async def rigged(tmp_path: Path, form: Form = "modelpack") -> AsyncIterator[Rig]:
    folder = tmp_path / "oci"
    at = made(folder, form)
    async with FakeRegistry().serving() as fake, Client(Site(fake.host), pace=StillClock()) as client:
        yield Rig(fake, client, at, folder)


async def run(*words: str) -> Result:
    """Run the command in a thread, so that the registry can answer meanwhile."""
    return await asyncio.to_thread(CliRunner().invoke, cli, ["weights", *words], prog_name="pilotlight")


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
async def test_pushed_artifact_is_complete_and_found_by_its_tag(form: Form, tmp_path: Path) -> None:
    async with rigged(tmp_path, form) as rig:
        moved = list[int]()
        digest = await push_artifact.push_layout(rig.client, NAME, "v1", rig.layout, moved.append)
        assert digest == rig.layout.top().digest
        blobs = {path.name: path.read_bytes() for path in (rig.folder / "blobs/sha256").iterdir()}
        there = rig.fake.blobs | {name: body for (_, name), (_, body) in rig.fake.manifests.items() if ":" in name}
        assert {name.removeprefix("sha256:"): content for name, content in there.items()} == blobs
        assert sum(moved) == sum(map(len, rig.fake.blobs.values()))
        found = await resolve.resolve_reference(Mirrored(rig.client), reference.parse_reference(rig.ref), AMD)
        assert LayoutEntry(found.chosen, found.manifest, found.documents[-1], found.digest) == rig.layout.entry(AMD)
        assert [one.path for one in found.contents.files()] == sorted(FILES)
        assert not rig.fake.asked("GET", found.manifest.layers[0].digest), "no weights are fetched"


async def test_blobs_are_pushed_first_and_the_tag_last(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        await push_artifact.push_layout(rig.client, NAME, "v1", rig.layout)
        puts = [one.path for one in rig.fake.asked("PUT", NAME)]
        documents = [path for path in puts if "/manifests/" in path]
        assert puts[-len(documents) :] == documents
        assert [path.rpartition("/")[2] for path in documents[-2:]] == [rig.layout.top().digest, "v1"]
        assert len(documents) == 5
        sent = len(rig.fake.seen)
        await push_artifact.push_layout(rig.client, NAME, "v1", rig.layout)
        assert not [one for one in rig.fake.seen[sent:] if "uploads" in one.path], "nothing is sent twice"


async def test_push_with_a_rejected_blob_pushes_no_manifest(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        rig.fake.always["POST", f"/v2/{NAME}/blobs/uploads/"] = reply(403)
        with pytest.raises(DeniedError):
            await push_artifact.push_layout(rig.client, NAME, "v1", rig.layout)
        assert not rig.fake.manifests


async def test_layout_with_a_truncated_blob_is_not_pushed(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        path = rig.layout.path(rig.layout.entry(AMD).manifest.layers[0].digest)
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(BadManifestError, match="or has another size"):
            await push_artifact.push_layout(rig.client, NAME, "v1", rig.layout)
        assert not rig.fake.seen


async def test_push_and_inspect_commands_print_the_artifact_digest(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        pushed = await run("push", str(rig.folder), rig.ref)
        assert pushed.exit_code == 0, pushed.output
        assert pushed.stdout == f"pushed oci://{rig.fake.host}/{NAME}:v1@{rig.layout.top().digest}\n"
        model = rig.layout.entry(AMD).digest
        for what in (rig.ref, str(rig.folder)):
            shown = (await run("inspect", what)).stdout
            lines = [f"digest: {rig.layout.top().digest}", f"manifest: {model} of this index", "dialect: ModelPack"]
            assert shown.splitlines()[:3] == lines
            assert shown.splitlines()[-1] == "would be accepted"
            why = (await run("inspect", what, "--explain")).stdout
            assert "layer 3: application/vnd.cncf.model.weight.v1.tar: weight model.safetensors, tar, 6656 bytes" in why
            assert why.splitlines()[-1] == "would be accepted"
            printed = json.loads((await run("inspect", what, "--output", "json")).stdout)
            named = (printed["digest"], printed["manifest"], printed["refusal"])
            assert named == (rig.layout.top().digest, model, "")
            assert [one["path"] for one in printed["layers"]] == sorted(FILES)


async def test_push_command_uploads_in_chunks_or_mounts_blobs_as_requested(tmp_path: Path) -> None:
    async with rigged(tmp_path) as rig:
        big = {"model.safetensors": b"w" * (3 << 20)}
        offered = [Offered(path, len(content), content=content) for path, content in big.items()]
        oci_layout.write_layout(tmp_path / "big", pack.build_plan(offered, About()), "modelpack-raw")
        pushed = await run("push", str(tmp_path / "big"), rig.ref, "--chunk-bytes", "1Mi")
        assert pushed.exit_code == 0, pushed.output
        ranges = [one.headers["content-range"] for one in rig.fake.asked("PATCH", "uploads")]
        assert {"0-1048575", "1048576-2097151", "2097152-3145727"} <= set(ranges)
        rig.fake.seen.clear()
        there = dict(rig.fake.blobs)
        for digest in there:  # the other repository does not have them
            rig.fake.answers["HEAD", f"/v2/team/other/blobs/{digest}"].append(reply(404))
        mounted = await run("push", str(tmp_path / "big"), f"{rig.fake.host}/team/other:v1", "--mount-from", "shared")
        assert mounted.exit_code == 0, mounted.output
        posts = [one.query for one in rig.fake.asked("POST", "team/other")]
        assert len(posts) == len(there)
        assert all("from=shared" in query for query in posts)
        assert not rig.fake.asked("PATCH", "uploads")
        assert not rig.fake.asked("PUT", "uploads")


async def test_inspect_command_prints_the_layer_that_a_pull_would_reject(tmp_path: Path) -> None:
    offered = [Offered("model.gguf", 1, content=b"x"), Offered("run.py", 1, content=b"x")]
    oci_layout.write_layout(tmp_path / "oci", pack.build_plan(offered, About(), allow_unsafe=True), "modelpack")
    shown = (await run("inspect", str(tmp_path / "oci"))).stdout
    assert "refused: ModelPack: layer 2: code is not accepted from a registry" in shown
    assert "would be accepted" in (await run("inspect", str(tmp_path / "oci"), "--allow-unsafe")).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("inspect", "{host}/team/none:v1"), "manifest v1 of team/none"),
        (("inspect", "a b"), "is not a reference to an artifact"),
        (("inspect", "{folder}"), "is not an OCI image layout: it has no file oci-layout; `pilotlight weights pack"),
        (("inspect", "{folder}/a.gguf"), "/a.gguf --to FOLDER`"),
        (("push", "{folder}/a.gguf", "{host}/team/llama:v1"), "pack SOURCE --to FOLDER` creates one"),
        (("push", "{folder}", "{host}/team/llama:v1"), "is not an OCI image layout"),
        (("push", "{folder}/oci", "{host}/team/llama@sha256:" + "a" * 64), "REFERENCE must have a tag and no digest"),
        (("push", "{folder}/oci", "{host}/team/llama:v1", "--chunk-bytes", "much"), "--chunk-bytes much: "),
        (("push", "{folder}/oci", "{host}/team/llama:v1", "--chunk-bytes", "1Ki"), "expected a size from 1Mi to 1Gi"),
    ],
)
async def test_failing_push_or_inspect_command_prints_a_one_line_error(
    words: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    async with rigged(tmp_path) as rig:
        done = await run(*(word.format(host=rig.fake.host, folder=tmp_path) for word in words))
        assert done.exit_code in {1, 2}
        assert message in done.output
        assert done.output.count("\n") == 1
