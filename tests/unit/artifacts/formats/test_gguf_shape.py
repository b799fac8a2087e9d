"""Memory implied by the keys of a GGUF header: windows, states, latent attention, and odd or unknown values."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from artifacts.formats.gguf_shape import Value, read_shape
from artifacts.formats.memory_estimate import (
    BYTES_MAX,
    CONTEXT_BYTES,
    OVERHEAD_BYTES,
    ServingOptions,
    estimate_llama_cpp,
    estimate_paged_engine,
)

MIB = 1 << 20
EIGHT_B = {"block_count": 32, "embedding_length": 4096, "attention.head_count": 32, "attention.head_count_kv": 8}


def keys(architecture: str, **reported: Value | None) -> dict[str, Value]:
    """Return a header of this architecture; `__` stands for a dot."""
    own: dict[str, Value | None] = {"context_length": 4096, "feed_forward_length": 14336, **EIGHT_B}
    own |= {name.replace("__", "."): value for name, value in reported.items()}
    return {"general.architecture": architecture} | {
        f"{architecture}.{name}": value for name, value in own.items() if value is not None
    }


def part(name: str, metadata: dict[str, Value], **served: int) -> int:
    """Return the bytes of one part; the default is 4 slots of 4096 tokens."""
    made = estimate_llama_cpp(
        read_shape(metadata, 1000), replace(ServingOptions(slots=4, context_tokens=4096), **served)
    )
    return sum(item.bytes for item in made.items if item.name == name)


def test_full_attention_cache_holds_every_token_of_every_slot() -> None:
    """An 8B model with grouped heads is known to need 128 KiB per token."""
    assert part("cache", keys("llama")) == 4 * 4096 * (128 << 10)
    assert part("cache", keys("llama"), slots=1, context_tokens=100) == 256 * (128 << 10), "in cells of 256"
    assert part("checkpoints", keys("llama"), checkpoints=32) == 0


def test_sliding_window_reduces_the_cache_only_for_known_architectures() -> None:
    row, full = 2 * 8 * 128 * 2, 4 * 4096
    gemma = keys("gemma3", attention__sliding_window=1024)
    assert part("cache", gemma) == row * (5 * full + 27 * 4 * 1536)
    assert part("cache", keys("gemma3")) == 32 * row * full, "the header has no window"
    for expected in (None, 6, (1,) * 32):
        unknown = keys("brandnew", attention__sliding_window=1024, attention__sliding_window_pattern=expected)
        assert part("cache", unknown) == 32 * row * full
    assert part("cache", gemma, whole_windows=True) == 32 * row * full


def test_window_pattern_in_the_header_sets_the_cache_size() -> None:
    row, full = 2 * 8 * 128 * 2, 4 * 4096
    short = tuple(int(block % 2 == 0) for block in range(32))
    reported = keys("gemma4", attention__sliding_window=512, attention__sliding_window_pattern=short)
    assert part("cache", reported) == row * (16 * full + 16 * 4 * 1024)
    half = keys("gemma3", attention__sliding_window=1024, attention__sliding_window_pattern=2)
    assert part("cache", half) == row * (16 * full + 16 * 4 * 1536), "of two periods the one with more full layers"


def test_each_checkpoint_adds_window_and_state_memory_for_every_slot() -> None:
    window = keys("gemma3", attention__sliding_window=1024)
    assert part("checkpoints", window, checkpoints=3) == 3 * 4 * 27 * 1536 * 2 * 8 * 128 * 2
    assert part("checkpoints", window, checkpoints=3, whole_windows=True) == 0
    state = keys("mamba", attention__head_count=0, attention__head_count_kv=0, **MAMBA)
    assert part("checkpoints", state, checkpoints=3) == 3 * part("state", state) > 0


MAMBA: dict[str, Value] = {"ssm__conv_kernel": 4, "ssm__inner_size": 8192, "ssm__state_size": 16}
"""For one layer and slot: 8192 x 16 + 3 x 8192 elements."""
STATE = 4 * (8192 * 16 + 3 * 8192)


@pytest.mark.parametrize(
    ("architecture", "fields", "states", "attends"),
    [
        ("mamba", {"attention__head_count": 0, "attention__head_count_kv": 0}, 32, 0),
        ("mamba", {"attention__head_count": None, "attention__head_count_kv": None}, 32, 0),
        ("falcon-h1", {}, 32, 32),
        ("brandnew", {"attention__head_count_kv": (0,) * 24 + (8,) * 8}, 32, 8),
        ("jamba", {"attention__head_count_kv": (0,) * 28 + (8,) * 4}, 28, 4),
        ("jamba", {}, 32, 32),
        ("qwen3next", {}, 24, 8),
        ("qwen3next", {"full_attention_interval": 0}, 0, 32),
    ],
)
def test_recurrent_layers_need_state_and_attention_layers_need_cache(
    architecture: str, fields: dict[str, Value], states: int, attends: int
) -> None:
    header = keys(architecture, **MAMBA | fields)
    assert part("state", header) == 4 * states * STATE
    assert part("cache", header) == attends * 4 * 4096 * 2 * 8 * 128 * 2


def test_rwkv_kimi_and_lfm_state_is_counted_in_the_memory_estimate() -> None:
    rwkv = keys("rwkv7", attention__head_count=0, attention__head_count_kv=None, wkv__head_size=64)
    assert part("state", rwkv) == 4 * 32 * 4 * 4096 * (64 + 2)
    kimi = keys("kimi-linear", attention__head_count_kv=(0, 0, 0, 1) * 8, kda__head_dim=128, ssm__conv_kernel=4)
    assert part("state", kimi) == 4 * 24 * 4 * (32 * 128 * 128 + 3 * 3 * 32 * 128)
    lfm = keys("lfm2", attention__head_count_kv=(0, 8) * 16, shortconv__l_cache=3)
    assert part("state", lfm) == 4 * 16 * 4 * 4096 * 2


def test_latent_attention_cache_stores_one_compressed_row_per_token() -> None:
    latent = keys("deepseek2", attention__head_count_kv=1, attention__key_length=576, attention__value_length=512)
    assert part("cache", latent) == 32 * 4 * 4096 * (576 + 512) * 2
    index = keys("llama", attention__indexer__key_length=128)
    assert part("cache", index) - part("cache", keys("llama")) == 32 * 4 * 4096 * 128 * 2


@pytest.mark.parametrize("odd", [None, "many", -1, 2.5, True, (), (1, -5), 1 << 40])
def test_invalid_feed_forward_length_is_replaced_by_a_fallback(odd: Value | None) -> None:
    made = read_shape(keys("llama", feed_forward_length=odd), 1000)
    assert made.inner == (1 if odd == (1, -5) else 4 * 4096)


def test_unspecified_context_is_shared_by_all_slots() -> None:
    header = keys("llama")
    alone, shared = ServingOptions(slots=4, context_tokens=4096), ServingOptions(slots=4)
    one, all_ = estimate_llama_cpp(read_shape(header, 0), shared), estimate_llama_cpp(read_shape(header, 0), alone)
    assert 4 * one.items[0].bytes == all_.items[0].bytes
    assert (one.slot_bytes, all_.slot_bytes) == (0, 4096 * (128 << 10))


def test_quantized_cache_types_reduce_the_memory_estimate() -> None:
    made = read_shape(keys("llama"), 0)
    plain = estimate_llama_cpp(made, ServingOptions(slots=1, context_tokens=4096))
    quantised = estimate_llama_cpp(
        made, ServingOptions(slots=1, context_tokens=4096, key_bytes=34 / 32, value_bytes=34 / 32)
    )
    assert quantised.items[0].bytes == plain.items[0].bytes * 34 // 64
    scored = estimate_llama_cpp(made, ServingOptions(slots=1, context_tokens=4096, scores=True))
    assert (
        scored.total_bytes(gpus=True) - plain.total_bytes(gpus=True) == (4 + 2) * 512 * 32 * 4096
    )  # float32 and float16


def test_gpu_memory_estimate_excludes_prompts_embedding_and_process() -> None:
    made = estimate_llama_cpp(
        read_shape(keys("llama"), 10 * MIB, 3 * MIB),
        ServingOptions(slots=1, context_tokens=256, prompts_bytes=5 * MIB),
    )
    everywhere_bytes = sum(item.bytes for item in made.items if item.name in {"weights", "cache", "activation"})
    assert made.total_bytes(gpus=True) == everywhere_bytes + CONTEXT_BYTES
    assert made.total_bytes(gpus=False) == everywhere_bytes + (3 + 5) * MIB + OVERHEAD_BYTES
    assert made.items[0].bytes == 7 * MIB


def test_extreme_header_values_give_a_bounded_estimate() -> None:
    huge = (1 << 32) - 1
    reported = keys("llama", block_count=4096, attention__key_length=huge, attention__head_count_kv=(1 << 20) - 1)
    for make in (estimate_llama_cpp, estimate_paged_engine):
        made = make(read_shape(reported, 1 << 70), ServingOptions(slots=100_000, context_tokens=1_000_000_000))
        assert made.total_bytes(gpus=False) == BYTES_MAX
        assert max(made.slot_bytes, made.token_bytes, *(item.bytes for item in made.items)) <= BYTES_MAX


def test_paged_cache_estimate_holds_one_context_for_any_slot_count() -> None:
    made = read_shape(keys("llama"), 0)
    one, many = (
        estimate_paged_engine(made, ServingOptions(slots=1)),
        estimate_paged_engine(made, ServingOptions(slots=64)),
    )
    assert one.items[0] == many.items[0]
    assert one.items[0].bytes == 4096 * (128 << 10)
