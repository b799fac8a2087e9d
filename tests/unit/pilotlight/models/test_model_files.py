"""A search of folders finds the models, attaches projectors, and gives a reason for each file that is no model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from loadtest import tiny_gguf
from pilotlight.models import model_files
from pilotlight.models.gguf_check import load_gguf_header
from pilotlight.models.model_files import UnusableFile, find_models
from tests.support.builders.other_ggufs import make_imatrix, make_projector
from tests.support.builders.tiny_adapter import make_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file to link to."""
    path = tmp_path_factory.mktemp("weights") / "ada.gguf"
    tiny_gguf.make_model(path, "one two three", context_tokens=512)
    return path


def add(model: Path, *paths: Path) -> None:
    """Place the model at these paths."""
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.hardlink_to(model)


def served(root: Path) -> list[str]:
    return [str(one.path.relative_to(root)) for one in find_models([root]).models]


def reasons(root: Path) -> dict[str, str]:
    return {str(one.path.relative_to(root)): one.reason for one in find_models([root]).unusable}


def test_models_in_nested_folders_are_found_in_the_order_of_their_paths(tmp_path: Path, model: Path) -> None:
    names = ["a/b/y.gguf", "a/x.gguf", "folder.gguf/z.gguf", "top.gguf"]
    add(model, *(tmp_path / name for name in names), tmp_path / ".trash" / "old.gguf")
    (tmp_path / "a" / "notes.txt").write_text("no model")
    assert served(tmp_path) == names
    assert reasons(tmp_path) == {}


