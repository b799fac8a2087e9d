"""Writes GGUF files that are no models: vision projectors and importance matrices, as headers with one tensor."""

from __future__ import annotations

from pathlib import Path

from loadtest import tiny_gguf


def make_projector(path: Path, *, has_type: bool = True) -> Path:
    """Write a vision projector. Those of older converters have no `general.type`."""
    kind: dict[str, tiny_gguf.Value] = {"general.type": "mmproj"} if has_type else {}
    metadata: dict[str, tiny_gguf.Value] = {
        "general.architecture": "clip",
        **kind,
        "clip.has_vision_encoder": True,
        "clip.vision.projection_dim": 64,
        "clip.vision.block_count": 1,
    }
    path.write_bytes(tiny_gguf.encode_file(metadata, {"mm.0.weight": ((8, 8), bytes(256))}))
    return path


def make_imatrix(path: Path) -> Path:
    """Write an importance matrix, as llama-imatrix does; it has no architecture."""
    metadata: dict[str, tiny_gguf.Value] = {"general.type": "imatrix", "imatrix.chunk_count": 1}
    path.write_bytes(tiny_gguf.encode_file(metadata, {"blk.0.attn_q.weight.in_sum2": ((8, 1), bytes(32))}))
    return path
