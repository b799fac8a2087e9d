"""Archives are unpacked as files and folders only: nothing outside the folder, over existing files, or incomplete."""

from __future__ import annotations

import gzip
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zstandard

from artifacts import digest, safe_paths
from artifacts.archives import member_filter
from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects.artifact_contents import File
from artifacts.dialects.base import Encoding
from artifacts.fetch import unpack
from artifacts.fetch.unpack import Unpacked, Unpacking
from artifacts.file_kinds import Role
from tests.support.builders.artifacts.packed_models import read_files
from tests.support.builders.artifacts.tar_archives import END, cut, header, honest, layer, member, pax

MODEL = {"model.safetensors": b"w" * 5000, "config.json": b"{}", "sub/tokenizer.json": b"{}", "sub/a/README.md": b"#"}
ROOM = 1 << 20


@pytest.fixture(name="below")
def _below(tmp_path: Path) -> Path:
    """A folder with siblings that must stay unchanged."""
    (tmp_path / "out-evil").mkdir()
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def lay(
    below: Path, content: bytes | Iterator[bytes], of: File | None = None, *,
    room: int = ROOM, root: str = "", allow_unsafe: bool = False,
) -> list[Unpacked]:  # fmt: skip
    folder = os.open(below, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with Unpacking(folder, safe_paths.Tree(), room, root=root, allow_unsafe=allow_unsafe) as unpacking:
            if isinstance(content, bytes):
                return unpacking.archive(of or layer(content), cut(content, 700))
            return unpacking.archive(layer(b""), content)
    finally:
        os.close(folder)


def lay_all(below: Path, layers: list[bytes], room: int = ROOM) -> None:
    folder = os.open(below, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with Unpacking(folder, safe_paths.Tree(), room) as unpacking:
            for content in layers:
                unpacking.archive(layer(content), [content])
    finally:
        os.close(folder)


def refused(below: Path, content: bytes, message: str, of: File | None = None, *, allow_unsafe: bool = False) -> None:
    """Assert that the archive is rejected and nothing is left, in the folder or next to it."""
    beside = sorted(below.parent.rglob("*"))
    with pytest.raises(BadArchiveError, match=message) as caught:
        lay(below, content, of, allow_unsafe=allow_unsafe)
    assert str(caught.value).isprintable()
    assert sorted(below.parent.rglob("*")) == beside
    assert (below.parent / "secret").read_text() == "mine"


@pytest.mark.parametrize("encoding", ["tar", "tar+gzip", "tar+zstd"])
def test_unpacked_files_have_the_archived_bytes_and_listed_digests(encoding: Encoding, below: Path) -> None:
    content = honest(MODEL, folders=["sub", "empty"])
    packed = {"tar": content, "tar+gzip": gzip.compress(content), "tar+zstd": zstandard.compress(content)}[encoding]
    found = lay(below, packed, layer(content, encoding))
    assert {one.path: one.size for one in found} == {path: len(held) for path, held in MODEL.items()}
    assert {one.path: one.role for one in found}["sub/tokenizer.json"] == "tokenizer"
    assert {one.path: one.digest for one in found} == {
        path: digest.compute_digest(held) for path, held in MODEL.items()
    }
    assert read_files(below) == MODEL
    assert (below / "empty").is_dir()


@pytest.mark.parametrize("encoding", ["tar", "tar+gzip", "tar+zstd"])
def test_archive_without_members_is_rejected_in_every_encoding(encoding: Encoding, below: Path) -> None:
    content = bytes(10240)
    packed = {"tar": content, "tar+gzip": gzip.compress(content), "tar+zstd": zstandard.compress(content)}[encoding]
    refused(below, packed, "is empty: it contains no file", layer(content, encoding))
    refused(below, b"", "truncated|ends|empty", layer(b"", encoding))


def test_dot_slash_archive_without_subfolder_entries_is_unpacked(below: Path) -> None:
    content = header(b"./", 0, b"5") + member(b"./a/b/model.gguf", b"x") + member(b"a/config.json", b"{}") + END
    lay(below, content)
    assert read_files(below) == {"a/b/model.gguf": b"x", "a/config.json": b"{}"}


def test_unpacked_files_have_mode_644_for_any_mode_in_the_archive(below: Path) -> None:
    before = os.umask(0o077)
    try:
        lay(
            below,
            member(b"d/", flag=b"5", mode=0o7777)
            + member(b"d/a.gguf", b"x", mode=0o6777)
            + member(b"b.gguf", mode=0)
            + END,
        )
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in below.rglob("*")}
    assert modes == {"d": 0o755, "a.gguf": 0o644, "b.gguf": 0o644}


def test_only_the_models_folder_of_an_image_is_unpacked(below: Path) -> None:
    software = header(b"bin/sh", 0, b"2", link=b"busybox") + header(b"dev/null", 0, b"3") + member(b"../x", b"x")
    content = software + member(b"models/", flag=b"5") + member(b"./models/model.gguf", b"x") + software + END
    assert [one.path for one in lay(below, content, root="models")] == ["model.gguf"]
    assert read_files(below) == {"model.gguf": b"x"}
    for bad in (header(b"models", 0, b"2", link=b"/etc"), header(b"models/x.gguf", 0, b"2", link=b"/etc/passwd")):
        with pytest.raises(BadArchiveError, match="is a link, not a file or folder"):
            lay(below, bad + END, root="models")
    with pytest.raises(BadArchiveError, match="has an empty part"):
        lay(below, member(b"models/../x.gguf", b"x") + END, root="models")


def test_first_candidate_folder_with_members_is_the_archives_model_root() -> None:
    content = member(b"a.gguf") + member(b"./models/b.gguf") + END
    names = [one.path for one in unpack.iter_members([content], layer(content))]
    assert names == ["a.gguf", "./models/b.gguf"]
    assert member_filter.select_model_root(("models", ""), names) == "models"
    assert member_filter.select_model_root(("x", "models"), names) == "models"
    assert member_filter.select_model_root(("models", ""), ["a", "models-evil/x"]) == ""
    assert member_filter.select_model_root(("",), iter(())) == ""
    with pytest.raises(BadArchiveError, match="the archive has no folder models"):
        member_filter.select_model_root(("models",), ["a.gguf"])


def test_archive_with_a_target_folder_is_unpacked_below_it(below: Path) -> None:
    content = member(b"a.gguf", b"x") + END
    assert lay(below, content, layer(content, under="lora"))[0].path == "lora/a.gguf"
    refused(below, content, "in it", layer(content, under="../out-evil"))


def test_layers_with_colliding_paths_or_excess_total_size_are_rejected(below: Path) -> None:
    first, again = member(b"d/a.gguf", b"x" * 60) + END, member(b"D/A.gguf", b"y") + END
    second = member(b"d/b.gguf", b"x" * 60) + END
    for other, room, expected in (
        (again, ROOM, "in conflict with 'd/a.gguf'"),
        (second, 100, "more than the 100 bytes reserved"),
    ):
        with pytest.raises(BadArchiveError, match=expected):
            lay_all(below, [first, other], room)
        assert not list(below.iterdir()), "nothing is left of the first layer either"
    lay_all(below, [first, second], 120)
    assert sorted(read_files(below)) == ["d/a.gguf", "d/b.gguf"]


@pytest.mark.point("5")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (header(b"x", 0, b"2", link=b"../secret") + member(b"x", b"pwned"), "'x' is a link"),
        (header(b"d", 0, b"2", link=b"..") + member(b"d/secret", b"pwned"), "'d' is a link"),
        (
            member(b"a.gguf", b"x") + header(b"b", 0, b"2", link=b"..") + header(b"c", 0, b"2", link=b"b/out-evil"),
            "is a link",
        ),
        (header(b"x.gguf", 0, b"1", link=b"../secret"), "is a link"),
        (header(b"x.gguf", 0, b"1", link=b"/etc/passwd"), "is a link"),
        (header(b"x.gguf", 0, b"1", link=b"ARCHITECTURE.md"), "is a link"),
        (header(b"", 0, b"2", link=b".."), "is a link"),
        (pax({b"linkpath": b"../secret"}) + header(b"x.gguf"), "is a link"),
        (pax({b"path": b"../out-evil/x.gguf"}) + member(b"x.gguf", b"pwned"), "or .. in it"),
        (member(b"@", b"../out-evil/x.gguf\0", b"L") + member(b"x.gguf", b"pwned"), "or .. in it"),
        (member(b"../out-evil/x.gguf", b"pwned"), "or .. in it"),
        (member(b"../out-evil/", flag=b"5"), "or .. in it"),
        (member(b"/tmp/x.gguf", b"pwned"), "is absolute"),
        (member(b"./../secret", b"pwned"), "or .. in it"),
        (member(b"././a.gguf", b"x"), "or .. in it"),
        (member(b"a//b.gguf", b"x"), "or .. in it"),
        (member(b"a\\..\\b.gguf", b"x"), "backslash"),
        (member(b"", b"x"), "names no file"),
        (member(b".", b"x"), "names no file"),
        (member(b"/", flag=b"5"), "names no file"),
        (member(b"a.gguf/", b"x"), "or .. in it"),
        (member(b".wh.model.gguf"), "reserved"),
        (header(b"x.gguf", 0, b"3"), "is a device"),
        (header(b"x.gguf", 0, b"4"), "is a device"),
        (header(b"x.gguf", 0, b"6"), "is a device, a pipe"),
        (header(b"x.gguf", 0, b"S", magic=b"ustar  \0"), "sparse"),
        (pax({b"GNU.sparse.major": b"1", b"GNU.sparse.minor": b"0"}) + member(b"x.gguf", b"x"), "sparse"),
        (pax({b"path": b"n" * 300 + b".gguf"}) + member(b"x", b"x"), "a part longer than 255"),
        (pax({b"path": b"/".join([b"n" * 200] * 30)}) + member(b"x", b"x"), "longer than 1024 bytes"),
        (
            member(b"a/b/c/d.gguf", b"x") + member(b"a/b.gguf/x", b"x") + member(b"a/b.gguf", b"x"),
            "is in conflict with",
        ),
        (member(b"a.gguf", b"x") + member(b"A.GGUF", b"y"), "in conflict with 'a.gguf'"),
        (member(b"a.gguf", b"x") * 2, "is a duplicate"),
        (member(b"a.gguf/", flag=b"5") + member(b"a.gguf", b"x"), "is a duplicate"),
        (member(b"a.gguf", b"x") + member(b"a.gguf/", flag=b"5"), "is a duplicate"),
    ],
)
def test_archive_with_links_special_files_or_invalid_paths_is_rejected(
    content: bytes, message: str, below: Path
) -> None:
    refused(below, member(b"first.gguf", b"x") + content + END, message, allow_unsafe=True)