def test_search_omits_unusable_files_and_gives_one_reason_per_model(tmp_path: Path, model: Path) -> None:
    add(model, tmp_path / "good.gguf")
    whole = model.read_bytes()
    for name, content in (
        ("._good.gguf", b"\0\5\26\7"),
        ("cut.gguf", whole[:-100]),
        ("half.gguf", whole[: len(whole) // 2]),
        ("empty.gguf", b""),
        ("page.gguf", b"<!DOCTYPE html>"),
        ("part-00002-of-00003.gguf", whole),
        ("part-00003-of-00003.gguf", whole),
        ("two-00001-of-00002.gguf", whole),
        ("cut-00001-of-00002.gguf", whole),
        ("cut-00002-of-00002.gguf", whole[:-100]),
        ("gone-00001-of-00002.gguf", whole),
    ):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "gone-00002-of-00002.gguf").symlink_to("blob")
    (tmp_path / "gone.gguf").symlink_to("blobs/1234")
    (tmp_path / "self.gguf").symlink_to("self.gguf")
    (tmp_path / "folder.gguf").mkdir()
    os.mkfifo(tmp_path / "pipe.gguf")
    make_adapter(tmp_path / "lora.gguf", "one two three", "one three")
    make_imatrix(tmp_path / "imatrix.gguf")
    assert served(tmp_path) == ["good.gguf"]
    assert reasons(tmp_path) == {
        "._good.gguf": "it contains metadata of macOS, not a model",
        "cut.gguf": "truncated: its last tensor ends behind the end of the file",
        "cut-00001-of-00002.gguf": f"{tmp_path}/cut-00002-of-00002.gguf: truncated: its last tensor ends behind "
        "the end of the file",
        "empty.gguf": "the file is empty",
        "folder.gguf": "a folder without .gguf files",
        "gone.gguf": "a link to blobs/1234, which does not exist",
        "gone-00001-of-00002.gguf": "gone-00002-of-00002.gguf: a link to blob, which does not exist",
        "half.gguf": "truncated: its last tensor begins behind the end of the file",
        "imatrix.gguf": "an importance matrix for quantization, not a model",
        "lora.gguf": "a LoRA adapter, not a model: list it in spec.adapters of a Model",
        "page.gguf": "not a GGUF file",
        "part-00002-of-00003.gguf": "part 1 of 3 is missing",
        "pipe.gguf": "it is not a regular file",
        "self.gguf": "Too many levels of symbolic links",
        "two-00001-of-00002.gguf": "part 2 of 2 is missing: two-00002-of-00002.gguf",
    }


def test_only_paths_given_on_the_command_line_are_marked_as_named(tmp_path: Path, model: Path) -> None:
    add(model, tmp_path / "a" / "good.gguf")
    (tmp_path / "a" / "bad.gguf").touch()
    (tmp_path / "none").mkdir()
    found = find_models([tmp_path / "a", tmp_path / "none", tmp_path / "gone.gguf"])
    assert [(one.path.name, one.is_named) for one in found.models] == [("good.gguf", False)]
    assert [(one.path.name, one.reason, one.is_named) for one in found.unusable] == [
        ("bad.gguf", "the file is empty", False),
        ("none", "no .gguf file in this folder", True),
        ("gone.gguf", "No such file or directory", True),
    ]
    (tmp_path / "a" / "good.gguf").unlink()
    assert reasons(tmp_path / "a")["."] == "no .gguf file in this folder can be served"


def test_link_loop_or_too_deep_folder_is_skipped_with_a_reason(tmp_path: Path, model: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * (model_files.DEPTH_MAX + 1))
    add(model, deep / "deep.gguf", tmp_path / "a" / "x.gguf")
    (tmp_path / "a" / "loop").symlink_to("..")
    assert served(tmp_path) == ["a/x.gguf"]
    assert reasons(tmp_path) == {
        "a/loop": "this folder is searched already, under another name",
        str(deep.relative_to(tmp_path)): "more than 8 folders deep: pass this folder to serve its files",
    }


def test_unreadable_folder_is_reported_with_its_reason(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(model, tmp_path / "a" / "x.gguf", tmp_path / "b" / "y.gguf")
    scandir = os.scandir

    def refused(folder: Path) -> object:
        if folder == tmp_path / "a":
            raise PermissionError(13, "Permission denied")
        return scandir(folder)

    monkeypatch.setattr(os, "scandir", refused)
    assert (served(tmp_path), reasons(tmp_path)) == (["b/y.gguf"], {"a": "Permission denied"})
    assert find_models([tmp_path / "a"]).unusable == [UnusableFile(tmp_path / "a", "Permission denied", is_named=True)]


def test_exception_for_one_file_skips_it_if_containment_is_enabled(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(model, tmp_path / "a.gguf", tmp_path / "b.gguf")
    load = load_gguf_header

    def broken(file: Path) -> object:
        if file.name == "a.gguf":
            raise KeyError("x")
        return load(file)

    monkeypatch.setattr(model_files, "load_gguf_header", broken)
    found = find_models([tmp_path], contain=True)
    assert [one.path.name for one in found.models] == ["b.gguf"]
    assert found.unusable[0].reason.startswith("internal error (KeyError")
    with pytest.raises(KeyError):
        find_models([tmp_path])


def test_huge_folders_are_searched_up_to_a_limit(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_files, "ENTRIES_MAX", 2)
    add(model, *(tmp_path / f"{number}.gguf" for number in range(4)))
    assert len(served(tmp_path)) == 2
    assert reasons(tmp_path) == {".": "all but 2 files and folders: pass smaller folders"}


@pytest.mark.parametrize(
    ("models", "projectors", "attached"),
    [
        pytest.param(
            ["gemma-3-4b-it-Q4_K_M", "gemma-3-4b-it-UD-IQ3_XXS"], ["mmproj-F16"],
            {"gemma-3-4b-it-Q4_K_M": "mmproj-F16", "gemma-3-4b-it-UD-IQ3_XXS": "mmproj-F16"}, id="generic name",
        ),
        pytest.param(["ggml-model-q4_k"], ["mmproj-model-f16"], {"ggml-model-q4_k": "mmproj-model-f16"}, id="llava"),
        pytest.param(
            ["Qwen2.5-VL-7B-Instruct-Q4_K_M", "llama-8b"], ["mmproj-Qwen2.5-VL-7B-Instruct-f16"],
            {"Qwen2.5-VL-7B-Instruct-Q4_K_M": "mmproj-Qwen2.5-VL-7B-Instruct-f16"}, id="of several models",
        ),
        pytest.param(
            ["moondream2-text-model-f16"], ["moondream2-mmproj-f16"],
            {"moondream2-text-model-f16": "moondream2-mmproj-f16"}, id="text model",
        ),
        pytest.param(["a-Q8_0"], ["mmproj-F32", "mmproj-BF16", "mmproj-F16"], {"a-Q8_0": "mmproj-F16"}, id="best"),
        pytest.param(["a", "b"], ["mmproj-F16"], {}, id="two models and a generic name"),
        pytest.param(["llama"], ["mmproj-qwen2-vl-2b-f16"], {}, id="another model"),
        pytest.param(
            ["a-00001-of-00002"], ["mmproj-a"], {"a-00001-of-00002": "mmproj-a"}, id="split model",
        ),
    ],
)  # fmt: skip
def test_vision_projector_is_attached_to_matching_models_of_its_folder(
    tmp_path: Path, model: Path, models: list[str], projectors: list[str], attached: dict[str, str]
) -> None:
    add(model, *(tmp_path / f"{name}.gguf" for name in models))
    for name in models:
        if "-00001-" in name:
            add(model, tmp_path / f"{name.replace('-00001-', '-00002-')}.gguf")
    for position, name in enumerate(projectors):
        make_projector(tmp_path / f"{name}.gguf", has_type=position == 0)
    found = find_models([tmp_path])
    assert [one.path.stem for one in found.models] == models
    assert {one.path.stem: one.projector.stem for one in found.models if one.projector} == attached
    left = {one.path.stem: one.reason for one in found.unusable}
    assert left.keys() == {*projectors} - {*attached.values()}
    other = "its models use another vision projector of this folder"
    assert all((reason == other) is bool(attached) for reason in left.values())
