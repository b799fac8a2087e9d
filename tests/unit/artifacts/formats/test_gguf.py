"""GGUF headers: the values they contain, and a one-line error for any other file."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import gguf as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.formats import cpu_time_limit, gguf, gguf_shape
from artifacts.formats.cpu_time_limit import CpuTime
from artifacts.formats.memory_estimate import LayerShape, Shape
from loadtest import tiny_gguf
from tests.support.example_budget import examples


def write(
    path: Path, *, tokens: int = 3, heads_kv: int | list[int] = 2, key_length: int | None = None,
    tensors: tuple[str, ...] = ("token_embd.weight", "output.weight"),
) -> Path:  # fmt: skip
    """Write a two-block model with the reference package: width 64, 4 heads, context 2048."""
    w = reference.GGUFWriter(str(path), "llama")
    w.add_name("A name")
    w.add_context_length(2048)
    w.add_embedding_length(64)
    w.add_block_count(2)
    w.add_head_count(4)
    w.add_head_count_kv(heads_kv)
    w.add_token_list([f"token {i}" for i in range(tokens)])
    w.add_token_types([1] * tokens)
    if key_length:  # after the vocabulary on purpose: order does not matter
        w.add_key_length(key_length)
    for name in tensors:
        w.add_tensor(name, np.zeros((8, 64), np.float32))
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def wrong(path: Path, content: bytes) -> str:
    """Return the error for this content, without the file's name."""
    path.write_bytes(content)
    with pytest.raises(gguf.GgufError) as caught:
        gguf.load_gguf_info(path)
    line = str(caught.value)
    assert line.startswith(f"{path}: ")
    assert "\n" not in line
    return line.removeprefix(f"{path}: ")


def test_name_context_and_layer_shapes_are_read_from_a_gguf_header(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tokens=5)
    layer = LayerShape(key_elements=32, value_elements=32)
    shape = Shape(
        weights_bytes=path.stat().st_size, embedding_bytes=8 * 64 * 4, layers=(layer, layer), context_tokens=2048,
        vocabulary=5, width=64, inner=256, heads=4,
    )  # fmt: skip
    assert gguf.load_gguf_info(path) == gguf.GgufInfo(name="A name", architecture="llama", shape=shape)


@pytest.mark.parametrize(
    ("tensors", "embedding_bytes"),
    [
        (("blk.0.ffn_up.weight", "token_embd.weight", "output.weight"), 8 * 64 * 4),
        (("output.weight", "token_embd.weight", "blk.0.ffn_up.weight"), 8 * 64 * 4),
        (("token_embd.weight", "output_norm.weight"), 0),
        (("output.weight", "blk.0.ffn_up.weight"), 0),
    ],
)
def test_embedding_bytes_are_reported_only_if_an_output_tensor_exists(
    tmp_path: Path, tensors: tuple[str, ...], embedding_bytes: int
) -> None:
    path = write(tmp_path / "a.gguf", tensors=tensors)
    assert gguf.load_gguf_info(path).shape.embedding_bytes == embedding_bytes


def test_per_block_head_counts_set_the_cache_size_of_each_layer(tmp_path: Path) -> None:
    info = gguf.load_gguf_info(write(tmp_path / "a.gguf", heads_kv=[1, 3], key_length=32))
    assert [(one.key_elements, one.value_elements) for one in info.shape.layers] == [(32, 16), (96, 48)]


def test_error_for_a_header_above_the_cpu_time_limit_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.gguf"
    tiny_gguf.make_model(path, "x")
    monkeypatch.setattr(cpu_time_limit, "CPU_S_MAX", 0.0)
    with pytest.raises(gguf.GgufError, match=r"a\.gguf: its header takes more than 2 s to read"):
        gguf.load_gguf_info(path)


