"""Derives what a model keeps in memory from a folder with config.json and safetensors files. I/O.

Reads config.json, the index, and the header of each weights file. All input is untrusted: reads are bounded, and no
allocation depends on an unchecked number. ConfigError is one line that names the file and the fault. Missing or invalid
keys get a common default that errs on the high side.

Format: https://huggingface.co/docs/safetensors (eight bytes with the length of a header in JSON, then the data).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import msgspec

from artifacts.formats.cpu_time_limit import OVERTIME, CpuTime
from artifacts.formats.magic import open_regular_file
from artifacts.formats.memory_estimate import LayerShape, Shape, clamp_shape

CONFIG_BYTES_MAX, CONFIG_VALUES_MAX = 4 << 20, 200_000
INDEX_BYTES_MAX, INDEX_VALUES_MAX = 32 << 20, 400_000
HEADER_BYTES_MAX, HEADER_VALUES_MAX = 64 << 20, 1_000_000
"""Limits of what is decoded. The largest index of a public model has 150,000 values, the largest header 200,000."""
WIDE_BYTES_MAX = 16 << 20
"""Limit of a text that has escapes or characters outside of ASCII. One such character makes Python store a name at up
to four bytes per character.
"""
FILES_MAX = 4096
NAME_CHARS_MAX = 255
LAYERS_MAX = 4096
NUMBER_MAX = 1 << 32
INDEX = "model.safetensors.index.json"
STATES_ONLY = frozenset({"linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe_mamba"})
"""Layer kinds (`layer_types`) that keep a state and no tokens."""

Keys = Mapping[str, object]
T = TypeVar("T")


class ConfigError(Exception):
    """The folder holds no servable model; the message is one line that begins with a path."""


class _Index(msgspec.Struct, frozen=True):
    """The index file, which maps each tensor to its file."""

    weight_map: dict[str, str]


class _Tensor(msgspec.Struct, frozen=True):
    """One entry of a safetensors header."""

    data_offsets: tuple[int, int] | None = None


class ConfigInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The model's architecture name and shape."""

    architecture: str
    shape: Shape


_decode_tensor = msgspec.json.Decoder(_Tensor).decode


def load_config_info(folder: Path, cpu: CpuTime | None = None) -> ConfigInfo:
    """Read a model folder. `cpu`: limit of all headers of an artifact. Raises ConfigError."""
    cpu = cpu or CpuTime()
    with cpu.spend():
        return _config_info(folder, cpu)


