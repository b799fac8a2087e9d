"""Listing the files of an image in a registry: by the names in its layers, with few bytes read."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects import artifact_contents
from artifacts.dialects.artifact_contents import Contents
from artifacts.fetch import image_file_list
from artifacts.fetch.image_file_list import BEGIN_BYTES, SPAN_BYTES, Inside, list_image_files
from artifacts.oci import manifest
from artifacts.registry.blobs import Blob, BlobSource
from tests.support.fakes.registry import digest_of

BIG = bytes(10 * SPAN_BYTES)
CONFIG = b"{}"


def archive(*files: tuple[str, bytes], link: str = "") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name, content in files:
            one = tarfile.TarInfo(name)
            one.size = len(content)
            made.addfile(one, io.BytesIO(content))
        if link:
            one = tarfile.TarInfo(link)
            one.type, one.linkname = tarfile.SYMTYPE, "/etc/passwd"
            made.addfile(one)
    return out.getvalue()


class Registry:
    """A fake registry with these layers; records how many bytes were requested."""

    def __init__(self, *layers: bytes) -> None:
        self.blobs = {digest_of(one): one for one in layers}
        self.asked: list[int] = []
        kinds = [
            "application/vnd.oci.image.layer.v1.tar" + ("+gzip" if one[:2] == b"\x1f\x8b" else "") for one in layers
        ]
        fields = {
            "schemaVersion": 2, "mediaType": manifest.OCI_MANIFEST,
            "config": {
                "mediaType": "application/vnd.oci.image.config.v1+json", "digest": digest_of(CONFIG),
                "size": len(CONFIG),
            },
            "layers": [
                {"mediaType": kind, "digest": digest_of(one), "size": len(one)}
                for kind, one in zip(kinds, layers, strict=True)
            ],
        }  # fmt: skip
        found = manifest.parse_manifest(json.dumps(fields).encode())
        assert isinstance(found, manifest.Manifest)
        self.contents: Contents = artifact_contents.read_contents(found)

    async def read(self, blob: Blob, first: int = 0, end: int | None = None) -> AsyncGenerator[bytes]:
        self.asked.append((blob.size if end is None else end) - first)
        yield self.blobs[blob.digest][first:end]

    async def look(self, *, allow_unsafe: bool = False) -> Inside:
        return await list_image_files(self.contents, "r", cast("BlobSource", self), allow_unsafe=allow_unsafe)


async def test_listing_an_uncompressed_layer_reads_at_most_one_span_per_member() -> None:
    registry = Registry(
        archive(("bin/sh", BIG), ("etc/x", b"x")),
        archive(("models/a.gguf", BIG), ("models/LICENSE", b"free"), ("models/sub/b.json", BIG)),
    )
    assert await registry.look() == Inside("models", ("a.gguf", "LICENSE", "sub/b.json"), whole=True)
    assert sum(registry.asked) <= 6 * SPAN_BYTES
    assert sum(map(len, registry.blobs.values())) > 30 * SPAN_BYTES


async def test_image_without_a_models_folder_is_listed_from_its_root() -> None:
    assert await Registry(archive(("./a.gguf", b"x"))).look() == Inside("", ("a.gguf",), whole=True)


async def test_long_member_names_are_read_across_span_boundaries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file_list, "SPAN_BYTES", 512)
    long = f"models/{'d' * 90}/{'e' * 90}.gguf"
    seen = await Registry(archive((long, b"x" * 2000), ("models/z.json", b"z"))).look()
    assert seen.paths == (long.removeprefix("models/"), "z.json")


async def test_compressed_layer_above_the_read_limit_is_listed_only_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = gzip.compress(archive(("models/a.gguf", BIG), ("models/b.json", b"b")))
    assert await Registry(packed).look() == Inside("models", ("a.gguf", "b.json"), whole=True)
    monkeypatch.setattr(image_file_list, "BEGIN_BYTES", len(packed) // 2)
    assert await Registry(packed).look() == Inside("models", ("a.gguf",), whole=False)
    assert len(packed) < BEGIN_BYTES


async def test_image_is_listed_only_in_part_at_the_request_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_file_list, "SPANS_MAX", 3)
    registry = Registry(archive(*((f"models/{number}.gguf", BIG) for number in range(9))))
    seen = await registry.look()
    assert (len(seen.paths), seen.whole, len(registry.asked)) == (3, False, 3)


async def test_inspection_rejects_image_content_that_a_pull_would_reject() -> None:
    unsafe = Registry(archive(("models/a.safetensors", b"x"), ("models/run.py", b"x")))
    with pytest.raises(BadArchiveError, match=r"run\.py: code is not accepted"):
        await unsafe.look()
    assert "run.py" in (await unsafe.look(allow_unsafe=True)).paths
    with pytest.raises(BadArchiveError, match="is a link"):
        await Registry(archive(("models/a.gguf", b"x"), link="models/b")).look(allow_unsafe=True)
    assert (await Registry(archive(("models/a.gguf", b"x"), link="bin/sh")).look()).whole


@pytest.mark.parametrize("name", ["/models/run.py", "././models/run.py", "x/../models/run.py", "../models/run.py"])
async def test_ambiguous_path_into_the_models_folder_is_rejected(name: str) -> None:
    image = Registry(archive(("models/a.gguf", b"GGUF")), archive((name, b"pass")))
    with pytest.raises(BadArchiveError, match="so programs may extract it to different places"):
        await image.look()


async def test_tar_folder_entries_are_not_listed_as_image_files() -> None:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as made:
        for name in (".", "./models"):
            one = tarfile.TarInfo(name)
            one.type = tarfile.DIRTYPE
            made.addfile(one)
    assert (await Registry(out.getvalue(), archive(("./models/a.gguf", b"GGUF"))).look()).paths == ("a.gguf",)


@pytest.mark.parametrize("magic", [b"\x1f\x8b\x08\x04", b"BZh9", (0x184D2A50).to_bytes(4, "little")])
async def test_uncompressed_layer_with_compression_magic_is_rejected(magic: bytes) -> None:
    """The first header is a pax header. Its own name is ignored, so that it may begin with any bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as made:
        one = tarfile.TarInfo(f"models/{'a' * 200}.gguf")
        made.addfile(one)
    block = bytearray(out.getvalue())
    block[: len(magic)] = magic
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block[:512])
    image = Registry(b"")
    image.blobs = {one.file.digest: bytes(block) for one in image.contents.layers}
    image.contents = image.contents._replace(
        layers=tuple(one._replace(file=one.file._replace(size=len(block))) for one in image.contents.layers)
    )
    with pytest.raises(BadArchiveError, match="declared as uncompressed"):
        await image.look()
