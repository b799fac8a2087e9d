"""Archives of any tool are parsed as they were written; those that two parsers could read differently are rejected."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.archives import tar_reader
from artifacts.archives.tar_reader import BadArchiveError, End, Member, Reader
from tests.support.builders.artifacts.tar_archives import (
    END,
    cut,
    gather,
    header,
    honest,
    member,
    padded,
    pax,
    read,
    record,
)
from tests.support.example_budget import examples

FORMS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}
FILES = {"a.gguf": b"weights" * 300, "d/empty.json": b"", "d/e/" + "n" * 90 + ".txt": b"x" * 512, "b": b"1"}
LONG = {"f" * 120 + "/" + "g" * 130 + ".json": b"{}", "m\u00fcll/\u6a21\u578b.txt": b"\xff\0" * 511}


def pythons(content: bytes) -> list[tuple[str, int, str, bytes]]:
    """Read the archive with tarfile."""
    found = []
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for one in archive:
            held = archive.extractfile(one) if one.isreg() else None
            kind = "folder" if one.isdir() else "file" if one.isreg() else "link" if one.issym() or one.islnk() else ""
            found.append((one.name, one.size, kind, held.read() if held else b""))
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("step", [0, 1, 100, 511, 512, 513])
def test_reader_and_tarfile_agree_on_archives_written_by_python(form: str, step: int) -> None:
    files = FILES | (LONG if form != "ustar" else {})
    content = honest(files, FORMS[form], folders=["d", "d/e"])
    assert read(content, step) == pythons(content)
    assert {path: held for path, _, kind, held in read(content, step) if kind == "file"} == files


@pytest.mark.standard
@pytest.mark.parametrize(
    "words",
    [
        *(("tar", f"--format={form}") for form in ("ustar", "gnu", "posix", "oldgnu")),
        ("tar", "--format=gnu", "-b2048"),
        *(("bsdtar", f"--format={form}") for form in ("ustar", "pax", "gnutar")),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("what", ["d", "."])
def test_reader_and_tarfile_agree_on_archives_written_by_tar_or_bsdtar(
    words: tuple[str, ...], what: str, tmp_path: Path
) -> None:
    if shutil.which(words[0]) is None:
        pytest.skip(f"there is no {words[0]} here")
    long = {} if "ustar" in words[1] else LONG
    for name, held in (FILES | long).items():
        path = tmp_path / "d" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(held)
    out = tmp_path / "out.tar"
    environment = os.environ | {"LC_ALL": "C.UTF-8"}
    folder = tmp_path if what == "d" else tmp_path / "d"
    subprocess.run([*words, "-cf", str(out), "-C", str(folder), what], check=True, env=environment)
    content = out.read_bytes()
    assert read(content) == pythons(content)
    assert {held for _, _, kind, held in read(content) if kind == "file"} == set((FILES | long).values())


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(
    st.dictionaries(
        st.text("ab/\u00e9.", min_size=1, max_size=12).filter(lambda name: not name.endswith("/")),
        st.binary(max_size=700),
        max_size=4,
    ),
    st.sampled_from(sorted(FORMS)),
    st.data(),
)
def test_content_read_from_a_tar_archive_is_independent_of_chunk_size(
    files: dict[str, bytes], form: str, data: st.DataObject
) -> None:
    content = honest(files, FORMS[form])
    whole = read(content)
    assert [(path, held) for path, _, _, held in whole] == list(files.items())
    assert read(content, data.draw(st.integers(1, 1100))) == whole


def test_tar_archive_split_at_any_byte_yields_the_same_members_and_data() -> None:
    content = honest({"a.gguf": b"weights" * 80} | LONG)
    whole = read(content)
    for at in range(len(content)):
        reader, events = Reader(), list[object]()
        for piece in (content[:at], content[at:]):
            events += [one if isinstance(one, Member | End) else bytes(one) for one in reader.feed(piece)]
        reader.close()
        assert b"".join(one for one in events if isinstance(one, bytes)) == b"".join(held for *_, held in whole)
        assert [one.path for one in events if isinstance(one, Member)] == [path for path, *_ in whole]
        assert sum(isinstance(one, End) for one in events) == len(whole)


def test_truncated_archive_is_rejected_at_every_length() -> None:
    content = member(b"a.txt", b"x" * 600) + END
    for size in range(len(content) - 512):
        with pytest.raises(BadArchiveError, match="truncated"):
            read(content[:size])


def test_tar_size_above_8_gib_is_read_from_a_pax_or_binary_field() -> None:
    size = 9 << 30
    first = next(iter(Reader().feed(pax({b"size": b"%d" % size}) + header(b"a.gguf", 0))))
    assert first == Member("a.gguf", size, "file")
    binary = b"\x80" + size.to_bytes(11)
    assert next(iter(Reader().feed(header(b"a.gguf", binary, magic=b"ustar  \0")))) == Member("a.gguf", size, "file")


def test_tar_member_data_is_returned_without_copying_the_input() -> None:
    reader, piece = Reader(), bytes(1 << 20)
    assert [type(one) for one in reader.feed(header(b"a.gguf", 1 << 40))] == [Member]
    for _ in range(3):
        (view,) = reader.feed(piece)
        assert isinstance(view, memoryview)
        assert view.obj is piece
        assert len(view) == len(piece)


@pytest.mark.point("5")
@pytest.mark.parametrize("flag", [b"1", b"2", b"3", b"4", b"6", b"7", b"S", b"M", b"V", b"D", b"N", b"z"])
def test_tar_member_that_is_no_file_is_reported_as_link_or_special(flag: bytes) -> None:
    ((path, _, kind, _),) = read(header(b"a.gguf", 0, flag, link=b"/etc/passwd") + END)
    assert (path, kind) == ("a.gguf", "link" if flag in {b"1", b"2"} else "special")


@pytest.mark.point("5")
@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (pax({b"linkpath": b"/etc/passwd"}) + header(b"a.gguf"), "link"),
        (member(b"././@LongLink", b"/etc/passwd\0", b"K") + header(b"a.gguf"), "link"),
        (pax({b"GNU.sparse.major": b"1", b"GNU.sparse.name": b"b.gguf"}) + header(b"a.gguf"), "special"),
        (pax({b"SCHILY.realsize": b"9"}) + header(b"a.gguf"), "special"),
    ],
)
def test_pax_and_gnu_link_or_sparse_headers_yield_no_regular_file(content: bytes, kind: str) -> None:
    assert [(path, what) for path, _, what, _ in read(content + END)] == [("a.gguf", kind)]


@pytest.mark.point("5")
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pax({b"path": b"b.gguf"}, b"g") + member(b"a.gguf"), "has global pax records that change its members"),
        (pax({b"size": b"512"}, b"g") + member(b"a.gguf"), "has global pax records that change its members"),
        (pax({b"path": b"b"}) + pax({b"path": b"c"}) + member(b"a"), "set the same property of a member"),
        (pax({b"path": b"b"}) + member(b"@", b"c\0", b"L") + member(b"a"), "set the same property of a member"),
        (member(b"@", record(b"path", b"b") + record(b"path", b"c"), b"x") + member(b"a"), "occurs twice"),
        (pax({b"path": b"b"}), "ends after the metadata of a member"),
        (pax({b"path": b""}) + member(b"a"), "is empty"),
        (pax({b"hdrcharset": b"BINARY"}) + member(b"a"), "not UTF-8"),
        (pax({b"path": b"\xff"}) + member(b"a"), "is not UTF-8"),
        (member(b"\xff"), "is not UTF-8"),
        (member(b"@", b"7 path=b\n", b"x") + member(b"a"), "record in the archive is corrupt"),
        (member(b"@", b"11 path=b\n", b"x") + member(b"a"), "record in the archive is corrupt"),
        (member(b"@", b"09 path=b\n", b"x") + member(b"a"), "record in the archive is corrupt"),
        (member(b"@", b"\0" * 9, b"L") + member(b"a"), "a long name in the archive is invalid"),
        (header(b"@", 0, b"L") + member(b"a"), "empty or larger"),
        (header(b"@", tar_reader.META_BYTES_MAX + 1, b"x"), "empty or larger than 256 KiB"),
        (pax({b"size": b"512"}) + header(b"a", 0) + bytes(512), "two sizes"),
        (pax({b"size": b"0"}) + header(b"a", 512) + bytes(512), "two sizes"),
        (pax({b"size": b"-1"}) + header(b"a"), "a size in the archive is invalid"),
        (pax({b"size": b"1e3"}) + header(b"a"), "a size in the archive is invalid"),
        (pax({b"size": b"010"}) + header(b"a"), "a size in the archive is invalid"),
        (member(b"a", b"x", b"2", link=b"b"), "is not a file but has a size"),
        (member(b"a/", b"x", b"5"), "is not a file but has a size"),
        (member(b"a", magic=bytes(8)), "not an archive in a supported format"),
        (header(b"a", magic=b"ustar  \0", prefix=b"0000000\0"), "an incremental backup"),
        (b"\x1f\x8b" + bytes(510), "its checksum is wrong"),
        (END + member(b"a") + END, "has data after its end"),
        (bytes(512) + member(b"a") + END, "has data after its end"),
    ],
)
def test_tar_archive_that_parsers_could_read_differently_is_rejected(content: bytes, message: str) -> None:
    for step in (0, 100):
        with pytest.raises(BadArchiveError, match=message) as caught:
            read(content + END, step)
        assert str(caught.value).isprintable()


@pytest.mark.point("5")
def test_archive_with_a_changed_header_byte_is_rejected() -> None:
    content = member(b"a.gguf", b"x")
    for at in (0, 99, 124, 156, 257, 345, 511):
        damaged = content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]
        with pytest.raises(BadArchiveError):
            read(damaged + END)


@pytest.mark.point("5")
def test_archive_above_the_member_limit_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tar_reader.ENTRIES_MAX <= 1_000_000
    monkeypatch.setattr(tar_reader, "ENTRIES_MAX", 100)
    assert len(read(member(b"a") * 100 + END)) == 100
    with pytest.raises(BadArchiveError, match="more than 100 members"):
        read(member(b"a") * 101 + END)
    with pytest.raises(BadArchiveError, match="more than 100 members"):
        read(pax({b"comment": b"x"}, b"g") * 101 + END)


@pytest.mark.point("6")
@pytest.mark.parametrize(
    "size",
    [
        b"777777777777",  # 64 GiB - 1: a valid size, but the bytes do not follow
        b"\x80\0\0\0\x7f\xff\xff\xff\xff\xff\xff\xff",  # 8 EiB
        b"\xff" * 12,  # -1
        b"\x80" + b"\xff" * 11,
        b"0000000000x\0",
        b"+0000000001\0",
    ],
)
def test_oversized_or_malformed_member_size_is_rejected(size: bytes) -> None:
    with pytest.raises(BadArchiveError, match=r"a number in the archive is invalid, or larger|truncated"):
        read(header(b"a.gguf", size) + END)
    for expected in (b"9223372036854775808", b"99999999999999999999"):
        with pytest.raises(BadArchiveError, match="a size in the archive is invalid, or larger"):
            read(pax({b"size": expected}) + header(b"a.gguf") + END)


@pytest.mark.point("6")
def test_tar_archive_with_18_mib_of_zeros_after_its_end_is_rejected() -> None:
    reader = Reader()
    list(reader.feed(member(b"a") + END))
    with pytest.raises(BadArchiveError, match="has data after its end"):
        gather((event for _ in range(18) for event in reader.feed(bytes(1 << 20))), [])


def test_padding_after_a_tar_member_is_not_part_of_its_content() -> None:
    content = header(b"a", 3) + padded(b"abc") + member(b"b", b"x" * 513) + END
    assert [held for *_, held in read(content, 7)] == [b"abc", b"x" * 513]
    assert b"".join(cut(content, 7)) == content
