"""Weight files with only the first bytes valid: content of the right length that passes as a file of its format."""

from __future__ import annotations


def as_gguf(content: bytes) -> bytes:
    """The content, starting like a GGUF file."""
    return b"GGUF" + content[4:]


def as_safetensors(content: bytes) -> bytes:
    """The content, starting with an empty header."""
    return (2).to_bytes(8, "little") + b"{}" + content[10:]
