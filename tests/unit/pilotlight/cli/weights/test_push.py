"""`pilotlight weights` with models from the Hub and from buckets: inspected, pulled, and pushed to a registry."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from artifacts.store.store import Store
from pilotlight.cli.main import cli
from tests.support.builders.artifacts.weight_file_headers import as_safetensors
from tests.support.fakes.hub import COMMIT, TOKEN, FakeHub
from tests.support.fakes.registry import FakeRegistry
from tests.support.fakes.s3 import FakeS3

pytestmark = pytest.mark.standard

SMALL = {"config.json": b"{}", "modeling.py": b"import os"}
LARGE = {"model.safetensors": as_safetensors(b"w" * 70_000)}


async def run(*words: str, env: dict[str, str]) -> Result:
    """Run the command in a thread, so that the servers can respond."""
    return await asyncio.to_thread(CliRunner(env=env).invoke, cli, ["weights", *words], prog_name="pilotlight")


@pytest.fixture
def no_logins(tmp_path: Path) -> dict[str, str]:
    """An environment without logins."""
    return {"HOME": str(tmp_path), "HF_HOME": str(tmp_path), "REGISTRY_AUTH_FILE": str(tmp_path / "none.json")}


async def test_inspect_lists_a_repository_without_downloading_weights(no_logins: dict[str, str]) -> None:
    async with FakeHub(SMALL, LARGE).both() as fake:
        env = no_logins | fake.env()
        shown = await run("inspect", "hf://acme/tiny", env=env)
        assert shown.exit_code == 0, shown.output
        assert f"revision: {COMMIT}" in shown.output
        assert "70000  weight     model.safetensors" in shown.output
        assert "left out: modeling.py: code is not accepted" in shown.output
        assert not fake.asked("GET", "/resolve/")
        inspected = json.loads((await run("inspect", "hf://acme/tiny", "--output", "json", env=env)).output)
        assert (inspected["revision"], [one["path"] for one in inspected["files"]]) == (
            COMMIT,
            ["config.json", "model.safetensors"],
        )
        missing = await run("inspect", "hf://acme/tiny@gone", env=env)
        assert missing.exit_code == 1
        assert "it has no such revision" in missing.output


async def test_hub_repository_is_pulled_listed_and_pinned_by_its_name(
    tmp_path: Path, no_logins: dict[str, str]
) -> None:
    async with FakeHub(SMALL, LARGE).both() as fake:
        fake.gated, env, store = "auto", no_logins | fake.env(TOKEN), str(tmp_path / "store")
        pulled = await run("pull", "hf://acme/tiny", "--store", store, env=env)
        assert pulled.exit_code == 0, pulled.output
        assert "pilotlight: left out: modeling.py: code" in pulled.stderr
        assert TOKEN not in pulled.output
        listed = json.loads((await run("ls", "--store", store, "--output", "json", env=env)).output)
        assert [(one["artifact"], one["files"], one["private"]) for one in listed] == [("hf://acme/tiny", 2, True)]
        assert (await run("pin", "hf://acme/tiny", "--store", store, env=env)).exit_code == 0
        assert "pinned" in (await run("evict", "hf://acme/tiny", "--store", store, env=env)).output
        assert (await run("verify", "--store", store, env=env)).exit_code == 0
        wrong = await run("pull", "hf://acme/tiny?only=x", "--store", store, env=env)
        assert wrong.exit_code == 2
        assert "path patterns" in wrong.output


async def test_hub_and_bucket_weights_are_pushed_to_a_registry(tmp_path: Path, no_logins: dict[str, str]) -> None:
    objects = {"m/a.gguf": b"GGUF" * 999, "m/LICENSE": b"free"}
    async with FakeHub(SMALL, LARGE).both() as hub, FakeS3(objects).serving() as s3, FakeRegistry().serving() as to:
        assert isinstance(s3, FakeS3)
        env, store = no_logins | hub.env() | s3.env(), str(tmp_path / "store")
        for source, paths in (
            ("hf://acme/tiny", ["config.json", "model.safetensors"]),
            ("s3://models/m/", ["LICENSE", "a.gguf"]),
        ):
            ref = f"{to.host}/team/{paths[-1].partition('.')[0]}:v1"
            pushed = await run("push", source, ref, "--store", store, env=env)
            assert pushed.exit_code == 0, pushed.output
            pulled = await run("pull", ref, "--store", store, "--output", "json", env=env)
            assert pulled.exit_code == 0, pulled.output
            assert sorted(json.loads(pulled.output)["files"]) == paths
        assert not list((tmp_path / "store" / "aside").iterdir())
        again = await run("push", ref, ref, "--store", store, env=env)
        assert "no such folder; `pilotlight weights pack" in again.output
        again = await run("push", f"oci://{ref}", ref, "--store", store, env=env)
        assert "is already in a registry" in again.output


async def test_files_of_a_killed_push_are_removed_when_the_store_opens(
    tmp_path: Path, no_logins: dict[str, str]
) -> None:
    asked = asyncio.Event()
    async with FakeHub(SMALL, LARGE).both() as hub, FakeRegistry().serving() as to:

        async def hangs(_: web.Request) -> web.StreamResponse:
            asked.set()
            await to.hang()
            return web.Response(status=500)

        to.always["POST", "/v2/team/tiny/blobs/uploads/"] = hangs
        words = ("push", "hf://acme/tiny", f"{to.host}/team/tiny:v1", "--store", str(tmp_path / "store"))
        push = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pilotlight", "weights", *words, env={**os.environ, **no_logins, **hub.env()}
        )
        await asyncio.wait_for(asked.wait(), 60)
        push.kill()
        await push.wait()
        aside = tmp_path / "store" / "aside"
        assert [path.stat().st_size for path in aside.rglob("*") if path.is_file()], "the model, packed"
        Store(tmp_path / "store").open()
        assert not list(aside.iterdir())