def test_partial_header_is_incomplete_until_its_last_byte_is_known(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.gguf", tokens=2, heads_kv=[1, 3]).read_bytes()
    path, complete = tmp_path / "a.gguf", list[bool]()
    for known_bytes in range(len(whole)):
        path.write_bytes(whole[:known_bytes].ljust(len(whole), b"\0"))
        complete.append(gguf.has_whole_header(path, known_bytes, CpuTime()))
    assert complete == sorted(complete)
    assert not complete[100]
    assert complete[-1]


def test_invalid_value_in_the_known_part_of_a_header_is_rejected(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", tokens=2).read_bytes()
    (tmp_path / "a.gguf").write_bytes(whole[:8] + b"\xff" * 8 + bytes(len(whole)))
    with pytest.raises(gguf.GgufError, match="tensors; at most"):
        gguf.has_whole_header(tmp_path / "a.gguf", 16, CpuTime())
    assert not gguf.has_whole_header(tmp_path / "a.gguf", 15, CpuTime())


def test_unopenable_path_raises_a_one_line_gguf_error(tmp_path: Path) -> None:
    for name, why in (
        ("a.gguf", r"a\.gguf: No such file or directory"),
        ("a" * 300, "File name too long"),
        ("a\0b", "embedded null byte"),
    ):
        with pytest.raises(gguf.GgufError, match=why) as caught:
            gguf.load_gguf_info(f"{tmp_path}/{name}")
        assert "\n" not in str(caught.value)


def test_large_vocabulary_is_counted_across_read_chunks(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf", tokens=200_000)
    assert path.stat().st_size > 3 * gguf.CHUNK_BYTES
    assert gguf.load_gguf_info(path).shape.vocabulary == 200_000


def test_sizes_of_split_model_parts_are_added(tmp_path: Path) -> None:
    first = write(tmp_path / "big-00001-of-00003.gguf")
    for part in (2, 3):
        (tmp_path / f"big-{part:05}-of-00003.gguf").write_bytes(bytes(1000))
    assert gguf.load_gguf_info(first).shape.weights_bytes == first.stat().st_size + 2000
    assert gguf.get_model_stem(first) == "big"
    assert [gguf.is_first_part(path) for path in sorted(tmp_path.iterdir())] == [True, False, False]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("big-00001-of-00002.gguf", r"big-00001-of-00002\.gguf: part 2 of 2 is missing: big-00002-of-00002\.gguf"),
        ("big-00002-of-00002.gguf", r"part 2 of 2; use the first, big-00001-of-00002\.gguf"),
    ],
)
def test_error_for_a_single_part_of_a_split_model_names_the_other_part(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(gguf.GgufError, match=message):
        gguf.load_gguf_info(write(tmp_path / name))


def test_foreign_unsupported_or_truncated_file_is_rejected_with_the_reason(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    good = write(tmp_path / "good.gguf").read_bytes()
    assert wrong(path, b"") == "not a GGUF file"
    assert wrong(path, b"PK\3\4" + good[4:]) == "not a GGUF file"
    assert wrong(path, good[:4] + struct.pack("<I", 1) + good[8:]) == "GGUF version 1; expected 2 or 3"
    assert wrong(path, good[:4] + struct.pack(">I", 3) + good[8:]) == "big-endian GGUF; convert it to little endian"
    assert wrong(path, good[:100]) == "truncated: its header ends behind the end of the file"
    assert wrong(path, good[:-4096]).startswith("truncated: its last tensor begins behind the end")


def claim(*parts: tuple[str, object]) -> bytes:
    """Return a header with these struct formats and values after magic, version and a count of zero tensors."""
    return b"GGUF" + struct.pack("<IQ", 3, 0) + b"".join(struct.pack("<" + form, value) for form, value in parts)


def test_gguf_header_with_invalid_lengths_or_types_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    huge = 1 << 62
    assert wrong(path, claim(("Q", huge))) == f"claims {huge} keys; at most {gguf.KEYS_MAX} are read"
    assert wrong(path, b"GGUF" + struct.pack("<IQQ", 3, huge, 0)).startswith(f"claims {huge} tensors")
    assert wrong(path, claim(("Q", 1), ("Q", huge))) == f"a name of {huge} bytes; at most {gguf.KEY_BYTES_MAX} are read"
    key = (("Q", 1), ("Q", 1), ("c", b"k"))
    truncated = "truncated: its header ends behind the end of the file"
    assert wrong(path, claim(*key, ("I", 8), ("Q", (1 << 64) - 1))) == truncated
    assert wrong(path, claim(*key, ("I", 9), ("I", 8), ("Q", (1 << 64) - 1))) == truncated
    assert wrong(path, claim(*key, ("I", 9), ("I", 8), ("Q", 2), ("Q", (1 << 64) - 1))) == truncated
    assert wrong(path, claim(*key, ("I", 9), ("I", 0), ("Q", (1 << 64) - 1))) == truncated
    assert wrong(path, claim(*key, ("I", 99))) == "'k' has unknown type 99"
    assert wrong(path, claim(*key, ("I", 9), ("I", 9), ("Q", 1))) == "'k' is an array of unknown type 9"


def test_gguf_keys_with_a_prefix_above_the_architecture_limit_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf, "KEPT_MAX", 10)
    longest = "a" * gguf_shape.ARCHITECTURE_CHARS_MAX
    for prefix, kept in ((longest, True), (f"{longest}a", False), (f"\U0001f600{'x' * 65_000}", False)):
        w = reference.GGUFWriter(str(tmp_path / "a.gguf"), "flux")
        for key in sorted(gguf_shape.KEYS):
            w.add_uint32(f"{prefix}.{key}", 1)
        w.write_header_to_file()
        w.write_kv_data_to_file()
        w.close()
        reason = "more than 10 metadata keys" if kept else r"flux\.block_count is missing"
        with pytest.raises(gguf.GgufError, match=reason):
            gguf.load_gguf_info(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    ("architecture", "kind", "message"),
    [
        ("clip", None, "a vision projector"),
        ("clip", reference.GGUFType.MMPROJ, "a vision projector"),
        ("llama", reference.GGUFType.ADAPTER, "a LoRA adapter"),
        ("llama", reference.GGUFType.IMATRIX, "an importance matrix"),
    ],
)
def test_gguf_file_that_is_not_a_model_is_rejected_with_its_kind(
    tmp_path: Path, architecture: str, kind: str | None, message: str
) -> None:
    w = reference.GGUFWriter(str(tmp_path / "a.gguf"), architecture)
    if kind is not None:
        w.add_type(kind)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    with pytest.raises(gguf.NotAModelError, match=f"a.gguf: {message}") as caught:
        gguf.load_gguf_info(tmp_path / "a.gguf")
    assert caught.value.kind == (kind or gguf.PROJECTOR)


def test_sizes_of_tensor_types_equal_those_of_the_reference_package() -> None:
    known = {int(kind): sizes for kind, sizes in reference.GGML_QUANT_SIZES.items()}
    assert gguf.TENSOR_BLOCKS.items() <= known.items()


@pytest.mark.parametrize("missing_bytes", [100, 500, 3000])
def test_file_that_ends_within_a_tensor_is_rejected_as_truncated(tmp_path: Path, missing_bytes: int) -> None:
    content = write(tmp_path / "a.gguf").read_bytes()
    assert "truncated: its last tensor" in wrong(tmp_path / "b.gguf", content[:-missing_bytes])


def test_file_that_is_no_language_model_is_rejected(tmp_path: Path) -> None:
    assert wrong(tmp_path / "a.gguf", claim(("Q", 0))) == "general.architecture is missing"
    w = reference.GGUFWriter(str(tmp_path / "b.gguf"), "flux")
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.close()
    with pytest.raises(gguf.GgufError, match=r"flux\.block_count is missing or not a number: not a language model\?"):
        gguf.load_gguf_info(tmp_path / "b.gguf")


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(data=st.data())
def test_damaged_file_is_read_or_rejected_with_gguf_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    tiny_gguf.make_model(path, "a b")
    content = bytearray(path.read_bytes()[:5000])
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=6)):
        content[at] = value
    path.write_bytes(content)
    with contextlib.suppress(gguf.GgufError):  # any other error fails
        assert gguf.load_gguf_info(path).shape.weights_bytes == len(content)


