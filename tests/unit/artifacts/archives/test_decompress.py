"""Decompression of layers: complete output, and decompression bombs stopped at a bounded cost."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from random import Random

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.archives import decompress
from artifacts.archives.tar_reader import BadArchiveError
from artifacts.dialects.base import Encoding
from tests.support.builders.artifacts.tar_archives import cut
from tests.support.example_budget import examples

GZIP: Encoding = "tar+gzip"
ZSTD: Encoding = "tar+zstd"
CONTENT = b"".join(number.to_bytes(3) for number in range(70_000)) + b"a" * 400_000
SKIPPABLE = b"\x50\x2a\x4d\x18\x05\0\0\0hello"


def packed(content: bytes, encoding: Encoding, *, fast: bool = False) -> bytes:
    if encoding == GZIP:
        return gzip.compress(content, 1 if fast else 9)
    return zstandard.ZstdCompressor(level=1 if fast else 9, write_checksum=not fast).compress(content)


def decompressed(content: bytes, encoding: Encoding, step: int = 1 << 20, bytes_max: int = 1 << 40) -> bytes:
    return b"".join(decompress.decompress_layer(cut(content, step), encoding, bytes_max))


@pytest.mark.parametrize("encoding", [GZIP, ZSTD])
@pytest.mark.parametrize("step", [1, 7, 511, 65_537, 1 << 20])
def test_decompressed_bytes_equal_the_original_for_every_chunk_size(encoding: Encoding, step: int) -> None:
    assert decompressed(packed(CONTENT, encoding), encoding, step) == CONTENT
    assert decompressed(packed(b"", encoding), encoding, step) == b""


def test_uncompressed_tar_passes_through_up_to_the_size_limit() -> None:
    assert decompressed(CONTENT, "tar", 1000) == CONTENT
    with pytest.raises(BadArchiveError, match="expands to more than 100 bytes"):
        decompressed(CONTENT, "tar", 10, 100)


@settings(derandomize=True, deadline=None, max_examples=examples(60))
@given(st.lists(st.binary(max_size=600), max_size=4), st.sampled_from([GZIP, ZSTD]), st.integers(1, 300))
def test_concatenated_members_and_frames_decompress_as_one_stream(
    parts: list[bytes], encoding: Encoding, step: int
) -> None:
    content = b"".join(packed(part, encoding, fast=bool(number % 2)) for number, part in enumerate(parts))
    if parts:
        assert decompressed(content, encoding, step) == b"".join(parts)


def test_zstd_stream_with_skippable_or_unsized_frames_is_decompressed() -> None:
    assert decompressed(SKIPPABLE + packed(CONTENT, ZSTD) + SKIPPABLE, ZSTD, 3) == CONTENT
    streamed = zstandard.ZstdCompressor().compressobj()  # the frame does not state its content size
    assert decompressed(streamed.compress(CONTENT) + streamed.flush(), ZSTD) == CONTENT


@pytest.mark.parametrize("encoding", [GZIP, ZSTD])
def test_truncated_compressed_stream_is_rejected_at_every_length(encoding: Encoding) -> None:
    content = packed(b"some bytes " * 30, encoding)
    for size in range(len(content)):
        with pytest.raises(BadArchiveError, match="truncated"):
            decompressed(content[:size], encoding)


@pytest.mark.parametrize("encoding", [GZIP, ZSTD])
@pytest.mark.parametrize("step", [1, 1 << 20])
def test_compressed_stream_with_an_inverted_byte_is_rejected(encoding: Encoding, step: int) -> None:
    content = packed(bytes(range(256)) * 30, encoding)
    for at in (0, len(content) // 2, len(content) - 2):
        damaged = content[:at] + bytes([content[at] ^ 0xFF]) + content[at + 1 :]
        with pytest.raises(BadArchiveError, match=r"corrupt|truncated"):
            decompressed(damaged, encoding, step)


@pytest.mark.point("6")
@pytest.mark.parametrize("encoding", [GZIP, ZSTD])
@pytest.mark.parametrize("behind", [bytes(512), b"garbage behind it", b"\x1f\x8b", b"\x28\xb5"])
def test_bytes_after_the_end_of_a_compressed_stream_are_rejected(encoding: Encoding, behind: bytes) -> None:
    with pytest.raises(BadArchiveError, match=r"other data follows it|truncated"):
        decompressed(packed(CONTENT, encoding) + behind, encoding)


def bomb(encoding: Encoding) -> bytes:
    """Return data that expands more than a thousandfold."""
    if encoding == ZSTD:
        return zstandard.compress(bytes(256 << 20))
    packer = zlib.compressobj(9, wbits=31)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(256)) + packer.flush()


@pytest.mark.point("6")
@pytest.mark.parametrize("encoding", [GZIP, ZSTD])
def test_decompression_bomb_is_rejected_within_the_output_limit(encoding: Encoding) -> None:
    content, sizes = bomb(encoding), list[int]()
    assert (256 << 20) / len(content) > 1000
    with pytest.raises(BadArchiveError, match="is a decompression bomb"):
        sizes.extend(len(piece) for piece in decompress.decompress_layer([content], encoding, 1 << 40))
    assert sum(sizes) <= decompress.FREE_BYTES
    assert max(sizes, default=0) <= decompress.PIECE_BYTES
    with pytest.raises(BadArchiveError, match="expands to more than 1000 bytes"):
        decompressed(content, encoding, bytes_max=1000)


@pytest.mark.point("6")
@pytest.mark.parametrize("encoding", [GZIP, ZSTD])
def test_decompression_bomb_in_many_members_or_before_data_is_rejected(
    encoding: Encoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decompress, "FREE_BYTES", 1 << 20)
    before_other_data = packed(bytes(64 << 20), encoding) + bytes(1 << 20)  # in the same piece of input
    for content, step in ((packed(bytes(200_000), encoding) * 40, 100), (before_other_data, 1 << 20)):
        with pytest.raises(BadArchiveError, match="is a decompression bomb"):
            decompressed(content, encoding, step)


@pytest.mark.point("6")
def test_nested_gzip_data_is_decompressed_only_once() -> None:
    inner = packed(bytes(1 << 20), GZIP)
    assert decompressed(packed(inner, GZIP), GZIP) == inner


@pytest.mark.point("6")
@pytest.mark.parametrize("log", [28, 31, 41])
def test_zstd_window_above_128_mib_is_rejected(log: int) -> None:
    assert decompressed(b"\x28\xb5\x2f\xfd\x00" + bytes([17 << 3]) + b"\x09\x00\x00x", ZSTD) == b"x", "exactly 128 MiB"
    window = bytes([(log - 10) << 3])
    with pytest.raises(BadArchiveError, match="requires more memory than 128 MiB"):
        decompressed(b"\x28\xb5\x2f\xfd\x00" + window + b"\x01\x00\x00", ZSTD)
    single = b"\x28\xb5\x2f\xfd\xe0" + (1 << log).to_bytes(8, "little") + b"\x01\x00\x00"
    with pytest.raises(BadArchiveError, match="requires more memory than 128 MiB"):
        decompressed(single, ZSTD)


@pytest.mark.point("6")
@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x28\xb5\x2f\xfd\x01\x00\x07\x01\x00\x00", "requires a dictionary, which is not supported"),
        (b"\x28\xb5\x2f\xfd\x08\x00\x01\x00\x00", "a reserved bit of its header is set"),
        (b"\x28\xb5\x2f\xfd\x00\x00\x07\x00\x00", "a block exceeds the maximum size"),  # a reserved block type
        (b"\x28\xb5\x2f\xfd\x00\x00\x03\x00\xff" + b"x", "a block exceeds the maximum size"),  # a run of 2 MiB
    ],
)
def test_zstd_dictionary_reserved_bit_or_oversized_block_is_rejected(content: bytes, why: str) -> None:
    with pytest.raises(BadArchiveError, match=why):
        decompressed(content, ZSTD)


def test_first_decompressed_piece_is_returned_before_most_input_is_read() -> None:
    asked, content = 0, packed(Random(1).randbytes(4 << 20), ZSTD)

    def pieces() -> Iterator[bytes]:
        nonlocal asked
        for piece in cut(content, 4096):
            asked += 1
            yield piece

    stream = decompress.decompress_layer(pieces(), ZSTD, 1 << 40)
    next(stream)
    assert asked <= (len(content) // 4096) // 16
