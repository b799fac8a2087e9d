"""Splits bytes into pieces, as a network does."""

from __future__ import annotations


def cut(data: bytes, size: int) -> list[bytes]:
    """Pieces of this size."""
    return [data[at : at + size] for at in range(0, len(data), size)]
