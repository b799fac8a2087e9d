"""`pilotlight weights pull` and `verify`: arguments and output."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from artifacts.pack import oci_layout, pack
from artifacts.pack.pack import About, Offered
from artifacts.store.store import Store
from pilotlight.cli.main import cli
from pilotlight.cli.weights.store import SHORT_DIGITS
from tests.support.builders.artifacts import packed_models
from tests.support.builders.artifacts.packed_models import FILES, NAME

pytestmark = pytest.mark.standard


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["weights", *words], prog_name="pilotlight")


@pytest.fixture(autouse=True)
def no_logins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REGISTRY_AUTH_FILE", str(tmp_path / "none.json"))


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    packed_models.packed(packed_models.model(tmp_path / "model"), tmp_path / "layout")
    return tmp_path / "layout"


@pytest.fixture
def host(layout: Path) -> Iterator[str]:
    with packed_models.served(layout) as host:
        yield host


@pytest.fixture
def store(tmp_path: Path) -> str:
    return str(tmp_path / "store")


def pulled(host: str, store: str) -> dict[str, object]:
    result = run("pull", f"oci://{host}/{NAME}:v1", "--store", store, "--output", "json")
    assert result.exit_code == 0, result.output
    result_row: dict[str, object] = json.loads(result.output)
    return result_row


def test_second_pull_reuses_the_stored_weights(host: str, store: str) -> None:
    result_row = pulled(host, store)
    assert (result_row["artifact"], result_row["bytes"]) == (f"oci://{host}/{NAME}:v1", sum(map(len, FILES.values())))
    assert sorted(result_row["files"]) == sorted(FILES)  # type: ignore[call-overload]  # parsed JSON
    assert result_row["fetched_bytes"] != 0
    folder = Path(str(result_row["folder"]))
    assert (folder / "model.gguf").read_bytes() == FILES["model.gguf"]
    lines = run("pull", f"{host}/{NAME}:v1", "--store", store).output.splitlines()
    assert lines[0].endswith("3 files, 73.2Ki; already stored")
    assert lines[1] == str(folder)
    assert run("ls", "--store", store).output.count(str(result_row["artifact"])) == 1


def test_stored_copy_is_found_by_every_pulled_tag(host: str, layout: Path, store: str) -> None:
    result_row = pulled(host, store)
    digest = str(result_row["digest"])
    assert run("push", str(layout), f"{host}/{NAME}:v2").exit_code == 0
    assert "matches no copy" in run("pin", f"oci://{host}/{NAME}:v2", "--store", store).stderr
    again = run("pull", f"oci://{host}/{NAME}:v2", "--store", store).output
    assert again.startswith(f"oci://{host}/{NAME}:v2: "), "with the requested name, regardless of the resolved one"
    assert "already stored" in again
    for name in (f"{host}/{NAME}:v1", f"oci://{host}/{NAME}:v2", f"{host}/{NAME}@{digest}"):
        done = run("pin", name, "--store", store)
        assert (done.exit_code, "is pinned" in done.output) == (0, True), done.output
        assert run("verify", name, "--store", store).output.count("intact") == 1
    run("unpin", digest, "--store", store)
    assert run("evict", f"{host}/{NAME}:v2", "--store", store).exit_code == 0
    assert json.loads(run("ls", "--store", store, "--output", "json").output) == []
    assert "matches no copy" in run("pin", f"oci://{host}/{NAME}:v2", "--store", store).stderr


@pytest.mark.parametrize("output", ["text", "json"])
def test_verify_with_drop_removes_a_copy_with_changed_files(host: str, store: str, output: str) -> None:
    result_row = pulled(host, store)
    assert run("verify", "--store", store).output.endswith("73.2Ki: intact\n")
    folder = Path(str(result_row["folder"]))
    _changed(folder / "model.gguf", b"X")
    (folder / "LICENSE").unlink()
    (folder / "more").write_bytes(b"")
    bad = run("verify", "--store", store, "--output", output)
    assert bad.exit_code == 1
    assert "1 of 1 copies are corrupt; --drop removes them" in bad.stderr
    for what in ("model.gguf", "LICENSE", "more"):
        assert what in bad.stdout
    dropped = run("verify", str(result_row["digest"]), "--drop", "--store", store)
    assert dropped.exit_code == 1
    assert f"{str(result_row['digest'])[: 7 + SHORT_DIGITS]} is removed" in dropped.stdout
    assert "of the names matches no copy" in run("verify", str(result_row["digest"]), "--store", store).stderr
    again = Path(str(pulled(host, store)["folder"]))
    assert {path: (again / path).read_bytes() for path in FILES} == FILES
    assert run("verify", "--store", store).exit_code == 0


def test_corrupt_shared_file_is_not_reused_by_the_next_pull(tmp_path: Path, store: str) -> None:
    """Two copies share the file: the other keeps its own link to it, and a new pull downloads it again."""
    packed_models.packed(packed_models.model(tmp_path / "of"), tmp_path / "raw", "modelpack-raw")
    with packed_models.served(tmp_path / "raw") as host:
        folder = Path(str(pulled(host, store)["folder"]))
        blob = next(path for path in Path(store, "blobs").rglob("*") if path.is_file() and path.stat().st_size > 9999)
        os.link(blob, tmp_path / "other")
        _changed(folder / "model.gguf", b"X")
        assert run("verify", "--drop", "--store", store).exit_code == 1
        assert not blob.exists()
        again = Path(str(pulled(host, store)["folder"]))
        assert (again / "model.gguf").read_bytes() == FILES["model.gguf"]


def test_weights_with_code_are_pulled_only_with_allow_unsafe(tmp_path: Path, store: str) -> None:
    offered = [Offered("model.gguf", 4, content=b"GGUF"), Offered("run.py", 1, content=b"x")]
    oci_layout.write_layout(tmp_path / "code", pack.build_plan(offered, About(), allow_unsafe=True), "modelpack")
    with packed_models.served(tmp_path / "code") as host:
        words = ("pull", f"oci://{host}/{NAME}:v1", "--store", store)
        before, allowed, after = run(*words), run(*words, "--allow-unsafe"), run(*words)
        assert [before.exit_code, allowed.exit_code, after.exit_code] == [1, 0, 1]
        assert "code is not accepted from a registry" in before.stderr
        assert before.stderr == after.stderr


def test_verify_keeps_a_corrupt_pinned_copy(host: str, store: str) -> None:
    result_row = pulled(host, store)
    run("pin", str(result_row["digest"]), "--store", store)
    _changed(Path(str(result_row["folder"])) / "model.gguf", b"X")
    result = run("verify", "--drop", "--store", store)
    assert (result.exit_code, "is pinned" in result.stderr) == (1, True)
    assert len(list(Store(Path(store)).layout.records())) == 1


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("pull", "Oci://x"), 2, "is not a reference to an artifact"),
        (("pull", "oci://127.0.0.1:1/a/b"), 1, "does not answer"),
    ],
)
def test_failed_weights_pull_prints_a_one_line_error(
    words: tuple[str, ...], code: int, message: str, store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("artifacts.http.retry.TRIES_MAX", 1)
    result = run(*words, *(("--store", store) if words[0] == "pull" else ()))
    assert (result.exit_code, result.stderr.count("\n")) == (code, 1)
    assert message in result.stderr


def _changed(path: Path, by: bytes) -> None:
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(by)
