"""Packed models are read back unchanged by our readers of archives and of every dialect, including images."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from artifacts import digest, safe_paths
from artifacts.archives import single_file_tar
from artifacts.dialects import artifact_contents
from artifacts.fetch.unpack import Unpacking
from artifacts.oci import manifest
from artifacts.oci.descriptor import BadManifestError, Platform
from artifacts.oci.manifest import Index, Manifest
from artifacts.pack import oci_layout
from artifacts.pack.oci_layout import OciLayout
from pilotlight.cli.main import cli
from tests.support.builders.artifacts.tar_archives import read
from tests.support.builders.artifacts.weight_file_headers import as_safetensors
from tests.support.example_budget import examples

AMD = Platform("linux", "amd64")
FILES = {
    "model-00001-of-00002.safetensors": as_safetensors(b"w" * 70_000),
    "model-00002-of-00002.safetensors": as_safetensors(b"v" * 512),
    "config.json": b"{}",
    "tokenizer.json": b"[]",
    "README.md": b"# Model",
    "LICENSE": b"Apache-2.0",
    "sub/m\u00fcll.safetensors": as_safetensors(b""),
    "n" * 120 + ".json": b"{}",
}


@pytest.fixture(name="model")
def _model(tmp_path: Path) -> Path:
    return laid(tmp_path / "model", FILES)


def laid(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def pack(source: Path, to: Path, *words: str) -> Result:
    return CliRunner().invoke(cli, ["weights", "pack", str(source), "--to", str(to), *words], prog_name="pilotlight")


def packed(source: Path, to: Path, *words: str) -> OciLayout:
    done = pack(source, to, *words)
    assert done.exit_code == 0, done.output
    return OciLayout(to)


def files_of(at: OciLayout) -> tuple[artifact_contents.File, ...]:
    entry = at.entry(AMD)
    return artifact_contents.read_contents(entry.manifest, entry.config).files()


def pieces(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(1000), b"")


def unpacked(at: OciLayout, into: Path, files: tuple[artifact_contents.File, ...]) -> dict[str, bytes]:
    into.mkdir()
    folder = os.open(into, os.O_RDONLY | os.O_DIRECTORY)
    with Unpacking(folder, safe_paths.Tree(), 1 << 30) as unpacking:
        for one in files:
            assert digest.is_digest_of(one.digest, at.path(one.digest).read_bytes())
            unpacking.archive(one, pieces(at.path(one.digest)))
    os.close(folder)
    return {path.relative_to(into).as_posix(): path.read_bytes() for path in into.rglob("*") if path.is_file()}


def test_packed_folder_reads_back_with_identical_files(model: Path, tmp_path: Path) -> None:
    at = packed(model, tmp_path / "oci")
    files = files_of(at)
    assert [one.path for one in files] == sorted(FILES)
    assert {one.path: one.role for one in files} | {"": ""} == {
        **dict.fromkeys(FILES, "weight"), "config.json": "config", "tokenizer.json": "tokenizer", "README.md": "doc",
        "LICENSE": "license", "n" * 120 + ".json": "config", "": "",
    }  # fmt: skip
    assert {one.encoding for one in files} == {"tar"}
    assert unpacked(at, tmp_path / "out", files) == FILES


def test_each_layer_is_a_tar_of_one_file_with_512_byte_aligned_data(model: Path, tmp_path: Path) -> None:
    at = packed(model, tmp_path / "oci")
    for one in files_of(at):
        content = at.path(one.digest).read_bytes()
        assert digest.compute_digest(content) == one.digest
        assert read(content) == [(one.path, len(FILES[one.path]), "file", FILES[one.path])]
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            (info,) = archive.getmembers()
        assert (info.name, info.size, info.mode) == (one.path, len(FILES[one.path]), 0o644)
        assert (info.mtime, info.uid, info.gid, info.uname, info.gname) == (0, 0, 0, "", "")
        assert info.offset_data % 512 == 0


def test_packed_model_contains_an_image_of_its_layers_for_each_platform(model: Path, tmp_path: Path) -> None:
    at = packed(model, tmp_path / "oci")
    index = manifest.parse_manifest(at.document(at.top()))
    assert isinstance(index, Index)
    assert manifest.select_manifest(index, AMD).artifact_type == "application/vnd.cncf.model.manifest.v1+json"
    whole = at.entry(AMD).manifest
    images = [one for one in index.entries if one.platform is not None]
    assert [str(one.platform) for one in images] == ["linux/amd64", "linux/arm64"]
    for one in images:
        image = manifest.parse_manifest(at.document(one))
        assert isinstance(image, Manifest)
        assert [layer.digest for layer in image.layers] == [layer.digest for layer in whole.layers]
        config = json.loads(at.document(image.config))
        assert config["rootfs"] == {"type": "layers", "diff_ids": [layer.digest for layer in image.layers]}
        assert f"{config['os']}/{config['architecture']}" == str(one.platform)
        found = artifact_contents.read_contents(image, at.document(image.config))
        assert found.dialect == "image (modelcar or image volume)"
        assert unpacked(at, tmp_path / config["architecture"], found.files()) == FILES


def test_packed_model_has_the_media_types_of_the_modelpack_specification(model: Path, tmp_path: Path) -> None:
    entry = packed(model, tmp_path / "oci", "--tag", "v1").entry(AMD)
    assert entry.manifest.artifact_type == "application/vnd.cncf.model.manifest.v1+json"
    assert entry.manifest.config.media_type == "application/vnd.cncf.model.config.v1+json"
    kinds = {one.annotations["org.cncf.model.filepath"]: one.media_type for one in entry.manifest.layers}
    assert kinds["config.json"] == "application/vnd.cncf.model.weight.config.v1.tar"
    assert kinds["model-00001-of-00002.safetensors"] == "application/vnd.cncf.model.weight.v1.tar"
    assert kinds["LICENSE"] == "application/vnd.cncf.model.doc.v1.tar"
    metadata = json.loads(entry.manifest.layers[0].annotations["org.cncf.model.file.metadata+json"])
    assert metadata == {
        "name": "LICENSE", "mode": 420, "uid": 0, "gid": 0, "size": 10,
        "mtime": "1970-01-01T00:00:00Z", "typeflag": 48,
    }  # fmt: skip
    config = json.loads(entry.config)
    assert config["config"] == {"format": "safetensors"}
    assert config["modelfs"] == {"type": "layers", "diffIds": [one.digest for one in entry.manifest.layers]}
    index = json.loads((tmp_path / "oci" / "index.json").read_bytes())
    assert index["manifests"][0]["annotations"] == {"org.opencontainers.image.ref.name": "v1"}


def test_layers_in_raw_format_contain_the_files_unchanged(model: Path, tmp_path: Path) -> None:
    at = packed(model, tmp_path / "oci", "--format", "modelpack-raw")
    assert at.top().artifact_type == "application/vnd.cncf.model.manifest.v1+json"
    files = files_of(at)
    assert {one.encoding for one in files} == {"raw"}
    assert {one.path: at.path(one.digest).read_bytes() for one in files} == FILES


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
def test_same_files_with_other_times_and_modes_give_an_identical_artifact(
    form: str, model: Path, tmp_path: Path
) -> None:
    packed(model, tmp_path / "one", "--format", form)
    other = laid(tmp_path / "other", dict(reversed(FILES.items())))
    for number, path in enumerate(other.rglob("*")):
        os.utime(path, (number, number))
        path.chmod(0o700)
    packed(other, tmp_path / "two", "--format", form)
    first, second = (
        {path.relative_to(to).as_posix(): path.read_bytes() for path in to.rglob("*") if path.is_file()}
        for to in (tmp_path / "one", tmp_path / "two")
    )
    assert first == second


def test_ollama_modelfile_is_packed_with_its_adapter_and_parameters(tmp_path: Path) -> None:
    laid(tmp_path / "in", {"base.gguf": b"GGUF", "tuned.gguf": b"GGUF lora", "other.gguf": b"not asked for"})
    (tmp_path / "in" / "Modelfile").write_text(
        "FROM ./base.gguf\nADAPTER ./tuned.gguf\nPARAMETER num_ctx 4096\nPARAMETER temperature 0.5\n"
        'PARAMETER stop "a"\nPARAMETER stop b\nTEMPLATE """{{ .Prompt }}\nx"""\nSYSTEM You are kind.\n'
        'MESSAGE user Hello there\nLICENSE """MIT"""\nLICENSE """Apache"""\nREQUIRES 0.14\n'
    )
    done = pack(tmp_path / "in", tmp_path / "oci", "--output", "json")
    printed = json.loads(done.stdout)
    assert printed["left"] == [
        {"path": "REQUIRES", "reason": "it is an instruction to Ollama, not a part of the model"}
    ]
    at = OciLayout(tmp_path / "oci")
    files = files_of(at)
    found = unpacked(at, tmp_path / "out", files)
    assert {path: content for path, content in found.items() if not path.endswith(".json")} == {
        "base.gguf": b"GGUF", "adapter-tuned.gguf": b"GGUF lora", "template": b"{{ .Prompt }}\nx",
        "system": b"You are kind.", "LICENSE": b"MIT", "LICENSE-2": b"Apache",
    }  # fmt: skip
    assert json.loads(found["params.json"]) == {"num_ctx": 4096, "temperature": 0.5, "stop": ["a", "b"]}
    assert json.loads(found["messages.json"]) == [{"role": "user", "content": "Hello there"}]
    roles = {one.path: one.role for one in files}
    assert (roles["adapter-tuned.gguf"], roles["base.gguf"], roles["system"]) == ("adapter", "weight", "template")


def test_modctl_modelfile_selects_the_files_that_are_packed(model: Path, tmp_path: Path) -> None:
    laid(model, {"train.parquet": b"rows", "not-named.safetensors": b"x"})
    (model / "Modelfile").write_text(
        "# modctl\nNAME llama\nARCH transformer\nFAMILY llama3\nFORMAT safetensors\nPARAMSIZE 8b\nPRECISION bf16\n"
        "QUANTIZATION awq\nCONFIG *.json\nMODEL model-*.safetensors\nMODEL sub\nDOC README.md\nDATASET train.parquet\n"
    )
    at = packed(model / "Modelfile", tmp_path / "oci")
    wanted = {path: content for path, content in FILES.items() if path != "LICENSE"} | {"train.parquet": b"rows"}
    assert unpacked(at, tmp_path / "out", files_of(at)) == wanted
    config = json.loads(at.entry(AMD).config)
    assert config["descriptor"] == {"name": "llama", "family": "llama3"}
    assert config["config"] == {
        "architecture": "transformer", "format": "safetensors", "paramSize": "8b", "precision": "bf16",
        "quantization": "awq",
    }  # fmt: skip


def test_single_file_is_packed_as_a_model(tmp_path: Path) -> None:
    laid(tmp_path, {"qwen.gguf": b"GGUF"})
    assert [one.path for one in files_of(packed(tmp_path / "qwen.gguf", tmp_path / "oci"))] == ["qwen.gguf"]


def test_symlinked_files_are_packed_and_symlinked_folders_are_not(model: Path, tmp_path: Path) -> None:
    cache = laid(tmp_path / "cache", {".cache/x": b"hidden"})
    (cache / "model.safetensors").symlink_to(model / "model-00001-of-00002.safetensors")
    (cache / "again").symlink_to(cache)
    at = packed(cache, tmp_path / "oci")
    assert [one.path for one in files_of(at)] == ["model.safetensors"]


def test_packing_omits_and_lists_unsupported_files_unless_allow_unsafe(model: Path, tmp_path: Path) -> None:
    laid(model, {"pytorch_model.bin": b"pickle", "modeling.py": b"code", "strange.xyz": b"?"})
    done = pack(model, tmp_path / "oci")
    assert done.exit_code == 0
    for name in ("pytorch_model.bin", "modeling.py", "strange.xyz"):
        assert f"left out: {name}: " in done.stderr
    assert "--allow-unsafe packs it anyway" in done.stderr
    assert not {"pytorch_model.bin", "modeling.py"} & {one.path for one in files_of(OciLayout(tmp_path / "oci"))}
    at = packed(model, tmp_path / "all", "--allow-unsafe")
    entry = at.entry(AMD)
    assert (
        len(artifact_contents.read_contents(entry.manifest, entry.config, allow_unsafe=True).files()) == len(FILES) + 3
    )
    with pytest.raises(artifact_contents.RefusedError):
        artifact_contents.read_contents(entry.manifest, entry.config).files()


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": b"{}"}, "there are no weights (safetensors or GGUF) to pack"),
        ({"m.bin": b""}, "left out: m.bin: weights in this format"),
        ({"m.gguf": b"", "M.GGUF": b""}, "in conflict with"),
        ({"m.gguf": b"", "con.json": b"{}"}, "rename it"),
        ({"Modelfile": b"FROM llama3"}, "FROM llama3: no such file or folder; give the path of the weights"),
        ({"Modelfile": b"FROM m.bin", "m.bin": b""}, "m.bin: weights in this format"),
        ({"Modelfile": b"FROM a.gguf\nFROM m.bin", "a.gguf": b"", "m.bin": b""}, "m.bin: weights in this format"),
        ({"Modelfile": b"MODEL *.gguf"}, "'*.gguf' matches no file below"),
        ({"Modelfile": b"FORM x"}, "Modelfile: line 1: expected one of FROM"),
        ({"Modelfile": b"FROM a.gguf\nMESSAGE me hi", "a.gguf": b""}, "MESSAGE 'me': expected one of system"),
        ({"Modelfile": b"FROM a.gguf\nPARAMETER stop", "a.gguf": b""}, "PARAMETER stop: expected a value"),
        ({"Modelfile": b"\xff"}, "is neither a Modelfile nor a weights file"),
    ],
)
def test_packing_an_invalid_source_fails_in_one_line_and_leaves_no_files(
    files: dict[str, bytes], message: str, tmp_path: Path
) -> None:
    done = pack(laid(tmp_path / "in", files), tmp_path / "oci")
    assert done.exit_code == 1
    assert message in done.output
    assert done.output.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_error_for_a_log_file_states_that_it_was_read_as_a_modelfile(tmp_path: Path) -> None:
    done = pack(laid(tmp_path / "in", {"notes.log": b"FORM x"}) / "notes.log", tmp_path / "oci")
    assert "notes.log, read as a Modelfile: line 1: expected one of FROM" in done.output


def test_packing_into_a_folder_with_an_existing_layout_fails(model: Path, tmp_path: Path) -> None:
    packed(model, tmp_path / "oci")
    again = pack(model, tmp_path / "oci")
    assert again.exit_code == 1
    assert "already exists: choose a new or empty folder" in again.output


@pytest.mark.parametrize("size", [69_999, 70_001])
def test_packing_a_file_that_changes_fails_and_leaves_no_layout(
    size: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = oci_layout.write_layout

    def later(*args: object, **named: object) -> oci_layout.Written:
        (model / "model-00001-of-00002.safetensors").write_bytes(as_safetensors(b"x" * size))
        return write(*args, **named)  # type: ignore[arg-type]  # passed on unchanged

    monkeypatch.setattr(oci_layout, "write_layout", later)
    done = pack(model, tmp_path / "oci")
    assert "model-00001-of-00002.safetensors: changed while it was packed; pack again" in done.output
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_oci_layout_with_a_changed_byte_is_rejected(model: Path, tmp_path: Path) -> None:
    at = packed(model, tmp_path / "oci")
    path = at.path(at.top().digest)
    path.write_bytes(path.read_bytes()[:-1] + b" ")
    with pytest.raises(BadManifestError, match="is corrupt"):
        OciLayout(tmp_path / "oci").entry(AMD)
    with pytest.raises(BadManifestError, match="is not an OCI image layout"):
        OciLayout(model)


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(st.text("ab\u00e9/.", min_size=1, max_size=120), st.integers(0, 1 << 43))
def test_single_file_tar_is_read_by_tarfile_with_the_same_path_and_size(path: str, size: int) -> None:
    try:
        safe_paths.check_path(path)
    except safe_paths.BadPathError:
        reject()
    head, tail = single_file_tar.build_frame(path, size)
    with tarfile.open(fileobj=io.BytesIO(head + bytes(1024)), mode="r:") as archive:
        info = archive.next()
    assert info is not None
    assert (info.name, info.size) == (path, size)
    assert (len(head) + size + len(tail)) % 512 == 0
    assert not any(tail)
    plain = path.isascii() and len(path) <= 100 and size < 8 << 30
    assert (head[156:157] == b"0") == plain, "what ustar has no room or no letters for stands in pax records"


@pytest.mark.standard
def test_packing_memory_does_not_grow_with_file_size(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    with (tmp_path / "in" / "model.gguf").open("wb") as file:
        file.write(b"GGUF")
        file.truncate(300 << 20)
    program = (
        "import sys, resource\nfrom pathlib import Path\n"
        "from artifacts.pack import oci_layout\nfrom pilotlight.cli.weights import pack\n"
        "plan = pack.plan_artifact(Path(sys.argv[1]))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "oci_layout.write_layout(Path(sys.argv[2]), plan, 'modelpack')\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path / "in"), str(tmp_path / "oci")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert int(ran.stdout) < 8 << 10, "KiB"