@pytest.mark.point("16")
@pytest.mark.parametrize("name", ["modeling.py", "pytorch_model.bin", "run.sh", "x.gguf.pkl", "libx.so.1", "passwd"])
def test_unsafe_files_in_archives_are_rejected_unless_they_are_allowed(name: str, below: Path) -> None:
    content = member(b"a.gguf", b"x") + member(f"d/{name}".encode(), b"x") + END
    refused(below, content, rf"in the archive: d/{name}: .*allowUnsafe")
    roles: tuple[Role, ...] = ("weight", "config", "doc")
    for role in roles:
        of = layer(content, role=role)
        if name != "passwd":
            refused(below, content, "allowUnsafe", of)
    assert [one.path for one in lay(below, content, allow_unsafe=True)] == ["a.gguf", f"d/{name}"]


@pytest.mark.point("5")
def test_unpacking_never_writes_through_an_existing_link_or_file(below: Path) -> None:
    (below / "d").symlink_to("../out-evil")
    (below / "x.gguf").symlink_to("../secret")
    (below / "f").write_text("f")
    (below / "y.gguf").hardlink_to(below.parent / "secret")
    for name, expected in (
        (b"d/x.gguf", "not a folder"),
        (b"x.gguf", "the path already"),
        (b"f/x.gguf", "not a folder"),
        (b"y.gguf", "the path already"),
    ):
        refused(below, member(b"ok/a.gguf", b"x") + member(name, b"pwned") + END, expected)