def _config_info(folder: Path, cpu: CpuTime) -> ConfigInfo:
    path = folder / "config.json"
    keys = _decoded(path, _text(path, CONFIG_BYTES_MAX), CONFIG_VALUES_MAX, dict[str, object], cpu)
    inside = keys.get("text_config", keys)
    if not isinstance(inside, Mapping):
        raise ConfigError(f"{path}: text_config is not an object")
    kind = keys.get("model_type", inside.get("model_type"))
    if not isinstance(kind, str) or not kind.isprintable():
        raise ConfigError(f"{path}: model_type is missing or not a text: not a language model?")
    try:
        return ConfigInfo(architecture=kind[:80], shape=read_shape(inside, _weights_bytes(folder, cpu)))
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_shape(keys: Keys, weights_bytes: int) -> Shape:
    """Derive the shape from the keys of config.json. Raises ValueError."""
    layers, width = _needed(keys, "num_hidden_layers", "n_layer"), _needed(keys, "hidden_size", "n_embd", "d_model")
    if layers > LAYERS_MAX:
        raise ValueError(f"num_hidden_layers is above {LAYERS_MAX}")
    heads = _number(keys, 0, "num_attention_heads", "n_head")
    inner = _number(keys, 4 * width, "intermediate_size", "n_inner", "ffn_dim")
    experts = _number(keys, 0, "num_experts_per_tok") * _number(keys, inner, "moe_intermediate_size")
    said = keys.get("layer_types")
    kinds = said if isinstance(said, list) and len(said) == layers else [""] * layers
    row, state_bytes = _row(keys, width, heads), _state_bytes(keys, width)
    return clamp_shape(Shape(
        weights_bytes=weights_bytes,
        layers=tuple(_layer(kind, row, state_bytes) for kind in kinds),
        context_tokens=_needed(keys, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        vocabulary=_number(keys, 0, "vocab_size"),
        width=width,
        inner=max(inner, experts),
        heads=heads,
    ))  # fmt: skip


def _layer(kind: object, row: tuple[int, int], state_bytes: int) -> LayerShape:
    """A layer of a known kind keeps either tokens or a state; any other kind is assumed to keep both."""
    if not isinstance(kind, str):  # an unhashable value such as a list cannot be looked up
        kind = ""
    if kind in STATES_ONLY and state_bytes:
        return LayerShape(state_bytes=state_bytes)
    attends = kind in {"full_attention", "sliding_attention", "chunked_attention", "attention"}
    return LayerShape(key_elements=row[0], value_elements=row[1], state_bytes=0 if attends else state_bytes)


def _row(keys: Keys, width: int, heads: int) -> tuple[int, int]:
    """Elements of keys and of values per token and layer."""
    latent = _number(keys, 0, "kv_lora_rank")
    if latent:  # one row holds both
        return latent + _number(keys, 64, "qk_rope_head_dim") + _number(keys, 0, "index_head_dim"), 0
    length = _number(keys, width // max(1, heads), "head_dim")
    many = _number(keys, heads, "num_key_value_heads", "n_head_kv")
    return many * length, many * _number(keys, length, "v_head_dim")


def _state_bytes(keys: Keys, width: int) -> int:
    """State size per recurrent layer and request, as float32."""
    carried = _number(keys, 0, "mamba_d_state", "ssm_state_size", "state_size", "mamba_state_dim")
    inner = _number(keys, width * _number(keys, 2, "mamba_expand", "expand"), "mamba_d_ssm", "mamba_intermediate_size")
    groups = _number(keys, 1, "mamba_n_groups", "n_groups")
    back = max(0, _number(keys, 4, "mamba_d_conv", "conv_kernel", "d_conv") - 1)
    elements = carried * inner + back * (inner + 2 * groups * carried) if carried else 0
    many = _number(keys, 0, "linear_num_value_heads")
    key, value = _number(keys, 0, "linear_key_head_dim"), _number(keys, 0, "linear_value_head_dim")
    mixed = 2 * _number(keys, many, "linear_num_key_heads") * key + many * value
    elements += many * key * value + max(0, _number(keys, 4, "linear_conv_kernel_dim") - 1) * mixed
    own = keys.get("linear_attn_config")
    if isinstance(own, Mapping):
        many, key = _number(own, 0, "num_heads"), _number(own, 0, "head_dim")
        elements += many * key * key + 3 * max(0, _number(own, 4, "short_conv_kernel_size") - 1) * many * key
    elements += width * _number(keys, 0, "conv_L_cache")
    if str(keys.get("model_type", "")).startswith("rwkv"):
        elements += width * (_number(keys, 64, "head_size", "head_dim") + 2)
    return 4 * elements


def _needed(keys: Keys, *names: str) -> int:
    found = _number(keys, -1, *names)
    if found < 0:
        raise ValueError(f"{names[0]} is missing or not a number: not a language model?")
    return found


def _number(keys: Keys, default: int, *names: str) -> int:
    """Return the first of these keys that is a valid number, else `default`."""
    for name in names:
        value = keys.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUMBER_MAX:
            return value
    return default


def _weights_bytes(folder: Path, cpu: CpuTime) -> int:
    """Return the size of all weights files. Raises ConfigError that names the first missing or incomplete file."""
    index = folder / INDEX
    if not _exists(index):
        names = _names(folder)
        if not names:
            raise ConfigError(f"{folder}: contains no .safetensors file")
    else:
        found = _decoded(index, _text(index, INDEX_BYTES_MAX), INDEX_VALUES_MAX, _Index, cpu)
        names = sorted(set(found.weight_map.values()))
    if len(names) > FILES_MAX:
        raise ConfigError(f"{folder}: more than {FILES_MAX} weights files")
    odd = next((name for name in names if not _is_file_name(name)), None)
    if odd is not None:
        raise ConfigError(f"{index}: {odd[:80]!r} is not a file name")
    return sum(_file_bytes(folder / name, cpu) for name in names)


def _is_file_name(name: str) -> bool:
    return name.isprintable() and "/" not in name and len(name) <= NAME_CHARS_MAX and name not in {"", ".", ".."}


def _names(folder: Path) -> list[str]:
    try:
        return sorted(path.name for path in folder.glob("*.safetensors"))
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _file_bytes(path: Path, cpu: CpuTime) -> int:
    """Return the file size if the header proves that it is complete."""
    try:
        with open_regular_file(path) as file:
            size, begin = path.stat().st_size, file.read(8)
            length = int.from_bytes(begin, "little")
            if len(begin) < 8 or length > min(HEADER_BYTES_MAX, size - 8):
                raise ConfigError(f"{path}: not a safetensors file, or truncated")
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    tensors = _decoded(path, text, HEADER_VALUES_MAX, dict[str, msgspec.Raw], cpu)
    last = 0
    for name, tensor in tensors.items():
        _limit_time(path, cpu)
        if name != "__metadata__":
            last = max(last, _end(path, tensor))
    if 8 + length + last > size:
        raise ConfigError(f"{path}: truncated: its last tensor ends behind the end of the file")
    return size


def _end(path: Path, tensor: msgspec.Raw) -> int:
    """Return the end offset of a tensor's data."""
    try:
        offsets = _decode_tensor(tensor).data_offsets
    except msgspec.ValidationError:
        offsets = None
    if offsets is None or offsets[1] < 0:
        raise ConfigError(f"{path}: a tensor without data_offsets")
    return offsets[1]


def _text(path: Path, most: int) -> bytes:
    """Read a file of at most `most` bytes."""
    try:
        with open_regular_file(path) as file:
            text = file.read(most + 1)
    except (OSError, ValueError) as error:  # ValueError: the path contains NUL
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > most:
        raise ConfigError(f"{path}: larger than {most >> 20} MiB")
    return text


def _limit_time(path: Path, cpu: CpuTime) -> None:
    if cpu.is_spent():
        raise ConfigError(f"{path}: {OVERTIME}")


def _decoded(path: Path, text: bytes, values_max: int, kind: type[T], cpu: CpuTime) -> T:
    """Decode JSON as this type; members outside of the type are skipped without creating objects."""
    if len(text) > WIDE_BYTES_MAX and (b"\\" in text or not text.isascii()):
        limit = WIDE_BYTES_MAX >> 20
        raise ConfigError(f"{path}: larger than {limit} MiB, with escapes or characters outside of ASCII")
    if sum(map(text.count, (b",", b"[", b"{"))) > values_max:
        raise ConfigError(f"{path}: more than {values_max} values")
    try:
        found = msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {str(error)[:120]}") from None
    _limit_time(path, cpu)
    return found
