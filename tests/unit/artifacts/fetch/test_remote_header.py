"""Headers of models in a registry: read with few bytes, and never treated as more than what was read."""

from __future__ import annotations

from pathlib import Path

import pytest

from artifacts import reference
from artifacts.fetch import remote_header
from artifacts.fetch.registry import Registries
from artifacts.formats import gguf
from artifacts.formats.gguf import GgufError
from artifacts.pack.pack import Form
from loadtest import tiny_gguf
from tests.support.builders.artifacts import packed_models

pytestmark = pytest.mark.standard


def files(folder: Path) -> Path:
    folder.mkdir()
    tiny_gguf.make_model(folder / "ada.gguf", "Hello, I am Ada.")
    (folder / "LICENSE").write_text("free")
    return folder


@pytest.mark.parametrize("form", ["modelpack", "modelpack-raw"])
@pytest.mark.parametrize("first", [remote_header.FIRST_BYTES, 1000])
async def test_fetched_header_matches_the_header_of_the_whole_file(
    tmp_path: Path, form: Form, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_header, "FIRST_BYTES", first)
    source = files(tmp_path / "in")
    packed_models.packed(source, tmp_path / "layout", form)
    with packed_models.served(tmp_path / "layout") as host:
        of = reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1")
        assert await remote_header.fetch_artifact_headers(of, Registries(), tmp_path / "out") == ["ada.gguf"]
    there, here = source / "ada.gguf", tmp_path / "out/ada.gguf"
    assert gguf.load_gguf_info(here) == gguf.load_gguf_info(there)
    assert here.stat().st_size == there.stat().st_size
    if first == 1000:
        assert here.read_bytes() != there.read_bytes(), "its weights were not asked for"


async def test_invalid_or_oversized_gguf_header_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed_models.packed(packed_models.model(tmp_path / "in"), tmp_path / "layout")
    packed_models.packed(files(tmp_path / "ada"), tmp_path / "other")
    with packed_models.served(tmp_path / "layout") as host:
        of = reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1")
        with pytest.raises(GgufError, match="expected 2 or 3"):
            await remote_header.fetch_artifact_headers(of, Registries(), tmp_path / "out")
    monkeypatch.setattr(remote_header, "FIRST_BYTES", 700)
    monkeypatch.setattr(remote_header, "BYTES_MAX", 700)
    with packed_models.served(tmp_path / "other") as host:
        of = reference.parse_reference(f"oci://{host}/{packed_models.NAME}:v1")
        with pytest.raises(GgufError, match="larger than"):
            await remote_header.fetch_artifact_headers(of, Registries(), tmp_path / "out")
