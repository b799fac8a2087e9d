"""Real models of several architectures, all zeros: small files with caches and states of any size."""

from __future__ import annotations

from pathlib import Path

import gguf as reference
import numpy as np

WIDTH, INNER = 64, 128


class Written:
    """A file that llama.cpp can serve; its keys and tensors are written at the end."""

    def __init__(self, path: Path, architecture: str, layers: int, context_tokens: int, width: int = WIDTH) -> None:
        self.file = reference.GGUFWriter(str(path), architecture)
        self.file.add_context_length(context_tokens)
        self.width = width
        self.file.add_embedding_length(width)
        self.file.add_block_count(layers)
        self.file.add_layer_norm_rms_eps(1e-5)
        self._words()
        self.tensor("token_embd.weight", self.tokens, width)
        self.ones("output_norm.weight", width)
        self.tensor("output.weight", self.tokens, width)

    def _words(self) -> None:
        plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
        others = iter(range(256, 512))
        letters = [chr(b) if b in plain else chr(next(others)) for b in range(256)]
        self.tokens = len(letters) + 1
        self.file.add_tokenizer_model("gpt2")
        self.file.add_tokenizer_pre("gpt-2")
        self.file.add_token_list([*letters, "<|end|>"])
        self.file.add_token_types([1] * 256 + [3])
        self.file.add_token_merges([f"{letters[97]} {letters[98]}"])
        self.file.add_bos_token_id(256)
        self.file.add_eos_token_id(256)

    def tensor(self, name: str, *shape: int) -> None:
        """A tensor of zeros; slowest dimension first."""
        self.file.add_tensor(name, np.zeros(shape, np.float32))

    def ones(self, name: str, *shape: int) -> None:
        """A tensor of ones, which norms need."""
        self.file.add_tensor(name, np.ones(shape, np.float32))

    def attention(self, layer: int, heads: int, length: int) -> None:
        """The query, key, value and output projections."""
        for name in ("attn_q", "attn_k", "attn_v"):
            self.tensor(f"blk.{layer}.{name}.weight", heads * length, WIDTH)
        self.tensor(f"blk.{layer}.attn_output.weight", WIDTH, heads * length)

    def forward(self, layer: int) -> None:
        """The feed-forward layer."""
        for name in ("ffn_gate", "ffn_up"):
            self.tensor(f"blk.{layer}.{name}.weight", INNER, WIDTH)
        self.tensor(f"blk.{layer}.ffn_down.weight", WIDTH, INNER)

    def end(self) -> None:
        """Writes the file."""
        self.file.write_header_to_file()
        self.file.write_kv_data_to_file()
        self.file.write_tensors_to_file()
        self.file.close()


def attending(
    path: Path, *, layers: int = 4, heads: int = 8, length: int = 64, context_tokens: int = 65536, window: int = 0
) -> Path:
    """Attention in all layers: llama, or with a `window` gemma3, in which every sixth layer keeps all tokens."""
    made = Written(path, "gemma3" if window else "llama", layers, context_tokens)
    made.file.add_head_count(heads)
    made.file.add_head_count_kv(heads)
    made.file.add_key_length(length)
    made.file.add_value_length(length)
    made.file.add_feed_forward_length(INNER)
    made.file.add_rope_dimension_count(length)
    if window:
        made.file.add_sliding_window(window)
    for layer in range(layers):
        block = f"blk.{layer}"
        made.attention(layer, heads, length)
        made.forward(layer)
        for name in ("attn_norm", "ffn_norm", *(("post_attention_norm", "post_ffw_norm") if window else ())):
            made.ones(f"{block}.{name}.weight", WIDTH)
        for name in ("attn_q_norm", "attn_k_norm") if window else ():
            made.ones(f"{block}.{name}.weight", length)
    made.end()
    return path


def recurrent(path: Path, *, layers: int = 4, width: int = 256, state: int = 512, context_tokens: int = 65536) -> Path:
    """A mamba model: a state in all layers and no attention."""
    inner = 2 * width
    made = Written(path, "mamba", layers, context_tokens, width)
    made.file.add_head_count(0)
    made.file.add_feed_forward_length(0)
    made.file.add_ssm_conv_kernel(4)
    made.file.add_ssm_inner_size(inner)
    made.file.add_ssm_state_size(state)
    made.file.add_ssm_time_step_rank(4)
    for layer in range(layers):
        block = f"blk.{layer}"
        made.ones(f"{block}.attn_norm.weight", width)
        made.tensor(f"{block}.ssm_in.weight", 2 * inner, width)
        made.tensor(f"{block}.ssm_conv1d.weight", inner, 4)
        made.tensor(f"{block}.ssm_conv1d.bias", inner)
        made.tensor(f"{block}.ssm_x.weight", 4 + 2 * state, inner)
        made.tensor(f"{block}.ssm_dt.weight", inner, 4)
        made.tensor(f"{block}.ssm_dt.bias", inner)
        made.tensor(f"{block}.ssm_a", inner, state)
        made.tensor(f"{block}.ssm_d", inner)
        made.tensor(f"{block}.ssm_out.weight", width, inner)
    made.end()
    return path
