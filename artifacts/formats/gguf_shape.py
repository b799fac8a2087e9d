"""Derives what an architecture keeps in memory (`artifacts.formats.memory_estimate.Shape`) from GGUF header keys. Pure.

Knows the relevant keys, and the architectures for which llama.cpp keeps less than all tokens in all layers. Unlisted
architectures are overestimated: full attention in every layer that has heads, and a state in every layer if the header
mentions one, since a layer of a hybrid may have both (falcon-h1). Latent attention (MLA) needs no rule: such headers
declare one head with the width of the cached row. The attention values are counted in addition to that row, since older
servers store them.

Keys that are not needed for serving may be invalid or missing; then a common default is used. Raises ValueError with a
reason if the file is not a language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeGuard

from artifacts.formats.memory_estimate import LayerShape, Shape, clamp_shape

KEYS = frozenset(
    {
        "attention.head_count", "attention.head_count_kv", "attention.indexer.key_length", "attention.key_length",
        "attention.key_length_swa", "attention.sliding_window", "attention.sliding_window_pattern",
        "attention.value_length", "attention.value_length_swa", "block_count", "context_length", "embedding_length",
        "expert_feed_forward_length", "expert_used_count", "feed_forward_length", "full_attention_interval",
        "kda.head_dim", "shortconv.l_cache", "ssm.conv_kernel", "ssm.group_count", "ssm.inner_size", "ssm.state_size",
        "token_shift_count", "wkv.head_size",
    }
)  # fmt: skip
"""Keys that are read, below the architecture prefix. Values are numbers, or one number per block."""
LAYERS_MAX = 4096
ARCHITECTURE_CHARS_MAX = 80
NUMBER_MAX = 1 << 32

Value = str | int | float | bool | tuple[int, ...]

PERIODS = {
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "cohere2": 4, "gpt-oss": 2, "exaone4": 4, "olmo2": 4, "afmoe": 4,
    "plamo3": 8,
}  # fmt: skip
"""Architectures in which every n-th layer keeps all tokens and the others a window (src/models/ of llama.cpp)."""
PATTERNS = frozenset({"gemma4", "mimo2"})
"""Architectures whose servers read from the header which layers have a window."""
INTERVALS = frozenset({"qwen3next", "qwen35", "qwen35moe"})
"""Every n-th layer has attention and no state, the others a state and no attention."""
EITHER = frozenset(
    {"jamba", "nemotron_h", "nemotron_h_moe", "granitehybrid", "lfm2", "lfm2moe", "kimi-linear", "plamo2"}
)
"""A layer without key heads has a state, the others have none."""


def read_shape(metadata: Mapping[str, Value], weights_bytes: int, embedding_bytes: int = 0) -> Shape:
    """Derive the shape from the header. Raises ValueError."""
    keys = _Keys(metadata)
    blocks = keys.needed("block_count")
    if blocks > LAYERS_MAX:
        raise ValueError(f"{keys.architecture}.block_count is above {LAYERS_MAX}")
    heads = keys.per_block("attention.head_count", blocks)
    words = metadata.get("tokenizer.ggml.tokens", 0)
    width = keys.needed("embedding_length")
    inner = keys.number("feed_forward_length", 4 * width)
    experts = keys.number("expert_used_count", 0) * keys.number("expert_feed_forward_length", inner)
    return clamp_shape(Shape(
        weights_bytes=weights_bytes,
        embedding_bytes=embedding_bytes,
        layers=_layers(keys, blocks, width, heads),
        context_tokens=keys.needed("context_length"),
        vocabulary=words if isinstance(words, int) else 0,
        width=width,
        inner=max(inner, experts),
        heads=max((*heads, 0)),
    ))  # fmt: skip


def _layers(keys: _Keys, blocks: int, width: int, heads: tuple[int, ...]) -> tuple[LayerShape, ...]:
    heads_kv = keys.per_block("attention.head_count_kv", blocks) or heads or (0,) * blocks
    length = width // max(*heads, 1, 1)
    key, value = keys.needed("attention.key_length", length), keys.needed("attention.value_length", length)
    key_short = keys.number("attention.key_length_swa", key)
    value_short = keys.number("attention.value_length_swa", value)
    index, window = keys.number("attention.indexer.key_length", 0), keys.number("attention.sliding_window", 0)
    short = _short(keys, blocks) if window else (False,) * blocks
    state_bytes = _state_bytes(keys, width, max((*heads, 0)))
    made = []
    for block in range(blocks):
        attends, recurs = _parts(keys, block, heads_kv)
        many = heads_kv[block] if attends else 0
        made.append(
            LayerShape(
                key_elements=many * (key_short if short[block] else key) + (index if many else 0),
                value_elements=many * (value_short if short[block] else value),
                window_tokens=window if short[block] else 0,
                state_bytes=state_bytes if recurs else 0,
            )
        )
    return tuple(made)


def _short(keys: _Keys, blocks: int) -> tuple[bool, ...]:
    """Return which layers keep only a window. If two periods apply, the shorter is used: it has more full layers."""
    said = keys.metadata.get(f"{keys.architecture}.attention.sliding_window_pattern")
    if keys.architecture in PATTERNS and isinstance(said, tuple) and len(said) == blocks:
        return tuple(bool(one) for one in said)
    period = PERIODS.get(keys.architecture, 1)
    if isinstance(said, int) and not isinstance(said, bool) and said > 0:
        period = min(period, said)
    return tuple(block % period < period - 1 for block in range(blocks))


def _parts(keys: _Keys, block: int, heads_kv: tuple[int, ...]) -> tuple[bool, bool]:
    """Return whether a layer has attention, and whether it has a recurrent state (if layers of this model have one)."""
    if keys.architecture in INTERVALS:
        full = (block + 1) % max(1, keys.number("full_attention_interval", 4)) == 0
        return full, not full
    if keys.architecture in EITHER and 0 in heads_kv:
        return heads_kv[block] > 0, heads_kv[block] == 0
    return True, True


def _state_bytes(keys: _Keys, width: int, heads: int) -> int:
    """State size per recurrent layer and slot, float32: the carried state and the last inputs of its convolution."""
    back = max(0, keys.number("ssm.conv_kernel", 0) - 1)
    inner, carried = keys.number("ssm.inner_size", 0), keys.number("ssm.state_size", 0)
    elements = inner * carried + back * (inner + 2 * keys.number("ssm.group_count", 0) * carried)
    delta = keys.number("kda.head_dim", 0)
    elements += heads * delta * delta + 3 * back * heads * delta
    wkv = keys.number("wkv.head_size", 0)
    elements += width * (wkv + keys.number("token_shift_count", 2)) if wkv else 0
    elements += width * max(0, keys.number("shortconv.l_cache", 0) - 1)
    return 4 * elements


def is_known_key(key: str) -> bool:
    """Whether `read_shape` reads this key for some architecture."""
    architecture, _, name = key.partition(".")
    return name in KEYS and len(architecture) <= ARCHITECTURE_CHARS_MAX


class _Keys:
    """The header's keys below the architecture prefix."""

    def __init__(self, metadata: Mapping[str, Value]) -> None:
        match metadata.get("general.architecture"):
            case str(architecture) if architecture.isprintable() and len(architecture) <= ARCHITECTURE_CHARS_MAX:
                self.architecture, self.metadata = architecture, metadata
            case str():  # the name is shown in terminals and logs
                raise ValueError(
                    f"general.architecture is not a name of at most {ARCHITECTURE_CHARS_MAX} printable characters"
                )
            case _:
                raise ValueError("general.architecture is missing")

    def needed(self, key: str, default: int | None = None) -> int:
        """Return a required number, or `default` if it is missing. Raises ValueError."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if not _is_number(value):
            raise ValueError(f"{self.architecture}.{key} is missing or not a number: not a language model?")
        return value

    def number(self, key: str, default: int) -> int:
        """Return an optional number; the largest if there is one per block, `default` if it is missing or invalid."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        largest = max(value, default=None) if isinstance(value, tuple) else value
        return largest if _is_number(largest) else default

    def per_block(self, key: str, blocks: int) -> tuple[int, ...]:
        """Return one number per block (a single number applies to all); empty if the key is missing."""
        value = self.metadata.get(f"{self.architecture}.{key}")
        numbers = value if isinstance(value, tuple) else () if value is None else (value,) * blocks
        if numbers and len(numbers) != blocks:
            raise ValueError(f"{len(numbers)} attention head counts for {blocks} blocks")
        if not all(isinstance(n, int) and 0 <= n < 1 << 20 for n in numbers):
            raise ValueError("an attention head count is not a number")
        return tuple(int(n) for n in numbers)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < NUMBER_MAX
