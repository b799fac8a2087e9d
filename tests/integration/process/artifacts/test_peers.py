"""Weights between nodes through the CLI: `weights serve` on one node, `weights pull --peer` on another."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.gates import ROOT
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import FILES, NAME

TOKEN = "0123456789abcdef" * 4
WORDS = (sys.executable, "-m", "pilotlight", "weights")


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    path.chmod(0o600)
    return path


def environment(tmp_path: Path) -> dict[str, str]:
    return {**os.environ, "REGISTRY_AUTH_FILE": str(tmp_path / "none.json")}


def pull(tmp_path: Path, host: str, name: str, *words: str, asked: str = ":v1") -> subprocess.CompletedProcess[str]:
    what = ("pull", f"oci://{host}/{NAME}{asked}", "--store", str(tmp_path / name), "--output", "json", *words)
    return subprocess.run(
        [*WORDS, *what], cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False
    )


@contextlib.contextmanager
def serving(tmp_path: Path, name: str, *words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Serve the store `name` to peers; yield its URL and the process."""
    what = ("serve", "--store", str(tmp_path / name), "--listen", "127.0.0.1:0", *words)
    with subprocess.Popen(
        [*WORDS, *what], cwd=ROOT, env=environment(tmp_path), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            found = re.search(r"serving the weights of .* on (127\.0\.0\.1:[0-9]+)", line)
            assert found is not None, line
            yield f"http://{found[1]}", process
        finally:
            process.terminate()


def came(done: subprocess.CompletedProcess[str]) -> dict[str, bytes]:
    assert done.returncode == 0, done.stderr
    folder = Path(json.loads(done.stdout)["folder"])
    return {path: (folder / path).read_bytes() for path in FILES}


@pytest.mark.standard
def test_pull_with_a_peer_reads_only_the_manifest_from_the_registry(tmp_path: Path, secret: Path) -> None:
    packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout", "modelpack-raw")
    seen = list[str]()
    with packed_models.served(tmp_path / "layout", seen) as host:
        assert came(pull(tmp_path, host, "a")) == FILES
        with serving(tmp_path, "a", "--peer-token-file", str(secret)) as (url, process):
            seen.clear()
            shown = ("--peer", url, "--peer-token-file", str(secret))
            done = pull(tmp_path, host, "b", *shown)
            assert came(done) == FILES
            ((name, given),) = json.loads(done.stdout)["peer_bytes"].items()
            assert (name, given > sum(map(len, FILES.values()))) == ("peer-1", True), "the config, too"
            assert seen == [f"GET /v2/{NAME}/manifests/v1"]
            process.terminate()
            assert process.wait(60) == 0
            done = pull(tmp_path, host, "c", *shown)
            assert came(done) == FILES
            assert len(seen) > len(FILES)
            assert "event=peer_failed peer=peer-1" in done.stderr
            assert url.removeprefix("http://") not in done.stderr
            assert TOKEN not in done.stderr


def test_pull_with_a_wrong_peer_token_completes_from_the_registry(tmp_path: Path, secret: Path) -> None:
    packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout", "modelpack-raw")
    other = tmp_path / "other"
    other.write_text("f" * 64)
    other.chmod(0o600)
    with packed_models.served(tmp_path / "layout") as host:
        came(pull(tmp_path, host, "a"))
        with serving(tmp_path, "a", "--peer-token-file", str(secret)) as (url, _):
            done = pull(tmp_path, host, "b", "--peer", url, "--peer-token-file", str(other))
            assert came(done) == FILES
            assert "denied access" in done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--listen", "0.0.0.0:0"), "any client could fetch weights: set --peer-token-file"),
        (("serve", "--listen", "0.0.0.0:0", "--peer-token-file", "TOKEN"), "this address requires TLS"),
        (("pull", "oci://127.0.0.1:1/a/b", "--peer", "http://192.0.2.1:1"), "in clear: use https://"),
        (("pull", "oci://127.0.0.1:1/a/b", "--peer", "node-a"), "expected https://HOST:PORT"),
        (("pull", "oci://127.0.0.1:1/a/b", "--peer", "https://a:1", "--peer-token-file", "none"), "No such file"),
    ],
)
@pytest.mark.standard
def test_invalid_peer_options_are_rejected_with_their_reason(
    words: tuple[str, ...], message: str, tmp_path: Path, secret: Path
) -> None:
    given = [str(secret) if word == "TOKEN" else word for word in words]
    done = subprocess.run(
        [*WORDS, *given, "--store", str(tmp_path / "store")],
        cwd=tmp_path, env={**environment(tmp_path), "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert message in done.stderr
    assert TOKEN not in done.stderr


def test_pull_by_digest_from_a_peer_succeeds_in_a_registry_outage(tmp_path: Path, secret: Path) -> None:
    packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout", "modelpack-raw")
    shown = ("--peer-token-file", str(secret))
    with contextlib.ExitStack() as stack:
        with packed_models.served(tmp_path / "layout") as host:
            first = pull(tmp_path, host, "a")
            came(first)
            assert came(pull(tmp_path, host, "liar")) == FILES
        for blob in (tmp_path / "liar/blobs").rglob("*"):
            if blob.is_file() and blob.stat().st_size == len(FILES["model.gguf"]):
                blob.chmod(0o644)
                blob.write_bytes(bytes(blob.stat().st_size))
        urls = [stack.enter_context(serving(tmp_path, name, *shown))[0] for name in ("a", "liar")]
        asked = f":v1@{json.loads(first.stdout)['digest']}"
        done = pull(tmp_path, host, "b", "--peer", urls[0], *shown, asked=asked)
        assert came(done) == FILES
        done = pull(tmp_path, host, "c", "--peer", urls[1], *shown, asked=asked)
        assert done.returncode == 1
        assert "event=peer_lied peer=peer-1" in done.stderr
        assert not list((tmp_path / "c/copies").rglob("*.gguf"))
