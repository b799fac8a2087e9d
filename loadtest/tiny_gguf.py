"""Writes a tiny real language model that responds to every prompt with one sentence of its own.

For the demo and the tests: llama.cpp loads and runs the file like any other, so the text shows whether a request
reached the wrong model, lost a token or got two responses. Uses only the standard library, since the demo needs it.

The model has one block whose attention and feed-forward weights are zero, so its output depends only on the embedding
of the last token, which is one-hot. The output row of token b has its weight in the column of its predecessor a in the
sentence; the chat template ends with the token that starts the chain. The next word depends only on the last one,
so no word may occur twice. Format (version 3, little endian):
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

HEAD = 32
"""Width of the one attention head and of the feed-forward layer: the minimum for llama.cpp."""
ALIGNMENT = 32
WEIGHT = 4.0
"""Weight of a link of the chain. The norm multiplies it by the root of the width, so sampling has no effect."""
TEMPLATE = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}<|say|>"

UINT32, FLOAT32, BOOL, STRING, ARRAY, INT32 = 4, 6, 7, 8, 9, 5
NORMAL_TOKEN, CONTROL_TOKEN = 1, 3
MEAN_POOLING = 1

Value = str | int | float | bool | Sequence[str] | Sequence[int]


def make_model(
    path: Path | str, sentence: str, *, context_tokens: int = 4096, pools: bool = True, repeats: bool = False
) -> None:
    """Write the model (about 0.9 MB) to `path`. Raises ValueError if a word occurs twice or there is none.

    `pools`: whether the file names a pooling type, as models for embeddings do. Ollama uses such a model for nothing
    else. `repeats`: whether the model repeats the sentence until the limit of tokens, instead of stopping after it.
    """
    words = sentence.split(" ")
    if "" in words or len(set(words)) != len(words):
        raise ValueError("a sentence needs single spaces and no word twice: the next word depends on the last one only")
    letters = byte_letters()
    end, say = 256, 257
    spelled = ["".join(letters[b] for b in f"{' ' if i else ''}{word}".encode()) for i, word in enumerate(words)]
    tokens = [*letters, "<|end|>", "<|say|>", *spelled]
    chain = [say, *range(258, len(tokens)), 258 if repeats else end]
    width = -(-len(tokens) // HEAD) * HEAD
    metadata: dict[str, Value] = {
        "general.architecture": "llama",
        "general.name": Path(path).stem,
        "llama.context_length": context_tokens,
        "llama.embedding_length": width,
        "llama.block_count": 1,
        "llama.feed_forward_length": HEAD,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.key_length": HEAD,
        "llama.attention.value_length": HEAD,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.dimension_count": HEAD,
        "llama.vocab_size": len(tokens),
        **({"llama.pooling_type": MEAN_POOLING} if pools else {}),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL_TOKEN] * 256 + [CONTROL_TOKEN] * 2 + [NORMAL_TOKEN] * len(words),
        "tokenizer.ggml.merges": [f"{letters[97]} {letters[98]}"],
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }
    Path(path).write_bytes(encode_file(metadata, _tensors(len(tokens), width, chain)))


def byte_letters() -> list[str]:
    """Return the printable letter for each of the 256 bytes in GPT-2's byte-level vocabulary."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(others)) for b in range(256)]


def _tensors(vocabulary: int, width: int, chain: Sequence[int]) -> dict[str, tuple[tuple[int, ...], bytes]]:
    """Return (shape, data) by name. Shape has the fastest dimension first, as in the file; data is float32, LE."""
    one_hot = ((token, token, 1.0) for token in range(vocabulary))
    links = ((after, before, WEIGHT) for before, after in pairwise(chain))
    ones = struct.pack("<f", 1.0) * width
    tensors = {
        "token_embd.weight": ((width, vocabulary), build_sparse_matrix(width, vocabulary, one_hot)),
        "output_norm.weight": ((width,), ones),
        "output.weight": ((width, vocabulary), build_sparse_matrix(width, vocabulary, links)),
        "blk.0.attn_norm.weight": ((width,), ones),
        "blk.0.ffn_norm.weight": ((width,), ones),
    }
    for name in ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up"):
        tensors[f"blk.0.{name}.weight"] = ((width, HEAD), bytes(4 * width * HEAD))
    for name in ("attn_output", "ffn_down"):
        tensors[f"blk.0.{name}.weight"] = ((HEAD, width), bytes(4 * width * HEAD))
    return tensors


def build_sparse_matrix(width: int, rows: int, weights: Iterable[tuple[int, int, float]]) -> bytes:
    """Return a matrix of zeros except for `weights` (row, column, value)."""
    data = bytearray(4 * width * rows)
    for row, column, value in weights:
        struct.pack_into("<f", data, 4 * (row * width + column), value)
    return bytes(data)


def encode_file(metadata: Mapping[str, Value], tensors: Mapping[str, tuple[tuple[int, ...], bytes]]) -> bytes:
    """Return the whole file: header, metadata, tensor directory, padding, tensor data."""
    head = bytearray(b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)))
    for key, value in metadata.items():
        head += _string(key) + _typed(value)
    data = bytearray()
    for name, (shape, content) in tensors.items():
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, len(data))
        data += content + bytes(-len(content) % ALIGNMENT)
    return bytes(head + bytes(-len(head) % ALIGNMENT) + data)


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _typed(value: Value) -> bytes:
    """Encode a metadata value, preceded by its type."""
    if isinstance(value, bool):
        return struct.pack("<I?", BOOL, value)
    if isinstance(value, int):
        return struct.pack("<II", UINT32, value)
    if isinstance(value, float):
        return struct.pack("<If", FLOAT32, value)
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _string(value)
    texts = [item for item in value if isinstance(item, str)]
    if texts:
        return struct.pack("<IIQ", ARRAY, STRING, len(texts)) + b"".join(map(_string, texts))
    return struct.pack(f"<IIQ{len(value)}i", ARRAY, INT32, len(value), *(int(item) for item in value))


if __name__ == "__main__":
    try:
        make_model(sys.argv[1], sys.argv[2])
    except ValueError as error:
        sys.exit(f"tiny_gguf: {error}")