@pytest.mark.point("6")
def test_archive_larger_than_the_reserved_size_is_rejected(below: Path) -> None:
    content = member(b"a.gguf", b"x" * 600) + header(b"b.gguf", 500) + END
    with pytest.raises(BadArchiveError, match="more than the 1000 bytes reserved"):
        lay(below, content, room=1000)
    huge = pax({b"size": b"9000000000000"}) + header(b"b.gguf") + END
    refused(below, huge, f"more than the {ROOM} bytes reserved")


@pytest.mark.parametrize("cut_at", [600, 1300, 2000, 2600])
def test_truncated_archive_leaves_no_files(cut_at: int, below: Path) -> None:
    content = member(b"d/a.gguf", b"x" * 600) + member(b"d/e/b.gguf", b"y") + END
    refused(below, content[:cut_at], "truncated")


def test_unpacking_a_failing_input_stream_leaves_no_files(below: Path) -> None:
    def breaking() -> Iterator[bytes]:
        yield member(b"d/a.gguf", b"x" * 600)
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError):
        lay(below, breaking())
    assert not list(below.iterdir())


def test_failed_unpack_keeps_files_written_by_another_process(below: Path) -> None:
    def bringing() -> Iterator[bytes]:
        yield member(b"d/a.gguf", b"x")
        (below / "d" / "theirs").write_text("x")

    with pytest.raises(BadArchiveError, match="truncated"):
        lay(below, bringing())
    assert read_files(below) == {"d/theirs": b"x"}


def test_unpacking_closes_every_file_and_syncs_all_paths(below: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = list[str](), os.fsync

    def kept(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()).removeprefix(str(below)))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", kept)
    before = len(list(Path("/proc/self/fd").iterdir()))
    lay(below, honest(MODEL))
    refusing = header(b"x", 0, b"2", link=b"y") + END
    with pytest.raises(BadArchiveError):
        lay(below, refusing)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert sorted(synced) == sorted([*(f"/{path}" for path in MODEL), "/sub/a", "/sub", ""])
    assert synced.index("/sub/a") < synced.index("/sub") < synced.index("")
