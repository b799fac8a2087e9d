"""Writes a LoRA adapter for a model of `loadtest.tiny_gguf`."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

from loadtest import tiny_gguf

ADAPTER_WEIGHT = 3 * tiny_gguf.WEIGHT
"""Weight of a link of an adapter's chain, which is added to the model's own."""


def make_adapter(path: Path | str, sentence: str, adapted: str) -> None:
    """Write a LoRA adapter that makes the model of `sentence` say `adapted`: the same first word, then some others.

    Each link of its chain is one rank: `lora_a` selects the previous token, `lora_b` the next one. Raises ValueError if
    a word occurs twice or is not in the sentence.
    """
    words, chosen = sentence.split(" "), adapted.split(" ")
    if len(set(chosen)) != len(chosen) or not {*chosen} <= {*words} or chosen[0] != words[0]:
        raise ValueError("an adapter's sentence begins with the model's first word and uses each of its words once")
    end, say, first = 256, 257, 258
    vocabulary = first + len(words)
    width = -(-vocabulary // tiny_gguf.HEAD) * tiny_gguf.HEAD
    links = list(pairwise([say, *(first + words.index(word) for word in chosen), end]))
    metadata: dict[str, tiny_gguf.Value] = {
        "general.architecture": "llama",
        "general.type": "adapter",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(len(links)),
    }
    befores = ((rank, before, 1.0) for rank, (before, _) in enumerate(links))
    afters = ((after, rank, ADAPTER_WEIGHT) for rank, (_, after) in enumerate(links))
    tensors = {
        "output.weight.lora_a": ((width, len(links)), tiny_gguf.build_sparse_matrix(width, len(links), befores)),
        "output.weight.lora_b": (
            (len(links), vocabulary),
            tiny_gguf.build_sparse_matrix(len(links), vocabulary, afters),
        ),
    }
    Path(path).write_bytes(tiny_gguf.encode_file(metadata, tensors))
