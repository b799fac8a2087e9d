"""Fuzz targets for headers of weight files: one kind of error in one line, and a description within its bounds."""

from __future__ import annotations

import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Final

import msgspec

from artifacts.formats import gguf, hf_config
from artifacts.formats.cpu_time_limit import CpuTime
from artifacts.formats.gguf_shape import KEYS
from artifacts.formats.memory_estimate import Shape
from tests.fuzz.checks.error_messages import check_line, is_line
from tests.fuzz.inputs.json_mutations import VALUES, Written, mutated, written

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_FORMS: Final = {
    U8: "<B", I8: "<b", U16: "<H", I16: "<h", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?", U64: "<Q", I64: "<q",
    F64: "<d",
}  # fmt: skip
_COUNTS: Final = (
    0,
    1,
    2,
    3,
    4,
    5,
    17,
    4_095,
    4_096,
    4_097,
    65_536,
    100_000,
    100_001,
    2**31,
    2**32,
    2**62,
    2**63,
    2**64 - 1,
)
"""Claimed numbers or lengths of items."""
_ARCHITECTURES: Final = (
    b"llama",
    b"gemma3",
    b"gemma4",
    b"jamba",
    b"qwen3next",
    b"x\x1b[31m",
    b"",
    b"\xff",
    b"a.b",
    b"y" * 70_000,
)

Seeds = tuple[bytes, ...]


# --- GGUF ----------------------------------------------------------------------------------------------------------


def _text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def _key(name: bytes, kind: int, value: bytes) -> bytes:
    return _text(name) + struct.pack("<I", kind) + value


def _usual(architecture: bytes = b"llama") -> list[bytes]:
    """The keys of a language model with two blocks."""
    numbers = {"block_count": 2, "context_length": 2048, "embedding_length": 64, "attention.head_count": 4}
    begin = [
        _key(b"general.architecture", STRING, _text(architecture)),
        _key(b"general.name", STRING, _text(b"A name")),
    ]
    tokens = struct.pack("<IQ", STRING, 3) + b"".join(map(_text, (b"a", b"", b"\xff" * 9)))
    return [
        *begin,
        *(_key(architecture + b"." + name.encode(), U32, struct.pack("<I", value)) for name, value in numbers.items()),
        _key(b"tokenizer.ggml.tokens", ARRAY, tokens),
    ]


def _tensor(name: bytes, dimensions: int, offset: int) -> bytes:
    return _text(name) + struct.pack(f"<I{dimensions}QIQ", dimensions, *(8,) * dimensions, 0, offset)


def _file(
    keys: list[bytes], tensors: list[bytes], data: bytes, *, key_count: int, tensor_count: int, version: int
) -> bytes:
    begin = b"GGUF" + struct.pack("<IQQ", version, tensor_count % 2**64, key_count % 2**64)
    return begin + b"".join(keys) + b"".join(tensors) + data


def _whole(architecture: bytes = b"llama") -> bytes:
    keys, tensors = _usual(architecture), [_tensor(b"token_embd.weight", 2, 0)]
    return _file(keys, tensors, bytes(64), key_count=len(keys), tensor_count=1, version=3)


GGUF_SEEDS: Final[Seeds] = tuple(map(_whole, (b"llama", b"gemma4", b"jamba", b"qwen3next")))
GGUF_WORDS: Final[Seeds] = (
    *(struct.pack("<Q", count) for count in _COUNTS), *(struct.pack("<I", kind) for kind in range(14)), b"GGUF",
    b"llama.",
    *(name.encode() for name in sorted(KEYS)), b"general.architecture", b"general.name", b"tokenizer.ggml.tokens",
    b"\x1b[31m",
)  # fmt: skip


def _scalar(kind: int, random: Random) -> bytes:
    """A number of this type, often an extreme one."""
    form, width = _FORMS[kind], struct.calcsize(_FORMS[kind])
    if random.random() < 0.5:
        return random.choice(
            (b"\x00" * width, b"\xff" * width, b"\x7f".rjust(width, b"\xff"), b"\x80".rjust(width, b"\x00"))
        )
    return struct.pack(form, random.choice((0, 1, 2, 100)))


