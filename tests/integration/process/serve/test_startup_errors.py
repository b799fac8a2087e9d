"""Errors that `serve` rejects before it starts anything: one line names the problem; exit status; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml

from loadtest.result import Ending
from tests.support.harness.serve.serve import Document, Serving, fake, model, serving, settings
from tests.support.waiting import until

REFUSED_S = 90.0


def refused(one: Serving) -> tuple[int, str]:
    """Return the exit status and the one output line of a `serve` that does not start."""
    done = subprocess.run(one.argv, capture_output=True, text=True, timeout=REFUSED_S, check=False)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("pilotlight: ")
    return done.returncode, lines[0]


@pytest.mark.parametrize("what", ["file-in-the-way", "file-above", "unwritable", "newer", "foreign"])
async def test_unusable_state_directory_fails_the_start_with_one_error_line(tmp_path: Path, what: str) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada"), start=False) as one:
        mine, one.state = one.state, one.state / "it"
        why = "--state"
        if what == "file-in-the-way":
            one.state.write_text("not a folder")
        elif what == "file-above":
            one.state.write_text("not a folder")
            one.state /= "below"
        elif what == "unwritable":  # for every user, root included
            one.state = Path("/proc/pilotlight")
        else:
            one.state.mkdir()
            (one.state / "version").write_text("99\n" if what == "newer" else "somebody else's\n")
            why = "newer Pilotlight" if what == "newer" else "not a state directory of Pilotlight"
        status, line = refused(one)
        assert status in {1, 2}
        assert why in line
        assert str(one.state) in line
        one.state = mine


async def test_unwritable_state_directory_fails_only_new_starts(tmp_path: Path) -> None:
    good, bad = (fake(tmp_path, name, "--tokens-per-s", "0") for name in ("good", "bad"))
    async with serving(tmp_path, good, bad) as one:
        assert (await one.call("good")).ending is Ending.COMPLETED
        records = one.state / "replicas"
        records.rename(one.state / "away")
        records.write_text("in the way")
        failed = await one.call("bad")
        assert (failed.status, failed.code) == (503, "model_start_failed")
        assert (await one.call("good")).ending is Ending.COMPLETED, "what runs is not hurt"
        assert str(records) in str(one.get("/api/v1/explain/model/bad"))
        records.unlink()
        (one.state / "away").rename(records)


@pytest.mark.parametrize("which", ["listen", "ops"])
@pytest.mark.standard
async def test_port_in_use_fails_the_start(tmp_path: Path, which: str) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada"), start=False) as one:
        url = one.url if which == "listen" else one.ops
        host, port = url.removeprefix("http://").split(":")
        with socket.create_server((host, int(port))):
            status, line = refused(one)
        assert status == 1
        assert f"{host}:{port} is already in use" in line
        await one.start()  # the state directory is unchanged
        assert (await one.call("ada")).ending is Ending.COMPLETED


async def test_autoscaler_rejects_a_public_operations_port_unless_auth_is_none(tmp_path: Path) -> None:
    one = Serving(tmp_path, [fake(tmp_path, "ada"), settings()])
    (tmp_path / "file").write_text("no directory")
    nowhere = str(tmp_path / "file" / "state")
    words = ["autoscaler", "--driver", "local", "--documents", str(one.config), "--state", nowhere]
    command = [sys.executable, "-m", "pilotlight", *words, "--contract-socket", str(tmp_path / "a.sock"), "--ops"]
    for auth, why in (
        ("auto", "--ops 0.0.0.0:0: other machines could reach the operations port"),
        ("none", "cannot be used"),
    ):
        done = subprocess.run(
            [*command, "0.0.0.0:0"], capture_output=True, text=True, timeout=REFUSED_S, check=False,
            env={**os.environ, "PILOTLIGHT_AUTH": auth},
        )  # fmt: skip
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert why in done.stderr
    await one.close()


async def test_serve_rejects_a_listen_port_used_by_another_serve(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada")
    async with (
        serving(tmp_path, ada, options=("--gateways", "2")) as one,
        serving(tmp_path / "two", ada, start=False) as two,
    ):
        two.url = one.url
        assert refused(two)[0] == 1


async def test_second_serve_on_the_same_state_directory_is_rejected(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada) as one, serving(tmp_path / "two", ada, start=False) as two:
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert one.process is not None
        mine, two.state = two.state, one.state
        status, line = refused(two)
        two.state = mine
        assert status == 1
        assert f"pid {one.process.pid}" in line
        assert str(one.state) in line
        assert (await one.call("ada")).ending is Ending.COMPLETED
        assert one.starts("ada") == 1


def wrong(what: str, folder: Path) -> tuple[list[Document] | str, str]:
    """Return documents with one mistake, and what the line must name."""
    ada, bob = fake(folder, "ada"), fake(folder, "bob")
    found: dict[str, tuple[list[Document] | str, str]] = {
        "unknown key": ([model("ada", engine="command", command=["x", "{port}"], idelSeconds=3)], "spec.idelSeconds"),
        "unknown key of settings": ([ada, settings(auht="none")], "auht"),
        "wrong unit of a size": ([fake(folder, "ada", gpu={"memory": "4 gigs"})], "spec.gpu.memory"),
        "wrong unit of a duration": ([fake(folder, "ada", idleSeconds="60s")], "spec.idleSeconds"),
        "negative": ([fake(folder, "ada", slots=-1)], "spec.slots"),
        "duplicate name": ([ada, fake(folder, "ada")], "metadata.name"),
        "alias of another's name": ([ada, fake(folder, "bob", aliases=["ada"])], "spec.aliases"),
        "alias twice": ([fake(folder, "ada", aliases=["gpt"]), fake(folder, "bob", aliases=["gpt"])], "spec.aliases"),
        "not yet in force": ([fake(folder, "ada", fallbacks=["bob"]), bob], "not supported yet"),
        "no port": ([model("ada", engine="command", command=["sleep", "1"])], "spec.command"),
        "unknown engine": ([model("ada", engine="vlmm")], "spec.engine"),
        "unknown kind": ([{**ada, "kind": "Modell"}], "kind"),
        "key twice": ("kind: Settings\nkind: Settings\n", "occurs twice"),
        "not YAML": ("kind: [", "documents.yaml"),
        "nothing": ("", "nothing to serve"),
    }
    return found[what]


WRONG = (
    "unknown key", "unknown key of settings", "wrong unit of a size", "wrong unit of a duration", "negative",
    "duplicate name", "alias of another's name", "alias twice", "not yet in force", "no port", "unknown engine",
    "unknown kind", "key twice", "not YAML", "nothing",
)  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.standard
async def test_invalid_configuration_fails_the_start_with_one_error_line(tmp_path: Path, what: str) -> None:
    documents, named = wrong(what, tmp_path)
    async with serving(tmp_path, start=False) as one:
        one.config.write_text(documents if isinstance(documents, str) else yaml.safe_dump_all(documents))
        status, line = refused(one)
        assert status == 2
        assert named in line
        assert what == "nothing" or str(one.config) in line
        assert not list(one.state.iterdir()), "nothing was touched"


async def test_misspelled_pilotlight_environment_variable_fails_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTLIGHT_AUHT", "none")
    async with serving(tmp_path, fake(tmp_path, "ada"), start=False) as one:
        status, line = refused(one)
        assert status == 2
        assert "PILOTLIGHT_AUHT" in line


async def test_public_listen_address_without_a_tenant_is_rejected(tmp_path: Path) -> None:
    async with serving(tmp_path, fake(tmp_path, "ada"), start=False) as one:
        one.url = one.url.replace("127.0.0.1", "0.0.0.0")
        status, line = refused(one)
        assert status == 2
        assert "pilotlight key new" in line
        assert "auth: none" in line


def listed(one: Serving) -> set[str]:
    """Return the models that one of the gateways lists."""
    with urllib.request.urlopen(f"{one.url}/v1/models", timeout=60) as response:
        return {entry["id"] for entry in json.load(response)["data"]}


async def test_reload_of_invalid_documents_keeps_the_last_valid_ones(tmp_path: Path) -> None:
    ada = fake(tmp_path, "ada", "--tokens-per-s", "0")
    async with serving(tmp_path, ada, options=("--gateways", "2")) as one:
        assert one.process is not None
        good = one.config.read_text()
        one.config.write_text(good.replace("residencySeconds", "residenceSeconds"))
        one.process.send_signal(signal.SIGHUP)
        await until("it logs the error", lambda: "residenceSeconds" in one.output())
        assert (await one.call("ada")).ending is Ending.COMPLETED
        more = [*yaml.safe_load_all(good), fake(tmp_path, "bob", "--tokens-per-s", "0")]
        one.config.write_text(yaml.safe_dump_all(more))
        one.process.send_signal(signal.SIGHUP)
        await until("every gateway knows bob", lambda: all("bob" in listed(one) for _ in range(30)))
        assert (await one.call("bob")).ending is Ending.COMPLETED
