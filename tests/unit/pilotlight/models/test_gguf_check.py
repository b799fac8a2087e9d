"""Files that no engine can serve are reported before a start, in one line that names the file and the fix."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from artifacts.formats import gguf
from autoscaler.contract import ModelName
from autoscaler.engines import EngineError
from autoscaler.spec.model import EngineName, Model, ModelSpec
from loadtest import tiny_gguf
from pilotlight.models import document_loading
from pilotlight.models.gguf_check import check_file, load_gguf_header

CORRECT = "or correct spec.artifact"


def model(engine: EngineName, path: Path) -> Model:
    return Model(name=ModelName("m"), spec=ModelSpec(engine=engine, artifact=f"file://{path}", command=("x", "{port}")))


def wrong(engine: EngineName, path: Path) -> str:
    """Why the file cannot be served; empty if no problem is found."""
    try:
        check_file(model(engine, path), path)
    except EngineError as error:
        return str(error)
    return ""


def test_gguf_file_passes_the_check_for_llama_cpp_vllm_and_commands(tmp_path: Path) -> None:
    good, weights = tmp_path / "good.gguf", tmp_path / "weights"
    tiny_gguf.make_model(good, "Good.")
    weights.mkdir()
    assert wrong("llama.cpp", good) == wrong("vllm", good) == wrong("command", good) == ""
    assert wrong("vllm", weights) == ""


@pytest.mark.parametrize("engine", ["llama.cpp", "vllm", "sglang", "command"])
def test_missing_file_error_names_the_path_and_fix(tmp_path: Path, engine: EngineName) -> None:
    for path in (tmp_path / "m.gguf", tmp_path / "no" / "folder" / "m.gguf"):
        assert wrong(engine, path) == f"{path} does not exist; put the model there, {CORRECT}"


def test_llama_cpp_rejects_a_file_without_gguf_content(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"hello there")
    assert wrong("llama.cpp", path) == f"{path}: not a GGUF file; put a complete GGUF file there, {CORRECT}"
    assert wrong("vllm", path) == ""
    assert wrong("llama.cpp", tmp_path).startswith(f"{tmp_path}: it is not a regular file")


@pytest.mark.parametrize("engine", ["command", "ollama"])
def test_non_gguf_artifact_of_a_custom_command_is_not_checked(tmp_path: Path, engine: EngineName) -> None:
    assert wrong(engine, tmp_path / "made-by-the-engine") == ""


def test_lost_read_permission_is_an_error_despite_a_cached_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The access check is patched because root may read everything."""
    path = tmp_path / "m.gguf"
    tiny_gguf.make_model(path, "Good.")
    assert wrong("llama.cpp", path) == ""
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert wrong("llama.cpp", path) == f"{path} is not readable; give read permission to the user that runs pilotlight"


def test_header_is_cached_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, reads, read = tmp_path / "m.gguf", list[Path](), gguf.load_gguf_info
    tiny_gguf.make_model(path, "Good.")

    def counted(file: Path) -> gguf.GgufInfo:
        reads.append(file)
        return read(file)

    monkeypatch.setattr(gguf, "load_gguf_info", counted)
    assert load_gguf_header(path) is load_gguf_header(path)
    os.utime(path, (1, 1))
    load_gguf_header(path)
    assert len(reads) == 2


def test_missing_part_of_a_split_gguf_is_named_in_the_error(tmp_path: Path) -> None:
    first, second = (tmp_path / f"[x] m-0000{part}-of-00002.gguf" for part in (1, 2))
    tiny_gguf.make_model(first, "Good.")
    shutil.copy(first, second)
    assert wrong("llama.cpp", first) == ""
    second.unlink()
    assert wrong("llama.cpp", first).startswith(f"{first}: part 2 of 2 is missing: {second.name}; put a complete GGUF")


def test_engine_installed_after_startup_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, found = tmp_path / "m.gguf", dict[str, str]()
    tiny_gguf.make_model(path, "Good.")
    monkeypatch.setattr(document_loading, "find_installed_programs", lambda: dict(found))
    launch = document_loading.build_launcher()
    with pytest.raises(EngineError, match="is not installed here"):
        launch(model("llama.cpp", path), "127.0.0.1", 1)
    found["llama-server"] = "/opt/llama-server"
    assert launch(model("llama.cpp", path), "127.0.0.1", 1).argv[0] == "/opt/llama-server"
