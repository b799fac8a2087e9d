"""The first bytes of files with the suffix of safetensors or GGUF."""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from artifacts.dialects.artifact_contents import RefusedError
from artifacts.formats import magic
from loadtest.tiny_gguf import make_model
from pilotlight.cli.main import cli
from tests.support.builders.artifacts.weight_file_headers import as_safetensors

PICKLES = [pickle.dumps({"weights": [1.0] * 100}, protocol) for protocol in range(6)]
GGUF, SAFETENSORS = "it is not a GGUF file", "it is not a safetensors file"


def zipped() -> bytes:
    """Return a pickle in a ZIP archive, as torch.save writes it."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        file.writestr(zipfile.ZipInfo("archive/data.pkl"), PICKLES[2])  # dated 1980: the default is the current time
    return made.getvalue()


FOREIGN = [*PICKLES, zipped(), b"", b"GG", b"\x7fELF" + bytes(60), b"<html>", b"#!/bin/sh\n", bytes(4096), b"\xff" * 64]


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: content[:8].hex())
def test_foreign_content_named_gguf_or_safetensors_is_detected(content: bytes) -> None:
    head = content[: magic.HEAD_BYTES]
    for path, why in (("a/model.gguf", GGUF), ("MODEL.GGUF", GGUF), ("model.safetensors", SAFETENSORS)):
        assert magic.find_mismatch(path, head, len(content)).startswith(why)
    for other in ("config.json", "model.bin", "README"):
        assert magic.find_mismatch(other, head, len(content)) == ""


@pytest.mark.parametrize(
    ("path", "content", "right"),
    [
        ("a.gguf", b"GGUF", True),
        ("a.gguf", as_safetensors(b""), False),
        ("a.safetensors", as_safetensors(b""), True),
        ("a.safetensors", b"GGUF" + bytes(60), False),
        ("a.safetensors", (3).to_bytes(8, "little") + b"{}", False),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]", False),
    ],
)
def test_content_that_does_not_match_the_file_suffix_is_detected(path: str, content: bytes, right: bool) -> None:
    assert (magic.find_mismatch(path, content[: magic.HEAD_BYTES], len(content)) == "") == right


def test_error_names_the_first_file_with_content_of_another_format(tmp_path: Path) -> None:
    make_model(tmp_path / "good.gguf", "wake up")
    (tmp_path / "bad.gguf").write_bytes(PICKLES[2])
    files = [(name, tmp_path / name) for name in ("good.gguf", "bad.gguf")]
    magic.check_magic(files[:1])
    with pytest.raises(RefusedError, match=r"^bad\.gguf: it is not a GGUF file"):
        magic.check_magic(files)


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_packing_a_file_with_content_of_another_format_fails(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(zipped())
    words = ["weights", "pack", str(tmp_path / name), "--to", str(tmp_path / "layout"), "--allow-unsafe"]
    done = CliRunner().invoke(cli, words, prog_name="pilotlight")
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith(f"pilotlight: {name}: it is not a ")
    assert [one.name for one in tmp_path.iterdir()] == [name]