def test_header_values_of_a_tiny_model_equal_those_of_the_gguf_package(tmp_path: Path) -> None:
    path = tmp_path / "ada.gguf"
    tiny_gguf.make_model(path, "Hello, I am Ada.", context_tokens=1024)
    fields = reference.GGUFReader(path).fields
    info = gguf.load_gguf_info(path)
    assert (info.name, info.architecture, info.shape.context_tokens) == ("ada", "llama", 1024)
    assert info.shape.vocabulary == len(fields["tokenizer.ggml.tokens"].data)
    assert fields["llama.context_length"].contents() == 1024


@pytest.mark.parametrize("sentence", ["", "twice is twice", "two  spaces"])
def test_tiny_model_text_with_a_repeated_or_empty_word_is_rejected(tmp_path: Path, sentence: str) -> None:
    with pytest.raises(ValueError, match="no word twice"):
        tiny_gguf.make_model(tmp_path / "a.gguf", sentence)


@pytest.mark.parametrize(
    "architecture", ["\x1b]0;owned\x07", "a\nb", "x" * 81], ids=["an escape", "two lines", "81 characters"]
)
def test_unprintable_or_overlong_architecture_name_is_rejected(architecture: str) -> None:
    with pytest.raises(ValueError, match=r"^general\.architecture is not a name of at most 80 printable characters$"):
        gguf_shape.read_shape({"general.architecture": architecture}, 1)


def test_model_name_with_control_characters_is_replaced_by_the_file_stem(tmp_path: Path) -> None:
    path = write(tmp_path / "a.gguf")
    path.write_bytes(path.read_bytes().replace(b"A name", b"A\x1b[31m"))
    assert gguf.load_gguf_info(path).name == "a"
