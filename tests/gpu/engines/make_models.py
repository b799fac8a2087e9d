"""Makes models with random weights, started by path, and measures the device. Prints one line of JSON.

    make_models.py FOLDER --models '{"small": {...}}' --device cuda

Each model is a folder with config.json and model.safetensors (bfloat16), laid out as transformers' Llama and Qwen2
expect it. With --device none the file has a header and no data (a sparse file), and torch is not needed.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

COPY_BYTES, COPIES = 1 << 30, 4
SCALE = 0.02
"""Standard deviation of the random weights, as in transformers' initialisation."""

Shapes = dict[str, tuple[int, ...]]


def config(shape: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a Llama or Qwen2 model."""
    qwen = shape["kind"] == "qwen2"
    return {
        "architectures": ["Qwen2ForCausalLM" if qwen else "LlamaForCausalLM"],
        "model_type": shape["kind"],
        "hidden_size": shape["width"],
        "intermediate_size": shape["inner"],
        "num_hidden_layers": shape["layers"],
        "num_attention_heads": shape["width"] // 128,
        "num_key_value_heads": shape["rows"],
        "head_dim": 128,
        "vocab_size": shape["vocabulary"],
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def tensors(shape: dict[str, Any]) -> Shapes:
    """Name -> shape of every parameter."""
    width, inner, rows = shape["width"], shape["inner"], 128 * shape["rows"]
    found: Shapes = {"model.embed_tokens.weight": (shape["vocabulary"], width)}
    for layer in range(shape["layers"]):
        at = f"model.layers.{layer}."
        found |= {
            at + "self_attn.q_proj.weight": (width, width),
            at + "self_attn.k_proj.weight": (rows, width),
            at + "self_attn.v_proj.weight": (rows, width),
            at + "self_attn.o_proj.weight": (width, width),
            at + "mlp.gate_proj.weight": (inner, width),
            at + "mlp.up_proj.weight": (inner, width),
            at + "mlp.down_proj.weight": (width, inner),
            at + "input_layernorm.weight": (width,),
            at + "post_attention_layernorm.weight": (width,),
        }
        if shape["kind"] == "qwen2":
            found |= {
                at + "self_attn.q_proj.bias": (width,),
                at + "self_attn.k_proj.bias": (rows,),
                at + "self_attn.v_proj.bias": (rows,),
            }
    return found | {"model.norm.weight": (width,), "lm_head.weight": (shape["vocabulary"], width)}


def make(folder: Path, shape: dict[str, Any], device: str) -> int:
    """Write the model; return the size of its weights in bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(shape)))
    shapes, at, header = tensors(shape), 0, dict[str, object]()
    for name, one in shapes.items():
        size = 2 * math.prod(one)
        header[name] = {"dtype": "BF16", "shape": list(one), "data_offsets": [at, at + size]}
        at += size
    head = json.dumps(header).encode()
    head += b" " * (-(8 + len(head)) % 256)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        if device == "none":
            file.truncate(8 + len(head) + at)
        else:
            for piece in random_pieces(shapes, device):
                file.write(piece)
    return at


def random_pieces(shapes: Shapes, device: str) -> Iterator[memoryview]:
    """The bytes of each tensor, in order."""
    import torch

    torch.manual_seed(28)
    for name, shape in shapes.items():
        if "norm" in name:
            made = torch.ones(shape, dtype=torch.bfloat16)
        else:
            made = torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(SCALE)
        yield memoryview(made.cpu().view(torch.uint8).numpy().reshape(-1))


def rate(device: str) -> float:
    """Bytes per second from pinned host memory to the device, the best of some copies; 0: there is no device."""
    if not device.startswith("cuda"):
        return 0.0
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    best_s = math.inf
    for _ in range(COPIES):
        began_s = time.monotonic()
        target.copy_(host)
        torch.cuda.synchronize()
        best_s = min(best_s, time.monotonic() - began_s)
    return COPY_BYTES / best_s


def import_transformers() -> str:
    """Import what the engine imports, so that no cold start compiles it or reads it from disk; return the version."""
    import transformers
    from transformers.cache_utils import StaticCache

    kinds = (StaticCache, transformers.LlamaForCausalLM, transformers.Qwen2ForCausalLM)
    return f"{transformers.__version__} with {', '.join(kind.__name__ for kind in kinds)}"


def main(argv: list[str]) -> None:
    """Make all models."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", type=json.loads, required=True)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args(argv)
    found: dict[str, object] = {"copy_bytes_per_s": rate(arguments.device)}
    if arguments.device.startswith("cuda"):
        import torch

        found["torch"] = torch.__version__
        found["capability"] = list(torch.cuda.get_device_capability())
        found["torch_total_bytes"] = torch.cuda.mem_get_info()[1]
        found["transformers"] = import_transformers()
    began_s = time.monotonic()
    found["weights_bytes"] = {
        name: make(arguments.folder / name, shape, arguments.device) for name, shape in arguments.models.items()
    }
    print(json.dumps(found | {"made_s": time.monotonic() - began_s}))


if __name__ == "__main__":
    main(sys.argv[1:])