def _value(random: Random, depth: int = 0) -> tuple[int, bytes]:
    """(type, bytes) of a value that may claim more than it has."""
    kind = random.choice((*_FORMS, STRING, ARRAY, ARRAY, 13, 2**32 - 1))
    if kind in _FORMS:
        return kind, _scalar(kind, random)
    if kind == STRING:
        text = random.choice((b"", b"a", b"\xff\xfe", b"\x1b]0;x\x07", b"z" * 70_000))
        return kind, struct.pack("<Q", random.choice((len(text), len(text), random.choice(_COUNTS)))) + text
    if kind != ARRAY:
        return kind, bytes(8)
    inner = random.choice((*_FORMS, STRING, STRING, ARRAY, 14))
    many = random.choice((0, 1, 2, 3, 2, 2, 4_096, 4_097))
    if inner in _FORMS:
        items = b"".join(_scalar(inner, random) for _ in range(min(many, 3))) * (many // min(many, 3) if many else 1)
    elif inner == STRING:
        items = _text(random.choice((b"", b"ab", b"\x00"))) * many
    else:
        items = _value(random, depth + 1)[1] if depth < 20 else b""
    return kind, struct.pack("<IQ", inner, random.choice((many, many, many, random.choice(_COUNTS)))) + items


def gguf_case(random: Random) -> bytes:
    """A file with valid and invalid keys, counts and tensors."""
    architecture = random.choice((b"llama", b"llama", b"llama", *_ARCHITECTURES))
    keys = _usual(architecture)
    for _ in range(random.randint(0, 6)):
        name = architecture + b"." + random.choice(sorted(KEYS)).encode()
        other = random.choice(
            (name, name, b"general.name", b"general.architecture", b"tokenizer.ggml.tokens", b"k" * 66_000, b"")
        )
        kind, value = _value(random)
        keys.insert(random.randint(0, len(keys)), _key(other, kind, value))
    if random.random() < 0.2:  # all keys that count, often with the maximum value
        for counted in sorted(KEYS - {"block_count"}):
            number = struct.pack("<Q", random.choice((0, 1, 64, 2**20 - 1, 2**32 - 1)))
            keys.append(_key(architecture + b"." + counted.encode(), U64, number))
    if random.random() < 0.3:
        keys.pop(random.randrange(len(keys)))
    if random.random() < 0.1 and sum(map(len, keys)) < 10_000:
        keys *= random.choice((2, 20, 200))
    tensors = [
        _tensor(b"t" * random.choice((0, 5, 300)), random.choice((0, 1, 2, 4, 5)), random.choice(_COUNTS) % 2**64)
        for _ in range(random.choice((0, 1, 3)))
    ]
    counts = [len(keys), len(tensors)]
    if random.random() < 0.3:
        counts[random.randrange(2)] = random.choice(_COUNTS)
    made = _file(
        keys,
        tensors,
        bytes(random.choice((0, 64, 4096))),
        key_count=counts[0],
        tensor_count=counts[1],
        version=random.choice((3, 3, 3, 2, 1, 3 << 24, 0)),
    )
    return made[: random.randrange(len(made))] if random.random() < 0.2 else made


def headers(data: bytes) -> None:
    """The content of a GGUF file."""
    path = _folder() / "a.gguf"
    path.write_bytes(data)
    try:
        info = gguf.load_gguf_info(path)
    except gguf.GgufError as error:
        _is_refused(error, path)
        return
    assert is_line(info.name), "the name is not one line"
    assert is_line(info.architecture), "the architecture is not one line"
    _is_sound(info.shape)
    assert gguf.has_whole_header(path, len(data), CpuTime())


# --- config.json and safetensors ----------------------------------------------------------------------------------

_CUT: Final = b"\n---\n"
"""Separates the files of an input: config.json, a safetensors file, and an optional index."""
_CONFIG: Final[dict[str, object]] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 64,
    "max_position_embeddings": 2048, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 100,
    "intermediate_size": 256, "torch_dtype": "bfloat16",
}  # fmt: skip
_CONFIGS: Final[tuple[dict[str, object], ...]] = (
    _CONFIG,
    {"model_type": "gemma3", "text_config": _CONFIG},
    _CONFIG | {"layer_types": ["full_attention", "linear_attention"], "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
               "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_conv_kernel_dim": 4},
    _CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 512},
    _CONFIG | {"model_type": "mamba2", "state_size": 128, "expand": 2, "n_groups": 8, "conv_kernel": 4,
    "linear_attn_config": {"num_heads": 4, "head_dim": 16}},
)  # fmt: skip
_TENSORS: Final[dict[str, object]] = {
    "__metadata__": {"format": "pt"},
    "model.embed_tokens.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [0, 128]},
    "lm_head.weight": {"dtype": "BF16", "shape": [8, 8], "data_offsets": [128, 256]},
}  # fmt: skip
_INDEX: Final[dict[str, object]] = {
    "metadata": {"total_size": 256},
    "weight_map": {"lm_head.weight": "a.safetensors", "model.embed_tokens.weight": "a.safetensors"},
}  # fmt: skip
_NUMBERS: Final[tuple[object, ...]] = (
    0, 1, -1, 2**20, 2**32 - 1, 2**32, 2**53, 2**63, 2**64, 1.5, 1e308, True, "2", None, 4_096, 4_097,
    Written(b"9" * 500),
)  # fmt: skip


