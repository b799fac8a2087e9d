"""Fuzz target for registry archives: one kind of error, independent of splits, and no name outside the folder."""

from __future__ import annotations

import io
import os
import tarfile

from artifacts import safe_paths
from artifacts.archives.decompress import decompress_layer
from artifacts.archives.member_filter import Sieve
from artifacts.archives.tar_reader import BadArchiveError, Member
from artifacts.dialects.base import Encoding
from tests.fuzz.inputs.byte_splits import cut
from tests.support.builders.artifacts.tar_archives import END, Said, header, layer, member, pax, read

ENCODINGS: tuple[Encoding, ...] = ("tar", "tar+gzip", "tar+zstd")
_GZIP = bytes.fromhex("1f8b0800000000000203")
_ZSTD = b"\x28\xb5\x2f\xfd\x00\x00\x15\x00\x00hi\x01\x00\x00"
SEEDS = (
    b"\0" + member(b"a.gguf", b"x") + END[:512],
    b"\0" + pax({b"path": b"m/b.json"})[:1024] + header(b"a"),
    b"\0" + member(b"@", b"long.json\0", b"L") + header(b"a"),
    b"\0" + header(b"d/", 0, b"5") + header(b"l", 0, b"2", link=b"/etc"),
    b"\0" + header(b"a.gguf", b"\x80" + (600).to_bytes(11), magic=b"ustar  \0") + b"x" * 600,
    b"\1" + _GZIP + b"\x4b\x04\0\x43\xbe\xb7\xe8\x01\0\0\0",
    b"\2" + _ZSTD + _ZSTD,
)
WORDS = (
    *(b"ustar\x0000", b"ustar  \0", b"../", b"/", b"./", b"\0", b"\xff", b"20 path=../../x\n", b"12 size=512\n"),
    *(b"15 linkpath=/x\n", b"GNU.sparse.major", b"\x80\0\0\0\0\0\0\0", b"00000001000\0", b"0", b"5", b"x", b"L"),
    *(_GZIP, _ZSTD[:4], b"\x50\x2a\x4d\x18", END[:512]),
)


def archives(data: bytes) -> None:
    """A byte that selects the encoding, and a layer. Header checksums are corrected, to reach the code behind them."""
    if not data:
        return
    encoding = ENCODINGS[data[0] % 3]
    raw = summed(data[1:]) if encoding == "tar" else data[1:]
    whole = played(list(cut(raw, 512)), encoding)
    assert played(list(cut(raw, data[0] // 3 + 1)), encoding) == whole, "the cut matters"
    if isinstance(whole, str):
        assert whole.isprintable(), "the error is not one line"
        return
    judge(whole)
    if encoding == "tar":
        as_python(raw, whole)


def summed(data: bytes) -> bytes:
    """The archive with the correct checksum in every block that claims to be a header."""
    blocks = [bytearray(data[at : at + 512]) for at in range(0, len(data), 512)]
    for block in blocks:
        if block[257:262] == b"ustar":
            block[148:156] = b" " * 8
            block[148:156] = b"%06o\0 " % sum(block)
    return b"".join(blocks)


def played(pieces: list[bytes], encoding: Encoding) -> list[Said] | str:
    """The members, or the reason for the rejection."""
    try:
        return read(b"".join(decompress_layer(pieces, encoding, 1 << 20)), len(pieces) % 700 + 1)
    except BadArchiveError as error:
        return str(error)


def judge(reported: list[Said]) -> None:
    """Accepted members are inside the folder, and each path occurs once."""
    sieve, taken = Sieve(layer(b""), safe_paths.Tree()), set[str]()
    for path, size, kind, held in reported:
        assert len(held) == size
        try:
            one = sieve.judge(Member(path, size, kind))
        except BadArchiveError as error:
            if not str(error).isprintable():
                raise AssertionError("the error is not one line") from error
            continue
        if one is not None:
            assert kind in {"file", "folder"}
            assert os.path.normpath(f"/store/{one.path}") == f"/store/{one.path}"
            assert one.folder or one.path not in taken
            taken.add(one.path)


def as_python(raw: bytes, reported: list[Said]) -> None:
    """If all members are files and folders, Python's tarfile reads the same ones until it stops.
    It stops earlier, since it also validates the fields that we do not read.
    """
    if any(kind not in {"file", "folder"} for _, _, kind, _ in reported):
        return
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", errors="surrogateescape", encoding="utf-8") as archive:
            found = [(one.name.rstrip("/"), one.size) for one in archive]
    except tarfile.TarError:
        return
    assert found == [(path.rstrip("/"), size) for path, size, *_ in reported[: len(found)]]
