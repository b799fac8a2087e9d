"""Headers of models in a registry: read with few bytes, and never treated as more than what was read."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import cast

import pytest

from artifacts import reference
from artifacts.dialects.artifact_contents import File
from artifacts.dialects.base import Encoding
from artifacts.digest import compute_digest
from artifacts.fetch import remote_header
from artifacts.fetch.registry import Registries
from artifacts.formats import cpu_time_limit, gguf
from artifacts.formats.gguf import GgufError
from artifacts.pack.pack import Form
from artifacts.registry.blobs import Blob, BlobSource
from loadtest import tiny_gguf
from tests.support.builders.artifacts import packed_models
from tests.support.builders.worst_case_inputs import archived

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


class Source:
    """Sends one content in pieces and records the requested ranges."""

    def __init__(self, content: bytes) -> None:
        self.content, self.parts = content, list[tuple[int, int]]()

    async def read(self, blob: Blob, first: int, end: int) -> AsyncGenerator[bytes, None]:
        del blob
        self.parts.append((first, end))
        for at in range(first, end, 300):
            yield self.content[at : min(end, at + 300)]

    async def headers(self, folder: Path, *paths: str, encoding: Encoding = "raw") -> list[str]:
        files = [File(path, len(self.content), compute_digest(b""), "weight", encoding) for path in paths]
        return await remote_header.fetch_gguf_headers(files, "r", cast("BlobSource", self), folder)


@pytest.mark.parametrize("encoding", ["raw", "tar"])
async def test_each_byte_of_a_header_is_requested_once(
    tmp_path: Path, encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_header, "FIRST_BYTES", 1000)
    path = files(tmp_path / "in") / "ada.gguf"
    source = Source((path if encoding == "raw" else archived(path)).read_bytes())
    assert await source.headers(tmp_path, "ada.gguf", encoding=encoding) == ["ada.gguf"]
    assert source.parts[:2] == [(0, 1000), (1000, 4000)]
    assert [first for first, _ in source.parts[1:]] == [end for _, end in source.parts[:-1]]
    assert gguf.load_gguf_info(tmp_path / "ada.gguf") == gguf.load_gguf_info(path)


async def test_no_header_is_fetched_for_an_artifact_with_several_models(tmp_path: Path) -> None:
    source = Source(b"GGUF")
    assert await source.headers(tmp_path, "a.gguf", "b.gguf", "lora.gguf") == ["a.gguf", "b.gguf", "lora.gguf"]
    assert source.parts == []
    assert (tmp_path / "lora.gguf").stat().st_size == 4, "the size of an adapter counts"
    with pytest.raises(GgufError, match="truncated"):
        await source.headers(tmp_path, "a.gguf", "lora.gguf")


async def test_one_cpu_time_limit_applies_to_all_passes_over_a_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = list[cpu_time_limit.CpuTime]()
    known = gguf.has_whole_header

    def has_whole_header(file: Path, known_bytes: int, cpu: cpu_time_limit.CpuTime) -> bool:
        limits.append(cpu)
        return known(file, known_bytes, cpu)

    monkeypatch.setattr(gguf, "has_whole_header", has_whole_header)
    monkeypatch.setattr(remote_header, "FIRST_BYTES", 100)
    await Source((files(tmp_path / "in") / "ada.gguf").read_bytes()).headers(tmp_path, "ada.gguf")
    assert len(limits) > 2
    assert len(set(limits)) == 1
    monkeypatch.setattr(cpu_time_limit, "CPU_S_MAX", 0.0)
    with pytest.raises(GgufError, match="takes more than 2 s"):
        await Source(bytes(512)).headers(tmp_path, "ada.gguf", encoding="tar")
