"""Writes tiny real checkpoints in the format of the Hub: a language model, an adapter for it, an embedding model.

The language model repeats one sentence, and is made like that of `loadtest.tiny_gguf`: its block adds nothing, so the
next token depends on the last one only. Format of weights: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path

from loadtest.tiny_gguf import TEMPLATE, WEIGHT, build_sparse_matrix, byte_letters

HEAD = 64
"""Width of an attention head: the minimum for vLLM on a CPU."""
END, SAY = 256, 257
Tensors = Mapping[str, tuple[tuple[int, ...], bytes]]
"""(shape, float32 little-endian) by name."""


def make_language_model(folder: Path, sentence: str, *, context_tokens: int) -> None:
    """Write a Llama checkpoint that repeats `sentence` (3 MB). No word may occur twice. It needs greedy decoding."""
    letters = byte_letters()
    words = [f"{' ' if number else ''}{word}" for number, word in enumerate(sentence.split(" "))]
    tokens = [*letters, "<|end|>", "<|say|>", *("".join(letters[b] for b in word.encode()) for word in words)]
    chain = [SAY, *range(SAY + 1, len(tokens)), SAY + 1]
    vocabulary = -(-len(tokens) // HEAD) * HEAD
    width = -(-vocabulary // (2 * HEAD)) * 2 * HEAD
    links = ((after, before, WEIGHT) for before, after in pairwise(chain))
    layer, ones = "model.layers.0", struct.pack("<f", 1.0) * width
    shapes = {
        **{f"self_attn.{name}_proj": (width, width) for name in "qkvo"},
        "mlp.gate_proj": (HEAD, width), "mlp.up_proj": (HEAD, width), "mlp.down_proj": (width, HEAD),
    }  # fmt: skip
    one_hot = ((token, token, 1.0) for token in range(vocabulary))
    tensors: Tensors = {
        "model.embed_tokens.weight": ((vocabulary, width), build_sparse_matrix(width, vocabulary, one_hot)),
        "lm_head.weight": ((vocabulary, width), build_sparse_matrix(width, vocabulary, links)),
        "model.norm.weight": ((width,), ones),
        f"{layer}.input_layernorm.weight": ((width,), ones),
        f"{layer}.post_attention_layernorm.weight": ((width,), ones),
        **{f"{layer}.{name}.weight": (shape, bytes(4 * shape[0] * shape[1])) for name, shape in shapes.items()},
    }
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(encode_tensors(tensors))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    documents: dict[str, dict[str, object]] = {
        "config.json": {
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width,
            "intermediate_size": HEAD, "num_hidden_layers": 1, "num_attention_heads": width // HEAD,
            "num_key_value_heads": width // HEAD, "head_dim": HEAD, "vocab_size": vocabulary,
            "max_position_embeddings": context_tokens, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": END, "eos_token_id": END,
            "pad_token_id": END, "torch_dtype": "float32", "attention_bias": False, "mlp_bias": False,
        },
        "generation_config.json": {"eos_token_id": END, "bos_token_id": END, "pad_token_id": END, "do_sample": False},
        "tokenizer.json": _tokenizer(tokens),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|end|>", "eos_token": "<|end|>",
            "pad_token": "<|end|>", "model_max_length": context_tokens, "chat_template": TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    }  # fmt: skip
    _write(folder, documents)


def _tokenizer(tokens: list[str]) -> dict[str, object]:
    """Return a byte-level tokenizer without merges."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None, "post_processor": None,
        "added_tokens": [{"id": number, "content": tokens[number], **plain} for number in (END, SAY)],
        "pre_tokenizer": byte_level, "decoder": byte_level,
        "model": {
            "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
            "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate(tokens)}, "merges": [],
        },
    }  # fmt: skip


def make_adapter(folder: Path, base: Path, *, rank: int = 8) -> None:
    """Write a LoRA adapter for a checkpoint of `make_language_model` that changes nothing: its B is zero."""
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors: Tensors = {
        f"{name}.lora_A.weight": ((rank, width), struct.pack("<f", 0.01) * rank * width),
        f"{name}.lora_B.weight": ((width, rank), bytes(4 * rank * width)),
    }
    folder.mkdir(parents=True)
    (folder / "adapter_model.safetensors").write_bytes(encode_tensors(tensors))
    config: dict[str, object] = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "lora_dropout": 0.0,
        "bias": "none", "target_modules": ["q_proj"], "base_model_name_or_path": str(base), "inference_mode": True,
    }  # fmt: skip
    _write(folder, {"adapter_config.json": config})


def make_embedding_model(folder: Path) -> None:
    """Write a BERT checkpoint with random weights (0.4 MB), always the same ones. Its vectors have 64 numbers."""
    width, inner, vocabulary, positions = 64, 128, 300, 128
    random_numbers = random.Random(7)

    def matrix(*shape: int) -> tuple[tuple[int, ...], bytes]:
        count = shape[0] * shape[1]
        return shape, struct.pack(f"<{count}f", *(random_numbers.gauss(0, 0.05) for _ in range(count)))

    def vector(value: float, count: int = width) -> tuple[tuple[int, ...], bytes]:
        return (count,), struct.pack("<f", value) * count

    rows = {"word": vocabulary, "position": positions, "token_type": 2}
    tensors = {f"embeddings.{name}_embeddings.weight": matrix(count, width) for name, count in rows.items()}
    layer = "encoder.layer.0"
    linear = {
        **{f"{layer}.attention.self.{name}": (width, width) for name in ("query", "key", "value")},
        f"{layer}.attention.output.dense": (width, width),
        f"{layer}.intermediate.dense": (inner, width), f"{layer}.output.dense": (width, inner),
        "pooler.dense": (width, width),
    }  # fmt: skip
    for name, shape in linear.items():
        tensors |= {f"{name}.weight": matrix(*shape), f"{name}.bias": vector(0.0, shape[0])}
    for name in ("embeddings", f"{layer}.attention.output", f"{layer}.output"):
        tensors |= {f"{name}.LayerNorm.weight": vector(1.0), f"{name}.LayerNorm.bias": vector(0.0)}
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(encode_tensors(tensors))
    letters = [chr(code) for code in range(33, 127)]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    words += [f"[unused{number}]" for number in range(vocabulary - len(words))]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    config: dict[str, object] = {
        "architectures": ["BertModel"], "model_type": "bert", "hidden_size": width, "num_hidden_layers": 1,
        "num_attention_heads": 2, "intermediate_size": inner, "vocab_size": vocabulary,
        "max_position_embeddings": positions, "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
        "pad_token_id": 0, "torch_dtype": "float32",
    }  # fmt: skip
    tokenizer: dict[str, object] = {
        "tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": positions,
    }  # fmt: skip
    _write(folder, {"config.json": config, "tokenizer_config.json": tokenizer})


def encode_tensors(tensors: Tensors) -> bytes:
    """Return the whole file of tensors."""
    head: dict[str, object] = {"__metadata__": {"format": "pt"}}
    data = bytearray()
    for name, (shape, content) in tensors.items():
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
        data += content
    raw = json.dumps(head).encode()
    raw += b" " * (-len(raw) % 8)
    return struct.pack("<Q", len(raw)) + raw + bytes(data)


def _write(folder: Path, documents: Mapping[str, Mapping[str, object]]) -> None:
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, ensure_ascii=False))
