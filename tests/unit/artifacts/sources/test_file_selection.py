"""Which files of a source are selected, and how they are identified."""

from __future__ import annotations

import pytest

from artifacts import digest
from artifacts.dialects.artifact_contents import RefusedError
from artifacts.sources import file_selection
from artifacts.sources.file_selection import ListedFile

SHA = f"sha256:{'a' * 64}"


def entries(*paths: str) -> list[ListedFile]:
    return [ListedFile(path, 10, f"git:{number:040x}") for number, path in enumerate(paths)]


def taken(*paths: str, include: tuple[str, ...] = ()) -> list[str]:
    return [one.entry.path for one in file_selection.select_files("hf://a/b", entries(*paths), include).taken]


def refused(*paths: str, include: tuple[str, ...] = ()) -> str:
    with pytest.raises(RefusedError) as caught:
        file_selection.select_files("hf://a/b", entries(*paths), include)
    return str(caught.value)


def test_supported_files_are_selected_and_unsafe_files_listed_as_omitted() -> None:
    paths = ("model.safetensors", "config.json", "pytorch_model.bin", "modeling.py", ".gitattributes", "a/.git/x")
    found = file_selection.select_files("hf://a/b", entries(*paths))
    assert [one.entry.path for one in found.taken] == ["config.json", "model.safetensors"]
    assert [path for path, _ in found.left] == ["modeling.py", "pytorch_model.bin"]
    unsafe = file_selection.select_files("hf://a/b", entries(*paths), allow_unsafe=True)
    assert unsafe.left == ()
    assert len(unsafe.taken) == 4


def test_include_pattern_selects_matching_files_in_every_subfolder() -> None:
    paths = ("a.gguf", "sub/b.gguf", "sub/deep/c.gguf", "x.json")
    assert taken(*paths, include=("*.gguf",)) == ["a.gguf", "sub/b.gguf", "sub/deep/c.gguf"]
    assert taken(*paths, include=("sub/",)) == ["sub/b.gguf", "sub/deep/c.gguf"]
    assert taken(*paths, include=("a.gguf", "x.json")) == ["a.gguf", "x.json"]
    assert taken(".hidden/a.gguf", "b.gguf", include=("*",)) == [".hidden/a.gguf", "b.gguf"]
    assert "include='A.gguf' matches no file; its weights are a.gguf" in refused(*paths, include=("a.gguf", "A.gguf"))


def test_several_models_without_an_include_pattern_are_rejected() -> None:
    assert "select one with ?include=PATTERN: a.gguf, b.gguf" in refused("a.gguf", "b.gguf")
    assert "contains several models and safetensors" in refused("a.gguf", "b.safetensors")
    many = [f"{number:02}.gguf" for number in range(20)]
    assert "11.gguf and 8 more" in refused(*many)
    assert taken("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf") == [
        "m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "mmproj-m.gguf",
    ]  # fmt: skip
    assert len(taken("m-00001-of-00002.safetensors", "m-00002-of-00002.safetensors")) == 2


def test_listing_without_weights_or_with_an_invalid_path_is_rejected() -> None:
    assert "no weights" in refused("README.md")
    assert "no weights (safetensors or GGUF); left out: a.bin" in refused("a.bin")
    assert "'../b.json'" in refused("a.gguf", "../b.json")
    assert refused("a/b.json", "a", "a.gguf", include=("*",))


def test_listing_digest_changes_with_source_or_files_but_not_with_order() -> None:
    one = file_selection.select_files("hf://a/b", entries("a.gguf", "c.json"))
    assert one.digest == file_selection.select_files("hf://a/b", reversed(entries("a.gguf", "c.json"))).digest
    others = [
        file_selection.select_files("hf://a/c", entries("a.gguf", "c.json")),
        file_selection.select_files("hf://a/b", entries("a.gguf")),
        file_selection.select_files("hf://a/b", entries("c.json", "a.gguf")),
        file_selection.select_files("hf://a/b", [one._replace(size=11) for one in entries("a.gguf", "c.json")]),
    ]
    assert len({one.digest, *(other.digest for other in others)}) == 5
    assert one.bytes == 20


def test_file_without_digest_is_named_by_a_hash_of_path_and_etag() -> None:
    assert ListedFile("a", 1, SHA).digest == ListedFile("a", 1, SHA).name == SHA
    unsaid = ListedFile("a", 1, "etag:x")
    assert unsaid.digest is None
    assert digest.parse_digest(unsaid.name)
    assert len({unsaid.name, unsaid._replace(path="b").name, unsaid._replace(claim="etag:y").name}) == 3