_SIZES: Final = (
    "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim", "kv_lora_rank",
    "intermediate_size",
    "mamba_d_state", "mamba_d_ssm", "mamba_n_groups", "mamba_d_conv", "linear_num_value_heads", "linear_key_head_dim",
    "linear_value_head_dim", "linear_num_key_heads", "linear_conv_kernel_dim", "conv_L_cache", "num_experts_per_tok",
    "moe_intermediate_size",
)  # fmt: skip
"""Keys of config.json that are multiplied with each other."""


def _tensors(header: bytes, length: int | None = None, data: bytes = bytes(256)) -> bytes:
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + data


FOLDER_SEEDS: Final[Seeds] = tuple(
    json.dumps(config).encode() + _CUT + _tensors(json.dumps(_TENSORS).encode()) + end
    for config in _CONFIGS
    for end in (b"", _CUT + json.dumps(_INDEX).encode())
)
FOLDER_WORDS: Final[Seeds] = (
    _CUT, b'"data_offsets":[0,9]', b'"data_offsets":[0,99999999999999999999]', b'"layer_types":[', b'"a.safetensors"',
    b'"../a"', b"-1",
    b"1e999", b"null", b"{}", b"[]", b'"\\ud800"', b"\xff", b'"\\u001b[31m"', b'"num_hidden_layers":4097',
    b"4294967296",
)  # fmt: skip


def folder_case(random: Random) -> bytes:
    """A folder of which one or more files are changed."""
    values = random.choice((VALUES, _NUMBERS))
    config, tensors, index = random.choice(_CONFIGS), _TENSORS, _INDEX
    if random.random() < 0.2:
        config = config | {name: random.choice((1, 64, 2**32 - 1)) for name in _SIZES if random.random() < 0.7}
    which = random.randrange(4)
    files = [
        mutated(config, random, values) if which in {0, 3} else written(config),
        _tensors(
            mutated(tensors, random, values) if which in {1, 3} else written(tensors),
            random.choice(_COUNTS) if random.random() < 0.1 else None, bytes(random.choice((256, 256, 255, 0))),
        ),
    ]  # fmt: skip
    if which == 2 or random.random() < 0.2:
        files.append(mutated(index, random, values))
    return _CUT.join(files)


def folders(data: bytes) -> None:
    """A folder with config.json, one file of weights, and an optional index."""
    folder = _folder()
    names = ("config.json", "a.safetensors", hf_config.INDEX)
    for name in names:
        (folder / name).unlink(missing_ok=True)
    for name, content in zip(names, data.split(_CUT, 2), strict=False):
        (folder / name).write_bytes(content)
    try:
        info = hf_config.load_config_info(folder)
    except hf_config.ConfigError as error:
        _is_refused(error, folder)
        return
    assert is_line(info.architecture), "the architecture is not one line"
    _is_sound(info.shape)


# --- both ----------------------------------------------------------------------------------------------------------


def _is_refused(error: Exception, path: Path) -> None:
    assert str(error).startswith(str(path)), "the error does not begin with the path"
    check_line(error)


def _is_sound(shape: Shape) -> None:
    """An agent sends the shape as JSON, and the autoscaler reads it within the bounds of its type."""
    assert msgspec.json.decode(msgspec.json.encode(shape), type=Shape) == shape, "another shape is read than was sent"
    assert len(shape.layers) <= 4_096


@cache
def _temporary() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="pilotlight-fuzz-")


def _folder() -> Path:
    """The folder for the files of an input."""
    return Path(_temporary().name)
